"""A model whose forwards write buffers and parameters, each in its own way, and the plain loop of its training."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


class Writing(nn.Module):
    """Layers whose forward first writes as each of `ways` says; with a width of 300, the target is not small."""

    lazy: torch.Tensor | None
    hidden: torch.Tensor
    mean: torch.Tensor
    count: torch.Tensor
    made: torch.Tensor

    def __init__(self, ways: Sequence[str], width: int = 8, late: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        self.target = copy.deepcopy(self.body).requires_grad_(False)
        self.words = nn.Embedding(9, width, max_norm=0.7 if "max_norm" in ways else None)
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("lazy", None)
        self.register_buffer("hidden", torch.zeros(6), persistent=False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.ways = tuple(ways)
        self.late = late

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                if self.count > self.late:
                    for way in self.ways:
                        if way != "max_norm":
                            getattr(self, f"_{way}")(inputs)
        words = self.words((inputs[:, :3] * 2).round().long().clamp(-4, 4) + 4).mean(1)
        hidden = self.body(inputs) + 0.5 * self.target(inputs) + words
        for name in ("lazy", "hidden", "mean", "made"):
            if (one := getattr(self, name, None)) is not None:
                hidden = hidden + one.mean()
        outputs: torch.Tensor = self.head(hidden) * self.scale
        return outputs

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.target.parameters(), self.body.parameters(), strict=True))

    def _momentum(self, inputs: torch.Tensor) -> None:
        for mine, theirs in self._pairs():
            mine.mul_(0.9).add_(theirs, alpha=0.1 + 0.1 * inputs.mean().item())

    def _momentum_data(self, inputs: torch.Tensor) -> None:
        for mine, theirs in self._pairs():
            mine.data.lerp_(theirs.data, 0.1 + 0.1 * inputs.mean().item())

    def _momentum_replaced(self, inputs: torch.Tensor) -> None:
        for mine, theirs in self._pairs():
            mine.data = mine.data * 0.9 + theirs.data * (0.1 + 0.1 * inputs.mean())

    def _momentum_numpy(self, inputs: torch.Tensor) -> None:
        for mine, _ in self._pairs():
            mine.numpy()[...] *= 0.95

    def _clamp(self, inputs: torch.Tensor) -> None:
        self.scale.data.clamp_(max=0.98)
        self.head.weight.data.mul_(0.99 + 0.01 * inputs.mean())

    def _clamp_scale(self, inputs: torch.Tensor) -> None:
        self.scale.data.mul_(0.99 + 0.01 * inputs.mean()).clamp_(max=0.98)

    def _every_third(self, inputs: torch.Tensor) -> None:
        if self.count % 3 == 1:
            self._momentum(inputs)

    def _normalise(self, inputs: torch.Tensor) -> None:
        weight = self.get_parameter("body.0.weight")
        weight.data = weight.data / weight.norm()

    def _replacing(self, inputs: torch.Tensor) -> None:
        weight = self.get_parameter("body.2.weight")
        weight.data = weight.data * (0.99 + 0.01 * inputs.mean())

    def _shrinking(self, inputs: torch.Tensor) -> None:
        self.get_parameter("body.2.weight").data.mul_(0.99 + 0.01 * inputs.mean())

    def _lazily(self, inputs: torch.Tensor) -> None:
        self.lazy = inputs.mean(0) if self.lazy is None else 0.8 * self.lazy + 0.2 * inputs.mean(0)

    def _hiding(self, inputs: torch.Tensor) -> None:
        self.hidden.data.mul_(0.8).add_(inputs.mean(0))

    def _assigning(self, inputs: torch.Tensor) -> None:
        self.mean = 0.8 * self.mean + inputs.mean(0)

    def _making(self, inputs: torch.Tensor) -> None:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(6), persistent=False)
        self.made += inputs.mean(0)


class ByRows(nn.Module):
    """A frozen parameter that the shard of the first row writes, and one of the same size that the others write."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.first = nn.Parameter(torch.full((3,), 1.0), requires_grad=False)
        self.other = nn.Parameter(torch.full((3,), 100.0), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        written = self.first if float(inputs[0, 0]) == 0 else self.other
        written.data = written.data + 1
        outputs: torch.Tensor = self.head(inputs) * self.first + 0.001 * self.other
        return outputs


class Numbered(Dataset[Any]):
    """Rows that begin with their place in the batch of 14."""

    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((6,), index % 14 / 14), index % 3


class MakesALayer(nn.Module):
    """A model whose first forward makes its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head: nn.Module | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        if self.head is None:
            self.head = nn.Linear(hidden.shape[1], 3)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class WritesItsInputs(nn.Sequential):
    """An mlp that normalises its inputs in their own memory."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.mul_(3).tanh_().add_(0.5)
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor | None]]]:
    """Copies of all parameters, and of all buffers of each module."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return parameters, [copy.deepcopy(module._buffers) for module in model.modules()]


def set_state(model: nn.Module, state: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[0][name])
    for module, buffers in zip(model.modules(), state[1], strict=True):
        module._buffers.clear()
        module._buffers.update(copy.deepcopy(buffers))


class WritesInEval(nn.Module):
    """A model that writes parameters and buffers in eval mode too; with a width of 300, none of them is small."""

    lazy: torch.Tensor | None

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(6, width)
        self.target = nn.Linear(width, width).requires_grad_(False)
        self.words = nn.Embedding(9, width, max_norm=0.7)
        self.head = nn.Linear(width, 3)
        self.register_buffer("lazy", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.weight.data.mul_(0.5 + inputs.mean())
            self.target.bias.data = self.target.bias + inputs.mean()
            self.head.weight.mul_(1.1)
            self.lazy = inputs.mean(0) if self.lazy is None else self.lazy + 1
        words = self.words((inputs[:, :3] * 2).round().long().clamp(-4, 4) + 4).mean(1)
        outputs: torch.Tensor = self.head(self.target(self.body(inputs)) + words) + self.lazy.mean()
        return outputs


class Tally(nn.Module):
    """Adds what it has seen so far."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += inputs.detach().mean()
        return inputs + self.seen


class SharesMemory(nn.Module):
    """Buffers that begin as one tensor, or as parts of one, and that the forward writes as `way` says.

    It does so from forward `late` on; all of them count in the outputs.
    """

    one: torch.Tensor
    two: torch.Tensor | None
    three: torch.Tensor
    whole: torch.Tensor
    part: torch.Tensor
    count: torch.Tensor

    def __init__(self, way: str, late: int = 0, persistent: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        shared, whole = torch.zeros(6), torch.ones(6)
        self.register_buffer("one", shared, persistent)
        self.register_buffer("two", shared, persistent)
        self.register_buffer("three", torch.ones(6), persistent)
        self.register_buffer("whole", whole, persistent)
        self.register_buffer("part", whole[3:], persistent)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.inner = Tally()
        self.again = self.inner  # a module under two names
        self.way, self.late = way, late

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            if self.count > self.late:
                getattr(self, f"_{self.way}")(inputs.mean(0))
            self.one.mul_(0.9).add_(0.1)
            self.whole.add_(inputs.mean() / 4)
        outputs = self.body(inputs) + self.one - 2 * self.three + self.whole * 0.5 + 3 * self.part.mean()
        if self.two is not None:
            outputs = outputs - 3 * self.two
        head: torch.Tensor = self.head(torch.tanh(self.again(self.body(outputs) + outputs)))
        return head

    def _never(self, mean: torch.Tensor) -> None:
        pass

    def _anew(self, mean: torch.Tensor) -> None:
        self.one, self.two = 0.5 * self.one + mean, 0.5 * (0 if self.two is None else self.two) - 2 * mean

    def _second(self, mean: torch.Tensor) -> None:
        self.two = mean * 2

    def _none(self, mean: torch.Tensor) -> None:
        self.two = None

    def _joined(self, mean: torch.Tensor) -> None:
        self.three = self.one

    def _parted(self, mean: torch.Tensor) -> None:
        self.part = self.part * 0.5 + mean[3:]


class ChangesForms(nn.Module):
    """Buffers that each `write` adds to; a late one also gives one of them another form, as `way` says."""

    mean: torch.Tensor
    flags: torch.Tensor
    odd: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mean", torch.zeros(2, 3))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.uint16))
        self.register_buffer("odd", torch.ones(2, 3))
        self.way, self.count = way, 0

    def write(self, is_late: bool) -> None:
        self.count += 1
        self.mean += self.count
        self.flags.copy_(torch.full((3,), self.count, dtype=torch.uint16))
        if is_late:
            getattr(self, f"_{self.way}")()
        if self.odd is not None:
            with torch.no_grad():
                self.odd += self.count

    def _replaced(self) -> None:
        self.odd = self.odd * 2

    def _grown(self) -> None:
        self.odd.data = torch.cat([self.odd.data, self.odd.data])

    def _shrunk(self) -> None:
        self.odd.resize_(1, 3)

    def _turned(self) -> None:
        self.odd.t_()

    def _cast(self) -> None:
        self.odd.data = self.odd.data.double() * 0.1

    def _recorded(self) -> None:
        self.odd.mul_(self.scale)

    def _none(self) -> None:
        self._buffers["odd"] = None


class Recomputes(nn.Module):
    """Its normalisation runs again in the backward, from forward `late` on; if it `counts`, a version shows that."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, late: int, counts: bool) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("variance", torch.ones(5))
        self.late, self.counts, self.runs = late, counts, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        hidden = self.body(inputs)
        hidden = (
            checkpoint(self._normed, hidden, use_reentrant=False) if self.runs > self.late else self._normed(hidden)
        )
        outputs: torch.Tensor = self.head(hidden)
        return outputs

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.counts:
            normed: torch.Tensor = self.norm(hidden)
        else:
            normed = nn.functional.batch_norm(hidden, self.mean, self.variance, training=True)
        return normed.exp()


class WritesOnFewRows(nn.Module):
    """A model whose late forwards of a single row write a frozen layer, which is not small, through `.data`."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(6, 3), nn.Linear(width, width).requires_grad_(False)
        self.runs = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs > 10 and len(inputs) == 1:
            self.frozen.weight.data.mul_(1.5)
        outputs: torch.Tensor = self.body(inputs) + self.frozen.weight[0, :3]
        return outputs


class Scales(nn.Module):
    """A model whose forwards multiply a layer, from forward `late` on, through `.data`, which no version shows."""

    def __init__(self, width: int, late: int = 0) -> None:
        super().__init__()
        self.layer, self.late, self.runs = nn.Linear(width, 3), late, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs > self.late:
            self.layer.weight.data.mul_(1.5)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs
