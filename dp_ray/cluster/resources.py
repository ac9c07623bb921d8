"""Resources of nodes: how many workers fit, by default how many GPUs, and both as text.

It stands apart from `decisions.py` since `connect.py` needs it before all else: it imports nothing that is slow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeType:
    """A type of nodes that an autoscaler adds: what a node offers, and how many there may be; -1 is without limit."""

    name: str
    resources: Resources
    max_count: int


def addable(types: Iterable[NodeType], up: Iterable[str], most: int) -> list[dict[str, float]]:
    """Return what each node offers that may be added yet, at most `most` of a type; `up` are the types of those up.

    >>> addable([NodeType("gpus", {"GPU": 4}, 3)], ["head", "gpus"], 8)
    [{'GPU': 4}, {'GPU': 4}]
    """
    num_up = Counter(up)
    counts = [(kind, most if kind.max_count < 0 else min(most, kind.max_count - num_up[kind.name])) for kind in types]
    return [dict(node.resources) for node, count in counts for _ in range(count)]


def gpus_by_default(up: float, types: Sequence[NodeType] | None) -> int:
    """Return the GPUs of a worker with `gpus_per_worker: auto`: 1 if GPUs are up or may be added, else 0.

    `types` are the autoscaler's; None if they are not known.
    """
    may_come = any(kind.max_count != 0 and kind.resources.get("GPU", 0) > 0 for kind in types or ())
    return int(up > 0 or may_come)


def capacity_for(
    each: Resources, nodes: list[dict[str, float]], placement: str = "PACK", accelerator_type: str | None = None
) -> int:
    """Return how many workers with the resources `each` fit on the nodes; `nodes` are what each node offers."""
    if accelerator_type:
        nodes = [node for node in nodes if f"accelerator_type:{accelerator_type}" in node]
    if not each:
        return 1 << 30 if nodes else 0
    counts = [min(_fit(name, node.get(name, 0), amount) for name, amount in each.items() if amount) for node in nodes]
    if placement == "STRICT_PACK":
        return max(counts, default=0)
    return sum(min(count, 1) for count in counts) if placement == "STRICT_SPREAD" else sum(counts)


def free_for(
    each: Resources, nodes: list[dict[str, float]], free: Resources, placement: str, accelerator_type: str | None
) -> int:
    """Return how many such workers fit on the nodes at most, if only `free` of all their resources is unused.

    >>> free_for({"CPU": 2}, [{"CPU": 5}, {"CPU": 5}], {"CPU": 7}, "PACK", None)
    3
    """
    unused = [int(free.get(name, 0) / amount + 1e-9) for name, amount in each.items() if amount]
    return min([capacity_for(each, nodes, placement, accelerator_type), *unused])


def _fit(name: str, there: float, amount: float) -> int:
    """Return how many times `amount` fits; a fraction of a GPU must be on one GPU."""
    if name == "GPU" and amount < 1:
        whole, rest = divmod(there, 1)
        return int(whole) * int(1 / amount + 1e-9) + int(rest / amount + 1e-9)
    return int(there / amount + 1e-9)


def times(each: Resources, count: int) -> str:
    """Return the resources of `count` workers, as text."""
    return resources_text({name: amount * count for name, amount in each.items()})


def resources_text(resources: Resources) -> str:
    """Return resources as text: `4 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
