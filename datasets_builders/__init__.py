"""Builders that turn prompts into TRL data sets."""
