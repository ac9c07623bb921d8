"""Draws a watched run in the terminal, in place; elsewhere it prints a line when something has changed.

What a watched run's directory says at a moment; it imports no torch, and runs no code of the run.
"""

import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from dp_ray.errors import StorageError
from dp_ray.results.text import measured, sparkline, time_span
from dp_ray.rundir.files import RESULT, RUN, read_json
from dp_ray.rundir.history import history_so_far
from dp_ray.rundir.incidents import INCIDENTS, IncidentLog, read_incidents
from dp_ray.rundir.listing import NO_RUN, PROGRESS, ListedRun, listed_run, read_progress
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
        """Whether there is a run yet."""
        return self.row.status != NO_RUN

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens: the run ended, or its driver was killed, or its directory is damaged."""
        return self.has_begun and self.row.status != "running"


class Watched:
    """Reads a run's directory again and again; the history less often if reading it takes long."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._losses: list[float] = []
        self._due = 0.0

    def look(self) -> Snapshot:
        """What the directory says now; files that change while they are read are read at the next look."""
        run = self._run
        name = run.path.rstrip("/").rpartition("/")[2]
        if not _is_there(run):
            return Snapshot(ListedRun(name, NO_RUN))
        row = listed_run(run, name)
        try:
            return Snapshot(
                row,
                read_progress(run) if run.exists(PROGRESS) else {},
                self._read_losses(is_last=row.status in ENDED),
                read_incidents(run, RESULT if row.status == "done" else INCIDENTS),
                str(read_json(run, RESULT).get("error") or "") if row.status == "failed" else "",
            )
        except Exception:  # files of any content, which may be whole at the next look
            return Snapshot(row, losses=self._losses)

    def _read_losses(self, is_last: bool) -> list[float]:
        began = time.monotonic()
        if is_last or began >= self._due:
            table = history_so_far(self._run)
            has_losses = table is not None and "loss" in table.column_names
            self._losses = table.column("loss").to_pylist() if table is not None and has_losses else []
            self._due = time.monotonic() + 20 * (time.monotonic() - began)
        return self._losses


def _is_there(run: Storage) -> bool:
    try:
        return run.exists(RUN)
    except StorageError:  # an object store that does not answer for a moment
        return False


SHOWN_WORKERS = 16
SHOWN_INTERRUPTIONS = 5
BAR = ("█", "░")
LINE_SECONDS = 5.0


def watch_plain(look: Callable[[], Snapshot], out: TextIO, seconds: float) -> Snapshot:
    """Draw the run every so many seconds until it has ended; return what was drawn last."""
    show = _redrawing(out) if out.isatty() else _printing(out)
    while True:
        snapshot = look()
        show(snapshot)
        if snapshot.has_ended:
            return snapshot
        time.sleep(seconds)


def screen(snapshot: Snapshot, width: int, height: int = 1000) -> list[str]:
    """The lines that show a run, each at most `width` characters, without control characters."""
    lines = [printable(line) for line in _lines(snapshot, width)]
    return [line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in lines[:height]]


def headline(snapshot: Snapshot) -> str:
    """The run in one line: `digits running, step 45/90, 50 %, 1,234 rows/s, loss 0.394`."""
    row, rate = snapshot.row, snapshot.progress.get("rows_per_second")
    parts = [f"{row.name} {row.status}"]
    if row.steps:
        parts += [f"step {row.step}/{row.steps}", f"{100 * (row.step or 0) / row.steps:.0f} %"]
    if row.status == "running" and rate:
        parts.append(f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.3g} rows/s")
    parts += [f"{name} {value}" for name, value in measured(row.metrics).items()]
    return ", ".join(parts)


def _lines(snapshot: Snapshot, width: int) -> Iterator[str]:
    row, progress = snapshot.row, snapshot.progress
    if not snapshot.has_begun:
        yield f"{row.name}: waiting, there is no run yet"
        return
    yield from _wrapped(_title(snapshot), width)
    if row.steps:
        yield _bar((row.step or 0) / row.steps, width)
    if row.status == "running" and progress.get("phase"):
        yield str(progress["phase"])
    yield from _wrapped(_figures(snapshot), width)
    if snapshot.losses:
        yield f"loss  {sparkline(snapshot.losses, max(1, width - 6))}"
    yield from _workers(progress.get("workers") or [], width)
    yield from _interruptions(snapshot)
    yield from _end(snapshot, width)


def _title(snapshot: Snapshot) -> Iterator[str]:
    row = snapshot.row
    parts = [row.name, row.task or "", row.status]
    if row.steps:
        parts.append(f"step {row.step}/{row.steps}")
    if row.status == "running" and (left := _left(snapshot.progress)) is not None:
        parts.append(f"{time_span(left)} left")
    elif row.status != "running" and row.age is not None:
        parts.append(f"{time_span(row.age)} ago")
    return filter(None, parts)


def _left(progress: dict[str, Any]) -> float | None:
    rate, rows, whole = (progress.get(name) for name in ("rows_per_second", "rows", "rows_in_all"))
    return (whole - rows) / rate if rate and whole and rows is not None and not progress.get("phase") else None


def _bar(share: float, width: int) -> str:
    percent = f" {100 * share:3.0f} %"
    cells = max(1, width - len(percent))
    done = min(cells, int(share * cells))
    return BAR[0] * done + BAR[1] * (cells - done) + percent


def _figures(snapshot: Snapshot) -> Iterator[str]:
    rate = snapshot.progress.get("rows_per_second")
    if snapshot.row.status == "running" and rate:
        yield f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.3g} rows/s"
    yield from (f"{name} {value}" for name, value in measured(snapshot.row.metrics).items())
    if snapshot.row.seconds is not None:
        yield f"{snapshot.row.seconds:.1f} s"


def _wrapped(parts: Iterator[str], width: int, indent: str = "") -> Iterator[str]:
    """Parts in lines, two spaces between them; none is cut in two."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = ""
        line = f"{line}  {part}" if line else indent + part
    if line:
        yield line


def _workers(workers: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """A line for each worker: rank, node, device, rows, milliseconds of a step; a narrow terminal has no places."""
    if not workers:
        return
    yield counted(len(workers), "worker")
    for worker in workers[:SHOWN_WORKERS]:
        place = f"  {worker['node']}  {worker['device']}" if width >= 60 else ""
        time_of_step = "" if worker.get("ms") is None else f"  {worker['ms']:.1f} ms a step"
        yield f"  rank {worker['rank']}{place}  {worker['rows']:,} rows{time_of_step}"
    if len(workers) > SHOWN_WORKERS:
        yield f"  and {len(workers) - SHOWN_WORKERS} more"


def _interruptions(snapshot: Snapshot) -> Iterator[str]:
    found = snapshot.incidents.interruptions
    if found:
        yield counted(len(found), "interruption")
    for one in found[-SHOWN_INTERRUPTIONS:]:
        yield f"  {one}, {one.resumption}"


def _end(snapshot: Snapshot, width: int) -> Iterator[str]:
    """What went wrong, in as many lines as it needs."""
    status, text = snapshot.row.status, snapshot.error or snapshot.row.note
    if status == "unfinished":
        yield "its driver was killed; run the same command to resume"
    for line in text.splitlines():
        yield from textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [line]


def _redrawing(out: TextIO) -> Callable[[Snapshot], None]:
    """Draw over what was drawn last."""
    drawn = 0

    def show(snapshot: Snapshot) -> None:
        nonlocal drawn
        size = shutil.get_terminal_size()
        lines = screen(snapshot, size.columns, size.lines - 1)
        up = f"\x1b[{drawn}A" if drawn else ""
        out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
        out.flush()
        drawn = len(lines)

    return show


def _printing(out: TextIO) -> Callable[[Snapshot], None]:
    """Print a line if it is another one, every few seconds; of an ended run all lines."""
    told, at = "", 0.0

    def show(snapshot: Snapshot) -> None:
        nonlocal told, at
        if snapshot.has_ended:
            out.write("".join(f"{line}\n" for line in screen(snapshot, 80)))
        elif (line := screen(snapshot, 80)[0] if not snapshot.has_begun else printable(headline(snapshot))) != told:
            if time.monotonic() - at < LINE_SECONDS and told:
                return
            out.write(f"{line}\n")
            told, at = line, time.monotonic()
        out.flush()

    return show
