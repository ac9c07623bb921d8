"""Trackers: a training's history in MLflow, Weights & Biases or Trackio, without the run ever waiting for them."""
