"""`dp-ray plan --memory`: what a worker's devices will hold, against what plain torch and a real group hold."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.driver.memory import _copies_of_gradient as copies_of_gradient
from dp_ray.driver.planning import plan_memory_of
from dp_ray.engine.user_code import free_memory
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.plan.costs import GIB, DeviceMemory, MemoryPlan, WorkerMemory, worker_counts
from tests.support import training
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.large import CASES, GROUP_ROWS, job_keys
from tests.support.trainings import job_of

pytestmark = pytest.mark.full  # the first job that it plans takes seconds


def planned(keys: dict[str, Any], gpu_gib: float | None = None) -> MemoryPlan:
    return plan_memory_of(Job.make(keys, "planned"), gpu_gib)


def of(plan: MemoryPlan, strategy: str, workers: int) -> DeviceMemory:
    (found,) = [worker for worker in plan.workers if (worker.strategy, worker.workers) == (strategy, workers)]
    return found.devices[0]


# Large blocks go back to the system at once, so that its count is that of live tensors.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    keys = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=keys)


def said_by(process: subprocess.Popen[str]) -> str:
    with process:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0
        return said


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """The peaks of plain torch in a process of its own, as Linux counts them."""
    lines = said_by(started("-m", "tests.support.large", *CASES, **GIVEN_BACK)).splitlines()
    return {name: int(size) for name, size in (line.split("\t") for line in lines)}


on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured on Linux")


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("name", list(CASES))
def test_a_worker_alone_takes_what_plain_torch_takes(measured: dict[str, int], name: str) -> None:
    (alone, *_) = planned(job_keys(CASES[name])).workers
    assert alone.total == pytest.approx(measured[name], rel=0.15)


@pytest.mark.slow
@on_linux
def test_a_worker_of_two_takes_what_plain_torch_takes(tmp_path: Path) -> None:
    command = ("-m", "tests.support.large", "group", str(tmp_path / "meeting"))
    group = [started(*command, str(rank), "2", **GIVEN_BACK) for rank in range(2)]
    told = [json.loads(said_by(program)) for program in group]
    plan = planned({**job_keys(CASES["mlp"]), "batch_size": 2 * GROUP_ROWS, "shards": 2, "workers": 2})
    for strategy in ("ddp", "fsdp"):
        for totals in told:
            assert of(plan, strategy, 2).total == pytest.approx(totals[strategy], rel=0.15)


@pytest.mark.slow
def test_kinds_add_up_to_what_the_model_has() -> None:
    job = job_of("Blocks", "Sentences", loss="tests.support.training:token_loss", workers=4, shards=4)
    plan = plan_memory_of(job, None)
    model = training.Blocks()
    size = sum(parameter.nbytes for parameter in model.parameters())
    for workers in (1, 2, 3, 4):
        ddp, fsdp = of(plan, "ddp", workers), of(plan, "fsdp", workers)
        assert (ddp.parameters, ddp.optimizer, ddp.buffers) == (size, size, 0)  # the optimizer keeps a momentum
        assert size / workers <= fsdp.parameters <= 1.1 * size / workers + model.head.weight.nbytes
        assert fsdp.total <= ddp.total + size
    assert of(plan, "ddp", 1).gradients == size, "autograd adds the shards' gradients"
    assert of(plan, "ddp", 2).gradients == 2 * size, "and DDP copies the sums into its buckets"
    assert of(plan, "ddp", 4).gradients == size


@pytest.mark.parametrize(("shards", "workers", "copies"), [(1, 1, 1), (8, 8, 1), (8, 1, 3), (8, 2, 3), (16, 1, 4)])
def test_bitwise_holds_sums_of_a_tree(shards: int, workers: int, copies: int) -> None:
    """Autograd adds two shards; so of 8 there are sums of four and of two, beside the gradients that are made."""
    assert copies_of_gradient(job_of("mlp", shards=shards, bitwise=True), workers, shards) == copies
    audited = job_of("mlp", shards=shards, bitwise=True, audit=0.1)
    assert copies_of_gradient(audited, workers, shards) == max(copies, 2), "an auditor has gradients of its own"


@pytest.mark.slow
def test_checkpointing_and_bf16_take_less() -> None:
    case = job_keys(CASES["gpt, checkpointed"])
    plain, less = (planned({**case, "activation_checkpointing": on}).workers[0].total for on in (False, True))
    half = planned({**case, "activation_checkpointing": {"budget": 0.5}}).workers[0].total
    assert less < half < plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy", "bitwise", "stay"),
    [
        ("train", "fsdp", False, False),
        ("train", "fsdp", True, True),
        ("evaluate", "fsdp", False, False),
        ("evaluate", "ddp", False, True),
        ("predict", "fsdp", False, False),
        ("predict", "ddp", False, False),
    ],
)
def test_copies_of_the_weights_in_half_precision(task: str, strategy: str, bitwise: bool, stay: bool) -> None:
    """With six layers more: the copy of each, if torch keeps it, and little else for a row."""

    def activations(depth: int) -> int:
        model = {"target": "tests.support.large:mlp", "args": {"width": 512, "depth": depth}}
        keys = {**job_keys({"model": "mlp", "size": [512], "rows": 1}), "model": model, "batch_size": 2}
        keys |= {"inputs": "first", "loss": None, "optimizer": None} if task == "predict" else {}
        plan = planned({**keys, "task": task, "precision": "bf16", "bitwise": bitwise, "shards": 2, "workers": 2})
        return of(plan, strategy, 2).activations

    copies = 6 * 2 * 512 * 512
    grown = activations(10) - activations(4)
    assert (copies <= grown < 1.1 * copies) if stay else grown < 0.05 * copies


class OfTwo(nn.Sequential):
    """A large layer on the first device, a small one on the last."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(nn.Linear(6, 1000, device=devices[0]), nn.Linear(1000, 3).to(devices[-1]))
        self.last = devices[-1]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self[1](self[0](inputs).to(self.last))
        return outputs


def test_each_device_has_its_own_bytes() -> None:
    job = job_of({"target": "tests.plan.test_memory_plan:OfTwo"}, devices=["cuda:0", "cuda:1"], workers=2)
    plan = plan_memory_of(job, 80)
    assert {worker.strategy for worker in plan.workers} == {"ddp"}, "fsdp takes one device a worker"
    first, last = plan.workers[0].devices
    assert (first.device, first.parameters) == ("cuda:0", 7000 * 4)
    assert (last.device, last.parameters) == ("cuda:1", 3003 * 4)
    assert first.activations and last.activations
    placed = job_of("mlp", devices=["cuda:0", "cuda:1"], device_map="auto")
    sizes = [device.parameters for device in plan_memory_of(placed, None).workers[0].devices]
    assert sum(sizes) == sum(parameter.nbytes for parameter in training.mlp().parameters()) and all(sizes)


@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_other_tasks_have_no_gradients(task: str) -> None:
    job = job_of("mlp", task=task, optimizer=None, workers=2)
    for worker in plan_memory_of(job, None).workers:
        (device,) = worker.devices
        assert device.gradients == device.optimizer == 0
        assert device.parameters < device.total


class Looks(nn.Module):
    """A model whose forward reads numbers of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs if outputs.sum().item() > 0 else -outputs


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("tests.support.training:ReadsItsWeights", "ReadsItsWeights cannot be built without memory, so .*item"),
        ("tests.plan.test_memory_plan:Looks", "Looks cannot run without numbers, so .*local_scalar_dense"),
    ],
)
def test_a_model_that_needs_numbers_is_named_with_the_reason(model: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        plan_memory_of(job_of({"target": model}), None)


def test_what_fits_a_gpu() -> None:
    device = DeviceMemory("cuda:0", 0, 0, 0, 0, 0, 9 * GIB)
    worker = WorkerMemory("ddp", 1, 1, (device, DeviceMemory("cuda:1", 0, 0, 0, 0, 0, GIB)))
    assert [MemoryPlan(1, (worker,), size).fits(worker) for size in (None, 10 * GIB, 9 * GIB)] == [None, True, False]


@pytest.mark.parametrize(
    ("total", "unit", "shown"),
    [(3 * GIB, "GiB", "3.000"), (GIB // 8, "GiB", "0.125"), (50 * 2**20, "MiB", "50.000"), (512, "KiB", "0.500")],
)
def test_its_unit_is_one_in_which_there_is_something_to_see(total: int, unit: str, shown: str) -> None:
    small = WorkerMemory("ddp", 2, 1, (DeviceMemory("cpu", 0, 0, 0, 0, 0, 0),))
    large = WorkerMemory("ddp", 1, 1, (DeviceMemory("cpu", 0, 0, 0, 0, 0, total),))
    first, _, line, _ = MemoryPlan(1, (large, small)).lines()
    assert first == f"memory of a worker in {unit}, with shards of 1 row:"
    assert line.split()[-1] == shown


def test_the_models_that_were_planned_are_gone() -> None:
    def models() -> int:
        free_memory()
        return sum(issubclass(type(thing), nn.Module) for thing in gc.get_objects())

    before = models()
    for _ in range(2):
        plan_memory_of(job_of("mlp", "Pairs", workers=2), None)
    assert models() <= before


@pytest.mark.parametrize(("most", "counts"), [(0, [1]), (3, [1, 2, 3]), (20, [*range(1, 9), 16, 20])])
def test_the_numbers_of_workers(most: int, counts: list[int]) -> None:
    assert worker_counts(most) == counts


def test_the_command_says_it_in_text_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cli(*args: str) -> str:
        assert status_of(monkeypatch, *args) == 0
        return capsys.readouterr().out

    keys = ("--workers", "2")
    shown = run_cli("plan", "jobs/digits.yaml", "--gpu-memory", "40", *keys)
    assert "memory of a worker in MiB, with shards of 4 rows:" in shown
    assert len([line for line in shown.splitlines() if line.endswith("fits 40 GiB")]) == 4
    assert shown.endswith("memory: of what is left of a GPU NCCL takes 0.3 to 0.6 GB\n")
    on_three = run_cli("plan", "jobs/digits.yaml", "--gpu-memory", "40", "--workers", "3")
    assert on_three.endswith("0.3 to 0.6 GB, and as much again with ddp and bitwise on 3 workers and more\n")
    assert "NCCL" not in run_cli("plan", "jobs/digits.yaml", "--gpu-memory", "40", "--workers", "1")
    (line,) = run_cli("plan", "jobs/digits.yaml", "--memory", "--json", *keys).splitlines()
    memory = json.loads(line)["memory"]
    assert [worker["workers"] for worker in memory["workers"]] == [1, 2, 1, 2]
    assert "memory" not in json.loads(run_cli("plan", "jobs/digits.yaml", "--json", *keys))


@pytest.mark.slow
@on_linux
def test_two_billion_parameters_are_planned_within_a_gigabyte() -> None:
    """In seconds of this machine's time, whatever else it does; as much work as on one that does nothing else."""
    process = started("-m", "tests.support.large", "plan")
    parameters, seconds, most = json.loads(said_by(process))
    assert parameters > 2e9
    assert seconds < 60
    assert most < 2**30
