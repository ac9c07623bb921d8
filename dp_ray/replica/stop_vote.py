"""Let all workers agree on when to stop, without a collective of its own."""

from collections import deque

import torch

from dp_ray.system.waiting import waiting


class StopVote:
    """Stop requests ride on each step's all-reduce, so all workers stop after the same step.

    On a GPU the sum is read LAG steps later, so that no step waits for the GPU.
    """

    LAG = 16

    def __init__(self, device: torch.device) -> None:
        self._lag = self.LAG if device.type == "cuda" else 0
        self._votes: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def stops(self, votes: torch.Tensor) -> bool:
        """Add this step's votes, the number of workers that ask to stop; returns whether to stop now."""
        if self._lag:
            here = torch.empty((), dtype=votes.dtype, pin_memory=True).copy_(votes, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(votes.device))
            self._votes.append((here, copied))
        else:
            self._votes.append((votes, None))
        if len(self._votes) <= self._lag:
            return False
        oldest, ready = self._votes.popleft()
        with waiting("the GPU, which may be in a collective"):
            if ready is not None:
                ready.synchronize()
            return bool(oldest.item())
