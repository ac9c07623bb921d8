"""The lease's file: which driver runs a run, and whether it seems to be alive."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.storage import Storage
from dp_ray.system.process import Process, is_dead, machine

LEASE = "lease.json"
EXPIRE_SECONDS = 30.0


@dataclass(frozen=True)
class Lease:
    """The driver, its claim's token, the number of renewals, and the steps done at the last renewal."""

    driver: Process
    token: str
    renewals: int = 0
    step: int = 0


def last_alive(run: Storage) -> tuple[bool, datetime | None]:
    """Whether a driver seems to be active in the run directory, and when it last wrote its lease."""
    lease, heard = read_lease(run), run.modified(LEASE)
    return is_alive(lease, heard), heard


def is_alive(lease: Lease | None, heard: datetime | None) -> bool:
    """Whether the driver of a lease, which it wrote at `heard`, seems to be active."""
    if lease is None or heard is None or is_dead(lease.driver):
        return False
    return lease.driver.machine == machine() or datetime.now(UTC) - heard < timedelta(seconds=EXPIRE_SECONDS)


def read_lease(run: Storage) -> Lease | None:
    """Read the run's lease; None if it is missing or damaged."""
    if not run.exists(LEASE):
        return None
    try:
        values: dict[str, Any] = json.loads(run.read_text(LEASE))
        return Lease(Process(**values.pop("driver")), **values)
    except (StorageError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_lease(run: Storage, lease: Lease) -> None:
    """Write the run's lease."""
    run.write_text(LEASE, json.dumps(asdict(lease)) + "\n")
