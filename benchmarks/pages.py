"""The page of a run of a million steps on two workers: how long it takes to make, and to open in Chromium.

The other side of making it is reading the same Parquet files alone. The other side of opening it is a page of a
thousand steps, which is not thinned out. The last row is what a short run waits for at its end.
"""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import sync_playwright

from benchmarks.cluster import scratch
from benchmarks.compare import Goal, compared
from benchmarks.measure import alternate, in_process, seconds
from benchmarks.table import Row, time_text
from dp_ray.engine.clock import PARTS
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import TimedSteps
from dp_ray.report.page import page_of, write_page
from dp_ray.results.result import Result
from dp_ray.rundir.history import METRICS
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from dp_ray.telemetry.times import step_time_parts, times_table

STEPS, FEW = 1_000_000, 1_000
WORKERS = 2
AT_ONCE = 30_000
REPEATS = 5
MADE = Goal("at most 5 s", 5.0, is_least=False, absolute=True)
OPENED = Goal("under 3 s", 3.0, is_least=False, absolute=True)
SHORT = Goal("at most 500 ms", 0.5, is_least=False, absolute=True)


def measure() -> Iterator[Row]:
    with scratch() as folder:
        long, short = (_run(folder / str(steps), steps) for steps in (STEPS, FEW))
        what = f"pages: make the page of {STEPS:,} steps, {WORKERS} workers"
        made = alternate(partial(seconds, partial(page_of, long)), partial(seconds, partial(_read, long)), REPEATS)
        yield compared(what, made, time_text, "reading its Parquet files", MADE)
        for run in (long, short):
            write_page(run)
        opened = _opened(Path(long.path) / "report.html", Path(short.path) / "report.html")
        yield compared(f"pages: open it in Chromium, {STEPS:,} steps", opened, time_text, f"{FEW:,} steps", OPENED)
        ends = [tuple(in_process("benchmarks.page_end", short.path)) for _ in range(REPEATS)]
        what = "pages: the page at a run's end, with all that it imports"
        yield compared(what, ends, time_text, "once it is imported", SHORT)


def _run(folder: Path, steps: int) -> Storage:
    """A run directory as a training leaves it: history, times of the workers' steps, result."""
    run = Storage(str(folder))
    run.create()
    given = {"task": "train", "batch_size": 4, "model": "a:b", "dataset": "a:b", "loss": "torch.nn:MSELoss"}
    job = Job.make({**given, "optimizer": "torch.optim:SGD"}, "pages").describe()
    run.write_text("run.json", json.dumps({"rows": {"dataset": 4 * steps}, "job": {**job, "name": "pages"}}))
    Result(str(run), "pages", "train", "done", 4 * steps, steps, total_steps=steps).save(run)
    step, drawn = np.arange(steps), np.random.default_rng(0)
    columns: dict[str, Any] = {"step": step, "epoch": step * 4 // steps, "loss": drawn.normal(0, 1, steps)}
    columns |= {name: drawn.random(steps) for name in ("right", "learning_rate", "gradient_norm")}
    columns |= {"rows": np.full(steps, 4), "rows_per_second": drawn.random(steps), "data_wait_seconds": step * 1e-9}
    write_table(run, METRICS, pa.table(columns))
    _write_times(run, steps, drawn)
    return run


def _write_times(run: Storage, steps: int, drawn: np.random.Generator) -> None:
    for number, first in enumerate(range(0, steps, AT_ONCE)):
        step = np.arange(first, min(first + AT_ONCE, steps))
        parts = step_time_parts(run)
        for rank in range(WORKERS):
            times = drawn.random((len(step), len(PARTS)), np.float32) / np.float32(1000)
            timed = TimedSteps(step, np.full(len(step), 2, np.int32), times)
            parts.add(times_table(0, World(rank=rank), timed))
        parts.write()
        assert (Path(run.path) / "times" / f"part-{number}.parquet").exists()


def _read(run: Storage) -> None:
    for path in [Path(run.path) / METRICS, *sorted(Path(run.path, "times").iterdir())]:
        pq.ParquetFile(path).read()


def _opened(long: Path, short: Path) -> list[tuple[float, float]]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))

        def open_page(file: Path) -> None:
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-drawn]")
            page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
            page.close()

        pairs = alternate(
            partial(seconds, partial(open_page, long)), partial(seconds, partial(open_page, short)), REPEATS
        )
        browser.close()
    return pairs
