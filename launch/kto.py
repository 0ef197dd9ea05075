"""KTO training with TRL's trainer, for data of the form (prompt, completion, label: acceptable or not).

One process:     python launch/kto.py --config FILE.yaml [--option value ...]
Several:         trl-ext kto --config FILE.yaml --accelerate_config zero2 [--option value ...]
"""

from trl_ext.scripts import run_training_script

if __name__ == "__main__":
    run_training_script("kto")
