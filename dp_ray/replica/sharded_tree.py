"""`bitwise` where each worker holds a part of the model: gradients are added by the fixed tree in each round."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.plan.reduction_tree import Node, fold, nodes
from dp_ray.plan.split import worker_shards
from dp_ray.replica.reducer import Gradients, ShardSums, add, zeros_that_add_nothing
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.sharded_reduction import ShardedReduction
from dp_ray.replica.world import gathered
from dp_ray.system.waiting import waiting


class TreeShardedReduction(ShardedReduction):
    """The reduction with `strategy: fsdp` and `bitwise`: each round's slices are exchanged and added by the tree.

    `may_lose` says whether samples are set aside: then the workers tell each other which shards have rows left.
    """

    def __init__(self, loss: ShardLoss, sharded: Sharded, looks: bool | str, shards: int, may_lose: bool) -> None:
        super().__init__(loss, sharded, looks)
        self.sums = ShardSums(list(sharded.replicated.values()), shards)
        self._shards = shards
        self._may_lose = may_lose
        self._ran = 0
        self._filled = 0
        self._by_rank: list[Sequence[int]] = []

    def begin(self, shards: Sequence[int], filled: int) -> None:
        """Begin a step, and find out which shards each worker runs."""
        super().begin(shards, filled)
        assert self.sums is not None
        self._leaves = self.sums.leaves(shards)
        self._ran, self._filled = 0, filled
        size = self._sharded.world.world_size
        self._by_rank = (
            gathered(list(shards))
            if self._may_lose
            else [[one for one in worker_shards(self._shards, size, rank) if one < filled] for rank in range(size)]
        )

    @contextmanager
    def shard(self, is_last: bool) -> Iterator[None]:
        """The context of a round, in which all gradients are exchanged."""
        current = self._sharded.round
        current.number += 1
        current.is_last = is_last
        current.used = set()
        current.shards = [theirs[self._ran] if self._ran < len(theirs) else None for theirs in self._by_rank]
        self._ran += 1
        with super().shard(True):
            yield
        if not is_last:
            for unit in self._units:
                unit.sharded_param.grad = None

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The context of a round in which this worker's gradients count nothing."""
        self._sharded.round.is_silent = True
        with super().standing_in():
            yield
        self._sharded.round.is_silent = False
        for one in self._sharded.replicated.values():
            one.grad = None

    def after(self, shard: int, is_last: bool) -> None:
        """Take a shard's gradients of the parameters that each worker holds whole."""
        super(ShardedReduction, self).after(shard, is_last)

    def _sum_replicated(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self.sums is not None
        held, self.sums.held = self.sums.held, {}
        by_rank = [self._nodes(rank) for rank in range(self._sharded.world.world_size)]
        for number, parameter in enumerate(self.sums.parameters):
            if any(parameter is one for one in parameters):
                sums = {node: [one[number]] for node, one in held.items()}
                mine = [fold(sums, node, add) for node in by_rank[self._sharded.world.rank]]
                parameter.grad = self._over_workers(
                    parameter, [None if one is None else one[0] for one in mine], by_rank
                )

    def _nodes(self, rank: int) -> list[Node]:
        """A worker's nodes with rows."""
        mine = worker_shards(self._shards, self._sharded.world.world_size, rank)
        return [node for node in nodes(mine, (0, self._shards)) if node[0] < self._filled]

    def _over_workers(
        self, parameter: nn.Parameter, mine: Sequence[torch.Tensor | None], by_rank: list[list[Node]]
    ) -> torch.Tensor:
        """A parameter's gradient, from this worker's sums for its nodes and all others'."""
        nothing = zeros_that_add_nothing(_numbers(parameter.detach()))
        rows = [nothing if one is None else _numbers(one) for one in mine]
        rows += [nothing] * (max(map(len, by_rank)) - len(rows))
        sent = torch.stack(rows)
        received = [torch.empty_like(sent) for _ in by_rank]
        with waiting("the other workers' gradients"):
            dist.all_gather(received, sent)
        sums: dict[Node, Gradients] = {}
        for theirs, got in zip(by_rank, received, strict=True):
            sums.update((node, [row]) for node, row in zip(theirs, got, strict=False))
        whole = fold(sums, (0, self._shards), add)
        gradient = torch.empty_like(parameter)
        assert whole is not None and whole[0] is not None, "every step has rows"
        _viewed(gradient).copy_(whole[0].view(_viewed(gradient).shape))
        return gradient


def _viewed(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers, in one row and without its layout."""
    return _viewed(tensor).reshape(-1)
