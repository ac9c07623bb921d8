"""The first batch in the middle of an epoch of a mixture, and what a position costs.

Of 10**8 rows of 16 sources. The others go on in a shuffled epoch of one dataset: accelerate's `skip_first_batches`,
torchdata's StatefulDataLoader with a state of that place, and the Hugging Face trainer with a checkpoint of that
step; its time is that of `train()` up to its first batch.

`python -m benchmarks.mixture SIDE` measures one side in a process of its own and prints JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.cluster import scratch
from benchmarks.compare import Goal, Pairs, compared
from benchmarks.measure import alternate, in_process, seconds
from benchmarks.table import Row, time_text
from dp_ray.data import Mix
from dp_ray.engine.loads.loading import Source, load_steps
from dp_ray.job.job import Job
from dp_ray.plan.mixture import MixtureOrder
from dp_ray.plan.order import EpochOrder, Order
from dp_ray.plan.split import Split, Work

ROWS, SOURCES, BATCH = 10**8, 16, 1024
REPEATS, TIMES = 3, 100
OTHERS = {
    "accelerate": ("accelerate", "skip_first_batches"),
    "torchdata": ("torchdata", "StatefulDataLoader"),
    "transformers": ("transformers", "the Hugging Face trainer's resume"),
}
UNDER_100_MS = Goal("at most 100 ms", 0.1, is_least=False, absolute=True)
UNDER_5_US = Goal("at most 5 µs", 5e-6, is_least=False, absolute=True)


class Numbers(Dataset[Any]):
    """Rows that are their numbers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return many rows at once."""
        return list(torch.tensor(indices).unbind())


def measure() -> Iterator[Row]:
    what = f"mixture: first batch at 50 % of an epoch of {ROWS:,} shuffled rows of {SOURCES} sources"
    for side, (module, against) in OTHERS.items():
        if find_spec(module) is None:
            print(f"mixture: no row beside {side}: pip install {side}", file=sys.stderr)
        else:
            yield compared(what, _pairs("dp_ray", side), time_text, f"{against}, one dataset", UNDER_100_MS)
    what = f"mixture: position to row, {SOURCES} sources of {10 * ROWS:,} rows, {BATCH:,} at once: a row"
    yield compared(what, _pairs("row", "row of one dataset"), time_text, "one dataset", UNDER_5_US)


def _pairs(*sides: str) -> Pairs:
    """The seconds of two sides, each in a process of its own."""
    first, second = (partial(in_process, "benchmarks.mixture", side) for side in sides)
    return [(ours["seconds"], theirs["seconds"]) for ours, theirs in alternate(first, second, REPEATS)]


def _mixed(rows: int) -> Mix:
    total = SOURCES * (SOURCES + 1) // 2
    sources = {f"source-{number:02}": Numbers(rows // SOURCES) for number in range(SOURCES)}
    weights = {name: f"{number}/{total}" for number, name in enumerate(sources, 1)}
    return Mix(sources, weights, {"rows": rows})


def _ours() -> Callable[[], Any]:
    keys = {"task": "train", "model": "a:b", "loss": "a:b", "optimizer": "a:b", "shuffle": True, "workers": 0}

    def first_batch() -> Any:
        mix = _mixed(ROWS)
        job = Job.make({**keys, "dataset": mix, "batch_size": BATCH, "collate": torch.stack}, "mixture")
        split = Split(ROWS, BATCH, 1)
        work = Work(split, 1, 0, start=split.steps // 2)
        with closing(load_steps(Source(job, mix), work, torch.device("cpu"))) as steps:
            (shard,) = next(steps).loaded
        return shard.batch

    return first_batch


def _skipping() -> Callable[[], Any]:
    from accelerate import skip_first_batches

    def first_batch() -> Any:
        loader: DataLoader[Any] = DataLoader(Numbers(ROWS), BATCH, shuffle=True, collate_fn=torch.stack)
        return next(iter(skip_first_batches(loader, len(loader) // 2)))

    return first_batch


def _stateful() -> Callable[[], Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made(rows: int) -> Any:
        return StatefulDataLoader(Numbers(rows), BATCH, shuffle=True, collate_fn=torch.stack)

    loader = made(4 * BATCH)
    next(iter(loader))
    state = loader.state_dict()  # after one batch; then as it is after half of the epoch
    batches = ROWS // BATCH // 2
    state |= {"_num_yielded": batches, "_sampler_iter_yielded": batches}
    sampler = state["_sampler_iter_state"]
    sampler["samples_yielded"] = sampler["sampler_iter_state"]["yielded"] = batches * BATCH

    def first_batch() -> Any:
        resumed = made(ROWS)
        resumed.load_state_dict(state)
        return next(iter(resumed))

    return first_batch


class Begun(Exception):
    """The trainer has its first batch."""


class One(nn.Module):
    """A model of one number; its forward ends the training if it is to."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.weight, self.ends = nn.Parameter(torch.ones(())), ends

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.ends:
            raise Begun
        return {"loss": (self.weight * rows).mean()}


def _trainer(folder: Path) -> Callable[[], Any]:
    from transformers import Trainer, TrainingArguments

    def trainer(ends: bool, **more: Any) -> Any:
        keys: dict[str, Any] = {
            "per_device_train_batch_size": BATCH,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        given = TrainingArguments(str(folder), **keys, **more)
        return Trainer(One(ends), given, lambda items: {"rows": torch.stack(items)}, Numbers(ROWS))

    trainer(False, max_steps=1, save_steps=1).train()
    state = folder / "checkpoint-1" / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "global_step": ROWS // BATCH // 2}))

    def first_batch() -> Any:
        with suppress(Begun):
            trainer(True, num_train_epochs=1).train(resume_from_checkpoint=str(state.parent))

    return first_batch


def _row(order: EpochOrder) -> float:
    taken = [seconds(lambda: order.indices(5 * ROWS, 5 * ROWS + BATCH)) for _ in range(TIMES)]
    return median(taken) / BATCH


def _of_trainer() -> float:
    with scratch() as folder:
        return seconds(_trainer(folder))


SIDES: dict[str, Callable[[], float]] = {
    "dp_ray": lambda: seconds(_ours()),
    "accelerate": lambda: seconds(_skipping()),
    "torchdata": lambda: seconds(_stateful()),
    "transformers": _of_trainer,
    "row": lambda: _row(MixtureOrder(_mixed(10 * ROWS).mixture, seed=1)),
    "row of one dataset": lambda: _row(Order(10 * ROWS, seed=1)),
}

if __name__ == "__main__":
    print(json.dumps({"seconds": SIDES[sys.argv[1]]()}))
