"""Run a job with several values of some of its keys; each combination, or each draw of a search, is a run of its own.

Begin at `run.run_sweep`. `define.py` says what a sweep is and parses `--over`; `record.py` keeps its trials in
`sweep.json`, and shows them; `search.py` has optuna draw values. The docs begin at docs/sweeps.md.
"""
