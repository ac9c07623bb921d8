"""One worker's remaining work: its shards of every step, without those that earlier attempts finished."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from dp_ray.plan.split import Shard, Split, worker_shards


class Range(NamedTuple):
    """Steps `first_step .. end_step - 1` of shards `first_shard .. end_shard - 1`."""

    first_step: int
    end_step: int
    first_shard: int
    end_shard: int


class Done:
    """The finished ranges; `shard in done` asks for one shard."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._steps: dict[int, list[tuple[int, int]]] = {}
        for done in sorted(ranges):
            for shard in range(done.first_shard, done.end_shard):
                _append_span(self._steps.setdefault(shard, []), done.first_step, done.end_step)

    def __contains__(self, piece: Shard) -> bool:
        spans = self._steps.get(piece.shard)
        if not spans:
            return False
        before = bisect_right(spans, (piece.step, float("inf"))) - 1
        return before >= 0 and piece.step < spans[before][1]

    def through(self, shards: Iterable[int]) -> int:
        """How many steps, from step 0 on without a gap, are done in all of these shards."""
        firsts = [self._steps.get(shard, [(0, 0)])[0] for shard in shards]
        return min((end if first == 0 else 0 for first, end in firsts), default=0)


def _append_span(spans: list[tuple[int, int]], first: int, end: int) -> None:
    """Append a span to ordered ones, or extend the last: a later attempt's part may cover steps of earlier ones."""
    if spans and first <= spans[-1][1]:
        first, end = spans[-1][0], max(end, spans.pop()[1])
    spans.append((first, end))


class Frontier:
    """How far each shard is done from step `start` on, without a gap; ranges may be added in any order."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._reached: dict[int, int] = {}  # the first step that is not done, by shard
        self._later: dict[int, list[tuple[int, int]]] = {}  # heaps of spans behind a gap, by shard

    def add(self, done: Range) -> None:
        """Take in what is done."""
        for shard in range(done.first_shard, done.end_shard):
            heappush(self._later.setdefault(shard, []), (done.first_step, done.end_step))
            self._reach(shard, self._start)

    def skip(self, piece: Shard) -> None:
        """Take a shard as done up to its step, of which nothing will come."""
        self._reach(piece.shard, piece.step + 1)

    def __contains__(self, piece: Shard) -> bool:
        return self._reached.get(piece.shard, self._start) > piece.step

    def _reach(self, shard: int, step: int) -> None:
        reached, later = max(step, self._reached.get(shard, self._start)), self._later.get(shard, [])
        while later and later[0][0] <= reached:
            reached = max(reached, heappop(later)[1])
        self._reached[shard] = reached


@dataclass(frozen=True)
class Work:
    """The steps of one worker from `start` on, each with its non-empty shards that are not done.

    It can be iterated more than once.
    """

    split: Split
    world_size: int = 1
    rank: int = 0
    done: Done = field(default_factory=Done)
    start: int = 0

    @property
    def shards(self) -> range:
        """The worker's shards of every step, EMPTY and finished ones included."""
        return worker_shards(self.split.shards, self.world_size, self.rank)

    def __iter__(self) -> Iterator[tuple[int, list[Shard]]]:
        for step in range(self.start, self.split.total_steps):
            shards = self.split.worker(self.world_size, self.rank, step)
            yield step, [shard for shard in shards if shard not in self.done]
