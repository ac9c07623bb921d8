"""The program `dp-ray`: its commands, their options, and how an error ends it.

Begin at `main.main`. Each command imports what it needs when it runs, so that `--help` takes no seconds. `options.py`
has what several commands share. `begin.py` and `completion.py` have the commands to begin with. `sweep.py`,
`remote.py`, `places.py` and `runs.py` have the commands for sweeps, for submitted jobs, for hosts and Slurm, and for
showing runs. The docs begin at docs/commands.md.
"""
