"""Who drives a run: a lease that its driver renews, so that a second one knows whether the first is alive."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.rundir.claim import RunDir, is_ours
from dp_ray.storage import Storage
from dp_ray.system.process import Process, is_dead, machine, this_process

LEASE = "lease.json"
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 30.0
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Lease:
    """Who drives, and how often that was renewed."""

    driver: Process
    token: str
    renewals: int = 0


def wait_until_free(run: Storage, say: Callable[[str], None]) -> None:
    """Return once no other driver is at work in the run directory.

    Raises JobError as soon as one is known to be alive: at once on its own host, else when it renews its lease.
    """
    seen = _read(run)
    if seen is None or is_dead(seen.driver):
        return
    if seen.driver.machine == machine():
        raise _alive(run, seen)
    say(f"waiting up to {EXPIRE_SECONDS:g} s for the lease of {seen.driver}, which may be alive")
    until = time.monotonic() + EXPIRE_SECONDS
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        now = _read(run)
        if now is None:
            return
        if now != seen:
            raise _alive(run, now)


@contextmanager
def held(claimed: RunDir) -> Iterator[None]:
    """Hold the lease of a claimed run directory while the block runs; it is renewed in the background."""
    ended = threading.Event()
    lease = Lease(this_process(), claimed.token)
    _write(claimed.storage, lease)

    def renew() -> None:
        renewed = lease
        while not ended.wait(RENEW_SECONDS):
            renewed = replace(renewed, renewals=renewed.renewals + 1)
            with suppress(StorageError):  # a full disk is for those to tell who keep what counts
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


def _alive(run: Storage, lease: Lease) -> JobError:
    return JobError(
        f"{run} is being run by {lease.driver}, which is alive: wait for its end, end it, "
        "or give this run another name (--name, name=)"
    )


def _read(run: Storage) -> Lease | None:
    """The lease that lies there; None where there is none, or a damaged one."""
    if not run.exists(LEASE):
        return None
    try:
        values: dict[str, Any] = json.loads(run.read_text(LEASE))
        return Lease(Process(**values.pop("driver")), **values)
    except (StorageError, ValueError, KeyError, TypeError):
        return None


def _write(run: Storage, lease: Lease) -> None:
    run.write_text(LEASE, json.dumps(asdict(lease)) + "\n")
