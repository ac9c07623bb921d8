"""Memory of the host that is pinned, so that GPUs copy to it without waiting: `PinnedMemory`, of a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from dp_ray.tensors.flat import room, views

PIECE = 1 << 26  # bytes that are pinned at once


class PinnedMemory:
    """Memory of the host to which GPUs copy without waiting: of exactly the size that is needed, and given back.

    torch's own is in powers of two, nearly twice as much at worst, and is never given back to the system.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []  # those that are pinned
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._places: dict[str, torch.Tensor] = {}

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a place for each of a GPU's tensors; the same as last time, if they have the same sizes."""
        for _ in self.pinned(tensors):
            pass
        return self._places

    def pinned(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Take the places piece by piece: while one is pinned, the driver lets no thread launch a kernel.

        There are no places before the last piece is pinned.
        """
        layout, can_pin = [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()], True
        if layout == self._layout:
            return
        self.free()
        for names in _in_pieces(tensors):
            forms = [tensors[name] for name in names]
            # Written first: the system then gives the pages here, not while the driver is locked.
            memory = torch.empty(sum(map(room, forms)), dtype=torch.uint8).zero_()
            can_pin = can_pin and self._pin(memory, forms[0].device)
            self._places.update(zip(names, views(memory, forms), strict=True))
            yield
        self._layout = layout

    def _pin(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Pin a piece; return whether it is. Copies to memory that is not pinned wait."""
        portable = 1  # for all GPUs of the process
        is_pinned = not int(_cudart().cudaHostRegister(memory.data_ptr(), len(memory), portable))
        if is_pinned:
            self._pieces.append(memory)
        else:  # torch would raise CUDA's last error at the next kernel
            with suppress(RuntimeError):
                torch.ones(1, device=device)
        return is_pinned

    def free(self) -> None:
        """Give the memory back; nobody may use the places any more."""
        for memory in self._pieces:
            _cudart().cudaHostUnregister(memory.data_ptr())
        self._pieces, self._layout, self._places = [], [], {}


def _in_pieces(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of the tensors of each piece, which has PIECE bytes or a single tensor.

    A GPU's copy must not reach from one piece into the next.
    """
    pieces: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        if not pieces or size + tensor.nbytes > PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(name)
        size += tensor.nbytes
    return pieces


def _cudart() -> Any:
    """Return CUDA's runtime, as torch wraps it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
