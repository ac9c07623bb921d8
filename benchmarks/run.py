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
from benchmarks.compare import at_most, compared
from benchmarks.measure import alternate, seconds
from benchmarks.table import Row, time_text

JOB = Path(__file__).parent.parent / "jobs" / "tutorial.yaml"
WORKERS = 2
REPEATS = 5
AT_MOST = at_most(0.35, "at most 0.35 of its time")


def measure() -> list[Row]:
    with local_ray(), scratch() as folder:
        numbers = count()
        ours = partial(_run, folder, numbers)
        theirs = partial(_run_bare, folder, numbers)
        _check_equal(ours(), theirs())  # and both are warm
        pairs = alternate(lambda: seconds(ours), lambda: seconds(theirs), REPEATS)
    what = "run: 100 rows, 2 workers, Ray up: call to merged outputs"
    return [compared(what, pairs, time_text, "TorchTrainer, a report each batch", AT_MOST)]


def _run(folder: Path, numbers: "count[int]") -> torch.Tensor:
    result = dp_ray.run(JOB, workers=WORKERS, storage=str(folder), name=f"ours-{next(numbers)}", quiet=True)
    outputs: torch.Tensor = result.outputs
    return outputs


def _run_bare(folder: Path, numbers: "count[int]") -> torch.Tensor:
    return bare.run(folder / f"bare-{next(numbers)}", WORKERS)


def _check_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A benchmark of two different results would say nothing."""
    torch.testing.assert_close(ours, theirs)
