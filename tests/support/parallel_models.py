"""Modules for the tests of `dp_ray.DataParallel`, which workers import by name."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn


class Elementwise(nn.Module):
    """Of each element alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * inputs * self.scale + self.shift


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Nested(nn.Module):
    """Of everything that inputs and outputs may be."""

    def forward(self, inputs: dict[str, Any], scale: torch.Tensor, name: str, only: Any) -> dict[str, Any]:
        ones, (numbers,) = inputs["pair"]
        assert only is None
        pair = Pair(numbers + ones.long(), [ones])
        return {"scaled": inputs["x"] * scale, "pair": pair, "name": name, "whole": scale * len(numbers)}


class Adds(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other


class RaisesFrom(nn.Module):
    """Raises if an input is as large as `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.max() >= self.limit:
            raise LookupError("too large")
        return inputs


class Tutorial(nn.Module):
    """The model of PyTorch's DataParallel tutorial."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(inputs)
        print("\tIn Model: input size", inputs.size(), "output size", output.size())
        return output


class Locked(nn.Module):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return 2 * output


class NotesProcess(nn.Module):
    """Hands on its inputs, and notes in which process."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = log

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")
        return inputs


class Kills(nn.Module):
    """Hands on its inputs; ends its process once, in its first `when` in which a value is large."""

    def __init__(self, when: str, mark: Path) -> None:
        super().__init__()
        self.when = when
        self.mark = mark

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            self._end_once()
        if self.when == "backward" and inputs.requires_grad:
            inputs.register_hook(lambda _: self._end_once())  # type: ignore[no-untyped-call]
        return inputs

    def _end_once(self) -> None:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class WithBuffers(nn.Module):
    """Torch's case: one of its buffers requires a gradient."""

    def __init__(self, t: torch.Tensor) -> None:
        super().__init__()
        self.t_rg: torch.Tensor
        self.register_buffer("t_rg", t)
        self.register_buffer("t_not_rg", t.clone().detach())

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs * self.t_rg + self.get_buffer("t_not_rg")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> Any:
        self.rnn.flatten_parameters()
        return self.rnn(self.embedding(inputs))[0]


class TellsGrad(nn.Module):
    """Ones where gradients are enabled, else zeros."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.full_like(inputs, float(torch.is_grad_enabled()))


class _TellsSettings(torch.autograd.Function):
    """The settings that `bitwise` changes, as the output [rows, 5] and as the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return those of the forward."""
        return rows.new_tensor(_settings()).expand(rows.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return those of the backward."""
        return gradients[0].new_tensor(_settings()).expand(gradients[0].shape).clone()


def _settings() -> list[float]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_num_threads(),
    ]


class TellsSettings(nn.Module):
    """Returns the forward's settings, which `bitwise` changes; the gradient is the backward's. Each is [rows, 5]."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the settings for each row."""
        found: torch.Tensor = _TellsSettings.apply(rows)  # type: ignore[no-untyped-call]
        return found


BITWISE = [1.0, 0.0, 0.0, 0.0, 1.0]  # deterministic, memory filled, benchmark, fast path, threads


class SetsSettings(nn.Module):
    """Sets what `bitwise` has otherwise."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(2)
        return rows


class NoInputs(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.ones(2)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(10, 5)

    def forward(self, *, input: torch.Tensor, unused: Any = None) -> Any:
        return self.fc(input)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.several = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs * self.several[0] + self.several[1] * self.named["a"]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one * self.scale + other.sin()


class NestedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> Any:
        return [inputs * self.scale, (inputs.sin(), {"a": inputs.cos(), "b": [inputs * 2]})]


class NestedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Any) -> Any:
        return inputs[1][0] * self.scale + inputs[0]


class DictOfRows(nn.Module):
    """As many keys as the first number says."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {str(key): inputs for key in range(int(inputs[0]))}


class SharesBuffers(nn.Module):
    """Two buffers that begin as one tensor; the forward writes it in place, or sets the names of `anew` anew."""

    one: torch.Tensor
    two: torch.Tensor

    def __init__(self, anew: str) -> None:
        super().__init__()
        shared = torch.zeros(2)
        self.register_buffer("one", shared)
        self.register_buffer("two", shared)
        self.anew = anew.split()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.one.add_(inputs.detach().mean(0))
        for at, name in enumerate(self.anew):
            setattr(self, name, getattr(self, name) * 0.5 + at + inputs.detach().mean(0))
        return inputs * self.one + self.two


class Momentum(nn.Module):
    """A momentum encoder beside the trained one: its forward moves it, as `writes` says."""

    def __init__(self, writes: str = "in place") -> None:
        super().__init__()
        self.query = nn.Linear(4, 3)
        self.key = nn.Linear(4, 3).requires_grad_(False)
        self.writes = writes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product of both, once the second one has moved."""
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.writes == "in place":
                    own.mul_(0.5).add_(other + inputs.mean())
                else:
                    own.data = own.data * 0.5 + other + inputs.mean()
        product: torch.Tensor = self.query(inputs) * self.key(inputs)
        return product


class MaxNorm(nn.Module):
    """An embedding whose forward writes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, max_norm=0.5)
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the rows, mapped."""
        found: torch.Tensor = self.last(self.embedding(inputs))
        return found


class FillsBuffers(nn.Module):
    """Its first forward gives a buffer that is None a value, and sets another one to None."""

    later: torch.Tensor | None
    once: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("later", None)
        self.register_buffer("once", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs with what the buffers add."""
        with torch.no_grad():
            self.later = inputs.mean(0) if self.later is None else self.later * 0.5
        added = self.later + (0 if self.once is None else self.once)
        self.once = None
        return inputs * self.scale + added


class InList(nn.Module):
    """Its forward reads a parameter from a list, where it stands beside its own place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.all = [self.weight]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a function of both places."""
        return (inputs * self.weight).sin() * self.all[0]


class Says(nn.Module):
    """Prints in each forward and backward, with the first number that it gets; raises as it is told to."""

    def __init__(self, forward: float = torch.inf, backward: float = torch.inf) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.limits = forward, backward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs scaled."""
        number = int(inputs.flatten()[0])
        print(f"forward of {number}")
        if number >= self.limits[0]:
            raise LookupError("too large")
        outputs = inputs * self.scale

        def say(gradient: torch.Tensor) -> None:
            print(f"backward of {number}")
            if number >= self.limits[1]:
                raise LookupError("too large")

        outputs.register_hook(say)  # type: ignore[no-untyped-call]
        return outputs


class TellsPrecision(nn.Module):
    """Returns, for each row, the numbers of torch's settings of precision here; the gradient is the backward's."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return them."""
        found: torch.Tensor = _TellsPrecision.apply(rows)  # type: ignore[no-untyped-call]
        return found


class _TellsPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return those of the forward."""
        return rows.new_tensor(_precision()).expand(rows.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return those of the backward."""
        return gradients[0].new_tensor(_precision()).expand(gradients[0].shape).clone()


def _precision() -> list[float]:
    return [
        ["highest", "high", "medium"].index(torch.get_float32_matmul_precision()),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    ]


class Checkpointed(nn.Module):
    """Runs its layers again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layers' output."""
        found: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layers, inputs, use_reentrant=False)
        return found


class WritesLate(nn.Module):
    """Writes a large trained parameter in place once it gets a 5."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(100_000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs scaled."""
        if inputs.max() == 5:
            with torch.no_grad():
                self.large.mul_(2)
        return inputs * self.large[0]


class Config:
    """An object of a user."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.inner = {"shift": [0.0]}


class Holds(nn.Module):
    """Refers to all kinds of things that are neither plain nor registered."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.array = np.ones(3)
        self.entries: list[Any] = [[1.0], {"a": 1.0}]
        self.own = torch.ones(3)
        self.hidden = (nn.Linear(3, 3), {"a": [nn.Tanh()]})
        self.weight = nn.Parameter(torch.ones(3))
        self.same = [self.weight]
        self.above = [self]  # a circle

    def forward(self, inputs: torch.Tensor) -> Any:
        linear, others = self.hidden
        rows = others["a"][0](linear(inputs)) * self.config.scale + self.config.inner["shift"][0]
        rows = rows * torch.from_numpy(self.array).float() * self.entries[0][0] * self.entries[1]["a"] * self.own
        return rows * self.same[0]


def set_entry(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


# Each changes something within what a module refers to.
CHANGES: dict[str, Callable[[Holds], Any]] = {
    "an object's attribute": lambda one: setattr(one.config, "scale", 3.0),
    "within an object's dict": lambda one: set_entry(one.config.inner["shift"], 0, 0.5),
    "an array": lambda one: set_entry(one.array, 1, 0.5),
    "a list's list": lambda one: set_entry(one.entries[0], 0, 0.5),
    "a list's dict": lambda one: set_entry(one.entries[1], "a", -1.0),
    "a tensor through .data": lambda one: one.own.data.mul_(2),
    "a module in a tuple": lambda one: one.hidden[0].weight.data.mul_(2),
    "a module in a dict's list": lambda one: set_entry(one.hidden[1]["a"], 0, nn.Sigmoid()),
    "a parameter in a list": lambda one: one.weight.data.mul_(2),
    "another parameter in a list": lambda one: set_entry(one.same, 0, nn.Parameter(torch.full((3,), 0.7))),
    "a plain attribute": lambda one: setattr(one, "above", True),
    "and one that is equal": lambda one: setattr(one, "above", 1),
}


class Odd(nn.Module):
    """Returns a tensor that cannot be sent."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, inputs: torch.Tensor) -> Any:
        """Return it in a list."""
        return {"odd": [inputs.to("meta") if self.way == "meta" else inputs.to_sparse()]}


class MakesObject(nn.Module):
    """Returns what is no tree of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"policy": torch.distributions.Categorical(logits=self.linear(inputs))}


class TakesObject(nn.Module):
    """Takes an object that holds a tensor, or a module."""

    def forward(self, inputs: torch.Tensor, given: Any) -> Any:
        return given(inputs) if isinstance(given, nn.Module) else inputs * given.scale


def obey(orders: str, when: str) -> None:
    """End this process if the file `orders` says so: it holds the process's id, and when to end it."""
    with contextlib.suppress(FileNotFoundError):  # there are none, or another worker has just obeyed
        if orders and Path(orders).read_text() == f"{os.getpid()} {when}":
            Path(orders).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Drawn(nn.Module):
    """A net of the drawn programs: it draws, norms, writes buffers, and refers to an object."""

    seen: torch.Tensor
    last: torch.Tensor

    def __init__(self, seed: int, body: nn.Module | None = None, orders: str = "") -> None:
        super().__init__()
        self.orders = orders  # a file: see `obey`
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) if body is None else body
            self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))
            self.unused = nn.Parameter(torch.randn(2))
        self.config = Config()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))
        self.double()

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        self.seen += len(inputs)
        obey(self.orders, "forward")
        inner = self.body(inputs)
        if inner.requires_grad:
            inner.register_hook(lambda _: obey(self.orders, "backward"))
        self.last = inner.detach().mean(0) + self.last / 2
        rows = self.head(inner * self.last.tanh()) * self.config.scale
        return {"rows": rows, "sum": rows.square().sum()}
