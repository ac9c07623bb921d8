"""Sum the shards' gradients by the fixed tree of `plan.tree`: on one worker, then over the workers.

Every shard's gradient is a leaf. A worker adds its own shards in tree order while it runs them (`TreeSums`). Then
rank r owns slice r of the sum: an all-to-all sends it that slice of every worker's nodes (`exchanged`). It adds them
in tree order, and an all-gather distributes the sums (`tree_sum`). Sparse gradients are gathered whole
(`sparse_sums`).

Bytes that one of W workers sends for B bytes of gradients, if each worker's shards are m nodes of the tree:
(1 + m) (W-1)/W B, with m at most 2 log2(shards). For m = 1 that is the 2 (W-1)/W B of a ring's all-reduce; m is 1
for 2 and 4 workers, and if W is a power of two that divides the shards.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.host_copy import side_stream
from dp_ray.engine.world import all_gather, everyone, is_gpu, new_group, without_frames
from dp_ray.plan.tree import Node, climb, fold, leaf_pairs, leaves, parents
from dp_ray.tensors.changed import begun_digests
from dp_ray.tensors.flat import FlatLayout, Form, HasForm

Gradients = list[torch.Tensor | None]
Sums = torch.futures.Future[torch.Tensor]


def zeros_that_add_nothing(like: torch.Tensor) -> torch.Tensor:
    """Return zeros with a minus sign: x + -0 is x to the bit, but -0 + 0 is 0."""
    return torch.zeros_like(like).neg_()


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add `left` to `right`, dense ones in place, and return the sums; a parameter without a gradient counts nothing.

    Sparse ones must be coalesced, and so are their sums.
    """
    sums = [addend if total is None else total for addend, total in zip(left, right, strict=True)]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at, (addend, total) in enumerate(zip(left, right, strict=True)):
        if addend is None or total is None:
            continue
        if addend.is_sparse or total.is_sparse:
            # torch adds a sparse tensor to a dense one, not the other way round.
            both = addend + total if total.is_sparse else total + addend
            sums[at] = both.coalesce() if both.is_sparse else both
        else:
            pairs.append((addend, total))
    if pairs:
        torch._foreach_add_([total for _, total in pairs], [tensor for tensor, _ in pairs])
    return sums


class TreeSums:
    """The sums of gradients that are taken in one after another, for as few nodes of the tree as possible."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.held: dict[Node, Gradients] = {}
        self._parents = parents(root)

    def take(self, node: Node, gradients: Gradients) -> None:
        """Take in gradients of a node, whose memory is the sums' from now on; add as far as the tree allows."""
        if node in self.held:
            gradients = add(gradients, self.held.pop(node))
        climb(self.held, node, gradients, self._parents, add)

    def of(self, node: Node) -> Gradients | None:
        """Return the sum of a node, None if nothing of it has been taken in."""
        return fold(self.held, node, add)

    def finish(self) -> Gradients | None:
        """Return the sum of all that was taken in, and forget it: the next step must not add to these tensors."""
        total, self.held = self.of(self.root), {}
        return total


class ShardSums(TreeSums):
    """The sums of one worker's shards, which are taken from the parameters' gradients.

    If two shards are one node, autograd itself adds their gradients, in the second one's backward. The digests of the
    gradients of the node `audited` are taken before they are added or sent, into `digests`.
    """

    audited: Node | None = None

    def __init__(self, parameters: Sequence[nn.Parameter], shards: int) -> None:
        super().__init__((0, shards))
        self.parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._pairs = leaf_pairs(self.root)
        self.digests: list[tuple[list[str], torch.Tensor]] = []

    def audit(self, node: Node | None) -> None:
        """Take the digests of a node's gradients in this step, of None of none."""
        self.audited, self.digests = node, []

    def digest(self, gradients: Gradients, numbers: Iterable[int | None] | None = None) -> None:
        """Take the digests of gradients, of the parameters of these numbers; by default of all.

        One without a gradient counts as one of zeros that add nothing: so DDP has it.
        """
        numbered = zip(range(len(self.parameters)) if numbers is None else numbers, gradients, strict=True)
        found = {
            str(at): zeros_that_add_nothing(self.parameters[at].detach()) if gradient is None else gradient
            for at, gradient in numbered
            if at is not None
        }
        self.digests += begun_digests(found)

    def leaves(self, shards: Sequence[int]) -> list[Node]:
        """Return the nodes whose gradients autograd makes when `shards` run in order."""
        return leaves(shards, self._pairs)

    def move(self, node: Node) -> None:
        """Move the parameters' gradients, those of a node, into the sums."""
        gradients = [parameter.grad for parameter in self.parameters]
        # Else the next backward would add its gradients to these sums, in the same memory.
        for parameter in self.parameters:
            parameter.grad = None
        if node == self.audited:
            self.digest(gradients)
        self.take(node, gradients)

    def used(self) -> set[int]:
        """Return the ids of the parameters of which a gradient is held."""
        return {
            number for number, at in self._numbers.items() if any(sums[at] is not None for sums in self.held.values())
        }

    def of_bucket(
        self, bucket: Sequence[torch.Tensor], last: Node | None, gradients: Gradients, nodes: Sequence[Node]
    ) -> list[Gradients | None]:
        """Return the sums of `nodes` for some parameters; their `gradients` of the node `last` are not held here."""
        numbers = [self._numbers.get(id(parameter)) for parameter in bucket]
        if last is not None and last == self.audited:
            self.digest(gradients, numbers)
        held: dict[Node, Gradients] = {
            node: [None if number is None else sums[number] for number in numbers] for node, sums in self.held.items()
        }
        if last is not None:
            held[last] = gradients
        return [fold(held, node, add) for node in nodes]

    def give(self) -> None:
        """Set the parameters' gradients to the sum over all shards; for a single worker, which has them all."""
        for parameter, gradient in zip(self.parameters, self.finish() or [None] * len(self.parameters), strict=True):
            parameter.grad = gradient


class TreeExchange:
    """Sums over the workers that a thread computes, one after the other, while the backward goes on.

    All ranks must issue the collectives of a group in one order: hence a group of its own.
    """

    def __init__(self) -> None:
        self._group = new_group()
        self._thread = ThreadPoolExecutor(1, "reduce")

    def begin(
        self, into: torch.Tensor, rows: Sequence[torch.Tensor], nodes: Sequence[Sequence[Node]], root: Node
    ) -> Sums:
        """Start what `tree_sum` does; every rank calls this in the same order."""
        is_on_gpu = is_gpu(into.device)
        future: Sums = torch.futures.Future(devices=[into.device] if is_on_gpu else None)
        ready = torch.cuda.current_stream(into.device).record_event() if is_on_gpu else None
        self._thread.submit(self._complete, future, ready, into, rows, nodes, root, self._group)
        return future

    def _complete(
        self, future: Sums, ready: Any, into: torch.Tensor, rows: Sequence[torch.Tensor], *tree: Any
    ) -> None:
        try:
            if ready is None:
                future.set_result(tree_sum(into, rows, *tree))
                return
            stream = side_stream(into.device, "sums")  # one a GPU: a model may be on several
            # A new thread's current GPU is cuda:0: to come back to it would make a context there, of 0.5 GB.
            with torch.cuda.device(into.device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                for sent in rows:
                    sent.record_stream(stream)  # so that backward does not reuse their memory before they are sent
                future.set_result(tree_sum(into, rows, *tree))
        except Exception as error:  # DDP raises it again where it waits for the bucket
            # Its frames hold the future, and a cycle through C++ is never collected: the group would stay, while its
            # peers wait to see it gone.
            without_frames(error)
            future.set_exception(error)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the thread. The group ends only with the process's others: a peer may still read the last exchange."""
        self._thread.shutdown()


def tree_sum(
    into: torch.Tensor,
    rows: Sequence[torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    root: Node,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Set the vector `into` to the sum of the root, and return it; every rank calls this.

    `rows` are this worker's vectors, as long, one for each of its nodes; `nodes[r]` are those of rank r.
    """
    ranks = len(nodes)
    width = -(-into.numel() // ranks)
    # Longer than the rows by up to `ranks - 1` numbers, so that all slices are of one length.
    sent = into.new_zeros(len(rows), ranks * width)
    for row, tensor in zip(sent, rows, strict=True):
        row[: tensor.numel()] = tensor
    whole = into.new_empty(ranks * width)
    all_gather(whole, slice_sum(sent, nodes, root, group).contiguous(), group=group)
    return into.copy_(whole[: into.numel()])


def tensor_sum(
    like: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
    nodes: Sequence[Sequence[Node]],
    root: Node,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the sum of the root, a tensor `like` this one, whatever the layouts; every rank calls this.

    `gradients` are this worker's, one for each of its nodes; None adds nothing.
    """
    nothing = zeros_that_add_nothing(as_real(like.detach()).reshape(-1))
    rows = [nothing if tensor is None else as_real(tensor).reshape(-1) for tensor in gradients]
    total = torch.empty_like(like)
    whole = tree_sum(torch.empty_like(nothing), rows, nodes, root, group)
    as_real(total).copy_(whole.view(as_real(total).shape))
    return total


def slice_sum(
    rows: torch.Tensor, nodes: Sequence[Sequence[Node]], root: Node, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return this worker's slice of the sum of the root; every rank calls this.

    `rows` are this worker's nodes, [nodes, numbers], of which each rank owns as many.
    """
    (count, length), ranks = rows.shape, len(nodes)
    slices = exchanged(rows.view(count, ranks, length // ranks), nodes, group)
    own = fold(slices, root, lambda left, right: right.add_(left))
    assert own is not None, "every step has rows"
    return own


def exchanged(
    rows: torch.Tensor, nodes: Sequence[Sequence[Node]], group: dist.ProcessGroup | None
) -> dict[Node, torch.Tensor]:
    """Return this worker's slice of each node of every rank; every rank calls this.

    `rows` are this worker's nodes, [nodes, ranks, numbers]: each cut into a slice for each rank.
    """
    count, ranks, width = rows.shape
    counts = [len(theirs) * width for theirs in nodes]
    received = rows.new_empty(sum(counts))
    # An all-to-all sends each rank one piece: its slices of all nodes stand together.
    by_owner = rows.transpose(0, 1).contiguous()
    dist.all_to_all_single(received, by_owner.view(-1), counts, [count * width] * ranks, group=group)
    owners = [node for theirs in nodes for node in theirs]
    return dict(zip(owners, received.view(-1, width), strict=True))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sum_sparse(parameters: Sequence[nn.Parameter]) -> None:
    """Set each sparse parameter's gradient to its sum over all workers; every rank calls this."""
    group, gradients = everyone(), coalesced([parameter.grad for parameter in parameters])
    if parameters and group is not None and group.size() > 1:
        nodes = [[(rank, rank + 1)] for rank in range(group.size())]
        gradients = sparse_sums(parameters, [gradients], nodes, (0, len(nodes)), group, parameters[0].device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)


def coalesced(gradients: Sequence[torch.Tensor | None]) -> Gradients:
    """Return gradients of which the sparse ones have each row once."""
    return [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in gradients]


UNUSED, DENSE = -1, -2  # in place of the number of a sparse gradient's rows


def sparse_sums(
    like: Sequence[HasForm],
    rows: Sequence[Gradients],
    nodes: Sequence[Sequence[Node]],
    root: Node,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Gradients:
    """Return the sums of the root of sparse gradients, for parameters `like` these; every rank calls this.

    `rows` are this worker's, `coalesced`, one for each of its nodes; `nodes[r]` are those of rank r. A sum is sparse
    and coalesced; dense if a gradient of it is dense on any worker; None if no worker used the parameter.
    """
    if not like:
        return []
    # All workers learn how many rows each gradient has, since dense and sparse ones take different collectives: a
    # worker that went the other way would hang the rest.
    own = torch.full((max(map(len, nodes)), len(like)), UNUSED)
    for at, row in enumerate(rows):
        own[at] = torch.tensor([UNUSED if g is None else len(g.values()) if g.is_sparse else DENSE for g in row])
    table = torch.empty(len(nodes), *own.shape, dtype=own.dtype, device=device)
    all_gather(table.view(-1), own.to(device).view(-1), group=group)
    counts: list[list[list[int]]] = table.tolist()
    dense = {at for theirs in counts for row in theirs for at, count in enumerate(row) if count == DENSE}
    found = [
        [
            (node, at, count)
            for node, row in zip(of_rank, theirs, strict=False)
            for at, count in enumerate(row)
            if count >= 0 and at not in dense
        ]
        for of_rank, theirs in zip(nodes, counts, strict=True)
    ]
    layouts = [FlatLayout(form for _, at, count in theirs for form in _forms(like[at], count)) for theirs in found]
    # An all-gather takes tensors of one size: each worker's is as long as that of the worker with most rows.
    sent = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8, device=device)
    mine = [gradient for row in rows for at, gradient in enumerate(row) if gradient is not None and at not in dense]
    layouts[group.rank()].put(sent, [part for each in mine for part in (each.indices()[0], each.values())])
    received = sent.new_empty(len(nodes), len(sent))
    if len(sent):
        all_gather(received.view(-1), sent, group=group)
    held: dict[Node, Gradients] = {node: [None] * len(like) for of_rank in nodes for node in of_rank}
    for theirs, layout, memory in zip(found, layouts, received, strict=True):
        parts = iter(layout.views(memory))
        for node, at, _ in theirs:
            size = torch.Size(like[at].shape)
            held[node][at] = torch.sparse_coo_tensor(
                next(parts)[None], next(parts), size, is_coalesced=True, check_invariants=False
            )
    sums = fold(held, root, add) or [None] * len(like)
    for at in sorted(dense):
        form = torch.empty(torch.Size(like[at].shape), dtype=like[at].dtype, device=device)
        whole = [add([row[at]], [zeros_that_add_nothing(form)])[0] for row in rows]
        sums[at] = tensor_sum(form, whole, nodes, root, group)
    return sums


def _forms(like: HasForm, count: int) -> tuple[Form, Form]:
    """Return the forms of a sparse gradient's indices and values, of so many rows."""
    return Form(torch.Size((count,)), torch.int64), Form(torch.Size((count, *like.shape[1:])), like.dtype)


def make_gradients_dense(model: nn.Module) -> None:
    """Set every embedding of the model to make dense gradients."""
    for module in sparse_modules(model):
        module.sparse = False


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights whose gradients are sparse tensors, each once."""
    weights = [module.weight for module in sparse_modules(model)]
    trained = {id(weight): weight for weight in weights if isinstance(weight, nn.Parameter) and weight.requires_grad}
    return list(trained.values())


def sparse_modules(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings whose gradients are sparse."""
    return [layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse]
