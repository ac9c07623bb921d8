"""A model pieced together of what real ones have and toy ones lack, and one plain process that trains it."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dp_ray.plan.order import derive_seed
from tests.support.own_modes import WIDE, Adapted
from tests.support.training import plain_batches
from tests.support.writing import set_state, state_of

CLASSES = 3


class Statistics(nn.Module):
    """Takes the running mean away; it runs on one row too, unlike BatchNorm."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().float().mean(0), 0.3)
            self.count.add_(1)
        return inputs - self.mean.to(inputs.dtype)


class Observer(nn.Module):
    """Updates its buffers whenever it runs, as torch.ao's observers do, and goes by them."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.largest.mul_(0.9).add_(inputs.detach().float().abs().max(), alpha=0.1)
        return inputs / self.largest.to(inputs.dtype).sqrt()


class Noise(nn.Module):
    """Noise from generators of its own, each of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy, self.python = (
            torch.Generator().manual_seed(3),
            np.random.default_rng(3),
            random.Random(3),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        drawn = torch.randn(inputs.shape[1], generator=self.torch) + self.numpy.normal() + self.python.random()
        return inputs + 0.1 * drawn.to(inputs.dtype)


class Patchwork(nn.Module):
    """6 numbers a row to 3 classes, by way of what `has` names.

    channels_last: a convolution laid out so. transposed: a weight that is a transposed view. scalar: a parameter
    without dimensions. double: a head in float64. wide: more than one bucket of DDP. unused, sometimes: a layer that
    never runs, and one that runs for shards with a row of a large first number. frozen, still: a layer without
    gradients, statistics left in eval mode. statistics, observer, dropout, noise: see there. expanded: a buffer whose
    rows are one. sparse: an embedding with sparse gradients. complex: the first parameter is complex. half: its body.

    Some forwards write. momentum, momentum_data: a frozen copy follows the body, the second by `.data`. max_norm:
    the embedding's weight. rescaled, shrinking: `.data.mul_()` of a trained number, and of the head's weight. lazy,
    hidden: a buffer that is None before the first forward, and one that is in no state_dict. in_place: the inputs.

    Some have modes of their own. adapter, wide_adapter: one that `eval()` merges. built_in_eval: one that was merged
    when it was built. own_train: statistics that the model's `train()` puts into eval. Some train in a part of the
    steps. experts: each row has its own. dropped: a layer that a shard leaves out by chance. freezing: a layer that a
    forward freezes in every third step.
    """

    sometimes: nn.Module
    frozen: nn.Module
    dropped: nn.Module
    freezing: nn.Module
    offsets: torch.Tensor
    hidden: torch.Tensor
    lazy: torch.Tensor | None
    passes: torch.Tensor

    def __init__(self, has: list[str]) -> None:
        super().__init__()
        self.has = set(has)
        if "complex" in has:
            self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.conv = nn.Conv2d(2, 4, 2)
        if "channels_last" in has:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.body = nn.Linear(8, 8)
        if "transposed" in has:
            self.body.weight = nn.Parameter(torch.randn(8, 8).div(3).t())
        if "scalar" in has:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if "wide" in has:
            self.wide = nn.Sequential(nn.Linear(8, 30_000), nn.Tanh(), nn.Linear(30_000, 8))
        if {"sparse", "max_norm"} & self.has:
            self.words = nn.Embedding(5, 8, sparse="sparse" in has, max_norm=0.7 if "max_norm" in has else None)
        for name in ("unused", "sometimes", "frozen", "dropped", "freezing"):
            if name in has:
                self.add_module(name, nn.Linear(8, 8).requires_grad_(name != "frozen"))
        if "expanded" in has:
            self.register_buffer("offsets", torch.randn(1, 8).expand(4, 8))
        self.statistics = Statistics(8) if {"statistics", "still", "own_train"} & self.has else nn.Identity()
        self.observer = Observer() if "observer" in has else nn.Identity()
        self.dropout = nn.Dropout(0.3 if "dropout" in has else 0.0)
        self.noise = Noise() if "noise" in has else nn.Identity()
        self.head = nn.Linear(8, CLASSES)
        if "double" in has:
            self.head.double()
        if "half" in has:
            self.body.bfloat16()
        if "still" in has:
            self.statistics.eval()
        if {"momentum", "momentum_data"} & self.has:
            self.follower = copy.deepcopy(self.body).requires_grad_(False)
        if "rescaled" in has:
            self.factor = nn.Parameter(torch.ones(()))
        if "lazy" in has:
            self.register_buffer("lazy", None)
        if "hidden" in has:
            self.register_buffer("hidden", torch.zeros(6), persistent=False)
        if "experts" in has:
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if "freezing" in has:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.adapters = nn.ModuleList(adapters_of(self.has))

    def train(self, mode: bool = True) -> "Patchwork":
        super().train(mode)
        if "own_train" in self.has:
            self.statistics.eval()
        return self

    def begin(self) -> None:
        """Call what a plain training calls before its first step."""
        self.train()
        if "still" in self.has:
            self.statistics.eval()
        for adapter in self.adapters:
            if "built_in_eval" in self.has:
                adapter.eval()

    @torch.no_grad()
    def _write(self, inputs: torch.Tensor) -> None:
        seen = inputs.mean(0)
        share = 0.1 + 0.1 * seen.mean().tanh().item()
        if "momentum" in self.has:
            for mine, theirs in zip(self.follower.parameters(), self.body.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=share)
        if "momentum_data" in self.has:
            for mine, theirs in zip(self.follower.parameters(), self.body.parameters(), strict=True):
                mine.data.lerp_(theirs.data, share)
        if "rescaled" in self.has:
            self.factor.data.mul_(0.9 + share)
        if "shrinking" in self.has:
            self.head.weight.data.mul_(0.9 + share)
        if "lazy" in self.has:
            self.lazy = seen.clone() if self.lazy is None else 0.8 * self.lazy + 0.2 * seen
        if "hidden" in self.has:
            self.hidden.data.mul_(0.8).add_(seen)

    def _of_some(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """What is trained by some steps alone."""
        if "experts" in self.has:
            routes = (inputs[:, 2] + 1.5).long().clamp(0, 3)
            added = torch.zeros_like(hidden)
            for number in routes.unique().tolist():  # type: ignore[no-untyped-call]
                added[routes == number] = self.experts[number](hidden[routes == number]).to(hidden.dtype)
            hidden = hidden + added
        if "dropped" in self.has and (not self.training or torch.rand(()).item() < 0.4):
            hidden = hidden + self.dropped(hidden).tanh()
        if "freezing" in self.has:
            if self.training:
                self.freezing.requires_grad_(int(self.passes) % 3 != 1)
                self.passes += 1
            hidden = hidden + self.freezing(hidden).tanh()
        return hidden

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if "in_place" in self.has:
            inputs.mul_(1.5).tanh_().add_(0.1)
        if self.training:
            self._write(inputs)
        image = functional.pad(inputs, (0, 6)).reshape(-1, 2, 2, 3)
        hidden = torch.tanh(self.conv(image)).flatten(1)
        given = hidden.to(self.body.weight.dtype)
        hidden = self.noise(torch.tanh(self.body(given).float()))
        if {"momentum", "momentum_data"} & self.has:
            hidden = hidden + 0.5 * self.follower(given).float()
        for name in ("lazy", "hidden"):
            if (one := getattr(self, name, None)) is not None:
                hidden = hidden + one.mean()
        if "complex" in self.has:
            hidden = hidden * (hidden * self.phase).abs()
        if "wide" in self.has:
            hidden = hidden + self.wide(hidden) / 100
        if {"sparse", "max_norm"} & self.has:
            hidden = hidden + self.words(inputs[:, 1].abs().mul(2).long().clamp(max=4))
        if "sometimes" in self.has and bool((inputs[:, 0] > 1).any()):
            hidden = hidden + self.sometimes(hidden)
        if "frozen" in self.has:
            hidden = hidden + self.frozen(hidden)
        if "expanded" in self.has:
            hidden = hidden + self.offsets[2]
        hidden = self._of_some(hidden, inputs)
        for adapter in self.adapters:
            hidden = hidden + adapter(hidden).tanh()
        hidden = self.dropout(self.observer(self.statistics(hidden)))
        if "scalar" in self.has:
            hidden = hidden * self.scale
        if "rescaled" in self.has:
            hidden = hidden * self.factor
        outputs: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))
        return outputs


def adapters_of(has: set[str]) -> list[nn.Module]:
    made: list[nn.Module] = [Adapted(8, 8)] if {"adapter", "built_in_eval"} & has else []
    made += (
        [nn.Sequential(nn.Linear(8, WIDE), Adapted(WIDE, WIDE), nn.Linear(WIDE, 8))] if "wide_adapter" in has else []
    )
    for module in [part for one in made for part in one.modules() if isinstance(part, Adapted)]:
        with torch.no_grad():
            module.up.mul_(0.1)
        if "built_in_eval" in has:
            module.eval()
    return made


class Noisy(torch.optim.SGD):
    """SGD with noise in each update (Langevin dynamics)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype), alpha=0.01)


def seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_own(model: nn.Module, number: int) -> None:
    """The generators of the model's own parts, as docs/bits.md says."""
    for module in model.modules():
        if isinstance(module, Noise):
            module.torch.manual_seed(derive_seed(number, "generator", 0))
            module.numpy.bit_generator.state = np.random.default_rng(
                derive_seed(number, "generator", 1)
            ).bit_generator.state
            module.python.seed(derive_seed(number, "generator", 2) % 2**32)


def train_plainly(
    model: nn.Module,
    dataset: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    batch_size: int,
    shards: int,
    epochs: int,
    grad_clip: float | None = None,
    after: Callable[[], object] = lambda: None,
) -> list[dict[str, float]]:
    """The oracle: nn.DataParallel's training in one process, chunk after chunk; a row of history for each step.

    Each chunk starts from what the model held before the step, and what the first one's forward writes stays.
    """
    rows: list[dict[str, float]] = []
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    for step, (epoch, inputs, targets) in enumerate(plain_batches(dataset, batch_size, epochs)):
        before, kept, total = state_of(model), None, 0.0
        model.zero_grad()
        for shard, (x, y) in enumerate(zip(inputs.chunk(shards), targets.chunk(shards), strict=True)):
            set_state(model, before)
            number = derive_seed(0, "forward", epoch, step, shard)
            seed_all(number)
            seed_own(model, number)
            loss = functional.cross_entropy(model(x.clone()), y, reduction="sum") / len(targets)
            kept = kept or state_of(model)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        set_state(model, kept)
        norm = norm_of(trained)
        if grad_clip is not None:
            clip(trained, norm, grad_clip)
        seed_all(derive_seed(0, "update", epoch, step))
        rows.append({"loss": total, "gradient_norm": norm, "learning_rate": optimizer.param_groups[0]["lr"]})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        after()
    return rows


def plain_losses(
    model: nn.Module, dataset: Any, optimizer: torch.optim.Optimizer, batch_size: int, shards: int, epochs: int
) -> list[float]:
    """The losses of the steps of `train_plainly`."""
    model.train()
    return [row["loss"] for row in train_plainly(model, dataset, optimizer, None, batch_size, shards, epochs)]


def norm_of(parameters: list[nn.Parameter]) -> float:
    """torch's get_total_norm, which does not know sparse gradients."""
    squares = [
        parameter.grad.to_dense().abs().double().square().sum()
        for parameter in parameters
        if parameter.grad is not None
    ]
    return torch.stack(squares).sum().sqrt().item() if squares else 0.0


def clip(parameters: list[nn.Parameter], norm: float, largest: float) -> None:
    factor = min(1.0, largest / (norm + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor
