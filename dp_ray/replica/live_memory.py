"""Counts the bytes of tensors while they live, on real and on fake ones."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_ray.tensors.shards import is_sharded


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block: the bytes of all tensors that operations make, by device, until they are freed.

    What is kept beyond a step (parameters, gradients) is told by `keep`; all else counts as activations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.activations: Counter[str] = Counter()
        self.peak_activations: Counter[str] = Counter()
        # The most activations there were beside each number of bytes that are kept.
        self.beside: dict[tuple[str, int], int] = {}
        self._sizes: dict[int, tuple[str, int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._kept: set[int] = set()
        self._resize: Any = torch.UntypedStorage.resize_

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as kept; they may have been counted as activations before."""
        for tensor in tensors:
            self._see(tensor)
            number = id(tensor.untyped_storage())
            if number not in self._kept:
                self._kept.add(number)
                device, size = self._sizes[number]
                self.activations[device] -= size

    def __enter__(self) -> "LiveMemory":
        # FSDP frees and makes a gathered block's memory by it, which no operation shows.
        torch.UntypedStorage.resize_ = self._noting_resize()  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor) and not is_sharded(one):
                self._see(one)
        return results

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number = id(storage)
        if number not in self._references:
            self._sizes[number] = (str(tensor.device), 0)
            self._references[number] = weakref.ref(storage, lambda _: self._forget(number))
            self._set(number, storage.nbytes())

    def _forget(self, number: int) -> None:
        self._set(number, 0)
        del self._references[number], self._sizes[number]
        self._kept.discard(number)

    def _set(self, number: int, size: int) -> None:
        device, before = self._sizes[number]
        self._sizes[number] = (device, size)
        self.live[device] += size - before
        self.peak[device] = max(self.peak[device], self.live[device])
        if number not in self._kept:
            now = self.activations[device] = self.activations[device] + size - before
            self.peak_activations[device] = max(self.peak_activations[device], now)
            kept = (device, self.live[device] - now)
            self.beside[kept] = max(self.beside.get(kept, 0), now)

    def _noting_resize(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            if id(storage) in self._references:
                self._set(id(storage), storage.nbytes())
            return storage

        return resize_
