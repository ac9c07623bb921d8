"""Stop a run from elsewhere: its driver stops it at a step's border, and keeps all of it. It imports no torch."""

import time
from collections.abc import Callable

from dp_ray.errors import Error, JobError, RunInterrupted
from dp_ray.rundir.files import RESULT, RUN, SWEEP, damage_told, read_json
from dp_ray.rundir.lease_file import LEASE, Lease, is_alive, read_lease
from dp_ray.rundir.stop_request import leave_request
from dp_ray.storage import Storage
from dp_ray.text import listed

LOOK_SECONDS = 0.5
FAILED = "it failed"


def stop_run(run_dir: str, waits: bool, say: Callable[[str], None]) -> str:
    """Ask the driver of a running run to stop it, wait for it if it `waits`, and return what became of the run.

    Raises JobError if nobody runs the run, or if it is a sweep, Error if it failed or its driver was killed
    meanwhile, and StorageError if its directory cannot be read or written to.
    """
    run = Storage(run_dir)
    if run.exists(SWEEP) and not run.exists(RUN):
        raise JobError(f"{run} is a sweep: stop the run of a trial of it ({_running(run)}), and the sweep stops too")
    lease = read_lease(run)
    if lease is None or not is_alive(lease, run.modified(LEASE)):
        raise JobError(f"{run} is not running: {_state(run)}")
    leave_request(run, lease.token)
    say(f"asked {lease.driver} to stop after its current step")
    if not waits:
        return "it was asked to stop"
    while (now := read_lease(run)) is not None and now.token == lease.token:
        if not _is_heard(run, now):
            raise Error(f"{lease.driver} has ended without a word, {_state(run)}")
        time.sleep(LOOK_SECONDS)
    if (state := _state(run)).startswith(FAILED):
        raise Error(state)
    return state


def _running(sweep: Storage) -> str:
    with damage_told(f"{sweep}/{SWEEP}"):
        trials = read_json(sweep, SWEEP)["trials"]
        return listed(one["run"] for one in trials if one["state"] == "running") or "none is running"


def _is_heard(run: Storage, lease: Lease) -> bool:
    """Whether the driver is alive; one on another machine is taken for dead if it has not renewed its lease."""
    return is_alive(lease, run.modified(LEASE))


def _state(run: Storage) -> str:
    """What became of a run that nobody runs now."""
    if not run.exists(RUN):
        return "there is no run"
    result = read_json(run, RESULT) if run.exists(RESULT) else {}
    status, error = result.get("status"), str(result.get("error"))
    if status == "interrupted":
        return error.removeprefix(f"{RunInterrupted.__name__}: ")
    if status == "failed":
        return f"{FAILED}: {error}"
    return "it is done" if status == "done" else "it is unfinished; dp-ray report tells what it has kept"
