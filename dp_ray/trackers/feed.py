"""The program of a tracker's own process: it reads the run's directory, and sends what its tracker lacks.

Begin at `main`. The driver names the run in the first line of stdin. A further line says that the run has ended; the
end of stdin, that the driver is gone. Each line on stdout says why the tracker does not answer; an empty one, that it
does.

The run directory remembers each tracker's run and its next step, so that a later process goes on from there.
"""

import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any

import numpy as np
import pyarrow.compute as pc

from dp_ray.errors import Error, StorageError
from dp_ray.job.files import dotted
from dp_ray.plan.history import is_inner
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import RESULT_JSON, kept_job
from dp_ray.rundir.history import history_of, history_so_far
from dp_ray.storage import Storage
from dp_ray.system.threads import if_longer
from dp_ray.tables import numbers
from dp_ray.text import hide, hide_in
from dp_ray.trackers.clients import CLIENTS, Client

TRACKERS = "trackers"


@dataclass(frozen=True)
class TrackedRun:
    """A tracker's run, the first step that it lacks, and the status with which it was ended, if it was."""

    run_id: str | None = None
    next_step: int = 0
    status: str | None = None


# What is not remembered is asked of the tracker again.
TRACKED_JSON = Record[TrackedRun](TrackedRun, missing=TrackedRun(), damaged=IGNORE, unreachable=IGNORE)
ROWS_AT_ONCE = 200
LOOK_SECONDS = {False: 1.0, True: 2.0}  # between two looks for rows: on a disk, on an object store
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
END_RETRY_SECONDS = 0.5
OPEN_SECONDS = 120.0
LOG_SECONDS = 60.0
FINISH_SECONDS = 3600.0  # more than a driver ever waits

GOES_ON, ENDED, GONE = b"", b"\n", b"-"  # the driver's words; the last one stands for the end of its stream


class TrackerError(Error):
    """A tracker's package raises an error."""


def main() -> None:
    """Feed the tracker that the command names, in a process of its own."""
    name = sys.argv[1]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints goes to stderr: stdout carries replies alone

    def tell(problem: str) -> None:
        with suppress(OSError):  # the driver is gone
            print(" ".join(problem.split()), file=replies, flush=True)

    driver = FileIO(0)
    feed(name, Storage(driver.readline().decode().rstrip("\n")), CLIENTS[name], driver, tell)


def feed(
    name: str,
    run: Storage,
    connect: Callable[[dict[str, Any]], Client],
    driver: FileIO,
    tell: Callable[[str], None],
) -> None:
    """Send a tracker the run's rows as they come, then the run's end; leave it as it is if the driver is gone.

    `connect` opens the tracker's run, `driver` has the driver's words. `tell` gets each problem, then an empty text.
    """
    job, memory = kept_job(run, "a training"), TRACKED_JSON.read(run.child(TRACKERS), f"{name}.json")
    client, word, failures = None, GOES_ON, 0
    tried = 0, 0.0  # the end of the last rows that were sent, and the time that they got
    parent = os.getppid()  # what the driver has forked may hold its end of the stream for longer than it lives
    while word != GONE and os.getppid() == parent:
        has_ended = word == ENDED  # before the rows are read: then these are all
        seconds = END_RETRY_SECONDS if has_ended else LOOK_SECONDS[run.is_atomic]
        try:
            if client is None:
                known = {"run_id": memory.run_id, "next_step": memory.next_step}
                with suppress(StorageError):
                    run.child(TRACKERS).create()
                with answering(OPEN_SECONDS, tell):
                    client = connect({**about_run(job, str(run)), **known})
                memory = remember(run, name, TrackedRun(client.run_id, client.next_step))
                tell("")
            for rows in missing(run, memory.next_step, has_ended) if job["task"] == "train" else ():
                # Rows that are sent again keep the time of the first try, so that they are the same.
                tried = rows[-1]["step"] + 1, tried[1] if rows[0]["step"] < tried[0] else time.time()
                with answering(LOG_SECONDS, tell):
                    client.log(rows, tried[1])
                memory = remember(run, name, replace(memory, next_step=tried[0]))
                if (word := heard(driver, 0.0, word)) == GONE:
                    break
            if has_ended and word != GONE:
                result = RESULT_JSON.read(run)
                # JSON has no number that is not finite: there null stands for it.
                metrics = {key: math.nan if value is None else value for key, value in result["metrics"].items()}
                with answering(FINISH_SECONDS, tell):
                    client.finish(result["status"], {key: metrics[key] for key in metrics if not is_inner(key)})
                remember(run, name, replace(memory, status=result["status"]))
                return
            failures = 0
        except TrackerError as error:
            client = None
            tell(str(error))
            if not has_ended:
                seconds = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
            failures += 1
        except (StorageError, OSError, ValueError):  # files that change while they are read
            pass
        word = heard(driver, seconds, word)
    if client is not None:
        client.close()


def heard(driver: FileIO, seconds: float, word: bytes) -> bytes:
    """Return the driver's next word if it comes within some seconds, else its last one."""
    waiting = select.poll()  # select() takes no file number above 1,023
    waiting.register(driver, select.POLLIN)
    return driver.read(1) or GONE if word != GONE and waiting.poll(1000 * seconds) else word


def missing(run: Storage, next_step: int, has_ended: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows from a step on, some at once, in the order of steps.

    While the run goes on they end at a gap: its steps run again, and will be there. A tracker without a step gets all
    rows: a run may begin at any step.
    """
    table = history_of(run) if has_ended else history_so_far(run, next_step)
    table = None if table is None else table.filter(pc.field("step") >= next_step)
    if not table:
        return
    steps = numbers(table.column("step"))
    follows = steps == (next_step or steps[0]) + np.arange(len(steps))
    count = len(steps) if has_ended or follows.all() else int(follows.argmin())
    for first in range(0, count, ROWS_AT_ONCE):
        yield table.slice(first, min(ROWS_AT_ONCE, count - first)).to_pylist()


@contextmanager
def answering(seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Raise TrackerError for what the package raises in the block; if it hangs there, end the process."""

    def end() -> None:
        tell(f"no answer within {seconds:.0f} s")
        os._exit(1)

    with if_longer(seconds, end):
        try:
            yield
        except Exception as error:  # of a package of any kind
            raise TrackerError(f"{type(error).__name__}: {error}") from error


def remember(run: Storage, name: str, memory: TrackedRun) -> TrackedRun:
    """Keep in the run's directory what its tracker has, and return it."""
    TRACKED_JSON.write(run.child(TRACKERS), memory, f"{name}.json")
    return memory


def about_run(described: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    """Return what a tracker gets of a run when it opens: name, parameters and tags, without secrets.

    A list is one parameter, as JSON. The values of env are kept nowhere.
    """
    params: dict[str, Any] = {}
    for key, value in dotted(hide_in(described)):
        if "env" in key.split(".") or value is None:
            continue
        if isinstance(value, int | float):
            params[key] = value
        else:
            params[key] = hide(value if isinstance(value, str) else json.dumps(value, default=str))
    tags = {"dp_ray.task": str(described["task"]), "dp_ray.run_dir": hide(run_dir)}
    return {"name": hide(described["name"]), "params": params, "tags": tags}
