"""The records of a run's steps: what each shard's model saw, how long each part of a step took, a training's numbers.

`shapes.py` is the worker's side and `reports.py` the driver's; begin at `shapes.py`, with `Probe` and `Recorder`.
`times.py` has the time of each step, and the verdict on it.
The docs begin at docs/seeing-a-run.md.
"""
