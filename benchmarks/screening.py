"""What it costs to look for bad samples where there are none: the CPU time of loading, in turns of some batches.

What `on_error` does in a step without bad samples is done where its batch is loaded, but for looking up that no shard
has any. So the loading is measured alone: the model would add several times the time, and its noise. What loading
takes longer is told as a share of a step of STEP_SECONDS. Of two equal sides the first one to be made is faster by
some 6 ms a batch. So they are made in both orders, in processes of their own, and the mean counts.
"""

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import in_processes
from benchmarks.training import BATCH, Images, as_a_worker
from dp_ray.engine.loads.bad_samples import Quarantine, Reference, item_form
from dp_ray.engine.loads.loading import LoadedShard, Source, load_steps
from dp_ray.engine.world import CPU
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.plan.split import Work

STEP_SECONDS = 0.1
WARM, ROUNDS, ROUND = 2, 15, 20  # rounds that are not measured, and that are; batches of each side in a round
QUIET_SECONDS = 0.05  # without any work, a loader process has nothing to load ahead
KEYS = {"task": "train", "model": "a:b", "dataset": "a:b", "loss": "a:b", "optimizer": "a:b", "shuffle": True}


class Side:
    """The batches of one side, and the CPU time that loading them takes: in this process and in loader processes."""

    def __init__(self, dataset: Images, keys: dict[str, Any]) -> None:
        job = Job.make({**KEYS, "workers": 1, "batch_size": BATCH, "epochs": 1000, **keys}, "benchmark")
        reference = Reference(0, item_form(dataset[0]))
        quarantine = None if job.on_error is None else Quarantine(reference, lambda *_: None)
        steps = load_steps(Source(job, dataset), Work(split_of(job, len(dataset))), CPU, quarantine)
        self._batches: Iterator[LoadedShard] = (shard for step in steps for shard in step.loaded)
        others = set(psutil.Process().children())
        next(self._batches)
        self._loaders = [child.pid for child in psutil.Process().children() if child not in others]
        self._loaded = self._loading()

    def round(self) -> float:
        """The CPU seconds of a batch, over a round."""
        began, before = time.thread_time(), self._loaded
        for _ in range(ROUND):
            next(self._batches)
        mine = time.thread_time() - began
        self._loaded = self._loading()
        return (mine + self._loaded - before) / ROUND

    def _loading(self) -> float:
        """The CPU time of the loader processes so far, once they have loaded what they load ahead."""
        seen, found = -1.0, sum(map(cpu_seconds, self._loaders))
        while self._loaders and seen != found:
            time.sleep(QUIET_SECONDS)
            seen, found = found, sum(map(cpu_seconds, self._loaders))
        return found


def added(tolerant: dict[str, Any], plain: dict[str, Any]) -> list[tuple[float, float]]:
    """The seconds of a step with and without the looking, by rounds."""
    context = multiprocessing.get_context("spawn")
    (first,), (second,) = (
        in_processes(context, loading, [sides]) for sides in ((tolerant, plain), (plain, tolerant))
    )
    return [(STEP_SECONDS + (one - other) / 2, STEP_SECONDS) for one, other in zip(first, second, strict=True)]


def loading(one: dict[str, Any], other: dict[str, Any], told: Any) -> None:
    """What a process runs: it tells, round by round, how many seconds a batch of one side takes longer."""
    as_a_worker()
    dataset = Images()
    ours, theirs = Side(dataset, one), Side(dataset, other)
    rounds = [(ours.round(), theirs.round()) for _ in range(WARM + ROUNDS)][WARM:]
    told.put([mine - others for mine, others in rounds])


def cpu_seconds(pid: int) -> float:
    """The CPU time of all threads of a process so far (Linux only), to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
