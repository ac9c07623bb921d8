"""Weights that a model starts from: of a weights file, a checkpoint, or a run."""

import pickle
from typing import Any

import torch
from torch import nn

from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.replica.state import CHECKPOINTS, NAME, load, name_of, steps_of
from dp_ray.storage import Storage
from dp_ray.tensorfile import read_tensors

WEIGHTS = "weights.safetensors"
TORCH_FILES = (".pt", ".pth", ".bin")


def find_start(location: str) -> tuple[Storage, str]:
    """The folder and the file that `init_from` names: a run is its last checkpoint, else its weights."""
    folder, _, name = location.rstrip("/").rpartition("/")
    if name.endswith((".safetensors", *TORCH_FILES)):
        found = Storage(folder or "."), name
        if not found[0].exists(name):
            raise JobError(f"init_from: there is no file {location}")
        return found
    run = Storage(location)
    if steps := steps_of(run.child(CHECKPOINTS)):
        return run.child(CHECKPOINTS), name_of(steps[-1])
    if run.exists(WEIGHTS):
        return run, WEIGHTS
    raise JobError(
        f"init_from: {location} holds neither checkpoints nor {WEIGHTS}: give a run of task train, or a file"
    )


def read_start(location: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The weights that `init_from` names, and where it is a checkpoint, the whole of it: about and state."""
    storage, name = find_start(location)
    if NAME.fullmatch(name):
        about, state = load(storage, name)
        return state["model"], {"about": about, "state": state}
    if not name.endswith(TORCH_FILES):
        return dict(read_tensors(storage, name)[0]), None
    try:
        with storage.open(name) as stream:
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise StorageError(
            f"{location}: is no file of weights that can be read without running code: {error}"
        ) from None
    if not isinstance(loaded, dict):
        raise StorageError(f"{location}: holds a {type(loaded).__qualname__}, not a state_dict")
    return loaded, None


def load_weights(model: nn.Module, weights: dict[str, Any], where: str) -> None:
    """Put weights into the bare module; ModelError names what is missing, left over or of another size."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights of {where} are not this model's: {error}") from None
