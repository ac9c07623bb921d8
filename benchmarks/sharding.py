"""Training with `strategy: fsdp` against FSDP2 by hand, in two processes, a GPT of 30 million parameters."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cluster import scratch
from benchmarks.compare import Goal, at_least, at_most, compared
from benchmarks.measure import alternate, in_processes
from benchmarks.sharded import BATCH, LENGTH, WARM, blocked, peak, turns
from benchmarks.table import Row, bytes_text, time_text
from benchmarks.train import free_port

BY_HAND = "FSDP2 by hand"
WHAT = "a GPT of 30 M, 2 workers"
REPEATS, PEAKS = 7, 3
WORKERS = 2


def measure() -> Iterator[Row]:
    yield _rates("", {}, at_least(0.97))
    yield _rates(", bitwise", {"bitwise": True}, at_least(0.85))
    yield _checkpoint()
    yield _peak()


def _run(target: Callable[..., object], *args: Any) -> Any:
    port = free_port()
    given = [(rank, port, WORKERS, *args) for rank in range(WORKERS)]
    (found,) = in_processes(multiprocessing.get_context("spawn"), target, given)
    return found


def _rates(what: str, keys: dict[str, Any], goal: Goal) -> Row:
    pairs = [(BATCH / mine, BATCH / theirs) for mine, theirs in _run(turns, keys)[WARM:]]
    return compared(f"sharding: tokens a second, {WHAT}{what}", pairs, _tokens_text, BY_HAND, goal)


def _tokens_text(rows_per_second: float) -> str:
    return f"{rows_per_second * LENGTH:,.0f} tokens/s"


def _checkpoint() -> Row:
    with scratch() as folder:
        pairs = _run(blocked, str(folder), REPEATS)
    what = f"sharding: the loop waits for a checkpoint, {WHAT}"
    return compared(what, pairs, time_text, "torch.distributed.checkpoint.async_save", at_most(1.1))


def _peak() -> Row:
    pairs = alternate(lambda: _run(peak, True, {}), lambda: _run(peak, False, {}), PEAKS)
    what = f"sharding: a worker's memory grows by, {WHAT}, with a checkpoint"
    return compared(what, pairs, bytes_text, f"{BY_HAND}, with async_save", at_most(1.05))
