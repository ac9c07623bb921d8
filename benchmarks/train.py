"""Training against the plain loop of torch: DDP and DistributedSampler, and `torch.save` in the loop.

Both sides run in the same processes, whose allocator is set as dp_ray sets its workers', and take turns every few
steps. What that setting brings has a row of its own, with the plain loop on both sides.
"""

import multiprocessing
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.cluster import scratch
from benchmarks.compare import AHEAD, Goal, Pairs, at_least, at_most, compared, in_rounds
from benchmarks.measure import in_processes
from benchmarks.screening import added
from benchmarks.table import Row, rate_text, time_text
from benchmarks.training import (
    BATCH,
    ROUND,
    WARM,
    WorldLoop,
    allocating,
    blocked,
    ours,
    plain,
    plain_contrastive,
    worker,
)
from benchmarks.turns import Baton
from dp_ray.engine.world import World

REPEATS = 7
MEGABYTES = 500
NO_BAD_SAMPLES: dict[str, Any] = {"quarantine": 100, "finite": True}
AS_FAST, BITWISE, ACCUMULATING = at_least(0.98), at_least(0.90), at_least(1 / 1.1)
SIDES: list[tuple[str, str, dict[str, Any], int, Goal]] = [
    ("an MLP of 1.3 M", "mlp", {}, 1, AS_FAST),
    ("a conv net", "conv", {}, 1, AS_FAST),
    ("an MLP of 1.3 M, bitwise", "mlp", {"bitwise": True}, 1, BITWISE),
    ("a conv net, bitwise", "conv", {"bitwise": True}, 1, BITWISE),
    ("an MLP of 1.3 M, bitwise, 4 shards a worker", "mlp", {"bitwise": True, "shards": 8}, 4, ACCUMULATING),
    ("a conv net, bitwise, 4 shards a worker", "conv", {"bitwise": True, "shards": 8}, 4, ACCUMULATING),
]
WHAT = "train: rows a second"


def measure() -> Iterator[Row]:
    for what, model, keys, micro_batches, goal in SIDES:
        yield _side(what, model, keys, micro_batches, goal)
    yield _over_batch()
    yield _device_map()
    yield _on_error("loaded by the worker", {})
    yield _on_error("loaded by a process", {"loader": {"processes": 1}})
    yield _allocator()
    yield _checkpoint()


def _side(what: str, model: str, keys: dict[str, Any], micro_batches: int, goal: Goal) -> Row:
    seconds = in_turns(partial(ours, model, keys), partial(plain, model, micro_batches), workers=2)
    against = "DDP" if micro_batches == 1 else f"DDP, {micro_batches} micro-batches under no_sync"
    where = f"{WHAT}, 2 workers, global batches of {BATCH:,}, {what}"
    return compared(where, _rates(seconds), rate_text, against, goal)


def _over_batch() -> Row:
    """A loss that sees the whole batch, one shard a worker."""
    keys = {"loss": {"target": "benchmarks.training:contrastive", "over": "batch"}}
    seconds = in_turns(partial(ours, "mlp", keys), plain_contrastive, workers=2)
    what = f"{WHAT}, 2 workers, global batches of {BATCH:,}, an MLP of 1.3 M, a contrastive loss over the batch"
    return compared(what, _rates(seconds), rate_text, "DDP and a differentiable all_gather by hand", at_least(0.95))


def _device_map() -> Row:
    """What the hooks cost that move activations; here there is nothing to move."""
    on_two = {"device_map": "auto", "devices": ["cpu", "cpu"]}
    seconds = in_turns(partial(ours, "mlp", on_two), partial(ours, "mlp", {}), workers=1)
    what = f"{WHAT}, a Sequential of 1.3 M, device_map: auto on [cpu, cpu]"
    return compared(what, _rates(seconds), rate_text, "on one device", at_least(0.97))


def _on_error(what: str, keys: dict[str, Any]) -> Row:
    """What it costs to look for bad samples where there are none."""
    tolerant = {**keys, "on_error": NO_BAD_SAMPLES}
    where = f"train: a step of 100 ms, batches of {BATCH:,}, CPU time of on_error with finite, no bad sample, {what}"
    return compared(where, added(tolerant, keys), time_text, "without on_error", at_most(1.01))


def _allocator() -> Row:
    """What it brings that freed memory is kept (dp_ray/system/process.py): the other rows have it on both sides."""
    context = multiprocessing.get_context("spawn")
    batons = Baton.of(context), Baton.of(context)
    batons[0].may_run.release()
    loop = partial(plain, "conv", 1, World())
    found = dict(in_processes(context, allocating, [(0, batons, loop), (1, batons, loop)]))
    what = f"{WHAT}, plain torch, 1 worker, a conv net, freed memory kept by mallopt"
    seconds = in_rounds(list(zip(found[0], found[1], strict=True))[WARM:], ROUND)
    return compared(what, _rates(seconds), rate_text, "without", AHEAD)


def in_turns(mine: WorldLoop, theirs: WorldLoop, workers: int) -> Pairs:
    """The seconds of a step of both sides, in turns, by rounds.

    Of two equal sides the one that begins was 2 % slower. So each begins in half of the rounds, in own processes.
    """
    swapped = _in_order(theirs, mine, workers)
    return [*_in_order(mine, theirs, workers), *((ours, others) for others, ours in swapped)]


def _in_order(mine: WorldLoop, theirs: WorldLoop, workers: int) -> Pairs:
    """The same where `mine` begins; without the first turns."""
    port = free_port()
    arguments = [(rank, port, workers, mine, theirs) for rank in range(workers)]
    seconds: Pairs
    (seconds,) = in_processes(multiprocessing.get_context("spawn"), worker, arguments)
    return in_rounds(seconds[WARM:], ROUND)


def _rates(seconds: Pairs) -> Pairs:
    """Rows a second of each step's seconds."""
    return [(BATCH / mine, BATCH / theirs) for mine, theirs in seconds]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _checkpoint() -> Row:
    with scratch() as folder:
        pairs = blocked(folder, MEGABYTES, REPEATS)
    what = f"train: the loop waits for a checkpoint of {MEGABYTES} MB"
    return compared(what, pairs, time_text, "torch.save", at_most(0.2))
