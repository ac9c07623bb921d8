"""How a GPU's numbers come to the host while it goes on: streams beside the computing one, copies, pinned memory."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from dp_ray.tensors.flat import room, views

PIECE = 1 << 26  # bytes that are pinned at once


@functools.cache
def side_stream(device: torch.device, use: str) -> "torch.cuda.Stream":
    """Return this process's stream of a GPU beside the computing one, the same for each `use`.

    torch keeps the memory that was made in a stream for that stream: one more for each evaluation would keep as much
    once more.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def entered(stream: torch.Stream) -> torch.Stream:
    """Return the stream as an object for one `with` block, or for blocks one after another.

    The object keeps what was current before the block. `torch.cuda.stream` does the same in Python, not in C.
    """
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


ON_GPU = "the GPU, which may be in a collective"  # the task for which a worker waits while it reads the copy


class HostCopy:
    """A GPU's numbers on their way to the host, for which nothing waits until they are read.

    They must not change until then. With `beside`, the computing stream does not wait for the copy either.
    """

    def __init__(self, numbers: torch.Tensor, beside: bool = False) -> None:
        stream = torch.cuda.current_stream(numbers.device.index)
        self.here = torch.empty_like(numbers, device="cpu", pin_memory=True)
        # Who waits for it sleeps, where CUDA would keep a core busy: it is read some steps later.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if beside:
            self._copied.record(stream)
            stream = side_stream(numbers.device, "outputs")
            stream.wait_event(self._copied)
            # Else the allocator could give their memory away before the side stream has read it.
            numbers.record_stream(stream)
        with entered(stream):
            self.here.copy_(numbers, non_blocking=True)
        self._copied.record(stream)

    def is_here(self) -> bool:
        """Return whether to read them would not wait."""
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """Return them on the host; wait for the GPU to have computed them."""
        if not self.is_here():
            self._copied.synchronize()
        return self.here


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
