"""A module on its way to workers: its structure pickled, its tensors apart. `dumped` and `made` are inverse.

What a module refers to goes by value, so it must not be something that works in the caller's process alone: a tensor
with a graph there is refused by its path, and a parallel module goes as a `Wrapper`, which runs its bare module.
"""

import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual

from dp_ray.engine import ship
from dp_ray.errors import DataError, ModelError
from dp_ray.tensors.tree import TreeSpec, all_nodes, leaf_keys
from dp_ray.text import a_kind

USUAL_CONTAINERS = {None, tuple, list, dict}
USUAL_VALUES = {type(None), bool, int, float, str}


class Wrapper(nn.Module):
    """Runs the module within it, here: what a parallel module is in a worker."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the bare module returns."""
        return self.module(*args, **kwargs)


# What every module has; all else of a parallel module stays in the caller's process.
OF_MODULES = frozenset(vars(nn.Module()))


class TensorForm(NamedTuple):
    """A tensor of a module without its elements; `strides` are those of its layout in memory."""

    is_parameter: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Structure:
    """A module without the elements of its tensors, pickled; the forms of its tensors are in their order there."""

    number: int
    pickled: bytes
    forms: tuple[TensorForm, ...]


def why_odd(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is whose elements cannot be sent as they are; None if they can."""
    if tensor.is_meta:
        return "a tensor of the meta device, which has no elements"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return a_kind(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor within a transform of torch.func, which cannot go to workers"
    if unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        return "a tensor with a tangent of forward-mode derivatives, which cannot go to workers"
    return f"a tensor of {tensor.dtype}" if tensor.is_quantized else None


def odd_leaf(spec: TreeSpec, leaves: Sequence[Any], above: int = 0) -> tuple[str, str] | None:
    """Return the path of the first leaf whose elements cannot be sent, and what it is; None if all can."""
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (odd := why_odd(leaf)):
            return ".".join(map(str, leaf_keys(spec)[at][above:])), odd
    return None


class NotByValue(Exception):
    """A tensor was found that must not go by value."""

    def __init__(self, path: str = "", kind: str = "") -> None:
        super().__init__(path, kind)
        self.path = path
        self.kind = kind  # of the object that holds it


class _Digest:
    """A file that keeps no more than a digest of what is written."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        """Take some bytes in."""
        self.hash.update(data)
        return len(data)


def _by_content(value: Any) -> Any:
    """Return how an object is put together again: a tensor by its content, a parallel module as a `Wrapper`."""
    if isinstance(value, Wrapper) and type(value) is not Wrapper:
        return _bare_wrapper, (), {key: attribute for key, attribute in vars(value).items() if key in OF_MODULES}
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and not value.is_meta:
        return _of_file, (_as_file(value), value.requires_grad)
    return ship.reduced(value)


def _bare_wrapper() -> Wrapper:
    return Wrapper.__new__(Wrapper)


def _as_file(tensor: torch.Tensor) -> bytes:
    """Return a tensor as bytes that tell its content alone; torch's usual pickle also tells where its memory is."""
    tensor = tensor.detach()
    with io.BytesIO() as file:
        torch.save(tensor.clone() if tensor.layout is torch.strided else tensor, file)
        return file.getvalue()


def _of_file(data: bytes, requires_grad: bool) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(data))
    return tensor.requires_grad_(requires_grad)


def dumped(value: Any, base: Any, name: Callable[[Any], Any] = lambda _: None) -> bytes:
    """Pickle a value for workers, by a subclass of the pickler `base`; what `name` gives a name stands apart."""
    return ship.shipped_bytes(value, base, name, _by_content)


def digest(value: Any, base: Any, name: Callable[[Any], Any]) -> bytes:
    """Return a digest of what `dumped` returns, which takes no memory."""
    file = _Digest()
    ship.dump(value, file, base, name, _by_content)
    return file.hash.digest()


def dumped_output(spec: TreeSpec, leaves: Sequence[Any], base: Any, with_graph: bool) -> bytes:
    """Pickle an output's spec.

    Raises ModelError, with its path, for what cannot be sent, and for a graph that would be lost.
    """
    if odd := odd_leaf(spec, leaves):
        raise ModelError(f"output {odd[0]!r} is {odd[1]}: return a dense tensor")
    try:
        return _dumped_tree(spec, base, with_graph)
    except NotByValue as refused:
        raise ModelError(
            f"output {refused.path!r} has a graph, which would be lost: it is in a {refused.kind}, which comes by "
            "value; return the tensor itself, and make the object of it in your process"
        ) from None


def dumped_input(spec: TreeSpec, leaves: Sequence[Any], base: Any, with_graph: bool) -> bytes:
    """Pickle the spec of (args, kwargs).

    Raises DataError, with its path, for what cannot be sent, and for a tensor that would get no gradient.
    """
    if odd := odd_leaf(spec, leaves, above=1):
        raise DataError(f"input {odd[0]!r} is {odd[1]}: pass a dense tensor")
    try:
        return _dumped_tree(spec, base, with_graph, above=1)
    except NotByValue as refused:
        raise DataError(
            f"input {refused.path!r} wants a gradient, which would not come to it: it is in a {refused.kind}, which "
            "each shard gets by value; pass the tensor itself, alone or in a tuple, list, dict or dataclass, or call "
            "the module under torch.no_grad()"
        ) from None
    except Exception as error:  # a user's class may raise any
        raise DataError(
            f"input {_unpicklable(spec, base)!r}: cannot be pickled for the workers: {type(error).__name__}: {error}"
        ) from error


def _is_usual(spec: TreeSpec) -> bool:
    """Return whether a tree holds no object and no class but Python's own."""
    return all(
        node.container in USUAL_CONTAINERS and {type(node.value), *map(type, node.keys)} <= USUAL_VALUES
        for _, node in all_nodes(spec)
    )


def _dumped_tree(spec: TreeSpec, base: Any, with_graph: bool, above: int = 0) -> bytes:
    """Pickle a tree's spec.

    With a graph, raises NotByValue if an object in it holds a tensor that wants a gradient: it is no leaf of the
    tree, so none would come to it. The path leaves out the first `above` keys.
    """
    if _is_usual(spec):  # most are, and need none of what takes long
        return pickle.dumps(spec, 5)
    if not with_graph:
        return dumped(spec, base)
    try:
        return dumped(spec, base, _refuse_wanting)
    except NotByValue as refused:
        for keys, node in all_nodes(spec):
            if node.kind == "constant" and (inner := _wanting(node.value, base)) is not None:
                path = ".".join(map(str, keys[above:])) + inner
                raise NotByValue(path.removeprefix("."), type(node.value).__qualname__) from None
        raise refused


def _unpicklable(spec: TreeSpec, base: Any) -> str:
    """Return where in (args, kwargs) an object stands that cannot be pickled."""
    for keys, node in all_nodes(spec):
        if node.kind == "constant":
            try:
                dumped(node.value, base)
            except Exception:
                return ".".join(map(str, keys[1:]))
    return ""


def _refuse_wanting(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise NotByValue("", type(value).__qualname__)


def _wanting(value: Any, base: Any) -> str | None:
    """Return where in an object is a tensor that wants a gradient; None if there is none."""
    if isinstance(value, nn.Module):
        return next((f".{name}" for name, parameter in value.named_parameters() if parameter.requires_grad), None)
    found = ship.part_that_fails(value, lambda value: dumped(value, base, _refuse_wanting))
    if found is None or not isinstance(found[2], NotByValue):
        return None
    return found[0] if found[0].startswith("[") or not found[0] else f".{found[0]}"


class Made(NamedTuple):
    """A module as it has come to a worker."""

    module: nn.Module
    elsewhere: frozenset[int]  # the tensors that stand in another place than as parameter or buffer too, as in a list


def made(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Made:
    """Make a module of these tensors.

    To replace some of those that stand `elsewhere` make the module anew: its other objects begin as they came.
    """
    counts: Counter[int] = Counter()  # how often each stands in it

    def part(index: int) -> torch.Tensor:
        counts[index] += 1
        return tensors[index]

    module = ship.loaded(pickled, part)
    registered = Counter(
        id(tensor) for each in module.modules() for tensor in [*each._parameters.values(), *each._buffers.values()]
    )
    elsewhere = (at for at, count in counts.items() if count > registered[id(tensors[at])])
    return Made(module, frozenset(elsewhere))
