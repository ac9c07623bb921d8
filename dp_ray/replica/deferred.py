"""Build a model without its memory: record how its tensors are made, and make them later, one after another.

`record` runs a constructor with all tensors on torch's meta device, and notes each operation. `replay` runs the notes
for real, in the same order, and so draws the same random numbers. It hands each tensor over after the last operation
on it, and frees it. An operation whose result is overwritten later only advances the random numbers. So most models
are made with the memory of one tensor at a time, and with the bits of a plain constructor.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

META = torch.device("meta")
# Factories whose numbers constructors read, for tables of positions and rates: they are small, and made at once.
AT_ONCE = {"arange", "linspace", "logspace"}
OVERWRITES = {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "cauchy_", "log_normal_"}

# Functions of torch.nn.init that draw again until the numbers are within bounds, and that do nothing on meta tensors.
BY_REJECTION = ("_no_grad_trunc_normal_",)


class CannotDefer(Exception):
    """A constructor does what cannot be recorded."""


@dataclass(frozen=True)
class Ref:
    """A tensor of the recording: a view of the memory number `memory`."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in its memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """One operation; `args` and `kwargs` hold Refs for tensors. `made` are its results, with their places."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[tuple[int, int], ...]  # place among the results, memory
    overwrites: int | None
    is_random: bool

    @property
    def touched(self) -> frozenset[int]:
        """All memory that it reads, writes or makes."""
        return self.reads | self.writes | {memory for _, memory in self.made}

    @property
    def can_be_skipped(self) -> bool:
        """Whether its effect on the random numbers does not depend on what it reads."""
        return not self.is_random or self.overwrites is not None or not self.reads


@dataclass
class Recording:
    """The operations of a constructor, and the bytes of each memory."""

    operations: list[Operation] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def memory_of(self, tensor: torch.Tensor) -> int:
        """The number of a meta tensor's memory; a new one if it was not seen before."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)  # kept, so that no other memory gets its number
        return self._numbers[storage._cdata]

    def ref(self, tensor: torch.Tensor) -> Ref:
        """What `replay` needs to make the tensor again."""
        geometry = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return Ref(self.memory_of(tensor), tensor.dtype, *geometry)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory was seen before."""
        return tensor.untyped_storage()._cdata in self._numbers


class Memories(dict[int, torch.UntypedStorage]):
    """The memory that is made and not handed over yet, by its number."""


class AsIfReal(TorchFunctionMode):
    """Says that a tensor is on the CPU: constructors of torch and of others leave meta tensors alone."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if function == torch.Tensor.device.__get__ and _is_meta(args[0]):
            return torch.device("cpu")
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation on the meta device, and notes it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = _tensors((args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if _name(function) in AT_ONCE or (given and not any(_is_meta(one) for one in given)):
            if is_random:
                raise CannotDefer(f"{function} draws random numbers into a tensor of plain values")
            return function(*args, **kwargs)
        if any(isinstance(one, torch.Generator) for one in tree_flatten((args, kwargs))[0]):
            raise CannotDefer(f"{function} draws from a generator of its own")
        noted = tree_map(self._noted, (args, kwargs))
        known = [self._recording.memory_of(one) for one in given if _is_meta(one)]
        on_meta = {**kwargs, "device": META} if _takes_device(function) else kwargs
        results = function(*tree_map(_as_meta, args), **tree_map(_as_meta, on_meta))
        self._note(function, noted, known, results, is_random)
        return results

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value == META:  # of a copy that names its source's device
            return torch.device("cpu")
        return self._recording.ref(value) if isinstance(value, torch.Tensor) and _is_meta(value) else value

    def _note(self, function: Any, noted: Any, known: list[int], results: Any, is_random: bool) -> None:
        made = []
        for place, result in enumerate(tree_flatten(results)[0]):
            if isinstance(result, torch.Tensor) and _is_meta(result) and not self._recording.knows(result):
                made.append((place, self._recording.memory_of(result)))
        args, kwargs = noted
        written = frozenset(one.memory for one in _written(function, args, kwargs))
        if not made and not written:
            return  # a view, of which a Ref says all
        overwritten = self._overwritten(function, args)
        reads = frozenset(known) - ({overwritten} if overwritten is not None else set())
        self._recording.operations.append(
            Operation(function, args, kwargs, reads, written, tuple(made), overwritten, is_random)
        )

    def _overwritten(self, function: Any, args: Any) -> int | None:
        """The memory of which the operation replaces every byte."""
        if _name(function) not in OVERWRITES or not isinstance(args[0], Ref):
            return None
        first = args[0]
        count = 1
        for size in first.size:
            count *= size
        spans = {stride for size, stride in zip(first.size, first.stride, strict=True) if size > 1}
        is_whole = count * first.dtype.itemsize == self._recording.storages[first.memory].nbytes() and 0 not in spans
        others = [one for one in tree_flatten(list(args[1:]))[0] if isinstance(one, Ref)]
        return first.memory if is_whole and all(one.memory != first.memory for one in others) else None


@contextmanager
def _whole_initialisers(recording: Recording) -> Iterator[None]:
    """Note these functions of torch as one operation each: their steps depend on the numbers that they draw."""
    before = {name: getattr(init, name) for name in BY_REJECTION if hasattr(init, name)}
    try:
        for name, function in before.items():
            setattr(init, name, _noting(function, recording))
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)


def _noting(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_meta(tensor) or kwargs.get("generator") is not None:
            raise CannotDefer(f"{function.__name__} of a plain tensor, or with a generator of its own")
        ref = recording.ref(tensor)
        is_whole = tensor.is_contiguous() and tensor.nbytes == recording.storages[ref.memory].nbytes()
        reads = frozenset(() if is_whole else (ref.memory,))
        written, overwritten = frozenset((ref.memory,)), ref.memory if is_whole else None
        recording.operations.append(
            Operation(function, (ref, *args), kwargs, reads, written, (), overwritten, is_random=True)
        )
        return tensor

    return noted


def record(build: Callable[[], Any]) -> tuple[Any, Recording]:
    """What `build` returns, its tensors on the meta device, and how they are made.

    Raises CannotDefer if a constructor reads numbers of its tensors, or does something else that needs them.
    """
    recording = Recording()
    try:
        with Recorder(recording), AsIfReal(), _whole_initialisers(recording):
            return build(), recording
    except CannotDefer:
        raise
    except Exception as error:
        raise CannotDefer(f"{type(error).__name__}: {error}") from error


def replay(recording: Recording, wanted: Sequence[int], ready: Callable[[int, torch.UntypedStorage], None]) -> None:
    """Make the tensors; `ready` gets each `wanted` memory when it is made, after which it is freed."""
    needed = _needed(recording, set(wanted))
    last = {memory: at for at, one in enumerate(recording.operations) if needed[at] for memory in one.touched}
    real = Memories()
    for at, one in enumerate(recording.operations):
        if not needed[at] and not one.is_random:
            continue
        _run(one, recording, real if needed[at] else Memories())
        for memory in [memory for memory in one.touched if last.get(memory) == at and needed[at]]:
            storage = real.pop(memory, None)
            if memory in wanted and storage is not None:
                ready(memory, storage)


def _needed(recording: Recording, live: set[int]) -> list[bool]:
    """Which operations matter to the memory that is wanted at the end; the others' results are overwritten."""
    needed = []
    for one in reversed(recording.operations):
        made = {memory for _, memory in one.made}
        matters = bool((one.writes | made) & live) or not one.can_be_skipped
        if matters:
            live -= made
            live -= {one.overwrites} if one.overwrites is not None else set()
            live |= one.reads
        needed.append(matters)
    return needed[::-1]


def _run(one: Operation, recording: Recording, real: dict[int, torch.UntypedStorage]) -> None:
    def made(value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        if value.memory not in real:
            size = recording.storages[value.memory].nbytes()
            real[value.memory] = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        return value.of(real[value.memory])

    with torch.no_grad():
        results = tree_flatten(one.function(*tree_map(made, one.args), **tree_map(made, one.kwargs)))[0]
    for place, memory in one.made:
        real[memory] = results[place].untyped_storage()


def _is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever `AsIfReal` says."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, torch.Tensor)]


def _as_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) and not _is_meta(value) else value


def _name(function: Any) -> str:
    return str(function._schema.name).rpartition("::")[2]


def _takes_device(function: Any) -> bool:
    return any(one.name == "device" for one in function._schema.arguments)


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Ref]:
    """The arguments that an operation changes."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (one for one in tree_flatten(value)[0] if isinstance(one, Ref))
