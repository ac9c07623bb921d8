"""The messages between a parallel module and its workers. They hold tensors as bytes, which travel without a copy.

>>> unpacked(packed(torch.ones(2, dtype=torch.bfloat16)))
tensor([1., 1.], dtype=torch.bfloat16)
"""

import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.engine.forward.call_state import Written
from dp_ray.engine.host_copy import HostCopy
from dp_ray.engine.ship import IN_LINE_BYTES
from dp_ray.engine.world import is_gpu
from dp_ray.messages import WorkerPlace
from dp_ray.process.modes import Modes
from dp_ray.serving.shipped import Structure, TensorForm
from dp_ray.tensors.flat import FlatLayout, Form, HasForm, as_bytes

Bytes: TypeAlias = np.typing.NDArray[np.uint8] | bytearray
ADDS_NOTHING = -0.0  # added to any number, it changes no bit


@dataclass(eq=False)
class ServingWorker:
    """A worker, as the driver sees it; `loaded` is the last version of each module that it has taken in."""

    place: WorkerPlace
    loaded: dict[int, Any] = field(default_factory=dict)  # by the module's number


class Lost(NamedTuple):
    """The answer of a worker that is gone."""

    why: str


class Packed(NamedTuple):
    """A tensor's elements, contiguous, as Bytes; of a numpy array the dtype is None, and `data` the array itself."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    data: Any


class _Writable:
    """The memory of an array that numpy holds as read-only, as of an object of Ray."""

    def __init__(self, data: np.typing.NDArray[np.uint8]) -> None:
        self.holder = data
        interface = data.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def packed(leaf: torch.Tensor | np.typing.NDArray[Any]) -> Packed:
    """Return a tensor or an array as bytes: of a large contiguous one on the host its own memory, else of a copy."""
    if isinstance(leaf, np.ndarray):
        return Packed(None, leaf.shape, leaf)
    tensor = leaf.detach().resolve_conj().resolve_neg()
    if is_gpu(tensor.device):
        tensor = HostCopy(tensor.contiguous()).wait()
    elements = as_bytes(tensor).numpy()
    # To pickle a bytearray takes a tenth of the time of an array.
    data = bytearray(elements) if elements.nbytes < IN_LINE_BYTES else elements
    return Packed(tensor.dtype, tuple(tensor.shape), data)


def unpacked(given: Packed) -> Any:
    """Return the tensor, a view of the bytes, which nobody may write to; or the array."""
    if given.dtype is None:
        return given.data
    if not len(given.data):  # torch takes no empty buffer
        elements = torch.empty(0, dtype=torch.uint8)
    elif isinstance(given.data, bytearray):
        elements = torch.frombuffer(given.data, dtype=torch.uint8)
    else:  # torch would warn that it cannot know of memory that must not be written to
        elements = torch.from_numpy(np.asarray(_Writable(given.data)))
    return elements.view(given.dtype).view(given.shape)


def owned(given: Packed, device: torch.device) -> Any:
    """Return what was packed in memory of its own, on the device; an array as one that may be written to."""
    if given.dtype is None:
        return np.array(given.data)
    tensor = unpacked(given)
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor.clone()


class WholeModule(NamedTuple):
    """A module as most workers have it, for one that has it not; without `data` if none has it."""

    structure: Structure
    data: Bytes | None  # the elements of all tensors


@dataclass(frozen=True)
class Sync:
    """What a worker takes in before a call of a module.

    First it drops the graphs of calls that nobody waits for, and modules that are closed. Then it takes the module
    as it is on others, `whole`. `changed` are the indices of the tensors that get new elements: they come to rank 0
    as `data`, which sends them on to all others.
    """

    module_number: int
    whole: WholeModule | None = None
    changed: tuple[int, ...] = ()
    data: Bytes | None = None
    dropped: tuple[int, ...] = ()  # numbers of calls of this module
    closed: tuple[int, ...] = ()  # numbers of modules


@dataclass(frozen=True)
class ShardInput:
    """The leaves of a shard's (args, kwargs)."""

    shard: int
    seed: int
    leaves: tuple[Packed, ...]


@dataclass(frozen=True)
class Forward:
    """Run these shards of a call; their graphs stay if `modes` enable gradients and an output has one.

    The answer is a list of ForwardResult, Raised or PeerLost.
    """

    call_number: int
    sync: Sync
    modes: Modes
    spec: bytes | None  # of (args, kwargs), pickled; None in a message that only brings what `sync` holds
    requires_grad: frozenset[int]  # the indices of the leaves that want a gradient
    shards: tuple[ShardInput, ...]


@dataclass(frozen=True)
class ForwardResult:
    """The output of a shard, and which of its leaves have a graph; `text` is what user code printed.

    `tree` is the output's spec, pickled, since user classes may be in it.
    `sparse` are the indices, among the trained parameters, of those with sparse gradients.
    """

    shard: int
    tree: bytes
    leaves: tuple[Packed, ...]
    requires_grad: tuple[bool, ...]
    seconds: float
    text: str
    sparse: frozenset[int]
    written: tuple[Written, ...]  # of shard 0, with packed values


@dataclass(frozen=True)
class Backward:
    """Run these shards' backwards of a module's call, and sum the parameters' gradients.

    `gradients` holds for each shard that of each output leaf, None for one without. All workers take part in the
    sum: `owners` are the ranks that ran the shards, and `lengths` those of the vectors by dtype, of `VectorLayout`.
    The answer is BackwardResult, Raised or PeerLost.
    """

    module_number: int
    call_number: int
    keep_graph: bool
    gradients: Mapping[int, tuple[Packed | None, ...]]
    owners: Mapping[int, int]
    shards: int  # of the call, with those that have no rows
    lengths: Mapping[torch.dtype, int]
    sparse: Mapping[int, TensorForm]  # the parameters with sparse gradients, by index
    threads: int | None  # with `bitwise`: then each shard is a leaf of the tree, else each worker's sum


@dataclass(frozen=True)
class HeldBytes:
    """Tell how many bytes the graphs of a module hold."""

    module_number: int


class SparseParts(NamedTuple):
    """A coalesced sparse tensor."""

    indices: Packed
    values: Packed
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BackwardResult:
    """A worker's part of a backward's result: its shards' gradients of input leaves, and its slice of each sum.

    Rank 0 has the sums of the sparse ones, by the parameter's index.
    """

    inputs: Mapping[int, Mapping[int, Packed | None]]  # by shard, and by the leaf's index
    slices: tuple[Packed, ...]
    sparse: Mapping[int, SparseParts | Packed]
    text: str  # what user code printed


@dataclass(frozen=True)
class Raised:
    """User code raised for a shard; the exception is None if it cannot be pickled.

    The worker still has the module as it was sent, if it `has_module`. `text` is what user code printed until then.
    """

    shard: int | None
    error: str  # what raised, the exception, and dtypes and sizes of the shard's inputs
    frames: str
    exception: bytes | None
    has_module: bool
    text: str


@dataclass(frozen=True)
class PeerLost:
    """A collective failed, since another worker is gone; this worker has left the group."""

    line: str


def framed(value: Any) -> Any:
    """Return a value as bytes, or as a list of bytes and large arrays, which Ray ships in little time.

    Its classes must be ones that can be imported.
    """
    large: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_LINE_BYTES:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    head = pickle.dumps(value, 5, buffer_callback=is_small)
    return [head, *large] if large else head


def unframed(given: Any) -> Any:
    """Return the value that was framed; its large arrays must not be written to."""
    if isinstance(given, bytes):
        return pickle.loads(given)
    return pickle.loads(given[0], buffers=given[1:])


def has_left(answer: Any) -> bool:
    """Return whether a worker that answers so is gone, or has left the group, which then has to be formed anew."""
    return isinstance(answer, Lost | PeerLost) or (isinstance(answer, Raised) and not answer.has_module)


class VectorLayout:
    """Where gradients stand in flat vectors, one for each dtype, so that few messages carry their sum.

    Complex ones stand as pairs of real numbers. At the end of the first vector stands of how many shards each
    parameter has a gradient. `sparse` ones stand nowhere. A vector's length is a multiple of `parts`.
    """

    def __init__(self, forms: Sequence[HasForm], sparse: Collection[int], parts: int) -> None:
        self._indices: dict[torch.dtype, list[int]] = {}
        for index, form in enumerate(forms):
            if index not in sparse:
                real = form.dtype.to_real() if form.dtype.is_complex else form.dtype
                self._indices.setdefault(real, []).append(index)
        self._indices = self._indices or {torch.float32: []}
        first = next(iter(self._indices))
        of_counts = Form(torch.Size((len(forms),)), first)
        self._layouts = {
            dtype: FlatLayout([*(forms[index] for index in indices), *([of_counts] if dtype is first else [])])
            for dtype, indices in self._indices.items()
        }
        self.lengths = {
            dtype: -(-layout.nbytes // (dtype.itemsize * parts)) * parts for dtype, layout in self._layouts.items()
        }

    def put(self, vectors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Lay out a shard's gradients; a parameter that the shard has not used leaves the vectors as they are."""
        counts: list[torch.Tensor] = [torch.tensor([float(gradient is not None) for gradient in gradients])]
        for vector, layout, indices in zip(vectors, self._layouts.values(), self._indices.values(), strict=True):
            own = [gradients[index] for index in indices]
            dense = [None if one is None else one.to_dense() if one.is_sparse else one for one in own]
            layout.put(vector, [*dense, *counts])
            counts = []

    def views(self, vectors: Iterable[torch.Tensor]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return a view of each gradient in the vectors, by its index, and of the counts."""
        found: dict[int, torch.Tensor] = {}
        counts: torch.Tensor | None = None
        for vector, (dtype, layout) in zip(vectors, self._layouts.items(), strict=True):
            parts = layout.views(vector)
            found.update(zip(self._indices[dtype], parts, strict=False))
            counts = parts[-1] if counts is None else counts
        assert counts is not None
        return found, counts


def parts_of(tensor: torch.Tensor) -> SparseParts | Packed:
    """Pack a coalesced sparse gradient; it may be dense on some worker."""
    if not tensor.is_sparse:
        return packed(tensor)
    return SparseParts(packed(tensor.indices()), packed(tensor.values()), tuple(tensor.shape))


def of_parts(parts: SparseParts | Packed, device: torch.device) -> torch.Tensor:
    """Return a gradient that `parts_of` has packed."""
    if not isinstance(parts, SparseParts):
        dense: torch.Tensor = owned(parts, device)
        return dense
    indices, values = owned(parts.indices, device), owned(parts.values, device)
    return torch.sparse_coo_tensor(indices, values, parts.shape, is_coalesced=True, check_invariants=False)
