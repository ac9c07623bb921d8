"""What the process of a worker is set to while a job runs, and put back after it.

`settings.py` lists settings of Python and torch, each with one reader and one setter. `isolation.py` restores them
between two jobs, `modes.py` takes those of the caller to a worker, `determinism.py` sets those of a bitwise job.
`numerics.py` tells what a process computes on, and `profiling.py` records what it does.
"""
