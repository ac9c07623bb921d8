"""Shards that run once more, beside the work, to learn something.

`rows.py` tells which outputs have rows, `measures.py` how losses and metrics read them, and `memory.py` whether the
devices hold a step.
"""
