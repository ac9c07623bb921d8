"""Let all workers agree on when to stop, without a collective of its own."""

from collections import deque

import torch

from dp_ray.system.waiting import waiting


class Lagged:
    """Reads a number of each step from a GPU, `lag` steps later, so that no step waits for it.

    A number that is known already, as on a CPU, is read at once.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._numbers: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def take(self, number: torch.Tensor | float) -> float | None:
        """Add this step's number, a scalar; returns that of `lag` steps before, None if there is none."""
        if not isinstance(number, torch.Tensor):
            return number
        here = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(number.device))
        self._numbers.append((here, copied))
        return _read(*self._numbers.popleft()) if len(self._numbers) > self._lag else None

    def ahead(self) -> list[float]:
        """The numbers that `take` has not returned yet; this waits for the device, and takes none of them."""
        return [_read(*one) for one in self._numbers]


def _read(number: torch.Tensor, ready: "torch.cuda.Event") -> float:
    with waiting("the GPU, which may be in a collective"):
        ready.synchronize()
        return float(number.item())


class StopVote:
    """Stop requests ride on each step's all-reduce, so all workers stop after the same step.

    On a GPU the sum is read LAG steps later, so that no step waits for the GPU.
    """

    LAG = 16

    def __init__(self) -> None:
        self._votes = Lagged(self.LAG)

    def stops(self, votes: torch.Tensor | float) -> bool:
        """Add this step's votes, the number of workers that ask to stop; returns whether to stop now."""
        return bool(self._votes.take(votes))
