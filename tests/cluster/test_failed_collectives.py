"""Why a collective failed: a lost worker is waited for, a mistake ends the run; and how long a group waits."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.cluster import group
from dp_ray.cluster.channel import NOTHING
from dp_ray.cluster.decisions import Memory, Restart, Snapshot, WorkersFailed, decide_restart
from dp_ray.cluster.worker import _ending_of
from dp_ray.engine import world
from dp_ray.engine.user_code import is_out_of_memory
from dp_ray.engine.world import (
    NO_TIMEOUT,
    TIMEOUT,
    Cause,
    FailedCollective,
    Trouble,
    World,
    bound_gpu,
    everyone,
    failed_collective,
    failed_in_group,
    form_group,
    leave_group,
    new_group,
    passes,
)
from dp_ray.errors import JobError, ModelError, WorkerError
from dp_ray.messages import Ending, Interrupted, WorkerExit
from dp_ray.rundir.incidents import IncidentKind
from tests.support.forked import Ended, started
from tests.support.group import ProcessExit, run_group
from tests.support.training import mlp
from tests.support.trainings import job_of

LOCALHOST = "127.0.0.1"
GPU, OTHER, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


def nccl(says: str, code: str, last: str | None) -> RuntimeError:
    """An error of torch's C10D_NCCL_CHECK (NCCLUtils.hpp), with the text of getNcclErrorDetailStr (NCCLUtils.cpp)."""
    text = (
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {says}, NCCL version 2.27.5\n{code}"
    )
    return dist.DistBackendError(text if last is None else f"{text}\nLast error:\n{last}")


USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
ARGUMENT = "ncclInvalidArgument: Invalid value for an argument."
CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
INTERNAL = "ncclInternalError: Internal check failed."


def told(line: str, trouble: Trouble) -> str:
    return f"{line.rstrip('.')}; {trouble.remedy}"


OF_USAGE, OF_CUDA = (
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
)
OF_SYSTEM, OF_REMOTE = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "remote process exited or there was a network error",
)
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 34000"
MISMATCH = "Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22605"
CLOSED = "socketProgress: Connection closed by remote peer node1<45074>"
SHARED_MEMORY = "Error while creating shared memory segment /dev/shm/nccl-vzIpS6 (size 9637888)"
MULTICAST = (
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be "
    "performed in the present state'.\nThis is usually caused by a system or configuration error in the Fabric "
    "Manager or NVSwitches.\nDisable NVLS (NCCL_NVLS_ENABLE=0) if you wish to avoid this error in the future."
)
ABORTED = "NCCL communicator was aborted on rank 0.  Original reason for failure was: "
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, "
    "NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
)
NO_ID = (
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
    "but store->get('0') got error: wait timeout after 60000ms, keys: /default_pg/0//cuda//0"
)
FRAMES = (
    "\nException raised from doWait at /pytorch/torch/csrc/distributed/c10d/TCPStore.cpp:635 (most recent call first)"
    ":\nframe #0: c10::Error::Error"
)
PAIR = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
BLAME = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting"
NOT_DEVICE = "Attempt to perform collective on tensor not on device passed to init_process_group"


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "cause", "line"),
    [
        (nccl(OF_USAGE, USAGE, DUPLICATE), Cause.SHARED_GPU, DUPLICATE),
        (nccl("internal error", INTERNAL, DUPLICATE), Cause.SHARED_GPU, DUPLICATE),  # NCCL 2.14
        (nccl(OF_USAGE, USAGE, MISMATCH), Cause.MISUSED, MISMATCH),
        (nccl(OF_USAGE, USAGE, ""), Cause.MISUSED, USAGE),
        (
            nccl("invalid argument", ARGUMENT, "Invalid config blocking attribute value -2147483648"),
            Cause.MISUSED,
            "Invalid config blocking attribute value -2147483648",
        ),
        (dist.DistBackendError(NOT_DEVICE), Cause.MISUSED, NOT_DEVICE),
        (
            nccl(OF_CUDA, CUDA, "Cuda failure 2 'out of memory'"),
            Cause.OUT_OF_MEMORY,
            "Cuda failure 2 'out of memory'",
        ),
        (
            nccl(OF_CUDA, CUDA, "Failed to CUDA calloc async 4 bytes"),
            Cause.OUT_OF_MEMORY,
            "Failed to CUDA calloc async 4 bytes",
        ),
        (
            nccl(OF_CUDA, CUDA, "Cuda failure 800 'operation not permitted'"),
            Cause.UNKNOWN,
            "Cuda failure 800 'operation not permitted'",
        ),
        (nccl(OF_CUDA, CUDA, None), Cause.UNKNOWN, CUDA),
        (nccl(OF_SYSTEM, SYSTEM, SHARED_MEMORY), Cause.MACHINE, told(SHARED_MEMORY, Trouble.SHARED_MEMORY)),
        (nccl(OF_CUDA, CUDA, MULTICAST), Cause.MACHINE, told(MULTICAST.splitlines()[0], Trouble.NO_MULTICAST)),
        (
            nccl(OF_CUDA, CUDA, "Cuda failure 1 'invalid argument'"),
            Cause.MACHINE,
            told("Cuda failure 1 'invalid argument'", Trouble.NO_MULTICAST),
        ),
        (
            nccl(OF_CUDA, CUDA, "Cuda failure 802 'system not yet initialized'"),
            Cause.MACHINE,
            told("Cuda failure 802 'system not yet initialized'", Trouble.NO_FABRIC),
        ),
        (
            nccl(OF_CUDA, CUDA, "Cuda failure 214 'uncorrectable ECC error encountered'"),
            Cause.MACHINE,
            told("Cuda failure 214 'uncorrectable ECC error encountered'", Trouble.BROKEN_GPU),
        ),
        (nccl(OF_REMOTE, REMOTE, CLOSED), Cause.LOST_PEER, CLOSED),
        (nccl(OF_REMOTE, REMOTE, ""), Cause.LOST_PEER, REMOTE),
        (nccl(OF_REMOTE, REMOTE, CLOSED + FRAMES), Cause.LOST_PEER, CLOSED),
        (dist.DistBackendError(f"{ABORTED}{WATCHDOG}"), Cause.LOST_PEER, f"{ABORTED}{WATCHDOG}"),
        (RuntimeError(WATCHDOG), Cause.LOST_PEER, WATCHDOG),
        (dist.DistBackendError(NO_ID), Cause.LOST_PEER, NO_ID),
        (dist.DistBackendError(NO_ID + FRAMES), Cause.LOST_PEER, NO_ID),
        (
            RuntimeError(f"[{PAIR}:553] Connection closed by peer [127.0.0.1]:3508. {BLAME}"),
            Cause.LOST_PEER,
            f"[{PAIR}:553] Connection closed by peer [127.0.0.1]:3508. {BLAME}",
        ),
    ],
)
def test_the_cause_of_a_failed_collective_is_read_from_its_text(error: RuntimeError, cause: Cause, line: str) -> None:
    failed = failed_collective(error)
    assert failed == (cause, line)
    said = str(failed.error())
    assert line in said and "\n" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (2), got (3))"),
        RuntimeError("the igloo timed out"),
        ValueError(DUPLICATE),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_errors_of_something_else_are_left_alone(error: Exception) -> None:
    assert failed_collective(error) is None


def not_built(backend: str) -> RuntimeError:
    """What this torch, which has no CUDA, raises."""
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as raised:
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=5))
    return raised.value


@pytest.mark.full
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_torch_without_nccl_ends_the_run_and_says_which_key_to_change(backend: str) -> None:
    failed = failed_collective(not_built(backend))
    assert failed == (Cause.NOT_BUILT, "Distributed package doesn't have NCCL built in")
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    gpu = World(device=GPU, all_devices=(GPU,))
    says = r"^the process group could not be formed: .*doesn't have NCCL built in; .*gpus_per_worker: 0"
    with pytest.raises(JobError, match=says), group._group_errors():
        form_group(backend, store, gpu)


ENDS = {
    Cause.NOT_BUILT: (JobError, Restart.GIVE_UP, "gpus_per_worker: 0"),
    Cause.SHARED_GPU: (JobError, Restart.GIVE_UP, "gpus_per_worker: 1"),
    Cause.MISUSED: (JobError, Restart.GIVE_UP, "NCCL_DEBUG"),
    Cause.OUT_OF_MEMORY: (ModelError, Restart.GIVE_UP, "gpus_per_worker"),
    Cause.MACHINE: (ModelError, Restart.GIVE_UP, "cannot exchange anything: it"),
    Cause.LOST_PEER: (WorkerError, Restart.RESTART, "another worker was lost: it"),
    Cause.UNKNOWN: (WorkerError, Restart.RESTART, "perhaps because another worker was lost: it"),
}


@pytest.mark.full
@pytest.mark.parametrize("cause", Cause)
def test_only_what_may_be_a_lost_worker_is_retried_as_one(cause: Cause) -> None:
    kind, do, holds = ENDS[cause]
    error = FailedCollective(cause, "it").error()
    assert type(error) is kind and holds in str(error)
    exits = {0: WorkerExit(_ending_of(error), str(error), has_progressed=False)}
    memory = Memory(3, lost_peer_since=0.0)
    decision = decide_restart(Snapshot(WorkersFailed(exits, {}), NOTHING, memory), now=100.0)
    assert decision.do is do
    is_network = isinstance(decision.message, Interrupted) and decision.message.kind is IncidentKind.NETWORK
    assert is_network == (do is Restart.RESTART)


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA driver error: out of memory", True),
        ("HIP error: out of memory", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm(...)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
        ("CUDA error: device-side assert triggered", False),
        ("the sampler has run out of memory cards", False),
    ],
)
def test_the_texts_of_libraries_without_memory_are_known(text: str, is_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == is_memory
    assert (_ending_of(RuntimeError(text)) is Ending.OUT_OF_MEMORY) == is_memory


@pytest.mark.full
def test_memory_that_runs_out_in_nccl_is_out_of_memory() -> None:
    assert is_out_of_memory(nccl(OF_CUDA, CUDA, "Cuda failure 2 'out of memory'"))
    assert not is_out_of_memory(nccl(OF_CUDA, CUDA, "Cuda failure 800 'operation not permitted'"))


class Fails(nn.Module):
    """A model in whose training a collective fails on every worker."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.layers = mlp()
        self.last = last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise nccl(*(OF_USAGE, USAGE) if self.last == DUPLICATE else (OF_CUDA, CUDA), self.last)


@pytest.mark.full
@pytest.mark.parametrize(
    ("last", "says"),
    [
        (DUPLICATE, rf"errors\.JobError: two workers use the same GPU.*: {DUPLICATE}; set gpus_per_worker"),
        (
            "Cuda failure 2 'out of memory'",
            r"errors\.ModelError: step 0, shard \d: model raised .*: Cuda failure 2 'out of memory'; .*set one of: ",
        ),
    ],
)
def test_a_task_tells_a_mistake_and_memory_that_runs_out_as_what_they_are(
    tmp_path: Path, last: str, says: str
) -> None:
    model = {"target": "tests.cluster.test_failed_collectives:Fails", "args": {"last": last}}
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of(model, workers=2), tmp_path)


def run_in_a_group(member: Callable[..., None], *args: Any) -> Ended:
    """Call `member` in two processes with a rank and the port of a store; how rank 0 ended."""
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        first, _ = (stack.enter_context(started(member, rank, store.port, *args)) for rank in range(2))
        return first.end(60)


def loses_its_peer(rank: int, port: int, how: str) -> None:
    """Rank 0 prints why its collective failed: rank 1 is killed, is too late, or never puts a key into the store."""
    store = TCPStore(LOCALHOST, port, timeout=timedelta(seconds=4))
    # Longer than a kill takes to be seen, unless the time-out itself is wanted.
    timeout = timedelta(seconds=4 if how == "late" else 30)
    world.TIMEOUT = timeout
    form_group("gloo", store, World(rank, 2))
    store.set_timeout(timedelta(seconds=4))
    ones = torch.ones(2)
    dist.all_reduce(ones, group=everyone())
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)  # it is ended once rank 0 has
    try:
        if how == "store":
            store.get("never")
        for _ in range(1000):
            dist.all_reduce(ones, group=everyone())
            time.sleep(0.01)
    except RuntimeError as error:
        failed = failed_in_group(error)
        print(json.dumps(failed and [failed.cause.name, failed.line, passes(error)]), flush=True)
    os._exit(0)  # a group that is left while a peer is lost ends the process otherwise


@pytest.mark.full(but=["killed-onnection (closed|reset)"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "onnection (closed|reset)"),
        ("late", "Timed out waiting 4000ms"),
        ("store", "wait timeout after 4000ms"),
    ],
)
def test_a_real_loss_is_told_as_one(how: str, says: str) -> None:
    ended = run_in_a_group(loses_its_peer, how)
    cause, line, passed = json.loads(ended.stdout)
    assert (cause, passed) == ("LOST_PEER", True)
    assert re.search(says, line), line


class Dying(dist.Store):  # type: ignore[misc, name-defined]
    """A store whose process dies as soon as it has said where it is found, before others connect to it."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def forms_without_its_peer(rank: int, port: int, is_later: bool) -> None:
    """Rank 1 dies while the group forms, or a later one; rank 0 prints how long it has waited."""
    store: Any = TCPStore(LOCALHOST, port)
    within = timedelta(seconds=1)
    if is_later:
        form_group("gloo", store, World(rank, 2), within=within)
        time.sleep(2 * rank)  # it may come later than that
        assert everyone()._get_backend(torch.device("cpu")).options._timeout == world.TIMEOUT  # type: ignore[union-attr]
        world._store = Dying(store) if rank else store
    began = time.monotonic()
    try:
        if is_later:
            new_group()
        else:
            form_group("gloo", Dying(store) if rank else store, World(rank, 2), within=within)
        dist.all_reduce(torch.ones(1), group=everyone())  # gloo may have found where it was
    except RuntimeError as error:
        failed = failed_collective(error)
        print(json.dumps([failed and failed.cause.name, time.monotonic() - began]), flush=True)
    os._exit(0)


@pytest.mark.full
@pytest.mark.parametrize("is_later", [False, True])
def test_a_peer_that_dies_while_a_group_forms_is_soon_told_as_lost(is_later: bool) -> None:
    """gloo waits for its connection, and there is none that could be cut."""
    ended = run_in_a_group(forms_without_its_peer, is_later)
    cause, seconds = json.loads(ended.stdout)
    assert cause in ("LOST_PEER", "UNKNOWN") and seconds < 30


def comes_late(rank: int, port: int) -> None:
    """Rank 1 builds its dataset for longer than the store waits for a worker that has not come to form the group."""
    store = TCPStore(LOCALHOST, port, timeout=timedelta(seconds=1))
    form_group("gloo", store, World(rank, 2))
    group = everyone()
    assert group is not None
    shared = dist.distributed_c10d._world.pg_map[group][1]
    if rank == 1:
        time.sleep(2)
        shared.set("ncclUniqueId", "1")
    found = shared.get("ncclUniqueId")  # as NCCL's first collective does
    group = new_group()
    dist.all_reduce(torch.ones(2), group=group)
    print(found.decode(), flush=True)
    os._exit(0)


def sends_bytes(rank: int, port: int) -> None:
    """Rank 0 sends bytes in pieces of 7."""
    form_group("gloo", TCPStore(LOCALHOST, port), World(rank, 2))
    world.BROADCAST_BYTES = 7
    for size in (0, 1, 7, 20, 21):
        data = bytes(range(size))
        assert bytes(world.broadcast_bytes(data if rank == 0 else b"")) == data
    print("sent", flush=True)
    os._exit(0)


@pytest.mark.full
def test_bytes_are_sent_in_pieces() -> None:
    ended = run_in_a_group(sends_bytes)
    assert ended.stdout == "sent\n", ended.stderr


@pytest.mark.full
def test_a_worker_may_build_its_dataset_for_longer_than_it_may_take_to_come() -> None:
    assert group.STORE_TIMEOUT < TIMEOUT
    ended = run_in_a_group(comes_late)
    assert ended.stdout == "1\n", ended.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "devices", "bound"),
    [
        ("nccl", (GPU,), GPU),
        ("nccl", (OTHER,), OTHER),
        ("cpu:gloo,cuda:nccl", (CPU, OTHER), OTHER),
        ("nccl", (GPU, OTHER), None),  # a bound group refuses the tensors of the second GPU
        ("gloo", (GPU,), None),
        ("gloo", (CPU,), None),
    ],
)
def test_nccl_connects_when_the_group_is_formed(
    monkeypatch: pytest.MonkeyPatch, backend: str, devices: tuple[torch.device, ...], bound: torch.device | None
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(world, "show_alone", lambda backend: None)
    monkeypatch.setattr(world, "_everyone", None)
    monkeypatch.setattr(world, "_made", lambda *keys: given.append(keys))
    store: Any = TCPStore(LOCALHOST, 0, is_master=True, timeout=timedelta(seconds=1), wait_for_workers=False)
    form_group(backend, store, World(1, 2, device=devices[0], all_devices=devices))
    assert given == [(backend, store, 1, 2, bound)]
    assert (store.timeout, world._timeout) == (TIMEOUT, TIMEOUT)


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "waits"),
    [(60.0, TIMEOUT), (1000.0, timedelta(seconds=2000)), (7200.0, timedelta(hours=4)), (None, NO_TIMEOUT)],
)
def test_a_collective_waits_longer_than_a_step_may_take(
    monkeypatch: pytest.MonkeyPatch, step: float | None, waits: timedelta
) -> None:
    given: list[timedelta] = []
    make = dist.distributed_c10d._new_process_group_helper

    def noting(*args: Any, **keys: Any) -> Any:
        given.append(keys["timeout"])
        return make(*args, **keys)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", noting)
    store: Any = TCPStore(LOCALHOST, 0, is_master=True, timeout=timedelta(seconds=1), wait_for_workers=False)
    for seconds, count in ((step, 3), (0.0, 2)):
        form_group("gloo", store, World(), seconds)
        assert store.timeout == (waits if seconds == step else TIMEOUT)
        if count == 3:
            new_group("gloo")
        leave_group()
    assert given == [waits] * 3 + [TIMEOUT] * 2


@pytest.mark.full
def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert bound_gpu("nccl", World(all_devices=(torch.device("cuda"),))) == OTHER
