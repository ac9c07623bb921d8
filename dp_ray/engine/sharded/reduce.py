"""Sum a step's gradients where each worker holds a part of the model.

FSDP sums each worker's slice in the last round's backward. With `bitwise`, slices are exchanged in each round, and
added by the fixed tree.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.gradient_hooks import InEachBackward
from dp_ray.engine.reduce import GRADIENTS, REQUIRES_GRAD, Reduction, Trained, Work
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.tree_sum import add, tree_sum, zeros_that_add_nothing
from dp_ray.engine.world import everyone, gathered
from dp_ray.errors import ModelError
from dp_ray.plan.split import worker_shards
from dp_ray.plan.tree import Node, fold, nodes_by_rank
from dp_ray.system.threads import waiting
from dp_ray.text import listed


class ShardedReduction(Reduction):
    """The reduction with `strategy: fsdp`: gradients add up whole on each worker, and the last round sums slices.

    FSDP fills in zeros where a worker left a parameter unused. If no worker used it, it gets no gradient, as in one
    process. With `looks_for_unused` True or "auto", the workers ask each other in each step.
    """

    def __init__(self, trained: Trained, sharded: Sharded, looks_for_unused: bool | str) -> None:
        super().__init__(trained)
        self._sharded = sharded
        self._looks = bool(looks_for_unused)
        self._used: set[int] = set()
        self._units = list(sharded.units)
        self._unwatched = self._units
        self._is_dummy = False
        self._exchanges = True
        self._work: Work = None
        self._modes = [unit.sharded_param.requires_grad for unit in self._units]
        self.called = self._forward
        for parameter in sharded.replicated.values():
            self._watch(parameter, parameter)

    def begin(self, step: int, shards: Sequence[int], filled: int) -> None:
        """Begin a step; without shards with rows, this worker's gradients count nothing."""
        super().begin(step, shards, filled)
        self._used = set()
        self._work = None
        self._sharded.round.is_silent = not shards

    @contextmanager
    def shard(self, shard: int | None, is_last: bool) -> Iterator[None]:
        """Run a round; only the last round's backward exchanges gradients. FSDP keeps those before it."""
        if is_last != self._exchanges:  # both walk through all modules
            self._sharded.root.set_requires_gradient_sync(is_last)
            self._sharded.root.set_is_last_backward(is_last)
        self._exchanges = is_last
        self._is_dummy = shard is None
        yield

    def last_backward(self, loss: torch.Tensor, seed: torch.Tensor, stats: torch.Tensor) -> None:
        """Run the last round's backward, after a start of the sum of `stats`, in place."""
        self._send(stats)
        with waiting(GRADIENTS):
            super().last_backward(loss, seed, stats)

    def _send(self, stats: torch.Tensor) -> None:
        self._work = dist.all_reduce(stats, group=everyone(), async_op=True)
        self.trained.state.share()

    def summed(self, stats: torch.Tensor) -> Iterator[list[torch.Tensor]]:
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
        return iter(())

    def _forward(self, *shard: Any) -> torch.Tensor:
        # In memory of its own: torch warns of hooks on views.
        loss: torch.Tensor = self._sharded.run(lambda *args: self.trained.loss(*args).clone(), *shard)
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
            names = listed([str(unit._param_fqn) for unit in units])
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
            if parameter.grad is None or self._sharded.round.is_silent:
                parameter.grad = torch.zeros_like(parameter)
            numbers = parameter.grad.detach().contiguous()  # all workers add them in one order, whatever the strides
            with waiting("the other workers' gradients"):
                dist.all_reduce(_viewed(numbers), group=everyone())
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

    def __init__(self, trained: Trained, sharded: Sharded, looks: bool | str, may_lose: bool) -> None:
        super().__init__(trained, sharded, looks)
        assert trained.sums is not None, "of the parameters that each worker holds whole"
        self._shards = trained.sums.root[1]
        self._may_lose = may_lose
        self._ran = 0
        self._filled = 0
        self._by_rank: list[Sequence[int]] = []

    def begin(self, step: int, shards: Sequence[int], filled: int) -> None:
        """Begin a step, and find out which shards each worker runs."""
        super().begin(step, shards, filled)
        self._ran, self._filled = 0, filled
        size = self._sharded.world.world_size
        self._by_rank = (
            gathered(list(shards))
            if self._may_lose
            else [[leaf for leaf in worker_shards(self._shards, size, rank) if leaf < filled] for rank in range(size)]
        )

    @contextmanager
    def shard(self, shard: int | None, is_last: bool) -> Iterator[None]:
        """Run a round, in which all gradients are exchanged; a dummy batch's count nothing."""
        current = self._sharded.round
        current.number += 1
        current.is_last = is_last
        current.used = set()
        current.shards = [theirs[self._ran] if self._ran < len(theirs) else None for theirs in self._by_rank]
        self._ran += 1
        with super().shard(shard, True):
            yield
        if shard is not None:
            self._take(shard)  # of the parameters that each worker holds whole
        else:
            for parameter in self._sharded.replicated.values():
                parameter.grad = None
        if not is_last:
            for unit in self._units:
                unit.sharded_param.grad = None

    def _sum_replicated(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self.sums is not None
        held, self.sums.held = self.sums.held, {}
        by_rank = nodes_by_rank(self._shards, self._sharded.world.world_size, self._filled)
        for number, parameter in enumerate(self.sums.parameters):
            if any(parameter is summed for summed in parameters):
                sums = {node: [tensors[number]] for node, tensors in held.items()}
                mine = [fold(sums, node, add) for node in by_rank[self._sharded.world.rank]]
                parameter.grad = self._over_workers(
                    parameter, [None if tensors is None else tensors[0] for tensors in mine], by_rank
                )

    def _over_workers(
        self, parameter: nn.Parameter, mine: Sequence[torch.Tensor | None], by_rank: list[list[Node]]
    ) -> torch.Tensor:
        """Return a parameter's gradient, from this worker's sums for its nodes and all others'."""
        nothing = zeros_that_add_nothing(_numbers(parameter.detach()))
        rows = [nothing if tensor is None else _numbers(tensor) for tensor in mine]
        gradient = torch.empty_like(parameter)
        with waiting(GRADIENTS):
            whole = tree_sum(torch.empty_like(nothing), rows, by_rank, (0, self._shards), everyone())
        _viewed(gradient).copy_(whole.view(_viewed(gradient).shape))
        return gradient


def _viewed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers, in one row and without its layout."""
    return _viewed(tensor).reshape(-1)
