"""What the bits of a run depend on beside its job: what computes on the workers, by attempt, kept in `about.json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dp_ray.errors import JobError
from dp_ray.text import listed


class Numerics(NamedTuple):
    """What computes on a worker, and what it has beside: by `computes` workers give the same bits, or not."""

    computes: Mapping[str, str]
    beside: Mapping[str, str]


@dataclass(frozen=True)
class Kind:
    """The workers of an attempt that are alike: their ranks, their nodes, and the two parts of their Numerics."""

    ranks: list[int]
    nodes: list[str]
    computes: dict[str, str]
    beside: dict[str, str]


@dataclass(frozen=True)
class Computed:
    """The kinds of workers of an attempt that began with `step`, at a time in ISO's format."""

    started: str
    step: int
    kinds: list[Kind]


def kinds_of(workers: Iterable[tuple[int, str, Numerics]]) -> list[Kind]:
    """Return the kinds of workers, each given as rank, node and Numerics."""
    kinds: list[Kind] = []
    for rank, node, own in workers:
        alike = next((kind for kind in kinds if (kind.computes, kind.beside) == own), None)
        if alike is None:
            kinds.append(Kind([rank], [node], dict(own.computes), dict(own.beside)))
            continue
        alike.ranks.append(rank)
        if node not in alike.nodes:
            alike.nodes.append(node)
    return kinds


def places_of_kinds(kinds: Sequence[Kind]) -> list[tuple[str, Mapping[str, str]]]:
    """Return where each kind computes, and what: its nodes, or its ranks too if a node has several kinds."""
    named = [node for kind in kinds for node in kind.nodes]
    are_apart = len(named) == len(set(named))
    places = [
        listed(kind.nodes if are_apart else [f"rank {listed(kind.ranks)} on {listed(kind.nodes)}"]) for kind in kinds
    ]
    return list(zip(places, (kind.computes for kind in kinds), strict=True))


def difference(places: Iterable[tuple[str, Mapping[str, str]]], at: str = "on ") -> str:
    """Return in what places compute differently; empty if in nothing. `at` goes before the places.

    >>> difference([("a", {"capability": "AVX2"}), ("b", {"capability": "AVX512"}), ("c", {"capability": "AVX2"})])
    'capability is AVX2 on a, c and AVX512 on b'
    """
    each = list(places)
    found = []
    for name in dict.fromkeys(name for _, computes in each for name in computes):
        values: dict[str, list[str]] = {}
        for place, computes in each:
            values.setdefault(computes.get(name, "not there"), []).append(place)
        if len(values) > 1:
            found.append(
                f"{name} is " + " and ".join(f"{value} {at}{listed(there)}" for value, there in values.items())
            )
    return "; ".join(found)


def refusal(kinds: Sequence[Kind]) -> JobError:
    """Return the error that workers of these kinds cannot share a bitwise job."""
    return JobError(
        f"bitwise: the workers would not give the same bits: {difference(places_of_kinds(kinds))}; take nodes of one "
        "kind (placement: STRICT_PACK, accelerator_type, or a resource of theirs in resources_per_worker), or set "
        "bitwise: false"
    )


def summary_of(kinds: Sequence[Kind]) -> dict[str, str]:
    """Return what kinds of workers compute on, in one text each: `{"capability": "AVX2 and AVX512"}`."""
    names = dict.fromkeys(name for kind in kinds for name in kind.computes)
    values = {name: dict.fromkeys(kind.computes.get(name, "not there") for kind in kinds) for name in names}
    return {name: " and ".join(found) for name, found in values.items()}


def change_between(before: Sequence[Kind], now: Sequence[Kind]) -> str:
    """Return in what two attempts compute differently; empty if in nothing, or if one did not tell."""
    if not before or not now:
        return ""
    return difference([("before", summary_of(before)), ("now", summary_of(now))], "")
