"""GRPO training with trl_ext's trainer; the options are TRL's plus GRPOConfig's own.

One process:     python launch/grpo.py --config FILE.yaml [--option value ...]
Several:         trl-ext grpo --config FILE.yaml --accelerate_config zero2 [--option value ...]
"""

from datasets_builders.embedded_prompts import prepare_embedded_prompts
from trl_ext.scripts import run_training_script

if __name__ == "__main__":
    run_training_script("grpo", datasets={"embedded": prepare_embedded_prompts})
