"""Predict 200,000 rows of 256 floats on two workers, against Ray Data and against accelerate.

Every side runs the same model over the same rows and leaves its outputs in Parquet files; where it takes a torch
dataset it takes the same one. Ray is up for both that need it, and Ray Data finds the rows in Ray's memory already.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import pyarrow.dataset as pads

import dp_ray
from benchmarks import accelerated, mapped
from benchmarks.cluster import local_ray, scratch
from benchmarks.measure import in_process
from benchmarks.rows import loop_rate, make_rows
from benchmarks.table import Row, bytes_text, share

ROWS = 200_000
BATCH_SIZE = 1024
WORKERS = 2
REPEATS = 3
MEMORY_ROWS = (50_000, 200_000)


@dataclass(frozen=True)
class Taken:
    """One side's rows a second: of the whole, call to files on disk, and of its loop alone."""

    whole: float
    loop: float


Side = Callable[[Path, Path, Path], None]  # rows, stamps, folder for the outputs


def measure() -> list[Row]:
    with scratch() as folder:
        make_rows(folder / "rows", ROWS)
        with local_ray():
            sides: dict[str, Side] = {
                "dp_ray": _ours,
                "Ray Data": partial(mapped.predict, mapped.put(folder / "rows"), BATCH_SIZE, WORKERS),
                "accelerate": partial(accelerated.predict, BATCH_SIZE, WORKERS),
            }
            for side in sides.values():
                _take(side, folder)  # warms what can be warm
            rounds = [{name: _take(side, folder) for name, side in sides.items()} for _ in range(REPEATS)]
    found = {name: _median([one[name] for one in rounds]) for name in sides}
    return [*_rates(found, "whole"), *_rates(found, "loop"), _memory()]


def _ours(rows: Path, stamps: Path, out: Path) -> None:
    dp_ray.run(
        model={"target": "benchmarks.rows:Mlp", "args": {"stamps": str(stamps)}},
        dataset={"target": "benchmarks.rows:Rows", "args": {"path": str(rows)}},
        collate="benchmarks.rows:as_read",
        batch_size=BATCH_SIZE,
        workers=WORKERS,
        storage=str(out),
    )


def _take(side: Side, folder: Path) -> Taken:
    out, stamps = Path(mkdtemp(dir=folder)), Path(mkdtemp(dir=folder))
    started = time.perf_counter()
    side(folder / "rows", stamps, out)
    seconds = time.perf_counter() - started
    _check(out)
    return Taken(ROWS / seconds, loop_rate(stamps))


def _check(out: Path) -> None:
    """Every side has written a row of outputs for each row; no side is excused any."""
    files = [path for path in out.rglob("*.parquet") if path.name != "shapes.parquet"]
    written = pads.dataset([str(path) for path in files]).count_rows()
    assert written == ROWS, f"{out}: {written} rows of outputs, not {ROWS}"


def _median(taken: list[Taken]) -> Taken:
    return Taken(median(one.whole for one in taken), median(one.loop for one in taken))


def _rates(found: dict[str, Taken], what: str) -> Iterator[Row]:
    says = {"whole": "call to outputs on disk", "loop": "in the loop"}[what]
    ours = getattr(found["dp_ray"], what)
    for name in ("Ray Data", "accelerate"):
        theirs = getattr(found[name], what)
        yield Row(
            f"predict: {ROWS:,} rows, 2 workers, {says}",
            f"{ours:,.0f} rows/s",
            f"{theirs:,.0f} rows/s {name}",
            share(ours, theirs),
            "ahead",
            ours > theirs,
        )


def _memory() -> Row:
    few, many = (in_process("benchmarks.memory", rows) for rows in MEMORY_ROWS)
    return Row(
        f"predict: the driver's memory grows by, {MEMORY_ROWS[1]:,} rows against {MEMORY_ROWS[0]:,}, 4 kB each",
        bytes_text(many),
        bytes_text(few),
        share(many, few),
        "flat: at most 1.25",
        many <= 1.25 * few,
    )
