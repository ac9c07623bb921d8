"""Take any nesting of tensors apart into its leaves, and build it again.

A LEAF is a tensor, or a numpy array of any dtype but object. Tuples, named tuples, lists, mappings, dataclasses and
classes registered with torch's pytree hold leaves. Anything else (string, number, None, object) is a CONSTANT.
torch 2.11 to 2.13 has no public interface to its pytree, so this module, and no other, uses the private one.

>>> leaves, spec = flatten({"x": torch.arange(2), "name": "odd"})
>>> leaves
[tensor([0, 1])]
>>> unflatten(spec, [torch.ones(1)])
{'x': tensor([1.]), 'name': 'odd'}
>>> subtree({"x": torch.ones(1), "y": (torch.zeros(1), torch.arange(2))}, {("y", 1)})
{'y': {1: tensor([0, 1])}}
"""

import copy
import dataclasses
import functools
import json
import math
import sys
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from dp_ray.errors import Error, ModelError
from dp_ray.tensors.flat import as_bytes
from dp_ray.text import a_kind

Leaf: TypeAlias = torch.Tensor | np.typing.NDArray[Any]
IsWhole: TypeAlias = Callable[[Any], bool]
NodeKind: TypeAlias = Literal["leaf", "constant", "tuple", "list", "namedtuple", "mapping", "dataclass", "pytree"]
Keys: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TreeSpec:
    """A tree without its leaves; equal specs take the same leaves in the same order."""

    kind: NodeKind
    container: type[Any] | None = None
    keys: Keys = ()
    children: tuple["TreeSpec", ...] = ()
    # The constant; a defaultdict's factory or a pytree's context, which comparisons ignore.
    value: Any = None
    # The JSON of a class that this process has not loaded: written again, it names the class for others.
    written: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeSpec):
            return NotImplemented
        return first_difference(self, other) is None and leaf_keys(self) == leaf_keys(other)

    @property
    def paths(self) -> list[str]:
        """Return each leaf's dotted path, in leaf order: {"h": (x, y)} has "h.0" and "h.1", a bare tensor ""."""
        return [".".join(map(str, keys)) for keys in leaf_keys(self)]

    def to_json(self, above: Keys = ()) -> Any:
        """Return plain JSON values that `from_json` reads.

        Raises ModelError for a key or constant that JSON cannot hold.
        """
        if self.container is None:
            return {"kind": self.kind, "value": _require_plain(self.value, above)}
        below = zip(self.keys, self.children, strict=True)
        context = {"context": self.value} if self.kind == "pytree" and _is_json(self.value) else {}
        named = {"kind": self.kind, "type": f"{self.container.__module__}:{self.container.__qualname__}"}
        return {
            **context,
            **(self.written or named),
            "keys": [_require_plain(key, (*above, key)) for key in self.keys],
            "children": [child.to_json((*above, key)) for key, child in below],
        }

    @classmethod
    def from_json(cls, value: Any) -> "TreeSpec":
        """Read what `to_json` returned, without importing or unpickling anything.

        A class is used only if it is loaded already and fits the keys. Otherwise a named tuple gets a new class,
        and a dataclass, mapping or pytree becomes a dict. Subclasses of tuple and list become plain ones.
        """
        if value["kind"] in ("leaf", "constant"):
            return cls(value["kind"], value=value["value"])
        keys, children = tuple(value["keys"]), tuple(map(cls.from_json, value["children"]))
        if value["kind"] == "pytree":
            container = _loaded_class(value["type"])
            if container in _pytree.SUPPORTED_NODES and "context" in value:
                return cls("pytree", container, keys, children, value["context"])
        written = {name: value[name] for name in ("context", "kind", "type") if name in value}
        return cls(*_container(value["kind"], value["type"], keys), keys, children, written=written)


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """A leaf whose rows differ in shape: the numbers of all of them, one after another, and the shape of each.

    Or the rows are plain values of Python, as texts, each of the shape (). `depth` keys of its path lead to the list
    which has an entry for each row. It stands in outputs on their way to a file: see `dp_ray.tensors.ragged`.
    """

    data: Any  # a tensor or array of one dimension; or a list of a value for each row
    shapes: tuple[tuple[int, ...], ...]
    depth: int
    ndim: ClassVar = 1  # the rows

    @classmethod
    def of_values(cls, values: list[Any], depth: int) -> "Ragged":
        """Return the leaf of plain values, one for each row."""
        return cls(values, ((),) * len(values), depth)

    @property
    def has_values(self) -> bool:
        """Whether its rows are plain values of Python."""
        return isinstance(self.data, list)

    def rows(self) -> list[Any]:
        """Return the rows; of numbers, as views."""
        if self.has_values:
            return list(self.data)
        ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        pairs = zip([0, *ends], ends, self.shapes, strict=False)
        return [self.data[start:end].reshape(shape) for start, end, shape in pairs]

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers, and of where each row begins."""
        return int(self.data.nbytes) + 8 * len(self.shapes)


def flatten(tree: Any, is_whole: IsWhole | None = None) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart into its leaves, depth first, and the TreeSpec from which `unflatten` rebuilds it.

    A value for which `is_whole` returns True is a leaf.
    """
    leaves: list[Any] = []
    return leaves, _describe(tree, leaves, is_whole)


def unflatten(spec: TreeSpec, leaves: Sequence[Any]) -> Any:
    """Rebuild what `flatten` took apart, with new leaves.

    Raises ValueError for a wrong number of leaves, and Error if a class cannot be made from its contents.
    """
    if len(leaves) != len(leaf_keys(spec)):
        raise ValueError(f"got {len(leaves)} leaves for the {len(spec.paths)} places {spec.paths}")
    return _build(spec, iter(leaves))


def bare_tensors(tree: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a tensor, or of a plain tuple, list or dict of tensors alone; None for any other tree.

    Most batches are such, and no walk is needed. `with_tensors` is the inverse.
    """
    cls = type(tree)
    if cls is torch.Tensor:
        return (tree,)
    if cls is dict:
        tree = tuple(tree.values())
    elif cls is not tuple and cls is not list:
        return None
    for value in tree:
        if type(value) is not torch.Tensor:
            return None
    return tree  # type: ignore[no-any-return]


def with_tensors(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a tree like this one with other tensors in the places of those that `bare_tensors` returned."""
    cls = type(tree)
    if cls is torch.Tensor:
        return tensors[0]
    return dict(zip(tree, tensors, strict=True)) if cls is dict else cls(tensors)


def map_leaves(fn: Callable[[Leaf], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf and keep the nesting; raises what `unflatten` raises."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(leaf) for leaf in leaves])


def map_batch(on_leaf: Callable[[Leaf], Any], on_object: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `on_leaf` to every leaf of a batch, and `on_object` to each object that has a method `to` of its own.

    Such an object is no leaf, and nothing in it is one: a graph, or what else a user's collate makes. A
    PackedSequence counts as one: wherever its numbers are moved, its lengths stay on the CPU.
    """
    parts, spec = flatten(tree, _is_object)
    return unflatten(spec, [on_object(part) if _is_object(part) else on_leaf(part) for part in parts])


def copied(tree: Any) -> Any:
    """Copy all leaves and objects of a batch, for a model that may write into its inputs."""
    return map_batch(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy(), copy.deepcopy, tree
    )


def in_own_memory(tree: Any) -> Any:
    """Return outputs in memory of their own: a model may write what it has returned in its next forward.

    Raises what `unflatten` raises.
    """
    return map_leaves(_apart, tree)


def _apart(leaf: Leaf | Ragged) -> Any:
    if isinstance(leaf, Ragged):
        return dataclasses.replace(leaf, data=leaf.rows() if leaf.has_values else _apart(leaf.data))
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()


def holds_objects(tree: Any) -> bool:
    """Return whether a batch holds objects that move by a method `to` of their own, beside its leaves."""
    return bare_tensors(tree) is None and any(
        node.kind == "constant" and _is_object(node.value) for _, node in all_nodes(flatten(tree)[1])
    )


def _is_object(node: Any) -> bool:
    if is_plain(node) or not callable(getattr(node, "to", None)) or isinstance(node, torch.Tensor | type):
        return False
    return isinstance(node, PackedSequence) or _children(node)[0] == "constant"


def sizes(tree: Any) -> Any:
    """Return the torch.Size of every leaf, in lists, (named) tuples and dicts.

    A constant is shown as 40 characters of its repr, an object as its class alone: its repr may differ in every step.
    A nested tensor is shown as a list of its rows.
    """
    kind, keys, values = _children(tree)
    if kind == "leaf" and isinstance(tree, torch.Tensor) and tree.is_nested:
        return f"{tree.size(0)} x [{', '.join('*' * (tree.dim() - 1))}]"
    if kind == "leaf" or isinstance(tree, np.ndarray):
        return torch.Size(tree.shape)
    if kind == "constant":
        if tree is None:
            return None
        has_stable_repr = is_plain(tree) or isinstance(tree, np.generic)
        return (repr(tree) if has_stable_repr else f"<{type(tree).__qualname__}>")[:40]
    inner = [sizes(value) for value in values]
    if kind in ("tuple", "list"):
        return tuple(inner) if kind == "tuple" else inner
    return type(tree)._make(inner) if kind == "namedtuple" else dict(zip(keys, inner, strict=True))


def subtree(tree: Any, wanted: Set[Keys]) -> Any:
    """Return the tree without the ends that are not wanted; at least one must be.

    A container that loses some of its values becomes a dict of the others, by the same keys: so each stays under its
    path. A mapping keeps its class, and so does a dataclass that is a mapping, like Hugging Face's ModelOutput.
    """
    leaves, spec = flatten(tree)
    part = _part(spec, (), wanted)
    assert part is not None, "nothing is wanted"
    return unflatten(part, [leaf for keys, leaf in zip(leaf_keys(spec), leaves, strict=True) if keys in wanted])


def _part(spec: TreeSpec, above: Keys, wanted: Set[Keys]) -> TreeSpec | None:
    """Return the spec of the wanted part below a node; None if nothing is."""
    if not spec.children:
        return spec if above in wanted else None
    parts = {key: _part(child, (*above, key), wanted) for key, child in zip(spec.keys, spec.children, strict=True)}
    kept = {key: part for key, part in parts.items() if part is not None}
    if not kept:
        return None
    if len(kept) == len(parts) or _can_lack(spec, parts.keys() - kept.keys()):
        return dataclasses.replace(spec, keys=tuple(kept), children=tuple(kept.values()))
    return TreeSpec("mapping", dict, tuple(kept), tuple(kept.values()))


def _can_lack(spec: TreeSpec, lost: Set[Any]) -> bool:
    """Return whether a container can be made without these keys."""
    cls = spec.container
    if spec.kind != "dataclass" or cls is None:
        return spec.kind == "mapping"
    fields = {field.name: field for field in dataclasses.fields(cls)}
    missing = dataclasses.MISSING
    return issubclass(cls, Mapping) and all(
        fields[name].default is not missing or fields[name].default_factory is not missing for name in lost
    )


def leaf_keys(spec: TreeSpec) -> list[Keys]:
    """Return the keys from the root to each leaf, in leaf order."""
    return [keys for keys, node in all_nodes(spec) if node.kind == "leaf"]


def ends(spec: TreeSpec) -> list[Keys]:
    """Return the keys from the root to each leaf, constant and empty container."""
    return [keys for keys, node in all_nodes(spec) if not node.children]


def all_nodes(spec: TreeSpec, above: Keys = ()) -> Iterator[tuple[Keys, TreeSpec]]:
    """Yield all nodes of a tree, each with the keys that lead to it, before those below it."""
    yield above, spec
    for key, child in zip(spec.keys, spec.children, strict=True):
        yield from all_nodes(child, (*above, key))


def quoted(keys: Keys) -> str:
    """Format a leaf's path for messages, like ` 'h.0'` with a space before it; "" for the root."""
    return f" {'.'.join(map(str, keys))!r}" if keys else ""


def first_difference(first: TreeSpec, other: TreeSpec, of: str = "shard 0") -> str | None:
    """Return the first difference of another spec from that `of` shard 0, in words; None if they are equal.

    The order of keys does not count.
    """
    here, there = dict(all_nodes(first)), dict(all_nodes(other))
    for keys in here | there:
        mine, theirs = here.get(keys), there.get(keys)
        if mine is None or theirs is None or not _alike(mine, theirs):
            return f"output{quoted(keys)} is {_noun(theirs)}, that of {of} is {_noun(mine)}"
    return None


def _alike(here: TreeSpec, there: TreeSpec) -> bool:
    """Return whether two nodes are alike.

    For constants, NaN equals NaN, and an == that returns no bool means unequal.
    """
    if here.kind == there.kind == "constant":
        a, b = here.value, there.value
        try:
            equal = a is b or a == b or (a != a and b != b)
        except Exception:  # the == of a user's object may raise anything
            return False
        return isinstance(equal, bool | np.bool_) and bool(equal)
    same_length = here.kind not in ("tuple", "list") or here.keys == there.keys
    return here.kind == there.kind and here.container is there.container and same_length


def _noun(spec: TreeSpec | None) -> str:
    if spec is None:
        return "nothing"
    if spec.container is not None:
        return f"a {spec.container.__qualname__} of {len(spec.keys)}"
    return "a tensor or array" if spec.kind == "leaf" else repr(spec.value)[:40]


def _children(node: Any) -> tuple[NodeKind, Keys, tuple[Any, ...]]:
    """Open one node: its kind, and the keys and values it holds."""
    if isinstance(node, torch.Tensor | Ragged) or (isinstance(node, np.ndarray) and node.dtype.kind != "O"):
        return "leaf", (), ()
    if _is_namedtuple(type(node)):
        return "namedtuple", type(node)._fields, tuple(node)
    if isinstance(node, tuple | list):
        return "list" if isinstance(node, list) else "tuple", tuple(range(len(node))), tuple(node)
    if isinstance(node, Mapping):
        # A Hugging Face ModelOutput is both a mapping and a dataclass. Its fields that are None are not keys.
        kind: NodeKind = "dataclass" if dataclasses.is_dataclass(node) else "mapping"
        return kind, tuple(node.keys()), tuple(node.values())
    if dataclasses.is_dataclass(type(node)):
        names = tuple(field.name for field in dataclasses.fields(node) if hasattr(node, field.name))
        return "dataclass", names, tuple(getattr(node, name) for name in names)
    if type(node) in _pytree.SUPPORTED_NODES:
        return "pytree", *take_apart(node)[:2]
    return "constant", (), ()


def take_apart(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Return the keys and values of a node of a registered class, and the context from which `_build` rebuilds it."""
    registered = _pytree.SUPPORTED_NODES[type(node)]
    if registered.flatten_with_keys_fn is None:
        values, context = registered.flatten_fn(node)
        return tuple(range(len(values))), tuple(values), context
    pairs, context = registered.flatten_with_keys_fn(node)
    keys = [_key_of(key) for key, _ in pairs]
    is_unique = len(set(keys)) == len(keys)
    return tuple(keys) if is_unique else tuple(range(len(pairs))), tuple(value for _, value in pairs), context


def _key_of(key: Any) -> int | str:
    """Return the plain key, index or name inside one of torch's key objects."""
    for name in ("key", "idx", "name"):
        plain = getattr(key, name, None)
        if isinstance(plain, int | str):
            return plain
    return str(key)


def is_plain(value: Any) -> bool:
    """Return whether a constant is a number, text or None, which JSON can hold."""
    return value is None or isinstance(value, bool | int | float | str)


def why_no_rows(leaf: Any) -> str | None:
    """Describe a leaf that holds no rows of numbers, and what to return in its place; None if it holds them."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if leaf.is_nested:
        return (
            "a nested tensor: return list(tensor.unbind()) with outputs.ragged: true, or padded rows, by "
            "torch.nested.to_padded_tensor"
        )
    if leaf.layout is not torch.strided:
        return f"a tensor of the layout {leaf.layout}: return tensor.to_dense()"
    if leaf.is_quantized:
        return f"a tensor of {leaf.dtype}: return tensor.dequantize() or tensor.int_repr()"
    return "a tensor of the meta device, without numbers: return one of another device" if leaf.is_meta else None


def is_texts(node: Any) -> bool:
    """Return whether a node is a list of texts, or an array of them as objects, and of at least one."""
    is_array = isinstance(node, np.ndarray) and node.dtype.kind == "O" and node.ndim == 1
    return (is_array or isinstance(node, list)) and len(node) > 0 and all(isinstance(part, str) for part in node)


def is_same_constant(here: Any, there: Any) -> bool:
    """Return whether two constants are the same to the bit; of objects, whether they are equal."""
    if here is there:
        return True
    if is_plain(here) and is_plain(there):
        return repr(here) == repr(there)
    try:
        return bool(here == there)
    except Exception:  # the == of a user's object may raise anything
        return False


def is_same_leaf(here: Any, there: Any) -> bool:
    """Return whether two tensors, or two arrays, are the same to the bit."""
    if isinstance(here, Ragged) or isinstance(there, Ragged) or here.shape != there.shape:
        return False
    if isinstance(here, np.ndarray) or isinstance(there, np.ndarray):
        return type(here) is type(there) and here.dtype == there.dtype and bool(here.tobytes() == there.tobytes())
    if here.dtype is not there.dtype:
        return False
    is_dense = all(each.layout is torch.strided and not each.is_quantized for each in (here, there))
    return is_dense and torch.equal(as_bytes(here), as_bytes(there))


def _is_namedtuple(cls: type[Any]) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def _describe(node: Any, leaves: list[Any], is_whole: IsWhole | None = None) -> TreeSpec:
    """Take a node apart: append its leaves to `leaves`, return the rest as a TreeSpec. `_build` is the inverse."""
    kind, keys, values = _children(node)
    if kind == "leaf" or (is_whole is not None and is_whole(node)):
        leaves.append(node)
        return TreeSpec("leaf")
    if kind == "constant":
        return TreeSpec("constant", value=node)
    besides = node.default_factory if isinstance(node, defaultdict) else None
    if kind == "pytree":
        besides = take_apart(node)[2]
    children = tuple(_describe(value, leaves, is_whole) for value in values)
    return TreeSpec(kind, type(node), keys, children, besides)


def _build(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    """Make a node from its spec and the next leaves. `_describe` is the inverse."""
    if spec.container is None:
        return next(leaves) if spec.kind == "leaf" else spec.value
    cls: Any = spec.container
    values = {key: _build(child, leaves) for key, child in zip(spec.keys, spec.children, strict=True)}
    try:
        if spec.kind == "pytree":
            return _pytree.SUPPORTED_NODES[cls].unflatten_fn(list(values.values()), spec.value)
        if spec.kind == "mapping":
            return cls(spec.value, values) if issubclass(cls, defaultdict) else cls(values)
        if spec.kind == "dataclass":
            late = {field.name for field in dataclasses.fields(cls) if not field.init}
            made = cls(**{name: value for name, value in values.items() if name not in late})
            for name in late & values.keys():
                object.__setattr__(made, name, values[name])  # setattr would fail for a frozen class
            return made
        return cls._make(values.values()) if spec.kind == "namedtuple" else cls(list(values.values()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Error(f"a {cls.__qualname__} cannot be made again from what it holds: {error}") from error


def _is_json(value: Any) -> bool:
    """Return whether a value is unchanged after writing it as JSON and reading it again."""
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def _require_plain(value: Any, keys: Keys) -> Any:
    if is_plain(value):
        return value
    advice = "return tensors, arrays, strings, numbers or None"
    raise ModelError(f"output{quoted(keys)} holds {a_kind(value)}, not for JSON: {advice}")


def _container(kind: NodeKind, name: str, keys: Keys) -> tuple[NodeKind, type[Any]]:
    """Return the kind and class to use in this process for a spec read from JSON."""
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
    loaded: Any = sys.modules.get(module)
    for part in qualname.split("."):
        loaded = getattr(loaded, "__dict__", {}).get(part)  # a lazy module's __getattr__ would import
    return loaded if isinstance(loaded, type) else object


@functools.cache  # one class for each (name, fields), so that two reads compare equal
def _new_namedtuple(name: str, fields: tuple[str, ...]) -> type[Any]:
    return namedtuple(name, fields, rename=True)
