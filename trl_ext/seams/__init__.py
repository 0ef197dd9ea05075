"""The seam to TRL: the only package that knows TRL's private names.

TRL's trainers offer no public hooks, so the classes here override a handful of private methods, call `super()` in
each, and hand what they intercepted to hooks with public names. Nothing of TRL is copied: with no hook active every
override returns what TRL returns.
"""
