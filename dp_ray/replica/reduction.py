"""A step's gradients over all shards and workers: one interface, with a one-worker and a DDP version."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_ray.errors import JobError, ModelError
from dp_ray.plan.reduction_tree import Node
from dp_ray.replica.reducer import Reducer, ShardSums, SumReducer, TreeReducer, keep_strides
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sparse import sum_over_workers
from dp_ray.replica.world import World, begin_sum, is_gpu
from dp_ray.system.waiting import waiting
from dp_ray.text import listed

Work = dist.Work | None


class Reduction:
    """The reduction on a single worker: autograd adds the shards' gradients, or with `sums` the fixed tree does.

    A step calls `begin`; `shard` and `after` for each shard; `check`; `finish`. For its last backward it also calls
    `before_last`, `carry`, `exchange`, `backward` and `unload`; a worker without rows calls these but the first.
    """

    waits_later = False  # whether the last backward does not wait for the other workers' gradients

    def __init__(self, loss: ShardLoss, sums: ShardSums | None, sparse: Sequence[nn.Parameter]) -> None:
        self.replica: nn.Module = loss
        self.loss = loss
        self.sums = sums
        self.sparse = sparse
        self._leaves: Sequence[Node] = ()

    def begin(self, shards: Sequence[int], filled: int) -> None:
        """Begin a step in which the first `filled` shards have rows and this worker runs `shards`."""
        self._leaves = self.sums.leaves(shards) if self.sums else []

    def shard(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of a shard's forward and backward."""
        return nullcontext()

    def standing_in(self) -> AbstractContextManager[object]:
        """The context of a round in which this worker's gradients count nothing; only sharded models run such."""
        return nullcontext()

    def before_last(self) -> None:
        """Prepare for the backward of this worker's last shard."""

    def carry(self, stats: torch.Tensor) -> None:
        """Send `stats` with the gradients of the last backward, if they can go with them."""

    def unload(self) -> None:
        """Set what was carried to its sums, once the gradients are summed."""

    def exchange(self, stats: torch.Tensor) -> Work:
        """Start to sum `stats` over the workers, in place; None if they are carried, or there is one worker."""
        return None

    def backward(self) -> AbstractContextManager[object]:
        """The context of the step's last backward, and of what waits for the other workers after it."""
        return nullcontext()

    def summed(self) -> Iterator[list[torch.Tensor]]:
        """Wait for the other workers' gradients, after the last backward; gives parameters as theirs are summed."""
        return iter(())

    def after(self, shard: int, is_last: bool) -> None:
        """After a shard's backward, take its gradients, unless autograd is to add the next shard's to them."""
        if self.sums is None:
            return
        for node in self._leaves:
            if node[1] == shard + 1:
                self.sums.take(node)

    def check(self, step: int) -> None:
        """Raise ModelError if a gradient was not reduced, so that the other workers would wait for it."""

    def finish(self) -> None:
        """Set the parameters' gradients to the sums over all shards."""
        sum_over_workers(self.sparse)
        if self.sums is not None:
            self.sums.finish()

    def close(self) -> None:
        """Stop the threads."""


class DdpReduction(Reduction):
    """The reduction over several workers: DDP reduces each bucket as soon as the step's last backward fills it.

    It calls `on_last` with the last bucket. `num_stats` numbers are to be summed beside the gradients.
    """

    def __init__(
        self,
        loss: ShardLoss,
        sums: ShardSums | None,
        world: World,
        parameters: dict[str, nn.Parameter],
        sparse: Sequence[nn.Parameter],
        finds_unused: bool,
        num_stats: int,
        on_last: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(loss, sums, sparse)
        # In the tree of three workers and more, one without rows sends nothing; but it may vote to stop.
        self._carries = sums is None or world.world_size == 2
        # On CPUs the time until the sums are there is used, and to start a collective takes 0.3 ms of it.
        self.waits_later = not is_gpu(world.device)
        self._parameters = parameters
        self._ddp = wrapped(loss, sparse, finds_unused, num_stats if self._carries else 0)
        self._finds_unused = finds_unused
        self.replica = self._ddp
        ranks = world.world_size, world.rank
        how = on_last, self.waits_later
        self._reducer: Reducer = SumReducer(*how) if sums is None else TreeReducer(sums, *ranks, *how)
        self._ddp.register_comm_hook(None, self._reducer.hook)
        left_out = {id(one) for one in sparse}
        keep_strides(one for one in parameters.values() if id(one) not in left_out)

    def begin(self, shards: Sequence[int], filled: int) -> None:
        """Begin a step, in the hook too."""
        super().begin(shards, filled)
        self._reducer.begin(filled, self._leaves[-1] if self._leaves else None)

    def shard(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of a shard: DDP reduces in the last shard's backward only."""
        return nullcontext() if is_last else self._ddp.no_sync()

    def before_last(self) -> None:
        """Give gradients that add nothing to the parameters that only earlier shards used."""
        if self.sums is not None and self._finds_unused:
            self.sums.stand_in()

    def carry(self, stats: torch.Tensor) -> None:
        """Load the carrier."""
        if self._carries and self.loss.carrier is not None:
            self.loss.carrier.load(stats)

    def unload(self) -> None:
        """Unload the carrier."""
        if self.loss.carrier is not None:
            self.loss.carrier.unload()

    def exchange(self, stats: torch.Tensor) -> Work:
        """Start the all-reduce of `stats`, in place, unless they are carried."""
        return None if self._carries else begin_sum(stats)

    def backward(self) -> AbstractContextManager[object]:
        """The context of what waits for the other workers: on GPUs the backward itself."""
        return waiting("the other workers' gradients")

    def summed(self) -> Iterator[list[torch.Tensor]]:
        """The parameters of each bucket in turn."""
        for parameters in self._reducer.summed():
            yield [one for one in parameters if one is not self.loss.carried]

    def after(self, shard: int, is_last: bool) -> None:
        """Take a shard's gradients, but leave the last shard's to DDP."""
        if not is_last:
            super().after(shard, is_last)

    def finish(self) -> None:
        """Sum the sparse gradients; DDP has reduced the others."""
        with waiting("the other workers' sparse gradients"):
            sum_over_workers(self.sparse)
        if self.sums is not None:
            self.sums.held = {}

    def close(self) -> None:
        self._reducer.close()

    def check(self, step: int) -> None:
        """Raise ModelError, naming the unused parameters, if DDP did not reduce the last bucket."""
        if not self._reducer.saw_last:
            unused = [name for name, one in self._parameters.items() if one.grad is None]
            raise ModelError(
                f"step {step}: parameters were not used, so the workers would wait for their gradients for ever: "
                f"{listed(unused)}; set find_unused_parameters: true"
            )


def check_one_type(parameters: Iterable[nn.Parameter]) -> None:
    """Raise JobError if the parameters are on devices of several types, which DDP does not support."""
    if len(types := {one.device.type for one in parameters}) > 1:
        raise JobError(
            f"devices: must be of one type if there are several workers, got {' and '.join(sorted(types))}"
        )


@contextmanager
def for_trial(loss: ShardLoss, sparse: Sequence[nn.Parameter], is_compiled: bool) -> Iterator[nn.Module]:
    """The replica of a trial before the steps, whose gradients stay on this worker; every rank calls this.

    A compiled model is called within a DDP, as in the steps. There torch cuts the model's graph where DDP's buckets
    end, so that DDP sums a bucket during the backward. Compiled elsewhere, the graph would stay whole in the steps.
    """
    if not is_compiled:
        yield loss
        return
    ddp = wrapped(loss, sparse, finds_unused=False, num_carried=0)
    with ddp.no_sync():
        yield ddp


def wrapped(
    loss: ShardLoss, sparse: Sequence[nn.Parameter], finds_unused: bool, num_carried: int
) -> DistributedDataParallel:
    """DDP around a shard's loss; sparse gradients are left to `sum_over_workers`."""
    ignored = loss.prepare(sparse, finds_unused, num_carried)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, ignored)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), waiting("the other workers to make their DDP"):
        # torch 2.13 deprecates `broadcast_buffers` for a parameter that older versions do not have.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            loss,
            broadcast_buffers=False,
            init_sync=False,
            find_unused_parameters=finds_unused,
            gradient_as_bucket_view=True,
        )
