"""What it costs a step that the others could go on if a worker were lost: calls, collectives and waits, by counts.

Two processes train the same, ready for it and not. Python's own profiler counts what the thread of the loop calls.
"""

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from benchmarks.calls import HOME, Call, Calls
from benchmarks.measure import in_processes
from benchmarks.table import Row
from benchmarks.train import free_port
from benchmarks.training import job_of, joined
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.storage import Storage
from dp_ray.tasks.held import Held
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train

KEYS: dict[str, Any] = {"max_steps": 30, "checkpoint": {"every_seconds": None}}
SHARE = 0.9  # of the steps that call a function so often at least; what comes by the clock is left out
COLLECTIVES = ("allreduce", "allgather", "broadcast", "reduce_scatter", "alltoall", "barrier", "send", "recv")
WAITS = ("wait", "synchronize", "acquire", "sleep", "join", "item")
KINDS = ("own calls", "collectives", "waits")


class Counted(StepControl):
    """Counts all calls from step to step."""

    def __init__(self) -> None:
        self.calls = Calls()

    def before(self, step: int) -> None:
        self.calls.begin()

    def through(self) -> None:
        self.calls.end()


def measure() -> Iterator[Row]:
    port = free_port()
    arguments = [(rank, port) for rank in range(2)]
    (found,) = in_processes(multiprocessing.get_context("spawn"), counting, arguments)
    for which, (ready, plain) in zip(("", ", bitwise"), found, strict=True):
        what = f"train: a step, undisturbed, 2 workers{which}, ready to go on: own calls, collectives, waits"
        mine, theirs = (", ".join(f"{counts[kind]}" for kind in KINDS) for counts in (ready, plain))
        yield Row(what, mine, f"{theirs} restart", "", "none more", all(ready[kind] <= plain[kind] for kind in KINDS))


def counting(rank: int, port: int, told: Any) -> None:
    """One of the processes that train; rank 0 puts what it counts into `told`: ready to go on, and not."""
    world = joined(rank, port, 2)
    found = []
    for bitwise in (False, True):
        job = job_of("linear", {**KEYS, "bitwise": bitwise}, world)
        counts_of(job, world, Held())  # fills caches
        found.append((counts_of(job, world, Held()), counts_of(job, world, None)))
    if rank == 0:
        told.put(found)
    dist.barrier()
    dist.destroy_process_group()


def counts_of(job: Job, world: World, held: Held | None) -> dict[str, int]:
    """Train, and count; with `held` as where the others go on."""
    control = Counted()
    with TemporaryDirectory() as folder:
        train(Context(job, world, Storage(folder), lambda _: None, control, held=held))
    control.through()
    return by_kind(control.calls.of_a_step(SHARE))


def by_kind(calls: Counter[Call]) -> dict[str, int]:
    """How many calls of a step are of dp_ray's own functions, collectives, and waits."""
    names = {call: call.function.rpartition(".")[2] for call in calls}
    kinds = {
        "own calls": {call for call in calls if call.file.startswith(HOME)},
        "collectives": {call for call, name in names.items() if name.lstrip("_").startswith(COLLECTIVES)},
        "waits": {call for call, name in names.items() if name in WAITS},
    }
    return {kind: sum(calls[call] for call in kinds[kind]) for kind in KINDS}
