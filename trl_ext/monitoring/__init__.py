"""Trainer callbacks that watch and record a run."""
