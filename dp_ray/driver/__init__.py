"""Take a run from its job to its result, in the process that the user starts.

Begin at `run.execute`: prepare the job, claim its run directory, run the workers, and prove what they leave.
`sessions.py` keeps workers for several jobs; `from_run.py`, `replay.py` and `verify.py` start from an earlier run or
compare several. Read docs/contributing/how-it-runs.md first.
"""
