"""The process that dp_ray runs in: its identity, threads, signals and imports.

Begin at `process.this_process`. `threads.planned_stops` turns signals into stops, `imports.py` makes large imports
short, and `linux.py` has what other systems lack. Nothing here knows of jobs, torch or Ray. See docs/how-it-works.md.
"""
