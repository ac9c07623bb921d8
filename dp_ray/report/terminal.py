"""Draw a watched run in the terminal, in place; elsewhere, print a line when something has changed.

`Watched` reads the run's directory, `watch_plain` draws it. It imports no torch, and runs no code of the run.
"""

import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from dp_ray.errors import StorageError
from dp_ray.results.text import measured, sparkline, time_span
from dp_ray.rundir.files import RESULT, RESULT_JSON, RUN
from dp_ray.rundir.history import history_of
from dp_ray.rundir.incidents import INCIDENTS, INCIDENTS_JSON, IncidentLog
from dp_ray.rundir.listing import NO_RUN, PROGRESS_JSON, ListedRun, listed_run
from dp_ray.storage import Storage
from dp_ray.text import counted, printable

LOOK_SECONDS = {False: 1.0, True: 5.0}  # between two looks: at a disk, at an object store
ENDED = ("done", "failed", "interrupted")


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment; `row` is its row in a list, `losses` those of its steps, `error` that of its result."""

    row: ListedRun
    progress: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    incidents: IncidentLog = field(default_factory=IncidentLog)
    error: str = ""

    @property
    def has_begun(self) -> bool:
        """Return whether there is a run yet."""
        return self.row.status != NO_RUN

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more happens: the run ended, its driver was killed, or its directory is damaged."""
        return self.has_begun and self.row.status != "running"


class Watched:
    """A reader of a run's directory, for many looks; the history is read less often if reading it takes long."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._losses: list[float] = []
        self._due = 0.0

    def look(self) -> Snapshot:
        """Read the directory as it is now; files that change while they are read are read at the next look."""
        run = self._run
        is_there = False
        with suppress(StorageError):  # an object store that does not answer for a moment
            is_there = run.exists(RUN)
        if not is_there:
            return Snapshot(ListedRun(run.name, NO_RUN))
        row = listed_run(run)
        try:
            progress = PROGRESS_JSON.read(run)
            began = time.monotonic()
            if row.status in ENDED or began >= self._due:
                table = history_of(run)
                self._losses = table.column("loss").to_pylist() if table and "loss" in table.column_names else []
                self._due = time.monotonic() + 20 * (time.monotonic() - began)
            incidents = INCIDENTS_JSON.read(run, RESULT if row.status == "done" else INCIDENTS)
            error = str(RESULT_JSON.read(run).get("error") or "") if row.status == "failed" else ""
            return Snapshot(row, progress, self._losses, incidents, error)
        except Exception:  # files of any content, which may be whole at the next look
            return Snapshot(row, losses=self._losses)


SHOWN_WORKERS = 16
SHOWN_INTERRUPTIONS = 5
BAR = ("█", "░")
LINE_SECONDS = 5.0


def watch_plain(look: Callable[[], Snapshot], out: TextIO, seconds: float) -> Snapshot:
    """Show the run every so many seconds until it has ended; return what was shown last.

    A terminal is drawn over. Elsewhere a line is printed if it is another one, every few seconds, and at the end all.
    """
    is_terminal = out.isatty()
    num_drawn = 0  # lines that the next look draws over
    printed, printed_at = "", 0.0
    while True:
        snapshot = look()
        if is_terminal:
            size = shutil.get_terminal_size()
            lines = screen(snapshot, size.columns, size.lines - 1)
            up = f"\x1b[{num_drawn}A" if num_drawn else ""
            out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
            num_drawn = len(lines)
        elif snapshot.has_ended:
            out.write("".join(f"{line}\n" for line in screen(snapshot, 80)))
        else:
            line = printable(headline(snapshot)) if snapshot.has_begun else screen(snapshot, 80)[0]
            is_due = time.monotonic() - printed_at >= LINE_SECONDS or not printed
            if line != printed and is_due:
                out.write(f"{line}\n")
                printed, printed_at = line, time.monotonic()
        out.flush()
        if snapshot.has_ended:
            return snapshot
        time.sleep(seconds)


def screen(snapshot: Snapshot, width: int, height: int = 1000) -> list[str]:
    """Return the lines that show a run, each at most `width` characters, without control characters."""
    lines = [printable(line) for line in _lines(snapshot, width)]
    return [line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in lines[:height]]


def headline(snapshot: Snapshot) -> str:
    """Return the run in one line: `digits running, 45/90 steps, 50 %, 1,234 rows/s, loss 0.394`."""
    row = snapshot.row
    parts = [f"{row.name} {row.status}"]
    if row.steps:
        parts += [f"{row.step}/{row.steps} steps", f"{100 * (row.step or 0) / row.steps:.0f} %"]
    return ", ".join([*parts, *_figures(snapshot)])


def _figures(snapshot: Snapshot) -> list[str]:
    """Return the speed of a run that goes on, and its metrics."""
    rate = snapshot.progress.get("rows_per_second")
    speed = []
    if snapshot.row.status == "running" and rate:
        speed.append(f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.3g} rows/s")
    return speed + [f"{name} {value}" for name, value in measured(snapshot.row.metrics).items()]


def _lines(snapshot: Snapshot, width: int) -> Iterator[str]:
    row, progress = snapshot.row, snapshot.progress
    if not snapshot.has_begun:
        yield f"{row.name}: waiting, there is no run yet"
        return
    yield from _wrapped(_title(snapshot), width)
    if row.steps:
        share = (row.step or 0) / row.steps
        percent = f" {100 * share:3.0f} %"
        cells = max(1, width - len(percent))
        done = min(cells, int(share * cells))
        yield BAR[0] * done + BAR[1] * (cells - done) + percent
    if row.status == "running" and progress.get("phase"):
        yield str(progress["phase"])
    seconds = [] if row.seconds is None else [f"{row.seconds:.1f} s"]
    yield from _wrapped([*_figures(snapshot), *seconds], width)
    if snapshot.losses:
        yield f"loss  {sparkline(snapshot.losses, max(1, width - 6))}"
    yield from _workers(progress.get("workers") or [], width)
    interruptions = snapshot.incidents.interruptions
    if interruptions:
        yield counted(len(interruptions), "interruption")
    for one in interruptions[-SHOWN_INTERRUPTIONS:]:
        yield f"  {one}, {one.resumption}"
    # What went wrong, in as many lines as it needs.
    if row.status == "unfinished":
        yield "its driver was killed; run the same command to resume"
    for line in (snapshot.error or row.note).splitlines():
        yield from textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [line]


def _title(snapshot: Snapshot) -> Iterator[str]:
    """Return name, task, status and step of a run, and how long it still runs or how long ago it ended."""
    row, progress = snapshot.row, snapshot.progress
    parts = [row.name, row.task or "", row.status]
    if row.steps:
        parts.append(f"{row.step}/{row.steps} steps")
    if row.status == "running":
        rate, rows, whole = (progress.get(name) for name in ("rows_per_second", "rows", "rows_in_all"))
        if rate and whole and rows is not None and not progress.get("phase"):
            parts.append(f"{time_span((whole - rows) / rate)} left")
    elif row.age is not None:
        parts.append(f"{time_span(row.age)} ago")
    return filter(None, parts)


def _wrapped(parts: Iterable[str], width: int) -> Iterator[str]:
    """Yield parts in lines, two spaces between them; none is cut in two."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = ""
        line = f"{line}  {part}" if line else part
    if line:
        yield line


def _workers(workers: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield a line for each worker: rank, place, rows, milliseconds of a step; a narrow terminal has no places."""
    if not workers:
        return
    if len(workers) > 1:  # a single one may be none: with `workers: 0` it is the driver's process
        yield counted(len(workers), "worker")
    for worker in workers[:SHOWN_WORKERS]:
        place = f"  {worker['node']}  {worker['device']}" if width >= 60 else ""
        time_of_step = "" if worker.get("ms") is None else f"  {worker['ms']:.1f} ms a step"
        yield f"  rank {worker['rank']}{place}  {worker['rows']:,} rows{time_of_step}"
    if len(workers) > SHOWN_WORKERS:
        yield f"  and {len(workers) - SHOWN_WORKERS} more"
