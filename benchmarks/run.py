"""A whole small run, call to merged outputs in hand, against the same on a bare TorchTrainer.

Both run PyTorch's DataParallel tutorial on two workers of a Ray that is up: 100 rows, global batches of 30, the
shapes of every shard told to the driver. The bare one does it as Ray Train's documentation does, with its defaults.
"""

from functools import partial
from itertools import count
from pathlib import Path

import torch

import dp_ray
from benchmarks import bare
from benchmarks.cluster import local_ray, scratch
from benchmarks.measure import alternate, medians, seconds
from benchmarks.table import Row, share, time_text

JOB = Path(__file__).parent.parent / "jobs" / "tutorial.yaml"
WORKERS = 2
REPEATS = 3
AT_MOST = 0.5


def measure() -> list[Row]:
    with local_ray(), scratch() as folder:
        numbers = count()
        ours = partial(_run, folder, numbers)
        theirs = partial(_run_bare, folder, numbers)
        _check_equal(ours(), theirs())  # and both are warm
        ours_seconds, theirs_seconds = medians(
            alternate(lambda: seconds(ours), lambda: seconds(theirs), REPEATS),
        )
    return [
        Row(
            "run: 100 rows, 2 workers, Ray up: call to merged outputs",
            time_text(ours_seconds),
            f"{time_text(theirs_seconds)} TorchTrainer, a report each batch",
            share(ours_seconds, theirs_seconds),
            f"at most {AT_MOST} of its time",
            ours_seconds <= AT_MOST * theirs_seconds,
        )
    ]


def _run(folder: Path, numbers: "count[int]") -> torch.Tensor:
    result = dp_ray.run(JOB, workers=WORKERS, storage=str(folder), name=f"ours-{next(numbers)}", quiet=True)
    outputs: torch.Tensor = result.outputs
    return outputs


def _run_bare(folder: Path, numbers: "count[int]") -> torch.Tensor:
    return bare.run(folder / f"bare-{next(numbers)}", WORKERS)


def _check_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A benchmark of two different results would say nothing."""
    torch.testing.assert_close(ours, theirs)
