"""Cut any nesting of tensors into shards along the batch dimension, and put the shards together again.

A LEAF is a tensor or a numpy array not of objects. Tuples, named tuples, lists, mappings, dataclasses and classes
registered with torch's pytree hold leaves; whatever else stands in them (strings, numbers, None, objects) is a
CONSTANT.

>>> batch = {"x": torch.arange(5), "name": "odd"}
>>> scatter(batch, shards=2)
[{'x': tensor([0, 1, 2]), 'name': 'odd'}, {'x': tensor([3, 4]), 'name': 'odd'}]
>>> gather(scatter(batch, shards=2), rows=[3, 2])
{'x': tensor([0, 1, 2, 3, 4]), 'name': 'odd'}
"""

import dataclasses
import functools
import json
import sys
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError, Error, ModelError
from dp_ray.plan.split import chunk_bounds
from dp_ray.tensors import pytree

Leaf: TypeAlias = torch.Tensor | np.typing.NDArray[Any]
Kind: TypeAlias = Literal["leaf", "constant", "tuple", "list", "namedtuple", "mapping", "dataclass", "pytree"]
Keys: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeSpec:
    """A tree without its leaves; equal specs take the same leaves in the same order."""

    kind: Kind
    container: type[Any] | None = None
    keys: Keys = ()
    children: tuple["TreeSpec", ...] = ()
    # The constant; what a defaultdict or a pytree is made with besides, which no comparison looks at.
    value: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeSpec):
            return NotImplemented
        return difference(self, other) is None and _leaf_keys(self) == _leaf_keys(other)

    @property
    def paths(self) -> list[str]:
        """One dotted path a leaf, in leaf order: {"h": (x, y)} has "h.0" and "h.1", a bare tensor ""."""
        return [".".join(map(str, keys)) for keys in _leaf_keys(self)]

    def to_json(self, above: Keys = ()) -> Any:
        """Plain JSON values that `from_json` reads; ModelError for a key or constant that is none."""
        if self.container is None:
            return {"kind": self.kind, "value": _plain(self.value, above)}
        below = zip(self.keys, self.children, strict=True)
        context = {"context": self.value} if self.kind == "pytree" and _is_json(self.value) else {}
        return {
            **context,
            "kind": self.kind,
            "type": f"{self.container.__module__}:{self.container.__qualname__}",
            "keys": [_plain(key, (*above, key)) for key in self.keys],
            "children": [child.to_json((*above, key)) for key, child in below],
        }

    @classmethod
    def from_json(cls, value: Any) -> "TreeSpec":
        """Read what `to_json` gave, without importing or unpickling anything.

        A class counts only if it is loaded already and fits the keys; without it a named tuple is made on the
        fly, and a dataclass, mapping or pytree becomes a dict. Other tuples and lists become plain ones.
        """
        if value["kind"] in ("leaf", "constant"):
            return cls(value["kind"], value=value["value"])
        keys, children = tuple(value["keys"]), tuple(map(cls.from_json, value["children"]))
        if value["kind"] == "pytree":
            found = _loaded_class(value["type"])
            if pytree.is_registered(found) and "context" in value:
                return cls("pytree", found, keys, children, value["context"])
        return cls(*_container(value["kind"], value["type"], keys), keys, children)


def flatten(tree: Any) -> tuple[list[Leaf], TreeSpec]:
    """Take a tree apart into its leaves, depth first, and the Spec from which `unflatten` rebuilds it."""
    leaves: list[Leaf] = []
    return leaves, _describe(tree, leaves)


def unflatten(spec: TreeSpec, leaves: Sequence[Any]) -> Any:
    """Rebuild what `flatten` took apart; Error if a class in it cannot be made again from what it held."""
    if len(leaves) != len(spec.paths):
        raise ValueError(f"got {len(leaves)} leaves for the {len(spec.paths)} places {spec.paths}")
    return _build(spec, iter(leaves))


def map_leaves(fn: Callable[[Leaf], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf and keep the nesting."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(leaf) for leaf in leaves])


def sizes(tree: Any) -> Any:
    """The torch.Size of every leaf, in lists, (named) tuples and dicts; 40 characters of a constant's repr.

    An object is shown as its class alone: it may look different in every step.
    """
    kind, keys, values = _children(tree)
    if kind == "leaf":
        return torch.Size(tree.shape)
    if kind == "constant":
        shown = (
            repr(tree)
            if is_plain(tree) or isinstance(tree, np.ndarray | np.generic)
            else f"<{type(tree).__qualname__}>"
        )
        return None if tree is None else shown[:40]
    inner = [sizes(value) for value in values]
    if kind in ("tuple", "list"):
        return tuple(inner) if kind == "tuple" else inner
    return type(tree)._make(inner) if kind == "namedtuple" else dict(zip(keys, inner, strict=True))


def rows_dim(leaf: Leaf, dim: int) -> int:
    """Which dimension of a leaf holds its rows: `dim`, but a vector's only one; DataError if there is none."""
    if leaf.ndim == 1:
        return 0  # labels [batch] stand beside an RNN's inputs [time, batch, feature] at dim=1
    if not -leaf.ndim <= dim < leaf.ndim:
        raise DataError(f"size {list(leaf.shape)} has no dimension {dim} that could hold rows")
    return dim % leaf.ndim


def num_rows(tree: Any, dim: int = 0) -> int | None:
    """The rows on which all leaves agree, None without leaves; DataError names the first two that do not."""
    leaves, spec = flatten(tree)
    names = [_quoted(keys) for keys in _leaf_keys(spec)]
    rows: list[int] = []
    for name, leaf in zip(names, leaves, strict=True):
        try:
            rows.append(leaf.shape[rows_dim(leaf, dim)])
        except DataError as error:
            raise DataError(f"input{name}: {error}") from None
        if rows[-1] != rows[0]:
            raise DataError(
                f"all leaves of a batch need the same rows, but input{names[0]} has {rows[0]} "
                f"(size {list(leaves[0].shape)}) and input{name} has {rows[-1]} (size {list(leaf.shape)})"
            )
    return rows[0] if rows else None


def scatter(tree: Any, shards: int, dim: int = 0) -> list[Any]:
    """Cut a tree as torch.chunk(leaf, shards, rows_dim(leaf, dim)) cuts each leaf, into views of it.

    Gives at most `shards` trees, none without rows; one if the whole batch is without. Constants go to all as
    the same object, and a tree without leaves goes `shards` times. DataError if leaves differ in rows.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    rows = num_rows(tree, dim)
    leaves, spec = flatten(tree)
    if rows is None:
        return [unflatten(spec, []) for _ in range(shards)]
    cuts = [slice(*chunk_bounds(rows, shards, shard)) for shard in range(shards)]
    cuts = [cut for cut in cuts if cut.start < cut.stop] or cuts[:1]
    # By index: views of tensors and arrays alike, which autograd lets be written to, unlike torch.chunk's.
    at = [(slice(None),) * rows_dim(leaf, dim) for leaf in leaves]
    return [unflatten(spec, [leaf[(*to, cut)] for leaf, to in zip(leaves, at, strict=True)]) for cut in cuts]


def gather(trees: Sequence[Any], rows: Sequence[int] | None = None, dim: int = 0) -> Any:
    """Put the shards' trees together along their rows, in order: the inverse of `scatter`.

    `rows` are the rows of each shard, to be checked where given. Scalars become a vector only if every shard
    is one row. One tree gives its own tensors. ModelError if the shards differ in anything but rows.
    """
    if not trees:
        raise ModelError("no shard gave an output, so there is nothing to gather")
    flat = [flatten(tree) for tree in trees]
    spec = flat[0][1]
    for shard, (_, other) in enumerate(flat):
        if found := difference(spec, other):
            advice = "all shards must give the same structure, keys and constants"
            raise ModelError(f"shard {shard}: {found}: {advice}")
    held = [dict(zip(_leaf_keys(other), leaves, strict=True)) for leaves, other in flat]
    columns = {keys: [leaves[keys] for leaves in held] for keys in _leaf_keys(spec)}
    counts = [None] * len(trees) if rows is None else rows
    return unflatten(spec, [_join(_quoted(keys), column, counts, dim) for keys, column in columns.items()])


def is_plain(value: Any) -> bool:
    """Whether a constant is a number, text or nothing, so that it can be kept."""
    return value is None or isinstance(value, bool | int | float | str)


def _children(node: Any) -> tuple[Kind, Keys, tuple[Any, ...]]:
    """Open one node: its kind, and the keys and values it holds."""
    if isinstance(node, torch.Tensor) or (isinstance(node, np.ndarray) and node.dtype.kind != "O"):
        return "leaf", (), ()
    if _is_namedtuple(type(node)):
        return "namedtuple", type(node)._fields, tuple(node)
    if isinstance(node, tuple | list):
        return "list" if isinstance(node, list) else "tuple", tuple(range(len(node))), tuple(node)
    if isinstance(node, Mapping):
        # A Hugging Face ModelOutput is both, and those of its fields that are None are no keys.
        kind: Kind = "dataclass" if dataclasses.is_dataclass(node) else "mapping"
        return kind, tuple(node.keys()), tuple(node.values())
    if dataclasses.is_dataclass(type(node)):
        names = tuple(field.name for field in dataclasses.fields(node) if hasattr(node, field.name))
        return "dataclass", names, tuple(getattr(node, name) for name in names)
    if pytree.is_registered(type(node)):
        return "pytree", *pytree.take_apart(node)[:2]
    return "constant", (), ()


def _is_namedtuple(cls: type[Any]) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def _describe(node: Any, leaves: list[Leaf]) -> TreeSpec:
    """Take a node apart: its leaves go to `leaves`, all else is the Spec. `_build` is the inverse."""
    kind, keys, values = _children(node)
    if kind == "leaf":
        leaves.append(node)
        return TreeSpec("leaf")
    if kind == "constant":
        return TreeSpec("constant", value=node)
    besides = node.default_factory if isinstance(node, defaultdict) else None
    if kind == "pytree":
        besides = pytree.take_apart(node)[2]
    return TreeSpec(kind, type(node), keys, tuple(_describe(value, leaves) for value in values), besides)


def _build(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    """Make a node from its spec and the leaves yet to come. `_describe` is the inverse."""
    if spec.container is None:
        return next(leaves) if spec.kind == "leaf" else spec.value
    cls: Any = spec.container
    held = {key: _build(child, leaves) for key, child in zip(spec.keys, spec.children, strict=True)}
    try:
        if spec.kind == "pytree":
            return pytree.make(cls, list(held.values()), spec.value)
        if spec.kind == "mapping":
            return cls(spec.value, held) if issubclass(cls, defaultdict) else cls(held)
        if spec.kind == "dataclass":
            return _make_dataclass(cls, held)
        return cls._make(held.values()) if spec.kind == "namedtuple" else cls(list(held.values()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Error(f"a {cls.__qualname__} cannot be made again from what it holds: {error}") from error


def _make_dataclass(cls: type[Any], held: dict[str, Any]) -> Any:
    late = {field.name for field in dataclasses.fields(cls) if not field.init}
    made = cls(**{name: value for name, value in held.items() if name not in late})
    for name in late & held.keys():
        object.__setattr__(made, name, held[name])  # also where the class is frozen
    return made


def _nodes(spec: TreeSpec, above: Keys = ()) -> Iterator[tuple[Keys, TreeSpec]]:
    yield above, spec
    for key, child in zip(spec.keys, spec.children, strict=True):
        yield from _nodes(child, (*above, key))


def _leaf_keys(spec: TreeSpec) -> list[Keys]:
    return [keys for keys, node in _nodes(spec) if node.kind == "leaf"]


def _quoted(keys: Keys) -> str:
    return f" {'.'.join(map(str, keys))!r}" if keys else ""


def difference(first: TreeSpec, other: TreeSpec) -> str | None:
    """Where another shard's spec first differs from shard 0's; the order of keys does not count."""
    here, there = dict(_nodes(first)), dict(_nodes(other))
    for keys in here | there:
        one, two = here.get(keys), there.get(keys)
        if one is None or two is None or not _alike(one, two):
            return f"output{_quoted(keys)} is {_noun(two)}, that of shard 0 is {_noun(one)}"
    return None


def _alike(one: TreeSpec, two: TreeSpec) -> bool:
    if one.kind == two.kind == "constant":
        return _equal(one.value, two.value)
    same_length = one.kind not in ("tuple", "list") or one.keys == two.keys
    return one.kind == two.kind and one.container is two.container and same_length


def _equal(one: Any, two: Any) -> bool:
    """Whether two constants are equal; NaN equals NaN, and an == that gives no bool does not count."""
    try:
        equal = one is two or one == two or (one != one and two != two)
    except Exception:  # the == of a user's object may raise anything
        return False
    return isinstance(equal, bool | np.bool_) and bool(equal)


def _noun(spec: TreeSpec | None) -> str:
    if spec is None:
        return "nothing"
    if spec.container is not None:
        return f"a {spec.container.__qualname__} of {len(spec.keys)}"
    return "a tensor or array" if spec.kind == "leaf" else repr(spec.value)[:40]


def _is_json(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read again."""
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def _plain(value: Any, keys: Keys) -> Any:
    if is_plain(value):
        return value
    advice = "return tensors, arrays, strings, numbers or None"
    raise ModelError(f"output{_quoted(keys)} holds a {type(value).__qualname__}, not for JSON: {advice}")


def _container(kind: Kind, name: str, keys: Keys) -> tuple[Kind, type[Any]]:
    """The kind and class that a description read from JSON gets here."""
    if kind in ("tuple", "list"):
        return kind, tuple if kind == "tuple" else list
    cls = _loaded_class(name)
    if kind == "namedtuple":
        fits = _is_namedtuple(cls) and tuple(cls._fields) == keys
        return kind, cls if fits else _new_namedtuple(name.split(":")[1].split(".")[-1], keys)
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        names = {field.name for field in dataclasses.fields(cls)}
        if names == set(keys) or (issubclass(cls, Mapping) and names > set(keys)):
            return kind, cls
    return "mapping", cls if kind == "mapping" and issubclass(cls, Mapping) else dict


def _loaded_class(name: str) -> type[Any]:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # a lazy module's __getattr__ would import
    return found if isinstance(found, type) else object


@functools.cache  # so that what is read twice has one type and compares equal
def _new_namedtuple(name: str, fields: tuple[str, ...]) -> type[Any]:
    return namedtuple(name, fields, rename=True)


def _join(name: str, pieces: Sequence[Any], rows: Sequence[int | None], dim: int) -> Any:
    """Concatenate one leaf of all shards; ModelError names the shard whose piece does not fit."""
    if all(piece.ndim == 0 for piece in pieces):
        if any(count != 1 for count in rows):
            advice = "return one value per row (of a loss: reduction='none')"
            raise ModelError(f"output{name} is a scalar per shard, not per row: {advice}")
        pieces = [piece.reshape(1) for piece in pieces]
    for shard, (piece, count) in enumerate(zip(pieces, rows, strict=True)):
        if found := _misfit(piece, pieces[0], count, dim):
            raise ModelError(f"shard {shard}: output{name} {found}")
    concatenate: Any = torch.cat if isinstance(pieces[0], torch.Tensor) else np.concatenate
    return pieces[0] if len(pieces) == 1 else concatenate(pieces, rows_dim(pieces[0], dim))


def _misfit(piece: Leaf, first: Leaf, rows: int | None, dim: int) -> str | None:
    """What keeps a shard's piece from standing next to shard 0's, if anything."""
    try:
        here, there = _form(piece, dim), _form(first, dim)
    except DataError as error:
        return f"of {error}"
    if here != there:
        return f"is {here}, that of shard 0 {there}"
    got = piece.shape[rows_dim(piece, dim)]
    advice = "return one row of output per row of input"
    return None if rows in (None, got) else f"has {got} rows (size {list(piece.shape)}), not {rows}: {advice}"


def _form(leaf: Leaf, dim: int) -> str:
    """What the pieces of all shards must share: all but the number of rows."""
    size = [str(length) for length in leaf.shape]
    size[rows_dim(leaf, dim)] = "rows"
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype}, size [{', '.join(size)}]"
    # A string array is as wide as its longest string, so the width differs from shard to shard.
    return f"an array of {leaf.dtype.type if leaf.dtype.kind in 'SU' else leaf.dtype}, size [{', '.join(size)}]"
