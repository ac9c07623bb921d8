"""The numbers that the workers sum in a step beside the gradients (`StepSums`), and the decisions by these sums.

All workers see the same sums after the same step. So they stop together, since stop requests ride on each step's
all-reduce; and they end a training together at a loss that is NaN or infinite (`LossWatch`, for `stop_on_nan`),
without a collective of its own.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.host_copy import ON_GPU, HostCopy
from dp_ray.engine.world import World, is_gpu
from dp_ray.errors import ModelError
from dp_ray.plan.split import worker_shards
from dp_ray.system.threads import waiting
from dp_ray.text import replay_command

if TYPE_CHECKING:  # a heartbeat of a worker that serves modules needs no step
    from dp_ray.engine.forward.step import Row

VOTES, MISSING = -2, -1  # the columns of the votes to stop, and of the samples set aside


class Totals(NamedTuple):
    """The sums over the shards of a step. Only this class and `StepSums` know the order of their `row`.

    That is float64 [2 * measures + 2] on the device: sum and weight of the loss, then of each other measure; then the
    votes to stop, and the number of samples that were set aside. The other attributes are numbers of it; on a GPU
    scalar tensors, for which the host does not wait. If the loss of a batch `is_sum`, its weight is the rows alone.
    """

    row: torch.Tensor
    loss: Any
    weight: Any
    votes: Any
    missing: Any
    is_sum: bool = False

    @property
    def batch_loss(self) -> torch.Tensor:
        """The mean of the losses, or their sum, a scalar; NaN for a weight of 0."""
        return self.row[0] / (self.row[1] > 0 if self.is_sum else self.row[1])

    def with_more(self, measured: torch.Tensor) -> "Totals":
        """Return these with sums and weights of more measures, which come after the loss."""
        return self._replace(row=torch.cat([self.row[:2], measured, self.row[2:]]))

    @staticmethod
    def losses(rows: list[torch.Tensor]) -> list[list[float]]:
        """Return sum and weight of the loss in each of some rows; this waits for the device."""
        return torch.stack(rows)[:, :2].tolist() if rows else []

    @staticmethod
    def means(row: Sequence[float], is_sum: bool = False) -> tuple[list[float | None], int]:
        """Return each measure's mean, None for a weight of 0, and the number of samples that were set aside.

        If the loss of a batch `is_sum`, that comes in place of its mean.
        """
        *sums, _, missing = row
        means = [total / weight if weight else None for total, weight in zip(sums[::2], sums[1::2], strict=True)]
        if is_sum and sums[1]:
            means[0] = sums[0]
        return means, int(missing)


class StepSums:
    """Sums and weights of each shard, votes to stop, and the number of samples set aside.

    `numbers` is float64 [shards, 2 * measures + 2] on the device: a row for each shard, as those of `Totals`, zero
    until it has run. A worker votes, and counts the samples that it set aside, in the row of its first shard: all
    others leave that row at zero. `is_sum`: see `Totals`.
    """

    def __init__(self, shards: int, measures: int, world: World, is_sum: bool = False) -> None:
        self._is_sum = is_sum
        self._size = shards, 2 * measures + 2
        self._own = worker_shards(shards, world.world_size, world.rank).start
        self._device = world.device
        self._is_on_gpu = is_gpu(world.device)
        self.begin()

    def begin(self) -> None:
        """Begin a step with zeros, in memory of their own: a GPU may still be summing the last step's."""
        self._cells: Any
        if self._is_on_gpu:
            self._cells = self.numbers = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        else:  # numpy sets a few cells of the same memory sooner than torch
            self._cells = np.zeros(self._size)
            self.numbers = torch.from_numpy(self._cells)

    def put(self, shard: int, row: "Row") -> None:
        """Set a shard's sums and weights."""
        if not self._is_on_gpu:
            self._cells[shard, :VOTES] = row
            return
        for cell, number in zip(self.numbers[shard].unbind(), row, strict=False):
            if isinstance(number, torch.Tensor):
                cell.copy_(number.detach())
            else:
                cell.fill_(number)

    def total(self) -> Totals:
        """Return the sums over the shards."""
        row = self.numbers[0] if self._size[0] == 1 else self.numbers.sum(0)
        loss, weight, *_, votes, missing = row.unbind() if self._is_on_gpu else row.tolist()
        return Totals(row, loss, weight, votes, missing, self._is_sum)

    def vote(self) -> None:
        """Ask all workers to stop."""
        self._cells[self._own, VOTES] = 1.0

    def set_aside(self, samples: int) -> None:
        """Count this worker's samples of the step that were set aside."""
        self._cells[self._own, MISSING] = samples


ALIGNED = 16  # elements, so that the gradients after it in a bucket stay aligned
PIECE = torch.int16  # of a number; float32 holds each exactly


class StatsBucket:
    """A parameter that DDP treats as one of the model's: its gradient are numbers, and what is used.

    `count` numbers, float64, go in pieces of 16 bits. They are summed to the bit if each of them is 0 on all workers
    but one: sums of zeros and a piece are exact. Then come as many numbers as the model has parameters: 1 for one
    that the worker used, else 0.
    """

    def __init__(self, count: int, num_parameters: int, device: torch.device) -> None:
        self._pieces = count * torch.float64.itemsize // PIECE.itemsize
        self._end = self._pieces + num_parameters
        size = -(-self._end // ALIGNED) * ALIGNED
        self.parameter = nn.Parameter(torch.zeros(size, device=device, dtype=torch.float32))

    def gradient(self, numbers: torch.Tensor, used: Sequence[bool] | None) -> torch.Tensor:
        """Return what to sum: `numbers`, float64 and contiguous, and what is `used`; None if all parameters are."""
        gradient = torch.ones_like(self.parameter)
        if self._pieces:
            gradient[: self._pieces].copy_(numbers.view(PIECE).view(-1))
        if used is not None:
            gradient[self._pieces : self._end].copy_(torch.tensor(used))
        return gradient

    def unload(self, numbers: torch.Tensor, reads_used: bool) -> list[bool]:
        """Set the numbers to their sums, once the gradients are summed; return which parameters any worker used.

        Unless it `reads_used`, for which the host waits for a GPU, the list is empty.
        """
        sums, self.parameter.grad = self.parameter.grad, None  # else the next backward would add to it
        assert sums is not None
        if self._pieces:
            numbers.view(PIECE).view(-1).copy_(sums[: self._pieces])
        used: list[bool] = sums[self._pieces : self._end].bool().tolist() if reads_used else []
        return used


# Each step of lag delays a stop by a step, and a node that is taken away may not have the time.
LAG = 3


@dataclass(eq=False)
class Lagged:
    """Reads a number of each step from a GPU, LAG steps later: a step waits only if it is so many steps ahead.

    A number that is known already, as on a CPU, is read at once.
    """

    _numbers: deque[HostCopy] = field(default_factory=deque)

    def take(self, number: torch.Tensor | float) -> float | None:
        """Add this step's number, a scalar; return that of LAG steps before, None if there is none."""
        if not isinstance(number, torch.Tensor):
            return number
        self._numbers.append(HostCopy(number))
        if len(self._numbers) <= LAG:
            return None
        with waiting(ON_GPU):
            return float(self._numbers.popleft().wait())

    def ahead(self) -> list[float]:
        """Return the numbers that `take` has not returned yet; this waits for the device, and takes none of them."""
        with waiting(ON_GPU):
            return [float(number.wait()) for number in self._numbers]


class NotFinite(ModelError):
    """The loss of a step is NaN or infinite; every attempt would find it again."""

    comes_back = True


@dataclass(eq=False)
class LossWatch:
    """Watches the sum of each step's losses over all workers, which is the same on each of them.

    On a GPU it is read as many steps later as a stop request, so that no step waits for the GPU. `run_dir` is the
    run's directory, for the message. `not_finite` is the first step whose sum, which it has too, was read and is not
    finite; it is the same on all workers after the same step.
    """

    run_dir: str
    not_finite: tuple[int, float] | None = None
    _next: int | None = None  # the step whose sum is to be read next
    _sums: Lagged = field(default_factory=Lagged)

    def take(self, step: int, total: torch.Tensor | float) -> None:
        """Take in the sum of a step's losses."""
        self._next = step if self._next is None else self._next
        earlier = self._sums.take(total)
        if earlier is not None:
            self._note(earlier)

    def is_finite(self) -> bool:
        """Return whether all losses so far are finite; this waits for the device."""
        return self.not_finite is None and all(map(math.isfinite, self._sums.ahead()))

    def check(self) -> None:
        """Raise NotFinite, on all workers after the same step, if a loss that was read is not finite."""
        if self.not_finite is not None:
            step, total = self.not_finite
            raise NotFinite(
                f"step {step}: the loss is {total}, and stop_on_nan is true; look at its rows: "
                f"{replay_command(self.run_dir, step)}"
            )

    def check_all(self) -> None:
        """Check the losses of all steps so far; every rank calls this after its last step."""
        for total in self._sums.ahead():
            self._note(total)
        self.check()

    def _note(self, total: float) -> None:
        step = self._next or 0
        if self.not_finite is None and not math.isfinite(total):
            self.not_finite = step, total
        self._next = step + 1
