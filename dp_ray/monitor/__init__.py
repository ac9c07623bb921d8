"""Follow a run on the driver, without Ray: take in the workers' messages and show how the job goes.

Begin at `monitor.Monitor.take`: it dispatches on the messages of `dp_ray/messages.py`. `console.py` shows progress,
`watchdog.py` finds workers that hang, `attempts.py` keeps the state of each attempt, `faults.py` parses `--inject`,
`gauges.py` names what Prometheus gets.
`in_process.py` is the worker of `workers: 0`: it stands here because sessions and modules, which may not import the
driver, have it too.
See docs/contributing/how-it-runs.md.
"""
