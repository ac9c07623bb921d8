"""Training against the plain loop: DDP and DistributedSampler in two processes, and `torch.save` in the loop."""

import contextlib
import multiprocessing
import socket
from statistics import median
from typing import Any

from benchmarks.cluster import scratch
from benchmarks.measure import alternate, medians
from benchmarks.table import Row, share, time_text
from benchmarks.training import BATCH, blocked, worker
from benchmarks.training import ours as rows_per_second
from dp_ray.replica.world import CPU, World

REPEATS = 5
MEGABYTES = 500
SIDES: list[tuple[str, str, dict[str, Any], int, float]] = [
    ("an MLP of 1.3 M", "mlp", {}, 1, 0.98),
    ("a conv net", "conv", {}, 1, 0.98),
    ("an MLP of 1.3 M, bitwise", "mlp", {"bitwise": True}, 1, 0.90),
    ("a conv net, bitwise", "conv", {"bitwise": True}, 1, 0.90),
    ("an MLP of 1.3 M, bitwise, 4 shards a worker", "mlp", {"bitwise": True, "shards": 8}, 4, 1 / 1.1),
    ("a conv net, bitwise, 4 shards a worker", "conv", {"bitwise": True, "shards": 8}, 4, 1 / 1.1),
]


def measure() -> list[Row]:
    return [*(_side(*side) for side in SIDES), _device_map(), _checkpoint()]


def _side(what: str, model: str, keys: dict[str, Any], micro_batches: int, at_least: float) -> Row:
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    args = (_ports(), REPEATS, model, keys, micro_batches, told)
    workers = [context.Process(target=worker, args=(rank, *args)) for rank in range(4)]
    for process in workers:
        process.start()
    rates = dict(told.get() for _ in range(2))
    for process in workers:
        process.join()
    ours, theirs = median(rates[1]), median(rates[0])
    against = "DDP" if micro_batches == 1 else f"DDP, {micro_batches} micro-batches under no_sync"
    return Row(
        f"train: rows a second, 2 workers, global batches of {BATCH:,}, {what}",
        f"{ours:,.0f} rows/s",
        f"{theirs:,.0f} rows/s {against}",
        share(ours, theirs),
        f"at least {at_least:.2f}",
        ours >= at_least * theirs,
    )


def _ports() -> list[int]:
    """Three free ports."""
    with contextlib.ExitStack() as bound:
        free = [bound.enter_context(socket.socket()) for _ in range(3)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in free]


def _device_map() -> Row:
    """What the hooks cost that move activations; here there is nothing to move."""
    keys: dict[str, Any] = {"device_map": "auto", "devices": ["cpu", "cpu"]}
    on_two = World(all_devices=(CPU, CPU))
    pairs = alternate(
        lambda: rows_per_second("mlp", on_two, **keys), lambda: rows_per_second("mlp", World()), REPEATS
    )
    ours, theirs = medians(pairs)
    return Row(
        "train: rows a second, a Sequential of 1.3 M, device_map: auto on [cpu, cpu]",
        f"{ours:,.0f} rows/s",
        f"{theirs:,.0f} rows/s on one device",
        share(ours, theirs),
        "at least 0.97",
        ours >= 0.97 * theirs,
    )


def _checkpoint() -> Row:
    with scratch() as folder:
        ours, theirs = medians(blocked(folder, MEGABYTES, REPEATS))
    return Row(
        f"train: the loop waits for a checkpoint of {MEGABYTES} MB",
        time_text(ours),
        f"{time_text(theirs)} torch.save",
        share(ours, theirs),
        "at most 0.2",
        ours <= 0.2 * theirs,
    )
