# Two commands: `make demo` and `make test`. Both set up .venv first, and only when something changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NOTEBOOKS := start.ipynb gpus.ipynb $(wildcard phase*/explore.ipynb)
SUITES := $(sort $(wildcard tests/test_phase*.py))
TESTS_AT_ONCE ?= 3# of two cores one would often wait: for a limit of time, a disk, a process that starts
PYTEST = $(BIN)/python -m pytest -rs -n $(TESTS_AT_ONCE) --no-loadscope-reorder --durations 10

# Suites that run side by side print one after the other, where this make can do that (4.0 and later).
WHOLE_OUTPUTS := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: setup demo lab lint format templates test test-all gpu solve docs clean help $(SUITES:%=solve-%)

help:
	@echo "make demo    train a model on real images with 1 and with 4 workers (under a minute)"
	@echo "make test    grade the solutions, run the tests (4 to 9 minutes on two cores)"
	@echo "make test-all    all tests, also those of whole programs on real processes (15 to 30 minutes)"
	@echo "make gpu     run the course on the NVIDIA GPUs of this host; figures in out/gpu"
	@echo "make lab     open the notebooks in JupyterLab"
	@echo "make lint    ruff and mypy          make format   let ruff rewrite the files, empty notebooks"
	@echo "make templates   carry signatures, docstrings and given code from the solutions over"
	@echo "make setup   only set up $(VENV)       make clean    remove $(VENV), out/ and caches"
	@echo "make docs    build the site of the course in out/site"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed and $(PYTHON) is older." \
	       "Name another one: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Could not create $(VENV). On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@[ "$$(uname -s)" != Linux ] || ls -d $(VENV)/lib*/python*/site-packages/torch >/dev/null 2>&1 || \
	  echo "Installing torch's default build, for NVIDIA GPUs. It takes about 5 GB;" \
	       "docs/install.md has the smaller CPU build: install that first."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --only-binary mpi4py,mpich \
	  --editable '.[mpi]' || \
	  echo "No mpi4py or mpich for this platform: everything works but --backend mpi."
	@$(BIN)/python -c 'from distlab.doctor import torch_build; print(torch_build())'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m distlab demo

lab: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebook]'
	$(BIN)/jupyter lab start.ipynb

# HOST_PYTHON=python3 names a Python that has torch. That torch stays, and .venv is not needed.
ifdef HOST_PYTHON
gpu:
	$(HOST_PYTHON) scripts/install_beside_torch.py
	PYTHONPATH=. $(HOST_PYTHON) benchmarks/gpu.py out/gpu
else
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py out/gpu
endif

templates: $(READY)
	@$(BIN)/python -m scripts.templates

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/nbstripout --keep-id $(NOTEBOOKS)

# Two tiers (tests/tiers.py says what belongs to which): a few minutes, and everything.
test test-all: export PYTHONDONTWRITEBYTECODE =# otherwise hundreds of processes compile the course
ifneq ($(wildcard solutions),)
test: solve
	$(PYTEST) tests/lab tests/wrong_answers # many small groups last: all processes end together

test-all: solve
	$(PYTEST) --all -p nbmake --nbmake $(NOTEBOOKS) tests/lab tests/wrong_answers

solve: $(READY)
	@$(MAKE) --no-print-directory --jobs $(TESTS_AT_ONCE) $(WHOLE_OUTPUTS) $(SUITES:%=solve-%)
else # the students' version
test test-all: $(READY)
	$(BIN)/python -m pytest $(SUITES)
endif

$(SUITES:%=solve-%): solve-%:
	$(BIN)/python -m pytest $* --impl solution

docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
