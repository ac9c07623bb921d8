"""Send a training's history to MLflow, Weights & Biases or Trackio, without the run ever waiting for them.

Begin at `feed.feed`, which reads a run's directory and feeds one tracker, in a process of its own; `clients.py` has
the trackers' packages. `process.py` starts these processes for the driver. `tensorboard.py` writes TensorBoard's
files. The docs begin at docs/trackers.md.
"""
