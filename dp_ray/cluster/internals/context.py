"""A worker's place among those that Ray Train has started, and the devices that Ray gave it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch

from dp_ray.engine.world import CPU
from dp_ray.errors import JobError
from dp_ray.system.imports import postponed
from dp_ray.text import listed

with postponed("ray.data", "pandas"):
    from ray.train.v2._internal.execution.context import get_train_context


def place_of_this_worker() -> Any:
    """Return the context: it has get_world_rank and get_world_size.

    Public: ray.train.get_context, which imports Ray Tune, 700 modules with pandas, to say the same.
    """
    return get_train_context()


def assigned_devices() -> list[torch.device]:
    """Return the devices that Ray gave this worker: its GPUs, else the CPU; raises JobError if it cannot use them.

    Public: ray.train.torch.get_devices imports Ray Data and pandas, and looks for AMD's GPUs in CUDA's variable.
    """
    ids = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    return gpus_of(ids, os.environ, torch.version.hip is not None) or [CPU]


def gpus_of(ids: Sequence[str], variables: Mapping[str, str], is_amd: bool) -> list[torch.device]:
    """Return torch's names of the GPUs with Ray's ids, in a process with these environment variables.

    torch counts the GPUs that the process may see. On NVIDIA's, Ray Train shows a worker those of all workers of the
    node, which NCCL needs; on AMD's, only its own. Raises JobError if the worker does not see them.
    """
    name = "HIP_VISIBLE_DEVICES" if is_amd and "HIP_VISIBLE_DEVICES" in variables else "CUDA_VISIBLE_DEVICES"
    if name not in variables:
        return [torch.device("cuda", int(gpu)) for gpu in ids]
    visible = variables[name].split(",")
    if hidden := [gpu for gpu in ids if gpu not in visible]:
        raise JobError(
            f"gpus_per_worker: Ray gave this worker GPU {listed(hidden)}, which {name}={variables[name]} hides from "
            "it: leave that variable to Ray"
        )
    if ids and len(visible) > 1 and any(gpu.startswith("MIG-") for gpu in visible):
        raise JobError(
            f"gpus_per_worker: the node's GPUs are cut into slices (MIG): {listed(visible)}; CUDA shows a process "
            "only one of them, and NCCL connects none: switch MIG off, or run one worker a node"
        )
    return [torch.device("cuda", visible.index(gpu)) for gpu in ids]
