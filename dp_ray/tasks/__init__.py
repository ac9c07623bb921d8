"""The tasks of a job on one worker, without Ray: train, predict, evaluate, and finding the number of shards.

Begin with `task.py`: `run_task` runs a job's task, from its dataset to its committed files. `train.py`, `predict.py`
and `evaluate.py` are the tasks, `loop.py` the loop that they share; `setup.py` has what they begin with, and
`checkpoints.py` what they keep. `own_loop.py` is a training by a loop of the user's. `serve.py` is the task of
parallel modules, whose calls are in `serving/`.
The docs begin at docs/contributing/how-it-runs.md.
"""
