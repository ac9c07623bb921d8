"""Update a worker's part of each parameter with the bits that an update of the whole parameter gives.

On a CPU an update runs over whole vectors of numbers, and over the last numbers one by one. The two round
differently. So the optimizer gets each part as a flat tensor that begins and ends where vectors do, filled up
with zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from dp_ray.errors import JobError
from dp_ray.replica.exact_norm import Slice, norms_of_slices
from dp_ray.replica.optimizer import load_optimizer, norm_of_norms, norms_of
from dp_ray.replica.sharded_state import rows_of_optimizer, sharded_as
from dp_ray.replica.world import World
from dp_ray.tensors.shards import is_sharded, local, rows_of
from dp_ray.text import listed

VECTOR = 64  # numbers: a multiple of what torch's CPU kernels take at once, for each dtype and instruction set

# These use of a parameter, its gradient and its state nothing but the number that they update.
ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError for an optimizer whose update of a part may differ from the part of its update."""
    if type(optimizer) not in ELEMENTWISE:
        names = listed([one.__name__ for one in ELEMENTWISE])
        raise JobError(
            f"optimizer: {type(optimizer).__qualname__} may use all of a parameter to update a part of it, so with "
            f"strategy: fsdp it cannot be bitwise; take one of torch.optim's {names}, or leave bitwise out"
        )


def span_of(start: int, stop: int, size: int) -> tuple[int, int]:
    """The vectors that hold the numbers `start` to `stop` of `size`: where the first begins, and the last ends.

    >>> span_of(100, 130, 1000), span_of(960, 1000, 1000), span_of(70, 70, 1000)
    ((64, 192), (960, 1000), (70, 70))
    """
    if start == stop:
        return start, stop
    return start - start % VECTOR, min(size, -(-stop // VECTOR) * VECTOR)


class Part:
    """A worker's part of a sharded parameter; `flat` is what the optimizer gets in its place."""

    def __init__(self, parameter: nn.Parameter, world: World) -> None:
        self.parameter = parameter
        mine = local(parameter.detach())
        width = parameter.numel() // parameter.shape[0]
        start, stop = (row * width for row in rows_of(parameter.shape[0], world.world_size, world.rank))
        first, end = span_of(start, stop, parameter.numel())
        self._inner = slice(start - first, stop - first)
        self._is_whole = (first, end) == (start, stop)
        self.flat = nn.Parameter(self._filled_up(mine, end - first))

    def take(self) -> None:
        """Take the part's numbers and gradient; where nothing is to be filled up, they are shared."""
        gradient = self.parameter.grad
        mine, size = local(self.parameter.detach()), self.flat.numel()
        if self._is_whole:
            self.flat.data = mine.view(-1)
        else:
            self.inner(self.flat.detach()).copy_(mine.view(-1))
        self.flat.grad = None if gradient is None else self._filled_up(local(gradient.detach()), size)

    def give(self) -> None:
        """Give the updated numbers to the part, and drop its gradient."""
        if not self._is_whole:
            local(self.parameter.detach()).view(-1).copy_(self.inner(self.flat.detach()))
        self.parameter.grad = None

    def inner(self, flat: torch.Tensor) -> torch.Tensor:
        """The part's own numbers in a flat tensor."""
        return flat[self._inner]

    def sharded(self, value: Any) -> Any:
        """A tensor of the optimizer's state as one that is sharded as the parameter is; any other value itself."""
        if not isinstance(value, torch.Tensor) or value.shape != self.flat.shape:
            return value
        return sharded_as(self.parameter, self.inner(value).view(local(self.parameter).shape))

    def flattened(self, value: Any) -> Any:
        """The inverse of `sharded`."""
        return self._filled_up(local(value), self.flat.numel()) if is_sharded(value) else value

    def _filled_up(self, mine: torch.Tensor, size: int) -> torch.Tensor:
        if self._is_whole:
            return mine.reshape(-1)
        made = mine.new_zeros(size)
        self.inner(made).copy_(mine.reshape(-1))
        return made


class AlignedParts:
    """This worker's parts of all sharded parameters, and the state of the optimizer that updates them."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.optimizer: Any = None
        self._world = world
        self.parts = [Part(one, world) for one in parameters if is_sharded(one)]
        self._by_flat = {id(one.flat): one for one in self.parts}

    @property
    def flats(self) -> dict[int, nn.Parameter]:
        """What the optimizer gets for each parameter, by the parameter's id."""
        return {id(one.parameter): one.flat for one in self.parts}

    @torch.no_grad()
    def take(self) -> None:
        """Take all gradients, before an update."""
        for one in self.parts:
            one.take()

    @torch.no_grad()
    def give(self) -> None:
        """Give back what the update has changed."""
        for one in self.parts:
            one.give()

    def total_norm(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter], device: torch.device
    ) -> torch.Tensor:
        """The norm of the whole gradient, to the bit that of one worker; every rank calls this.

        `device` is that of collectives.
        """
        parts = [self._by_flat.get(id(one)) for one in parameters]
        slices = [
            Slice(part.inner(gradient), part.parameter.shape)
            for part, gradient in zip(parts, gradients, strict=True)
            if part is not None
        ]
        whole = [one for part, one in zip(parts, gradients, strict=True) if part is None]
        of_slices = iter(norms_of_slices(slices, self._world, device))
        of_whole = iter(norms_of(whole) if whole else [])
        return norm_of_norms([next(of_whole if part is None else of_slices) for part in parts], gradients)

    def originals(self) -> list[nn.Parameter]:
        """The model's parameters, in the order of the optimizer's groups."""
        given = [one for group in self.optimizer.param_groups for one in group["params"]]
        return [self._by_flat[id(one)].parameter if id(one) in self._by_flat else one for one in given]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with sharded tensors for the parts."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return {**state, "state": self._of_parts(state["state"], Part.sharded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of whole tensors that are stored, or of plain values."""
        rows = rows_of_optimizer(state, self.originals(), self._world)
        load_optimizer(self.optimizer, {**rows, "state": self._of_parts(rows["state"], Part.flattened)})

    def _of_parts(self, state: dict[int, Any], convert: Any) -> dict[int, Any]:
        given = [one for group in self.optimizer.param_groups for one in group["params"]]
        found = {number: self._by_flat.get(id(given[number])) for number in state}
        return {
            number: kept
            if (part := found[number]) is None
            else {key: convert(part, one) for key, one in kept.items()}
            for number, kept in state.items()
        }


@contextmanager
def one_thread(parameter: torch.Tensor) -> Iterator[None]:
    """Update in one thread on a CPU: where several threads cut a tensor is where its vectors end, too."""
    threads = torch.get_num_threads()
    is_many = parameter.device.type == "cpu" and threads > 1
    try:
        if is_many:
            torch.set_num_threads(1)
        yield
    finally:
        if is_many:
            torch.set_num_threads(threads)
