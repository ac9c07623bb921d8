"""The smallest inputs on which 1 and 2 processes differ: two to five rows, and sums that one does by hand.

The model is a weight `w` that multiplies its inputs. The loss is minus the mean of what comes out, so a step of SGD
with a learning rate of 1 adds to `w` the mean of the batch's inputs. What each ends at stands in README.md.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.counts.programs import Program

Pairs = Dataset[tuple[Tensor, Tensor]]


class Weight(nn.Module):
    """Inputs, after what is `before`, times `w`: a number for each column."""

    def __init__(self, begins: float = 0.0, columns: int = 1, before: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.before, self.w = before or nn.Identity(), nn.Parameter(torch.full((columns,), begins))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.before(inputs) * self.w
        return outputs


class Drawn(TensorDataset):
    """Rows of one number, which is drawn whenever it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return torch.randn(1), self.tensors[1][index]


def rows(*inputs: list[float], target: list[list[int]] | list[int] | None = None) -> Callable[[], Pairs]:
    """What makes a dataset of these rows; without a target all count alike."""
    values = torch.tensor(inputs)
    labels = torch.zeros_like(values, dtype=torch.long) if target is None else torch.tensor(target)
    return partial(TensorDataset, values, labels)  # type: ignore[return-value]


def drawn() -> Pairs:
    """Two rows that are drawn."""
    return Drawn(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long))  # type: ignore[return-value]


def begins_at_one() -> nn.Module:
    """A weight of 1."""
    return Weight(1.0)


def begins_at_64() -> nn.Module:
    """A weight of 64."""
    return Weight(64.0)


def scores() -> nn.Module:
    """Four weights of 1."""
    return Weight(1.0, 4)


def dropped() -> nn.Module:
    """Four columns, each of which is dropped or doubled."""
    return Weight(columns=4, before=nn.Dropout(0.5))


def normed() -> nn.Module:
    """BatchNorm, of which the running mean is looked at."""
    return Weight(before=nn.BatchNorm1d(1))


def minus_mean(outputs: Tensor, target: Tensor) -> Tensor:
    """Minus the mean of what has a label."""
    return -outputs[target != -100].mean()


def squares(outputs: Tensor, target: Tensor) -> Tensor:
    """Half the mean square of what has a label."""
    return outputs[target != -100].square().mean() / 2


def minus_pairs(outputs: Tensor, target: Tensor) -> Tensor:
    """Minus the sum of the products of all pairs of rows."""
    return -torch.triu(outputs @ outputs.T, 1).sum()


def step(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SGD with a learning rate of 1."""
    return [torch.optim.SGD(model.parameters(), lr=1.0)]


def heavy_step(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SGD with momentum: what it does depends on the steps before."""
    return [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)]


def running_mean(model: nn.Module) -> Tensor:
    """That of `normed`."""
    return model.before.running_mean.detach().double()  # type: ignore[union-attr, operator]


def one(name: str, asks: str, **keys: object) -> Program:
    """A program of one epoch; two rows are a batch unless it says otherwise."""
    begun = {"model": Weight, "loss": minus_mean, "optimizers": step, "batch_size": 2, "epochs": 1}
    return Program(name, asks, **{**begun, **keys})  # type: ignore[arg-type]


SCORES = rows(*[[1.0, 0.0, 0.0, 0.0]] * 3, target=[0, 1, 1])
SMALLEST = (
    one("dropout", "w of 2 rows of 4 ones", model=dropped, rows=rows([1.0] * 4, [1.0] * 4), draws="in the model"),
    one(
        "BatchNorm",
        "running mean of 0, 2, 2, 4",
        model=normed,
        rows=rows([0.0], [2.0], [2.0], [4.0]),
        batch_size=4,
        ends_with=running_mean,
    ),
    one("uneven", "w of 1, 2, and 6 alone", rows=rows([1.0], [2.0], [6.0])),
    one(
        "momentum",
        "w, from 64, of five ones, twice",
        model=begins_at_64,
        rows=rows(*[[1.0]] * 5),
        loss=squares,
        optimizers=heavy_step,
        epochs=2,
    ),
    one("tokens", "w of 8, and of 0, 0, 4", rows=rows([8.0, 0, 0], [0.0, 0, 4], target=[[0, -100, -100], [0, 0, 0]])),
    one(
        "contrastive",
        "w, from 1, of the pair 1, 3",
        model=begins_at_one,
        rows=rows([1.0], [3.0]),
        loss=minus_pairs,
        over="batch",
    ),
    one("augmentation", "w of 2 drawn numbers", rows=drawn, draws="in the dataset"),
    one(
        "metric",
        "F1 of one row of class 0, two of class 1, all taken for 0",
        model=scores,
        rows=SCORES,
        does="metric",
    ),
)
