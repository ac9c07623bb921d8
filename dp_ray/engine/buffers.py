"""The state of modules that their calls may write (`Writable`): buffers, and parameters that were seen to be written.

`Stamps`, `Before` and digests show a write, `Copies` put values back; `forward_state.py` says when each of them is
used. At the end of the module: where buffers are, which share memory, and how they are made or copied.
"""

import functools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from dp_ray.engine.alignment import is_aligned
from dp_ray.errors import ModelError
from dp_ray.tensors.files import is_sharded, overlaps
from dp_ray.tensors.flat import Form, as_bytes

# Of these dtypes, one kernel on a GPU copies many tensors.
TOGETHER = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
LARGEST_COPY = 1 << 31  # bytes of the modules beside a model of which a copy is made

Roots = Mapping[str, nn.Module]  # modules by the beginning of their tensors' names; the model's is empty
OUTSIDE = "."  # the first letter of a name beside the model: none in a model begins with it
Values = dict[str, torch.Tensor | None]
Place = tuple[Any, str]  # a module's buffers, and a key of them
Shared = tuple[str, bool]  # the first buffer in the same memory, and whether both are one tensor
Groups = list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # tensors, and those that are copied into them
NONE: Roots = {}

EARLY = 3  # steps: a momentum encoder that is a copy of another begins to change in the second one
EARLY_COPIES = 1 << 24  # bytes of the smallest parameters, of which early steps have a copy
SMALL = 1 << 18  # bytes: to copy and to send them takes about as long as the smallest collective

# `map` calls these for all tensors of a model in C.
VERSION = operator.attrgetter("_version")
LOOK = operator.attrgetter("shape", "dtype", "requires_grad")
ADDRESS = torch.Tensor.data_ptr

PIECE = 1 << 24  # bytes of a tensor whose digest is computed at once
PIECE_ON_CPU = 1 << 18  # there they stay in a core's cache, and torch asks no other thread
ODD = -0x61C8864680B583EB  # 2 ** 64 divided by the golden ratio: its bits look random

ADVICE = "write it in one of these too, or make it a buffer (register_buffer)"
LOST = (
    "in place, so that its value of before is lost, from which each shard must start: give it new data "
    "(parameter.data = value), or make it a buffer (register_buffer)"
)


class Stamps:
    """Versions and addresses of tensors: a write changes a version, and new data in `.data` an address.

    A write to what `.data` gives changes neither. Inference tensors have no version, fake ones no address.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        versioned = {name: tensor for name, tensor in tensors.items() if not tensor.is_inference()}
        # A fake or an empty tensor has no address: to ask a fake one for it warns, or raises.
        placed = {
            name: tensor
            for name, tensor in tensors.items()
            if not isinstance(tensor, FakeTensor) and tensor.data_ptr() != 0
        }
        self._names = [*versioned, *placed]
        self._versioned, self._placed = list(versioned.values()), list(placed.values())
        self.note()

    def note(self) -> None:
        """Look from here on."""
        self._noted = [*map(VERSION, self._versioned), *map(ADDRESS, self._placed)]

    def written(self) -> list[str]:
        """Return the names of the tensors that were written since the last look."""
        before = self._noted
        self.note()
        if self._noted == before:
            return []
        pairs = zip(self._names, self._noted, before, strict=True)
        return list(dict.fromkeys(name for name, now, earlier in pairs if now != earlier))


class Copies:
    """Values of a state's tensors, and the tensors that held them: these tell which of them share memory.

    While it `fits`, `take` copies the tensors to the values, and `put` the values to the tensors: all but those
    `apart` at once, and Python looks at no single tensor.
    """

    def __init__(self, of: "Writable", tensors: Values, values: Values, apart: Collection[str] = ()) -> None:
        self.tensors, self.values, self.apart = tensors, values, apart
        self._places, self._followed, self._aligns = of._places, of._followed, of._aligns
        self._spots, self._standing = list(of._places.values()), [tensors.get(name) for name in of._places]
        self._live = list(present_in(tensors).values())
        self._looks = self._look()
        self._can_fit = (
            tensors.keys() >= of._places.keys() | of._followed.keys()
            and layouts_of(tensors) == layouts_of(values)
            and not any(tensor.is_inference() or (self._aligns and not is_aligned(tensor)) for tensor in self._live)
        )
        pairs = [
            (tensor, value)
            for name, tensor in present_in(tensors).items()
            if (value := values.get(name)) is not None and name not in apart
        ]
        groups = grouped(pairs)
        copy = torch.no_grad()(copy_groups) if any(tensor.requires_grad for tensor in self._live) else copy_groups
        self.put = functools.partial(copy, groups)
        self.take = functools.partial(copy, [(into, live) for live, into in groups])

    def _look(self) -> list[Any]:
        return [*map(LOOK, self._live), *(map(ADDRESS, self._live) if self._aligns else ())]

    def fits(self, of: "Writable") -> bool:
        """Return whether these very tensors are the state's now, in the same form as the values."""
        if not self._can_fit or of._places is not self._places or of._followed is not self._followed:
            return False
        try:
            standing = [held[key] for held, key in self._spots]
        except KeyError:  # a forward has removed it
            return False
        return all(map(operator.is_, standing, self._standing)) and self._look() == self._looks

    @functools.cached_property
    def stamps(self) -> Stamps:
        """The stamps of the tensors."""
        return Stamps(present_in(self.tensors))

    def differs(self) -> bool:
        """Return whether the content of a tensor is not its value."""
        return digests(present_in(self.tensors)) != digests(present_in(self.values))


class Before:
    """What parameters hold before the forwards of an early step: digests of all, copies of some, by name."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], copied: Iterable[str]) -> None:
        # A forward that replaces a parameter's data leaves these tensors, and so the value of before, as they are.
        self._tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        self._digests = digests(self._tensors)
        self._copies = {name: self._tensors[name].clone() for name in copied}

    def written(self, parameters: Mapping[str, nn.Parameter], looks_at_all: bool = True) -> list[str]:
        """Return the names of those whose content, size or dtype has changed; else only of those with a copy."""
        now = {name: parameters[name].detach() for name in (self._tensors if looks_at_all else self._copies)}
        found = digests(now)
        return [
            name
            for name, tensor in now.items()
            if found[name] != self._digests[name] or layout_of(tensor) != layout_of(self._tensors[name])
        ]

    def value(self, name: str) -> torch.Tensor | None:
        """Return the value of before; None if it is lost."""
        if name in self._copies:
            return self._copies[name]
        tensor = self._tensors[name]
        return tensor.clone() if digests({name: tensor})[name] == self._digests[name] else None


class Writable:
    """The buffers of a model and of modules beside it, and the parameters that their calls write, by their names.

    With `aligns`, a buffer begins at a multiple of 16 bytes, also where a forward has set a view in its place.
    """

    def __init__(self, model: nn.Module, beside: Roots, aligns: bool = False) -> None:
        self._aligns = aligns
        self._model = model
        self.beside = beside
        self._roots = {"": model, **beside}
        self._parameters = dict(named_parameters_of(self._roots))
        self._known = {id(parameter) for parameter in self._parameters.values()}
        self._sharded = {name: parameter for name, parameter in self._parameters.items() if is_sharded(parameter)}
        self._plain = {name: parameter for name, parameter in self._parameters.items() if can_be_copied(parameter)}
        self._places = places_of(self._roots)
        self._static = frozenset(self._always_followed())
        self._followed: dict[str, nn.Parameter] = {}  # they are copied
        self._follow(self._static)

    def _always_followed(self) -> Iterator[str]:
        """Yield the parameters that are always copied: of an embedding with `max_norm`, and small frozen ones."""
        for name, module in modules_of(self._roots):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                weight = joined(name, "weight")
                if weight in self._plain:
                    yield weight
        outside = {name: tensor for name, tensor in self._plain.items() if name.startswith(OUTSIDE)}
        # Of a sharded model, each worker holds few parameters whole.
        frozen = {
            name: tensor
            for name, tensor in self._plain.items()
            if name not in outside and (self._sharded or not tensor.requires_grad)
        }
        for few in (frozen, outside):
            if sum(tensor.nbytes for tensor in few.values()) <= SMALL:
                yield from few

    def _now(self) -> Values:
        buffers = {name: held[key] for name, (held, key) in self._places.items() if key in held}
        return {**buffers, **self._followed}

    def _take(self, last: Copies) -> Copies:
        """Copy all values as they are now, into the memory of the last ones if these fit."""
        if not last.fits(self):
            now = self._now()
            last = Copies(
                self,
                now,
                {name: None if tensor is None else torch.empty_like(tensor) for name, tensor in now.items()},
            )
        last.take()
        return last

    def _put(self, copies: Copies, written: Collection[str] = ()) -> None:
        """Set all to the values of copies; of those apart, only the ones that are written."""
        if not written and copies.fits(self):
            copies.put()
        else:
            self._put_anew(copies, written)

    def _put_anew(self, copies: Copies, written: Collection[str]) -> None:
        """Do so where a forward may have set a tensor anew, or has given it another form.

        What it has set anew gets its tensor of before, with which others may share memory; without one, that of now.
        A buffer of another size is made anew.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        made: dict[int, torch.Tensor] = {}
        for name, (held, key) in self._places.items():
            now, value = tensor_at(held, key), copies.values.get(name)
            into = copies.tensors.get(name, now)
            if value is None:
                if name in copies.values:
                    held[key] = None
                elif key in held:
                    del held[key]
                continue
            if (
                into is not None
                and layout_of(into) == layout_of(value)
                and not (self._aligns and not is_aligned(into))
            ):
                if name not in copies.apart or name in written:
                    pairs.append((into, value))
            else:
                into = made.setdefault(id(value if into is None else into), value.clone())
            if into is not now:
                held[key] = into
        for name, parameter in self._followed.items():
            value = copies.values.get(name)
            if value is not None:
                if layout_of(value) != layout_of(parameter):
                    raise ModelError(f"the forward gave the parameter {name} another size or dtype")
                pairs.append((parameter, value))
        copy_all([into for into, _ in pairs], [value for _, value in pairs])

    def _follow(self, names: Iterable[str]) -> None:
        """Copy these parameters from now on, and watch the others."""
        self._followed = {**self._followed, **{name: self._plain[name] for name in names}}
        self._watched = Stamps({name: tensor for name, tensor in self._plain.items() if name not in self._followed})

    def _check_parameters(self) -> None:
        """Raise ModelError if there is a parameter that was not there before."""
        for name, parameter in named_parameters_of(self._roots):
            if name not in self._parameters or (not self._sharded and id(parameter) not in self._known):
                raise ModelError(
                    f"the forward made the parameter {shown(name)}, which no optimizer trains and each worker draws "
                    "by itself: make it in the constructor, or run a batch through the model where it is made"
                )

    def _smallest(self) -> list[str]:
        """Return the names of the smallest parameters that are not followed, of EARLY_COPIES bytes together."""
        names, left = [], EARLY_COPIES
        for name, tensor in sorted(self._watched.tensors.items(), key=lambda pair: pair[1].nbytes):
            left -= tensor.nbytes
            if left < 0:
                break
            names.append(name)
        return names

    def _twins(self) -> list[str]:
        """Return the names of the frozen parameters that may be a momentum encoder's: each is as one that is trained.

        So their copies are no larger than the gradients.
        """
        is_trained = {
            name: tensor.requires_grad and not name.startswith(OUTSIDE) for name, tensor in self._plain.items()
        }
        trained = Counter(layout_of(tensor) for name, tensor in self._plain.items() if is_trained[name])
        names = []
        for name, tensor in self._watched.tensors.items():
            if not is_trained[name] and trained[layout_of(tensor)]:
                trained[layout_of(tensor)] -= 1
                names.append(name)
        return names


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a number of 64 bits for the content of each tensor; waits for each device once.

    Contents that differ, by their order too, have the same number by chance alone; at worst, if nothing but the signs
    of two numbers differ, once in 2 ** 30 pairs.
    """
    found: dict[str, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        keys = _keys(device, max(tensor.nbytes for tensor in here.values()))
        found.update(
            zip(here, torch.stack([_digest(tensor, keys) for tensor in here.values()]).tolist(), strict=True)
        )
    return found


def _keys(device: torch.device, largest: int) -> torch.Tensor:
    """Return an odd number, with bits that look random, for each word of a piece: int64 [words].

    A piece has at most as many bytes as the largest tensor, and the same numbers in any size.
    """
    piece = min(PIECE_ON_CPU if device.type == "cpu" else PIECE, largest)
    keys = torch.arange(max(1, -(-piece // 8)), device=device).mul_(ODD)
    keys ^= keys >> 29
    return keys.mul_(ODD).bitwise_or_(1)


def _digest(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times the key of its place."""
    total: torch.Tensor | None = None
    for piece in torch.split(as_bytes(tensor), keys.nbytes):
        is_aligned_here = piece.storage_offset() % 8 == 0 and len(piece) % 8 == 0
        words = (piece if is_aligned_here else nn.functional.pad(piece, (0, -len(piece) % 8))).view(torch.int64)
        # A sign in the highest bit alone would change no other bit of a product: two of them would leave the sum.
        mixed, own = (words >> 29).add_(words), keys[: len(words)]
        found = torch.dot(mixed, own) if mixed.device.type == "cpu" else mixed.mul_(own).sum()
        total = found if total is None else total * 31 + found
    assert total is not None  # what is empty has a piece too
    return total


@contextmanager
def on_copies(modules: Roots) -> Iterator[None]:
    """Run the block with copies in the place of the tensors of modules beside a model, if these are not too large.

    A graph that waits for its backward may need the tensors as they are: to write their old values would be a write.
    """
    places = {name: (held, key, tensor_at(held, key)) for name, (held, key) in places_of(modules).items()}
    large = sum(parameter.nbytes for _, parameter in named_parameters_of(modules)) > LARGEST_COPY
    parameters = [
        (module._parameters, key, parameter)
        for _, module in (() if large else modules_of(modules))
        for key, parameter in module._parameters.items()
        if parameter is not None and can_be_copied(parameter)
    ]
    held_now = [*places.values(), *parameters]
    copies = {id(tensor): tensor.detach().clone() for _, _, tensor in held_now if tensor is not None}
    try:
        for held, key, parameter in held_now:
            fresh = None if parameter is None else copies[id(parameter)]
            if fresh is not None and isinstance(parameter, nn.Parameter):
                fresh = nn.Parameter(fresh, parameter.requires_grad)
            held[key] = fresh
        yield
    finally:
        for name, (held, key) in places_of(modules).items():
            if name not in places:
                del held[key]
        for held, key, parameter in held_now:
            held[key] = parameter


def shown(name: str) -> str:
    """Return the name of a tensor, or of a module beside the model, for errors."""
    return name.removeprefix(OUTSIDE)


def same_buffers(model: nn.Module, copy: nn.Module) -> None:
    """Give a copy of a model the buffers that the model's forwards have made since."""
    lasting, theirs = non_persistent({"": model}), places_of({"": copy})
    for name, place in places_of({"": model}).items():
        if name not in theirs:
            register_buffer({"": copy}, name, name not in lasting)
        held, key = places_of({"": copy})[name] if name not in theirs else theirs[name]
        tensor = tensor_at(*place)
        if layout_of(tensor_at(held, key)) != layout_of(tensor):
            held[key] = None if tensor is None else tensor.detach().clone()
    places = places_of({"": copy})
    share(places, shared_in(held_in(places_of({"": model}))))


def modules_of(roots: Roots) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in others, each once, by their names."""
    seen: set[nn.Module] = set()
    for name, root in roots.items():
        yield from root.named_modules(seen, name)


def named_parameters_of(roots: Roots) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules, each once, by their names."""
    seen: set[int] = set()
    for prefix, root in roots.items():
        for name, parameter in root.named_parameters(prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def places_of(roots: Roots) -> dict[str, Place]:
    """Return the place of each dense buffer, by its name; a buffer that is None too."""
    return {
        joined(prefix, key): (module._buffers, key)
        for prefix, module in modules_of(roots)
        for key, buffer in module._buffers.items()
        if buffer is None or (buffer.layout is torch.strided and not buffer.is_quantized)
    }


def shared_in(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Shared]:
    """Return which tensors share memory with one before them."""
    firsts: dict[int, str] = {}
    shared: dict[str, Shared] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            first = firsts.setdefault(tensor.untyped_storage()._cdata, name)
            if first != name:
                shared[name] = first, tensor is tensors[first]
    return shared


def sharing(tensors: Values, wanted: Mapping[str, Shared]) -> Values:
    """Return tensors of the same values that share memory as is wanted.

    What is a part of another can be made apart, but not made a part.
    """
    now, made = shared_in(tensors), dict(tensors)
    for name, tensor in tensors.items():
        first, is_same = wanted.get(name, (name, True))
        if tensor is None or now.get(name, (name, True)) == (first, is_same):
            continue
        if first == name:
            made[name] = tensor.detach().clone()
        elif is_same and made.get(first) is not None:
            made[name] = made[first]
    return made


def share(places: Mapping[str, Place], wanted: Mapping[str, Shared]) -> None:
    """Have the tensors in these places share memory as is wanted."""
    tensors = held_in(places)
    for name, tensor in sharing(tensors, wanted).items():
        if tensor is not tensors[name]:
            held, key = places[name]
            held[key] = tensor


def held_in(places: Mapping[str, Place]) -> Values:
    """Return the buffers in places."""
    return {name: tensor_at(*place) for name, place in places.items()}


def tensor_at(held: Any, key: str) -> torch.Tensor | None:
    """Return the tensor in a place; None if there is none."""
    buffer: torch.Tensor | None = held[key] if key in held else None  # noqa: SIM401  TorchScript's has no `get`
    return buffer


def register_buffer(roots: Roots, name: str, is_persistent: bool) -> None:
    """Register a buffer. Raises ModelError if there is no such module."""
    prefix, _, key = name.rpartition(".")
    module = dict(modules_of(roots)).get(prefix)
    if module is None:
        raise ModelError(f"the checkpoint has the buffer {shown(name)}, unlike this job")
    module.register_buffer(key, None, is_persistent)


def non_persistent(roots: Roots) -> set[str]:
    """Return the names of the buffers that no state_dict has."""
    return {
        joined(prefix, key)
        for prefix, module in modules_of(roots)
        for key in getattr(module, "_non_persistent_buffers_set", ())
    }


def can_be_copied(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be copied and sent as it is."""
    return not (
        is_lazy(parameter)
        or parameter.is_meta
        or is_sharded(parameter)
        or parameter.layout is not torch.strided
        or parameter.is_quantized
        or overlaps(parameter)
    )


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter, which a write increments; None for an inference tensor, without one."""
    return None if tensor.is_inference() else tensor._version


def layout_of(tensor: torch.Tensor | None) -> Form | None:
    """Return a tensor's size and dtype; None of none."""
    return None if tensor is None else Form(tensor.shape, tensor.dtype)


def layouts_of(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Form | None]:
    return {name: layout_of(tensor) for name, tensor in tensors.items()}


def present_in(values: Values) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in values.items() if tensor is not None}


@torch.no_grad()
def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy the values into the tensors, many at once: on a GPU each single copy is a kernel."""
    copy_groups(grouped(list(zip(into, values, strict=True))))


def grouped(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Groups:
    """Return the tensors of each device and dtype, and the values to copy into them."""
    kinds = [(into.device, into.dtype) for into, _ in pairs]
    groups = [
        [pair for pair, own_kind in zip(pairs, kinds, strict=True) if own_kind == kind]
        for kind in dict.fromkeys(kinds)
    ]
    return [([into for into, _ in group], [value for _, value in group]) for group in groups]


def copy_groups(groups: Groups) -> None:
    for into, values in groups:
        if into[0].dtype in TOGETHER:
            torch._foreach_copy_(into, values)
        else:
            for tensor, value in zip(into, values, strict=True):
                tensor.copy_(value)
