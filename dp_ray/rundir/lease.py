"""The lease of a run: its driver renews it, so that a second driver knows whether the first is alive."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from dp_ray.errors import JobError, StorageError
from dp_ray.rundir.claim import RunDir, is_ours
from dp_ray.rundir.lease_file import EXPIRE_SECONDS, LEASE, Lease, read_lease, write_lease
from dp_ray.rundir.stop_request import take_request
from dp_ray.storage import Storage
from dp_ray.system.process import is_dead, machine, this_process
from dp_ray.system.repeating import repeated
from dp_ray.system.stop_signals import has_begun

RENEW_SECONDS = 5.0
TELL_SECONDS = 1.0  # between two checks of the steps done, on local disks, where a write is cheap
LOOK_SECONDS = 0.5


def wait_until_free(run: Storage, say: Callable[[str], None]) -> Lease | None:
    """Wait until no other driver is active in the run directory; return the last one's lease if it was killed.

    Raises JobError as soon as another driver is known to be alive: at once on the same host, else when it renews its
    lease.
    """
    seen = read_lease(run)
    if seen is None or is_dead(seen.driver):
        return seen
    if seen.driver.machine == machine():
        raise _alive(run, seen)
    say(f"waiting up to {EXPIRE_SECONDS:g} s for the lease of {seen.driver}, which may be alive")
    until = time.monotonic() + EXPIRE_SECONDS
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        now = read_lease(run)
        if now is None:
            return None
        if now != seen:
            raise _alive(run, now)
    return seen


@contextmanager
def held(claimed: RunDir, steps_done: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold the lease of a claimed run directory while the block runs, and renew it in the background.

    It records how many steps are done, for the next driver in case this one is killed. At the end, a request to stop
    that came too late is removed.
    """
    try:
        with kept(claimed.storage, claimed.token, lambda: is_ours(claimed), steps_done):
            yield
    finally:
        take_request(claimed.storage, claimed.token)


@contextmanager
def kept(
    folder: Storage, token: str, is_still_ours: Callable[[], bool], steps_done: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Hold the lease of a folder while the block runs, as long as the folder is this driver's."""
    has_begun()
    lease, due = Lease(this_process(), token), time.monotonic() + RENEW_SECONDS
    write_lease(folder, lease)
    looks = RENEW_SECONDS if folder.is_atomic else min(TELL_SECONDS, RENEW_SECONDS)

    def renew() -> None:
        nonlocal lease, due
        step = steps_done()
        if step == lease.step and time.monotonic() < due:
            return
        due = time.monotonic() + RENEW_SECONDS
        lease = replace(lease, renewals=lease.renewals + 1, step=step)
        with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            if is_still_ours():
                write_lease(folder, lease)

    try:
        with repeated("lease", looks, renew):
            yield
    finally:
        with suppress(StorageError):
            if is_still_ours():
                folder.delete(LEASE)


def _alive(run: Storage, lease: Lease) -> JobError:
    return JobError(
        f"{run} is being run by {lease.driver}, which is alive: wait for its end, end it, "
        "or give this run another name (--name, name=)"
    )
