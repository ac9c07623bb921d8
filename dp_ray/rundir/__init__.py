"""The directory of a run: its files, who may write them, and what a run keeps to resume from.

Begin at `claim.py`, by which a driver takes a directory: `decide`, and then `claim`. `settled.py` has the job that
runs there, `lease.py` who runs it, `replaced.py` the run that was there before, and `unfinished.py` what a run has
kept that did not end. `checkpoint.py`, `history.py` and `ledger.py` keep a run's steps, `weights.py` its weights, and
`start.py` what it starts from; `files.py` names the files. See docs/contributing/how-it-runs.md.
"""
