"""What the workers sum in a step beside the gradients."""

from typing import Any

import numpy as np
import torch

from dp_ray.plan.split import worker_shards
from dp_ray.replica.step import Row
from dp_ray.replica.world import World, is_gpu

VOTES, MISSING = -2, -1  # the columns of the votes to stop, and of the samples set aside


class Stats:
    """Sums and weights of each shard, votes to stop, and the number of samples set aside.

    `numbers` is float64 [shards, 2 * measures + 2] on the device: a row for each shard, zero until it has run. A
    worker votes, and counts what it has set aside, in the row of its first shard: all others leave that row at zero.
    """

    def __init__(self, shards: int, measures: int, world: World) -> None:
        size, device = (shards, 2 * measures + 2), world.device
        self._own = worker_shards(shards, world.world_size, world.rank).start
        self._cells: Any
        if is_gpu(device):
            self._cells = self.numbers = torch.zeros(size, dtype=torch.float64, device=device)
        else:  # numpy sets a few cells of the same memory sooner than torch
            self._cells = np.zeros(size)
            self.numbers = torch.from_numpy(self._cells)

    def put(self, shard: int, row: Row) -> None:
        """Set a shard's sums and weights."""
        self._cells[shard, :VOTES] = row

    def vote(self) -> None:
        """Ask all workers to stop."""
        self._cells[self._own, VOTES] = 1.0

    def set_aside(self, samples: int) -> None:
        """Count this worker's samples of the step that were set aside."""
        self._cells[self._own, MISSING] = samples
