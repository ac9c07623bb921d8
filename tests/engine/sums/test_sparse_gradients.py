"""Sparse gradients over several workers: they stay sparse, and train as in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.group import run_group, weights_of
from tests.support.trainings import initial, job_of

HERE = "tests.engine.sums.test_sparse_gradients"
ROWS = 23


class Words(torch.utils.data.Dataset[Any]):
    """Rows of three words and a class; half of the vocabulary is in the last rows alone."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        first = 0 if index < ROWS // 2 else 20
        return torch.randint(first, first + 20, (3,), generator=draw), index % 3


class Tables(nn.Module):
    """Two tables with sparse gradients; rows without a rare word leave the second one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Embedding(40, 3, sparse=True), nn.EmbeddingBag(40, 3, sparse=True, mode="sum")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of three classes."""
        found: torch.Tensor = self.common(words).sum(1)
        return found + self.rare(words) if words.max() >= 20 else found


class Tied(Tables):
    """Its second table also ends the model: then its gradient is dense, in the shards of some workers alone."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of three classes."""
        found = super().forward(words)
        return found + (found @ self.rare.weight.T)[:, :3] if words.max() >= 20 else found


def plainly(make: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The oracle: one process of plain torch, a batch in as many pieces as there are shards."""
    made, data = initial(make), Words()
    steps = optimizer(made.parameters(), 0.1)
    for _ in range(2):
        for start in range(0, ROWS, 12):
            rows = [data[at] for at in range(start, min(start + 12, ROWS))]
            inputs, targets = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
            made.zero_grad()
            for piece, wanted in zip(inputs.tensor_split(3), targets.tensor_split(3), strict=True):
                loss = functional.cross_entropy(made(piece), wanted, reduction="sum") / len(rows)
                loss.backward()  # type: ignore[no-untyped-call]
            for parameter in made.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
            steps.step()
    return {name: value.detach() for name, value in made.named_parameters()}


@pytest.mark.parametrize(("model", "optimizer"), [(Tables, torch.optim.SparseAdam), (Tied, torch.optim.SGD)])
def test_workers_train_as_plain_torch(tmp_path: Path, model: Any, optimizer: Any) -> None:
    expected = plainly(model, optimizer)
    for workers in (1, 2, 3):
        job = job_of(
            {"target": f"{HERE}:{model.__name__}"},
            {"target": f"{HERE}:Words"},
            shards=3,
            workers=workers,
            batch_size=12,
            shuffle=False,
            optimizer={"target": f"torch.optim:{optimizer.__name__}", "args": {"lr": 0.1}},
        )
        run_group(job, tmp_path / str(workers))
        torch.testing.assert_close(weights_of(tmp_path / str(workers)), expected, rtol=1e-5, atol=1e-6)
