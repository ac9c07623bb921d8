"""The order of an epoch: a permutation of the sample indices, computed index by index from (seed, epoch).

No list of the dataset's length is held in memory: a keyed bijection maps each position to its sample. The cost of
a slice depends on its length alone, on any worker, at any step.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dp_ray.plan.permutation import Permutation, permutation

LIMIT = 2**63


@dataclass(frozen=True)
class Order:
    """The sample index at each position of one epoch, a function of (seed, epoch, num_samples) alone.

    `Order(5, seed=1)[0]` is the first sample; `indices(2, 4)` are those at positions 2 and 3.
    Without `shuffle`, position and sample index are the same. Raises ValueError for a number outside 0 .. 2**63 - 1.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "seed", "epoch"):
            check_number(name, getattr(self, name))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, position: int) -> int:
        """The sample index at `position`; raises IndexError outside 0 .. num_samples - 1."""
        check_position(position, self.num_samples)
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """The sample indices at positions start .. stop - 1; raises IndexError unless 0 <= start <= stop <= n."""
        check_range(start, stop, self.num_samples)
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample indices at positions from 0 to n - 1, int64 [positions], in place of them."""
        if self.shuffle:
            self._permutation.apply(positions.view(np.uint64))
        return positions

    @cached_property
    def _permutation(self) -> Permutation:
        return permutation(self.num_samples, (self.seed, self.epoch))


def check_number(name: str, value: int) -> None:
    """Raise ValueError for a number outside 0 .. 2**63 - 1."""
    if not 0 <= value < LIMIT:
        raise ValueError(f"{name} is {value}; it must be at least 0 and below 2**63")


def check_position(position: int, num_samples: int) -> None:
    """Raise IndexError for a position that an order of so many samples does not have."""
    if not 0 <= position < num_samples:
        raise IndexError(f"position {position} is outside an order of {num_samples} samples")


def check_range(start: int, stop: int, num_samples: int) -> None:
    """Raise IndexError unless 0 <= start <= stop <= num_samples."""
    if not 0 <= start <= stop <= num_samples:
        raise IndexError(f"positions {start} to {stop} are no range in an order of {num_samples} samples")
