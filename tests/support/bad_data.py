"""Datasets with bad samples, and the plain loop over the good ones."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import Dataset

from dp_ray.plan.order import Order
from tests.support.training import Pairs


class Broken(Dataset[Any]):
    """Pairs of which some samples are bad, each in its own way; `image` gives them as images [1, 2, 3].

    `mended` is a file that lists samples that do not raise any more.
    """

    loader_context = "fork"

    def __init__(
        self,
        length: int = 101,
        raises: Collection[int] = (),
        misshapen: Collection[int] = (),
        nan: Collection[int] = (),
        matrix: Collection[int] = (),
        image: bool = False,
        mended: str = "",
    ) -> None:
        self.pairs = Pairs(length)
        self.raises, self.misshapen, self.nan = set(raises), set(misshapen), set(nan)
        self.matrix = set(matrix)
        self.image = image
        if mended and Path(mended).exists():
            self.raises -= {int(one) for one in Path(mended).read_text().split()}

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.pairs[index]
        if index in self.raises:
            raise ValueError(f"no such image: {index}")
        if index in self.nan:
            inputs = inputs.clone()
            inputs[2] = float("nan")
        if index in self.misshapen:
            return inputs[:4], target
        if index in self.matrix:
            return inputs.reshape(2, 3), target
        return (inputs.reshape(1, 2, 3) if self.image else inputs), target


class Named(Broken):
    """The same as dicts, of which each has an id."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)[0], "id": f"row {index}"}


def lines() -> Iterator[str]:
    """What a stream gives, one after another: text that `inputs_of` reads."""
    return (json.dumps([index, index % 3]) for index in range(23))


def inputs_of(text: str) -> Any:
    """The inputs and the target in a text; those of 5 and 17 are not there."""
    index, target = json.loads(text)
    if index in (5, 17):
        raise ValueError(f"no such line: {index}")
    return torch.full((6,), float(index)), target


def padded(items: list[Any]) -> Any:
    """Pads inputs of 1 dimension to the longest; other ones cannot be padded."""
    inputs = nn.utils.rnn.pad_sequence([one for one, _ in items], batch_first=True)
    return inputs[:, :6], torch.stack([target for _, target in items])


def good_loop(
    model: nn.Module,
    dataset: Any,
    bad: Collection[int],
    optimizer: torch.optim.Optimizer,
    shards: int,
    epochs: int = 2,
    batch_size: int = 7,
) -> list[tuple[int, float | None]]:
    """The oracle: one process on the good rows alone; rows and loss of each step.

    Shards keep their borders, and BatchNorm's statistics are those of shard 0, unless it has no rows.
    """
    told: list[tuple[int, float | None]] = []
    model.train()
    for epoch in range(epochs):
        order = Order(len(dataset), 0, epoch, shuffle=True)
        for start in range(0, len(dataset), batch_size):
            samples = torch.tensor([order[at] for at in range(start, min(start + batch_size, len(dataset)))])
            chunks = [[one for one in chunk.tolist() if one not in bad] for chunk in samples.chunk(shards)]
            told.append(_good_step(model, dataset, chunks, optimizer))
    return told


def _good_step(
    model: nn.Module, dataset: Any, chunks: list[list[int]], optimizer: torch.optim.Optimizer
) -> tuple[int, float | None]:
    rows = sum(map(len, chunks))
    if not rows:
        return 0, None
    optimizer.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after, total = before, 0.0
    for number, chunk in enumerate(chunks):
        if not chunk:
            continue
        _set(model, before)
        inputs, targets = (torch.stack(list(column)) for column in zip(*(dataset[one] for one in chunk), strict=True))
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / rows
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        if number == 0:
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _set(model, after)
    optimizer.step()
    return rows, total


def _set(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.data.copy_(values[name])


def quarantined(folder: Path) -> list[dict[str, Any]]:
    """The rows of quarantine.parquet but the tracebacks, read by pyarrow."""
    rows = pq.read_table(folder / "quarantine.parquet").drop_columns(["traceback"]).to_pylist()
    return [dict(row) for row in rows]
