"""What is wrong with a machine: told with what to do, not as a lost worker, and not tried again for nothing."""

import ctypes
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import nn

from dp_ray.cluster import policies
from dp_ray.cluster.channel import NOTHING, Terms
from dp_ray.cluster.decisions import (
    Memory,
    Restart,
    RestartDecision,
    Snapshot,
    WorkerDemand,
    WorkersFailed,
    decide_restart,
)
from dp_ray.cluster.worker import _ending_of
from dp_ray.engine.forward.model import build_model
from dp_ray.engine.user_code import raise_as
from dp_ray.engine.world import Trouble, World, text_of, trouble_of
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import Ending, Interrupted, WorkerExit
from dp_ray.rundir.incidents import IncidentKind
from dp_ray.storage import Storage
from dp_ray.system.linux import LIBC, SHARED_MEMORY
from dp_ray.tasks.task import broken_gpu_named, run_task
from tests.support import models
from tests.support.forked import Ended, ended, run_job
from tests.support.group import ProcessExit, run_group
from tests.support.training import mlp
from tests.support.trainings import job_of

LATE = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
    "`TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
ECC = "CUDA error: uncorrectable ECC error encountered"
BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
INIT = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
    "that might have already set an error? Error "
)
TEXTS = {  # as CUDA, torch and the system have them: what tells the trouble, the whole text, and what is to be done
    "ECC": (ECC, ECC + LATE.format("cudaErrorECCUncorrectable"), "nvidia-smi -q -d ECC"),
    "NVLink": ("CUDA error: uncorrectable NVLink error detected during the execution", "", "dmesg | grep Xid"),
    "busy": (BUSY, BUSY + LATE.format("cudaErrorDevicesUnavailable"), "nvidia-smi on this node"),
    "802": (f"{INIT}802: system not yet initialized", "", "systemctl start nvidia-fabricmanager"),
    "803": (
        f"{INIT}803: system has unsupported display driver / cuda driver combination",
        "",
        "install a newer driver",
    ),
    "804": (f"{INIT}804: forward compatibility was attempted on non supported HW", "", "install a newer driver"),
    "35": ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "", "install a newer driver"),
    "old": (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
        "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx",
        "",
        "install a newer driver",
    ),
    "kernel": ("CUDA error: no kernel image is available for execution on the device", "", "get_arch_list()"),
    "shm": (
        "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
        "",
        "--shm-size=8g or --ipc=host",
    ),
    "open": (
        "unable to open shared memory object </torch_1_2_0> in read-write mode: No space left on device (28)",
        "",
        "an emptyDir with medium: Memory",
    ),
}


class Unfit(nn.Module):
    """A model whose forward meets, in step 1 or at once, what the text says."""

    def __init__(self, text: str, calls: int = 2) -> None:
        super().__init__()
        self.layers, self.text, self.calls = mlp(), text, calls

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls -= self.training
        if self.calls < 1:
            raise torch.AcceleratorError(self.text)
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def decision_on(error: BaseException, has_progressed: bool, **memory: Any) -> RestartDecision:
    one = WorkerExit(_ending_of(error), str(error), has_progressed)
    return decide_restart(Snapshot(WorkersFailed({1: one}, {}), NOTHING, Memory(3, **memory)), 0.0)


@pytest.mark.parametrize("name", TEXTS)
def test_a_run_tells_what_is_wrong_in_a_line_with_what_to_do(name: str, tmp_path: Path) -> None:
    sign, text, remedy = TEXTS[name]
    run = Storage(str(tmp_path))
    run.child("parts").create()
    model = {"target": "tests.cluster.test_machine_troubles:Unfit", "args": {"text": text or sign}}
    with pytest.raises(ModelError) as raised:
        run_task(job_of(model, shards=1), World(), run, lambda _: None)
    says = str(raised.value)
    assert says.startswith(f"step 1, shard 0: model raised AcceleratorError: {sign.rstrip('.')}; ")
    assert remedy in says and "CUDA_LAUNCH_BLOCKING" not in says and "\n" not in says
    decision = decision_on(raised.value, has_progressed=True)
    is_final = name in ("802", "803", "804", "35", "old", "kernel")
    assert decision.do is (Restart.GIVE_UP if is_final else Restart.RESTART)


def test_what_is_alike_is_something_else() -> None:
    for text in (
        "unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)",
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376",
        "CUDA error: invalid argument",
        "CUDA error: device-side assert triggered",
    ):
        assert trouble_of(RuntimeError(text)) is None
    assert trouble_of(ValueError(ECC)) is None
    assert text_of(OSError(28, "No space left on device", "/data/x")).endswith("'/data/x'")
    assert text_of(OSError(28, "No space left on device", f"{SHARED_MEMORY}/x")).endswith("(Kubernetes)")


def raised_by_model(text: str) -> ModelError:
    with pytest.raises(ModelError) as raised:
        raise_as(torch.AcceleratorError(text), "step 0, shard 0: model")
    return raised.value


def test_a_broken_gpu_has_the_job_start_again_without_progress_and_end_if_it_comes_back() -> None:
    error = raised_by_model(ECC)
    first = decision_on(error, has_progressed=False)
    assert (first.do, first.memory.retries) == (Restart.RESTART, 2)
    again = decision_on(error, has_progressed=False, seen=first.memory.seen)
    assert again.do is Restart.GIVE_UP
    other = decision_on(ModelError(f"{error}; the GPU is another one"), True, seen=first.memory.seen)
    assert other.do is Restart.RESTART


def test_a_broken_gpu_explains_the_errors_of_others_but_no_mistake() -> None:
    broken = WorkerExit(Ending.BROKEN_GPU, "broken", True)
    for kind, told in [(Ending.RAISED, Interrupted(IncidentKind.ERROR, "broken", (1,))), (Ending.MISTAKEN, None)]:
        both = WorkersFailed({0: WorkerExit(kind, "oh", True), 1: broken}, {})
        assert decide_restart(Snapshot(both, NOTHING, Memory(3), ranks={1: 1}), 0.0).message == told


@pytest.mark.parametrize("text", [BUSY, "CUDA error: out of memory"], ids=["busy", "memory"])
def test_a_gpu_that_the_last_workers_may_hold_is_tried_once_more(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The move of the model to its GPU is what meets it first."""

    def raises(*_: Any) -> None:
        raise torch.AcceleratorError(text)

    monkeypatch.setattr(nn.Module, "to", raises)
    with pytest.raises(JobError, match="devices: the model cannot be moved") as raised:
        build_model(job_of("mlp"), [torch.device("cpu")])
    assert decision_on(raised.value, has_progressed=False).do is Restart.GIVE_UP
    again = decision_on(raised.value, has_progressed=False, has_restarted=True)
    assert again.do is Restart.RESTART
    last = decision_on(raised.value, has_progressed=False, has_restarted=True, seen=again.memory.seen)
    assert last.do is Restart.GIVE_UP


@pytest.mark.parametrize(
    ("broken", "least", "left"),
    [
        ((), 2, "abc"),
        ("b", 2, "ac"),
        ("ab", 2, "abc"),  # the other one has too little room: a new process may compute on the GPU
        ("ab", 1, "c"),
        ("x", 2, "abc"),
    ],
)
def test_a_node_with_a_broken_gpu_is_left_out_if_others_have_room(
    broken: Any, least: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": node, "Alive": True, "Resources": {"GPU": 1.0}} for node in "abc"]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(policies, "draining_nodes", frozenset)
    wanted = WorkerDemand(least, 4, {"GPU": 1.0}, "PACK", None, capacity_seconds=60.0)
    policy = policies.ElasticScalingPolicy(wanted, None)
    policy._look_at(Terms(broken=tuple(broken)))
    assert "".join(node["NodeID"] for node in policy._nodes(must_answer=False)) == left


def test_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H200", uuid="8f6d1c2e-1111-2222-3333-444455556666")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    gpu = torch.device("cuda", 1)
    with pytest.raises(ModelError) as raised, broken_gpu_named(World(device=gpu)):
        raise raised_by_model(ECC)
    says = f"{ECC}; {Trouble.BROKEN_GPU.remedy}; the GPU is cuda:1 (NVIDIA H200, GPU-{card.uuid})"
    assert str(raised.value) == f"step 0, shard 0: model raised AcceleratorError: {says}"
    assert _ending_of(raised.value) is Ending.BROKEN_GPU


class Refused(nn.Module):
    """A model whose workers cannot exchange: NCCL has no room for what they share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise dist.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) "
            "or external library call failed or device error. \nLast error:\nError while creating shared memory "
            f"segment {SHARED_MEMORY}/nccl-vzIpS6 (size 9637888)"
        )


def test_workers_that_cannot_exchange_are_not_told_as_lost(tmp_path: Path) -> None:
    says = "ModelError: the workers cannot exchange anything: Error while creating shared memory segment .*--shm-size"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of({"target": "tests.cluster.test_machine_troubles:Refused"}, shards=2, workers=2), tmp_path)


def stacked(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items)


class Large(models.Rows):
    """Rows of 4 MB."""

    loader_context = "fork"

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 << 20)


class Mapped(models.Rows):
    """Rows that are read into shared memory for which the system has no room."""

    loader_context = "fork"

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(f"{SHARED_MEMORY}/mapped", "w+b") as file:
            file.truncate(16 << 20)
            with mmap.mmap(file.fileno(), 16 << 20) as mapped:
                mapped.write(bytes(16 << 20))
        return super().__getitem__(index)


class Opened(models.Rows):
    """Rows that no other process can have."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), open(os.devnull)


def run_with_little_shared_memory(keys: dict[str, Any]) -> None:
    """Run the job where the system has 2 MB of shared memory, as in a container."""
    new_mounts, private = 0x20000, 0x44000  # CLONE_NEWNS; MS_PRIVATE and MS_REC
    place = SHARED_MEMORY.encode()
    if LIBC.unshare(new_mounts) or LIBC.mount(b"none", b"/", None, private, None):
        raise OSError("no mounts of its own")
    if LIBC.mount(b"tmpfs", place, b"tmpfs", 0, ctypes.c_char_p(b"size=2m")):
        raise OSError("no shared memory of its own")
    run_job(keys)


def predicted(dataset: str, folder: Path, collate: str | None, start: Any) -> Ended:
    keys = {
        "task": "predict",
        "model": {"target": "tests.support.models:Linear"},
        "dataset": {"target": f"tests.cluster.test_machine_troubles:{dataset}"},
        "collate": collate,
        "loader": {"processes": 1},
        "storage": str(folder),
        "batch_size": 2,
        "workers": 0,
    }
    return ended(start, {name: value for name, value in keys.items() if value is not None})


STACKED = "tests.cluster.test_machine_troubles:stacked"


@pytest.mark.full(but=["torch's collate"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
@pytest.mark.parametrize(
    ("dataset", "collate", "says"),
    [
        ("Large", None, "collate raised RuntimeError: unable to allocate shared memory(shm) for file <"),
        ("Large", STACKED, "sending a batch from the loader's process to the worker raised RuntimeError: unable to"),
        ("Mapped", None, "a process of the loader has ended in the midst of its work (pid "),
    ],
    ids=["torch's collate", "own collate", "SIGBUS"],
)
def test_shared_memory_that_is_full_is_told_as_such(
    dataset: str, collate: str | None, says: str, tmp_path: Path
) -> None:
    run = predicted(dataset, tmp_path, collate, run_with_little_shared_memory)
    assert run.returncode != 0
    assert f"step 0, shard 0: {says}" in run.stderr
    assert Trouble.SHARED_MEMORY.remedy in run.stderr
    assert ("SIGBUS" in run.stderr) == (dataset == "Mapped")


def test_a_batch_that_cannot_be_sent_is_told_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = predicted("Opened", tmp_path, "builtins:list", run_job)
    assert run.returncode != 0
    says = "step 0, shard 0: sending a batch from the loader's process to the worker raised TypeError: cannot pickle"
    assert says in run.stderr
