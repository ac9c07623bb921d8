"""A part of a nesting: some of what it holds, each under the keys that it had.

>>> subtree({"x": torch.ones(1), "y": (torch.zeros(1), torch.arange(2))}, {("y", 1)})
{'y': {1: tensor([0, 1])}}
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from dp_ray.tensors.nested import Keys, TreeSpec, flatten, leaf_keys, unflatten


def ends(spec: TreeSpec, above: Keys = ()) -> list[Keys]:
    """The keys from the root to each leaf, constant and empty container."""
    if not spec.children:
        return [above]
    below = zip(spec.keys, spec.children, strict=True)
    return [keys for key, child in below for keys in ends(child, (*above, key))]


def subtree(tree: Any, wanted: Set[Keys]) -> Any:
    """The tree without the ends that are not wanted; at least one must be.

    A container that loses some of its values becomes a dict of the others, by the same keys: so each stays under its
    path. A mapping keeps its class, and so does a dataclass that is a mapping, like Hugging Face's ModelOutput.
    """
    leaves, spec = flatten(tree)
    part = _part(spec, (), wanted)
    assert part is not None, "nothing is wanted"
    return unflatten(part, [leaf for keys, leaf in zip(leaf_keys(spec), leaves, strict=True) if keys in wanted])


def _part(spec: TreeSpec, above: Keys, wanted: Set[Keys]) -> TreeSpec | None:
    """The spec of what is wanted below a node; None if nothing is."""
    if not spec.children:
        return spec if above in wanted else None
    parts = {key: _part(child, (*above, key), wanted) for key, child in zip(spec.keys, spec.children, strict=True)}
    found = {key: part for key, part in parts.items() if part is not None}
    if not found:
        return None
    if len(found) == len(parts) or _can_lack(spec, parts.keys() - found.keys()):
        return dataclasses.replace(spec, keys=tuple(found), children=tuple(found.values()))
    return TreeSpec("mapping", dict, tuple(found), tuple(found.values()))


def _can_lack(spec: TreeSpec, lost: Set[Any]) -> bool:
    """Whether a container can be made without these keys."""
    cls = spec.container
    if spec.kind != "dataclass" or cls is None:
        return spec.kind == "mapping"
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return issubclass(cls, Mapping) and all(_has_default(fields[name]) for name in lost)


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
