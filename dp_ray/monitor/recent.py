"""Keeps the history's rows since the last checkpoint in `recent.parquet`, so that running and failed runs show them.

A training writes its history in pieces, with its checkpoints. What comes after the last one only the driver has.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from dp_ray.errors import StorageError
from dp_ray.results.arrow_numbers import table_of_rows
from dp_ray.rundir.history_file import HISTORY, RECENT, end_of_pieces, write_piece
from dp_ray.storage import Storage

SECONDS = 2.0  # between two writes
SHARE = 0.01  # of the time, for writing


class RecentHistory:
    """Collects rows of the history and writes those that no piece holds yet; a repeated step replaces later ones."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._rows: list[dict[str, Any]] = []
        self._due = time.monotonic() + SECONDS

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows, and write them all if it is time."""
        if rows and self._rows and rows[0]["step"] <= self._rows[-1]["step"]:
            self._rows = [row for row in self._rows if row["step"] < rows[0]["step"]]
        self._rows += rows
        if time.monotonic() >= self._due:
            self.save()

    def close(self) -> None:
        """Write what is left."""
        self.save()

    def save(self) -> None:
        """Write the rows that no piece holds; a storage that fails is left to what must be written."""
        began = time.monotonic()
        with suppress(StorageError):
            kept = end_of_pieces(self._run.child(HISTORY))
            self._rows = [row for row in self._rows if row["step"] >= kept]
            if self._rows:
                write_piece(self._run, RECENT, _table_of(self._rows))
        ended = time.monotonic()
        self._due = ended + max(SECONDS, (ended - began) / SHARE)


def _table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows as a table with all of their columns: only some rows have measured values."""
    names = dict.fromkeys(name for row in rows for name in row)
    have_fractions = {name for row in rows for name, value in row.items() if not isinstance(value, int | None)}
    kinds = [(name, pa.float64() if name in have_fractions else pa.int64()) for name in names]
    return table_of_rows(rows, pa.schema(kinds))
