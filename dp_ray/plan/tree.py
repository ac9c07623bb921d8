"""The fixed binary tree in which shards are summed: the same additions on any number of workers.

A node (no machine here) is a subtree: a range of shards `(start, stop)`. Its sum is that of its two halves, cut at
`(start + stop) // 2`. Floating-point addition is commutative but not associative, so a sum's bits depend on this tree
alone.

>>> fold({(0, 2): 1.0, (2, 3): 2.0, (3, 4): 3.0}, (0, 4), lambda left, right: left + right)
6.0
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import NamedTuple, TypeVar

from dp_ray.plan.split import worker_shards

Node = tuple[int, int]
T = TypeVar("T")


def halves(node: Node) -> tuple[Node, Node]:
    """Return the two children of a node of more than one shard."""
    start, stop = node
    middle = (start + stop) // 2
    return (start, middle), (middle, stop)


def nodes(shards: range, node: Node) -> list[Node]:
    """Return the largest nodes, at or below `node`, that hold only `shards`: the fewest for a worker, in shard order.

    For example, 4 of 8 shards on one of 2 workers are one node.

    >>> nodes(range(2, 5), (0, 8))
    [(2, 4), (4, 5)]
    """
    start, stop = node
    if not shards or stop <= shards.start or start >= shards.stop:
        return []
    if shards.start <= start and stop <= shards.stop:
        return [node]
    left, right = halves(node)
    return nodes(shards, left) + nodes(shards, right)


def nodes_by_rank(shards: int, workers: int, filled: int) -> list[list[Node]]:
    """Return each worker's nodes that have rows, where the first `filled` of the shards have some."""
    own = [worker_shards(shards, workers, rank) for rank in range(workers)]
    return [[node for node in nodes(subtree, (0, shards)) if node[0] < filled] for subtree in own]


def fold(held: Mapping[Node, T], node: Node, add: Callable[[T, T], T]) -> T | None:
    """Return the sum of a node, from the held sums of nodes below it.

    A node that is not held adds nothing; None if no node is held.
    """
    if node in held:
        return held[node]
    if node[1] - node[0] <= 1:
        return None
    left, right = (fold(held, half, add) for half in halves(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def climb(
    held: MutableMapping[Node, T], node: Node, value: T, above: Mapping[Node, Node], add: Callable[[T, T], T]
) -> None:
    """Put a node's sum into `held`; while the node beside it is held too, add both to their parent's sum instead.

    `above` holds the parents. The sums are those of `fold`, and no more are held than needed.

    >>> held = {(1, 2): 2.0, (2, 4): 7.0}
    >>> climb(held, (0, 1), 1.0, parents((0, 4)), lambda left, right: left + right)
    >>> held
    {(0, 4): 10.0}
    """
    while node in above:
        left, right = halves(above[node])
        beside = right if node == left else left
        if beside not in held:
            break
        other = held.pop(beside)
        # Left before right, whichever came first, so that the additions are those of `fold`.
        value = add(value, other) if node == left else add(other, value)
        node = above[node]
    held[node] = value


class Transfer(NamedTuple):
    """One addition of the tree between two workers: `sender` sends the sum of `right` to `receiver`."""

    node: Node
    left: Node
    right: Node
    receiver: int
    sender: int


def transfers(owners: Mapping[int, int], node: Node) -> list[Transfer]:
    """Return the additions between workers that sum a node on the owner of its first leaf, in order.

    `owners` maps each leaf that has rows to its worker. All workers follow the same order, so none waits in a circle.

    >>> transfers({0: 0, 1: 0, 2: 1}, (0, 4))
    [Transfer(node=(0, 4), left=(0, 2), right=(2, 4), receiver=0, sender=1)]
    """
    own = [owners[leaf] for leaf in range(*node) if leaf in owners]
    if len(set(own)) < 2:
        return []
    left, right = halves(node)
    before = transfers(owners, left) + transfers(owners, right)
    # A half without rows has no owner and adds nothing. A half's sum is on the owner of its first leaf with rows.
    first_of = [next((owners[leaf] for leaf in range(*half) if leaf in owners), None) for half in (left, right)]
    receiver, sender = first_of
    if receiver is None or sender is None or receiver == sender:
        return before
    return [*before, Transfer(node, left, right, receiver, sender)]


def leaf_pairs(node: Node) -> set[Node]:
    """Return the nodes of exactly two shards, at or below `node`."""
    if node[1] - node[0] <= 2:
        return {node} if node[1] - node[0] == 2 else set()
    left, right = halves(node)
    return leaf_pairs(left) | leaf_pairs(right)


def parents(node: Node) -> dict[Node, Node]:
    """Return the parent of each node below `node`."""
    if node[1] - node[0] <= 1:
        return {}
    left, right = halves(node)
    return {left: node, right: node, **parents(left), **parents(right)}


def leaves(shards: Iterable[int], pairs: set[Node]) -> list[Node]:
    """Return the nodes, of one or two shards each, whose gradients autograd makes when `shards` run in order.

    `pairs` are the `leaf_pairs` of the tree.

    >>> leaves([1, 2, 3], leaf_pairs((0, 4)))
    [(1, 2), (2, 4)]
    """
    found: list[Node] = []
    for shard in shards:
        if found and found[-1] == (shard - 1, shard) and (shard - 1, shard + 1) in pairs:
            found[-1] = (shard - 1, shard + 1)
        else:
            found.append((shard, shard + 1))
    return found
