"""Tell what computes on a worker, and refuse workers that would give a bitwise job different bits.

A kernel adds in another order on another kind of processor or GPU, and in another version of its library. So
`bitwise` holds among workers on which the same computes.
"""

import ctypes
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dp_ray.engine.world import World, gathered, is_gpu
from dp_ray.errors import JobError
from dp_ray.messages import Computes, Send
from dp_ray.rundir.numerics import Numerics, difference, kinds_of, places_of_kinds, refusal
from dp_ray.system.linux import loaded_library, processor
from dp_ray.text import listed

if TYPE_CHECKING:
    from dp_ray.job.job import Job
    from dp_ray.messages import StepControl

# A user sets these to lower the instructions that torch's libraries use; ATEN_CPU_CAPABILITY shows in torch itself.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
LIBRARIES = {"MKL": r"Math Kernel Library Version (\S+)", "oneDNN": r"MKL-DNN (v\S+)", "BLAS": r"BLAS_INFO=(\w+)"}


class OtherKind(JobError):
    """Workers on the nodes with these ids would compute differently from those of the job's last attempt."""

    def __init__(self, says: str, node_ids: tuple[str, ...]) -> None:
        super().__init__(says)
        self.node_ids = node_ids


def check_numerics(job: "Job", world: World, send: Send, control: "StepControl") -> None:
    """Tell the driver what the workers compute on. Every rank calls this at the start of an attempt.

    Raises JobError, on every rank, if that differs and the job is bitwise. It is an OtherKind if only nodes that
    came later differ, so that the job can go on without them.
    """
    each = gathered((world.node, control.node_id, control.kind, numerics_of(world.devices)))
    kinds = kinds_of((rank, node, own) for rank, (node, _, _, own) in enumerate(each))
    if world.rank == 0:
        send(Computes(control.attempt, kinds))
    if not job.bitwise:
        return
    node_ids: dict[str, dict[str, str]] = {}  # with their addresses, by what computes there
    for node, node_id, _, own in each:
        node_ids.setdefault(json.dumps(own.computes, sort_keys=True), {})[node_id] = node
    if len(node_ids) == 1:
        if world.rank == 0:
            control.settle(*node_ids)
        return
    # Who goes on from the first view was told none as it began, but who comes later was.
    known = node_ids.pop(next((kind for _, _, kind, _ in each if kind), ""), {})
    others = {node_id: node for nodes in node_ids.values() for node_id, node in nodes.items()}
    if known and not known.keys() & others.keys():
        where, differs = listed(dict.fromkeys(others.values())), difference(places_of_kinds(kinds))
        raise OtherKind(f"no workers are taken on {where}, which would change the bits: {differs}", tuple(others))
    raise refusal(kinds)


def computes_on(device: str) -> dict[str, str]:
    """Return what computes on a worker with this device alone."""
    return dict(numerics_of([torch.device(device)]).computes)


def numerics_of(devices: Sequence[torch.device]) -> Numerics:
    """Return what computes on a worker with these devices; the processor of one with GPUs alone is beside it."""
    gpus = [device for device in devices if is_gpu(device)]
    here = {"processor": processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    computes = {"torch": str(torch.__version__)}
    if gpus:
        computes |= _of_gpus(gpus)
    if len(gpus) == len(devices):
        return Numerics(computes, here)
    built = torch.__config__.show()
    found = {name: match[1] for name, pattern in LIBRARIES.items() if (match := re.search(pattern, built))}
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    return Numerics({**here, **computes, **found, **limits}, {})


def _of_gpus(gpus: Sequence[torch.device]) -> dict[str, str]:
    models = []
    for gpu in gpus:
        card = torch.cuda.get_device_properties(gpu)
        models.append(f"{card.name}, compute capability {card.major}.{card.minor}")
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else None  # type: ignore[no-untyped-call]
    versions = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuBLAS": _cublas(torch.version.cuda),
        "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "NCCL": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }
    known = {name: str(version) for name, version in versions.items() if version is not None}
    return {"gpu": " and ".join(dict.fromkeys(models)), **known}


def _cublas(cuda: str | None) -> str | None:
    """Return the version of the loaded cuBLAS, for which torch has no function; None if it is not found."""
    if cuda is None:
        return None
    library = loaded_library(f"libcublas.so.{cuda.partition('.')[0]}")
    if library is None or not hasattr(library, "cublasGetProperty"):
        return None
    numbers = []
    for part in range(3):  # major, minor and patch
        number = ctypes.c_int()
        library.cublasGetProperty(part, ctypes.byref(number))
        numbers.append(str(number.value))
    return ".".join(numbers)
