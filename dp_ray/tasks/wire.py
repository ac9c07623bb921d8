"""The messages between a parallel module and its workers. They hold tensors as bytes, which Ray ships without a copy.

>>> unpacked(packed(torch.ones(2, dtype=torch.bfloat16)))
tensor([1., 1.], dtype=torch.bfloat16)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.engine.host_copy import HostCopy
from dp_ray.engine.world import is_gpu
from dp_ray.plan.tree import Node, Transfer
from dp_ray.tensors.flat import as_bytes

Bytes: TypeAlias = np.typing.NDArray[np.uint8]


class Packed(NamedTuple):
    """A tensor's elements, contiguous, as bytes; of a numpy array the dtype is None, and `data` the array itself."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    data: Any


class _Writable:
    """The memory of an array that numpy holds as read-only, as of an object of Ray."""

    def __init__(self, data: Bytes) -> None:
        self.holder = data
        interface = data.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def packed(leaf: torch.Tensor | np.typing.NDArray[Any]) -> Packed:
    """Return a tensor or an array as bytes: on the host a contiguous one's own memory, else of a copy."""
    if isinstance(leaf, np.ndarray):
        return Packed(None, leaf.shape, leaf)
    tensor = leaf.detach().resolve_conj().resolve_neg()
    if is_gpu(tensor.device):
        tensor = HostCopy(tensor.contiguous()).wait()
    return Packed(tensor.dtype, tuple(tensor.shape), as_bytes(tensor).numpy())


def unpacked(given: Packed) -> Any:
    """Return the tensor, a view of the bytes, which nobody may write to; or the array."""
    if given.dtype is None:
        return given.data
    # torch would warn that it cannot know of memory that must not be written to.
    writable: Bytes = np.asarray(_Writable(given.data))
    return torch.from_numpy(writable).view(given.dtype).view(given.shape)


def owned(given: Packed, device: torch.device) -> Any:
    """Return what was packed in memory of its own, on the device; an array as one that may be written to."""
    if given.dtype is None:
        return np.array(given.data)
    tensor = unpacked(given)
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor.clone()


class TensorForm(NamedTuple):
    """A parameter or buffer of a module without its elements; `strides` are those of its layout in memory."""

    is_parameter: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Structure:
    """A module without the elements of its tensors, pickled; the forms of its tensors are in their order there."""

    number: int
    pickled: bytes
    forms: tuple[TensorForm, ...]


@dataclass(frozen=True)
class Sync:
    """What a worker takes in before a call of module `module`.

    First it drops the graphs of calls that nobody waits for, and modules that are closed. `changed` are the numbers
    of the tensors that get new elements: they come to rank 0 as `data`, which sends them on to all others.
    """

    module: int
    structure: Structure | None = None
    changed: tuple[int, ...] = ()
    data: Bytes | None = None
    dropped: tuple[int, ...] = ()  # calls of this module
    closed: tuple[int, ...] = ()  # modules


@dataclass(frozen=True)
class Modes:
    """The settings of the caller's thread and module under which a forward runs.

    `training` is that of each submodule, in order. `autocast` maps device types to their dtypes, where it is on.
    """

    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]  # of each tensor of the module
    is_grad_enabled: bool
    is_inference: bool
    autocast: Mapping[str, torch.dtype]
    default_dtype: torch.dtype
    threads: int | None  # torch's, with `bitwise`


@dataclass(frozen=True)
class ShardInput:
    """The leaves of a shard's (args, kwargs)."""

    shard: int
    seed: int
    leaves: tuple[Packed, ...]


@dataclass(frozen=True)
class Forward:
    """Run these shards of call `call`; their graphs stay if `modes` enable gradients and an output has one."""

    call: int
    sync: Sync
    modes: Modes
    spec: bytes | None  # of (args, kwargs), pickled; None in a message that only brings what `sync` holds
    requires_grad: frozenset[int]  # the numbers of the leaves that want a gradient
    shards: tuple[ShardInput, ...]


class NewBuffer(NamedTuple):
    """A buffer that a call has changed: its tensor's number, and which of that tensor's places hold the new one."""

    number: int
    places: tuple[int, ...]
    elements: Packed


@dataclass(frozen=True)
class ShardOutput:
    """The output of a shard, and which of its leaves have a graph; `text` is what user code printed.

    `tree` is pickled, since user classes may be in it: the output's spec, and the sizes of inputs and outputs.
    """

    shard: int
    tree: bytes
    leaves: tuple[Packed, ...]
    requires_grad: tuple[bool, ...]
    seconds: float
    text: str
    buffers: tuple[NewBuffer, ...]  # of shard 0


@dataclass(frozen=True)
class Backward:
    """Run these shards' backwards of a module's call, and sum the parameters' gradients by `transfers`.

    `gradients` holds for each shard that of each output leaf, None for one without. The worker of rank `root` returns
    the sum.
    """

    module: int
    call: int
    keep_graph: bool
    gradients: Mapping[int, tuple[Packed | None, ...]]
    nodes: Mapping[int, Node]  # the leaf of the tree to which each shard belongs
    transfers: tuple[Transfer, ...]
    top: Node
    root: int
    threads: int | None


@dataclass(frozen=True)
class Gradients:
    """A worker's part of a backward's result: its shards' gradients of input leaves, and of rank `root` the sum."""

    inputs: Mapping[int, Mapping[int, Packed | None]]  # by shard, and by the leaf's number
    sum: "PackedSum | None"


class SparseParts(NamedTuple):
    """A coalesced sparse tensor."""

    indices: Packed
    values: Packed
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedSum:
    """The sum of gradients: a vector for each dtype, as `gradients.Sum` lays them out, and the sparse ones."""

    flats: tuple[Packed, ...]
    sparse: Mapping[int, SparseParts | Packed | None]


@dataclass(frozen=True)
class Raised:
    """User code raised for a shard; the exception is None if it cannot be pickled."""

    shard: int | None
    what: str  # where: the model, its backward, or the making of the module
    text: str  # the exception's type and text
    got: str  # dtypes and sizes of the shard's inputs
    frames: str
    exception: bytes | None


@dataclass(frozen=True)
class PeerLost:
    """A collective failed, since another worker is gone; this worker has left the group."""

    line: str
