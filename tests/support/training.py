"""Models, datasets and losses of the training tests, and the plain torch loop that they are compared with."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from dp_ray.plan.order import Order

IGNORED = -100  # a target that is no label


class Pairs(Dataset[Any]):
    """`length` pairs of 6 normal numbers and a class of 3; with `augment`, noise of all three generators."""

    def __init__(self, length: int = 101, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(length, 6, generator=generator)
        self.targets = torch.randint(3, (length,), generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        if self.augment:
            inputs = inputs + 0.1 * torch.randn(6) + random.random() + torch.from_numpy(np.random.rand(6)).float()
        return inputs, self.targets[index]


class Started(Pairs):
    """Pairs whose loader's processes are started so."""

    def __init__(self, loader_context: str, length: int = 101) -> None:
        super().__init__(length)
        self.loader_context = loader_context


class PartlyLabelled(Pairs):
    """Pairs of which only every third has a label, counted from `first` on, and none from `end` on."""

    def __init__(self, length: int = 42, first: int = 0, end: int = 1000) -> None:
        super().__init__(length)
        self.targets[torch.arange(length) % 3 != first] = IGNORED
        self.targets[end:] = IGNORED


def as_images(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A `collate`: the pairs as images [1, 2, 3]."""
    inputs, targets = zip(*items, strict=True)
    return torch.stack(inputs).reshape(-1, 1, 2, 3), torch.stack(targets)


class Images(Pairs):
    """The pairs as images [1, 2, 3]."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs.reshape(1, 2, 3), target


class Sentences(Dataset[Any]):
    """Rows of 5 to 9 tokens, padded to 9 with 0; the targets are the next tokens, -100 where there is none."""

    def __init__(self, length: int = 53, ragged: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 11, (length, 9), generator=generator)
        self.lengths = torch.randint(5 if ragged else 9, 10, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        tokens, length = self.tokens[index].clone(), int(self.lengths[index])
        tokens[length:] = 0
        targets = torch.full((9,), -100)
        targets[: length - 1] = tokens[1:length]
        return tokens, targets


def mlp(dropout: float = 0.0, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 4, 3)
    )


class Transformer(nn.Module):
    """A small language model with tied embeddings: tokens [rows, 9] to logits [rows, 11, 9]."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: torch.Tensor = self.head(self.layer(self.embedding(tokens), mask, is_causal=True))
        return logits.transpose(1, 2)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens, and how many they are."""
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def mean_of_labels(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over the labels, and how many they are; of none it is NaN, and so is its gradient, 0 times 1 / 0."""
    mask = target != IGNORED
    losses = nn.functional.cross_entropy(outputs, target.clamp(min=0), reduction="none")
    mean = (losses * mask).sum() / mask.sum()
    return mean * mask.sum(), mask.sum()


def right(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 for each row that is classified rightly."""
    return (outputs.argmax(1) == target).float()


def warm_up(optimizer: torch.optim.Optimizer, steps: int = 10) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def plain_batches(
    dataset: Any, batch_size: int, epochs: int, seed: int = 0, order_of: Callable[[int], Any] | None = None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The global batches of a training in its order, stacked in one process: the epoch, inputs and targets."""
    for epoch in range(epochs):
        order = order_of(epoch) if order_of else Order(len(dataset), seed, epoch, shuffle=True)
        for start in range(0, len(dataset), batch_size):
            picked = [dataset[order[at]] for at in range(start, min(start + batch_size, len(dataset)))]
            inputs, targets = (torch.stack(list(column)) for column in zip(*picked, strict=True))
            yield epoch, inputs, targets


def plain_loop(
    model: nn.Module,
    dataset: Any,
    batch_size: int,
    epochs: int,
    loss_of_chunks: Callable[[nn.Module, Sequence[Any]], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    shards: int = 1,
    seed: int = 0,
    after_backward: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    order_of: Callable[[int], Any] | None = None,
) -> list[float]:
    """The oracle: one process, whole batches of the same order; the losses of its steps."""
    losses = []
    model.train()
    for _, inputs, targets in plain_batches(dataset, batch_size, epochs, seed, order_of):
        chunks = list(zip(inputs.chunk(shards), targets.chunk(shards), strict=True))
        optimizer.zero_grad()
        loss = loss_of_chunks(model, chunks)
        loss.backward()  # type: ignore[no-untyped-call]
        after_backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


class PartlyUsed(nn.Sequential):
    """Two layers that are used, one that never is, one that is frozen."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Linear(16, 3))
        self.unused = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self[1](torch.relu(self[0](self.frozen(inputs))))
        return outputs


def partly_used() -> nn.Module:
    return PartlyUsed()


class Mappings(Pairs):
    """The pairs as mappings."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return {"x": inputs, "y": target}


class Headed(nn.Module):
    """A model without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.relu(self.body(inputs)))
        return outputs


def own_step(model: Headed, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    outputs = model.encode(batch["x"])
    losses = nn.functional.cross_entropy(outputs, batch["y"], reduction="none")
    return {"loss": (losses.sum(), len(losses)), "outputs": outputs, "target": batch["y"]}


def strange_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"los": model(batch[0])}


def constant_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(outputs))


def wild(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Numbers of very different sizes, with all the digits of a double."""
    return torch.exp(outputs[:, 0].double() * 60)


class HalfMlp(nn.Module):
    """A model whose parameters and outputs are fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).half()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.half())
        return outputs


def heavy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1,000 for each row, in the outputs' own precision: 66 rows are more than fp16 holds."""
    return 1000.0 + 0.0 * outputs[:, 0]


class Scores:
    """A metric with a state, as torchmetrics has it, whose value is a mapping."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.rows = 0

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.right += int((outputs.argmax(1) == target).sum())
        self.rows += len(target)

    __call__ = update

    def merge_state(self, other: "Scores") -> None:
        self.right, self.rows = self.right + other.right, self.rows + other.rows

    def compute(self) -> dict[str, Any]:
        return {"right": self.right, "rows": (torch.tensor(self.rows), self.rows)}

    def to(self, device: torch.device) -> "Scores":
        return self

    def cpu(self) -> "Scores":
        return self


def scripted() -> nn.Module:
    """The conv net as a TorchScript module."""
    made: nn.Module = torch.jit.script(conv())
    return made


class Blocks(nn.Module):
    """A language model of blocks in a ModuleList: tokens [rows, 9] to logits [rows, 11, 9]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.places = nn.Parameter(torch.empty(9, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.places, std=0.02)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.places
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)


class ReadsItsWeights(nn.Module):
    """A model whose constructor reads numbers of a tensor, so that it cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.body.weight.data *= 1.0 / self.body.weight.abs().max().item()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        return outputs


class RunsTwice(nn.Module):
    """A model that runs its one block twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.relu(self.blocks[0](torch.relu(self.blocks[0](inputs)))))
        return outputs


class EitherBlock(nn.Module):
    """A model whose rows decide which of two blocks runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = self.blocks[int(inputs[0, 0] > 0)]
        outputs: torch.Tensor = self.head(torch.relu(chosen(inputs)))
        return outputs


class Expert(nn.Module):
    """A layer with three experts, of which each row takes one; none takes the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.gate(inputs).softmax(1)
        chosen, mixed = scores.argmax(1), inputs
        for number in chosen.unique().tolist():
            taken = chosen == number
            share = torch.zeros_like(inputs)
            share[taken] = self.experts[number](inputs[taken]) * scores[taken, number, None]
            mixed = mixed + share
        return mixed


class Experts(nn.Module):
    """A mixture of experts; the first and the last layer share a gate, and the second one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(4))
        first, second, third, last = (layer for layer in self.layers if isinstance(layer, Expert))
        last.gate = first.gate
        second.requires_grad_(False)
        next(third.experts[0].parameters()).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        outputs: torch.Tensor = self.head(inputs)
        return outputs
