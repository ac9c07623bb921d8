"""Copies of a user's objects: one for this process, or one packed for workers.

Both are made by pickle, with the same rules, so that `workers: 0` trains what workers on Ray would. Begin at `copied`
and `pack`. Three things differ from plain pickle. The elements of tensors stand beside the pickled bytes, so that no
more than the copy itself takes memory. Parameters keep their hooks, class and attributes. Objects that torch can copy
but refuses to pickle, like a parametrized module, are taken apart and put together again.
"""

import copyreg
import enum
import functools
import io
import logging
import os
import pickle
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.storage import TypedStorage, UntypedStorage
from torch.utils.hooks import RemovableHandle

from dp_ray.errors import JobError

IN_LINE_BYTES = 4096  # of memory that is as fast to ship with the bytes
STORAGES = (UntypedStorage, TypedStorage)


@dataclass
class PackedObject:
    """An object's pickled bytes, and the memory of its tensors, which is still the object's own.

    Packed itself can be pickled: the memory then goes as arrays, which Ray ships out of band, and what arrives has
    memory of its own.
    """

    head: bytes
    storages: list[UntypedStorage]
    next_hook: int  # the number that torch gives to the next hook of any module or tensor
    held: list[Any]  # objects that a copy in this process shares with the original; empty for another process

    def __reduce__(self) -> Any:
        assert not self.held, "a copy for this process refers to its objects"
        arrays = [(str(storage.device), _elements(storage.cpu())) for storage in self.storages]  # type: ignore[no-untyped-call]
        sent = [(device, array if array.nbytes > IN_LINE_BYTES else array.tobytes()) for device, array in arrays]
        return _arrived, (self.head, sent, self.next_hook)

    def load(self) -> Any:
        """Return the object, with these storages as its memory."""
        # A process that has set no hook numbers its first one 0, and would put it in the place of a carried hook.
        RemovableHandle.next_id = max(RemovableHandle.next_id, self.next_hook)
        return _Unpickler(self).load()


def pack_object(value: Any, pickler: Any) -> PackedObject:
    """Pack an object for another process, by a subclass of cloudpickle's pickler. Raises what that raises."""
    file, storages = io.BytesIO(), _Storages()
    _packer(pickler)(file, storages).dump(value)
    return PackedObject(file.getvalue(), storages.all, RemovableHandle.next_id, [])


def check_packs(value: Any, pickler: Any) -> None:
    """Raise what `pack` raises; this takes no memory."""
    with open(os.devnull, "wb") as nowhere:
        _packer(pickler)(nowhere, _Storages()).dump(value)


def copied_object(value: Any, kept: Iterable[Any] = ()) -> Any:
    """Return a copy for this process, with memory of its own. Raises what pickle raises if there can be none.

    Named objects of a module are not copied: classes, functions, and the globals of functions. The copy also refers
    to the objects `kept` themselves.
    """
    file, packer = io.BytesIO(), _Here(kept)
    packer.dump_to(file, value)
    storages = [storage.clone() for storage in packer.storages.all]  # type: ignore[no-untyped-call]
    return PackedObject(file.getvalue(), storages, RemovableHandle.next_id, packer.held).load()


def reached(value: Any, kept: Iterable[Any] = ()) -> tuple[dict[Any, Any], Exception | None]:
    """Return the parts of an object, by id, that a copy would not share: their holders see no change of it.

    If there can be no copy, also return why.
    """
    packer = _Here(kept, notes=True)
    try:
        packer.dump_to(io.BytesIO(), value)
    except Exception as raised:  # a user's __getstate__ may raise anything
        return packer.noted, raised
    return packer.noted, packer.failed


def refused(key: str, value: Any, error: Exception, dump: Callable[[Any], object]) -> JobError:
    """Return the error of an object of the job's `key` that cannot be pickled; `dump` raises for what cannot."""
    if isinstance(value, nn.Module):
        what = f"{what_fails(value, dump)} cannot be pickled"
    else:
        name, *_ = part_that_fails(value, dump) or ("",)
        what = f"its attribute {name} cannot be pickled" if name else "cannot be pickled"
    advice = "give a function that makes it, like 'module:function', which each worker calls for itself"
    return JobError(f"{key}: {what}: {type(error).__name__}: {error}; {advice}")


def what_fails(module: nn.Module, dump: Callable[[Any], object], with_hooks: bool = True) -> str:
    """Return the name of the first attribute that cannot be pickled, or hook of a parameter; else the class."""

    def parts() -> Iterator[tuple[str, Any]]:
        for name, submodule in module.named_modules():
            for key, value in vars(submodule).items():
                if key not in ("_modules", "_parameters", "_buffers"):
                    yield f"the module's attribute {name}.{key}" if name else f"the module's attribute {key}", value
        for name, parameter in module.named_parameters() if with_hooks else ():
            yield f"a hook of the parameter {name}", _hooks_of(parameter)

    for what, part in parts():
        try:
            dump(part)
        except Exception:  # a user's __getstate__ may raise anything
            return what
    return f"the module, of class {type(module).__qualname__}"


def part_that_fails(value: Any, dump: Callable[[Any], object]) -> tuple[str, Any, Exception] | None:
    """Return which part of a value cannot be pickled, like `inner.db` or `options['key'][0]`, its class, and why.

    The name is empty for the value itself. None if it can be pickled, or if it holds itself.
    """

    def find(value: Any, name: str, above: tuple[int, ...]) -> tuple[str, Any, Exception] | None:
        if id(value) in above:
            return None
        try:
            dump(value)
            return None
        except Exception as error:  # a user's __getstate__ may raise anything
            inner = (find(part, name + key, (*above, id(value))) for key, part in _parts(value))
            return next(filter(None, inner), (name, value, error))

    found = find(value, "", ())
    return found and (found[0].removeprefix("."), *found[1:])


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that its pickle holds, each with how to come from the value to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f".{key}", getattr(value, key)) for key in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, type | types.FunctionType):
        with suppress(Exception):  # as above
            state = value.__getstate__()
            yield from ((f".{key}", inner) for key, inner in (state if isinstance(state, dict) else {}).items())


class _Storages:
    """The memory of tensors, each once: views of one stay views of one."""

    def __init__(self) -> None:
        self.all: list[UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def number(self, storage: Any) -> int:
        """Return the number of a storage."""
        plain = storage._untyped_storage if isinstance(storage, TypedStorage) else storage
        number = self._numbers.setdefault(plain._cdata, len(self.all))
        if number == len(self.all):
            self.all.append(plain)
        return number


def _elements(storage: UntypedStorage) -> np.ndarray[Any, Any]:
    """Return a storage's memory as an array of bytes."""
    array: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


def _arrived(head: bytes, sent: list[tuple[str, Any]], next_hook: int) -> PackedObject:
    storages = []
    for name, raw in sent:
        storage = UntypedStorage(len(raw))  # type: ignore[no-untyped-call]
        # Copied, since an array that Ray hands out is of shared memory, and must not be written.
        _elements(storage)[:] = np.frombuffer(raw, np.uint8)
        device = torch.device(name)
        # The job's devices are chosen later: a worker may see fewer GPUs than the caller, or none.
        is_here = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        storages.append(storage.to(device=device) if is_here else storage)
    return PackedObject(head, storages, next_hook, [])


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: PackedObject) -> None:
        super().__init__(io.BytesIO(packed.head))
        self._packed = packed

    def persistent_load(self, number: Any) -> Any:
        """Return the storage, or the held object, of a number."""
        kind, number, dtype = number
        if kind == "held":
            return self._packed.held[number]
        storage = self._packed.storages[number]
        if dtype is None:
            return storage
        return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


@functools.cache
def _packer(base: Any) -> Any:
    """Return a pickler that carries tensors and modules whole, and leaves all else to its base."""

    class Packer(base):  # type: ignore[misc]
        def __init__(self, file: Any, storages: _Storages) -> None:
            super().__init__(file, protocol=5)
            self._storages = storages

        def persistent_id(self, value: Any) -> Any:
            return _storage_id(value, self._storages) if isinstance(value, STORAGES) else None

        def reducer_override(self, value: Any) -> Any:
            found = reduced(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return Packer


def _storage_id(storage: Any, storages: _Storages) -> tuple[str, int, torch.dtype | None]:
    return "storage", storages.number(storage), storage.dtype if isinstance(storage, TypedStorage) else None


def reduced(value: Any) -> Any:
    """Return how an object is put together again; NotImplemented if the pickler knows."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.jit.ScriptModule):
        return _script(value)
    if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
        return _bare, (parametrize.type_before_parametrizations(value),), vars(value), None, None, _parametrize
    if type(value) is weakref.ref:
        return (weakref.ref, (value(),)) if value() is not None else (_dead_reference, ())
    return NotImplemented


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the dicts of a tensor's hooks, by their attribute; a handle of a hook refers to its dict."""
    return {name: hooks for name in HOOKS if (hooks := getattr(tensor, name, None))} if tensor.is_leaf else {}


def _tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor: torch drops the hooks of each, and the class of a parameter."""
    hooks = _hooks_of(tensor)
    if type(tensor).__reduce_ex__ is nn.Parameter.__reduce_ex__:
        # Its attributes are set once it exists: they may refer to its module.
        state = (torch._utils._get_obj_state(tensor), hooks)  # type: ignore[no-untyped-call]
        made = (type(tensor), tensor.data, tensor.requires_grad)
        return _parameter, made, state if any(state) else None, None, None, _set_state
    if not hooks:
        return NotImplemented
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it drops the hooks
        made_by, args, *rest = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if any(part is not None for part in rest):
        raise pickle.PicklingError(f"a hook of a {type(tensor).__qualname__}, which has a __reduce_ex__ of its own")
    return made_by, args, (None, hooks), None, None, _set_state


def _parameter(kind: type, data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_subclass(kind, data, requires_grad)
    return made


def _set_state(tensor: torch.Tensor, state: tuple[Any, dict[str, Any]]) -> None:
    attributes, hooks = state
    if attributes:
        torch._utils._set_obj_state(tensor, attributes)  # type: ignore[no-untyped-call]
    for name, hook in hooks.items():
        setattr(tensor, name, hook)


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _parametrize(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Make a bare module the parametrized one with these attributes, as torch does: by a class of its own."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _script(module: torch.jit.ScriptModule) -> Any:
    if any(_hooks_of(parameter) for parameter in module.parameters()):
        raise pickle.PicklingError("a hook of a parameter of a TorchScript module")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of all of torch.jit
        torch.jit.save(module, file)
    return _of_script, (file.getvalue(),)


def _of_script(raw: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(io.BytesIO(raw))  # type: ignore[no-untyped-call]


class _Referent:
    """An object for a reference that is dead."""


def _dead_reference() -> Any:
    return weakref.ref(_Referent())


_CONTAINERS = (dict, list, set, bytearray, deque, types.CellType, torch.Tensor, np.ndarray)
_BY_NAME = (enum.Enum, logging.Logger)  # a copy has the same ones


@dataclass(frozen=True)
class _Held:
    """Marks an object that a copy in this process shares."""

    value: Any


class _Here(pickle.Pickler):
    """Pickles for this process: named objects of a module are not copied, functions without a name are."""

    def __init__(self, kept: Iterable[Any], notes: bool = False) -> None:
        self.storages: _Storages
        self.held: list[Any]
        self.noted: dict[Any, Any]  # by identity
        self.failed: Exception | None = None  # why some of it cannot be pickled, if it makes notes
        self._notes = notes
        self._numbers: dict[int, int]
        self._kept = {id(value): value for value in kept}
        self._classes: set[type] = set()

    def dump_to(self, file: io.BytesIO, value: Any) -> None:
        """Pickle a value into a file."""
        self._start(file)
        self.dump(value)
        # Methods of a class that a function has made share variables with hooks that it made. The class stays what it
        # is, so the hooks keep these variables. Which classes there are is known only now.
        if cells := {id(cell): cell for kind in self._classes for cell in _cells(kind)}:
            self._kept |= cells
            file.seek(0)
            file.truncate()
            self._start(file)
            self.dump(value)

    def _start(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.storages, self.held, self.noted, self._numbers = _Storages(), [], {}, {}

    def persistent_id(self, value: Any) -> Any:
        """Return the number of what stands beside the bytes."""
        if isinstance(value, STORAGES):
            number = _storage_id(value, self.storages)
            if self._notes:
                self.noted["storage", self.storages.all[number[1]]._cdata] = value
            return number
        if type(value) is _Held:
            return self._hold(value.value)
        if id(value) in self._kept or isinstance(value, types.ModuleType | types.CodeType | type):
            if isinstance(value, type):
                self._classes.add(value)
            return self._hold(value)
        if isinstance(value, types.FunctionType) and _has_name(value):
            return self._hold(value)
        can_change = isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")
        if self._notes and can_change and not isinstance(value, _BY_NAME):
            self.noted[id(value)] = value
        return None

    def _hold(self, value: Any) -> tuple[str, int, None]:
        number = self._numbers.setdefault(id(value), len(self.held))
        if number == len(self.held):
            self.held.append(value)
        return "held", number, None

    def reducer_override(self, value: Any) -> Any:
        """Return how an object is put together again."""
        if isinstance(value, types.FunctionType):
            made = (value.__code__, _Held(value.__globals__), value.__name__, None, value.__closure__)
            names = ("__defaults__", "__kwdefaults__", "__dict__", "__module__", "__qualname__", "__doc__")
            state: dict[str, Any] = {name: getattr(value, name) for name in names}
            state["__annotations__"] = _Held(value.__annotations__)
            return types.FunctionType, made, state, None, None, _set_attributes
        if isinstance(value, types.CellType):
            try:
                return types.CellType, (), (value.cell_contents,), None, None, _fill
            except ValueError:  # it is empty
                return types.CellType, ()
        if isinstance(value, types.MethodType):  # one that is set on an object is not found by its name
            return types.MethodType, (value.__func__, value.__self__)
        found = reduced(value)
        return self._looked_through(value) if found is NotImplemented and self._notes else found

    def _looked_through(self, value: Any) -> Any:
        """Return what pickle would take; what cannot be pickled is noted, and does not hide what comes after it."""
        try:
            by_kind = copyreg.dispatch_table.get(type(value))
            return by_kind(value) if by_kind else value.__reduce_ex__(5)
        except Exception as error:
            self.failed = self.failed or error
            return object, ()


def _has_name(function: types.FunctionType) -> bool:
    """Return whether a function is found in its module by its name."""
    found: Any = sys.modules.get(function.__module__ or "")
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _cells(kind: type) -> Iterator[types.CellType]:
    """Yield the variables of functions around a class that its methods take."""
    for value in vars(kind).values():
        for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset"))):
            for cell in getattr(function, "__closure__", None) or ():
                try:
                    is_own = isinstance(cell.cell_contents, type)  # as of each method that calls `super()`
                except ValueError:  # it is empty
                    is_own = False
                if not is_own:
                    yield cell


def _set_attributes(function: types.FunctionType, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(function, name, value)


def _fill(cell: types.CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents
