"""The weights that a run leaves: one file, or above `LIMIT` several in the layout of Hugging Face, with an index."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dp_ray.engine.average import evaluated_weights, weights_of_average
from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.records import Record
from dp_ray.rundir.checkpoint import checkpoint_name, open_checkpoint
from dp_ray.rundir.files import CHECKPOINTS
from dp_ray.storage import Storage
from dp_ray.tensors.files import Stored, TensorFile, write_tensors

WEIGHTS = "weights.safetensors"
INDEX = "model.safetensors.index.json"
INDEXES = ".safetensors.index.json"  # how the name of an index ends
LIMIT = 5 * 10**9  # bytes of the tensors in a file
BEST = "best.safetensors"
EMA = "ema.safetensors"


@dataclass(frozen=True, kw_only=True)
class WeightsIndex:
    """The index of weights in several files: the file of each tensor. Of our own, `metadata` has their checksums."""

    metadata: dict[str, Any] = field(default_factory=dict)
    weight_map: dict[str, str]


INDEX_JSON = Record[WeightsIndex](WeightsIndex, INDEX, indent=2)


def write_weights(
    run: Storage, tensors: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the weights to a run directory; `whole` is that of `write_tensors`, which is called for each file."""
    parts = tensors_of_files(tensors)
    if len(parts) == 1:
        write_tensors(run, WEIGHTS, tensors, whole=whole)
        # An earlier end's. It goes after the new file, so that a crash never leaves the run without weights.
        run.delete(INDEX)
        return
    checksums: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        checksums[name] = write_tensors(run, name, part, whole=whole, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    metadata = {"total_size": size, "sha256": checksums}
    # After its files: a crash before it leaves an earlier end's weights, or an earlier index, which refuses them.
    INDEX_JSON.write(run, WeightsIndex(metadata=metadata, weight_map=weight_map))
    run.delete(WEIGHTS)


def tensors_of_files(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each file, in order: as many as `LIMIT` bytes hold, but at least one."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > LIMIT:
            parts.append({})
            size = 0
        parts[-1][key] = tensor
        size += tensor.nbytes
    return parts


def weights_name(storage: Storage) -> str | None:
    """Return the name of the weights file in a folder, or else of the index; None if there is neither."""
    return next((name for name in (WEIGHTS, INDEX) if storage.exists(name)), None)


def weights_path(run: Storage) -> str:
    """Return the path or URL of the weights of a run, for people."""
    return str(run.child(weights_name(run) or WEIGHTS))


def open_weights(storage: Storage) -> dict[str, Stored]:
    """Return the tensors of a run's weights, to be read; raises StorageError if a file is missing or damaged."""
    if storage.exists(WEIGHTS) or not storage.exists(INDEX):
        return TensorFile(storage, WEIGHTS, storage.read_bytes(WEIGHTS)).tensors()
    return open_index(storage, INDEX)


def read_weights(storage: Storage) -> dict[str, torch.Tensor]:
    """Return the weights in a run directory; raises what `open_weights` raises."""
    return {key: stored.whole() for key, stored in open_weights(storage).items()}


def files_of(storage: Storage, index: str) -> list[str]:
    """Return the files that an index names; raises StorageError if it is damaged."""
    return sorted(set(_read_index(storage, index).weight_map.values()))


def open_index(storage: Storage, index: str) -> dict[str, Stored]:
    """Return the tensors that an index names, to be read when needed; the files' checksums are verified first."""
    read = _read_index(storage, index)
    checksums = read.metadata.get("sha256", {})
    files = {name: TensorFile(storage, name) for name in sorted(set(read.weight_map.values()))}
    for name, file in files.items():
        if checksums and file.digest != checksums.get(name):
            raise StorageError(f"{file.where}: is not the file that was written with {index}")
        file.check()
    tensors = {name: file.tensors() for name, file in files.items()}
    try:
        return {key: tensors[name][key] for key, name in read.weight_map.items()}
    except KeyError as error:
        raise StorageError(f"{storage}/{index}: names the tensor {error}, which its file does not hold") from None


def _read_index(storage: Storage, index: str) -> WeightsIndex:
    read = INDEX_JSON.read(storage, index)
    if bad := [name for name in read.weight_map.values() if "/" in name or "\\" in name]:
        raise StorageError(f"{storage}/{index}: names a file that is not beside it: {bad[0]!r}")
    return read


def write_best(run: Storage, metric: str, value: float, step: int, is_averaged: bool = False) -> None:
    """Write the weights of the best checkpoint, the one after `step` steps, as a weights file of the bare module.

    With `is_averaged` that is the average of the weights. Only one tensor at a time is in memory. Raises StorageError
    if the checkpoint is damaged.
    """
    opened = open_checkpoint(run.child(CHECKPOINTS), checkpoint_name(step))
    opened.check(World())
    state = weights_of_average(opened.state["ema"]) if is_averaged else evaluated_weights(opened.state)
    stored = {name: tensor for name, tensor in state.items() if isinstance(tensor, Stored)}
    empty = {name: tensor.empty() for name, tensor in stored.items()}
    by_id = {id(empty[name]): tensor for name, tensor in stored.items()}
    text = json.dumps({"metric": metric, "value": value, "step": step})
    write_tensors(run, BEST, empty, text, whole=lambda tensor: by_id[id(tensor)].whole())
