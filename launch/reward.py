"""Reward-model training with trl_ext's trainer; the options are TRL's plus RewardConfig's own.

One process:     python launch/reward.py --config FILE.yaml [--option value ...]
Several:         trl-ext reward --config FILE.yaml --accelerate_config zero2 [--option value ...]
"""

from trl_ext.scripts import run_training_script

if __name__ == "__main__":
    run_training_script("reward")
