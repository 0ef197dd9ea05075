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
# Threads that spin while they wait make a step several times slower as soon as anything else uses the CPU.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
exec "${TRL_EXT_VENV:-$root/.venv}/bin/python" "$root/launch/quickstart.py" "$@"
