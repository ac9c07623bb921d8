"""The state that the forwards of a parallel module write, on one of its workers: `CallState`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.forward.buffers import form_or_none, modules_of, present_in, tensor_at
from dp_ray.engine.forward.state import EARLY, State
from dp_ray.tensors.changed import bits_differ


class Written(NamedTuple):
    """A tensor that a forward has written, by its name: a buffer or a parameter.

    `first` is the first of the written names of the same tensor. Only that one has a `value`; it is None for a buffer
    that is None now. With `is_anew` the forward has put another tensor there, and has not written the one of before
    in place.
    """

    name: str
    first: str
    value: Any
    is_anew: bool = True


class CallState(State):
    """The state that the forwards of a parallel module write: the forward of each shard starts from the caller's.

    A graph that waits for its backward may need a tensor as its forward has left it. So values come back in tensors
    of their own: `tensors` are those that the model holds now, in the caller's order. The tensors with the indices
    `apart` also stand outside of modules, as in a list; they are written in place. A call begins with `load`,
    `restore` and `begin`; then `restore` comes before each forward but the first, and `written` after shard 0's.
    """

    _first = f"first {EARLY} calls of the module"

    def __init__(self, model: nn.Module, tensors: Sequence[torch.Tensor], apart: Collection[int]) -> None:
        super().__init__(model)
        self.tensors = list(tensors)
        self._apart = apart
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._holders: list[list[tuple[nn.Module, str]]] = [[] for _ in tensors]
        for _, module in modules_of(self._roots):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self._holders[indices[id(tensor)]].append((module, key))
        now = present_in(self._held.buffers())
        self._indices = {name: indices[id(tensor)] for name, tensor in {**now, **self._plain}.items()}
        self._empty = [place for name, place in self._held.places.items() if name not in now]
        kept = {self._indices[name] for name in {**now, **self._held.followed}}
        self._values = {index: self.tensors[index].detach().clone() for index in kept}  # the caller's

    def _remember(self, found: Mapping[str, torch.Tensor]) -> None:
        if found:
            self.follow(found)
            self._values.update({self._indices[name]: value for name, value in found.items()})

    def _lose(self, names: Collection[str], raises: bool) -> None:
        self._remember({name: self._plain[name].detach().clone() for name in names})
        super()._lose(names, False)  # the caller may need no other forward

    def load(self, indices: Sequence[int], values: Sequence[torch.Tensor], anew: bool) -> None:
        """Take the caller's new values of these tensors, with `anew` in new tensors."""
        for index, value in zip(indices, values, strict=True):
            tensor = self.tensors[index]
            if anew:
                self._set(index, _like(tensor, value))
            else:
                with torch.no_grad():
                    tensor.copy_(value)
            if index in self._values:
                self._values[index] = self.tensors[index].detach().clone()
        if indices:
            self.lost = {name: None for name in self.lost if self._indices[name] not in indices}
            self._watch.forget()
            self.follow(())

    def _set(self, index: int, tensor: torch.Tensor) -> None:
        self.tensors[index] = tensor
        for module, key in self._holders[index]:
            if isinstance(tensor, nn.Parameter) or key in module._buffers:
                setattr(module, key, tensor)  # as an RNN wants it, which holds its weights in a list too
            else:
                module._buffers[key] = tensor  # a forward has removed it
        if isinstance(tensor, nn.Parameter):
            for name, held in self._indices.items():
                if held == index:
                    self._parameters[name] = self._plain[name] = tensor
                    if name in self._held.followed:
                        self._held.followed[name] = tensor

    def restore(self) -> None:
        """Undo what forwards have written; raises ModelError if a value of before is lost."""
        self._raise_lost()
        for held, key in self._empty:
            held[key] = None
        for index in sorted(self._differing(and_others=True)):
            tensor, value = self.tensors[index], self._values[index]
            if index in self._apart and form_or_none(tensor) == form_or_none(value):
                with torch.no_grad():
                    tensor.copy_(value)
                self._set(index, tensor)
            else:
                self._set(index, _like(tensor, value))

    def renew(self) -> None:
        """Put buffers into new tensors, so that no forward writes what a graph may need.

        Autograd finds most such writes and raises, but not those of a BatchNorm's statistics, which it needs in eval.
        """
        for index in self._values.keys() - set(self._apart):
            if not isinstance(self.tensors[index], nn.Parameter):
                self._set(index, _like(self.tensors[index], self._values[index]))

    def begin(self, num_runs: int) -> None:
        """Begin a call of which this worker runs so many shards."""
        self._num_runs += 1
        self._is_early = self._num_runs <= EARLY
        if not self._is_early:
            self._watch.forget()
        self._watch.stamps.note()

    def _differing(self, and_others: bool = False) -> set[int]:
        """Return the indices of the tensors that differ from the caller's; `and_others`: or is in another tensor."""
        found = {self._indices[name] for name in self.lost}
        pairs = []
        for index, value in self._values.items():
            now = {id(tensor): tensor for tensor in (_standing(*place) for place in self._holders[index])}
            for tensor in now.values():
                is_other = and_others and tensor is not self.tensors[index]
                if tensor is None or is_other or form_or_none(tensor) != form_or_none(value):
                    found.add(index)
                else:
                    pairs.append((index, tensor, value))
        differ = bits_differ([(tensor, value) for _, tensor, value in pairs])
        return found | {index for (index, *_), differs in zip(pairs, differ, strict=True) if differs}

    def written(self) -> list[Written]:
        """Return what the last forward has written of the caller's values; raises ModelError for what it has made."""
        self._check_buffers()
        changed, firsts, found = self._differing(), dict[int, str](), []
        for name, tensor in self._held.now().items():
            index = self._indices.get(name)
            if tensor is None if index is None else index not in changed:
                continue
            first = name if tensor is None else firsts.setdefault(id(tensor), name)
            is_anew = index is None or tensor is not self.tensors[index]
            found.append(Written(name, first, tensor if first == name else None, is_anew))
        return found


def _standing(module: nn.Module, key: str) -> torch.Tensor | None:
    return module._parameters[key] if key in module._parameters else tensor_at(module._buffers, key)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a value, as another one is: in its layout, and a parameter if that is one."""
    has_layout = form_or_none(tensor) == form_or_none(value)
    fresh = torch.empty_like(tensor, requires_grad=False).copy_(value) if has_layout else value.clone()
    return (
        nn.Parameter(fresh, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else fresh.requires_grad_(tensor.requires_grad)
    )
