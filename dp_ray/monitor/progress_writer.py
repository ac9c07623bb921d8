"""Notes a run's progress in its directory while it runs, for `dp-ray watch` and `dp-ray list`."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.monitor.console import Progressed
from dp_ray.rundir.progress_file import PROGRESS
from dp_ray.storage import Storage
from dp_ray.system.repeating import repeated
from dp_ray.text import json_text

SECONDS = {False: 1.0, True: 5.0}  # between two writes: on a disk, on an object store
NO_METRIC = {"step", "epoch", "learning_rate", "gradient_norm", "rows", "rows_per_second", "data_wait_seconds"}


@contextmanager
def progress_noted(run: Storage, progress: Progressed) -> Iterator[None]:
    """Write `progress.json` every few seconds while the block runs, if anything has changed, and at its end."""
    write = _writer(run, progress)
    try:
        with repeated("progress", SECONDS[run.is_atomic], write):
            yield
    finally:
        write()


def _writer(run: Storage, progress: Progressed) -> Callable[[], None]:
    written: dict[str, Any] = {}

    def write() -> None:
        nonlocal written
        found = noted(progress)
        with suppress(StorageError):  # it only informs: what must be written raises the error
            if found != written:
                run.write_text(PROGRESS, json_text({**found, "at": time.time()}) + "\n")
                written = found

    return write


def noted(progress: Progressed) -> dict[str, Any]:
    """The progress as JSON values: steps, rows, rate, phase, the last metrics, each worker's place, rows and time."""
    found = {name: getattr(progress, name) for name in ("step", "steps", "rows", "rows_in_all", "phase")}
    metrics = {name: value for name, value in progress.last.items() if name not in NO_METRIC and value is not None}
    return {
        **found,
        "rows_per_second": float(f"{progress.rows_per_second:.3g}"),
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "workers": [_worker(progress, rank) for rank in sorted(progress.workers)],
    }


def _worker(progress: Progressed, rank: int) -> dict[str, Any]:
    world, rows = progress.workers[rank]
    seconds = progress.seconds.get(rank)
    milliseconds = None if seconds is None else round(1e3 * math.fsum(seconds), 3)
    return {"rank": rank, "node": world.node, "device": str(world.device), "rows": rows, "ms": milliseconds}
