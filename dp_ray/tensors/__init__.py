"""Nested tensors, and tensors in files: all that needs neither a model nor a process group.

`tree.py` takes a nesting apart and rebuilds it; begin there, with `flatten` and `unflatten`. `scatter.py` cuts
batches into shards and gathers outputs. `files.py` reads and writes safetensors files.
The docs begin at docs/glossary.md, which defines shard and row.
"""
