"""Send a training's history to MLflow, Weights & Biases or Trackio, without the run ever waiting for them.

Begin at `feed.Feed`: it feeds one tracker from a thread. `process.py` runs the tracker's package in a process of its
own, whose program is `child.py`. `tensorboard.py` writes TensorBoard's files. The docs begin at docs/trackers.md.
"""
