"""Have these tensors changed? By cost, `Stamps`, `digests` and `bits_differ` tell it; `WriteWatch`, what they were.

Stamps are versions and addresses: they show each write but one in place to what `.data` gives, or numpy. Digests of
the content show that too, and where there is a copy its bits do.
"""

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dp_ray.tensors.flat import Form, as_bytes

# `map` calls these for all tensors of a model in C.
VERSION = operator.attrgetter("_version")
ADDRESS = torch.Tensor.data_ptr

PIECE = 1 << 24  # bytes of a tensor whose digest is computed at once
PIECE_ON_CPU = 1 << 18  # there they stay in a core's cache, and torch asks no other thread
EARLY_COPIES = 1 << 24  # bytes of the smallest parameters, of which early forwards have a copy
ODD = -0x61C8864680B583EB  # 2 ** 64 divided by the golden ratio: its bits look random
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their bytes


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


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter, which a write increments; None for an inference tensor, without one."""
    return None if tensor.is_inference() else tensor._version


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return a number of 64 bits for the content of each tensor; waits for each device once.

    Contents that differ, by their order too, have the same number by chance alone; at worst, if nothing but the signs
    of two numbers differ, once in 2 ** 30 pairs.
    """
    found: dict[str, int] = {}
    for names, of_each in begun_digests(tensors):
        found.update(zip(names, of_each.tolist(), strict=True))
    return found


@torch.no_grad()
def begun_digests(tensors: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Return the names of the tensors of each device, with their `digests` on it, for which nobody has waited yet."""
    found = []
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        # An odd number for each word of a piece, with bits that look random; the same numbers in pieces of any size.
        piece = min(PIECE_ON_CPU if device.type == "cpu" else PIECE, max(tensor.nbytes for tensor in here.values()))
        keys = torch.arange(max(1, -(-piece // 8)), device=device).mul_(ODD)
        keys ^= keys >> 29
        keys.mul_(ODD).bitwise_or_(1)
        found.append(([*here], torch.stack([_digest(tensor, keys) for tensor in here.values()])))
    return found


def _digest(tensor: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times the key of its place."""
    total = torch.zeros((), dtype=torch.int64, device=keys.device)
    for piece in torch.split(as_bytes(tensor), keys.nbytes):
        is_aligned_here = piece.storage_offset() % 8 == 0 and len(piece) % 8 == 0
        words = (piece if is_aligned_here else nn.functional.pad(piece, (0, -len(piece) % 8))).view(torch.int64)
        # A sign in the highest bit alone would change no other bit of a product: two of them would leave the sum.
        mixed, own = (words >> 29).add_(words), keys[: len(words)]
        total = total * 31 + (torch.dot(mixed, own) if mixed.device.type == "cpu" else mixed.mul_(own).sum())
    return total


def bits_differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return whether the bits of two tensors of one form differ, for each pair; waits for each GPU once."""
    bits = [(_bits(now), _bits(before)) for now, before in pairs]
    differ = [now.is_cpu and not torch.equal(now, before) for now, before in bits]
    for device in dict.fromkeys(now.device for now, _ in bits if not now.is_cpu):
        here = [at for at, (now, _) in enumerate(bits) if now.device == device]
        found = torch.stack([(bits[at][0] != bits[at][1]).any() for at in here]).tolist()
        for at, differs in zip(here, found, strict=True):
            differ[at] = differs
    return differ


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(BITS[tensor.dtype.itemsize])


class WriteWatch:
    """Notices what forwards write of parameters, and whether the values of before are known.

    The `stamps` of all that is `watched` show a write. In the first forwards `look` stands before a forward, and
    `written` after it: what `look` has of before shows those writes too that no stamp does. The value of before is
    known if it has a copy, or if `.data` was replaced.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self.watch_all_but(())
        self.first: dict[str, int] = {}  # digests of before the first forward
        self._averages: list[str] | None = None  # what may be one, once there was a first forward
        self.forget()

    def watch_all_but(self, names: Collection[str]) -> None:
        """Watch the parameters, as they are now, without these."""
        self.watched = {name: tensor for name, tensor in self._parameters.items() if name not in names}
        self.stamps = Stamps(self.watched)

    def forget(self) -> None:
        """Let go of what was before, at the end of a step."""
        self._before: dict[str, torch.Tensor] = {}
        self._digests: dict[str, int] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._looked_at: Collection[str] = ()

    def look(self, trained: Collection[str]) -> None:
        """Know what a step's first forward finds: digests of all in the very first one, then of what has a copy.

        Copies are made of the smallest, and of those that may be a momentum encoder's of what is `trained`.
        """
        self._small = self._smallest()
        if self._before:
            return
        is_first = self._averages is None
        twins = self._twins(trained) if self._averages is None else self._averages
        copied = dict.fromkeys(name for name in (*self._small, *twins) if name in self.watched)
        # A forward that replaces a parameter's data leaves these tensors, and so the value of before, as they are.
        self._before = {name: self.watched[name].detach() for name in (self.watched if is_first else copied)}
        self._digests = digests(self._before)
        self._copies = {name: self._before[name].clone() for name in copied}
        self._looked_at = self._before
        if is_first:
            self.first = self._digests
            # The first write of an average that is a copy may not change it.
            values = {self.first[name] for name in trained if name in self.first}
            self._averages = [name for name in twins if self.first[name] in values]

    def _smallest(self) -> list[str]:
        """Return the names of the smallest watched parameters, of EARLY_COPIES bytes together."""
        sizes = {name: tensor.nbytes for name, tensor in self.watched.items()}
        names = sorted(sizes, key=sizes.__getitem__)
        until = accumulate(sizes[name] for name in names)
        return [name for name, size in zip(names, until, strict=True) if size <= EARLY_COPIES]

    def _twins(self, trained: Collection[str]) -> list[str]:
        """Return the names of those that may be a momentum encoder's: each has the form of one that is trained.

        So their copies are no larger than the gradients.
        """
        left = Counter(_form(self._parameters[name]) for name in trained)
        names = []
        for name, tensor in self.watched.items():
            if name not in trained and left[_form(tensor)]:
                left[_form(tensor)] -= 1
                names.append(name)
        return names

    def written(self) -> dict[str, torch.Tensor | None]:
        """Return what was written since the last look, each with its value of before; None if that is lost."""
        found = self.stamps.written()
        if not self._before:
            return dict.fromkeys(found)
        now = {name: self.watched[name].detach() for name in self._looked_at if name in self.watched}
        contents = digests(now)
        differ = [
            name
            for name, tensor in now.items()
            if contents[name] != self._digests[name] or _form(tensor) != _form(self._before[name])
        ]
        values = {name: self._value(name) for name in (*differ, *found)}
        # Before the backward: so the copies of large ones are no more than its gradients.
        self._looked_at = self._copies = {name: self._copies[name] for name in self._small if name in self._copies}
        return values

    def _value(self, name: str) -> torch.Tensor | None:
        if name in self._copies:
            return self._copies[name]
        tensor = self._before.get(name)
        if tensor is None or digests({name: tensor})[name] != self._digests[name]:
            return None
        return tensor.clone()


def _form(tensor: torch.Tensor) -> Form:
    return Form(tensor.shape, tensor.dtype)
