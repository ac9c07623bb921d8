"""How a GPU's numbers come to the host while it goes on: streams beside the computing one, and copies."""

import functools

import torch


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
