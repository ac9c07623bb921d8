"""Predict rows of 256 floats on two workers, against Ray Data and against accelerate.

Every side runs the same model over the same rows and leaves its outputs in Parquet files; where it takes a torch
dataset it takes the same one. Ray is up for both that need it, and Ray Data finds the rows in Ray's memory already.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pyarrow.dataset as pads

import dp_ray
from benchmarks import accelerated, mapped, memory
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import AHEAD, at_most, compared
from benchmarks.measure import in_process, seconds
from benchmarks.rows import BATCH_SIZE, Work, loop_rate, make_rows
from benchmarks.table import Row, bytes_text, rate_text

ROWS = 200_000
TIMES = (1, 20)  # a short job, of which most is the start, and a longer one over the same rows
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
            _rounds(sides, folder, times=1, repeats=1)  # warms what can be warm
            for times in TIMES:
                found = _rounds(sides, folder, times, REPEATS)
                yield from _rates(found, times * ROWS, "whole")
            yield from _rates(found, times * ROWS, "loop")
    yield _memory()
    yield from memory.measure("cpu")


def _rounds(sides: dict[str, Side], folder: Path, times: int, repeats: int) -> list[dict[str, Taken]]:
    """What all sides took, which take turns."""
    work = Work(str(folder / "rows"), times, BATCH_SIZE, WORKERS)
    return [{name: _take(side, work, folder) for name, side in sides.items()} for _ in range(repeats)]


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
    check_outputs(out, rows)
    found = Taken(rows / taken, loop_rate(stamps))
    shutil.rmtree(out)
    return found


def check_outputs(out: Path, rows: int) -> None:
    """Every side has written a row of outputs for each row; no side is excused any."""
    found = out.rglob("*.parquet")
    files = [path for path in found if path.name != "shapes.parquet" and path.parent.name != "times"]
    written = pads.dataset([str(path) for path in files]).count_rows()
    assert written == rows, f"{out}: {written} rows of outputs, not {rows}"


def _rates(rounds: list[dict[str, Taken]], rows: int, what: str) -> Iterator[Row]:
    says = {"whole": "call to outputs on disk", "loop": "in the loop"}[what]
    for name in ("Ray Data", "accelerate"):
        pairs = [(getattr(taken["dp_ray"], what), getattr(taken[name], what)) for taken in rounds]
        yield compared(f"predict: {rows:,} rows, 2 workers, {says}", pairs, rate_text, name, AHEAD)


def _memory() -> Row:
    few, many = (in_process("benchmarks.memory", rows) for rows in MEMORY_ROWS)
    what = f"predict: the driver's memory grows by, {MEMORY_ROWS[1]:,} rows against {MEMORY_ROWS[0]:,}, 4 kB each"
    flat = at_most(1.25, "flat: at most 1.25")
    return compared(what, [(many, few)], bytes_text, f"{MEMORY_ROWS[0]:,} rows", flat)
