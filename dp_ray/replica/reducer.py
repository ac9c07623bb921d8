"""Sum the shards' gradients to the whole batch's gradient, with the same bits on any number of workers.

Every shard's gradient is a leaf of the fixed tree of `plan.reduction_tree`. A worker adds its own shards in tree
order while it runs them. DDP passes each bucket to a communication hook as soon as its gradients are ready. The
hook continues the same tree over the workers:

- two workers: an all-reduce. Each worker has one half of the tree, and a sum of two is the same in either order.
- otherwise: rank r owns slice r of the bucket. An all-to-all sends it that slice of every worker's nodes. It adds
  them in tree order, and an all-gather distributes the sums.

Bytes that one of W workers sends for a bucket of B bytes, if each worker's shards are m nodes of the tree:
(1 + m) (W-1)/W B, with m at most 2 log2(shards). For m = 1 that is the 2 (W-1)/W B of a ring's all-reduce; m is 1
for 2 and 4 workers, and if W is a power of two that divides the shards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from dp_ray.plan.reduction_tree import Node, climb, fold, leaf_pairs, nodes, parents
from dp_ray.plan.split import worker_shards
from dp_ray.replica.world import begin_sum, new_group
from dp_ray.tensors.layout import is_dense

Gradients = list[torch.Tensor | None]
Sums = torch.futures.Future[torch.Tensor]
Begun = dist.Work | Sums  # a bucket's sum, which can be waited for


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add `left` to `right`, in place, and return the sums; a parameter without a gradient counts nothing."""
    pairs = [(one, two) for one, two in zip(left, right, strict=True) if one is not None and two is not None]
    if pairs:
        torch._foreach_add_([two for _, two in pairs], [one for one, _ in pairs])
    return [one if two is None else two for one, two in zip(left, right, strict=True)]


class ShardSums:
    """The gradient sums of one worker's shards, for as few nodes of the tree as possible.

    If two shards are one node, autograd itself adds their gradients, in the second one's backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: int) -> None:
        self.parameters = parameters
        self.root: Node = (0, shards)
        self.held: dict[Node, Gradients] = {}
        self._parents = parents(self.root)
        self._pairs = leaf_pairs(self.root)

    def leaves(self, shards: Sequence[int]) -> list[Node]:
        """The nodes, of one or two shards each, whose gradients autograd makes when `shards` run in order."""
        made: list[Node] = []
        for shard in shards:
            if made and made[-1] == (shard - 1, shard) and (shard - 1, shard + 1) in self._pairs:
                made[-1] = (shard - 1, shard + 1)
            else:
                made.append((shard, shard + 1))
        return made

    def take(self, node: Node) -> None:
        """Move the parameters' gradients, those of `node`, into the sums, and add them as far as the tree allows."""
        sums = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        climb(self.held, node, sums, self._parents, add)

    def stand_in(self) -> None:
        """Give parameters that only earlier shards used a gradient that adds nothing.

        DDP remembers that they were used, and fails if it finds no gradient in the last shard's backward.
        """
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None and any(sums[number] is not None for sums in self.held.values()):
                parameter.grad = zeros_that_add_nothing(parameter.detach())

    def finish(self) -> None:
        """Set the parameters' gradients to the sum over all shards; for a single worker, which has them all."""
        sums = fold(self.held, self.root, add) or [None] * len(self.parameters)
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            parameter.grad = gradient
        self.held = {}


class Reducer:
    """DDP's communication hook: it sums each bucket over the workers, in its memory, which is the gradients'.

    DDP's backward waits for the sums; or with `waits_later` the worker does after it, and can do something else
    before. `on_last` is called once all gradients of a step are there.
    """

    def __init__(self, on_last: Callable[[], object], waits_later: bool) -> None:
        self.saw_last = False
        self._on_last = on_last
        self._waits_later = waits_later
        self._begun: list[tuple[Begun, list[torch.Tensor]]] = []

    def begin(self, filled: int, last: Node | None) -> None:
        """Begin a step in which the first `filled` shards have rows.

        `last` is this worker's last node, whose gradients DDP puts into the buckets; None if it has no rows.
        """
        self.saw_last = False
        self._begun = []

    def hook(self, _: object, bucket: GradBucket) -> Sums:
        """Start to sum a bucket."""
        begun = self._begin(bucket)
        if bucket.is_last():
            self.saw_last = True
            self._on_last()
        if not self._waits_later:
            return begun if isinstance(begun, torch.futures.Future) else begun.get_future().then(_first_tensor)
        self._begun.append((begun, bucket.parameters()))
        at_once: Sums = torch.futures.Future()
        at_once.set_result(bucket.buffer())
        return at_once

    def _begin(self, bucket: GradBucket) -> Begun:
        raise NotImplementedError

    def summed(self) -> Iterator[list[torch.Tensor]]:
        """Wait for the buckets that the backward did not wait for; gives each one's parameters once it is summed."""
        for begun, parameters in self._begun:
            begun.wait()
            yield parameters

    def close(self) -> None:
        """Stop the threads."""


class TreeReducer(Reducer):
    """Sums buckets in the order of the tree."""

    def __init__(
        self,
        sums: ShardSums,
        world_size: int,
        rank: int,
        on_last: Callable[[], object],
        waits_later: bool,
    ) -> None:
        super().__init__(on_last, waits_later)
        self._sums = sums
        self._root = sums.root
        self._world_size = world_size
        self._rank = rank
        self._number = {id(parameter): number for number, parameter in enumerate(sums.parameters)}
        self._layouts = {id(one): _layout(one) for one in sums.parameters}
        self._nodes: list[list[Node]] = []
        self._plans: dict[int, list[list[Node]]] = {}
        self._last: Node | None = None
        # A thread issues these collectives. All ranks must issue those of one group in one order: hence an own group.
        self._group = new_group() if world_size > 2 else None
        self._thread = ThreadPoolExecutor(1, "reduce")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # one a GPU: a model may be on several

    def begin(self, filled: int, last: Node | None) -> None:
        """Begin a step; the workers' nodes depend on how many shards have rows."""
        super().begin(filled, last)
        self._last = last
        if filled not in self._plans:
            self._plans[filled] = self._plan(filled)
        self._nodes = self._plans[filled]

    def _plan(self, filled: int) -> list[list[Node]]:
        """Each worker's nodes with rows, computed on every worker alike."""
        return [
            [
                node
                for node in nodes(worker_shards(self._root[1], self._world_size, rank), self._root)
                if node[0] < filled
            ]
            for rank in range(self._world_size)
        ]

    def close(self) -> None:
        """Stop the thread."""
        # The group ends only with the process's others: a peer may still be reading the last exchange.
        self._thread.shutdown()

    def _begin(self, bucket: GradBucket) -> Begun:
        flat, parameters = bucket.buffer(), bucket.parameters()
        views = self._views(flat, parameters)
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is None:  # not used: DDP leaves +0 there, but only -0 adds nothing
                view.zero_().neg_()
        held = self._held(parameters, views)
        mine = [fold(held, node, add) for node in self._nodes[self._rank]]
        if self._world_size == 2:
            return begin_sum(flat)
        return self._begin_exchange(flat, views, mine)

    def _begin_exchange(
        self, flat: torch.Tensor, views: list[torch.Tensor], mine: Sequence[Gradients | None]
    ) -> Sums:
        """Start to add this worker's sums of a bucket to the others', in the thread."""
        # The sum that holds the last shard is in the bucket already. Each other sum gets a buffer of its own.
        flats = [
            flat if sums and sums[0] is views[0] else _laid_out(flat, views, sums or [None] * len(views))
            for sums in mine
        ]
        is_on_gpu = flat.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if is_on_gpu else None
        )
        ready = torch.cuda.current_stream(flat.device).record_event() if is_on_gpu else None
        self._thread.submit(self._complete, future, flat, flats, ready)
        return future

    def _stream(self, device: torch.device) -> "torch.cuda.Stream":
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _views(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A bucket's gradients in DDP's layout: with the parameter's strides, if these leave no gaps.

        `bucket.gradients()` ignores strides and complex dtypes: it gives contiguous, real views.
        """
        numbers = _in_own_dtype(flat, parameters[0])
        views, offset = [], numbers.storage_offset()
        for parameter in parameters:
            size, strides = self._layouts.get(id(parameter)) or _layout(parameter)
            views.append(numbers.as_strided(size, strides, offset))
            offset += parameter.numel()
        return views

    def _held(self, parameters: Sequence[torch.Tensor], views: list[torch.Tensor]) -> dict[Node, Gradients]:
        """This worker's sums of the bucket's parameters, by node; those of the last node are the bucket itself."""
        numbers = [self._number.get(id(parameter)) for parameter in parameters]
        held: dict[Node, Gradients] = {
            node: [None if number is None else sums[number] for number in numbers]
            for node, sums in self._sums.held.items()
        }
        if self._last is not None:
            held[self._last] = list(views)
        return held

    def _complete(self, future: Any, flat: torch.Tensor, flats: list[torch.Tensor], ready: Any) -> None:
        try:
            if ready is None:
                future.set_result(self._exchange(flat, flats))
                return
            stream = self._stream(flat.device)
            # A new thread's current GPU is cuda:0: to come back to it would make a context there, half a gigabyte.
            with torch.cuda.device(flat.device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                for one in flats:
                    one.record_stream(stream)  # so that backward does not reuse their memory before they are sent
                future.set_result(self._exchange(flat, flats))
        except Exception as error:  # DDP raises it again where it waits for the bucket
            future.set_exception(error)

    def _exchange(self, flat: torch.Tensor, flats: list[torch.Tensor]) -> torch.Tensor:
        """Sum this rank's slice of all workers' nodes, and gather the sums of the other slices."""
        size = -(-flat.numel() // self._world_size)
        sent = flat.new_zeros(len(flats), self._world_size * size)
        for row, one in zip(sent, flats, strict=True):
            row[: one.numel()] = one
        by_owner = sent.view(len(flats), self._world_size, size).transpose(0, 1).contiguous()
        counts = [len(theirs) * size for theirs in self._nodes]
        received = flat.new_empty(sum(counts))
        per_owner = [len(flats) * size] * self._world_size
        dist.all_to_all_single(received, by_owner.view(-1), counts, per_owner, group=self._group)
        owners = [node for theirs in self._nodes for node in theirs]
        slices = {node: [one] for node, one in zip(owners, received.view(-1, size), strict=True)}
        summed = fold(slices, self._root, _add_slices)
        assert summed is not None, "every step has rows"
        whole = flat.new_empty(self._world_size * size)
        dist.all_gather(list(whole.view(self._world_size, size)), summed[0], group=self._group)
        return flat.copy_(whole[: flat.numel()])


def _add_slices(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [right[0].add_(left[0])]


def _first_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _laid_out(flat: torch.Tensor, views: list[torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """Gradients in a new buffer with the bucket's layout; it adds nothing where a gradient is None."""
    made = zeros_that_add_nothing(flat)
    numbers, start = _in_own_dtype(made, views[0]), views[0].storage_offset()
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is not None:
            numbers.as_strided(view.size(), view.stride(), view.storage_offset() - start).copy_(gradient)
    return made


def _layout(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Size and strides of a parameter's gradient in its bucket."""
    like = parameter.detach() if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    return like.size(), like.stride()


def keep_strides(parameters: Iterable[nn.Parameter]) -> None:
    """Give the parameters' gradients the strides of their buckets where these differ for dimensions of size 1 alone.

    Those reach no element, so a gradient may have any: oneDNN and cuDNN give that of a depthwise or 1x1 convolution
    others than its weight has. DDP compares them all, and warns of a cost that there is not. Strides that do differ
    stay, and so does DDP's warning.
    """
    for parameter in parameters:
        if 1 in parameter.size():
            parameter.register_post_accumulate_grad_hook(_keeping(*_layout(parameter)))  # type: ignore[no-untyped-call]


def _keeping(size: torch.Size, strides: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
    reached = [number for number, length in enumerate(size) if length != 1]

    def hook(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        found = gradient.stride()
        if found != strides and all(found[number] == strides[number] for number in reached):
            gradient.as_strided_(size, strides)

    return hook


def _in_own_dtype(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A bucket's memory in the dtype of its parameters: DDP views complex numbers as pairs of real ones."""
    return torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat


class SumReducer(Reducer):
    """Sums buckets by all-reduce.

    DDP's own hook averages over the workers. Here each loss is already divided by the rows of the whole batch.
    """

    def _begin(self, bucket: GradBucket) -> Begun:
        return begin_sum(bucket.buffer())


def zeros_that_add_nothing(like: torch.Tensor) -> torch.Tensor:
    """Zeros with a minus sign: x + -0 is x to the bit, but -0 + 0 is 0."""
    return torch.zeros_like(like).neg_()
