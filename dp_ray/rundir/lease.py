"""The lease of a run, which says which driver runs it and whether that seems to be alive; it imports no torch.

A driver waits until the last one's lease is free (`wait_until_free`), and holds its own while it runs (`held`).
`stop_run` stops a run or a sweep from elsewhere: it leaves a request in the directory. The driver stops the run at a
step's border, and keeps it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from dp_ray.errors import STOP_COMMAND, STOP_TO_RUN_AGAIN, Error, JobError, RunInterrupted, StorageError
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import RESULT_JSON, RUN, SWEEP, SWEEP_JSON, runs_there
from dp_ray.storage import Storage
from dp_ray.system.linux import machine
from dp_ray.system.process import Process, is_dead, this_process
from dp_ray.system.threads import has_begun, repeated
from dp_ray.text import counted

LEASE = "lease.json"
REQUEST = "stop.json"
EXPIRE_SECONDS = 30.0
RENEW_SECONDS = 5.0
TELL_SECONDS = 1.0  # between two checks of the steps done, on local disks, where a write is cheap
LOOK_SECONDS = 0.5
FAILED, ASKED, DONE = "it failed", "it was asked to stop", "it is done"


@dataclass(frozen=True)
class Lease:
    """The driver, its claim's token, the number of renewals, and the steps done at the last renewal."""

    driver: Process
    token: str
    renewals: int = 0
    step: int = 0


@dataclass(frozen=True)
class StopRequest:
    """A request to the driver whose claim has this token, and who asks; `again`: its launcher is to run it again."""

    token: str
    by: str
    again: bool = False

    @property
    def name(self) -> str:
        """The command that left it."""
        return STOP_TO_RUN_AGAIN if self.again else STOP_COMMAND


# A driver that is killed while it writes leaves the last lease, and a damaged one is nobody's.
LEASE_JSON = Record[Lease | None](Lease, LEASE, missing=None, damaged=IGNORE, hides=False)
REQUEST_JSON = Record[StopRequest | None](StopRequest, REQUEST, missing=None, damaged=IGNORE, hides=False)


def last_alive(run: Storage) -> tuple[bool, datetime | None]:
    """Return whether a driver seems to be active in the run directory, and when it last wrote its lease."""
    lease, heard = LEASE_JSON.read(run), run.modified(LEASE)
    return is_alive(lease, heard), heard


def is_alive(lease: Lease | None, heard: datetime | None) -> bool:
    """Return whether the driver of a lease, which it wrote at `heard`, seems to be active.

    On another machine it counts as dead if it has not renewed its lease.
    """
    if lease is None or heard is None or is_dead(lease.driver):
        return False
    return lease.driver.machine == machine() or datetime.now(UTC) - heard < timedelta(seconds=EXPIRE_SECONDS)


def wait_until_free(run: Storage, say: Callable[[str], None]) -> Lease | None:
    """Wait until no other driver is active in the run directory; return the last one's lease if it was killed.

    Raises JobError as soon as another driver is known to be alive: at once on the same host, else when it renews its
    lease.
    """
    seen = now = LEASE_JSON.read(run)
    if seen is None or is_dead(seen.driver):
        return seen
    is_here = seen.driver.machine == machine()
    # The clocks of two machines differ, so its time says nothing: it is alive if it renews the lease meanwhile.
    until = time.monotonic() + EXPIRE_SECONDS
    if not is_here:
        say(f"waiting up to {EXPIRE_SECONDS:g} s for the lease of {seen.driver}, which may be alive")
    while not is_here and now == seen and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        now = LEASE_JSON.read(run)
    if now is not None and (is_here or now != seen):
        raise JobError(
            f"{run} is being run by {now.driver}, which is alive: wait for its end, end it, "
            "or give this run another name (--name, name=)"
        )
    return now


@contextmanager
def held(
    folder: Storage, token: str, is_ours: Callable[[], bool], steps_done: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Hold the lease of a folder while the block runs, as long as the folder `is_ours`; renew it in the background.

    It records how many steps are done, for the next driver in case this one is killed. At the end, a request to stop
    that came too late is removed.
    """
    has_begun()
    lease, due = Lease(this_process(), token), time.monotonic() + RENEW_SECONDS
    LEASE_JSON.write(folder, lease)
    looks = RENEW_SECONDS if folder.is_atomic else min(TELL_SECONDS, RENEW_SECONDS)

    def renew() -> None:
        nonlocal lease, due
        step = steps_done()
        if step == lease.step and time.monotonic() < due:
            return
        due = time.monotonic() + RENEW_SECONDS
        lease = replace(lease, renewals=lease.renewals + 1, step=step)
        with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            if is_ours():
                LEASE_JSON.write(folder, lease)

    try:
        with repeated("lease", looks, renew):
            yield
    finally:
        with suppress(StorageError):
            if is_ours():
                folder.delete(LEASE)
        take_request(folder, token)


def lost(folder: Storage, name: str) -> str:
    """Return why a folder is not this driver's any more, which keeps its claim in the file `name`."""
    if folder.exists(name):
        return f"{folder} was taken over by another driver, which was started after this one"
    return (
        f"{folder} was removed while this driver ran in it: its {name} is gone, and what was kept with it; "
        "run it again, and leave the folder until its end"
    )


def leave_request(run: Storage, token: str, again: bool = False) -> None:
    """Ask the driver whose claim has this token to stop; another driver of the run does not heed it."""
    REQUEST_JSON.write(run, StopRequest(token, str(this_process()), again))


def take_request(run: Storage, token: str) -> StopRequest | None:
    """Return the request to the driver of this token to stop, None if there is none; it is removed."""
    with suppress(StorageError):
        if request := REQUEST_JSON.read(run):
            run.delete(REQUEST)
            return request if request.token == token else None
    return None


def stop_run(run_dir: str, waits: bool, say: Callable[[str], None], again: bool = False) -> str:
    """Ask the driver of a running run or sweep to stop, wait for it if it `waits`, and return what became of it.

    With `again` the driver ends with the exit status that has its launcher run it again.
    Raises JobError if nobody runs it, Error if it failed or its driver was killed meanwhile, and StorageError if its
    directory cannot be read or written to.
    """
    run = Storage(run_dir)
    lease = LEASE_JSON.read(run)
    if lease is None or not is_alive(lease, run.modified(LEASE)):
        raise JobError(f"{run} is not running: {_state(run)}")
    if run.exists(SWEEP) and not run.exists(RUN):
        return _stop_sweep(run, lease, waits, say, again)
    leave_request(run, lease.token, again)
    say(f"asked {lease.driver} to stop after its current step")
    if not waits:
        return ASKED
    while _is_held(run, lease):
        time.sleep(LOOK_SECONDS)
    state = _state(run)
    if state.startswith(FAILED):
        raise Error(state)
    return "it came to its end before it could stop, and is done" if state == DONE else state


def _stop_sweep(sweep: Storage, lease: Lease, waits: bool, say: Callable[[str], None], again: bool) -> str:
    """Ask for the runs of a sweep's trials until the sweep ends: one that is stopped stops the sweep.

    A trial that ends just then is followed by the next one, which is asked for too.
    """
    asked: set[str] = set()
    while _is_held(sweep, lease):
        trials = SWEEP_JSON.read(sweep).trials
        for run in (sweep.parent.child(trial.run) for trial in trials if trial.state == "running"):
            now = LEASE_JSON.read(run)
            if now is not None and now.token not in asked and is_alive(now, run.modified(LEASE)):
                leave_request(run, now.token, again)
                say(f"asked {now.driver} to stop {run} after its current step")
                asked.add(now.token)
        if asked and not waits:
            return ASKED
        time.sleep(LOOK_SECONDS)
    return _state(sweep)


def _is_held(run: Storage, lease: Lease) -> bool:
    """Return whether the driver still holds its lease; raises Error if it has ended without giving it back."""
    heard, now = run.modified(LEASE), LEASE_JSON.read(run)
    if heard is None or now is None or now.token != lease.token:
        return False
    if not is_alive(now, heard):
        raise Error(f"{lease.driver} has ended without a word, {_state(run)}")
    return True


def _state(run: Storage) -> str:
    """Return what became of a run or a sweep that nobody runs now."""
    if run.exists(SWEEP) and not run.exists(RUN):
        states = [trial.state for trial in SWEEP_JSON.read(run).trials]
        done = states.count("done")
        text = f"{done} of its {counted(len(states), 'trial')} are done"
        return text if done == len(states) else f"{text}; the same command goes on"
    if not run.exists(RUN):
        return f"there is no run{runs_there(run)}"
    result = RESULT_JSON.read(run)
    status, error = result.get("status"), str(result.get("error"))
    if status == "interrupted":
        return error.removeprefix(f"{RunInterrupted.__name__}: ")
    if status == "failed":
        return f"{FAILED}: {error}"
    return DONE if status == "done" else "it is unfinished; dp-ray report tells what it has kept"
