"""What a caller's module is now, and what of it has changed since its workers took it in.

`ModuleWatch.look` compares the module with what it was at the last call: its structure by identities and plain
values, its tensors by their content. A tensor's version tells too little: fused optimizers and writes to `.data`
leave it as it was.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dp_ray.engine.call_state import Written
from dp_ray.engine.objects import what_fails
from dp_ray.engine.world import is_gpu
from dp_ray.errors import JobError, ModelError
from dp_ray.tasks.wire import Structure, TensorForm, packed, unpacked
from dp_ray.tensors.flat import flat

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
APART = {"training", "_parameters", "_buffers", "_modules"}  # attributes of modules that are looked at by themselves

Pickle = Callable[[Any, Mapping[int, int]], bytes]


@dataclass(frozen=True, eq=False)
class Version:
    """A module at a call: its structure, and copies of its tensors' elements.

    Versions share the copies of what has not changed: two tensors are the same copy, or differ.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]

    def changed_since(self, other: "Version | None") -> tuple[int, ...]:
        """Return the numbers of the tensors that differ from those of another version; None has none."""
        if other is None or other.structure is not self.structure:
            return tuple(range(len(self.tensors)))
        pairs = zip(self.tensors, other.tensors, strict=True)
        return tuple(number for number, (mine, theirs) in enumerate(pairs) if mine is not theirs)

    def flat(self, changed: tuple[int, ...]) -> Any:
        """Return the elements of these tensors, one after the other, as bytes."""
        tensors = [self.tensors[number] for number in changed]
        return packed(flat(tensors, tensors[0].device)).data


class ModuleWatch:
    """Looks at a module before each of its calls."""

    def __init__(self, module: nn.Module, pickled: Pickle) -> None:
        self.module = module
        self.tensors: list[torch.Tensor] = []  # each once: parameters, then buffers
        self._pickled = pickled
        self._key: Any = None
        self._held: list[Any] = []  # what `_key` has the ids of, so that no other object gets one
        self._version: Version | None = None

    def look(self) -> Version:
        """Return the module's present version: the last one if nothing has changed.

        Raises JobError, which names the attribute, if the module cannot be pickled, and ModelError if it is lazy.
        """
        held: list[Any] = []
        tensors = tensors_of(self.module)
        forms = tuple(_form(one) for one in tensors)
        key = (forms, tuple(_key_of(self.module, held)))
        last = self._version
        if last is None or key != self._key:
            self.tensors = tensors
            pickled = self._pickle()
            number = 0 if last is None else last.structure.number + 1
            self._key, self._held = key, held
            structure = Structure(number, pickled, forms)
            self._version = Version(structure, tuple(_copy(one) for one in tensors))
            return self._version
        self.tensors = tensors
        changed = _changed(tensors, last.tensors)
        if changed:
            copies = list(last.tensors)
            for number in changed:
                copies[number] = _copy(tensors[number])
            self._version = Version(last.structure, tuple(copies))
        assert self._version is not None
        return self._version

    def take_written(self, written: Sequence[Written]) -> None:
        """Set buffers and parameters to what the forward of shard 0 has made of them; make and remove buffers too."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        modules = dict(self.module.named_modules())
        values: dict[str, torch.Tensor] = {}  # tensors that were set, by the first of their names
        groups: dict[int, set[str]] = {}  # names of what is one tensor now
        for prefix, owner in modules.items():
            for key, buffer in owner._buffers.items():
                groups.setdefault(id(buffer), set()).add(f"{prefix}.{key}" if prefix else key)
        firsts = {one.name: one.first for one in written}
        for name, first, value, is_persistent in written:
            new = None if value is None else unpacked(value)
            prefix, _, key = name.rpartition(".")
            owner = modules[prefix]
            if name in parameters and new is not None:
                with torch.no_grad():
                    parameters[name].copy_(new)
                continue
            if not first:
                del owner._buffers[key]
                continue
            old = owner._buffers.get(key)
            if new is None:
                owner.register_buffer(key, values.get(first), is_persistent)
                continue
            stays = old is not None and old.shape == new.shape and old.dtype == new.dtype
            if old is not None and stays and all(firsts.get(other) == first for other in groups[id(old)]):
                with torch.no_grad():
                    old.copy_(new)
                values[name] = old
            else:
                values[name] = new.to(self.device if old is None else old.device, copy=True)
                owner.register_buffer(key, values[name], is_persistent)

    @property
    def device(self) -> torch.device:
        """The device of the module's first tensor."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def _pickle(self) -> bytes:
        numbers = {id(one): number for number, one in enumerate(self.tensors)}
        try:
            return self._pickled(self.module, numbers)
        except Exception as error:
            # Hooks of parameters stay here, where the gradients come.
            name = what_fails(self.module, lambda value: self._pickled(value, numbers), with_hooks=False)
            raise JobError(
                f"{name}: cannot be pickled for the workers: {type(error).__name__}: {error}; make it in `forward`, "
                "or give its class a __getstate__ that leaves it out"
            ) from error


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, each once. Raises ModelError if one has no shape yet."""
    for name, one in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(one):
            raise ModelError(
                f"{name} has no shape yet: run one forward of the bare module first, which gives it one, as "
                "nn.DataParallel wants it too"
            )
    return [*module.parameters(), *module.buffers()]


@functools.lru_cache(maxsize=4096)
def _strides_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a copy in the same layout: these, unless they leave gaps."""
    return tuple(torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride())


def _form(tensor: torch.Tensor) -> TensorForm:
    shape = tuple(tensor.shape)
    return TensorForm(isinstance(tensor, nn.Parameter), tensor.dtype, shape, _strides_of(shape, tensor.stride()))


def _key_of(module: nn.Module, held: list[Any]) -> Iterator[Any]:
    """Yield what tells that a module is the one of before: its submodules, their attributes and hooks.

    What is neither plain nor a dict of hooks is told by its identity, and put into `held`.
    """
    for name, one in module.named_modules(remove_duplicate=False):
        yield name, id(one)
        held.append(one)
        yield tuple((key, None if value is None else id(value)) for key, value in one._parameters.items())
        yield tuple((key, None if value is None else id(value)) for key, value in one._buffers.items())
        held.extend((*one._parameters.values(), *one._buffers.values()))
        for key, value in vars(one).items():
            if key in APART or (isinstance(value, dict | set) and not value):
                continue
            if isinstance(value, PLAIN):
                yield key, value
            elif isinstance(value, torch.Tensor):
                held.append(value)
                yield key, id(value), value._version
            elif isinstance(value, dict):
                held.extend(value.values())
                yield key, *map(id, value.values())
            elif isinstance(value, tuple | list | set) and all(isinstance(inner, PLAIN) for inner in value):
                yield key, tuple(value)
            else:
                held.append(value)
                yield key, id(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _changed(tensors: list[torch.Tensor], copies: tuple[torch.Tensor, ...]) -> list[int]:
    """Return the numbers of the tensors whose elements differ from their copies."""
    with torch.no_grad():
        pairs = [(_bits(one), _bits(copy)) for one, copy in zip(tensors, copies, strict=True)]
        if tensors and is_gpu(tensors[0].device):  # one wait for all
            return torch.stack([(one != two).any() for one, two in pairs]).nonzero().flatten().tolist()
        return [number for number, (one, two) in enumerate(pairs) if not torch.equal(one, two)]
