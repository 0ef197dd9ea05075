"""Evaluation of trained policies."""
