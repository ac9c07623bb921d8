"""What the user sees while a job runs: a live display on a terminal, one line in a notebook, else a line every 5 s.

All of it goes to stderr; stdout is for what was asked for (`--shapes`, `--json`).
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dp_ray.monitor.status_line import honours_carriage_returns, rewritten
from dp_ray.replica.world import World
from dp_ray.secrets import hide

LINE_SECONDS = 5.0
SHOWN_WORKERS = 16


class Console:
    """Says what happens; `progress` may be called as often as there is news.

    Each line begins with the run's name, but in a notebook, whose cell shows nothing else.
    """

    def __init__(self, name: str, quiet: bool = False) -> None:
        self._quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False)
        self._is_notebook = honours_carriage_returns(sys.stderr)
        self._before = "" if self._is_notebook else f"{name}: "
        self._live: Live | None = None
        self._is_shown = False  # the progress, at all times
        self._told = 0.0
        self._done = False

    def say(self, line: str) -> None:
        if not self._quiet:
            self._print(self._before + hide(line))

    def printed(self, world: World, line: str) -> None:
        """A line that user code printed on a worker; shown even when quiet."""
        self._print(f"[rank {world.rank}] {line}")

    @contextmanager
    def if_slow(self, line: str, seconds: float = 1.0) -> Iterator[None]:
        """Say what the block does, if it takes longer than some seconds."""
        timer = threading.Timer(seconds, self.say, (line,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def progress(self, seen: "Progressed", at_once: bool = False) -> None:
        """A line on the progress, where that is not shown at all times; `at_once`, else every few seconds."""
        is_due = at_once or time.monotonic() - self._told >= LINE_SECONDS
        if is_due and not self._quiet and not self._is_shown and not self._done:
            self._done = seen.step == seen.steps
            self._told = time.monotonic()
            self.say(str(seen))

    @contextmanager
    def live(self, seen: "Progressed") -> Iterator[None]:
        """While the block runs, the progress is shown: on a terminal with the workers, in a notebook as one line."""
        self._told = time.monotonic()
        self._is_shown = not self._quiet and (self._rich.is_terminal or self._is_notebook)
        if not self._is_shown:
            yield
        elif self._is_notebook:
            with rewritten(lambda: str(seen)):
                yield
        else:
            with self._display(seen) as self._live:
                yield
        self._live, self._is_shown = None, False

    def _display(self, seen: "Progressed") -> Live:
        return Live(
            console=self._rich,
            get_renderable=lambda: _display(seen),
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,
        )

    def _print(self, line: str) -> None:
        if self._live:
            self._rich.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


class Progressed:
    """How far a job is: steps and rows that all workers are through with, and each worker's own rows."""

    def __init__(self, name: str, steps: int, rows: int) -> None:
        self.name = name
        self.steps = steps
        self.rows_in_all = rows
        self.step = 0
        self.rows = 0
        self.last: dict[str, Any] = {}  # the training's last row of history
        self.workers: dict[int, tuple[World, int]] = {}
        self._doing = "starting"
        self._since = time.monotonic()
        self._ran: tuple[float, int] | None = None  # when the first step began, and how many rows there were
        self._warm: tuple[float, int] | None = None  # likewise when it ended

    def begin(self, what: str) -> None:
        """This goes on from now on, and no step."""
        self._doing, self._since = what, time.monotonic()
        self._ran = self._warm = None

    def start(self, worlds: list[World]) -> None:
        """These workers run from now on."""
        self.workers = {world.rank: (world, 0) for world in worlds}
        self.begin("building the dataset and the model")

    def run(self, step: int) -> None:
        """The workers are in their first step."""
        self.begin(f"in step {step + 1} of {self.steps}")
        self._ran = (time.monotonic(), self.rows)

    def advance(self, step: int, rows: int) -> None:
        """All workers are through with `step` steps, the last of them with `rows` rows."""
        self.step, self.rows = step, self.rows + rows
        if self._ran is not None:  # else a late report of workers that are being replaced, or of an earlier run
            self._doing, self._warm = "", self._warm or (time.monotonic(), self.rows)

    def add(self, rank: int, rows: int) -> None:
        world, before = self.workers[rank]
        self.workers[rank] = (world, before + rows)

    @property
    def rows_per_second(self) -> float:
        """The rate since the end of the first step, which takes longer than others; or of that step alone."""
        warm = self._warm  # once: the display looks from a thread of its own
        began = warm if warm and self.rows > warm[1] else self._ran
        if began is None:
            return 0.0
        return (self.rows - began[1]) / max(1e-9, time.monotonic() - began[0])

    def __str__(self) -> str:
        if self._doing:
            seconds = time.monotonic() - self._since
            return self._doing + (f", {seconds:.0f} s" if seconds >= 1 else "")
        if self.step == self.steps:
            return f"step {self.step}/{self.steps}, {self.rows} rows, finishing"
        rate = self.rows_per_second
        left = f", {_duration((self.rows_in_all - self.rows) / rate)} left" if rate else ""
        loss = f", loss {self.last['loss']:.4g}" if "loss" in self.last else ""
        return f"step {self.step}/{self.steps}, {self.rows} rows, {_rate(rate)} rows/s{loss}{left}"


def _rate(rows_per_second: float) -> str:
    return f"{rows_per_second:,.0f}" if rows_per_second >= 10 else f"{rows_per_second:.3g}"


def _display(seen: Progressed) -> Group:
    """A bar, below it the progress in words, which a narrow terminal may wrap, and the workers."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(Text(seen.name), ProgressBar(seen.steps, seen.step, width=40))
    return Group(bar, Text(f"  {seen}"), _workers(seen))


def _workers(seen: Progressed) -> Table:
    table = Table.grid(padding=(0, 2))
    for rank, (world, rows) in sorted(seen.workers.items())[:SHOWN_WORKERS]:
        table.add_row(f"  rank {rank}", world.node, str(world.device), f"{rows:,} rows")
    if len(seen.workers) > SHOWN_WORKERS:
        table.add_row(f"  and {len(seen.workers) - SHOWN_WORKERS} more")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
