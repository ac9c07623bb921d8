"""Why a collective failed, or a process group could not be formed.

torch raises the same few exceptions for every cause: only their texts tell a lost worker from a mistake in the job.
"""

import re
from enum import Enum, auto
from typing import NamedTuple

import torch.distributed as dist

from dp_ray.errors import Error, JobError, ModelError, WorkerError
from dp_ray.replica.world import has_peers


class Cause(Enum):
    """Why a collective failed."""

    NOT_BUILT = auto()  # this worker's torch lacks the backend
    SHARED_GPU = auto()  # two workers use one GPU
    MISUSED = auto()  # NCCL refuses what it is asked to do
    OUT_OF_MEMORY = auto()  # NCCL found no memory left on the GPU
    LOST_PEER = auto()  # another worker, or the connection to it
    UNKNOWN = auto()  # which may be a lost worker too


class FailedCollective(NamedTuple):
    """The cause, and the line of the error's text that tells it."""

    cause: Cause
    line: str


# gloo's errors are plain RuntimeErrors, and so is any error of a communication hook: only the text tells them apart.
_OF_A_GROUP = re.compile(r"gloo/|\bGloo |NCCL|Connection (reset|closed) by peer|Distributed package")

# The first that is found counts: NCCL's own cause says more than its result code, which differs between versions.
_CAUSES = {
    Cause.NOT_BUILT: r"Distributed package doesn't have \w+ built in",
    Cause.SHARED_GPU: r"Duplicate GPU detected",
    Cause.MISUSED: r"ncclInvalid(Usage|Argument)|tensor not on device passed to init_process_group",
    Cause.OUT_OF_MEMORY: r"(?s)ncclUnhandledCudaError.*(out of memory|Failed to CUDA [cm]alloc)",
    Cause.LOST_PEER: r"ncclRemoteError|remote peer|[Cc]onnect(ion|FullMesh)? |[Tt]imed out|[Tt]imeout|got 0 bytes"
    r"|Call to (recv|send)|Broken pipe",
}


def failed_collective(error: BaseException) -> FailedCollective | None:
    """What an error says of the process group; None if it is about something else."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).partition("\nException raised from ")[0]  # C++ frames follow
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return FailedCollective(Cause.LOST_PEER, _line(text))
    if not isinstance(error, dist.DistError) and not _OF_A_GROUP.search(text):
        return None
    found = (cause for cause, pattern in _CAUSES.items() if re.search(pattern, text))
    return FailedCollective(next(found, Cause.UNKNOWN), _line(text))


def failed_in_group(error: BaseException) -> FailedCollective | None:
    """What an error says of the process group in which this process is; None without one, and for other errors."""
    failed = failed_collective(error) if dist.is_initialized() else None
    needs_peers = failed is not None and failed.cause in (Cause.LOST_PEER, Cause.UNKNOWN)
    return None if needs_peers and not has_peers() else failed


def passes(error: BaseException) -> bool:
    """Whether an error is the process group's, and so none of the user code in which it was raised.

    Memory that runs out in a collective is told like that which runs out elsewhere: with where, and what to change.
    """
    failed = failed_in_group(error)
    return failed is not None and failed.cause is not Cause.OUT_OF_MEMORY


def error_of(failed: FailedCollective) -> Error:
    """What to raise: a WorkerError if another worker is, or may be, lost; a JobError for what no retry mends."""
    line = failed.line
    match failed.cause:
        case Cause.NOT_BUILT:
            advice = "install a torch with CUDA on every node, or set gpus_per_worker: 0 to run on CPUs"
            return JobError(f"this worker's torch cannot do collectives between GPUs: {line}; {advice}")
        case Cause.SHARED_GPU:
            advice = "set gpus_per_worker: 1 or more without devices, so that each worker has its own; with 0.5 and "
            return JobError(
                f"two workers use the same GPU, as NCCL never does: {line}; {advice}the like they share one"
            )
        case Cause.MISUSED:
            advice = "check gpus_per_worker, devices and NCCL's variables; env: {NCCL_DEBUG: WARN} has NCCL say more"
            return JobError(f"NCCL refuses what it is asked to do, and would again: {line}; {advice}")
        case Cause.OUT_OF_MEMORY:
            advice = "end what else holds its memory, or take more or larger GPUs (gpus_per_worker, accelerator_type)"
            return ModelError(f"NCCL found no memory left on the GPU: {line}; {advice}")
        case Cause.LOST_PEER:
            return WorkerError(f"another worker was lost: {line}")
        case Cause.UNKNOWN:
            return WorkerError(f"a collective failed, perhaps because another worker was lost: {line}")


def text_of(error: BaseException) -> str:
    """The text of an error: of a failed collective the line that tells the cause, else all of it."""
    failed = failed_collective(error)
    return str(error) if failed is None else failed.line


def _line(text: str) -> str:
    """The line that tells the cause: NCCL has it last, after its result code and what that may mean."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    told = [line for line in lines if not line.startswith("Last error:")]
    return told[-1] if told else lines[-1]
