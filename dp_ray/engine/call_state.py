"""The state that the forwards of a parallel module write, on one of its workers: `CallState`."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.buffers import (
    EARLY,
    LOST,
    NONE,
    Before,
    Writable,
    held_in,
    layout_of,
    modules_of,
    non_persistent,
    places_of,
    shown,
    tensor_at,
)
from dp_ray.errors import ModelError
from dp_ray.tensors.flat import as_bytes
from dp_ray.text import listed


class Written(NamedTuple):
    """A tensor that a forward has written, by its name: a buffer, which may be new, or a parameter.

    `first` is the first of the written names of the same tensor. Only that one has a `value`; it is None for a buffer
    that is None now. For a buffer that the forward has removed, `first` is "". With `is_anew` the forward has put
    another tensor there, and has not written the one of before in place.
    """

    name: str
    first: str
    value: Any
    is_persistent: bool = True
    is_anew: bool = True


class CallState(Writable):
    """The state that the forwards of a parallel module write: the forward of each shard starts from the caller's.

    A graph that waits for its backward may need a tensor as its forward has left it. So values come back in tensors
    of their own: `tensors` are those that the model holds now, in the caller's order. The tensors with the indices
    `apart` also stand outside of modules, as in a list; they are written in place. A call begins with `load`,
    `restore` and `begin`; then `restore` comes before each forward but the first, and `written` after shard 0's.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[torch.Tensor], apart: Collection[int] = ()) -> None:
        super().__init__(model, NONE)
        self.tensors = list(tensors)
        self._apart = apart
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._modules = {name for name, _ in modules_of(self._roots)}
        self._held = [module._buffers for _, module in modules_of(self._roots)]
        self._lengths = list(map(len, self._held))
        self._holders: list[list[tuple[nn.Module, str]]] = [[] for _ in tensors]
        for _, module in modules_of(self._roots):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self._holders[indices[id(tensor)]].append((module, key))
        buffers = {name: tensor for name, place in self._places.items() if (tensor := tensor_at(*place)) is not None}
        self._indices = {name: indices[id(tensor)] for name, tensor in {**buffers, **self._plain}.items()}
        self._empty = [place for name, place in self._places.items() if name not in buffers]
        self._kept = {self._indices[name] for name in {**buffers, **self._followed}}
        self._values = {index: self.tensors[index].detach().clone() for index in self._kept}
        self._before: Before | None = None  # in early calls
        self._lost: dict[int, str] = {}  # written in place, and no value of before is known
        self._num_calls = 0

    def goes_on_as(self, other: "CallState") -> None:
        """Follow what another state of the same model follows, and count its calls on."""
        self._num_calls = other._num_calls
        for name in other._followed.keys() - self._followed.keys():
            self._keep(name, self._plain[name].detach().clone())

    def _keep(self, name: str, value: torch.Tensor) -> None:
        """Follow a parameter from now on, whose forward starts from this value."""
        self._follow([name])
        self._kept.add(self._indices[name])
        self._values[self._indices[name]] = value

    def load(self, indices: Sequence[int], values: Sequence[torch.Tensor], anew: bool) -> None:
        """Take the caller's new values of these tensors, with `anew` in new tensors."""
        for index, value in zip(indices, values, strict=True):
            tensor = self.tensors[index]
            if anew:
                self._set(index, _like(tensor, value))
            else:
                with torch.no_grad():
                    tensor.copy_(value)
            self._lost.pop(index, None)
            if index in self._kept:
                self._values[index] = self.tensors[index].detach().clone()
        if indices:
            self._before = None
            self._follow(())

    def _set(self, index: int, tensor: torch.Tensor) -> None:
        self.tensors[index] = tensor
        for module, key in self._holders[index]:
            if isinstance(tensor, nn.Parameter) or key in module._buffers:
                setattr(module, key, tensor)  # as an RNN wants it, which holds its weights in a list too
            else:
                module._buffers[key] = tensor  # a forward has removed it
        if isinstance(tensor, nn.Parameter):
            self._known.add(id(tensor))
            for name, held in self._indices.items():
                if held == index:
                    self._parameters[name] = self._plain[name] = tensor
                    if name in self._followed:
                        self._followed[name] = tensor

    def restore(self) -> None:
        """Undo what forwards have written; raises ModelError if a value of before is lost."""
        if self._lost:
            names = listed(map(shown, self._lost.values()))
            raise ModelError(f"the forward wrote {names} {LOST}")
        if list(map(len, self._held)) != self._lengths:
            for name, (held, key) in places_of(self._roots).items():
                if name not in self._places:
                    del held[key]
        for held, key in self._empty:
            held[key] = None
        for index in sorted(self._differing(and_others=True)):
            tensor, value = self.tensors[index], self._values[index]
            if index in self._apart and layout_of(tensor) == layout_of(value):
                with torch.no_grad():
                    tensor.copy_(value)
                self._set(index, tensor)
            else:
                self._set(index, _like(tensor, value))

    def renew(self) -> None:
        """Put buffers into new tensors, so that no forward writes what a graph may need.

        Autograd finds most such writes and raises, but not those of a BatchNorm's statistics, which it needs in eval.
        """
        for index in self._kept - set(self._apart):
            if not isinstance(self.tensors[index], nn.Parameter):
                self._set(index, _like(self.tensors[index], self._values[index]))

    @property
    def is_lost(self) -> bool:
        """Whether the caller's value of a parameter is not known here."""
        return bool(self._lost)

    def begin(self, num_runs: int) -> None:
        """Begin a call of which this worker runs so many shards."""
        self._num_calls += 1
        if self._num_calls > EARLY:
            self._before = None
        self._watched.note()

    def keep(self) -> None:
        """Keep nothing: the caller takes what it needs."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Find what the forward in the block writes; raises ModelError for a new parameter."""
        is_early = self._num_calls <= EARLY
        if is_early and self._before is None:
            self._before = Before(self._watched.tensors, {*self._smallest(), *self._twins()})
        try:
            yield
        finally:
            found = [] if self._before is None else self._before.written(self._plain)
            for name in dict.fromkeys([*found, *self._watched.written()]):
                if name in self._followed:
                    continue
                value = None if self._before is None else self._before.value(name)
                if value is None:
                    self._lost[self._indices[name]] = name
                    value = self._plain[name].detach().clone()
                self._keep(name, value)
        if is_early:
            self._check_parameters()

    running = forward  # what sees a whole batch: a call has none

    def _differing(self, and_others: bool = False) -> set[int]:
        """Return the indices of the tensors that differ from the caller's; `and_others`: or is in another tensor."""
        found = set(self._lost)
        pairs = []
        for index, value in self._values.items():
            now = {id(tensor): tensor for tensor in (_standing(*place) for place in self._holders[index])}
            for tensor in now.values():
                if (
                    tensor is None
                    or tensor.shape != value.shape
                    or tensor.dtype != value.dtype
                    or (and_others and tensor is not self.tensors[index])
                ):
                    found.add(index)
                else:
                    pairs.append((index, tensor, value))
        differ = bits_differ([(tensor, value) for _, tensor, value in pairs])
        return found | {index for (index, *_), differs in zip(pairs, differ, strict=True) if differs}

    def written(self) -> list[Written]:
        """Return what the last forward has written of the caller's values; raises ModelError for a new module."""
        changed = self._differing()
        has_made = list(map(len, self._held)) != self._lengths
        has_set = any(tensor_at(*place) is not None for place in self._empty)
        has_modules = any(name not in self._modules for name, _ in modules_of(self._roots))
        if not (changed or has_made or has_set or has_modules):
            return []
        lasting, now = non_persistent(self._roots), held_in(places_of(self._roots))
        firsts: dict[int, str] = {}
        found = []
        for name, tensor in {**now, **self._followed}.items():
            index = self._indices.get(name)
            if index not in changed if index is not None else (tensor is None and name in self._places):
                continue
            if name.rpartition(".")[0] not in self._modules:
                raise ModelError(
                    f"the forward made the module {name.rpartition('.')[0]}, with buffers: make it in the "
                    "constructor, or run one forward of the bare module before it is wrapped"
                )
            first = name if tensor is None else firsts.setdefault(id(tensor), name)
            is_anew = index is None or tensor is not self.tensors[index]
            found.append(Written(name, first, tensor if first == name else None, name not in lasting, is_anew))
        return found + [Written(name, "", None) for name in self._places if name not in now]


def _standing(module: nn.Module, key: str) -> torch.Tensor | None:
    return module._parameters[key] if key in module._parameters else tensor_at(module._buffers, key)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a value, as another one is: in its layout, and a parameter if that is one."""
    has_layout = layout_of(tensor) == layout_of(value)
    fresh = torch.empty_like(tensor, requires_grad=False).copy_(value) if has_layout else value.clone()
    return (
        nn.Parameter(fresh, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else fresh.requires_grad_(tensor.requires_grad)
    )


def bits_differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return whether the bits of two tensors of one form differ, for each pair; waits for a GPU once."""
    if pairs and pairs[0][0].device.type != "cpu":
        return torch.stack([(as_bytes(now) != as_bytes(before)).any() for now, before in pairs]).tolist()
    return [not torch.equal(as_bytes(now), as_bytes(before)) for now, before in pairs]
