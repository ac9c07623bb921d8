"""The forward passes of an evaluation: each worker's own, or in rounds if each holds a part of the model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dp_ray.plan.split import Shard
from dp_ray.plan.work import Work
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.stand_in import Batches, StandIns
from dp_ray.replica.world import World, gathered
from dp_ray.tensors.nested import copied


class Passes:
    """The passes of workers that hold the whole model: no worker waits for another."""

    def before(self, shards: Sequence[Shard], batches: Batches, real: Callable[[Shard], Shard]) -> Batches:
        """The batches to go on with, before a step of which this worker has `shards`; every rank calls this."""
        return batches

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model."""
        return function(*args)

    def missing(self, work: Work, step: int, ran: int) -> Iterator[Any]:
        """A batch for each further pass that this worker runs in a step of which it has run `ran` shards."""
        return iter(())

    def agree(self, goes_on: bool) -> bool:
        """Whether to run the next step: this worker's own decision."""
        return goes_on

    def end(self) -> bool:
        """End an evaluation or a prediction, and say that it ran to its end: True."""
        return True


class Rounds(Passes):
    """The passes of workers that hold a part of the model each: in each round all of them run it."""

    def __init__(self, sharded: Sharded, world: World) -> None:
        self._sharded = sharded
        self._stand_ins = StandIns(world)

    def before(self, shards: Sequence[Shard], batches: Batches, real: Callable[[Shard], Shard]) -> Batches:
        """The batches to go on with, after the workers have agreed on a stand-in; every rank calls this."""
        return self._stand_ins.look(shards, batches, real)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model, with the parameters outside its blocks gathered."""
        return self._sharded.run(function, *args)

    def missing(self, work: Work, step: int, ran: int) -> Iterator[Any]:
        """The stand-in, for each round of the step in which this worker has no rows."""
        found = self._stand_ins.found
        for _ in range(self._stand_ins.missing(work.split, step, ran, work.done)):
            assert found is not None
            yield copied(found.batch)

    def agree(self, goes_on: bool) -> bool:
        """Whether all workers go on; every rank calls this before each step."""
        return all(gathered(goes_on))

    def end(self) -> bool:
        """Free what the last forward has left gathered, and say that it ran to its end: True."""
        self._sharded.end_of_evaluation()
        return True


def passes_of(sharded: Sharded | None, world: World) -> Passes:
    """The passes of a model that is sharded, or whole."""
    return Passes() if sharded is None else Rounds(sharded, world)
