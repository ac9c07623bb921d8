"""A worker's place among the others (rank, node, devices), and collectives that also work in one process.

The groups of dp_ray's workers are objects of this module, begin at `form_group`. torch's default group, which the
user's code sees, is a world of this worker alone: code that splits its data by rank, or sums over all ranks, does so
over one. So each collective, rank and size of dp_ray names its group (`everyone`, `own_rank`).

The second half finds why a collective failed, or a process group could not be formed, and what is wrong with a
machine (`Trouble`). torch raises the same few exceptions for every cause: only their texts distinguish a lost worker
from a mistake in the job.
"""

import functools
import io
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (it registers a backend)

from dp_ray.errors import Error, JobError, ModelError, WorkerError
from dp_ray.system.linux import SHARED_MEMORY, cut_sockets, open_sockets
from dp_ray.system.process import patched
from dp_ray.system.threads import waiting
from dp_ray.tensors.flat import as_bytes, from_bytes

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=30)  # of a collective, as Ray Train sets it, unless a step may take longer
NO_TIMEOUT = timedelta(days=7)  # of a collective in a job whose steps have no time limit


@functools.cache
def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU; cached, since each look at a device's `type` makes a string."""
    return device.type == "cuda"


@dataclass(frozen=True)
class World:
    """One worker's place, in torch.distributed's and Ray Train's terms; by default a single worker.

    Its inputs go to `device`. If its model is on several devices, `all_devices` lists them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    node: str = "localhost"
    device: torch.device = CPU
    all_devices: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the worker's model, at least one."""
        return self.all_devices or (self.device,)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


_everyone: dist.ProcessGroup | None = None  # of the job's workers
_store: Any = None  # through which further groups form
_backend = ""
_num_groups = 0
_timeout = TIMEOUT  # of the collectives
# How long a group may take to form once all have come; None: as long as a collective.
_within: timedelta | None = None
_pickler: Any = pickle.Pickler  # of objects that plain pickle refuses
_sockets: dict[int, int] = {}  # of the groups that were formed


def everyone() -> dist.ProcessGroup | None:
    """Return the group of the job's workers; None if there is none, as in the driver."""
    return _everyone


def pickler() -> Any:
    """Return the class by which objects go to other workers, of the group that was formed last."""
    return _pickler


def own_rank() -> int:
    """Return this worker's rank among the job's workers, 0 without a group; torch's own rank is 0 everywhere."""
    return 0 if _everyone is None else _everyone.rank()


def has_peers() -> bool:
    """Return whether other workers run beside this one, in its process group."""
    return _everyone is not None and _everyone.size() > 1


def begin_sum(tensor: torch.Tensor) -> dist.Work:
    """Start to sum a tensor over all workers, in place; `dist.all_reduce` does the same after many checks."""
    assert _everyone is not None
    return _everyone.allreduce([tensor])


def form_group(
    backend: str,
    store: Any,
    world: World,
    step_seconds: float | None = 0.0,
    within: timedelta | None = None,
    pickler: Any = pickle.Pickler,
) -> None:
    """Form the group of the workers that have the store open, and leave the user's code a world of its own.

    A collective waits for peers twice as long as a step may take, which is `step_seconds`, None for no limit: what
    hangs is found before that, and named. The store waits as long from then on: a collective may need it.
    Where workers may be lost meanwhile, this group and later ones form `within` a shorter time, or not at all.
    Objects of classes that no import finds, as a notebook's, go to other workers by the class `pickler`.
    """
    global _everyone, _store, _backend, _timeout, _within, _pickler
    _within, _pickler = within, pickler
    _timeout = NO_TIMEOUT if step_seconds is None else max(TIMEOUT, timedelta(seconds=2 * step_seconds))
    # NCCL keeps its flight recorder in the first group of a process.
    _everyone = _made(backend, store, world.rank, world.world_size, bound_gpu(backend, world))
    _store, _backend = store, backend
    show_alone(backend)
    store.set_timeout(_timeout)


def _made(backend: str, store: Any, rank: int, size: int, gpu: torch.device | None = None) -> dist.ProcessGroup:
    """Make a group beside torch's default one; torch's own `new_group` only makes parts of that.

    Where a peer dies once it has said where it is found, gloo waits for its connection as long as for a collective.
    """
    global _num_groups
    _num_groups += 1
    group: dist.ProcessGroup
    before = open_sockets()
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        store,
        cast("distributed_c10d.GroupName", f"dp_ray-{_num_groups}"),
        timeout=_within or _timeout,
        device_id=gpu,
        group_desc="all",
    )
    if _within is not None:
        distributed_c10d._set_pg_timeout(_timeout, group)
    _sockets.update(open_sockets().items() - before.items())
    # As of a default group: a rank in it is a rank of the world.
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def show_alone(backend: str) -> None:
    """Give the user's code, as torch's default group, a world of this worker alone."""
    distributed_c10d._update_default_pg(None)  # a forked process has its parent's group, without the threads
    with patched(sys, excepthook=sys.excepthook):  # torch puts the rank before each line of a traceback
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=_timeout,
        )


def without_frames(error: BaseException) -> None:
    """Drop the frames that an error and its causes hold: a group lives as long as one of them holds it.

    A future in C++ may hold the error, and a frame the future: such a cycle is never collected.
    """
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is not None and not any(cause is other for other in seen):
            seen.append(cause)
            cause.__traceback__ = None
            left += [cause.__cause__, cause.__context__]


def cut_groups() -> None:
    """Cut the connections of the groups that were formed: each collective that waits, here and on peers, raises.

    That is how a worker leaves peers that are silent, and how all hear of a loss: of a death gloo tells those alone
    that are connected to the dead for what they wait for. Any thread may call this. NCCL's are left alone.
    """
    if "nccl" not in _backend:
        cut_sockets(dict(_sockets))


def leave_group() -> None:
    """Destroy all groups that were formed, the user's too."""
    global _everyone, _store, _num_groups, _within
    _everyone, _store, _num_groups, _within = None, None, 0, None
    _sockets.clear()
    if "torch.distributed.tensor" in sys.modules:  # torch remembers sharded tensors, and these their group
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", bool)()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone(needs_group: bool) -> Iterator[None]:
    """Have the groups of a worker that is alone while the block runs, unless `form_group` has formed some.

    `needs_group` asks for a group of dp_ray's own too. The caller of `workers: 0` gets back its own default group.
    """
    global _everyone, _store, _backend
    if _everyone is not None:
        yield
        return
    callers = dist.group.WORLD
    show_alone("gloo")
    world_group = dist.group.WORLD
    if needs_group:
        _store, _backend = dist.HashStore(), "gloo"  # type: ignore[attr-defined]
        _everyone = _made(_backend, _store, 0, 1)
    try:
        yield
    finally:
        if callers is None:
            leave_group()
        else:
            groups, _everyone = (world_group, _everyone), None
            alive = distributed_c10d._world.pg_map  # empty if the user's code has destroyed all groups
            distributed_c10d._update_default_pg(callers if callers in alive else None)
            for group in groups:
                if group in alive:
                    dist.destroy_process_group(group)


def bound_gpu(backend: str, world: World) -> torch.device | None:
    """Return the GPU for which NCCL connects at once, not in the first collective; None if it has to wait for that.

    If a worker has several GPUs, NCCL connects for each one that is used: a group bound to one refuses the others.
    """
    gpus = {device for device in world.devices if device.type == "cuda"}
    if "nccl" not in backend or len(gpus) != 1 or not dist.is_nccl_available():
        return None
    (gpu,) = gpus
    return gpu if gpu.index is not None else torch.device("cuda", torch.cuda.current_device())


def new_group(backend: str | None = None) -> dist.ProcessGroup:
    """Make another group of all workers; every rank calls it, in the same order."""
    assert _everyone is not None
    backend = backend or _backend
    gpu = _everyone.bound_device_id if "nccl" in backend else None
    if _within is not None:
        begin_sum(torch.zeros(1)).wait()  # so that all have come, and a loss is heard of as in any collective
    return _made(backend, _store, _everyone.rank(), _everyone.size(), gpu)


@contextmanager
def pretended(workers: int) -> Iterator[None]:
    """Have a group of `workers` while the block runs: this process is rank 0, and the others do not exist."""
    global _everyone, _backend, _num_groups
    before = _everyone, _backend, _num_groups  # the number too: all workers must name their next group alike
    _backend = "fake"
    _everyone = _made(_backend, dist.HashStore(), 0, workers)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group(_everyone)
        _everyone, _backend, _num_groups = before


# torch 2.13 renames it, and deprecates the old name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_rank_0() -> bool:
    """Return whether this is rank 0 of the job's workers; True without a group."""
    return own_rank() == 0


def broadcast(text: str) -> str:
    """Return rank 0's text on every rank; without a process group, the text itself. Every rank calls this."""
    if not has_peers():
        return text
    texts = [text]
    with waiting("rank 0"):
        dist.broadcast_object_list(texts, src=0, group=_everyone)
    return texts[0]


BROADCAST_BYTES = 1 << 26  # at once


def broadcast_bytes(data: bytes) -> bytes:
    """Return rank 0's bytes on every rank; without a process group, the bytes themselves. Every rank calls this."""
    size = int(broadcast(str(len(data))))
    if not has_peers():
        return data
    received: Any = None if is_rank_0() else bytearray(size)  # which is read as bytes are; a copy would double it
    for start in range(0, size, BROADCAST_BYTES):
        stop = min(size, start + BROADCAST_BYTES)
        piece = bytearray(data[start:stop]) if received is None else memoryview(received)[start:stop]
        with waiting("rank 0"):
            from_rank(torch.frombuffer(piece, dtype=torch.uint8))
    return data if received is None else received


def from_rank(tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return the dense tensor of the rank `source` on every rank; every rank calls this, with one of the same form.

    It comes into the tensor's own memory if that is contiguous, else into a new tensor.
    """
    raw = as_bytes(tensor)  # gloo and NCCL do not support every dtype
    if len(raw):
        dist.broadcast(raw, src=source, group=_everyone)
    return from_bytes(raw, tensor)


def message_of(value: Any) -> bytes:
    """Pickle a value for the other workers. Raises what the group's pickler raises."""
    try:
        return pickle.dumps(value, 5)
    except Exception:  # a class of a script or notebook; plain pickle takes less time for all others
        file = io.BytesIO()
        _pickler(file, 5).dump(value)
        return file.getvalue()


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in rank order; without a process group, the own one. Every rank calls this."""
    if _everyone is None or not has_peers():
        return [value]
    values: list[Any] = [None] * _everyone.size()
    sent = message_of(value)
    with waiting("all ranks"):
        dist.all_gather_object(values, sent, group=_everyone)
    return [pickle.loads(each) for each in values]


class Trouble(Enum):
    """What is wrong with a machine, not with the job: the sign in an error's text, and what to do.

    It `is_final` if it is there as long as nobody changes the machine, or the job. The texts are those of CUDA, NCCL,
    torch and the system. The first one that is found counts.
    """

    NO_MULTICAST = (
        r"NCCL(?s:.*?)(NVLS|nvls\.cc|Cuda failure (1 |401 )?'(invalid argument|the operation cannot be performed in "
        r"the present state)')",
        "this is mostly NCCL's multicast over NVLink (NVLS), on a node whose nvidia-fabricmanager does not run as it "
        'should: check it, or set env: {NCCL_NVLS_ENABLE: "0"}',
        True,
    )
    NO_FABRIC = (
        "system not yet initialized",
        "the GPUs of this node are connected by NVSwitches, and nvidia-fabricmanager does not run, or is of another "
        "version than the driver: start it there (systemctl start nvidia-fabricmanager)",
        True,
    )
    SHARED_MEMORY = (
        r"unable to (open|allocate) shared memory(?!.*Too many open files)|shared memory segment"
        r"|insufficient shared memory|workers are out of shared memory"
        rf"|No space left on device.*{SHARED_MEMORY}|{SHARED_MEMORY}.*No space left on device",
        f"{SHARED_MEMORY} of this node is full, or too small: Docker gives a container 64 MB; start it with "
        f"--shm-size=8g or --ipc=host, or mount an emptyDir with medium: Memory at {SHARED_MEMORY} (Kubernetes)",
    )
    BROKEN_GPU = (
        r"uncorrectable (ECC|NVLink) error|ECC_UNCORRECTABLE|nvlink or a hardware error|\bXid\b|fallen off the bus"
        "|GPU is lost",
        "a GPU of this node is broken: look at nvidia-smi -q -d ECC and dmesg | grep Xid there",
    )
    BUSY_GPU = (
        "busy or unavailable",
        "another process holds the GPU, in exclusive mode or as it ends: look at nvidia-smi on this node",
    )
    OLD_DRIVER = (
        r"driver version is insufficient|driver on your system is too old|unsupported display driver / cuda driver"
        r"|forward compatibility was attempted|compiled with an unsupported toolchain"
        r"|Driver/library version mismatch",
        f"the NVIDIA driver of this node does not fit this torch (CUDA {torch.version.cuda}): install a newer "
        "driver, and reboot, or a torch that is built for an older CUDA",
        True,
    )
    NO_KERNEL = (
        "no kernel image is available",
        "this torch, or an extension of it, is not built for GPUs of this model: install one that is "
        "(torch.cuda.get_arch_list() says for which it is built)",
        True,
    )

    def __init__(self, sign: str, remedy: str, is_final: bool = False) -> None:
        self.sign, self.remedy, self.is_final = re.compile(sign), remedy, is_final


def trouble_of(error: BaseException | None) -> Trouble | None:
    """Return what is wrong with the machine by the text of an error or of its causes; None if nothing is.

    Errors of dp_ray's own that tell it have a `trouble`.
    """
    if error is None:
        return None
    text = str(error) if isinstance(error, RuntimeError | OSError) else ""
    return getattr(error, "trouble", None) or _trouble_in(text) or trouble_of(error.__cause__)


def _trouble_in(text: str) -> Trouble | None:
    return next((trouble for trouble in Trouble if trouble.sign.search(text)), None)


def _told(trouble: Trouble, text: str) -> str:
    """Return the line of a text that shows the trouble, without the advice of others, and what to do."""
    match = trouble.sign.search(text)
    assert match is not None
    line = text[: match.end()].splitlines()[-1] + text[match.end() :].partition("\n")[0]
    return f"{line.strip().rstrip('.')}; {trouble.remedy}"


class Cause(Enum):
    """Why a collective failed: the sign in the error's text, and the error to raise, with the line that shows it.

    No retry mends what is a JobError. The first sign that is found counts: NCCL's own cause says more than its result
    code, which differs between versions.
    """

    NOT_BUILT = (  # this worker's torch lacks the backend
        r"Distributed package doesn't have \w+ built in",
        JobError,
        "this worker's torch cannot do collectives between GPUs: %s; install a torch with CUDA on every node, or set "
        "gpus_per_worker: 0 to run on CPUs",
    )
    SHARED_GPU = (
        r"Duplicate GPU detected",
        JobError,
        "two workers use the same GPU, as NCCL never does: %s; set gpus_per_worker: 1 or more without devices, so "
        "that each worker has its own; with 0.5 and the like they share one; slices of one GPU (MIG) are the same "
        "GPU to NCCL",
    )
    MISUSED = (
        r"ncclInvalid(Usage|Argument)|tensor not on device passed to init_process_group",
        JobError,
        "NCCL refuses what it is asked to do, and would again: %s; check gpus_per_worker, devices and NCCL's "
        "variables; env: {NCCL_DEBUG: WARN} has NCCL say more",
    )
    OUT_OF_MEMORY = (
        r"(?s)ncclUnhandledCudaError.*(out of memory|Failed to CUDA [cm]alloc)",
        ModelError,
        "NCCL found no memory left on the GPU: %s; end what else holds its memory, or take more or larger GPUs "
        "(gpus_per_worker, accelerator_type)",
    )
    MACHINE = (
        "|".join(f"({trouble.sign.pattern})" for trouble in Trouble),
        ModelError,
        "the workers cannot exchange anything: %s",
    )
    LOST_PEER = (  # or the connection to it
        r"ncclRemoteError|remote peer|[Cc]onnect(ion|FullMesh)? |[Tt]imed out|[Tt]imeout|got 0 bytes"
        r"|Call to (recv|send)|Broken pipe",
        WorkerError,
        "another worker was lost: %s",
    )
    UNKNOWN = ("", WorkerError, "a collective failed, perhaps because another worker was lost: %s")

    def __init__(self, sign: str, kind: type[Error], says: str) -> None:
        self.sign, self.kind, self.says = re.compile(sign), kind, says


class FailedCollective(NamedTuple):
    """The cause, and the line of the error's text that shows it."""

    cause: Cause
    line: str

    def error(self) -> Error:
        """Return a WorkerError if another worker is, or may be, lost; a JobError for what no retry mends."""
        return self.cause.kind(self.cause.says % self.line)


# gloo's errors are plain RuntimeErrors, and so is any error of a communication hook: only their texts differ.
_OF_A_GROUP = re.compile(r"gloo/|\bGloo |NCCL|Connection (reset|closed) by peer|Distributed package")


def failed_collective(error: BaseException) -> FailedCollective | None:
    """Return the cause of an error of the process group; None if the error is about something else."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).partition("\nException raised from ")[0]  # C++ frames follow
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return FailedCollective(Cause.LOST_PEER, _line(text))
    if not isinstance(error, dist.DistError) and not _OF_A_GROUP.search(text):
        return None
    cause = next(cause for cause in Cause if cause.sign.search(text))
    trouble = _trouble_in(text) if cause is Cause.MACHINE else None
    return FailedCollective(cause, _line(text) if trouble is None else _told(trouble, text))


def failed_in_group(error: BaseException) -> FailedCollective | None:
    """Return the cause of an error of this process's group; None without one, and for other errors."""
    failed = failed_collective(error) if _everyone is not None else None
    # A worker that is alone has lost no peer: the user's code has a connection of its own.
    needs_peers = failed is not None and failed.cause in (Cause.LOST_PEER, Cause.UNKNOWN)
    return None if needs_peers and not has_peers() else failed


def passes(error: BaseException) -> bool:
    """Return whether an error is the process group's, not one of the user code in which it was raised.

    Memory that runs out in a collective is reported as elsewhere: with the location, and what to change.
    """
    failed = failed_in_group(error)
    return failed is not None and failed.cause is not Cause.OUT_OF_MEMORY


# Which key of a job to set: torch's own texts do not say it.
_HINTS = {
    re.compile(
        r"(CUDA|HIP) error: (?!out of memory|CU\w+_STATUS_)"
    ): "; a GPU tells an error late, so another call than "
    "this may have failed: to see which, set env: {CUDA_LAUNCH_BLOCKING: '1'} and run again",
    re.compile("does not have a deterministic implementation"): "; with bitwise: true, torch may take deterministic "
    "kernels alone: compute this in another way, or set bitwise: false",
}


def text_of(error: BaseException) -> str:
    """Return the text of an error, with what to set; for a failed collective, only the line with the cause.

    So it is for a trouble of the machine.
    """
    failed = failed_collective(error)
    if failed is not None:
        return failed.line
    text = str(error)
    if isinstance(error, RuntimeError | OSError) and (trouble := _trouble_in(text)) is not None:
        return _told(trouble, text)
    hints = [hint for sign, hint in _HINTS.items() if isinstance(error, RuntimeError) and sign.search(text)]
    return text.rstrip() + hints[0] if hints else text


def _line(text: str) -> str:
    """Return the line with the cause: NCCL's text has it last, after its result code and what that may mean."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    causes = [line for line in lines if not line.startswith("Last error:")]
    return causes[-1] if causes else lines[-1]
