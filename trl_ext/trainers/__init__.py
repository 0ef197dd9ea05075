"""Subclasses of TRL's trainers; file names mirror `trl/trainer/`."""
