"""Stop a run from elsewhere: its driver stops it at a step's border, and keeps all of it."""

import time
from collections.abc import Callable

from dp_ray.errors import JobError
from dp_ray.rundir.claim import is_finished, read_claim
from dp_ray.rundir.lease_file import LEASE, Lease, is_alive, read_lease
from dp_ray.rundir.stop_request import leave_request
from dp_ray.rundir.unfinished import unfinished
from dp_ray.storage import Storage

LOOK_SECONDS = 0.5


def stop_run(run_dir: str, waits: bool, say: Callable[[str], None]) -> str:
    """Ask the driver of a running run to stop it, wait for it if it `waits`, and return what became of the run.

    Raises JobError if nobody runs the run, and StorageError if its directory cannot be read or written to.
    """
    run = Storage(run_dir)
    lease = read_lease(run)
    if lease is None or not is_alive(lease, run.modified(LEASE)):
        raise JobError(f"{run} is not running: {_state(run, run_dir)}")
    leave_request(run, lease.token)
    say(f"asked {lease.driver} to stop after its current step")
    if not waits:
        return "it was asked to stop"
    while (now := read_lease(run)) is not None and now.token == lease.token:
        if not _is_heard(run, now):
            return f"{lease.driver} has ended without a word, {_state(run, run_dir)}"
        time.sleep(LOOK_SECONDS)
    return _state(run, run_dir)


def _is_heard(run: Storage, lease: Lease) -> bool:
    """Whether the driver is alive; one on another machine is taken for dead if it has not renewed its lease."""
    return is_alive(lease, run.modified(LEASE))


def _state(run: Storage, run_dir: str) -> str:
    if not read_claim(run):
        return "there is no run"
    if is_finished(run):
        return "it is done"
    return str(unfinished(run_dir) or "it is unfinished")
