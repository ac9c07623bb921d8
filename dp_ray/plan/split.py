"""Cut an epoch into global batches, a global batch into shards, and assign the shards to workers.

Pure arithmetic, without tensors: every answer is O(1) in the number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache


def chunk_sizes(rows: int, shards: int) -> list[int]:
    """Rows of each of `shards` shards, as `torch.chunk` cuts `rows` rows, EMPTY shards included as 0.

    >>> chunk_sizes(30, 8), chunk_sizes(10, 8)
    ([4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2, 0, 0, 0])
    """
    return [stop - start for start, stop in (chunk_bounds(rows, shards, shard) for shard in range(shards))]


def chunk_bounds(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """First row and end (exclusive) of one shard within its global batch; both are equal if the shard is EMPTY."""
    size = -(-rows // shards)
    return min(rows, shard * size), min(rows, (shard + 1) * size)


def num_filled(rows: int, shards: int) -> int:
    """How many of `shards` shards have rows; the EMPTY ones come last."""
    return -(-rows // -(-rows // shards)) if rows else 0


def worker_shards(shards: int, world_size: int, rank: int) -> range:
    """The consecutive shards that worker `rank` of `world_size` runs.

    >>> [list(worker_shards(8, 3, rank)) for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(shards * rank // world_size, shards * (rank + 1) // world_size)


@lru_cache(maxsize=64)
def worker_pieces(rows: int, shards: int, world_size: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """Each non-EMPTY shard of a worker with its first row and end, in a global batch of `rows` rows.

    It is remembered, since nearly all global batches of a job have the same number of rows.
    """
    pieces = ((shard, *chunk_bounds(rows, shards, shard)) for shard in worker_shards(shards, world_size, rank))
    return tuple(piece for piece in pieces if piece[1] < piece[2])


@dataclass(frozen=True)
class Shard:
    """One piece of one global batch: positions `start .. stop - 1` of the order of `epoch`.

    `step` counts from the job's start, over all epochs.
    """

    step: int
    shard: int
    start: int
    stop: int
    epoch: int = 0
    missing: tuple[int, ...] = ()  # positions whose samples were set aside, in order

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start - len(self.missing)

    @property
    def positions(self) -> list[int]:
        """The positions of its rows in the order of its epoch."""
        return [at for at in range(self.start, self.stop) if at not in self.missing]


@dataclass(frozen=True)
class Split:
    """How `epochs` epochs of `rows` samples are cut into global batches, and these into shards."""

    rows: int
    batch_size: int
    shards: int
    drop_last: bool = False
    epochs: int = 1
    max_steps: int | None = None

    @cached_property
    def steps(self) -> int:
        """Global batches in an epoch, whatever `max_steps` is."""
        full, rest = divmod(self.rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @cached_property
    def total_steps(self) -> int:
        """Global batches in all epochs, at most `max_steps`: the steps are 0 .. total_steps - 1."""
        steps = self.steps * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def largest_batch(self) -> int:
        """Rows of the largest global batch."""
        return min(self.rows, self.batch_size)

    @property
    def total_rows(self) -> int:
        """Rows of all steps of all epochs."""
        epochs, rest = divmod(self.total_steps, max(1, self.steps))
        return epochs * self.rows_kept + rest * self.batch_size

    def cursor(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the step's number within that epoch."""
        return divmod(step, max(1, self.steps))

    @property
    def dropped(self) -> int:
        """Samples of an epoch that are in no global batch: 0 without `drop_last`."""
        return self.rows - self.rows_kept

    @property
    def rows_kept(self) -> int:
        """Samples of an epoch that are in a global batch."""
        return min(self.rows, self.steps * self.batch_size)

    def batch(self, step: int) -> tuple[int, int]:
        """First position and end (exclusive) of the global batch of `step`, in the order of its epoch.

        Raises IndexError if the job has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is outside the job's {self.total_steps} steps")
        first = step % self.steps * self.batch_size
        return first, min(self.rows, first + self.batch_size)

    def whole(self, step: int) -> Shard:
        """The whole global batch of `step`, as shard -1."""
        return Shard(step, -1, *self.batch(step), step // self.steps)

    def shard(self, step: int, shard: int) -> Shard:
        """One shard of the global batch of `step`, maybe EMPTY."""
        first, end = self.batch(step)
        start, stop = chunk_bounds(end - first, self.shards, shard)
        return Shard(step, shard, first + start, first + stop, step // self.steps)

    def worker(self, world_size: int, rank: int, step: int) -> list[Shard]:
        """The non-empty shards of `step` that worker `rank` of `world_size` runs, in shard order."""
        first, end = self.batch(step)
        pieces, epoch = worker_pieces(end - first, self.shards, world_size, rank), step // self.steps
        return [Shard(step, shard, first + start, first + stop, epoch) for shard, start, stop in pieces]

    def batch_sizes(self) -> Iterator[tuple[int, int]]:
        """(steps, rows) of each size of global batch in an epoch: the full ones, then a short last one."""
        full, rest = divmod(self.rows, self.batch_size)
        if full:
            yield full, self.batch_size
        if rest and not self.drop_last:
            yield 1, rest
