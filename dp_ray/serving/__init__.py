"""The calls of parallel modules, on a worker or in the caller's process.

Begin with `served.py`, which runs their shards. `wire.py` has the messages, `shipped.py` says what a module is made
of, and `here.py` serves with `workers: 0`. The task of a worker on Ray is `tasks/serve.py`.
"""
