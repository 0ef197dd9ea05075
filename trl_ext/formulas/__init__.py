"""Pure tensor mathematics: every formula of the package, free of configs, trainers and models.

Nothing here imports `trl` or `transformers`. Shapes in the docstrings: B sequences, T tokens, N completions in N/G
groups of G, F reward columns, M ensemble members. Masks are 1 for a real token, and nothing under mask 0 may change
any output or gradient.
"""
