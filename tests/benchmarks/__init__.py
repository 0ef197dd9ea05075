"""Measurements, run by hand with `python -m tests.benchmarks.<name>`; pytest collects none of them.

Every number depends on the machine, which each benchmark prints; tests never assert on these.
"""
