"""FSDP's collectives: its all-gather, and its reduce-scatter, which adds by the fixed tree with `bitwise`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.errors import ModelError
from dp_ray.plan.reduction_tree import Node, climb, fold, parents
from dp_ray.system.waiting import waiting

# torch 2.13 renames them, and deprecates the old names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Round:
    """The round that the workers run: in each, every worker runs one shard, or a stand-in.

    `shards` are those of the ranks, None for one that stands in. `used` are the ids of the parameters to which this
    worker's backward gave a gradient. While `is_silent`, this worker adds nothing to a sum. If it `is_alone`, no
    worker waits for another: its own numbers take the place of the others', in the same memory.
    """

    is_silent: bool = False
    number: int = 0  # counts all rounds
    is_last: bool = True
    shards: Sequence[int | None] = ()
    used: set[int] = field(default_factory=set)
    group: dist.ProcessGroup | None = None  # of the CPUs
    is_alone: bool = False
    _path: int = 0
    _asked: tuple[Any, torch.Tensor] | None = None

    def runs(self, block: int) -> None:
        """Note that this worker runs a block."""
        self._path = (self._path * 1_000_003 + block + 1) % 2**61

    def ask(self) -> None:
        """Start to ask whether all workers have run the same blocks; every rank calls this after a forward."""
        if self.is_alone:
            return
        largest = torch.tensor([self._path, -self._path])
        self._asked = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True), largest
        self._path = 0

    def check(self) -> None:
        """Raise ModelError if they have not; a gradient of one block must not be added to that of another."""
        if self._asked is None:
            return
        (work, largest), self._asked = self._asked, None
        with waiting("the other workers' forward"):
            work.wait()
        if int(largest.sum()):
            raise ModelError(
                "the workers did not run the same blocks in the same order, but with strategy: fsdp each holds a "
                "part of every block; set fsdp.blocks to the classes of larger modules, which all rows run"
            )


class Collective:
    """A collective of FSDP's; it names what this worker waits for."""

    def __init__(self, current: Round, block: str) -> None:
        self._round = current
        self._block = block or "the parameters outside the blocks"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Collective):
    """FSDP's all-gather of a block: if a worker does not run the block, the others wait here."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the workers' parts of the block."""
        if self._round.is_alone:
            _fill(output_tensor, input_tensor, group)
            return None
        with waiting(f"the other workers to gather {self._block}, which all must run (strategy: fsdp)"):
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class SumScatter(Collective):
    """FSDP's reduce-scatter, which sums: losses are divided by the rows of the whole batch already."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the workers' inputs; each gets its slice of the sums."""
        self._round.check()
        with waiting("the other workers' gradients"):
            return self._sum(output_tensor, input_tensor, group, async_op)

    def _sum(
        self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if self._round.is_alone:
            output.copy_(gradients[: output.numel()])
            return None
        if self._round.is_silent:
            gradients.zero_()
        work: dist.Work | None = _reduce_scatter(
            output, gradients, op=dist.ReduceOp.SUM, group=group, async_op=async_op
        )
        return work


class TreeScatter(SumScatter):
    """FSDP's reduce-scatter of one block, which adds the shards' gradients by the fixed tree.

    In each round every worker gets its slice of all workers' gradients. It adds those that are siblings in the tree,
    and keeps the other sums. The last round gives the sum of all; what earlier rounds give means nothing.
    """

    def __init__(self, current: Round, block: str, units: Sequence[Any], shards: int) -> None:
        super().__init__(current, block)
        self._units = units
        self._root: Node = (0, shards)
        self._above = parents(self._root)
        self._held: dict[Node, torch.Tensor] = {}
        self._ran = 0

    def _sum(self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        """Exchange slices, and add them; the output is this worker's slice of the whole batch's gradient."""
        self._prepare(gradients.view(group.size(), -1))
        received = torch.empty_like(gradients)
        if self._round.is_alone:
            received.copy_(gradients)
        else:
            dist.all_to_all_single(received, gradients, group=group)
        self._take(received.view(group.size(), -1), output)

    def alone(self, gradient: torch.Tensor) -> None:
        """FSDP's all-reduce hook on a worker that is alone: FSDP does not call its reduce-scatter then."""
        self._prepare(gradient.view(1, -1))
        self._take(gradient.clone().view(1, -1), gradient)

    def _prepare(self, slices: torch.Tensor) -> None:
        """Replace zeros that stand for no gradient by such that add nothing: FSDP fills in +0, and -0 + 0 is 0."""
        if self._ran == self._round.number:
            raise ModelError(
                f"bitwise: {self._block} runs twice in a forward, so with strategy: fsdp its "
                "gradients cannot be added in a fixed order; name other fsdp.blocks, or leave bitwise or strategy out"
            )
        self._ran = self._round.number
        start = 0
        for unit in self._units:
            stop = start + unit.padded_sharded_param_size.numel()
            if id(unit.sharded_param) not in self._round.used:
                slices[:, start:stop].neg_()
            start = stop

    def _take(self, slices: torch.Tensor, output: torch.Tensor) -> None:
        for shard, one in zip(self._round.shards, slices, strict=True):
            if shard is not None:
                climb(self._held, (shard, shard + 1), one, self._above, _add)
        if self._round.is_last:
            held, self._held = self._held, {}
            whole = fold(held, self._root, _add)
            output.zero_() if whole is None else output.copy_(whole)
            return
        received = slices.untyped_storage().data_ptr()  # so that it is freed, keep copies of what is held of it
        for node, one in self._held.items():
            if one.untyped_storage().data_ptr() == received:
                self._held[node] = one.clone()


def _fill(gathered: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put this worker's part, which may be a part of `gathered` itself, in the place of each worker's."""
    for rank, theirs in enumerate(gathered.view(group.size(), -1)):
        if rank != group.rank():
            theirs.copy_(mine.view(-1))


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return right.add_(left)
