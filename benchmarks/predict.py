"""Predict rows of 256 floats on two workers, against Ray Data and against accelerate.

Every side runs the same model over the same rows and leaves its outputs in Parquet files; where it takes a torch
dataset it takes the same one. Ray is up for both that need it, and Ray Data finds the rows in Ray's memory already.
"""

import shutil
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
from benchmarks.measure import in_process, seconds
from benchmarks.rows import Work, loop_rate, make_rows
from benchmarks.table import Row, bytes_text, share

ROWS = 200_000
TIMES = (1, 20)  # a short job, of which most is the start, and a longer one over the same rows
BATCH_SIZE = 1024
WORKERS = 2
REPEATS = 3
MEMORY_ROWS = (50_000, 200_000)


@dataclass(frozen=True)
class Taken:
    """One side's rows a second: of the whole, call to files on disk, and of its loop alone."""

    whole: float
    loop: float


Side = Callable[[Work, Path, Path], None]  # the work, a folder for stamps, one for the outputs


def measure() -> Iterator[Row]:
    with scratch() as folder:
        make_rows(folder / "rows", ROWS)
        with local_ray():
            sides: dict[str, Side] = {
                "dp_ray": _ours,
                "Ray Data": partial(mapped.predict, mapped.put(folder / "rows")),
                "accelerate": accelerated.predict,
            }
            _compared(sides, folder, times=1, repeats=1)  # warms what can be warm
            for times in TIMES:
                found = _compared(sides, folder, times, REPEATS)
                yield from _rates(found, times * ROWS, "whole")
            yield from _rates(found, times * ROWS, "loop")
    yield _memory()


def _compared(sides: dict[str, Side], folder: Path, times: int, repeats: int) -> dict[str, Taken]:
    """The medians of all sides, which take turns."""
    work = Work(str(folder / "rows"), times, BATCH_SIZE, WORKERS)
    rounds = [{name: _take(side, work, folder) for name, side in sides.items()} for _ in range(repeats)]
    return {name: _median([one[name] for one in rounds]) for name in sides}


def _ours(work: Work, stamps: Path, out: Path) -> None:
    dp_ray.run(
        model={"target": "benchmarks.rows:Mlp", "args": {"stamps": str(stamps)}},
        dataset={"target": "benchmarks.rows:Rows", "args": {"path": work.path, "times": work.times}},
        batch_size=work.batch_size,
        workers=work.workers,
        storage=str(out),
        quiet=True,
    )


def _take(side: Side, work: Work, folder: Path) -> Taken:
    out, stamps = Path(mkdtemp(dir=folder)), Path(mkdtemp(dir=folder))
    rows = work.times * ROWS
    taken = seconds(lambda: side(work, stamps, out))
    _check(out, rows)
    found = Taken(rows / taken, loop_rate(stamps))
    shutil.rmtree(out)
    return found


def _check(out: Path, rows: int) -> None:
    """Every side has written a row of outputs for each row; no side is excused any."""
    files = [path for path in out.rglob("*.parquet") if path.name != "shapes.parquet"]
    written = pads.dataset([str(path) for path in files]).count_rows()
    assert written == rows, f"{out}: {written} rows of outputs, not {rows}"


def _median(taken: list[Taken]) -> Taken:
    return Taken(median(one.whole for one in taken), median(one.loop for one in taken))


def _rates(found: dict[str, Taken], rows: int, what: str) -> Iterator[Row]:
    says = {"whole": "call to outputs on disk", "loop": "in the loop"}[what]
    ours = getattr(found["dp_ray"], what)
    for name in ("Ray Data", "accelerate"):
        theirs = getattr(found[name], what)
        yield Row(
            f"predict: {rows:,} rows, 2 workers, {says}",
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
