"""Stop a run or a sweep from elsewhere: its driver stops it at a step's border, and keeps it. It imports no torch."""

import time
from collections.abc import Callable

from dp_ray.errors import Error, JobError, RunInterrupted
from dp_ray.rundir.files import RESULT, RUN, SWEEP, damage_told, read_json
from dp_ray.rundir.lease_file import LEASE, Lease, is_alive, read_lease
from dp_ray.rundir.stop_request import leave_request
from dp_ray.storage import Storage
from dp_ray.text import counted

LOOK_SECONDS = 0.5
FAILED, ASKED = "it failed", "it was asked to stop"


def stop_run(run_dir: str, waits: bool, say: Callable[[str], None]) -> str:
    """Ask the driver of a running run or sweep to stop, wait for it if it `waits`, and return what became of it.

    Raises JobError if nobody runs it, Error if it failed or its driver was killed meanwhile, and StorageError if its
    directory cannot be read or written to.
    """
    run = Storage(run_dir)
    lease = read_lease(run)
    if lease is None or not _is_heard(run, lease):
        raise JobError(f"{run} is not running: {_state(run)}")
    if run.exists(SWEEP) and not run.exists(RUN):
        return _stop_sweep(run, lease, waits, say)
    leave_request(run, lease.token)
    say(f"asked {lease.driver} to stop after its current step")
    if not waits:
        return ASKED
    while _is_held(run, lease):
        time.sleep(LOOK_SECONDS)
    if (state := _state(run)).startswith(FAILED):
        raise Error(state)
    return state


def _stop_sweep(sweep: Storage, lease: Lease, waits: bool, say: Callable[[str], None]) -> str:
    """Ask for the runs of a sweep's trials until the sweep ends: one that is stopped stops the sweep.

    A trial that ends just then is followed by the next one, which is asked for too.
    """
    asked: set[str] = set()
    while _is_held(sweep, lease):
        with damage_told(f"{sweep}/{SWEEP}"):
            names = [one["run"] for one in read_json(sweep, SWEEP)["trials"] if one["state"] == "running"]
        for run in map(sweep.parent.child, names):
            now = read_lease(run)
            if now is not None and now.token not in asked and _is_heard(run, now):
                leave_request(run, now.token)
                say(f"asked {now.driver} to stop {run} after its current step")
                asked.add(now.token)
        if asked and not waits:
            return ASKED
        time.sleep(LOOK_SECONDS)
    return _state(sweep)


def _is_held(run: Storage, lease: Lease) -> bool:
    """Whether the driver still holds its lease; raises Error if it has ended without giving it back."""
    now = read_lease(run)
    if now is None or now.token != lease.token:
        return False
    if not _is_heard(run, now):
        raise Error(f"{lease.driver} has ended without a word, {_state(run)}")
    return True


def _is_heard(run: Storage, lease: Lease) -> bool:
    """Whether the driver is alive; one on another machine is taken for dead if it has not renewed its lease."""
    return is_alive(lease, run.modified(LEASE))


def _state(run: Storage) -> str:
    """What became of a run or a sweep that nobody runs now."""
    if run.exists(SWEEP) and not run.exists(RUN):
        return _state_of_sweep(run)
    if not run.exists(RUN):
        return "there is no run"
    result = read_json(run, RESULT) if run.exists(RESULT) else {}
    status, error = result.get("status"), str(result.get("error"))
    if status == "interrupted":
        return error.removeprefix(f"{RunInterrupted.__name__}: ")
    if status == "failed":
        return f"{FAILED}: {error}"
    return "it is done" if status == "done" else "it is unfinished; dp-ray report tells what it has kept"


def _state_of_sweep(sweep: Storage) -> str:
    with damage_told(f"{sweep}/{SWEEP}"):
        states = [one["state"] for one in read_json(sweep, SWEEP)["trials"]]
    told = f"{states.count('done')} of its {counted(len(states), 'trial')} are done"
    return told if states.count("done") == len(states) else f"{told}; the same command goes on"
