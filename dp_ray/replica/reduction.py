"""A step's gradients over all shards and workers: one interface, with a one-worker and a DDP version."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_ray.errors import JobError, ModelError
from dp_ray.plan.reduction_tree import Node
from dp_ray.replica.reducer import Reducer, ShardSums, SumReducer, TreeReducer
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sparse import sum_over_workers
from dp_ray.replica.world import World
from dp_ray.system.waiting import waiting
from dp_ray.text import listed

Work = dist.Work | None


class Reduction:
    """One worker has all shards. Autograd adds their gradients; with `sums`, the fixed tree does.

    A step calls `begin`; for each shard `shard` and `after`, for the last one `before_last` too; `check`; `finish`.
    """

    def __init__(self, loss: ShardLoss, sums: ShardSums | None, sparse: Sequence[nn.Parameter]) -> None:
        self.replica: nn.Module = loss
        self.loss = loss
        self.sums = sums
        self.sparse = sparse
        self._leaves: Sequence[Node] = ()

    def begin(self, shards: Sequence[int], filled: int) -> None:
        """A step begins in which the first `filled` shards have rows, `shards` of them on this worker."""
        self._leaves = self.sums.leaves(shards) if self.sums else []

    def shard(self, is_last: bool) -> AbstractContextManager[object]:
        """Around a shard's forward and backward."""
        return nullcontext()

    def before_last(self) -> None:
        """The last shard's backward is about to begin."""

    def exchange(self, stats: torch.Tensor) -> Work:
        """Begin to sum `stats` over the workers, in place."""
        return None

    def backward(self) -> AbstractContextManager[object]:
        """Around the step's last backward."""
        return nullcontext()

    def after(self, shard: int, is_last: bool) -> None:
        """A shard is done: take its gradients away, unless the next one's are to be added to them."""
        if self.sums is None:
            return
        for node in self._leaves:
            if node[1] == shard + 1:
                self.sums.take(node)

    def check(self, step: int) -> None:
        """Raise ModelError where a gradient was not reduced that the others wait for."""

    def finish(self) -> None:
        """The parameters' gradients become the sums over all shards."""
        sum_over_workers(self.sparse)
        if self.sums is not None:
            self.sums.finish()

    def close(self) -> None:
        """Give back threads."""


class DdpReduction(Reduction):
    """Several workers: DDP sums a bucket of gradients as soon as the last shard's backward has made it."""

    def __init__(
        self,
        loss: ShardLoss,
        sums: ShardSums | None,
        world: World,
        parameters: dict[str, nn.Parameter],
        sparse: Sequence[nn.Parameter],
        finds_unused: bool,
    ) -> None:
        super().__init__(loss, sums, sparse)
        self._parameters = parameters
        self._ddp = wrapped(loss, sparse, finds_unused)
        self.replica = self._ddp
        self._reducer: Reducer = SumReducer() if sums is None else TreeReducer(sums, world.world_size, world.rank)
        self._ddp.register_comm_hook(None, self._reducer.hook)

    def begin(self, shards: Sequence[int], filled: int) -> None:
        super().begin(shards, filled)
        self._reducer.begin(filled, self._leaves[-1] if self._leaves else None)

    def shard(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self._ddp.no_sync()

    def before_last(self) -> None:
        if self.sums is not None and self.loss.anchor is not None:
            self.sums.stand_in()

    def exchange(self, stats: torch.Tensor) -> Work:
        work: Work = dist.all_reduce(stats, async_op=True)
        return work

    def backward(self) -> AbstractContextManager[object]:
        return waiting("the other workers' gradients")

    def after(self, shard: int, is_last: bool) -> None:
        if not is_last:
            super().after(shard, is_last)

    def finish(self) -> None:
        with waiting("the other workers' sparse gradients"):
            sum_over_workers(self.sparse)
        if self.sums is not None:
            self.sums.held = {}

    def close(self) -> None:
        self._reducer.close()

    def check(self, step: int) -> None:
        if not self._reducer.saw_last:
            unused = [name for name, one in self._parameters.items() if one.grad is None]
            raise ModelError(
                f"step {step}: parameters were not used, so the workers would wait for their gradients for ever: "
                f"{listed(unused)}; set find_unused_parameters: true"
            )


def check_one_type(parameters: Iterable[nn.Parameter]) -> None:
    """Raise JobError where a model over several devices has devices of several types, which DDP cannot take."""
    if len(types := {one.device.type for one in parameters}) > 1:
        raise JobError(f"devices: of several workers must be of one type, got {' and '.join(sorted(types))}")


def wrapped(loss: ShardLoss, sparse: Sequence[nn.Parameter], finds_unused: bool) -> DistributedDataParallel:
    """DDP around a shard's loss; sparse gradients are left to `sum_over_workers`."""
    ignored = loss.prepare(sparse, looks_for_unused=finds_unused)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, ignored)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), waiting("the other workers to make their DDP"):
        # torch 2.13 has a new name for `init_sync`, whose meaning differs: it syncs at the start, as was done.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            loss,
            broadcast_buffers=False,
            init_sync=False,
            find_unused_parameters=finds_unused,
            gradient_as_bucket_view=True,
        )
