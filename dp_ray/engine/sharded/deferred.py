"""Build a model without its memory: record how its tensors are made, and make them later, one after another.

`record` runs a constructor with all tensors on torch's meta device, and notes each operation. `perform` runs them
for real, in the same order, and so draws the same random numbers. It yields each tensor after the last operation on
it. An operation whose result is overwritten later only advances the random numbers. So most models are made with the
memory of one tensor at a time, and with the bits of a plain constructor.

torch answers some questions about a meta tensor otherwise than about a real one, without an error. While a
constructor is recorded, they are answered as if the tensor were on the CPU, or end the recording.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from dp_ray.engine.world import CPU
from dp_ray.errors import ModelError
from dp_ray.tensors.files import is_dense

META = torch.device("meta")
Tensor = torch.Tensor


class CannotDefer(Exception):
    """An action of a constructor that cannot be recorded."""


@dataclass(frozen=True)
class Ref:
    """A tensor of the recording: a view of the memory number `memory`."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in its memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """One operation; `args` and `kwargs` hold Refs for tensors. `made` are its results, with their places."""

    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[tuple[int, Ref], ...]  # place among the results, the result
    overwrites: int | None
    is_random: bool
    default: torch.dtype  # of numbers that have no other

    @property
    def touched(self) -> frozenset[int]:
        """Return all memory that it reads, writes or makes."""
        return self.reads | self.writes | {ref.memory for _, ref in self.made}


@dataclass
class Recording:
    """The operations of a constructor, the bytes of each memory, and the first error.

    The constructor, or torch, may catch an error and go on another way. Without `exact`, a recording need only have
    the right sizes and types, and not the numbers. It draws a number for each operation that will: so it sees by the
    state of torch's random numbers whether others draw or set them.
    """

    exact: bool = True
    operations: list[Operation] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    first_error: Exception | None = None
    _numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = self._drawn = torch.default_generator.get_state()

    def refuse(self, reason: str) -> None:
        """Raise CannotDefer, because of the numbers."""
        if self.exact:
            raise CannotDefer(reason)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the block's error."""
        try:
            yield
        except Exception as error:
            self.first_error = self.first_error or error
            raise

    def check_random(self) -> None:
        """Raise CannotDefer if the state of the random numbers is not that of the last draw."""
        with plainly():
            if not torch.equal(torch.default_generator.get_state(), self._drawn):
                self.refuse("it seeds or sets torch's random numbers, or draws them in a thread")

    def restore_random(self) -> None:
        """Go back to the state of the random numbers before the recording."""
        torch.default_generator.set_state(self._random)

    def memory_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a meta tensor's memory; a new one if it was not seen before."""
        storage = _storage(tensor)
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)  # kept, so that no other memory gets its number
        return self._numbers[storage._cdata]

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Return what makes the tensor again in `perform`; raise CannotDefer if no operation made its memory."""
        if not self.knows(tensor):
            self.refuse("it has memory that no recorded operation has made")
        if tensor.is_conj() or tensor.is_neg():
            self.refuse("it keeps a conjugate, or an imaginary part of one, as a view")
        geometry = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return Ref(self.memory_of(tensor), tensor.dtype, *geometry)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory was seen before."""
        return _storage(tensor)._cdata in self._numbers

    def alive(self) -> list[torch.Tensor]:
        """Return the recorded tensors that anything in this process keeps."""
        tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
        return [tensor for tensor in tensors if tensor.device == META and self.knows(tensor)]

    def add(self, operation: Operation) -> None:
        """Note an operation that ran."""
        if operation.is_random:
            self.check_random()
            with plainly():
                torch.rand(())
                self._drawn = torch.default_generator.get_state()
        self.operations.append(operation)


def record(build: Callable[[], Any], exact: bool = True) -> tuple[Any, Recording]:
    """Return what `build` returns, its tensors on the meta device, and how they are made.

    Raises CannotDefer if a constructor reads numbers of its tensors, or otherwise needs them, even if it, or torch,
    caught the error. The random state is afterwards as before. Without `exact`, only the sizes and types of the
    tensors are wanted, and a constructor that needs numbers is no error.
    """
    recording = Recording(exact=exact)
    built = None
    try:
        with OperationRecorder(recording), AsIfReal(recording), _replaced(recording):
            built = build()
        recording.check_random()
        failed = recording.first_error if exact else None
    except Exception as error:
        failed = recording.first_error or error
    finally:
        recording.restore_random()
    if failed is not None:
        reason = str(failed) if isinstance(failed, CannotDefer) else f"{type(failed).__name__}: {failed}"
        raise CannotDefer(reason) from failed
    return built, recording


class Memories(dict[int, torch.UntypedStorage]):
    """The memory that is made and not handed over yet, by its number."""


def perform(recording: Recording, wanted: Sequence[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Make the tensors; yield each `wanted` memory, by its number, when it is made. It is not kept after that."""
    needed = _needed(recording, set(wanted))
    last = {memory: at for at, op in enumerate(recording.operations) if needed[at] for memory in op.touched}
    storages, missing = Memories(), set(wanted)
    for at, op in enumerate(recording.operations):
        if not needed[at] and not op.is_random:
            continue
        _run(op, recording, storages if needed[at] else Memories())
        for memory in [memory for memory in op.touched if last.get(memory) == at and needed[at]]:
            storage = storages.pop(memory, None)
            if memory in missing and storage is not None:
                missing.remove(memory)
                yield memory, storage
            del storage
    if missing:
        raise ModelError(
            f"{len(missing)} of the model's tensors have memory that no operation of its constructor made"
        )


def _needed(recording: Recording, live: set[int]) -> list[bool]:
    """Return which operations matter to the memory that is wanted in the end; the others' results are overwritten."""
    needed = []
    for op in reversed(recording.operations):
        made = {result.memory for _, result in op.made}
        # Its draws may depend on numbers that it reads, as with a rejection: then it must run on the right ones.
        draws_by_reading = op.is_random and op.overwrites is None and bool(op.reads)
        matters = bool((op.writes | made) & live) or draws_by_reading
        if matters:
            live -= made
            live -= {op.overwrites} if op.overwrites is not None else set()
            live |= op.reads
        needed.append(matters)
    return needed[::-1]


def _run(op: Operation, recording: Recording, storages: dict[int, torch.UntypedStorage]) -> None:
    def made(value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        if value.memory not in storages:
            size = recording.storages[value.memory].nbytes()
            storages[value.memory] = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        return value.of(storages[value.memory])

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(op.default)
        with torch.no_grad():
            results = tree_flatten(op.function(*tree_map(made, op.args), **tree_map(made, op.kwargs)))[0]
    finally:
        torch.set_default_dtype(before)
    for place, ref in op.made:
        storages[ref.memory] = _laid_out(results[place], ref, op, recording)


def _laid_out(result: torch.Tensor, ref: Ref, op: Operation, recording: Recording) -> torch.UntypedStorage:
    """Return the memory of a result, which lies there as it did on the meta device."""
    geometry = tuple(result.size()), tuple(result.stride()), int(result.storage_offset())
    if (result.dtype, *geometry) == (ref.dtype, ref.size, ref.stride, ref.offset):
        return result.untyped_storage()
    if result.dtype != ref.dtype or geometry[0] != ref.size:
        raise ModelError(
            f"{op.function} in the model's constructor gave {result.dtype} of shape {list(result.shape)}, and "
            f"{ref.dtype} of shape {list(ref.size)} on the meta device"
        )
    storage = torch.UntypedStorage(recording.storages[ref.memory].nbytes())  # type: ignore[no-untyped-call]
    ref.of(storage).copy_(result)
    return storage


# Factories whose numbers constructors read, for tables of positions and rates: they are small, and made at once.
AT_ONCE = {"arange", "linspace", "logspace"}
WRITES_UNTOLD = {"native_batch_norm": ("running_mean", "running_var")}  # by their schemas they write nothing
OVERWRITES = {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "cauchy_", "log_normal_"}


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs each operation on the meta device, and notes it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._recording.noting(), torch._C.DisableTorchFunction():
            return self._dispatched(function, args, dict(kwargs or {}))

    def _dispatched(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [argument for argument in tree_flatten((args, kwargs))[0] if isinstance(argument, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        _check_moves(function, tensors, kwargs, self._recording)
        if not any(map(is_meta, tensors)) and (tensors or _name(function) in AT_ONCE):
            if is_random:
                raise CannotDefer(f"{function} draws random numbers into a tensor of plain values")
            if kwargs.get("device") == META:  # that of a tensor it goes with
                kwargs["device"] = CPU
            return function(*args, **kwargs)
        if any(isinstance(argument, torch.Generator) for argument in tree_flatten((args, kwargs))[0]):
            raise CannotDefer(f"{function} draws from a generator of its own")
        if not all(map(is_meta, _written(function, args, kwargs, torch.Tensor))):
            self._recording.refuse(f"{function} writes into a tensor of plain values what is known later")
        if _name(function) == "set_" and not all(map(is_meta, tensors)):
            self._recording.refuse(f"{function} gives a recorded tensor the memory of plain values")
        noted = tree_map(self._noted, (args, kwargs))
        takes_device = any(argument.name == "device" for argument in function._schema.arguments)
        on_meta = {**kwargs, "device": META} if takes_device else kwargs
        results = function(*tree_map(_as_meta, args), **tree_map(_as_meta, on_meta))
        self._note(function, noted, results, is_random)
        return results

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value == META:  # of a copy that names its source's device
            return CPU
        if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            self._recording.refuse("it uses the storage of a tensor that is made later")
        if not isinstance(value, torch.Tensor):
            return value
        return self._recording.ref(value) if is_meta(value) else _kept(value)

    def _note(self, function: Any, noted: Any, results: Any, is_random: bool) -> None:
        made = []
        for place, result in enumerate(tree_flatten(results)[0]):
            if isinstance(result, torch.Tensor) and is_meta(result) and not self._recording.knows(result):
                self._recording.memory_of(result)
                made.append((place, self._recording.ref(result)))
        args, kwargs = noted
        written = frozenset(ref.memory for ref in _written(function, args, kwargs, Ref))
        if not made and not written:
            return  # a view: a Ref describes it completely
        known = frozenset(ref.memory for ref in tree_flatten(noted)[0] if isinstance(ref, Ref))
        overwritten = self._overwritten(function, args)
        reads = known - ({overwritten} if overwritten is not None else set())
        default = torch.get_default_dtype()
        self._recording.add(
            Operation(function, args, kwargs, reads, written, tuple(made), overwritten, is_random, default)
        )

    def _overwritten(self, function: Any, args: Any) -> int | None:
        """Return the memory whose bytes the operation replaces, all of them."""
        if _name(function) not in OVERWRITES or not isinstance(args[0], Ref):
            return None
        first = args[0]
        with plainly():
            shape = torch.empty_strided(first.size, first.stride, dtype=first.dtype, device=META)
            is_whole = is_dense(shape) and shape.nbytes == self._recording.storages[first.memory].nbytes()
        others = [ref for ref in tree_flatten(list(args[1:]))[0] if isinstance(ref, Ref)]
        return first.memory if is_whole and all(ref.memory != first.memory for ref in others) else None


def _check_moves(function: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any], recording: Recording) -> None:
    """Refuse a move to another device, and for one that copies here and would copy no real tensor."""
    device = kwargs.get("device")
    if device is None:
        return
    if device.type not in ("cpu", "meta"):
        recording.refuse(f"{function} makes a tensor on {device}")
    is_move = _name(function) == "_to_copy" and is_meta(tensors[0]) != (device == META)
    if is_move and kwargs.get("dtype") in (None, tensors[0].dtype):
        recording.refuse("it moves a tensor to the CPU, where it would be already")


def _written(function: Any, args: Any, kwargs: Any, kind: type) -> Iterator[Any]:
    """Yield the arguments of this `kind` that an operation changes."""
    untold = WRITES_UNTOLD.get(_name(function), ())
    for place, argument in enumerate(function._schema.arguments):
        if argument.name in untold or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (found for found in tree_flatten(value)[0] if isinstance(found, kind))


def _kept(plain: torch.Tensor) -> torch.Tensor:
    """Copy a plain tensor, which may change later, with its strides."""
    plain = plain.detach()
    if plain.layout is not torch.strided or not plain.numel():
        return plain.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(plain.size(), plain.stride(), strict=True))
    return plain.as_strided((extent,), (1,)).clone().as_strided(plain.size(), plain.stride(), 0)


def _as_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) and not is_meta(value) else value


def _name(function: Any) -> str:
    return str(function._schema.name).rpartition("::")[2]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


# Functions that raise no error for a meta tensor, but do something else than for a real one.
READS = {
    Tensor.__repr__: "the text",
    Tensor.__format__: "the text",
    Tensor.data_ptr: "the address",
    Tensor.storage: "the storage",
    Tensor.untyped_storage: "the storage",
    Tensor._typed_storage: "the storage",
    Tensor.apply_: "the numbers",
    Tensor.map_: "the numbers",
    Tensor.map2_: "the numbers",
    Tensor.new: "the type",
}
MOVES = (Tensor.to, Tensor.cpu, Tensor.type_as, torch.as_tensor, torch.asarray)
_ANSWERS = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: CPU,
}


class AsIfReal(TorchFunctionMode):
    """A mode in which meta tensors say that they are on the CPU: else constructors leave them alone.

    Raises CannotDefer for a question that has no right answer, and notes all errors in the recording.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (answer := _ANSWERS.get(function)) is not None and is_meta(args[0]):
            return answer
        with self._recording.noting():
            return self._answer(function, args, kwargs or {})

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = [argument for argument in (*args, kwargs.get("device")) if isinstance(argument, str | torch.device)]
        if any(device in (META, "meta") for device in named):
            self._recording.refuse("it makes tensors on the meta device itself")
        if torch.is_autocast_enabled("cpu"):
            self._recording.refuse("it computes under autocast")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function in MOVES:
            return _move(function, args, kwargs)
        if first is None or not is_meta(first):
            with plainly() if function is Tensor.__deepcopy__ else nullcontext():
                return function(*args, **kwargs)
        if function in READS:
            self._recording.refuse(f"it reads {READS[function]} of a tensor that is made later")
        if function is Tensor.__deepcopy__:
            if type(first) is not Tensor or not first.is_leaf or first.grad is not None or vars(first):
                self._recording.refuse("it copies a tensor with a history or with attributes")
            return _deep_copy(first, *args[1:])
        if function is Tensor.new_tensor:  # torch leaves out the numbers
            return torch.tensor(*args[1:], **{"dtype": first.dtype, **kwargs})
        return function(*args, **kwargs)


def _move(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move to the CPU or to another's device: a real tensor is there, and stays the same memory."""
    first, *others = args
    if not isinstance(first, Tensor):
        return function(*args, **kwargs)
    if function is Tensor.type_as:
        return first.to(others[0].dtype)
    if not is_meta(first):
        return function(first, *[arg.dtype if isinstance(arg, Tensor) else arg for arg in others], **kwargs)
    if function is Tensor.cpu:
        function, kwargs = Tensor.to, {"device": CPU, **kwargs}
    if isinstance(other := kwargs.pop("other", None), Tensor):
        others.insert(0, other)
    return function(first, *map(_staying, others), **{name: _staying(value) for name, value in kwargs.items()})


def _staying(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    is_cpu = isinstance(value, str | torch.device) and torch.device(value).type == "cpu"
    return META if is_cpu else value


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Copy as torch does a real tensor: tensors that share memory share it in the copy."""
    if id(tensor) in memo:
        copied: torch.Tensor = memo[id(tensor)]
        return copied
    copies = memo.setdefault("torch", {})
    with plainly():
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=META).set_(storage, 0, (storage.nbytes(),), (1,))
    if storage._cdata not in copies:
        copies[storage._cdata] = whole.clone()
    with plainly():
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        made = torch.empty(0, dtype=tensor.dtype, device=META).set_(
            copies[storage._cdata].untyped_storage(), *geometry
        )
        made.requires_grad = tensor.requires_grad
    memo[id(tensor)] = made
    return made


# Functions of torch.nn.init that draw again until the numbers are within bounds, and that do nothing on meta tensors.
BY_REJECTION = ("_no_grad_trunc_normal_",)


@contextmanager
def _replaced(recording: Recording) -> Iterator[None]:
    """Replace, while the block runs, functions of torch that neither mode can see into."""
    state = _refusing(torch.get_rng_state, recording, "it reads the state of torch's random numbers")
    kind = _refusing(torch.Tensor.type, recording, "it asks for the type of a tensor that is made later")
    replacements: list[tuple[Any, str, Any]] = [
        (init, name, _note_rejections(getattr(init, name), recording)) for name in BY_REJECTION if hasattr(init, name)
    ]
    replacements += [(torch, "get_rng_state", state), (torch.random, "get_rng_state", state)]
    replacements += [(torch.Tensor, "type", kind)]
    with ExitStack() as stack:
        for owner, name, new in replacements:
            if name in vars(owner):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, new)
        yield


def _note_rejections(function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    """Note a function as one operation: its steps depend on the numbers that it draws."""

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with recording.noting():
            if not is_meta(tensor) or kwargs.get("generator") is not None:
                raise CannotDefer(f"{function.__name__} of a plain tensor, or with a generator of its own")
            ref = recording.ref(tensor)
            is_whole = tensor.is_contiguous() and tensor.nbytes == recording.storages[ref.memory].nbytes()
            reads = frozenset(() if is_whole else (ref.memory,))
            written, overwritten = frozenset((ref.memory,)), ref.memory if is_whole else None
            default = torch.get_default_dtype()
            recording.add(Operation(function, (ref, *args), kwargs, reads, written, (), overwritten, True, default))
        return tensor

    return noted


def _refusing(function: Callable[..., Any], recording: Recording, reason: str) -> Callable[..., Any]:
    """Refuse a function in this thread's recording, except for plain tensors."""
    mine = threading.get_ident()

    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine and not any(
            isinstance(arg, torch.Tensor) and not is_meta(arg) for arg in args
        ):
            with recording.noting():
                recording.refuse(reason)
        return function(*args, **kwargs)

    return refused


@contextmanager
def plainly() -> Iterator[None]:
    """Run the block's operations as plain torch does: nothing is recorded."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        yield


def is_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, whatever `AsIfReal` says."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta))
