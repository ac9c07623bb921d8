"""A model on one worker, and the one place that runs a shard of it: begin at `Replica.run`.

Every shard starts from the same state (`engine/buffers.py`), and from random numbers of its own, whatever has run
before it on this worker: so no result depends on who runs it. An error names its step and shard.

`Forwards` says what the workers run together: of a model of which each holds a part, every forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.buffers import EvalState, ForwardState
from dp_ray.engine.call_state import CallState
from dp_ray.engine.clock import SilentClock, StepClock
from dp_ray.engine.items import PassthroughBatch
from dp_ray.engine.loading import LoadedStep
from dp_ray.engine.model import ShardSize, raise_advised
from dp_ray.engine.random import ForwardSeeds
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.user_code import locating, location, raise_located
from dp_ray.engine.world import CPU, World, everyone, gathered
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.split import Shard, Work
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import moved_batch
from dp_ray.tensors.tree import copied

T = TypeVar("T")


class DummyBatch(NamedTuple):
    """A batch that a worker runs since the others need it, and its number of rows."""

    batch: Any
    rows: int


class Round(NamedTuple):
    """A batch that a worker runs: that of a shard with rows, or, without one, what other workers wait for."""

    shard: Shard | None
    indices: Any  # of its samples
    batch: Any
    rows: int


class Forwards:
    """The forwards of workers that hold the whole model: no worker waits for another."""

    are_collective = False  # whether all workers run each forward together

    def begin(self, loaded: LoadedStep) -> LoadedStep:
        """Return the step to go on with; all ranks call this before a step."""
        return loaded

    def gathering(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs the model, so that it has the parameters that it needs."""
        return call

    def dummies(self, work: Work, step: int, ran: int) -> list[DummyBatch]:
        """Return a dummy batch for each round that this worker, with `ran` shards to run, runs without rows."""
        return []

    def agree(self, goes_on: bool) -> bool:
        """Return whether to run the next step: this worker's own decision."""
        return goes_on

    def end(self) -> bool:
        """End an evaluation or a prediction, and say that it ran to its end: True."""
        return True


class CollectiveForwards(Forwards):
    """The forwards of workers that hold a part of the model each: in each round all of them run it."""

    are_collective = True

    def __init__(self, sharded: Sharded, world: World) -> None:
        self._sharded = sharded
        self._world = world
        self._dummy: DummyBatch | None = None
        self._is_agreed = sharded.round.is_alone  # then nobody waits for this worker: it runs no dummy batch

    def begin(self, loaded: LoadedStep) -> LoadedStep:
        """Return the same step, once the workers have agreed on a dummy batch. Every rank calls this each step.

        Until all have one, it loads the whole step, since the first samples may be set aside.
        """
        if self._is_agreed:
            return loaded
        first = list(loaded.loaded)
        filled = [
            DummyBatch(batch.batch if isinstance(batch, PassthroughBatch) else batch, shard.rows)
            for shard, _, batch in first
            if shard.rows
        ]
        mine = filled[0] if filled else None
        have = gathered(mine is not None)
        self._is_agreed = any(have)
        self._dummy = mine
        if self._is_agreed and not all(have):  # one without rows takes the batch of the first rank that has one
            sender = have.index(True)
            sent = gathered(_moved(mine, CPU) if self._world.rank == sender else None)[sender]
            self._dummy = mine or _moved(sent, self._world.device)
        return loaded._replace(loaded=chain(first))

    def gathering(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs the model, with the parameters outside its blocks gathered."""
        return partial(self._sharded.run, call)

    def dummies(self, work: Work, step: int, ran: int) -> list[DummyBatch]:
        """Return the dummy batch, for each round of the step in which this worker has no rows.

        There are as many rounds as the worker has that has most shards with rows by the plan, without those done.
        """
        if self._dummy is None:
            return []
        size = self._world.world_size
        everybodys = (Work(work.split, size, rank, work.done, step) for rank in range(size))
        return [self._dummy] * (max(len(next(iter(one))[1]) for one in everybodys) - ran)

    def agree(self, goes_on: bool) -> bool:
        """Return whether all workers go on; every rank calls this before each step."""
        votes = torch.tensor(int(goes_on))
        with waiting("the other workers to begin the next step"):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=everyone())
        return bool(votes)

    def end(self) -> bool:
        """Free what the last forward has left gathered, and say that it ran to its end: True."""
        self._sharded.root.reshard()  # a forward without a backward leaves parameters gathered
        return True


def _moved(one: DummyBatch | None, device: torch.device) -> DummyBatch | None:
    return None if one is None else DummyBatch(moved_batch(one.batch, device), one.rows)


@dataclass(eq=False)
class Replica:
    """A model on one worker, with the `state` that its forwards write.

    `seed` is the job's. `work` is what the worker runs; None if no other worker waits for it. `of` stands before a
    shard's place in errors. `after` computes from a shard's outputs, and may draw random numbers too. `running_batch`
    is the batch that runs, or that an error has ended, with its rows; the caller sets it.
    """

    seed: int
    model: nn.Module
    device: torch.device
    state: ForwardState | EvalState | CallState
    work: Work | None = None
    forwards: Forwards = field(default_factory=Forwards)
    clock: StepClock = field(default_factory=SilentClock)
    of: str = ""
    after: Any = None

    def __post_init__(self) -> None:
        self._seeds = ForwardSeeds(self.seed, self.model, self.device, self.after)
        self._ran: Shard | None = None  # the last shard, until the state is that of before
        self.running_batch: tuple[Any, int] | None = None

    def dummies(self, step: int, ran: int) -> list[DummyBatch]:
        """Return what this worker, with `ran` shards to run, runs in a step beside these, since others need it."""
        return [] if self.work is None else self.forwards.dummies(self.work, step, ran)

    def rounds(self, loaded: LoadedStep, dummies: Sequence[DummyBatch] | None = None) -> Iterator[Round]:
        """Yield a step's shards with rows, as they are read, and then the `dummies`, by default all."""
        if dummies is None:
            dummies = self.dummies(loaded.step, sum(shard.rows > 0 for shard in loaded.shards))
        for shard, indices, batch in loaded.loaded:
            if shard.rows:  # else all of its samples are skipped or set aside
                yield Round(shard, indices, batch, shard.rows)
        for batch, rows in dummies:
            yield Round(None, None, copied(batch), rows)  # a model may change its inputs in place

    def run(
        self, shard: Shard | None, call: Callable[..., T], *args: Any, number: int = 0, seed: int | None = None
    ) -> T:
        """Run a shard's forward, `call(*args)`, in the step's pass of this `number`; return what it returns.

        Its random numbers are those of `seed`, by default of the job's seed, the shard and the pass. What the forward
        before it has written is undone first, unless `begin` or `leave_state` was called since.
        Without a shard, as of a round that others wait for, nobody looks at the state. Raises ModelError, which names
        the shard.
        """
        if shard is None:
            return call(*args)
        if self._ran is not None:
            self.restore()
        self._ran = shard
        self._seeds.begin(shard, number, seed)
        try:
            with self.state.forward():
                return call(*args)
        except (Exception, SystemExit) as error:
            raise_located(error, self.of + location(shard))

    def begin(self, num_runs: int) -> None:
        """Begin a step of a training, or a part of one, in which so many shards run."""
        self._ran = None
        self.state.begin(num_runs)

    def leave_state(self) -> None:
        """Let the next run go on from the state as it is: its forward has run already."""
        self._ran = None

    def restore(self) -> None:
        """Undo what has been written since the state was last restored, or the step begun.

        Raises ModelError, which names the shard, for what cannot be undone.
        """
        ran, self._ran = self._ran, None
        try:
            self.state.restore()
        except (Exception, SystemExit) as error:
            if ran is None:
                raise
            raise_located(error, self.of + location(ran))

    def raise_advised(self, error: RuntimeError | ModelError, shard: Shard, job: Job) -> NoReturn:
        """Raise an error of a shard again; one of memory says what to change."""
        assert self.work is not None
        split = self.work.split
        key = "eval.batch_size" if self.of and job.task == "train" else "batch_size"
        size = ShardSize(shard.stop - shard.start, split.largest_batch, split.shards, key)
        raise_advised(error, job, self.of + location(shard), size)

    def run_batch(self, step: int, call: Callable[..., T], *args: Any) -> T:
        """Run what sees a whole batch, `call(*args)`, which all workers call alike; an error names the step."""
        with locating(f"{self.of}step {step}"), self.state.running():
            return call(*args)
