"""The trained weights as files: one, or above `LIMIT` several in the layout of Hugging Face, with an index."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dp_ray.errors import StorageError
from dp_ray.rundir.files import write_json
from dp_ray.storage import Storage
from dp_ray.tensors.file import read_tensors, sha256_of, write_tensors
from dp_ray.tensors.raw import as_bytes
from dp_ray.tensors.stored import Stored, TensorFile

WEIGHTS = "weights.safetensors"
INDEX = "model.safetensors.index.json"
INDEXES = ".safetensors.index.json"  # how the name of an index ends
LIMIT = 5 * 10**9  # bytes of the tensors in a file


def write_weights(
    run: Storage, tensors: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the weights to a run directory; `whole` is that of `write_tensors`, which is called for each file."""
    parts = parts_of(tensors)
    if len(parts) == 1:
        write_tensors(run, WEIGHTS, tensors, whole=whole)
        run.delete(INDEX)
        return
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    checksums = {
        name: write_tensors(run, name, part, whole=whole, metadata={"format": "pt"})
        for name, part in zip(names, parts, strict=True)
    }
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    size = sum(one.nbytes for one in tensors.values())
    write_json(run, INDEX, {"metadata": {"total_size": size, "sha256": checksums}, "weight_map": weight_map})
    run.delete(WEIGHTS)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file, in order: as many as `LIMIT` bytes hold, but at least one."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, one in tensors.items():
        if parts[-1] and size + one.nbytes > LIMIT:
            parts.append({})
            size = 0
        parts[-1][key] = one
        size += one.nbytes
    return parts


def weights_name(storage: Storage) -> str | None:
    """The name of the weights file in a folder, or else of the index; None if there is neither."""
    return next((name for name in (WEIGHTS, INDEX) if storage.exists(name)), None)


def weights_path(run: Storage) -> str:
    """The path or URL of the weights of a run, for people."""
    return str(run.child(weights_name(run) or WEIGHTS))


def read_weights(storage: Storage) -> dict[str, torch.Tensor]:
    """The weights in a run directory; raises StorageError if a file is missing or damaged."""
    if storage.exists(WEIGHTS) or not storage.exists(INDEX):
        return read_tensors(storage, WEIGHTS)[0]
    return {key: one.whole() for key, one in open_index(storage, INDEX).items()}


def weights_sha256(storage: Storage) -> str:
    """The hash of the tensors' raw bytes, in the order of their names, however many files hold them."""
    if storage.exists(WEIGHTS) or not storage.exists(INDEX):
        return sha256_of(storage, WEIGHTS)
    digest = hashlib.sha256()
    for _, one in sorted(open_index(storage, INDEX).items()):
        digest.update(as_bytes(one.whole()).numpy().data)
    return digest.hexdigest()


def files_of(storage: Storage, index: str) -> list[str]:
    """The files that an index names; raises StorageError if it is damaged."""
    return sorted(set(_read(storage, index)["weight_map"].values()))


def open_index(storage: Storage, index: str) -> dict[str, Stored]:
    """All tensors that an index names, to be read when they are needed; the files' checksums are verified first."""
    read = _read(storage, index)
    checksums = read.get("metadata", {}).get("sha256", {})
    files = {name: TensorFile(storage, name) for name in sorted(set(read["weight_map"].values()))}
    for name, one in files.items():
        if checksums and one.digest != checksums.get(name):
            raise StorageError(f"{one.where}: is not the file that was written with {index}")
        one.check()
    tensors = {name: one.tensors() for name, one in files.items()}
    try:
        return {key: tensors[name][key] for key, name in read["weight_map"].items()}
    except KeyError as error:
        raise StorageError(f"{storage}/{index}: names the tensor {error}, which its file does not hold") from None


def _read(storage: Storage, index: str) -> dict[str, Any]:
    try:
        read = dict(json.loads(storage.read_text(index)))
        names = list(read["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{storage}/{index}: is damaged, or no index of safetensors files: {error!r}") from None
    if bad := [name for name in names if not isinstance(name, str) or "/" in name or "\\" in name]:
        raise StorageError(f"{storage}/{index}: names a file that is not beside it: {bad[0]!r}")
    return read
