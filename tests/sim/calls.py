"""Counts the calls of the thread that launches a step's kernels, on a simulated GPU, beside a plain loop's.

What runs within the simulation counts as one call of a C function, as it is one of torch's on a GPU. The cases are
those of the benchmark's part `small`: with one shard, with two, and with more layers.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.calls import Call, Calls
from dp_ray.engine.loads import loader
from dp_ray.engine.world import World
from dp_ray.messages import StepControl
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import simgpu

STEPS = range(8, 20)  # that are counted; the early ones do more
SHARDS = 2
DEEP: dict[str, dict[str, Any]] = {"resnet": {"blocks": (3, 3)}, "Gpt": {"layers": 12}}  # ten layers more, and some


def measure(device: torch.device) -> dict[str, dict[str, Any]]:
    """By task, model, and one of `one`, `two` and `deep`: how many more ours are, and which.

    `deeper` is by how much the count of any function grows from `one` on.
    """
    found: dict[str, dict[str, Any]] = {}
    loader.LOOKS = 0  # the first reads of a process also look for the generators that a dataset holds
    for case in gpu.cases("small", replace(gpu.SMALL, block=SHARDS * STEPS.stop, warm=0, pairs=0)):
        deep = replace(case, model_args={**case.model_args, **DEEP[case.model]})
        with_one: Counter[Call] = Counter()
        for kind, one, shards in (("one", case, 1), ("two", case, SHARDS), ("deep", deep, 1)):
            more = ours(one, device, shards)
            more.subtract(plain(one, device, shards))
            with_one = with_one or more
            found[f"{case.task} {case.model}: {kind}"] = {
                "more": more.total(),
                "deeper": max(count - with_one[call] for call, count in more.items()),
                "calls": [f"{count:+.0f} {call.file} {call.function}" for call, count in more.most_common(60)],
            }
    return found


class Counted(StepControl):
    """Counts the calls of each of STEPS."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def before(self, step: int) -> None:
        if step in STEPS:
            self._calls.begin()
        elif step == STEPS.stop:
            self._calls.end()


def ours(case: gpu.Case, device: torch.device, shards: int) -> Counter[Call]:
    """The calls of a step of dp_ray."""
    calls = Calls(as_c=str(simgpu.HERE))
    with TemporaryDirectory() as folder:
        run = Storage(folder)
        run.child(PARTS).create()
        job = gpu.job_of(case, device).model_copy(update={"shards": shards})
        run_task(job, World(device=device), run, lambda _: None, Counted(calls))
    return calls.of_a_step(0.5)


def plain(case: gpu.Case, device: torch.device, shards: int) -> Counter[Call]:
    """The calls of a plain loop's step, which runs each shard."""
    calls = Calls(as_c=str(simgpu.HERE))
    loop = gpu.plain(replace(case, rows=case.rows // shards), device)
    of_shard = gpu.prediction_step(loop, device) if case.task == "predict" else None
    step = training_step(loop, shards) if of_shard is None else lambda: [of_shard() for _ in range(shards)]
    for number in range(STEPS.stop):
        if number in STEPS:
            calls.begin()
        step()
    calls.end()
    return calls.of_a_step(0.5)


def training_step(loop: gpu.Loop, shards: int) -> Callable[[], object]:
    """A step of a plain training, which adds up the gradients of its shards."""
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        loop.optimizer.zero_grad()
        for _ in range(shards):
            inputs, targets = next(loop.batches)
            with loop.autocast():
                total = loss(loop.model(inputs), targets) / shards
            loop.backward(total)
        loop.optimizer.step()

    return step
