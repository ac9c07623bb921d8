"""What a process of a set does: jobs one after another, on the CPU and on simulated GPUs."""

import ctypes
import faulthandler
import json
import os
import pickle
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ray.cloudpickle import CloudPickler
from safetensors.torch import load_file
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.engine.user_code import free_memory
from dp_ray.engine.world import World, form_group, gathered, leave_group
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import Measured, Note, StepControl, WorkerPlace
from dp_ray.parallel import module as parallel
from dp_ray.rundir.ledger import PARTS
from dp_ray.serving.served import Served
from dp_ray.serving.wire import ServingWorker, has_left
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.sim import calls, hanging, jobs, mutants
from tests.support import parallel_models as models
from tests.support import simgpu, training
from tests.support.group import Stopped
from tests.support.trainings import initial


class Counting(StepControl):
    """Notes what the GPU has done by the begin of each step; with `stop`, ends the worker before that step."""

    def __init__(self, stop: int | None = None) -> None:
        self._stop = stop
        self.seen: list[simgpu.Counts] = []

    def before(self, step: int) -> None:
        if step == self._stop:
            raise Stopped
        self.seen.append(simgpu.counts())


class Plan(NamedTuple):
    """What a set of processes runs, and where; `ports` are those of two stores."""

    folder: str
    size: int
    ports: list[int]
    jobs: list[str]
    mutants: list[str]
    hangs: bool = False  # instead of all others, the job `hung`
    counts_calls: bool = False  # instead of all others; they come into FOLDER/calls.json


def run_plan(plan: Plan, rank: int) -> None:
    """Be the process `rank` of a set: run the jobs on the CPU over gloo, then on simulated GPUs of its own over NCCL.

    What it has seen of a job stands in FOLDER/KIND/NAME.RANK.json, once the job has ended.
    """
    torch.set_num_threads(1)
    own = [rank * 2, rank * 2 + 1]
    if plan.hangs:
        torch.cuda.set_device(own[0])
        with group("nccl", plan, rank):
            control = hanging.Watched(rank, Path(plan.folder, f"told.{rank}.json"))
            run(plan, rank, "gpu", "hung", [f"cuda:{own[0]}"], control=control)
    if plan.counts_calls:
        torch.cuda.set_device(own[0])
        Path(plan.folder, "calls.json").write_text(json.dumps(calls.measure(torch.device("cuda", own[0]))))
        return
    with group("gloo", plan, rank):
        for name in plan.jobs:
            run(plan, rank, "cpu", name, ["cpu"] * jobs.num_devices(name))
        call_a_module(plan, rank, "cpu", torch.device("cpu"))
    torch.cuda.set_device(own[0])
    with group("cpu:gloo,cuda:nccl", plan, rank):
        for name in plan.jobs:
            run(plan, rank, "gpu", name, [f"cuda:{one}" for one in own[: jobs.num_devices(name)]])
        call_a_module(plan, rank, "gpu", torch.device("cuda", own[0]))
        for name in plan.mutants:
            run(plan, rank, name, mutants.MUTANTS[name].job, [f"cuda:{own[0]}"], name)
    if plan.size == 1:
        plain = {"counts": plain_counts(torch.device("cuda", own[0])), "killed by": read_on_host(own[0])}
        Path(plan.folder, "gpu/plain torch.0.json").write_text(json.dumps(plain))


@contextmanager
def group(backend: str, plan: Plan, rank: int) -> Iterator[None]:
    """The process group of the set, while the block runs."""
    if plan.size > 1:
        store = TCPStore("127.0.0.1", plan.ports[backend != "gloo"])
        form_group(backend, store, World(rank, plan.size, device=torch.device("cuda", rank * 2)))
    yield
    if plan.size > 1:
        leave_group()


def run(
    plan: Plan,
    rank: int,
    kind: str,
    name: str,
    devices: list[str],
    mutant: str | None = None,
    control: StepControl | None = None,
) -> None:
    """Run a job, and write what was seen of it."""
    size, where = plan.size, Path(plan.folder) / kind / name
    storage = Storage(str(where))
    storage.child(PARTS).create()
    there = tuple(map(torch.device, devices))
    counting, ended = Counting(), "well"
    sent: list[Any] = []
    if mutant is not None:
        simgpu.forget_contexts()
    simgpu.watch(kind != "cpu")
    with mutants.applied(mutant):
        world = World(rank, size, rank, 0, "host", there[0], there)
        if name in jobs.RESUMED:
            with suppress(Stopped):
                run_task(jobs.job(name, size, devices), world, storage, sent.append, Counting(stop=3))
        try:
            run_task(jobs.job(name, size, devices), world, storage, sent.append, control or counting)
        except Exception as error:  # alone: other workers would wait
            if mutant is None or size > 1:
                raise
            ended = str(error)
    races = simgpu.races()
    simgpu.watch(False)
    report: dict[str, Any] = {"races": races, "contexts": simgpu.contexts(), "counts": counting.seen, "ended": ended}
    if mutant is not None and size == 1:
        report["garbage"] = [str(path) for path in where.glob("checkpoints/step-*.safetensors") if has_nan(path)]
    report["measured"] = next((one.metrics for one in sent if isinstance(one, Measured)), None)
    report["notes"] = [one.text for one in sent if isinstance(one, Note)]
    free_memory()
    if size > 1:
        dist.barrier()
    Path(f"{where}.{rank}.json").write_text(json.dumps(report))


class Everyone:
    """All ranks of the set as the workers of parallel modules, and each rank as their caller too: all call alike."""

    owners = ("everyone",)
    most = None

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.keys = WorkerKeys(workers=plan.size)
        self.each: dict[str, float] = {}
        self.pickler: type[pickle.Pickler] = CloudPickler
        self._served = Served(str(device), CloudPickler)
        self._members = [
            ServingWorker(WorkerPlace("localhost", "node", at, str(device), {})) for at in range(plan.size)
        ]
        self._own = self._members[rank]

    def serve(self, keys: WorkerKeys) -> "Everyone":
        return self

    def ready(self) -> list[Any]:
        return self._members

    def ask(self, messages: Mapping[Any, Any]) -> dict[Any, Any]:
        answers = gathered(self._served.answer(messages[self._own]) if self._own in messages else None)
        assert not any(map(has_left, answers)), "no worker is lost"
        return {one: answers[at] for at, one in enumerate(self._members) if one in messages}

    def keep_one_kind(self) -> None: ...

    def close(self) -> None: ...


def call_a_module(plan: Plan, rank: int, where: str, device: torch.device) -> None:
    """Train a parallel module, whose caller is on the host, by the workers of the set."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)  # the workers seed the global one, and here they are the callers too
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), models.Momentum()
    module = nn.Sequential(*layers[:2], nn.Linear(6, 4), layers[2])
    simgpu.watch(True)
    with pytest.MonkeyPatch.context() as patch:
        everyone = Everyone(plan, rank, device)
        patch.setattr(parallel, "own_workers", lambda *_, **__: everyone)
        with parallel.DataParallel(module, plan.size, shards=5, bitwise=True, seed=1, quiet=True) as model:
            for _ in range(3):
                model.zero_grad()
                model(torch.randn(11, 4, generator=data)).square().sum().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.sub_(0.01 * parameter.grad if parameter.grad is not None else 0.0)
    races = simgpu.races() if where == "gpu" else []
    simgpu.watch(False)
    values = [one.double().tolist() for one in module.state_dict().values()]
    Path(plan.folder, f"{where}/module.{rank}.json").write_text(json.dumps({"races": races, "values": values}))


def has_nan(path: Path) -> bool:
    """Whether a file of tensors holds numbers that nobody has copied there."""
    return any(bool(one.isnan().any()) for one in load_file(path).values() if one.is_floating_point())


def read_on_host(device: int) -> str:
    """The signal that ends a process which reads a GPU's memory without a copy."""
    tensor = torch.ones(1, device=torch.device("cuda", device))
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        os._exit(0)
    return signal.Signals(os.WTERMSIG(os.waitpid(child, 0)[1])).name


def plain_counts(device: torch.device) -> list[simgpu.Counts]:
    """The counts before each step of plain torch that trains the job `one shard`."""
    model, data = initial(jobs.Wide).to(device), training.Pairs(74)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seen = []
    for start in range(0, 8 * jobs.STEPS, 8):
        seen.append(simgpu.counts())
        inputs, targets = (
            torch.stack(list(column)).to(device)
            for column in zip(*map(data.__getitem__, range(start, start + 8)), strict=True)
        )
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return seen
