"""Ship a user's objects: as a copy for this process, or packed for workers.

One pickler does both, with the same rules, so that `workers: 0` trains what workers on Ray would. Begin at
`shipped_bytes`, which leaves to its caller what stands apart from the bytes; `shipment` and `pickled_copy` take the
elements of tensors apart, so that no more than the copy itself takes memory. Two things more differ from plain
pickle. Parameters keep their hooks, class and attributes. A parametrized module, which torch can copy but refuses to
pickle, is taken apart and put together again.
"""

import copyreg
import enum
import functools
import importlib
import io
import logging
import os
import pickle
import sys
import types
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
from dp_ray.text import a_kind

IN_LINE_BYTES = 1 << 15  # of memory that is as fast to ship with the bytes
STORAGES = (UntypedStorage, TypedStorage)
Rule = Callable[[Any], Any]


def dump(value: Any, file: Any, base: Any, apart: Rule, rule: Rule) -> None:
    """Pickle a value into a file by a pickler of the class `base`. Raises what that raises.

    What `apart` names stands apart: `loaded` gets it by that name; None is for all else. `rule` says how an object is
    put together again, as a pickler's `reducer_override`; what it does not know, the base does.
    """
    pickler = base(file, protocol=5)
    of_base = pickler.reducer_override

    def reduce(value: Any) -> Any:
        found = rule(value)
        return of_base(value) if found is NotImplemented else found

    pickler.persistent_id, pickler.reducer_override = apart, reduce
    try:
        pickler.dump(value)
    finally:
        del pickler.reducer_override  # a cycle, which would hold what is pickled


def shipped_bytes(value: Any, base: Any, apart: Rule, rule: Rule) -> bytes:
    """Return what `dump` writes."""
    with io.BytesIO() as file:
        dump(value, file, base, apart, rule)
        return file.getvalue()


def loaded(head: bytes, part: Rule) -> Any:
    """Return the value that was dumped; `part` returns what stands apart, by its name."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(head))
    unpickler.persistent_load = part
    return unpickler.load()


class PicklerHere(pickle.Pickler):
    """Pickles what is read in this very process: functions and classes that no import gives stay those they are."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is of `__main__`, or local, to its id."""
        if isinstance(value, type | types.FunctionType) and (
            value.__module__ == "__main__" or "<" in value.__qualname__
        ):
            _known[id(value)] = value
            return _known_by, (id(value),)
        return NotImplemented


_known: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def _known_by(number: int) -> Any:
    return _known[number]


@dataclass
class Shipment:
    """An object's pickled bytes, and the memory of its tensors, which is still the object's own.

    It can itself be pickled: the memory then goes as arrays, which Ray ships out of band, and what arrives has
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
        return loaded(self.head, self._part)

    def _part(self, name: tuple[str, int, torch.dtype | None]) -> Any:
        kind, number, dtype = name
        if kind == "held":
            return self.held[number]
        if dtype is None:
            return self.storages[number]
        return TypedStorage(wrap_storage=self.storages[number], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def shipment(value: Any, base: Any) -> Shipment:
    """Pack an object for another process, by a subclass of cloudpickle's pickler. Raises what that raises."""
    storages = Apart()
    return Shipment(shipped_bytes(value, base, storages.storage, reduced), storages.all, RemovableHandle.next_id, [])


def check_packs(value: Any, base: Any) -> None:
    """Raise what `shipment` raises; this takes no memory."""
    with open(os.devnull, "wb") as nowhere:
        dump(value, nowhere, base, Apart().storage, reduced)


def pickled_copy(value: Any, kept: Iterable[Any] = ()) -> Any:
    """Return a copy for this process, with memory of its own. Raises what pickle raises if there can be none.

    Named objects of a module are not copied: classes, functions, and the globals of functions. The copy also refers
    to the objects `kept` themselves.
    """
    here = _Here(kept)
    head = here.dumped(value)
    storages = [storage.clone() for storage in here.storages.all]
    return Shipment(head, storages, RemovableHandle.next_id, here.held.all).load()


def reached(value: Any, kept: Iterable[Any] = ()) -> tuple[dict[Any, Any], Exception | None]:
    """Return the parts of an object, by id, that a copy would not share: their holders see no change of it.

    If there can be no copy, also return why.
    """
    here = _Here(kept, notes=True)
    try:
        here.dumped(value)
    except Exception as raised:  # a user's __getstate__ may raise anything
        return here.noted, raised
    return here.noted, here.failed


def refused(key: str, value: Any, error: Exception, dump: Callable[[Any], object]) -> JobError:
    """Return the error of an object of the job's `key` that cannot be pickled; `dump` raises for what cannot."""
    if isinstance(value, nn.Module):
        what = f"{what_fails(value, dump)} cannot be pickled"
    else:
        name, part, _ = part_that_fails(value, dump) or ("", None, None)
        what = f"its attribute {name} cannot be pickled" if name else "cannot be pickled"
        if name and isinstance(part, type | types.FunctionType):  # a target that the caller gave as an object
            what = f"{part.__qualname__}, with what its code reads, cannot be pickled"
    advice = "give a function that makes it, like 'module:function', which each worker calls for itself"
    return JobError(f"{key}: {what}: {type(error).__name__}: {error}; {advice}")


def what_fails(module: nn.Module, dump: Callable[[Any], object]) -> str:
    """Return which attribute cannot be pickled, or hook of a parameter; else the class."""
    for prefix, owner in module.named_modules():  # `dump` may name modules, and pickle none of them
        for key, value in _parts(owner):
            if isinstance(value, nn.Module) or (failed := part_that_fails(value, dump, prefix + key)) is None:
                continue
            name, part, _ = failed
            of_hook = isinstance(part, nn.Parameter)
            return f"a hook of the parameter {name}" if of_hook else f"the module's attribute {name}"
    return f"the module, of class {type(module).__qualname__}"


def part_that_fails(
    value: Any, dump: Callable[[Any], object], name: str = "", above: tuple[int, ...] = ()
) -> tuple[str, Any, Exception] | None:
    """Return which part of a value cannot be pickled, like `inner.db` or `options['key'][0]`, the part, and why.

    The name is empty for the value itself. None if it can be pickled, or if it holds itself.
    """
    if id(value) in above:
        return None
    try:
        dump(value)
        return None
    except Exception as error:  # a user's __getstate__ may raise anything
        inner = (part_that_fails(part, dump, name + key, (*above, id(value))) for key, part in _parts(value))
        return next(filter(None, inner), (name.removeprefix("."), value, error))


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
    elif isinstance(value, nn.Module):
        for key, inner in vars(value).items():
            members = key in ("_modules", "_parameters", "_buffers")
            yield from ((f".{name}", member) for name, member in inner.items()) if members else ((f".{key}", inner),)
    elif not isinstance(value, type | types.FunctionType | torch.Tensor):
        with suppress(Exception):  # as above
            state = value.__getstate__()
            state = state if isinstance(state, dict) else {}
            if state.get("__dict__") is vars(value):  # as a model of pydantic has it
                state = vars(value)
            yield from ((f".{key}", inner) for key, inner in state.items())


class Apart:
    """Objects that stand apart from what is pickled, each by its index."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.indices: dict[int, int] = {}  # by identity

    def index(self, value: Any, identity: int | None = None) -> int:
        """Return an object's index; one that is not there yet gets the next one."""
        index = self.indices.setdefault(id(value) if identity is None else identity, len(self.all))
        if index == len(self.all):
            self.all.append(value)
        return index

    def storage(self, value: Any) -> tuple[str, int, torch.dtype | None] | None:
        """Return the name of the memory of tensors, each once: views of one stay views of one. None for all else."""
        if not isinstance(value, STORAGES):
            return None
        plain, dtype = (value._untyped_storage, value.dtype) if isinstance(value, TypedStorage) else (value, None)
        return "storage", self.index(plain, plain._cdata), dtype


def _elements(storage: UntypedStorage) -> np.ndarray[Any, Any]:
    """Return a storage's memory as an array of bytes."""
    array: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


def _arrived(head: bytes, sent: list[tuple[str, Any]], next_hook: int) -> Shipment:
    storages = []
    for name, raw in sent:
        storage = UntypedStorage(len(raw))  # type: ignore[no-untyped-call]
        # Copied, since an array that Ray hands out is of shared memory, and must not be written.
        _elements(storage)[:] = np.frombuffer(raw, np.uint8)
        device = torch.device(name)
        # The job's devices are chosen later: a worker may see fewer GPUs than the caller, or none.
        is_here = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        storages.append(storage.to(device=device) if is_here else storage)
    return Shipment(head, storages, next_hook, [])


def reduced(value: Any) -> Any:
    """Return how an object is put together again; NotImplemented if the pickler knows."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
        return _bare, (parametrize.type_before_parametrizations(value),), vars(value), None, None, _parametrize
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return importlib.import_module, (value.__name__,)  # torch.backends has modules of classes of its own
    if type(value) is weakref.ref and value() is not None:
        return weakref.ref, (value(),)
    return NotImplemented


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor: torch drops the hooks of each, and the class of a parameter."""
    # The dicts of its hooks, by their attribute: a handle of a hook refers to its dict.
    hooks = {name: own for name in HOOKS if (own := getattr(tensor, name, None))} if tensor.is_leaf else {}
    if type(tensor).__reduce_ex__ is nn.Parameter.__reduce_ex__:
        # Its attributes are set once it exists: they may refer to its module.
        state = (torch._utils._get_obj_state(tensor), hooks)  # type: ignore[no-untyped-call]
        made = (type(tensor), tensor.data, tensor.requires_grad)
        return _parameter, made, state if any(state) else None, None, None, _set_state
    if hooks:
        raise pickle.PicklingError(f"a hook of {a_kind(tensor)} that is no parameter")
    return NotImplemented


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


_CONTAINERS = (dict, list, set, bytearray, deque, types.CellType, torch.Tensor, np.ndarray)
_BY_NAME = (enum.Enum, logging.Logger)  # a copy has the same ones


@dataclass(frozen=True)
class _Held:
    """Marks an object that a copy in this process shares."""

    value: Any


class _Here:
    """What a copy for this process needs: named objects of a module are not copied, functions without a name are."""

    def __init__(self, kept: Iterable[Any], notes: bool = False) -> None:
        self.storages: Apart
        self.held: Apart
        self.noted: dict[Any, Any]  # by identity
        self.failed: Exception | None = None  # why some of it cannot be pickled, if it makes notes
        self._notes = notes
        self._kept = {id(value): value for value in kept}
        self._classes: set[type] = set()

    def dumped(self, value: Any) -> bytes:
        """Pickle a value."""
        head = self._dumped(value)
        # Methods of a class that a function has made share variables with hooks that it made. The class stays what it
        # is, so the hooks keep these variables. Which classes there are is known only now.
        if cells := {id(cell): cell for kind in self._classes for cell in _cells(kind)}:
            self._kept |= cells
            head = self._dumped(value)
        return head

    def _dumped(self, value: Any) -> bytes:
        self.storages, self.held, self.noted = Apart(), Apart(), {}
        return shipped_bytes(value, PicklerHere, self._name, self._rule)

    def _name(self, value: Any) -> Any:
        """Return the name of what stands beside the bytes."""
        if isinstance(value, STORAGES):
            name = self.storages.storage(value)
            if self._notes and name is not None:
                self.noted["storage", self.storages.all[name[1]]._cdata] = value
            return name
        if type(value) is _Held:
            return self._hold(value.value)
        if id(value) in self._kept or isinstance(value, types.ModuleType | types.CodeType | type):
            if isinstance(value, type):
                self._classes.add(value)
            return self._hold(value)
        if isinstance(value, types.FunctionType) and has_name(value):
            return self._hold(value)
        can_change = isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")
        if self._notes and can_change and not isinstance(value, _BY_NAME):
            self.noted[id(value)] = value
        return None

    def _hold(self, value: Any) -> tuple[str, int, None]:
        return "held", self.held.index(value), None

    def _rule(self, value: Any) -> Any:
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


def has_name(function: Any) -> bool:
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
