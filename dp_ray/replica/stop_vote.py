"""Let all workers agree on when to stop, without a collective of its own."""

from collections import deque

import torch

from dp_ray.system.waiting import waiting


class Lagged:
    """Reads a number of each step from the device; on a GPU only `lag` steps later, so that no step waits for it."""

    def __init__(self, device: torch.device, lag: int) -> None:
        self._lag = lag if device.type == "cuda" else 0
        self._numbers: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def take(self, number: torch.Tensor) -> float | None:
        """Add this step's number, a scalar; returns that of `lag` steps before, None if there is none."""
        if self._lag:
            here = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(number.device))
            self._numbers.append((here, copied))
        else:
            self._numbers.append((number, None))
        return _read(*self._numbers.popleft()) if len(self._numbers) > self._lag else None

    def ahead(self) -> list[float]:
        """The numbers that `take` has not returned yet; this waits for the device, and takes none of them."""
        return [_read(*one) for one in self._numbers]


def _read(number: torch.Tensor, ready: "torch.cuda.Event | None") -> float:
    with waiting("the GPU, which may be in a collective"):
        if ready is not None:
            ready.synchronize()
        return float(number.item())


class StopVote:
    """Stop requests ride on each step's all-reduce, so all workers stop after the same step.

    On a GPU the sum is read LAG steps later, so that no step waits for the GPU.
    """

    LAG = 16

    def __init__(self, device: torch.device) -> None:
        self._votes = Lagged(device, self.LAG)

    def stops(self, votes: torch.Tensor) -> bool:
        """Add this step's votes, the number of workers that ask to stop; returns whether to stop now."""
        return bool(self._votes.take(votes))
