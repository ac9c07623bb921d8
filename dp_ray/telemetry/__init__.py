"""The records of a run's steps: what each shard's model saw, how long each part of a step took, a training's numbers.

`shapes.py` is the worker's side and `reports.py` the driver's; begin at `shapes.py`, with `Probe` and `Recorder`.
`times.py` has the time of each step, the verdict on it, and the history.
The docs begin at docs/where-time-goes.md.
"""
