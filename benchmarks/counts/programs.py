"""Twelve small programs of plain torch, and what one process makes of them.

A program has 48 or 50 rows, which are read in order, 12 in each global batch: they divide among 1, 2 and 3 processes.
What it ends with is a dict of tensors: `weights` after 8 steps or more, `outputs` of all rows, or a `metric`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassF1Score

BATCH_SIZE = 12  # rows of a global batch
EPOCHS = 2
FEATURES, HIDDEN, CLASSES = 8, 16, 4
Results = dict[str, Tensor]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """`n` rows: 8 numbers and one of 4 classes."""

    def __init__(self, n: int = 48) -> None:
        made = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(n, FEATURES, generator=made)
        self.target = torch.randint(CLASSES, (n,), generator=made)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.target[index]


class Uneven(Rows):
    """50 rows: the last batch has 2."""

    def __init__(self) -> None:
        super().__init__(50)


class Noisy(Rows):
    """Rows with noise, drawn whenever they are read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + 0.5 * torch.randn(FEATURES), target


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """48 sentences of 1 to 6 tokens, the longer ones in front, padded to 6; -100 is a label that counts nothing."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(CLASSES, (48, 6), generator=made)
        self.target = torch.randint(CLASSES, (48, 6), generator=made)
        lengths = torch.randint(1, 7, (4, BATCH_SIZE), generator=made).sort(1, descending=True).values.flatten()
        self.target[torch.arange(6) >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.target[index]


class Mlp(nn.Sequential):
    """Two layers, with something between them."""

    def __init__(self, *between: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(FEATURES, HIDDEN), *between, nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def with_dropout() -> nn.Module:
    """An Mlp with dropout."""
    return Mlp(nn.Dropout(0.5))


def with_batchnorm() -> nn.Module:
    """BatchNorm, and an Mlp: a layer before it would have a bias without a gradient, of which Adam makes noise."""
    return nn.Sequential(nn.BatchNorm1d(FEATURES), Mlp())


class Tagger(nn.Module):
    """A class for each token, as `(rows, classes, tokens)`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.out = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.out(self.embedding(tokens))
        return scores.transpose(1, 2)


def mean(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of what has a label."""
    return functional.cross_entropy(outputs, target)


def contrastive(outputs: Tensor, target: Tensor) -> Tensor:
    """Supervised contrastive, over all pairs of the batch: rows of a class are to be alike."""
    embedded = functional.normalize(outputs, dim=1)
    alike = embedded @ embedded.T / 0.5 - 1e9 * torch.eye(len(outputs))
    same = (target[:, None] == target).float() - torch.eye(len(outputs))
    return -(same * alike.log_softmax(1)).sum() / same.sum().clamp(min=1)


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for all."""
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def sgd_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SGD for the first layer, Adam for the others."""
    first = [parameter for name, parameter in model.named_parameters() if "0." in name]
    others = [parameter for name, parameter in model.named_parameters() if "0." not in name]
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]


def f1() -> Metric:
    """The macro F1 of the classes, which is no mean of batches' ones."""
    return MulticlassF1Score(CLASSES, average="macro")


def flat(model: nn.Module) -> Tensor:
    """All that the model's file would have, as one row of numbers."""
    return torch.cat([value.detach().double().flatten() for _, value in sorted(model.state_dict().items())])


@dataclass(frozen=True)
class Program:
    """What to do, in the words of torch."""

    name: str
    asks: str
    model: Callable[[], nn.Module] = Mlp
    rows: Callable[[], Dataset[tuple[Tensor, Tensor]]] = Rows
    loss: Callable[[Tensor, Tensor], Tensor] = mean
    over: Literal["labels", "batch"] = "labels"  # the loss is a mean over labels, or needs all rows of the batch
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adam
    clip: float | None = None
    does: Literal["train", "metric", "predict"] = "train"
    left_after: int | None = None  # the step after which it is left, and begun anew from what it kept
    begun_by: int | None = None  # the number of processes that take the steps until then; others go on
    keeps_epochs: bool = False  # it keeps a checkpoint after each epoch, and goes on from one if there is any
    draws: str = ""  # where it draws random numbers: one process of plain torch draws others than any library's
    batch_size: int = BATCH_SIZE
    epochs: int = EPOCHS
    ends_with: Callable[[nn.Module], Tensor] = flat


PROGRAMS = (
    Program("dropout", "dropout in the model", model=with_dropout, draws="in the model"),
    Program("BatchNorm", "BatchNorm in the model", model=with_batchnorm),
    Program("clipping", "the gradient's norm is clipped", clip=0.1),
    Program("uneven", "50 rows, 12 in a batch: the last one has 2", rows=Uneven),
    Program("tokens", "a mean over tokens, of which each process has another number", Tagger, Sentences),
    Program("contrastive", "a loss over all pairs of the batch", loss=contrastive, over="batch"),
    Program("resume", "left within epoch 2, and begun anew", left_after=6),
    Program("another count", "begun by 2 processes, gone on with by 1 and 3", left_after=4, begun_by=2),
    Program("augmentation", "noise that the dataset draws", rows=Noisy, draws="in the dataset"),
    Program("metric", "the F1 of 50 rows", rows=Uneven, does="metric"),
    Program("predictions", "outputs of 50 rows: each once, in order", rows=Uneven, does="predict"),
    Program("optimizers", "SGD for one layer, Adam for the others", optimizers=sgd_and_adam),
)


def oracle(program: Program) -> Results:
    """What one process of plain torch ends with."""
    model, rows = program.model(), program.rows()
    if program.does != "train":
        inputs, target = next(iter(DataLoader(rows, batch_size=len(rows))))  # type: ignore[arg-type]
        outputs = model.eval()(inputs).detach()
        return {"outputs": outputs} if program.does == "predict" else {"metric": f1()(outputs, target)}
    optimizers = program.optimizers(model)
    for _ in range(program.epochs):
        for inputs, target in DataLoader(rows, batch_size=program.batch_size):
            model.zero_grad()
            program.loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
            if program.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.clip)
            for optimizer in optimizers:
                optimizer.step()
    return {"weights": program.ends_with(model)}
