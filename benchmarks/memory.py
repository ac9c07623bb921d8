"""Memory at its peak: `python -m benchmarks.memory ROWS`, `python -m benchmarks.memory dp_ray|plain [DEVICE]`.

The first prints how many bytes the driver grows by in a run. The second prints the peak of a prediction by a model of
300 MB, over what there was before the model was built, in bytes of the model: resident, or allocated on a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import dp_ray
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import Goal, compared
from benchmarks.measure import grown, in_process
from benchmarks.rows import make_rows
from benchmarks.table import Row
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task

WARM_ROWS = 1_000
WIDTH, DEPTH = 2048, 18
SIDES = ("dp_ray", "plain")
LITTLE_MORE = Goal("at most 1.1", 1.1, is_least=False, absolute=True)


class Inputs(Dataset[torch.Tensor]):
    """Rows for `layers`."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index))


def layers(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def main(rows: int) -> int:
    """The peak above what the process held when it called `run`, in bytes."""
    with scratch() as folder, local_ray():
        make_rows(folder / "warm", WARM_ROWS)
        make_rows(folder / "measured", rows)
        _run(folder / "warm", WARM_ROWS)  # what is imported and connected once is no growth
        return grown(lambda: _run(folder / "measured", rows))


def _run(rows: Path, num_rows: int) -> None:
    result = dp_ray.run(
        model="benchmarks.rows:Wide",
        dataset={"target": "benchmarks.rows:Rows", "args": {"path": str(rows)}},
        batch_size=1024,
        workers=2,
        storage=str(rows.parent),
        quiet=True,
    )
    assert result.rows == num_rows


def measure(device: str) -> Iterator[Row]:
    """A prediction's peak beside plain torch's."""
    pair = tuple(in_process("benchmarks.memory", side, device) for side in SIDES)
    what = f"predict: peak memory on {device} over that without the model, 300 MB, in bytes of the model"
    yield compared(what, [pair], "{:.2f}".format, "plain torch", LITTLE_MORE)


def of_model(side: str, device: torch.device) -> float:
    """The peak of a prediction, in bytes of its model; one by a single layer first loads what is loaded once."""
    predict = {"dp_ray": _predict, "plain": _predict_plainly}[side]
    predict(1, device)
    peak_of = grown if device.type == "cpu" else _grown_on_gpu
    return peak_of(lambda: predict(DEPTH, device)) / (DEPTH * 4 * WIDTH * (WIDTH + 1))


def _grown_on_gpu(act: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    act()
    return torch.cuda.max_memory_allocated() - before


def _predict(depth: int, device: torch.device) -> None:
    keys = {
        "model": {"target": "benchmarks.memory:layers", "args": {"depth": depth}},
        "dataset": {"target": "benchmarks.memory:Inputs"},
        "batch_size": 16,
        "devices": [str(device)],
    }
    with scratch() as folder:
        run = Storage(str(folder))
        run.child(PARTS).create()
        run_task(Job.make(keys, "benchmark"), World(device=device), run, lambda _: None, StepControl())


def _predict_plainly(depth: int, device: torch.device) -> list[torch.Tensor]:
    model, rows = layers(depth).to(device).eval(), Inputs()
    with torch.inference_mode():
        batches = [torch.stack([rows[at] for at in range(start, start + 16)]) for start in range(0, len(rows), 16)]
        return [model(batch.to(device)).cpu() for batch in batches]


if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        print(of_model(sys.argv[1], torch.device(*sys.argv[2:] or ["cpu"])))
    else:
        print(main(int(sys.argv[1])))
