"""Feed the trackers of a run, each from a thread of its own; the run never waits for them. Begin at `Feed`.

What a tracker misses is read from the history's files and sent again. The run directory remembers each tracker's run
and its next step, so that a later driver, or `send_late` after the run's end, goes on from there.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dp_ray.errors import JobError, StorageError
from dp_ray.job.files import dotted
from dp_ray.job.job import Job
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import RESULT_JSON, kept_job
from dp_ray.rundir.history import history_of, is_inner
from dp_ray.rundir.lease import last_alive
from dp_ray.storage import Storage
from dp_ray.text import command_for, counted, hide, hide_in
from dp_ray.trackers.process import PACKAGES, TrackerError, TrackerProcess, TrackerRefused, check_installed

TRACKERS = "trackers"


@dataclass(frozen=True)
class Memory:
    """A tracker's run, the first step that it lacks, and the status with which it was ended, if it was."""

    run_id: str | None = None
    next_step: int = 0
    status: str | None = None


# What is not remembered is asked of the tracker again.
MEMORY_JSON = Record[Memory](Memory, missing=Memory(), damaged=IGNORE, unreachable=IGNORE)
QUEUED_ROWS = 10_000  # more are forgotten, and read from the history's files later
ROWS_AT_ONCE = 200
SEND_SECONDS = 1.0
REMEMBER_SECONDS = {False: 1.0, True: 10.0}  # between two writes: on a disk, on an object store
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
END_RETRY_SECONDS = 0.5


class Feed:
    """The queue and thread of one tracker; no method but `leave` waits for the tracker.

    `connect` starts it anew, `say` prints a line. The history's files are read where the queue lacks steps.
    """

    def __init__(
        self, name: str, connect: Callable[[], TrackerProcess], run: Storage, say: Callable[[str], None]
    ) -> None:
        self.name = name
        self._connect = connect
        self._run = run
        self._say = say
        self._memory = MEMORY_JSON.read(run.child(TRACKERS), f"{name}.json")
        self._is_remembered = True
        self._remember_at = 0.0
        self._tracker: TrackerProcess | None = None
        self._is_open = False
        self._tried = (0, 0.0)  # the end of the last rows that were sent, and the time that they got
        self._queue: deque[dict[str, Any]] = deque()
        self._has_forgotten = False  # rows that are in the history's files, now or later
        self._has_news = threading.Condition()
        self._ending: tuple[str, Mapping[str, float]] | None = None  # the status and metrics of the run's end
        self._until = 0.0
        self._has_said = False
        self.is_done = False
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows of the history; a repeated step replaces all rows from that step on."""
        with self._has_news:
            while self._queue and rows and self._queue[-1]["step"] >= rows[0]["step"]:
                self._queue.pop()
            if len(self._queue) + len(rows) > QUEUED_ROWS:
                self._queue.clear()
                self._has_forgotten = True
            self._queue.extend(rows[-QUEUED_ROWS:])
            self._has_news.notify()

    def end(self, status: str, metrics: Mapping[str, float], until: float) -> None:
        """Have the tracker get what it lacks, and its run ended, until a time of time.monotonic()."""
        with self._has_news:
            self._until, self._ending = until, (status, metrics)
            self._has_news.notify()

    def leave(self) -> None:
        """Wait for the tracker until the time given to `end`; then it is left as it is."""
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if not self.is_done:
            try:
                steps = counted(len(self._history()), "step")
            except (StorageError, OSError, ValueError):  # pyarrow raises the last two
                steps = "steps"
            self._say(f"{self.name} lacks {steps} and the run's end; `{command_for('track', self._run)}` sends it")
        if (tracker := self._tracker) is not None:
            tracker.close()

    def _feed(self) -> None:
        failures = 0
        while not self.is_done and not self._is_late():
            try:
                self._send()
                failures = 0
                self._wait(SEND_SECONDS)
            except (TrackerError, StorageError, OSError, ValueError) as error:  # pyarrow raises the last two
                self._failed(error)
                self._wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    def _wait(self, seconds: float) -> None:
        """Wait, but only until the run ends; then for a moment, for a tracker that failed to answer."""
        with self._has_news:
            if self._ending is None:
                self._has_news.wait_for(lambda: self._ending is not None, seconds)
            elif not self.is_done:
                self._has_news.wait_for(lambda: False, min(END_RETRY_SECONDS, seconds))

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, TrackerError):
            return  # files that change while they are read
        self._is_open = False
        if self._tracker is not None and not isinstance(error, TrackerRefused):
            self._tracker.close()
            self._tracker = None
        if not self._has_said and not self._is_late():
            self._has_said = True
            self._say(f"{self.name} does not answer, the run goes on; it gets later what it misses: {error}")

    def _is_late(self) -> bool:
        return self._ending is not None and time.monotonic() >= self._until

    def _send(self) -> None:
        """Send all rows that there are, and the run's end once it has come."""
        ending = self._ending
        if self._tracker is None:
            self._tracker = self._connect()
        tracker = self._tracker
        if not self._is_open:
            run_id, next_step = tracker.open(self._memory.run_id, self._memory.next_step)
            self._is_open = True
            self._remember(Memory(run_id, next_step), at_once=True)
        if self._has_said:
            self._has_said = False
            self._say(f"{self.name} answers again")
        for rows in self._batches(ending is not None):
            # Rows that are sent again keep the time of the first try, so that they are the same.
            end, at = self._tried
            self._tried = (rows[-1]["step"] + 1, at if rows[0]["step"] < end else time.time())
            tracker.log(rows, self._tried[1])
            self._remember(replace(self._memory, next_step=rows[-1]["step"] + 1))
        if ending is not None:
            status, measured = ending
            metrics = {name: value for name, value in measured.items() if not is_inner(name)}
            tracker.finish(status, metrics, max(1.0, self._until - time.monotonic()))
            self._remember(replace(self._memory, status=status), at_once=True)
            self.is_done = True
        elif not self._is_remembered:
            self._remember(self._memory)

    def _remember(self, memory: Memory, at_once: bool = False) -> None:
        self._memory, self._is_remembered = memory, False
        if at_once or time.monotonic() >= self._remember_at:
            folder = self._run.child(TRACKERS)
            with suppress(StorageError):
                folder.create()
            MEMORY_JSON.write(folder, memory, f"{self.name}.json")
            self._is_remembered = True
            self._remember_at = time.monotonic() + REMEMBER_SECONDS[self._run.is_atomic]

    def _batches(self, is_last: bool) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows that the tracker lacks, in the order of steps; the files have those the queue forgot."""
        queued = self._queued()
        if is_last or (queued and queued[0]["step"] > self._memory.next_step):
            missing = self._history()
            table = missing if is_last else missing.filter(pc.field("step") < queued[0]["step"])
            for first in range(0, len(table), ROWS_AT_ONCE):
                yield table.slice(first, ROWS_AT_ONCE).to_pylist()
            queued = self._queued()
        # A tracker without a step may lack none of those before the queue: a run may begin at any step.
        is_behind = self._has_forgotten or self._memory.next_step > 0
        if not is_last and queued and self._memory.next_step < queued[0]["step"] and is_behind:
            return  # they are in no file yet
        self._has_forgotten = False
        for first in range(0, len(queued), ROWS_AT_ONCE):
            yield queued[first : first + ROWS_AT_ONCE]

    def _queued(self) -> list[dict[str, Any]]:
        """Return the queued rows that the tracker lacks; the others are forgotten."""
        with self._has_news:
            while self._queue and self._queue[0]["step"] < self._memory.next_step:
                self._queue.popleft()
            return list(self._queue)

    def _history(self) -> pa.Table:
        """Return the rows in the history's files that the tracker lacks."""
        table = history_of(self._run)
        if table is None:
            return pa.table({"step": pa.array([], pa.int64())})
        return table.filter(pc.field("step") >= self._memory.next_step)


END_SECONDS = 30.0
STOP_SECONDS = 5.0  # after Ctrl-C


class RunTrackers:
    """The feeds of a run's trackers; without any, nothing happens."""

    def __init__(self, job: Job, run: Storage, say: Callable[[str], None]) -> None:
        names = [name for name in job.trackers or () if name in PACKAGES]
        about = about_run(job.describe(), str(run)) if names else {}
        self._feeds = [Feed(name, partial(TrackerProcess, name, about, job.env), run, say) for name in names]

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows of the history, without waiting."""
        for feed in self._feeds:
            feed.add(rows)

    def close(self) -> None:
        """Do nothing: the end of the run comes after its files are whole, with `finish`."""

    def finish(self, status: str, metrics: Mapping[str, float]) -> None:
        """End the trackers' runs; those that do not answer are left after a while."""
        end_all(self._feeds, status, metrics, END_SECONDS if status == "done" else STOP_SECONDS)


def end_all(feeds: Sequence[Feed], status: str, metrics: Mapping[str, float | None], seconds: float) -> None:
    """End the runs of several trackers, all within the same seconds."""
    until = time.monotonic() + seconds
    known = {name: value for name, value in metrics.items() if value is not None}
    for feed in feeds:
        feed.end(status, known, until)
    for feed in feeds:
        feed.leave()


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


LATE_SECONDS = 600.0


def send_late(run_dir: str) -> Iterator[str]:
    """Send what the trackers of an ended run lack; yield a line for each.

    Raises JobError if the run goes on, or has no trackers, and StorageError if they still do not answer.
    """
    run = Storage(run_dir)
    job, result = kept_job(run, "a training"), RESULT_JSON.read(run)
    names = [name for name in job.get("trackers") or () if name in PACKAGES]
    if not names:
        raise JobError(f"{run}: the job has no trackers but TensorBoard's files")
    if not result or last_alive(run)[0]:
        raise JobError(f"{run}: has not ended; its trackers get what they lack when it goes on")
    check_installed(names)
    said: list[str] = []
    about = about_run(job, str(run))
    feeds = [Feed(name, partial(TrackerProcess, name, about, {}), run, said.append) for name in names]
    end_all(feeds, result["status"], result["metrics"], LATE_SECONDS)
    if lacking := [feed.name for feed in feeds if not feed.is_done]:
        raise StorageError(f"{run}: {', '.join(lacking)} did not answer: {said[-1]}")
    for name in names:
        yield f"{name} has all {MEMORY_JSON.read(run.child(TRACKERS), f'{name}.json').next_step} steps"
