"""The second job of a session, call to merged outputs in hand, against the first one and a bare TorchTrainer.

All run PyTorch's DataParallel tutorial on two workers of a Ray that is up. The first job's time is that from the call
of `dp_ray.session`.
"""

import time
from dataclasses import replace
from pathlib import Path

import dp_ray
from benchmarks import bare
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import at_most, compared
from benchmarks.measure import seconds
from benchmarks.run import JOB, WORKERS
from benchmarks.table import Row, time_text

REPEATS = 5
WHAT = "session: 100 rows, 2 workers, Ray up: the second job, call to merged outputs"
AT_MOST_SECONDS = 1.0
AT_MOST_OF_FIRST = 0.1
AT_MOST_OF_TRAINER = 0.05


def measure() -> list[Row]:
    with local_ray(), scratch() as folder:
        rounds = [_round(folder / str(number)) for number in range(REPEATS + 1)]
    # In the first round, files are read into memory.
    first, second, trainer = zip(*rounds[1:], strict=True)
    return [
        _row(second, first, "the first, with its session", AT_MOST_OF_FIRST),
        _row(second, trainer, "TorchTrainer, a report each batch", AT_MOST_OF_TRAINER),
    ]


def _round(folder: Path) -> tuple[float, float, float]:
    """Seconds of a session's first job with its start, of its second job, and of the same on a TorchTrainer."""
    started = time.perf_counter()
    with dp_ray.session(workers=WORKERS, quiet=True) as session:
        _run(session, folder, "first")
        first = time.perf_counter() - started
        second = seconds(lambda: _run(session, folder, "second"))
    return first, second, seconds(lambda: bare.run(folder / "bare", WORKERS))


def _run(session: dp_ray.Session, folder: Path, name: str) -> None:
    outputs = session.run(JOB, storage=str(folder), name=name).outputs
    assert len(outputs) == bare.ROWS


def _row(ours: tuple[float, ...], theirs: tuple[float, ...], who: str, limit: float) -> Row:
    share = at_most(limit, f"at most {limit} of its time")
    in_all = replace(at_most(AT_MOST_SECONDS, f"{AT_MOST_SECONDS:.0f} s"), absolute=True)
    return compared(WHAT, list(zip(ours, theirs, strict=True)), time_text, who, share, in_all)
