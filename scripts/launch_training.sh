#!/bin/sh
# Trains on all GPUs of this machine, or on its CPU, as a configuration says; --help has the options.
#   scripts/launch_training.sh --config configs/config.yaml
# Python is $PYTHON, else .venv's, which `make setup` makes, else python3 with torch.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || {
    echo "error: $python has no torch: run make setup in $root" >&2
    exit 78
}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m distlab train "$@" # so that signals reach torchrun
