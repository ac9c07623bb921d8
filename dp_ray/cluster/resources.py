"""The resources of workers and nodes: how many workers fit, node by node. It knows no Ray."""

from collections.abc import Mapping

Resources = Mapping[str, float]


def capacity_for(
    each: Resources, nodes: list[dict[str, float]], placement: str = "PACK", accelerator_type: str | None = None
) -> int:
    """How many workers with the resources `each` fit on the nodes; `nodes` are what each node offers."""
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
    """How many such workers fit on the nodes at most, if only `free` of all their resources together is unused.

    >>> free_for({"CPU": 2}, [{"CPU": 5}, {"CPU": 5}], {"CPU": 7}, "PACK", None)
    3
    """
    unused = [int(free.get(name, 0) / amount + 1e-9) for name, amount in each.items() if amount]
    return min([capacity_for(each, nodes, placement, accelerator_type), *unused])


def _fit(name: str, there: float, amount: float) -> int:
    """How many times `amount` fits; a fraction of a GPU must be on one GPU."""
    if name == "GPU" and amount < 1:
        whole, rest = divmod(there, 1)
        return int(whole) * int(1 / amount + 1e-9) + int(rest / amount + 1e-9)
    return int(there / amount + 1e-9)


def times(each: Resources, count: int) -> str:
    """The resources of `count` workers, as text."""
    return text_of({name: amount * count for name, amount in each.items()})


def text_of(resources: Resources) -> str:
    """Resources as text: `4 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
