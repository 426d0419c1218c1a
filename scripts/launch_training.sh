#!/bin/sh
# Trains on all GPUs of this machine, or on its CPU, as a configuration says; --help has the options.
#   scripts/launch_training.sh --config configs/config.yaml
# Python is $PYTHON, else .venv's, which `make setup` makes. exec: signals reach torchrun.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ ! -x "$python" ]; then
    python=$(command -v "${PYTHON:-python3}") || {
        echo "error: there is no Python: run make setup in $root" >&2
        exit 78
    }
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m distlab.production.launching "$@"
