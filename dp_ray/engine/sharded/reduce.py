"""Sum a step's gradients where each worker holds a part of the model.

FSDP sums each worker's slice in the last round's backward. With `bitwise`, slices are exchanged in each round, and
added by the fixed tree. `CollectiveForwards` are the forwards of such a model, which all workers run together.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.forward.replica import DummyBatch, Forwards
from dp_ray.engine.loads.items import PassthroughBatch
from dp_ray.engine.loads.loading import LoadedStep
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.sums.gradient_hooks import InEachBackward
from dp_ray.engine.sums.reduce import GRADIENTS, REQUIRES_GRAD, Reduction, Trained
from dp_ray.engine.sums.tree_sum import as_real, tensor_sum
from dp_ray.engine.world import CPU, World, everyone, gathered
from dp_ray.errors import ModelError
from dp_ray.plan.split import Work, worker_shards
from dp_ray.plan.tree import nodes_by_rank
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import moved_batch
from dp_ray.text import listed

T = TypeVar("T")


class ShardedReduction(Reduction):
    """The reduction with `strategy: fsdp`: gradients add up whole on each worker, and the last round sums slices.

    FSDP fills in zeros where a worker left a parameter unused. If no worker used it, it gets no gradient, as in one
    process. With `looks_for_unused` True or "auto", the workers ask each other in each step.
    """

    _always_exchanges = False  # in each round's backward, not in the last one's alone

    def __init__(self, trained: Trained, sharded: Sharded, looks_for_unused: bool | str) -> None:
        super().__init__(trained)
        self._sharded = sharded
        self._looks = bool(looks_for_unused)
        self._used: set[int] = set()
        self._units = list(sharded.units)
        self._unwatched = self._units
        self._left = 0  # rounds whose forward is to come
        self._is_dummy = False
        self._exchanges = True
        self._work: dist.Work | None = None
        self._modes = [unit.sharded_param.requires_grad for unit in self._units]
        self.called = self._forward
        for parameter in sharded.replicated.values():
            self._watch(parameter, parameter)

    def begin(self, step: int, shards: Sequence[int], filled: int, rounds: int) -> None:
        """Begin a step."""
        super().begin(step, shards, filled, rounds)
        self._used, self._work, self._left = set(), None, rounds

    def backward(
        self, shard: int | None, loss: torch.Tensor, gradient: torch.Tensor, stats: torch.Tensor | None = None
    ) -> None:
        """Run a round's backward; in the last one, after a start of the sum of `stats`, in place."""
        if stats is not None:
            self._send(stats)
        with nullcontext() if stats is None else waiting(GRADIENTS):
            super().backward(shard, loss, gradient)

    def _send(self, stats: torch.Tensor) -> None:
        self._work = dist.all_reduce(stats, group=everyone(), async_op=True)
        self.trained.state.share()

    def finish(self, stats: torch.Tensor) -> None:
        """Wait for the stats' sums; sum gradients of replicated parameters, and drop those of unused ones."""
        if self._work is None:  # all samples of the step are set aside, so no worker has run a round
            self._send(stats)
        with waiting(GRADIENTS):
            assert self._work is not None
            self._work.wait()
        self._check_modes([unit.sharded_param for unit in self._units])
        unused = self._unused()
        self._sum_replicated(
            [param for param in self._sharded.replicated.values() if param.requires_grad and id(param) not in unused]
        )
        for unit in self._units:
            if id(unit.sharded_param) in unused:
                unit.sharded_param.grad = None
        for parameter in self._sharded.replicated.values():
            if id(parameter) in unused:
                parameter.grad = None

    def _forward(self, batch: Any, rows: int, shard: int | None = None) -> torch.Tensor:
        """Run a round's forward; FSDP keeps the gradients of a round whose backward does not exchange them."""
        self._left -= 1
        exchanges = self._always_exchanges or not self._left
        if exchanges != self._exchanges:  # both walk through all modules
            self._sharded.root.set_requires_gradient_sync(exchanges)
            self._sharded.root.set_is_last_backward(exchanges)
        self._exchanges, self._is_dummy = exchanges, shard is None
        # In memory of its own: torch warns of hooks on views.
        loss: torch.Tensor = self._sharded.run(lambda *args: self.trained.loss(*args).clone(), batch, rows, shard)
        for unit in self._unwatched:  # FSDP gathers a parameter into the same tensor each time
            if (gathered := getattr(unit, "_unsharded_param", None)) is not None:
                self._watch(gathered, unit.sharded_param)
        # A forward sees the gathered ones. Workers that differ in them would exchange sums of other sizes.
        self._check_modes([getattr(unit, "_unsharded_param", unit.sharded_param) for unit in self._units])
        if self._exchanges:
            self._sharded.round.ask()
        self._unwatched = [unit for unit in self._unwatched if not hasattr(unit, "_unsharded_param")]
        return loss

    def _check_modes(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ModelError for a parameter that was frozen, or thawed, since the model was built."""
        modes = list(map(REQUIRES_GRAD, parameters))
        if modes != self._modes:
            units = [unit for unit, now, before in zip(self._units, modes, self._modes, strict=True) if now != before]
            modules = {module: name for name, module in self._sharded.model.named_modules()}
            held = [unit._module_info for unit in units]
            names = listed([f"{modules[info.module]}.{info.param_name}".lstrip(".") for info in held])
            raise ModelError(
                f"requires_grad of {names} has changed since the model was built, which strategy: fsdp does not "
                "follow; take strategy: ddp"
            )

    def _reached(self) -> list[torch.Tensor]:
        gathered = [getattr(unit, "_unsharded_param", None) for unit in self._units]
        parameters = [*gathered, *self._sharded.replicated.values()]
        return [param for param in parameters if param is not None and param.requires_grad]

    def _watch(self, gathered: torch.Tensor, parameter: nn.Parameter) -> None:
        """Note when a backward gives a parameter a gradient.

        The garbage collector does not see such a hook; if that held the model, the model would stay for ever.
        """
        if gathered.requires_grad:
            note = InEachBackward(_note, weakref.ref(self), id(parameter))
            gathered.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _unused(self) -> set[int]:
        """Return the parameters that no worker used in this step; every rank calls this."""
        if not self._looks:
            return set()
        every = [*(unit.sharded_param for unit in self._units), *self._sharded.replicated.values()]
        trained = [parameter for parameter in every if parameter.requires_grad]
        counts = torch.tensor([id(parameter) in self._used for parameter in trained], dtype=torch.int32)
        with waiting("the other workers' unused parameters"):
            dist.all_reduce(counts, group=self._sharded.round.group)
            users = counts.tolist()
        return {id(parameter) for parameter, count in zip(trained, users, strict=True) if not count}

    def _sum_replicated(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters that each worker holds whole; every rank calls this."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            numbers = parameter.grad.detach().contiguous()  # all workers add them in one order, whatever the strides
            with waiting("the other workers' gradients"):
                dist.all_reduce(as_real(numbers), group=everyone())
            parameter.grad.copy_(numbers)


def _note(reduction: "weakref.ref[ShardedReduction]", number: int, gathered: torch.Tensor) -> None:
    """Note that the parameter of this id got a gradient; a function of the model's may give it None."""
    live = reduction()
    if live is not None and not live._is_dummy and gathered.grad is not None:
        live._used.add(number)
        live._sharded.round.used.add(number)


class TreeShardedReduction(ShardedReduction):
    """The reduction with `strategy: fsdp` and `bitwise`: each round's slices are exchanged and added by the tree.

    If samples are set aside (`may_lose`), the workers send each other which shards have rows left.
    """

    _always_exchanges = True

    def __init__(self, trained: Trained, sharded: Sharded, looks: bool | str, may_lose: bool) -> None:
        super().__init__(trained, sharded, looks)
        assert trained.sums is not None, "of the parameters that each worker holds whole"
        self._shards = trained.sums.root[1]
        self._may_lose = may_lose
        self._ran = 0
        self._filled = 0
        self._by_rank: list[Sequence[int]] = []

    def begin(self, step: int, shards: Sequence[int], filled: int, rounds: int) -> None:
        """Begin a step, and find out which shards each worker runs."""
        super().begin(step, shards, filled, rounds)
        self._ran, self._filled = 0, filled
        size = self._sharded.world.world_size
        self._by_rank = (
            gathered(list(shards))
            if self._may_lose
            else [[leaf for leaf in worker_shards(self._shards, size, rank) if leaf < filled] for rank in range(size)]
        )

    def _forward(self, batch: Any, rows: int, shard: int | None = None) -> torch.Tensor:
        current = self._sharded.round
        current.number += 1
        current.is_last = self._left == 1
        current.used = set()
        current.shards = [theirs[self._ran] if self._ran < len(theirs) else None for theirs in self._by_rank]
        self._ran += 1
        return super()._forward(batch, rows, shard)

    def backward(
        self, shard: int | None, loss: torch.Tensor, gradient: torch.Tensor, stats: torch.Tensor | None = None
    ) -> None:
        """Run a round's backward, in which all gradients are exchanged; a dummy batch's count nothing."""
        super().backward(shard, loss, gradient, stats)
        for parameter in self._sharded.replicated.values() if shard is None else ():
            parameter.grad = None
        for unit in self._units if self._left else ():
            unit.sharded_param.grad = None

    def _sum_replicated(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self.sums is not None
        sums, world = self.sums, self._sharded.world
        by_rank = nodes_by_rank(self._shards, world.world_size, self._filled)
        mine = [sums.of(node) for node in by_rank[world.rank]]
        sums.held = {}
        summed = set(map(id, parameters))
        for number, parameter in enumerate(sums.parameters):
            if id(parameter) in summed:
                gradients = [None if tensors is None else tensors[number] for tensors in mine]
                with waiting(GRADIENTS):
                    parameter.grad = tensor_sum(parameter.detach(), gradients, by_rank, sums.root, everyone())


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
            is_own = self._world.rank == sender
            batch, rows = gathered([(moved_batch(mine.batch, CPU), mine.rows) for mine in filled[:is_own]])[sender][0]
            self._dummy = mine or DummyBatch(moved_batch(batch, self._world.device), rows)
        return loaded._replace(loaded=chain(first))

    def gathering(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs the model, with the parameters outside its blocks gathered."""
        return partial(self._sharded.run, function)

    def dummies(self, work: Work, step: int, ran: int) -> list[DummyBatch]:
        """Return the dummy batch, for each round of the step in which this worker has no rows.

        There are as many rounds as the worker has that has most shards with rows by the plan, without those done.
        """
        if self._dummy is None:
            return []
        size = self._world.world_size
        everybodys = (Work(work.split, size, rank, work.done, step) for rank in range(size))
        return [self._dummy] * (max(len(next(iter(batches))[1]) for batches in everybodys) - ran)

    def agree(self, goes_on: bool) -> bool:
        """Return whether all workers go on; every rank calls this before each step."""
        votes = torch.tensor(int(goes_on))
        with waiting("the other workers to begin the next step"):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=everyone())
        return bool(votes)

    def end(self) -> bool:
        """Free the parameters that the last forward has left gathered; return True."""
        self._sharded.root.reshard()  # a forward without a backward leaves parameters gathered
        return True
