"""Sums of shards' gradients, flat, on their way from worker to worker by the tree, then to the caller."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.engine.world import everyone
from dp_ray.plan.tree import Node, fold
from dp_ray.tasks.wire import Packed, PackedSum, SparseParts, owned, packed

ADDS_NOTHING = -0.0  # added to any number, it changes no bit


class Sum:
    """The sum of some shards' gradients: flat, one vector for each dtype, so that few messages carry it.

    A parameter that a shard has not used adds nothing. How many shards used each one stands at the end of the first
    vector. Sparse gradients stay sparse.
    """

    def __init__(
        self,
        trained: Sequence[torch.Tensor],
        sparse: frozenset[int],
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self._trained = trained
        self._sparse: dict[int, torch.Tensor | None] = dict.fromkeys(sorted(sparse))
        self._flats, self._views, self._used = _laid_out(trained, sparse)
        for number, one in enumerate(gradients or ()):
            if one is None:
                continue
            self._used[number] = 1
            if number in sparse:
                self._sparse[number] = one
            else:
                self._views[number].copy_(one)

    def add(self, other: "Sum") -> "Sum":
        """Add another sum into this one's memory, and return it."""
        for mine, theirs in zip(self._flats, other._flats, strict=True):
            mine.add_(theirs)
        for number, added in other._sparse.items():
            own = self._sparse[number]
            self._sparse[number] = added if own is None else own if added is None else own + added
        return self

    def send(self, to: int) -> None:
        """Send the sum to a worker, which calls `receive`."""
        for flat in self._flats:
            dist.send(flat, to, group=everyone())
        if self._sparse:
            parts = {number: _sparse_parts(one) for number, one in self._sparse.items()}
            dist.send_object_list([parts], to, group=everyone())

    def receive(self, sender: int) -> "Sum":
        """Return the sum of the same parameters that another worker sends."""
        received = Sum(self._trained, frozenset(self._sparse))
        for flat in received._flats:
            dist.recv(flat, sender, group=everyone())
        if self._sparse:
            parts: list[Any] = [None]
            dist.recv_object_list(parts, sender, group=everyone())
            device = self._flats[0].device
            received._sparse = {number: _of_parts(one, device) for number, one in parts[0].items()}
        return received

    def packed(self) -> PackedSum:
        """Return the sum as the caller gets it."""
        sparse = {number: _sparse_parts(one) for number, one in self._sparse.items()}
        return PackedSum(tuple(packed(flat) for flat in self._flats), sparse)


def gradients_of(found: PackedSum, trained: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each of `trained`, on its device; None for one that no shard has used."""
    if not trained:
        return []
    device = trained[0].device
    flats = [owned(one, device) for one in found.flats]
    used = flats[0][flats[0].numel() - len(trained) :].tolist()
    gradients: list[torch.Tensor | None] = [None] * len(trained)
    views = _views_of(trained, frozenset(found.sparse), flats)
    for number, count in enumerate(used):
        if count:
            sparse = number in found.sparse
            gradients[number] = _of_parts(found.sparse[number], device) if sparse else views[number]
    return gradients


def fold_of(held: Mapping[Node, Sum], node: Node) -> Sum:
    """Return the sum of a node of which this worker holds some part."""
    found = fold(held, node, Sum.add)
    assert found is not None, f"nothing is held of {node}"
    return found


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _laid_out(
    trained: Sequence[torch.Tensor], sparse: frozenset[int]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], torch.Tensor]:
    """Return vectors full of what adds nothing, a view for each dense gradient, and the counts of use."""
    device = trained[0].device if trained else torch.device("cpu")
    dense = [one for number, one in enumerate(trained) if number not in sparse]
    lengths: dict[torch.dtype, int] = dict.fromkeys([_real(one.dtype) for one in dense] or [torch.float32], 0)
    for one in dense:
        lengths[_real(one.dtype)] += one.numel() * (2 if one.dtype.is_complex else 1)
    first = next(iter(lengths))
    lengths[first] += len(trained)
    flats = [torch.full((length,), ADDS_NOTHING, dtype=dtype, device=device) for dtype, length in lengths.items()]
    used = flats[0][flats[0].numel() - len(trained) :].zero_()
    return flats, _views_of(trained, sparse, flats), used


def _views_of(
    trained: Sequence[torch.Tensor], sparse: frozenset[int], flats: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    by_dtype = {flat.dtype: flat for flat in flats}
    ends = dict.fromkeys(by_dtype, 0)
    views = {}
    for number, one in enumerate(trained):
        if number in sparse:
            continue
        dtype, length = _real(one.dtype), one.numel() * (2 if one.dtype.is_complex else 1)
        piece = by_dtype[dtype][ends[dtype] : ends[dtype] + length]
        ends[dtype] += length
        views[number] = (torch.view_as_complex(piece.view(-1, 2)) if one.dtype.is_complex else piece).view(one.shape)
    return views


def _sparse_parts(one: torch.Tensor | None) -> SparseParts | Packed | None:
    """Pack a sparse gradient; it may be dense on some worker."""
    if one is None or not one.is_sparse:
        return None if one is None else packed(one)
    one = one.coalesce()
    return SparseParts(packed(one.indices()), packed(one.values()), tuple(one.shape))


def _of_parts(parts: SparseParts | Packed | None, device: torch.device) -> torch.Tensor | None:
    if not isinstance(parts, SparseParts):
        return None if parts is None else owned(parts, device)
    indices, values = owned(parts.indices, device), owned(parts.values, device)
    return torch.sparse_coo_tensor(indices, values, parts.shape, is_coalesced=True, check_invariants=False)
