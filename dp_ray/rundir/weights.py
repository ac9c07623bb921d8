"""The weights that a model starts from (`init_from`): those of a weights file, a checkpoint, or a run.

What `init_from` names may change while a job runs: a run in training gets newer checkpoints and removes older ones.
So the file's name and hash are pinned in the run directory when the run begins, and only that file is ever loaded.
On a disk with hard links the run directory holds a hard link, so the file survives its removal elsewhere. On other
storage nothing is copied.
"""

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.replica.buffers import make_room
from dp_ray.replica.world import broadcast, is_rank_0
from dp_ray.rundir.checkpoint import CHECKPOINTS, NAME, name_of, parse, steps_of
from dp_ray.rundir.contents import replacing
from dp_ray.rundir.files import is_finished, write_json
from dp_ray.rundir.pieces import PIECES, names_of
from dp_ray.rundir.weights_files import INDEXES, WEIGHTS, files_of, open_index, weights_name
from dp_ray.storage import Storage
from dp_ray.tensors.file import parse_tensors, read_text
from dp_ray.text import listed

BEST = "best.safetensors"
EMA = "ema.safetensors"
TORCH_FILES = (".pt", ".pth", ".bin")
PIN = "init_from.json"
LINKS = "init_from"


@dataclass(frozen=True)
class Start:
    """The pinned file with which a run began: its name, its hash, and its folder relative to `init_from`.

    `folder` is "" if the file is directly in the folder of `init_from`.
    """

    folder: str
    name: str
    sha256: str

    @property
    def step(self) -> int:
        """The steps done in a checkpoint; 0 for weights alone."""
        match = NAME.fullmatch(self.name)
        return int(match[1]) if match else 0


def find_start(location: str) -> tuple[Storage, str, str]:
    """The storage that `init_from` names, and the folder and name in it of the file to load.

    In a run directory that is the newest checkpoint, else the weights. Raises JobError if there is no such file.
    """
    storage, name = _split_location(location)
    if name:
        if not storage.exists(name):
            raise JobError(f"init_from: there is no file {location}")
        return storage, "", name
    if steps := steps_of(storage.child(CHECKPOINTS)):
        return storage, CHECKPOINTS, name_of(steps[-1])
    if weights := weights_name(storage):
        return storage, "", weights
    what = f"holds neither checkpoints nor {WEIGHTS}"
    if storage.is_file():
        what = "is no file of weights"
    elif storage.is_empty():
        what = "does not exist, or is empty"
    kinds = listed([".safetensors", INDEXES, *TORCH_FILES])
    raise JobError(
        f"init_from: {location} {what}: give a run of task train, or a file of weights, by its end: {kinds}"
    )


def goes_on(run: Storage) -> bool:
    """Whether a training has a checkpoint and is not done: weights beside it are those of an earlier, shorter end."""
    return not is_finished(run) and bool(steps_of(run.child(CHECKPOINTS)))


def files_of_start(location: str) -> list[str]:
    """The paths or URLs of all files that `init_from` loads; raises JobError if there is no such file."""
    storage, folder, name = find_start(location)
    source = storage.child(folder) if folder else storage
    others = files_of(source, name) if name.endswith(INDEXES) else []
    if NAME.fullmatch(name):
        others = [f"{PIECES}/{piece}" for piece in _pieces_of(source, name)]
    return [source.child(one).location for one in (name, *others)]


def pinned(run: Storage) -> Start | None:
    """The file with which a run began; None if none is pinned yet."""
    if not run.exists(PIN):
        return None
    try:
        return Start(**json.loads(run.read_text(PIN)))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{run}/{PIN}: is damaged: {error}; start anew {replacing(run)}") from None


def check_start(run: Storage, location: str) -> None:
    """Raise JobError if `init_from` names no weights, or if the file with which the run began is gone."""
    start = pinned(run)
    if start is None:
        find_start(location)
    else:
        file_of(run, location, start)


def first_step(run: Storage) -> int:
    """The step from which a training starts: that of the checkpoint with which it began, else 0."""
    start = pinned(run)
    return start.step if start else 0


def pin_start(run: Storage, location: str) -> Start:
    """The file with which the run began, the same on every rank; the first attempt's rank 0 pins it."""
    start = (pinned(run) or _pin(run, location)) if is_rank_0() else None
    return Start(**json.loads(broadcast(json.dumps(start and asdict(start)))))


def read_start(run: Storage, location: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The weights with which the run began, and the whole checkpoint (about and state) if they come from one.

    Raises JobError if the pinned file is gone or has changed.
    """
    start = pin_start(run, location)
    storage, name = file_of(run, location, start)
    data, where = storage.read_bytes(name), f"{storage}/{name}"
    check_pinned(run, where, start, hashlib.sha256(data).hexdigest())
    if NAME.fullmatch(name):
        about, state = parse(data, where, storage)
        return state["model"], {"about": about, "state": state}
    if name.endswith(INDEXES):
        return {key: one.whole() for key, one in open_index(storage, name).items()}, None
    return read_torch(data, where) if name.endswith(TORCH_FILES) else parse_tensors(data, where)[0], None


def check_pinned(run: Storage, where: str, start: Start, got: str) -> None:
    """Raise JobError if a file is not the one with which the run began; `got` is its hash."""
    if got != start.sha256:
        raise JobError(
            f"init_from: {where} is not the file with which this run began: "
            f"its sha256 is {got}, expected {start.sha256}; {_advice(run)}"
        )


def describe_start(run: Storage, location: str) -> str:
    """One line that names the file with which the run began, and the best weights beside it."""
    start = pinned(run)
    assert start is not None
    storage = _split_location(location)[0]
    place = f"{storage}/{start.folder}/{start.name}" if start.folder else f"{storage}/{start.name}"
    line = f"init_from: takes {place}"
    if start.name == BEST:
        return line + _told_best(*file_of(run, location, start))
    if not start.folder:
        return line
    has_best = storage.exists(BEST) and not goes_on(storage)
    beside = f"; its best weights are {storage}/{BEST}{_told_best(storage, BEST)}" if has_best else ""
    return f"{line}, the run's newest checkpoint{beside}"


def _told_best(storage: Storage, name: str) -> str:
    text = read_text(storage, name)
    best = json.loads(text) if text else None
    return f" ({best['metric']} {best['value']:.6g} after step {best['step']})" if best else ""


def load_weights(model: nn.Module, weights: dict[str, Any], where: str) -> None:
    """Load weights into the bare module; raises ModelError, which names missing, unexpected and mis-sized tensors."""
    make_room(model, weights)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights of {where} are not this model's: {error}{_inside(weights)}") from None


def _inside(weights: Mapping[str, Any]) -> str:
    """A hint if one of the values is what holds the weights, as in a checkpoint of the user's own."""
    holds = [key for key, one in weights.items() if isinstance(one, Mapping) and _are_tensors(one)]
    return (
        f"; it holds weights in {holds[0]!r}: save that alone, torch.save(found[{holds[0]!r}], file)" if holds else ""
    )


def _are_tensors(values: Mapping[str, Any]) -> bool:
    return bool(values) and all(isinstance(one, torch.Tensor) for one in values.values())


def _split_location(location: str) -> tuple[Storage, str]:
    """Split `init_from` into a folder and a file name, which is empty if it names a folder."""
    base, mark, query = location.partition("?") if "://" in location else (location, "", "")
    folder, _, name = base.rstrip("/").rpartition("/")
    is_file = name.endswith((".safetensors", INDEXES, *TORCH_FILES))
    return (Storage((folder or ".") + mark + query), name) if is_file else (Storage(location), "")


def _pin(run: Storage, location: str) -> Start:
    storage, folder, name = find_start(location)
    source, links = storage.child(folder) if folder else storage, run.child(LINKS)
    links.create()
    if is_linked := links.link(name, source):
        _link_pieces(links, name, source)
        for one in files_of(source, name) if name.endswith(INDEXES) else ():
            links.link(one, source)
    start = Start(folder, name, (links if is_linked else source).sha256(name))
    write_json(run, PIN, asdict(start))
    return start


def _link_pieces(links: Storage, name: str, source: Storage) -> None:
    """Link the pieces of a checkpoint beside it."""
    if not NAME.fullmatch(name):
        return
    for piece in _pieces_of(source, name):
        links.child(PIECES).create()
        links.child(PIECES).link(piece, source.child(PIECES))


def _pieces_of(source: Storage, name: str) -> list[str]:
    try:
        return names_of(json.loads(read_text(source, name) or "{}").get(PIECES))
    except (StorageError, ValueError):  # told when it is loaded
        return []


def file_of(run: Storage, location: str, start: Start) -> tuple[Storage, str]:
    """Find the pinned file: in the run directory, else where it was found first; raises JobError if it is gone."""
    storage = _split_location(location)[0]
    for place in (run.child(LINKS), storage.child(start.folder) if start.folder else storage):
        if place.exists(start.name):
            return place, start.name
    raise JobError(
        f"init_from: {place}/{start.name}, with which this run began (sha256 {start.sha256}), is gone "
        f"(a training keeps its newest checkpoints only); {_advice(run)}"
    )


def _advice(run: Storage) -> str:
    return f"put that file back, or start anew {replacing(run)}"


def read_torch(data: bytes, where: str) -> dict[str, Any]:
    """The state_dict in a file of torch's; raises StorageError if it holds none, or code."""
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise StorageError(f"{where}: is no file of weights that can be read without running code: {error}") from None
    if not isinstance(loaded, dict):
        raise StorageError(f"{where}: holds a {type(loaded).__qualname__}, not a state_dict")
    return loaded
