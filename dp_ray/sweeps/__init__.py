"""Sweeps: a job with several values of some of its keys, each combination a run of its own."""
