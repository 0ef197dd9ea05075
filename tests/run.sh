#!/usr/bin/env bash
# Sets the environment up, then lints, type-checks and tests, without network.
# Usage: tests/run.sh [all] [pytest arguments]     `all` adds the tests marked slow
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
venv="${TRL_EXT_VENV:-$PWD/.venv}"
# First on PATH: DeepSpeed rebuilds its operators whenever it meets another ninja.
export PATH="$venv/bin:$PATH"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
# Two workers with one thread each are faster than two that fight over the cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
# pytest keeps this folder, so the embedded model is converted once per checkout.
export TRL_EXT_HOME="${TRL_EXT_HOME:-$PWD/.pytest_cache/trl_ext}"

selection=(-m "not slow")
if [[ "${1:-}" == "all" ]]; then
    selection=()
    shift
fi

ruff check .
ruff format --check .
mypy
exec "$venv/bin/python" -m pytest -n 2 --dist loadgroup ${selection[@]+"${selection[@]}"} "$@"
