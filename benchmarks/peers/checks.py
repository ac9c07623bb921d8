"""The checks of accelerate's own test and Fabric's parity test, made of dp_ray: models, data, and what is compared.

`python -m benchmarks.peers.checks` runs those of accelerate's, on two workers and in this process; it prints JSON.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from accelerate.test_utils import RegressionDataset, RegressionModel
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import dp_ray

WORKERS, BATCH, EPOCHS = 2, 8, 3  # as accelerate's test trains, with 8 samples on each
LENGTH = BATCH * 4 * WORKERS
TRAINING: dict[str, Any] = {
    "task": "train",
    "model": RegressionModel,
    "dataset": {"target": RegressionDataset, "args": {"length": LENGTH, "seed": 42}},
    "inputs": ["x"],
    "target": "y",
    "loss": nn.MSELoss,
    "optimizer": {"target": torch.optim.SGD, "args": {"lr": 0.1}},
    "batch_size": BATCH * WORKERS,
    "shards": WORKERS,
    "epochs": EPOCHS,
    "bitwise": True,
}


class Numbers(Dataset[int]):
    """So many numbers, from 0 on."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.length:
            raise IndexError(index)
        return index


class Nested(Numbers):
    """Items with a number, a text and a tensor."""

    def __getitem__(self, index: int) -> Any:
        return {"a": index, "b": "abcdefgh"[index % 8], "c": torch.tensor([index, index + 1])}


class Same(nn.Module):
    """Gives what it gets."""

    def forward(self, inputs: Any) -> Any:
        return inputs


class Noise(nn.Module):
    """A random number for each row."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(inputs))


def fabric_model() -> Any:
    """The model of Fabric's parity test, with its weights."""
    models = import_module("parity_fabric.models")  # of its scripts
    torch.manual_seed(1)
    return models.ConvNet()


def fabric_data(workers: int) -> Dataset[Any]:
    """Its data; each shard has the rows that a DistributedSampler deals to the process of its number."""
    model = fabric_model()
    data, batch = model.get_dataloader().dataset, model.batch_size * workers
    dealt = torch.arange(len(data)).reshape(-1, batch // workers, workers).transpose(1, 2).flatten()
    return Subset(data, dealt.tolist())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, dp_ray.session(workers=WORKERS, quiet=True) as session:
        keep: dict[str, Any] = {"storage": folder, "quiet": True}
        both = [partial(session.run, workers=WORKERS, **keep), partial(dp_ray.run, workers=0, **keep)]
        predict = partial(both[0], task="predict", model=Same, shards=WORKERS)
        found = {
            "split between processes": _split(predict),
            "random numbers in sync": _in_sync(both),
            "partition of the data": _partition(predict),
            **_training(both),
        }
    print(json.dumps(found))


def _split(predict: Any) -> bool:
    """17 items are 9 and 8; numbers, texts and tensors of nested items are merged in order, of odd lengths too."""
    uneven = predict(dataset=Numbers(17), batch_size=17)
    sizes = [report.rows for report in uneven.shapes]
    nested = [predict(dataset=Nested(length), batch_size=length).outputs for length in (8, 7)]
    wanted = [[Nested(length)[index] for index in range(length)] for length in (8, 7)]
    return sizes == [9, 8] and all(_as_rows(got) == _plain(rows) for got, rows in zip(nested, wanted, strict=True))


def _as_rows(outputs: Any) -> list[Any]:
    columns = [outputs[key].tolist() if torch.is_tensor(outputs[key]) else list(outputs[key]) for key in "abc"]
    return [list(row) for row in zip(*columns, strict=True)]


def _plain(items: Sequence[Any]) -> list[Any]:
    return [[item["a"], item["b"], item["c"].tolist()] for item in items]


def _in_sync(both: Sequence[Any]) -> bool:
    """What a model draws is the same on two workers as in one process."""
    draws = [
        run(task="predict", model=Noise, dataset=Numbers(32), batch_size=8, shards=WORKERS).outputs for run in both
    ]
    return torch.equal(*draws) and len(draws[0].unique()) == 32


def _partition(predict: Any) -> bool:
    """Each sample once, in order; shuffled, in another order, which is the seed's alone."""
    given = {"dataset": Numbers(32 * WORKERS), "batch_size": 8}
    plain = predict(**given).outputs
    first, again, other = (predict(**given, order="shuffled", seed=seed).outputs for seed in (42, 42, 43))
    every = torch.arange(32 * WORKERS)
    complete = all(torch.equal(outputs.sort().values, every) for outputs in (first, other))
    return torch.equal(plain, every) and complete and torch.equal(first, again) and not torch.equal(first, other)


def _training(both: Sequence[Any]) -> dict[str, Any]:
    """Trainings on two workers and in one process: in fp32, in bf16, shuffled. The first two against plain torch."""
    kinds: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"shuffle": True}]
    pairs = [[run(**TRAINING, **keys).weights for run in both] for keys in kinds]
    oracle = plain_torch()
    distance = max(float((pairs[kind][0][name] - oracle[name]).abs()) for kind in (0, 1) for name in oracle)
    same = [all(torch.equal(two[name], one[name]) for name in oracle) for two, one in pairs]
    return {"trainings": len(pairs), "same": sum(same), "distance": distance}


def plain_torch() -> dict[str, torch.Tensor]:
    """The weights that a loop in one process gives."""
    model, loss = RegressionModel(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for batch in DataLoader(RegressionDataset(length=LENGTH, seed=42), batch_size=BATCH * WORKERS):
            optimizer.zero_grad()
            loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    from benchmarks.peers import checks

    checks.main()  # its classes have a module's name then, which workers import
