"""The directory of a run: its files, who may write them, and what a run keeps to resume from.

Begin at `claim.claim`, by which a driver takes a directory. `checkpoint.py`, `history.py` and `ledger.py` keep a
run's steps; `files.py` names the files. See docs/how-it-works.md.
"""
