"""A hash of each step's outputs, computed where the step is merged.

The digest of a step is the SHA-256 of its outputs' raw bytes: leaf after leaf, and each leaf row after row. So it
depends neither on workers and files, nor on how a leaf is stored.
"""

import hashlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.results.arrow_numbers import numbers, plain_values
from dp_ray.results.columns import Column, Layout, from_arrow, raw_bytes
from dp_ray.results.output_parts import POSITION

HELD_BYTES = 16 << 20  # of one leaf of one step; more of it is held on the local disk
PIECE = 1 << 20


class StepDigests:
    """The digests of the steps from `first_step` on; takes their rows in order, in blocks of any size."""

    def __init__(self, layout: Layout, batch_size: int, first_step: int) -> None:
        self.done: list[str] = []
        self._layout = layout
        self._batch_size = batch_size
        self._first_step = first_step
        self._begin()

    def take(self, block: pa.Table) -> None:
        """Take the next rows, with their positions."""
        steps = numbers(block.column(POSITION)) // self._batch_size
        borders = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
        for first, end in pairwise(borders):
            if first < end:
                self.through(int(steps[first]))
                self._add(block.slice(first, end - first))

    def through(self, step: int) -> None:
        """End all steps before `step`, also those without rows."""
        while self._first_step + len(self.done) < step:
            for leaf in self._others:
                leaf.seek(0)
                while piece := leaf.read(PIECE):
                    self._digest.update(piece)
            self.close()
            self.done.append(self._digest.hexdigest())
            self._begin()

    def close(self) -> None:
        """Remove what is held on the local disk."""
        for leaf in self._others:
            leaf.close()

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._others: list[Any] = []

    def _add(self, rows: pa.Table) -> None:
        """Hash the first leaf's bytes as they come, and hold those of all others, which come after them."""
        self._others = self._others or [SpooledTemporaryFile(HELD_BYTES) for _ in self._layout.columns[1:]]  # noqa: SIM115
        takers: list[Callable[[Any], Any]] = [self._digest.update, *(leaf.write for leaf in self._others)]
        for column, take in zip(self._layout.columns, takers, strict=True):
            for chunk in rows.column(column.name).chunks:
                for piece in _bytes_of(column, chunk):
                    take(piece)


def _bytes_of(column: Column, rows: pa.Array) -> Iterator[memoryview]:
    """The raw bytes of a leaf's rows."""
    if column.is_stored_raw:
        flat = rows.storage.flatten() if isinstance(rows, pa.ExtensionArray) else rows
        yield memoryview(plain_values(flat).data).cast("B")
        return
    leaf = from_arrow(column, rows)
    for tensor in leaf if isinstance(leaf, list) else [leaf]:
        yield raw_bytes(tensor)
