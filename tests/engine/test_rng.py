"""Random numbers are a sample's and a shard's own, whoever draws them, and a caller's generators stay."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.plan.split import Split, Work
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import training
from tests.support.builders import loader_of
from tests.support.group import history_of, run_group
from tests.support.merging import merged
from tests.support.trainings import job_of

HERE = "tests.engine.test_rng"
CPU = torch.device("cpu")


class Drawing:
    """Samples that are what was drawn for them; only every `each`-th draws at all."""

    def __init__(self, generator: str, each: int = 1) -> None:
        self.generator = generator
        self.each = each
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        if index % self.each:
            return torch.zeros(2, dtype=torch.float64)
        draws = {"torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "random": random.random}
        return torch.tensor([draws[self.generator](), index], dtype=torch.float64)


class DrawingMany(Drawing):
    """The same, read many at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def rows_of(dataset: Any, batch_size: int, shards: int, epoch: int = 0, **keys: Any) -> dict[int, list[float]]:
    """What each sample was in one epoch, however it was cut."""
    given = {
        "model": "a:b",
        "dataset": dataset,
        "batch_size": batch_size,
        "shards": shards,
        "order": "shuffled",
        **keys,
    }
    job = Job.make(given, "job")
    work = Work(Split(40, batch_size, shards, epochs=epoch + 1), start=epoch * Split(40, batch_size, shards).steps)
    loaded = loader_of(job, dataset, work)
    return {
        index: row for indices, rows in loaded for index, row in zip(indices.tolist(), rows.tolist(), strict=True)
    }


@pytest.mark.parametrize("generator", ["torch", "numpy", "random"])
@pytest.mark.parametrize("kind", [Drawing, DrawingMany])
@pytest.mark.parametrize("each", [1, 13])
def test_what_a_sample_draws_is_its_own(generator: str, kind: type[Drawing], each: int) -> None:
    first = rows_of(kind(generator, each), 7, 3)
    assert rows_of(kind(generator, each), 40, 1) == first
    assert rows_of(kind(generator, each), 5, 5, loader={"processes": 2}) == first
    assert rows_of(kind(generator, each), 7, 3, epoch=1) != first
    assert rows_of(kind(generator, each), 7, 3, seed=1) != first
    drawn = [row[0] for index, row in first.items() if index % each == 0]
    assert len(set(drawn)) == len(drawn), "two samples drew the same"


def test_samples_that_draw_nothing_are_read_once() -> None:
    dataset = Drawing("torch", each=1000)
    dataset.__class__ = type(
        "RngProbe", (Drawing,), {"__getitem__": lambda self, index: self.read.append(index) or torch.ones(2)}
    )
    rows_of(dataset, 7, 3)
    assert sorted(dataset.read) == list(range(40))


def drawing_collate(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(())


def test_a_collate_draws_for_its_shard() -> None:
    dataset = list(torch.zeros(40, 2))
    first = rows_of(dataset, 8, 4, collate=drawing_collate)
    assert rows_of(dataset, 8, 4, collate=drawing_collate, loader={"processes": 1}) == first
    assert len({row[0] for row in first.values()}) == 20, "each of 20 shards has its own"


class Noise(nn.Module):
    """Draws from all three generators, in eval mode too."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 0 + torch.rand(()) + random.random() + float(np.random.rand())


def test_a_models_noise_is_the_shards_and_the_callers_generators_are_given_back(tmp_path: Path) -> None:
    found = []
    torch.manual_seed(5)
    before = torch.rand(3), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    torch.manual_seed(5)
    for workers in (1, 3):
        job = Job.make({"model": Noise(), "dataset": torch.zeros(20, 2), "batch_size": 8, "shards": 4}, "job")
        run = Storage(str(tmp_path / str(workers)))
        run.child(PARTS).create()
        for rank in range(workers):
            run_task(job, World(rank, workers), run, lambda _: None)
        found.append(merged(job, run, 20).read())
    assert torch.equal(found[0], found[1])
    assert len(found[0].unique()) == 4 + 4 + 4, "each shard of each step has its own"
    after = torch.rand(3), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]


module_level = np.random.default_rng(5)


def with_module_level(value: float) -> float:
    return value + module_level.random()


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: float) -> float:
        if isinstance(self.rng, torch.Generator):
            return value + torch.rand((), generator=self.rng, dtype=torch.float64).item()
        return (
            value + self.rng.random() if not isinstance(self.rng, np.random.RandomState) else value + self.rng.rand()
        )


class Slotted:
    __slots__ = ("jitter",)


class MadeLate:
    """Makes its generator when it is called first, in whichever process that is."""

    rng: Any = None

    def __call__(self, value: float) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return float(value + self.rng.random())


class Base(torch.utils.data.Dataset[Any]):
    """Samples of which each number comes from a generator that another thing holds."""

    of_class = np.random.default_rng(9)

    def __init__(self, first: int, num: int) -> None:
        self.first, self.num = first, num
        by_variable, slotted = Jitter(random.Random(1)), Slotted()
        slotted.jitter = Jitter(np.random.default_rng(2))  # type: ignore[attr-defined]
        self.unused: list[Any] = [np.random.default_rng(7), random.Random(7), torch.Generator()]
        self.transforms: list[Callable[[float], float]] = [
            Jitter(np.random.default_rng(1)),
            nn.ModuleList([Named(torch.Generator())])[0],
            lambda value: by_variable(value),
            functools.partial(lambda jitter, value: jitter(value), Jitter(np.random.RandomState(3))),
            Jitter(np.random.Generator(np.random.MT19937(4))).__call__,
            lambda value: slotted.jitter(value),  # type: ignore[attr-defined]
            with_module_level,
            lambda value: value + type(self).of_class.random(),
            MadeLate(),
        ]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [transform(self.first + index) for transform in self.transforms]
        return torch.tensor([*drawn, self.first + index], dtype=torch.float64)


class Named(nn.Module):
    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.jitter = {"of": Jitter(rng)}

    def forward(self, value: float) -> float:
        return self.jitter["of"](value)


class Around(torch.utils.data.Dataset[torch.Tensor]):
    """A wrapper of the user's own, which calls what it wraps neither `dataset` nor anything else that is known."""

    loader_context = "fork"  # its lambdas cannot be pickled

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> torch.Tensor:
        item: torch.Tensor = self.parts[index]
        return item


def around() -> Around:
    return Around(torch.utils.data.ConcatDataset[Any]([Base(0, 15), Base(15, 25)]))


def test_generators_are_found_wherever_a_dataset_holds_them() -> None:
    first = rows_of(around(), 7, 3)
    assert rows_of(around(), 40, 1) == first
    assert rows_of(around(), 5, 5, loader={"processes": 2}) == first
    drawn = np.array([first[index] for index in range(40)])
    assert drawn[:, -1].tolist() == list(range(40))
    noise = drawn[:, :-1] - drawn[:, -1:]
    assert [len(set(column)) for column in noise.T] == [40] * 9, "each sample has its own, whoever draws"
    assert len({round(value, 12) for value in noise.flatten()}) == noise.size, "no two generators draw the same"
    assert 0 <= noise.min() < 0.1 < 0.4 < noise.mean() < 0.6 < 0.9 < noise.max() < 1
    assert rows_of(around(), 7, 3, epoch=1)[0] != first[0]


def test_a_generator_that_no_sample_draws_from_stays_as_it_is() -> None:
    dataset = around()
    kept = dataset.parts.datasets[1].unused
    expected: list[Any] = [
        np.random.default_rng(7).random(),
        random.Random(7).random(),
        torch.rand(2, generator=torch.Generator()),
    ]
    rows_of(dataset, 7, 3)
    assert [kept[0].random(), kept[1].random()] == expected[:2]
    assert torch.equal(torch.rand(2, generator=kept[2]), expected[2])


class Held:
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        self.held = {"of": [random.Random(1)]}

    def draw(self) -> float:
        return self.held["of"][0].random()


class DrawingModel(nn.Module):
    """Gives what it draws beside each row's input."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.rng = Held() if draws else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + (0.0 if self.rng is None else self.rng.draw())


class DrawingCollate(Held):
    def __call__(self, items: list[Any]) -> torch.Tensor:
        return torch.stack(items) + self.draw()


class Zeros(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.float64)


WAYS: dict[str, dict[str, Any]] = {
    "1": {},
    "2": {"workers": 2},
    "loaders": {"workers": 2, "loader": {"processes": 2}},
}


@pytest.mark.parametrize("draws", ["model", "collate"])
def test_what_a_model_and_a_collate_draw_from_their_own_is_their_shards(tmp_path: Path, draws: str) -> None:
    model = {"target": f"{HERE}:DrawingModel", "args": {"draws": draws == "model"}}
    keys: dict[str, Any] = {"model": model, "dataset": {"target": f"{HERE}:Zeros"}, "batch_size": 8, "shards": 4}
    keys |= {"collate": {"target": f"{HERE}:DrawingCollate"}} if draws == "collate" else {}
    found = []
    for name, more in WAYS.items():
        job = Job.make({**keys, **more}, "job")
        run_group(job, tmp_path / name)
        found.append(merged(job, tmp_path / name, 20).read().tolist())
    assert found[0] == found[1] == found[2]
    assert len({row[0] for row in found[0]}) == 4 + 4 + 4, "each shard of each step has its own"


class DrawingRows(Held, training.Pairs):
    """Pairs whose inputs are drawn."""

    loader_context = "fork"

    def __init__(self) -> None:
        Held.__init__(self)
        training.Pairs.__init__(self, 12)

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), self.draw()), self.targets[index]


class DrawingLoss(Held):
    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        drawn = self.draw() if torch.is_grad_enabled() else 1.0
        return nn.functional.cross_entropy(outputs, target, reduction="none") * drawn


def distinct(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 for each row whose outputs no other row of the shard has."""
    rows = list(map(tuple, outputs.tolist()))
    return torch.tensor([float(rows.count(row) == 1) for row in rows])


def test_what_a_loss_and_an_evaluations_dataset_draw_is_as_in_one_process(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "batch_size": 10,
        "shards": 4,
        "bitwise": True,
        "metrics": {"distinct": f"{HERE}:distinct"},
    }
    keys |= {"eval": {"dataset": {"target": f"{HERE}:DrawingRows"}, "every_steps": 2}}
    keys |= {
        "loss": {"target": f"{HERE}:DrawingLoss"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}},
    }
    found = []
    for name, more in WAYS.items():
        run_group(job_of("mlp", {"target": f"{HERE}:SamePairs"}, **keys, **more), tmp_path / name)
        found.append(history_of(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert len({row["loss"] for row in found[0]}) == len(found[0]), "each step has its own"
    assert {row["eval_distinct"] for row in found[0] if row["eval_distinct"] is not None} == {1.0}


class SamePairs(training.Pairs):
    """Pairs that are all the same."""

    loader_context = "fork"

    def __init__(self) -> None:
        super().__init__(40)
        self.inputs, self.targets = self.inputs * 0 + 1, self.targets * 0
