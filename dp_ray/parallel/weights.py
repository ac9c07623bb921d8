"""What a caller's module is now, and what of it has changed since its workers took it in.

`ModuleWatch.look` compares the module with what it was at the last call, all by content: what it refers to, and the
elements of its tensors. A tensor's version tells too little: fused optimizers and writes to `.data` leave it as it
was.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dp_ray.engine.forward.call_state import Written
from dp_ray.engine.ship import Apart, has_name, what_fails
from dp_ray.errors import JobError, ModelError
from dp_ray.serving.shipped import (
    OF_MODULES,
    NotByValue,
    Structure,
    TensorForm,
    Wrapper,
    digest,
    dumped,
    why_odd,
)
from dp_ray.serving.wire import packed, unpacked
from dp_ray.tensors.changed import bits_differ
from dp_ray.tensors.flat import flat


@dataclass(frozen=True, eq=False)
class Version:
    """A module at a call: its structure, and copies of its tensors' elements.

    Versions share the copies of what has not changed: two tensors are the same copy, or differ.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]

    def changed_since(self, other: "Version | None") -> tuple[int, ...]:
        """Return the indices of the tensors that differ from those of another version; None has none."""
        if other is None or other.structure is not self.structure:
            return tuple(range(len(self.tensors)))
        pairs = zip(self.tensors, other.tensors, strict=True)
        return tuple(index for index, (mine, theirs) in enumerate(pairs) if mine is not theirs)

    def flat(self, changed: tuple[int, ...]) -> Any:
        """Return the elements of these tensors, one after the other, as bytes."""
        tensors = [self.tensors[index] for index in changed]
        return packed(flat(tensors, tensors[0].device)).data


class ModuleWatch:
    """Looks at a module before each of its calls; `pickler` is the class that pickles what goes to workers."""

    def __init__(self, pickler: Any) -> None:
        self.tensors: list[torch.Tensor] = []  # each once: parameters, buffers, then those that are neither
        self._num_registered = 0
        self._pickler = pickler
        self._by_value = False  # tensors that some object's pickle makes, which are others each time
        self._key: list[Any] = []
        self._held: list[Any] = []  # what `_key` has the ids of, so that no other object gets one
        self._version: Version | None = None

    def look(self, module: nn.Module) -> Version:
        """Return the module's present version: the last one if nothing has changed.

        Raises JobError, which names the attribute, if the module cannot be pickled, and ModelError if it is lazy or
        has a tensor whose elements cannot be sent.
        """
        seen = _Look(module, self._pickler, self._by_value)
        tensors, last = seen.apart.all, self._version
        if last is None or seen.key != self._key:
            pickled, has_all = seen.pickled()
            if not (has_all or self._by_value):
                self._by_value = True
                return self.look(module)
            number = 0 if last is None else last.structure.number + 1
            structure = Structure(number, pickled, seen.forms)
            self._version = Version(structure, tuple(_copy(tensor) for tensor in tensors))
        elif changed := _changed(tensors, last.tensors):
            copies = list(last.tensors)
            for index in changed:
                copies[index] = _copy(tensors[index])
            self._version = Version(last.structure, tuple(copies))
        self.tensors, self._num_registered = tensors, seen.num_registered
        self._key, self._held = seen.key, seen.held
        assert self._version is not None
        return self._version

    def of_graphs(self) -> set[int]:
        """Return the ids of the tensors of the caller's graphs that are in attributes, and not registered.

        One that no forward uses may be left from a graph that is freed, through which no backward may run again.
        """
        return {id(tensor) for tensor in self.tensors[self._num_registered :] if not tensor.is_leaf}

    def path(self, module: nn.Module, tensor: torch.Tensor) -> str:
        """Return where in the module a tensor stands."""
        return _path(module, tensor, self._pickler)

    def take_written(self, module: nn.Module, written: Sequence[Written]) -> None:
        """Set parameters and buffers to what the forward of shard 0 has made of them.

        What it wrote in place is written in place here. Else a graph of the caller's may need the tensor of before.
        """
        modules = dict(module.named_modules())
        now: dict[str, torch.Tensor] = {}  # by the first names
        for name, first, value, is_anew in written:
            prefix, _, key = name.rpartition(".")
            owner = modules[prefix]
            is_parameter = key in owner._parameters
            old = (owner._parameters if is_parameter else owner._buffers).get(key)
            new = None if value is None else unpacked(value)
            if new is not None and old is not None and not is_anew and old.shape == new.shape:
                with torch.inference_mode(old.is_inference()), torch.no_grad():
                    now[name] = old.copy_(new)
                continue
            if new is not None:
                with torch.inference_mode(False):  # a module whose buffer is an inference tensor cannot load a state
                    now[name] = new.to(self._device if old is None else old.device, copy=True)
            if not is_parameter:
                owner._buffers[key] = now.get(first)
            elif old is not None and first == name:
                old.data = now[name]

    @property
    def _device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")


# Of these types a value is told by itself: none is equal to one that differs, and none can change.
PLAIN = {bool, int, str, bytes, type(None), torch.dtype, torch.device}
FUNCTIONS = FunctionType | BuiltinFunctionType
CONTAINERS = {tuple, list, set, frozenset, dict, OrderedDict, torch.Size}
DEPTH = 4  # of containers in containers that are looked through; what is nested deeper is pickled
APART = {
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_compiled_call_impl",
}  # of each module, looked at by themselves


class _Look:
    """What a module is now.

    `key` tells its structure: which modules it has, by identity, and by content all that they refer to. Plain values
    stand there themselves, tensors as their indices, classes and functions that workers import by identity. All else
    is told by a digest of its pickle, as workers would get it.
    """

    def __init__(self, module: nn.Module, pickler: Any, by_value: bool) -> None:
        self.module = module
        self._by_value = by_value
        self.apart = Apart()
        self.key: list[Any] = []
        self.held: list[Any] = []
        self._pickler = pickler
        self._modules: dict[int, nn.Module] = {}
        self._find(module)
        of_modules = {id(module): at for at, module in enumerate(self._modules.values())}
        self.held += self._modules.values()
        for module in self._modules.values():
            self._add(module._parameters)
        self._num_parameters = len(self.apart.all)
        for module in self._modules.values():
            self._add(module._buffers)
        self.num_registered = len(self.apart.all)
        pickled: list[Any] = []  # what is told by its pickle
        for at, module in enumerate(self._modules.values()):
            inner = map(of_modules.get, map(id, module._modules.values()))
            self.key.append((id(module), type(module), *module._modules, *inner))
            for name, value in _state(module).items():
                if name in APART or (name in OF_MODULES and not value):
                    continue
                told = self._told(value)
                if told is None:
                    pickled.append((at, name, value))
                else:
                    self.key.append((name, told))
        if pickled:
            self._module_indices = of_modules
            self.key.append(self._pickle(digest, pickled, self._name))
        self.forms = tuple(map(self._form, range(len(self.apart.all)), self.apart.all))
        self.key.append(self.forms)

    def _find(self, module: nn.Module) -> None:
        """Note the modules, each once, in the order of `nn.Module.modules`."""
        if isinstance(module, torch.jit.ScriptModule):
            name = next(name for name, inner in self.module.named_modules() if inner is module) or "the module"
            raise JobError(f"{name}: is TorchScript, which a parallel module does not take: wrap what it was made of")
        self._modules[id(module)] = module
        for inner in module._modules.values():
            if inner is not None and id(inner) not in self._modules:
                self._find(inner)

    def _add(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Note a module's parameters or buffers."""
        if tensors:
            index = self.apart.index
            self.key.append((*tensors, *(None if tensor is None else index(tensor) for tensor in tensors.values())))

    def _told(self, value: Any, depth: int = 0) -> Any:
        """Return what tells a value, None if only its pickle does."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if kind is float or kind is complex:
            return kind, repr(value)  # -0.0 and NaN too
        if kind in CONTAINERS:
            if depth == DEPTH:
                return None
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            told = [self._told(part, depth + 1) for part in inner]
            return None if None in told else (kind, *told)
        if isinstance(value, torch.Tensor):
            return None if why_odd(value) else (kind, self.apart.index(value))
        if isinstance(value, type) or (
            isinstance(value, FUNCTIONS) and value.__module__ not in (None, "__main__") and has_name(value)
        ):
            self.held.append(value)
            return kind, id(value)
        return None

    def _name(self, value: Any) -> Any:
        """Return the index of a tensor, or the name of one of the modules."""
        if isinstance(value, torch.Tensor):
            is_in_object = id(value) not in self.apart.indices and not value.requires_grad
            return None if why_odd(value) or (self._by_value and is_in_object) else self.apart.index(value)
        return f"module {self._module_indices[id(value)]}" if id(value) in self._module_indices else None

    def pickled(self) -> tuple[bytes, bool]:
        """Return the module's structure, pickled, and whether all tensors stand there by their indices."""
        indices, found = self.apart.indices, set[int]()

        def name(value: Any) -> int | None:
            index = indices.get(id(value))
            if index is not None:
                found.add(index)
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                raise NotByValue  # as an attribute of a class that goes by value
            return index

        return self._pickle(dumped, self.module, name), len(found) == len(indices)

    def _pickle(self, by: Callable[..., bytes], value: Any, name: Callable[[Any], Any]) -> bytes:
        try:
            return by(value, self._pickler, name)
        except Exception as error:
            # Hooks of parameters stay here, where the gradients come.
            what = what_fails(self.module, lambda value: by(value, self._pickler, name))
            if isinstance(error, NotByValue):
                raise ModelError(
                    f"{what}: holds a tensor that wants a gradient, which would not come to it: make it a parameter"
                ) from None
            raise JobError(
                f"{what}: cannot be pickled for the workers: {type(error).__name__}: {error}; make it in `forward`, "
                "or give its class a __getstate__ that leaves it out, and a __setstate__ that makes it"
            ) from error

    def _form(self, index: int, tensor: torch.Tensor) -> TensorForm:
        why = why_odd(tensor)
        if why is not None:
            why = f"is {why}: a parallel module takes dense tensors with elements"
        elif is_lazy(tensor):
            why = (
                "has no shape yet: run one forward of the bare module first, which gives it one, as nn.DataParallel "
            )
            why += "wants it too"
        if why is not None:
            raise ModelError(f"{_path(self.module, tensor, self._pickler)} {why}")
        shape = tuple(tensor.shape)
        # In a functional_call what stands for a parameter is none.
        is_parameter = index < self._num_parameters or isinstance(tensor, nn.Parameter)
        strides = tensor.stride() if tensor.is_contiguous() else _strides_of(shape, tensor.stride())
        return TensorForm(is_parameter, tensor.dtype, shape, strides)


def _path(module: nn.Module, tensor: torch.Tensor, pickler: Any) -> str:
    """Return where in a module a tensor stands."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if parameter is tensor:
            return name

    def refuse(value: Any) -> None:
        if value is tensor:
            raise NotByValue

    return what_fails(module, lambda value: digest(value, pickler, refuse))


def _state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, as its pickle has them."""
    if isinstance(module, Wrapper):
        return {key: value for key, value in vars(module).items() if key in OF_MODULES}
    is_parametrized = "parametrizations" in module._modules  # torch's own function asks for an attribute: it is slow
    if type(module).__getstate__ is nn.Module.__getstate__ or is_parametrized:
        return vars(module)
    state = module.__getstate__()  # type: ignore[no-untyped-call]
    return state if isinstance(state, dict) else {"": state}


@functools.lru_cache(maxsize=4096)
def _strides_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a copy in the same layout: these, unless they leave gaps."""
    # On the meta device torch would import its decompositions for this, which takes a second. No element is written.
    return tuple(torch.empty_like(torch.empty_strided(shape, strides)).stride())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _changed(tensors: list[torch.Tensor], copies: tuple[torch.Tensor, ...]) -> list[int]:
    """Return the indices of the tensors whose elements differ from their copies."""
    return [index for index, differs in enumerate(bits_differ(list(zip(tensors, copies, strict=True)))) if differs]
