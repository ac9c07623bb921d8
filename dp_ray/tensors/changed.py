"""Have these tensors changed? By cost, `Stamps`, `digests` and `bits_differ` tell it, `Before` also what they were.

Stamps are versions and addresses: they show each write but one in place to what `.data` gives, or numpy. Digests of
the content show that too, and where there is a copy its bits do.
"""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dp_ray.tensors.flat import as_bytes

# `map` calls these for all tensors of a model in C.
VERSION = operator.attrgetter("_version")
ADDRESS = torch.Tensor.data_ptr

PIECE = 1 << 24  # bytes of a tensor whose digest is computed at once
PIECE_ON_CPU = 1 << 18  # there they stay in a core's cache, and torch asks no other thread
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
    for device in dict.fromkeys(tensor.device for tensor in tensors.values()):
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        # An odd number for each word of a piece, with bits that look random; the same numbers in pieces of any size.
        piece = min(PIECE_ON_CPU if device.type == "cpu" else PIECE, max(tensor.nbytes for tensor in here.values()))
        keys = torch.arange(max(1, -(-piece // 8)), device=device).mul_(ODD)
        keys ^= keys >> 29
        keys.mul_(ODD).bitwise_or_(1)
        of_each = torch.stack([_digest(tensor, keys) for tensor in here.values()]).tolist()
        found.update(zip(here, of_each, strict=True))
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


class Before:
    """What parameters hold before a forward: digests of all, copies of some."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], copied: Collection[str]) -> None:
        # A forward that replaces a parameter's data leaves these tensors, and so the value of before, as they are.
        self._tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        self.digests = digests(self._tensors)
        self._copies = {name: self._tensors[name].clone() for name in copied}
        self._looked_at: Collection[str] = self._tensors

    def written(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of those whose content, size or dtype has changed."""
        now = {name: parameters[name].detach() for name in self._looked_at}
        found, forms = digests(now), {name: (each.shape, each.dtype) for name, each in self._tensors.items()}
        return [
            name
            for name, tensor in now.items()
            if found[name] != self.digests[name] or (tensor.shape, tensor.dtype) != forms[name]
        ]

    def value(self, name: str) -> torch.Tensor | None:
        """Return the value of before; None if it is lost."""
        if name in self._copies:
            return self._copies[name]
        tensor = self._tensors.get(name)
        if tensor is None or digests({name: tensor})[name] != self.digests[name]:
            return None
        return tensor.clone()

    def look_at(self, names: Iterable[str]) -> None:
        """Have copies of these parameters alone, if there are any, and look at them alone."""
        self._looked_at = self._copies = {name: self._copies[name] for name in names if name in self._copies}
