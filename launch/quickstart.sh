#!/usr/bin/env bash
# Trains the embedded model on a CPU in minutes and reports what it learned: bash launch/quickstart.sh
# Any option is passed on: --model NAME_OR_PATH, or a field of launch/recipes/quickstart.yaml such as --max_steps 40.
# Run it again at any time: the environment and the model are kept, and each run gets its own folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"

# The embedded model and its prompts need no network; another model may have to be fetched.
case " $* " in
    *" --model"* | *" --config"*) ;;
    *) export HF_HUB_OFFLINE=1 ;;
esac
export TOKENIZERS_PARALLELISM=false
# The libraries' deprecation warnings about each other would tear the progress bar.
export PYTHONWARNINGS="ignore::FutureWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"
# Keep freed memory: on a CPU each step otherwise asks the kernel for the same gigabytes again.
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_:-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-8000000000}"
export MALLOC_TOP_PAD_="${MALLOC_TOP_PAD_:-268435456}"
exec "${TRL_EXT_VENV:-$root/.venv}/bin/python" "$root/launch/quickstart.py" "$@"
