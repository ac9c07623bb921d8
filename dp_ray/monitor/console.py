"""Show the user how a job goes: a live display on a terminal, one line in a notebook, else a line every 5 s.

All of it goes to stderr; stdout is for the output that the user asks for (`--shapes`, `--json`). A program that has
set up the logger `dp_ray`, by a handler or by a level, gets the lines as records instead. `Console` prints,
`Progress` holds what is shown, `Losses` prints a training's losses and metrics. `dp-ray watch` prints the same
`progress_line`, of the progress that the driver keeps in the run's directory.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dp_ray.results.text import measured
from dp_ray.system.threads import if_longer, repeated
from dp_ray.text import harmless, hide, replay_command

if TYPE_CHECKING:  # `dp-ray watch` does not wait for torch
    from dp_ray.engine.world import World
    from dp_ray.messages import Report

LOG = logging.getLogger("dp_ray")
REFRESH_SECONDS = 0.5


class StatusLine:
    """A stream whose last line, in a notebook's output, is a status that `show` rewrites; `write` writes above it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._status = ""
        self._is_at_start = True  # of a line
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text above the status."""
        if self._pid != os.getpid():  # in a forked process the lock may be held for ever
            return int(self._stream.write(text))
        with self._lock:
            self._erase()
            self._is_at_start = text.endswith("\n") if text else self._is_at_start
            return int(self._stream.write(text))

    def show(self, status: str) -> None:
        """Replace the status, unless other output has left a line unfinished."""
        with self._lock:
            if self._is_at_start and status != self._status:
                self._erase()
                self._stream.write(status)
                self._status = status
        self._stream.flush()

    def end(self) -> None:
        """Keep the last status as an ordinary line."""
        with self._lock:
            if self._status:
                self._stream.write("\n")
                self._status = ""
        self._stream.flush()

    def _erase(self) -> None:
        """Overwrite the status with spaces: notebooks offer no other way."""
        if self._status:
            self._stream.write(f"\r{' ' * len(self._status)}\r")
            self._status = ""


@contextmanager
def rewritten(status: Callable[[], str]) -> Iterator[None]:
    """Show the status as stderr's last line while the block runs, updated twice a second; the last one stays."""
    line = StatusLine(sys.stderr)

    def refresh() -> None:
        line.show(status())

    with redirect_stderr(line):
        refresh()
        try:
            with repeated("status line", REFRESH_SECONDS, refresh):
                yield
        finally:
            refresh()
            line.end()


LINE_SECONDS = 5.0
MOST_SECONDS = 60.0  # between two lines of the progress, in a long run
LINES_OF_A_DOUBLING = 60  # at most, while the run becomes twice as long
SHOWN_WORKERS = 16


class Console:
    """Prints lines and the progress; `progress` limits its own rate, so it may be called at any time.

    Each line begins with the run's name, except in a notebook, where the cell shows only this run. `is_brief` is for
    runs that are but a means to an end.
    """

    def __init__(self, name: str, quiet: bool = False, is_brief: bool = False) -> None:
        self.is_brief = is_brief
        self._quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False)
        self._is_notebook = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"  # without importing IPython
        self._prefix = "" if self._is_notebook else f"{name}: "
        self._live: Live | None = None
        self._is_shown = False  # whether a live display shows the progress
        self._newest = ""  # the line that the live display shows in place of the one before
        self._began = time.monotonic()
        self._printed_at = 0.0  # when the progress was
        self._done = False

    def say(self, line: str) -> None:
        """Print a line, without its secrets, and without what would act on the terminal, unless quiet."""
        if not self._quiet:
            self._print(self._prefix + harmless(line))

    def printed(self, world: "World", line: str) -> None:
        """Print a line that user code printed on a worker, even when quiet."""
        self._print(f"[rank {world.rank}] {hide(line)}")

    @contextmanager
    def if_slow(self, line: str, seconds: float = 1.0) -> Iterator[None]:
        """Print `line` if the block takes longer than `seconds`."""
        with if_longer(seconds, lambda: self.say(line)):
            yield

    def progress(self, progress: "Progress", at_once: bool = False) -> None:
        """Print the progress every few seconds, or `at_once`, unless a live display shows it.

        The longer the run, the rarer: a log of a day has some 1,600 lines.
        """
        now = time.monotonic()
        seconds = min(MOST_SECONDS, max(LINE_SECONDS, (now - self._began) / LINES_OF_A_DOUBLING))
        is_due = at_once or now - self._printed_at >= seconds
        if is_due and not self._quiet and not self._is_shown and not self._done:
            self._done = progress.step == progress.steps
            self._printed_at = now
            self.say(str(progress))

    def rewrites(self, line: str) -> bool:
        """Show a line in a terminal's live display, in place of the one before; False if there is no such display."""
        if self._live is not None:
            self._newest = harmless(line)
        return self._live is not None

    @contextmanager
    def live(self, progress: "Progress") -> Iterator[None]:
        """Show the progress live while the block runs: on a terminal with the workers, in a notebook as one line.

        Other threads than the main one print lines: several runs may share the terminal.
        """
        self._printed_at = time.monotonic()
        is_main = threading.current_thread() is threading.main_thread()
        self._is_shown = not self._quiet and (self._rich.is_terminal or self._is_notebook) and is_main
        if not self._is_shown:
            yield
        elif self._is_notebook:
            with rewritten(lambda: str(progress)):
                yield
        else:
            with Live(
                console=self._rich,
                get_renderable=lambda: _display(progress, self._newest),
                refresh_per_second=5,
                transient=True,
                redirect_stdout=False,
            ) as self._live:
                yield
        self._live = None
        self._is_shown = False
        self._newest = ""

    def _print(self, line: str) -> None:
        if LOG.handlers or LOG.level:
            # Not by `propagate`: pytest gives loggers that do not propagate a handler, which would take the lines.
            if not LOG.level:  # else the root's level, WARNING, would drop them
                LOG.setLevel(logging.INFO)
            LOG.info(line)
        elif self._live:
            self._rich.print(line, markup=False, soft_wrap=True)
        else:
            print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write: other threads print lines too


class Progress:
    """The progress of a run: the steps and rows that all workers have finished, and each worker's own rows."""

    def __init__(self, name: str, steps: int, rows: int) -> None:
        self.name = name
        self.steps = steps
        self.rows_in_all = rows
        self.step = 0
        self.rows = 0
        self.last: dict[str, Any] = {}  # the training's last row of history
        self.workers: dict[int, tuple[World, int]] = {}
        self.seconds: dict[int, list[float]] = {}  # by rank: those of each part of a step, of its newest steps
        self.phase = "starting"  # before the first step, or while no step runs; empty while steps run
        self._since = time.monotonic()
        self._ran: tuple[float, int] | None = None  # time and rows when the attempt's first step began
        self._warm: tuple[float, int] | None = None  # time and rows when it ended
        self.first_step_at: float | None = None  # when the first step of the first attempt began
        self.last_step_at: float | None = None  # when the newest step had ended

    def begin(self, what: str) -> None:
        """Show `what` as the current phase; no step runs in it."""
        self.phase = what
        self._since = time.monotonic()
        self._ran = self._warm = None

    def start(self, worlds: "list[World]") -> None:
        """Start an attempt with these workers."""
        self.workers = {world.rank: (world, 0) for world in worlds}
        self.seconds = {}
        self.begin("building the dataset and the model")

    def run(self, step: int) -> None:
        """Note that the workers have begun their first step, `step`."""
        self.begin(f"in step {step}, {step}/{self.steps} steps done")
        self._ran = (time.monotonic(), self.rows)
        self.first_step_at = self.first_step_at or self._ran[0]

    def advance(self, step: int, rows: int) -> None:
        """Note that all workers have finished `step` steps; the steps since the last call have `rows` rows."""
        self.step = step
        self.rows += rows
        self.last_step_at = time.monotonic()
        if self._ran is not None:  # else it is a late report of replaced workers, or of an earlier run
            self.phase = ""
            self._warm = self._warm or (time.monotonic(), self.rows)

    def take(self, report: "Report", rows: int) -> None:
        """Take in a worker's report of so many rows, and the mean seconds of each part of its steps."""
        rank = report.world.rank
        world, before = self.workers[rank]
        self.workers[rank] = (world, before + rows)
        if report.times is not None:
            self.seconds[rank] = report.times.seconds.mean(axis=0).tolist()

    @property
    def rows_per_second(self) -> float:
        """The rate since the end of the attempt's first, slower step; before there are more rows, since its start."""
        warm = self._warm  # read once: the display reads from its own thread
        began = warm if warm and self.rows > warm[1] else self._ran
        if began is None:
            return 0.0
        return (self.rows - began[1]) / max(1e-9, time.monotonic() - began[0])

    def __str__(self) -> str:
        return progress_line(vars(self), self.rows_per_second, self.last, time.monotonic() - self._since)


def progress_line(counts: Mapping[str, Any], rate: float, last: Mapping[str, Any], seconds: float) -> str:
    """Return a run's progress in words.

    `counts` has what `progress.json` and a `Progress` both have: steps, rows and the phase, which began `seconds`
    ago. `last` holds the last metrics; None stands for a number that is not finite, as in JSON.
    """
    phase, step, steps, rows = (counts[name] for name in ("phase", "step", "steps", "rows"))
    if phase:
        return f"{phase}, {seconds:.0f} s" if seconds >= 1 else str(phase)
    if step == steps:
        return f"{step}/{steps} steps, {rows} rows, finishing"
    rows_per_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}"
    left = ""
    if rate:
        minutes, seconds_left = divmod(round((counts["rows_in_all"] - rows) / rate), 60)
        hours, minutes = divmod(minutes, 60)
        left = f", {hours}:{minutes:02}:{seconds_left:02} left" if hours else f", {minutes}:{seconds_left:02} left"
    loss = f", loss {math.nan if last['loss'] is None else last['loss']:.4g}" if "loss" in last else ""
    return f"{step}/{steps} steps, {rows} rows, {rows_per_second} rows/s{loss}{left}"


def _display(progress: Progress, newest: str = "") -> Group:
    """Return a bar, the progress in words on a line of its own, which may wrap, the newest line, and the workers."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(Text(progress.name), ProgressBar(progress.steps, progress.step, width=40))
    workers = Table.grid(padding=(0, 2))
    for rank, (world, rows) in sorted(progress.workers.items())[:SHOWN_WORKERS]:
        workers.add_row(f"  rank {rank}", world.node, str(world.device), f"{rows:,} rows")
    if len(progress.workers) > SHOWN_WORKERS:
        workers.add_row(f"  and {len(progress.workers) - SHOWN_WORKERS} more")
    lines = [Padding(Text(line), (0, 0, 0, 2)) for line in (str(progress), newest) if line]
    return Group(bar, *lines, workers)


ALL_UP_TO = 20  # lines, none if the console is brief; after them every EVERY-th, and the last one
EVERY = 10  # and one every LINE_SECONDS at most


class Losses:
    """Prints an epoch's loss, an evaluation's metrics, and the first loss that is NaN or infinite.

    Of many epochs not each has a line: a terminal's display shows the newest, in place of the one before. A loss that
    is not finite is printed with the command that shows its rows, when it comes and at the end; `run_dir` is for that
    command.
    """

    def __init__(self, console: Console, run_dir: str) -> None:
        self._console = console
        self._run_dir = run_dir
        self._not_finite: tuple[int, float] | None = None
        self._last = -1
        self._first = 0 if console.is_brief else ALL_UP_TO
        self._lines = 0
        self._told: set[str] = set()
        self._printed_at = 0.0
        self._unprinted = ""  # the newest line, if it was left out

    def say(self, rows: Sequence[dict[str, Any]]) -> None:
        """Print the values of interest in some rows of the history, if there are any."""
        for row in rows:
            if "epoch_loss" in row or " eval_" in f" {' '.join(row)}":
                self._say(row)
            self._last = row["step"]
            if not math.isfinite(row["loss"]) and row["rows"] and self._not_finite is None:
                self._not_finite = row["step"], row["loss"]
                self._warn()

    def _say(self, row: dict[str, Any]) -> None:
        texts = measured(
            {name: value for name, value in row.items() if name == "epoch_loss" or name.startswith("eval_")}
        )
        if not texts:
            return
        line = f"epoch {row['epoch']}, step {row['step']}: "
        line += ", ".join(f"{name} {value}" for name, value in texts.items())
        if line in self._told:  # where rank 0 is lost, another one sends rows that no file holds again
            return
        self._told.add(line)
        self._lines += 1
        is_due = self._lines % EVERY == 0 and time.monotonic() - self._printed_at >= LINE_SECONDS
        if self._lines > self._first and (self._console.rewrites(line) or not is_due):
            self._unprinted = line
            return
        self._console.say(line)
        self._printed_at = time.monotonic()
        self._unprinted = ""

    def end(self) -> None:
        """Print the last line if it was left out; repeat the warning of a loss, unless no line came after it."""
        if self._unprinted:
            self._console.say(self._unprinted)
        if self._not_finite is not None and self._last > self._not_finite[0]:
            self._warn()

    def _warn(self) -> None:
        assert self._not_finite is not None
        step, loss = self._not_finite
        self._console.say(f"warning: the loss of step {step} is {loss}: {replay_command(self._run_dir, step)}")
