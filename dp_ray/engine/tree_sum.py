"""Sum the shards' gradients by the fixed tree of `plan.tree`: on one worker, then over the workers.

Every shard's gradient is a leaf. A worker adds its own shards in tree order while it runs them (`ShardSums`). Then
rank r owns slice r of the sum: an all-to-all sends it that slice of every worker's nodes (`exchanged`). It adds them
in tree order, and an all-gather distributes the sums (`tree_sum`).

Bytes that one of W workers sends for B bytes of gradients, if each worker's shards are m nodes of the tree:
(1 + m) (W-1)/W B, with m at most 2 log2(shards). For m = 1 that is the 2 (W-1)/W B of a ring's all-reduce; m is 1
for 2 and 4 workers, and if W is a power of two that divides the shards.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.world import all_gather
from dp_ray.plan.tree import Node, climb, fold, leaf_pairs, parents

Gradients = list[torch.Tensor | None]


def zeros_that_add_nothing(like: torch.Tensor) -> torch.Tensor:
    """Return zeros with a minus sign: x + -0 is x to the bit, but -0 + 0 is 0."""
    return torch.zeros_like(like).neg_()


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add `left` to `right`, in place, and return the sums; a parameter without a gradient counts nothing."""
    pairs = [
        (addend, total) for addend, total in zip(left, right, strict=True) if addend is not None and total is not None
    ]
    if pairs:
        torch._foreach_add_([total for _, total in pairs], [tensor for tensor, _ in pairs])
    return [addend if total is None else total for addend, total in zip(left, right, strict=True)]


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
        """Return the nodes, of one or two shards each, whose gradients autograd makes when `shards` run in order."""
        leaves: list[Node] = []
        for shard in shards:
            if leaves and leaves[-1] == (shard - 1, shard) and (shard - 1, shard + 1) in self._pairs:
                leaves[-1] = (shard - 1, shard + 1)
            else:
                leaves.append((shard, shard + 1))
        return leaves

    def take(self, node: Node) -> None:
        """Move the parameters' gradients, those of `node`, into the sums, and add them as far as the tree allows."""
        sums = [parameter.grad for parameter in self.parameters]
        # Else the next backward would add its gradients to these sums, in the same memory.
        for parameter in self.parameters:
            parameter.grad = None
        climb(self.held, node, sums, self._parents, add)

    def finish(self) -> None:
        """Set the parameters' gradients to the sum over all shards; for a single worker, which has them all."""
        sums = fold(self.held, self.root, add) or [None] * len(self.parameters)
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            parameter.grad = gradient
        # These tensors are the gradients now: the next step must not add to them.
        self.held = {}


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
    slices = exchanged(sent.view(len(rows), ranks, width), nodes, group)
    own = fold(slices, root, add_to)
    assert own is not None, "every step has rows"
    whole = into.new_empty(ranks * width)
    all_gather(whole, own.contiguous(), group=group)
    return into.copy_(whole[: into.numel()])


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


def add_to(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add `left` to `right`, in place, and return it."""
    return right.add_(left)


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights whose gradients are sparse tensors, each once."""
    weights = [module.weight for module in sparse_modules(model)]
    trained = {id(weight): weight for weight in weights if isinstance(weight, nn.Parameter) and weight.requires_grad}
    return list(trained.values())


def sparse_modules(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings whose gradients are sparse."""
    return [layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse]
