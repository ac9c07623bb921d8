"""The history of a training: one row for each step, written in pieces with the checkpoints and merged at the end."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from dp_ray.plan.split import Split
from dp_ray.replica.trainer import Update
from dp_ray.results.arrow_numbers import table_of_rows
from dp_ray.rundir.history_file import CLOCKED, forget, write_piece
from dp_ray.storage import Storage
from dp_ray.system.waiting import waiting

SEND_SECONDS = 0.5


class Logged(NamedTuple):
    """New rows of the history, sent to the driver; a later row of a step replaces an earlier one."""

    rows: tuple[dict[str, Any], ...]


class History:
    """Rank 0's history; it reads the numbers from the device at most twice a second, and before each checkpoint.

    `new_data_wait` gives the seconds for which the worker has waited for data since its last call.
    """

    def __init__(
        self,
        folder: Storage,
        split: Split,
        names: Sequence[str],
        extra: Sequence[str],
        step: int,
        send: Callable[[Logged], None],
        new_data_wait: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._folder = folder
        self._split = split
        self._names = names
        self._extra = dict.fromkeys(extra)  # a dict keeps the order of the first measurement
        self._send = send
        self._new_data_wait = new_data_wait
        self._pending: list[tuple[int, Update, int, float, float, dict[str, float]]] = []
        self._rows: list[dict[str, Any]] = []
        self._first = step
        self._sent = self._ended = time.perf_counter()
        forget(folder, step)

    def add(self, step: int, update: Update, measured: dict[str, float]) -> None:
        """Add the row of a finished step; `measured` holds the values evaluated after it."""
        start, stop = self._split.batch(step)
        now = time.perf_counter()
        self._pending.append((step, update, stop - start, now - self._ended, self._new_data_wait(), measured))
        self._extra.update(dict.fromkeys(measured))
        self._ended = now
        if now - self._sent > SEND_SECONDS:
            self.flush()

    def resume_clock(self) -> None:
        """Leave the time since the last step, such as an evaluation's, out of the training speed."""
        self._ended = time.perf_counter()

    def flush(self) -> None:
        """Read the numbers from the device and send them to the driver."""
        with waiting("the GPU, which may be in a collective"):
            numbers = _read_updates([update for _, update, *_ in self._pending])
        rows = [self._row(*entry, *found) for entry, found in zip(self._pending, numbers, strict=True)]
        self._pending, self._sent = [], time.perf_counter()
        self._rows += rows
        if rows:
            self._send(Logged(tuple(rows)))

    def take(self) -> Callable[[], None]:
        """Return a function that writes the rows added since the last call as one piece."""
        self.flush()
        rows, self._rows = self._rows, []
        if not rows:
            return lambda: None
        name = f"steps-{rows[0]['step']}-{rows[-1]['step'] + 1}.parquet"
        table = table_of_rows(rows, history_schema(self._names, list(self._extra)))
        return lambda: write_piece(self._folder, name, table)

    def _row(
        self,
        step: int,
        update: Update,
        rows: int,
        seconds: float,
        data_wait: float,
        measured: dict[str, float],
        totals: list[float],
        norm: float,
        missing: float,
    ) -> dict[str, Any]:
        rows -= int(missing)
        means = {
            name: totals[2 * at] / totals[2 * at + 1] if totals[2 * at + 1] else float("nan")
            for at, name in enumerate(self._names)
        }
        return {
            "step": step,
            "epoch": self._split.cursor(step)[0],
            **means,
            "learning_rate": update.learning_rate,
            "gradient_norm": norm,
            "rows": rows,
            "rows_per_second": rows / seconds if seconds > 0 else 0.0,
            "data_wait_seconds": data_wait,
            **measured,
        }


def _read_updates(updates: Sequence[Update]) -> list[tuple[list[float], float, float]]:
    """The totals, the gradient norm and the missing rows of each update, read from the device all at once."""
    if not updates:
        return []
    sums = torch.stack([one.sums for one in updates])
    norms = torch.stack([one.gradient_norm for one in updates]).to(sums)
    rows = torch.cat([sums, norms.unsqueeze(1)], 1).tolist()
    return [(totals, norm, missing) for *totals, _, missing, norm in rows]


def history_schema(names: Sequence[str], extra: Sequence[str]) -> pa.Schema:
    """The columns of the history: those of every step, then `extra`, which only some steps have."""
    numbers = [*names, "learning_rate", "gradient_norm"]
    fields = [("step", pa.int64()), ("epoch", pa.int64()), *((name, pa.float64()) for name in numbers)]
    fields += [("rows", pa.int64()), *((name, pa.float64()) for name in (*CLOCKED, *extra))]
    return pa.schema(fields)
