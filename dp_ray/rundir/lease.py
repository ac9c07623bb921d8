"""The lease of a run: its driver renews it, so that a second driver knows whether the first is alive."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.rundir.claim import RunDir, is_ours
from dp_ray.storage import Storage
from dp_ray.system.process import Process, is_dead, machine, this_process

LEASE = "lease.json"
RENEW_SECONDS = 5.0
TELL_SECONDS = 1.0  # between two checks of the steps done, on local disks, where a write is cheap
EXPIRE_SECONDS = 30.0
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Lease:
    """The driver, its claim's token, the number of renewals, and the steps done at the last renewal."""

    driver: Process
    token: str
    renewals: int = 0
    step: int = 0


def wait_until_free(run: Storage, say: Callable[[str], None]) -> Lease | None:
    """Wait until no other driver is active in the run directory; return the last one's lease if it was killed.

    Raises JobError as soon as another driver is known to be alive: at once on the same host, else when it renews its
    lease.
    """
    seen = _read(run)
    if seen is None or is_dead(seen.driver):
        return seen
    if seen.driver.machine == machine():
        raise _alive(run, seen)
    say(f"waiting up to {EXPIRE_SECONDS:g} s for the lease of {seen.driver}, which may be alive")
    until = time.monotonic() + EXPIRE_SECONDS
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        now = _read(run)
        if now is None:
            return None
        if now != seen:
            raise _alive(run, now)
    return seen


@contextmanager
def held(claimed: RunDir, steps_done: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold the lease of a claimed run directory while the block runs, and renew it in the background.

    It records how many steps are done, for the next driver in case this one is killed.
    """
    ended = threading.Event()
    lease = Lease(this_process(), claimed.token)
    _write(claimed.storage, lease)
    looks = RENEW_SECONDS if claimed.storage.is_atomic else min(TELL_SECONDS, RENEW_SECONDS)

    def renew() -> None:
        renewed, due = lease, time.monotonic() + RENEW_SECONDS
        while not ended.wait(looks):
            step = steps_done()
            if step == renewed.step and time.monotonic() < due:
                continue
            due = time.monotonic() + RENEW_SECONDS
            renewed = replace(renewed, renewals=renewed.renewals + 1, step=step)
            with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
                if not is_ours(claimed):
                    return
                _write(claimed.storage, renewed)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(StorageError):
            if is_ours(claimed):
                claimed.storage.delete(LEASE)


def last_alive(run: Storage) -> tuple[bool, datetime | None]:
    """Whether a driver seems to be active in the run directory, and when it last wrote its lease."""
    lease, heard = _read(run), run.modified(LEASE)
    if lease is None or heard is None or is_dead(lease.driver):
        return False, heard
    is_here = lease.driver.machine == machine()
    return is_here or datetime.now(UTC) - heard < timedelta(seconds=EXPIRE_SECONDS), heard


def _alive(run: Storage, lease: Lease) -> JobError:
    return JobError(
        f"{run} is being run by {lease.driver}, which is alive: wait for its end, end it, "
        "or give this run another name (--name, name=)"
    )


def _read(run: Storage) -> Lease | None:
    """Read the run's lease; None if it is missing or damaged."""
    if not run.exists(LEASE):
        return None
    try:
        values: dict[str, Any] = json.loads(run.read_text(LEASE))
        return Lease(Process(**values.pop("driver")), **values)
    except (StorageError, ValueError, KeyError, TypeError):
        return None


def _write(run: Storage, lease: Lease) -> None:
    run.write_text(LEASE, json.dumps(asdict(lease)) + "\n")
