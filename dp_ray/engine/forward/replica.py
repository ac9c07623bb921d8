"""A model on one worker, and the one place that runs a shard of it: begin at `Replica.run`.

Every shard starts from the same state (`engine/forward/state.py`), and from random numbers of its own, whatever has
run before it on this worker: so no result depends on who runs it. An error names its step and shard.

`Forwards` says which forwards the workers run together: all of them if each worker holds a part of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from dp_ray.engine.clock import StepClock
from dp_ray.engine.random import ForwardSeeds
from dp_ray.engine.user_code import ShardSize, locating, location, raise_advised, raise_located
from dp_ray.errors import ModelError
from dp_ray.plan.split import Shard, Work
from dp_ray.tensors.tree import copied

if TYPE_CHECKING:
    from dp_ray.engine.forward.state import State
    from dp_ray.engine.loads.loading import LoadedShard, LoadedStep
    from dp_ray.job.job import Job

T = TypeVar("T")


class DummyBatch(NamedTuple):
    """A batch that a worker runs since the others need it, and its number of rows."""

    batch: Any
    rows: int


class Round(NamedTuple):
    """A batch that a worker runs: of a shard with rows, or, without a shard, a dummy for which other workers wait."""

    shard: Shard | None
    indices: Any  # of its samples
    batch: Any
    rows: int


class Forwards:
    """The forwards of workers that hold the whole model: no worker waits for another."""

    are_collective = False  # whether all workers run each forward together

    def begin(self, loaded: "LoadedStep") -> "LoadedStep":
        """Return the step to go on with; all ranks call this before a step."""
        return loaded

    def gathering(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs the model, so that it has the parameters that it needs."""
        return function

    def dummies(self, work: Work, step: int, ran: int) -> list[DummyBatch]:
        """Return a dummy batch for each round that this worker, with `ran` shards to run, runs without rows."""
        return []

    def agree(self, goes_on: bool) -> bool:
        """Return whether to run the next step: this worker's own decision."""
        return goes_on

    def end(self) -> bool:
        """End an evaluation or a prediction; return True: it ran to its end."""
        return True


@dataclass(eq=False)
class Replica:
    """A model on one worker, with the `state` that its forwards write.

    `seed` is the job's. `work` is what the worker runs; None if no other worker waits for it. `of` stands before a
    shard's place in errors. `after` computes from a shard's outputs, and may draw random numbers too.
    """

    seed: int
    model: nn.Module
    device: torch.device
    state: "State"
    work: Work | None = None
    forwards: Forwards = field(default_factory=Forwards)
    clock: StepClock = field(default_factory=StepClock)
    of: str = ""
    after: Any = None

    def __post_init__(self) -> None:
        self._seeds = ForwardSeeds(self.seed, self.model, self.device, self.after)
        self._ran: Shard | None = None  # the last shard, until its writes are undone

    def dummies(self, step: int, ran: int) -> list[DummyBatch]:
        """Return what this worker, with `ran` shards to run, runs in a step beside these, since others need it."""
        return [] if self.work is None else self.forwards.dummies(self.work, step, ran)

    def rounds(self, loaded: "LoadedStep", dummies: Sequence[DummyBatch] | None = None) -> Iterator[Round]:
        """Yield a step's shards with rows, as they are read, and then the `dummies`, by default all."""
        if dummies is None:
            dummies = self.dummies(loaded.step, sum(shard.rows > 0 for shard in loaded.shards))
        for shard, indices, batch in loaded.loaded:
            if shard.rows:  # else all of its samples are skipped or set aside
                yield Round(shard, indices, batch, shard.rows)
        for batch, rows in dummies:
            yield Round(None, None, copied(batch), rows)  # a model may change its inputs in place

    def run(
        self,
        shard: Shard | None,
        forward: Callable[..., T],
        *args: Any,
        number: int = 0,
        seed: int | None = None,
        keeps: bool = False,
    ) -> T:
        """Run a shard's forward, `forward(*args)`, in the step's pass of this `number`; return what it returns.

        Its random numbers come from `seed`, by default from the job's seed, the shard and the pass. First it undoes
        the writes of the forward before, unless `begin` or `leave_state` was called since. If it `keeps`, all workers
        go on after the step from what shard 0 writes. Without a shard, as in a round for which others wait, the state
        is not watched. Raises ModelError, which names the shard.
        """
        if shard is None:
            return forward(*args)
        # Only now: the backward of the forward before may have needed what that wrote.
        if self._ran is not None:
            self.restore()
        self._ran = shard
        self._seeds.begin(shard, number, seed)
        try:
            with self.state.forward():
                returned = forward(*args)
            if keeps and shard.shard == 0:
                self.state.keep()
            return returned
        except (Exception, SystemExit) as error:
            raise_located(error, self.of + location(shard))

    @contextmanager
    def again(
        self, loaded: "LoadedShard", run: Callable[[Any], T], number: int = 0, in_step: bool = False
    ) -> Iterator[T]:
        """Run a shard outside the steps: give what `run` returns for a copy of its batch, which it may write.

        After the block the state is as before; `in_step`, after the step's shards, it is as before the step. Random
        numbers are not: all code that draws them is seeded before.
        """
        if not in_step:
            self.begin(2)
        yield self.run(loaded.shard, run, copied(loaded.batch), number=number)
        self.restore()

    def begin(self, num_runs: int, lacks_shard_0: bool = False) -> None:
        """Begin a step of a training, or a part of one, in which so many shards run.

        If this worker has shard 0, and it lacks rows, the step leaves the state as it is.
        """
        self._ran = None
        self.state.begin(num_runs)
        if lacks_shard_0:
            self.state.keep()

    def leave_state(self) -> None:
        """Let the next run go on from the state as it is: its forward has run already."""
        self._ran = None

    def restore(self) -> None:
        """Undo all writes since the state was last restored, or since the step began.

        Raises ModelError, which names the shard, for what cannot be undone.
        """
        ran, self._ran = self._ran, None
        try:
            self.state.restore()
        except (Exception, SystemExit) as error:
            if ran is None:
                raise
            raise_located(error, self.of + location(ran))

    def raise_advised(
        self, error: RuntimeError | ModelError, shard: Shard, job: "Job", key: str = "batch_size"
    ) -> NoReturn:
        """Raise an error of a shard again; one of memory says what to change, as `key`."""
        assert self.work is not None
        split = self.work.split
        size = ShardSize(shard.planned_rows, split.largest_batch, split.shards, key)
        raise_advised(error, job, self.of + location(shard), size)

    def run_batch(self, step: int, function: Callable[..., T], *args: Any) -> T:
        """Run what sees a whole batch, `function(*args)`, which all workers call alike; an error names the step."""
        with locating(f"{self.of}step {step}"), self.state.running():
            return function(*args)
