"""A job: its keys with their checks, the job file, the targets that it names, and the order of its samples.

Begin at `job.Job`. `keys.py` has each key with its type, default and meaning; `errors.py` explains a wrong one.
`files.py` makes a job of a file or of keywords, `targets.py` imports what it names, `plan.py` computes its plan from
the lengths of its datasets, and `samples.py` orders them. The docs begin at docs/job-file.md.
"""
