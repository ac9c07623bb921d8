"""What the user sees while a job runs: a live display on a terminal, else a plain line every few seconds.

All of it goes to stderr; stdout is for what was asked for (`--shapes`, `--json`).
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from dp_ray.replica.world import World
from dp_ray.secrets import hide

LINE_SECONDS = 5.0
SHOWN_WORKERS = 16


class Console:
    """Says what happens; `progress` may be called as often as there is news."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False)
        self._live: Live | None = None
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[says]}"))
        self._task = self._bar.add_task("", says="")
        self._told = 0.0
        self._done = False

    def say(self, line: str) -> None:
        if not self._quiet:
            self._print(hide(line))

    def printed(self, world: World, line: str) -> None:
        """A line that user code printed on a worker; shown even when quiet."""
        self._print(f"[rank {world.rank}] {line}")

    def progress(self, seen: "Progressed") -> None:
        if self._quiet:
            return
        if self._live:
            self._bar.update(self._task, total=seen.steps, completed=seen.step, description=seen.name, says=str(seen))
            self._live.update(Group(self._bar, _workers(seen)))
        elif time.monotonic() - self._told >= LINE_SECONDS and not self._done:
            self._done = seen.step == seen.steps
            self._told = time.monotonic()
            self._print(f"{seen.name}: {seen}")

    @contextmanager
    def live(self) -> Iterator[None]:
        """The live display, where stderr is a terminal."""
        self._told = time.monotonic()
        if self._quiet or not self._rich.is_terminal:
            yield
            return
        with Live(console=self._rich, refresh_per_second=5, transient=True, redirect_stdout=False) as self._live:
            yield
        self._live = None

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
        self._made = time.monotonic()
        self._started: tuple[float, int] | None = None

    def start(self, worlds: list[World]) -> None:
        """These workers run from now on."""
        self.workers = {world.rank: (world, 0) for world in worlds}
        self._started = (time.monotonic(), self.rows)

    def add(self, rank: int, rows: int) -> None:
        world, before = self.workers[rank]
        self.workers[rank] = (world, before + rows)

    @property
    def rows_per_second(self) -> float:
        if self._started is None:
            return 0.0
        started, rows = self._started
        return (self.rows - rows) / max(1e-9, time.monotonic() - started)

    def __str__(self) -> str:
        if self._started is None:
            return f"starting the workers, {time.monotonic() - self._made:.0f} s"
        if self.step == self.steps:
            return f"step {self.step}/{self.steps}, {self.rows} rows, stopping the workers"
        rate = self.rows_per_second
        left = f", {_duration((self.rows_in_all - self.rows) / rate)} left" if rate else ""
        loss = f", loss {self.last['loss']:.4g}" if "loss" in self.last else ""
        return f"step {self.step}/{self.steps}, {self.rows} rows, {rate:,.0f} rows/s{loss}{left}"


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
