"""What a run starts from (`init_from`): weights, which may be in a checkpoint.

What `init_from` names may change while a job runs, as another run's newest checkpoint does. So the file's name and
hash are pinned in the run directory when the run begins, and only that file is ever loaded. On a disk with hard links
the run directory holds a hard link, so the file survives its removal elsewhere. On other storage nothing is copied.
"""

import hashlib
import io
import json
import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from dp_ray.engine.average import evaluated_weights
from dp_ray.engine.world import World, broadcast, is_rank_0
from dp_ray.errors import Error, JobError, StorageError
from dp_ray.records import Record
from dp_ray.rundir.checkpoint import (
    NO_PIECES,
    PIECES,
    Checkpoint,
    checkpoint_name,
    open_checkpoint,
    piece_names,
    read_by_all,
)
from dp_ray.rundir.files import (
    CHECKPOINTS,
    NAME,
    RUN_JSON,
    is_finished,
    read_or_advise,
    replacing,
    runs_there,
    steps_of,
)
from dp_ray.rundir.weights import BEST, INDEXES, WEIGHTS, files_of, open_index, weights_name
from dp_ray.storage import Storage
from dp_ray.tensors.files import TensorFile
from dp_ray.text import a_kind, listed

TORCH_FILES = (".pt", ".pth", ".bin")
PIN = "init_from.json"
LINKS = "init_from"
CLASSES = "classes"  # the key in a run's file for the classes of its dataset, by their labels
NEW_HEAD = "; to load the weights that fit, and leave the rest as the model is built, set strict: false"


@dataclass(frozen=True)
class Start:
    """The pinned file with which a run began: its name, its hash, and its folder relative to `init_from`.

    `folder` is "" if the file is directly in the folder of `init_from`. With `is_strict` a training goes on from a
    checkpoint; else it takes the weights alone.
    """

    folder: str
    name: str
    sha256: str
    is_strict: bool = True

    @property
    def step(self) -> int:
        """The steps done in a checkpoint; 0 for weights alone."""
        match = NAME.fullmatch(self.name) if self.is_strict else None
        return int(match[1]) if match else 0


PIN_JSON = Record[Start](Start, PIN, indent=2)


def find_start(location: str) -> tuple[Storage, str, str]:
    """Return the storage that `init_from` names, and the folder and name in it of the file to load.

    In a run directory that is the newest checkpoint, else the weights. Raises JobError if there is no such file.
    """
    storage, name = _split_location(location)
    if name:
        if not storage.exists(name):
            raise JobError(f"init_from: there is no file {location}")
        return storage, "", name
    if steps := steps_of(storage.child(CHECKPOINTS)):
        return storage, CHECKPOINTS, checkpoint_name(steps[-1])
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
        f"{runs_there(storage)}"
    )


def goes_on(run: Storage) -> bool:
    """Return whether a training has a checkpoint and is not done: weights beside it are of an earlier end."""
    return not is_finished(run) and bool(steps_of(run.child(CHECKPOINTS)))


def files_of_start(location: str) -> list[str]:
    """Return the paths or URLs of all files that `init_from` loads; raises JobError if there is no such file."""
    storage, folder, name = find_start(location)
    source = storage.child(folder) if folder else storage
    others = files_of(source, name) if name.endswith(INDEXES) else []
    if NAME.fullmatch(name):
        others = [f"{PIECES}/{piece}" for piece in _pieces_of(source, name)]
    return [source.child(file).location for file in (name, *others)]


def pinned(run: Storage) -> Start | None:
    """Return the file with which a run began; None if none is pinned yet."""
    return read_or_advise(PIN_JSON, run) if run.exists(PIN) else None


def check_start(run: Storage | None, location: str) -> None:
    """Raise JobError if `init_from` names no weights, or if the file with which a resumed `run` began is gone."""
    if run is not None and (start := pinned(run)) is not None:
        file_of(run, location, start)
    else:
        find_start(location)


def trained_classes(location: str) -> list[str]:
    """Return the classes on which the run that `init_from` names was trained, by their labels; none if not known."""
    with suppress(Error):  # of a storage that is not there: who loads the weights says so
        found = RUN_JSON.read(_split_location(location)[0])
        if found.get("job", {}).get("task") == "train":
            return list(found.get(CLASSES, ()))
    return []


def first_step(run: Storage) -> int:
    """Return the step from which a training starts: that of the checkpoint with which it began, else 0."""
    start = pinned(run)
    return start.step if start else 0


def read_start(
    run: Storage, location: str, is_strict: bool = True, sharers: World | None = None
) -> tuple[dict[str, Any], Checkpoint | None]:
    """Return the weights with which the run began, and the whole checkpoint if they come from one.

    Of a model that is sharded among `sharers` the tensors are `Stored`, unless they are of a file of torch's (`.pt`).
    Raises JobError if the pinned file is gone or has changed, and StorageError if it was damaged already.
    """
    # The first attempt's rank 0 pins the file: another rank might find a newer one by now.
    text = PIN_JSON.text(pinned(run) or _pin(run, location, is_strict)) if is_rank_0() else ""
    start = PIN_JSON.parse(broadcast(text))
    storage, name = file_of(run, location, start)
    where = f"{storage}/{name}"
    data = read_by_all(storage, name) if sharers is None or name.endswith(TORCH_FILES) else None
    got = storage.sha256(name) if data is None else hashlib.sha256(data).hexdigest()
    if got != start.sha256:
        raise JobError(
            f"init_from: {where} is not the file with which this run began: "
            f"its sha256 is {got}, expected {start.sha256}; {_advice(run)}"
        )
    if NAME.fullmatch(name):
        opened = open_checkpoint(storage, name, data)
        opened.check(sharers)
        return evaluated_weights(opened.state), opened
    if data is not None and name.endswith(TORCH_FILES):
        return read_torch(data, where), None
    if name.endswith(INDEXES):
        tensors = open_index(storage, name)
    else:
        file = TensorFile(storage, name, data)
        if data is None:
            file.check()
        tensors = file.tensors()
    return tensors if sharers is not None else {key: stored.whole() for key, stored in tensors.items()}, None


def describe_start(run: Storage, location: str) -> str:
    """Return one line that names the file with which the run began, and the best weights beside it."""
    start = pinned(run)
    assert start is not None
    storage = _split_location(location)[0]
    place = f"{storage}/{start.folder}/{start.name}" if start.folder else f"{storage}/{start.name}"
    line = f"init_from: takes {place}"
    if start.name == BEST:
        return line + _describe_best(*file_of(run, location, start))
    if not start.folder:
        return line
    has_best = storage.exists(BEST) and not goes_on(storage)
    beside = f"; its best weights are {storage}/{BEST}{_describe_best(storage, BEST)}" if has_best else ""
    return f"{line}, the run's newest checkpoint{beside}"


def _describe_best(storage: Storage, name: str) -> str:
    text = TensorFile(storage, name).text
    best = json.loads(text) if text else None
    return f" ({best['metric']} {best['value']:.6g} after step {best['step'] - 1})" if best else ""


def _split_location(location: str) -> tuple[Storage, str]:
    """Split `init_from` into a folder and a file name, which is empty if it names a folder."""
    base, mark, query = location.partition("?") if "://" in location else (location, "", "")
    folder, _, name = base.rstrip("/").rpartition("/")
    is_file = name.endswith((".safetensors", INDEXES, *TORCH_FILES))
    return (Storage((folder or ".") + mark + query), name) if is_file else (Storage(location), "")


def _pin(run: Storage, location: str, is_strict: bool) -> Start:
    storage, folder, name = find_start(location)
    source, links = storage.child(folder) if folder else storage, run.child(LINKS)
    links.create()
    is_linked = links.link(name, source)
    if is_linked:
        for piece in _pieces_of(source, name) if NAME.fullmatch(name) else ():
            links.child(PIECES).create()
            links.child(PIECES).link(piece, source.child(PIECES))
        for file in files_of(source, name) if name.endswith(INDEXES) else ():
            links.link(file, source)
    # The hash of the link where there is one: the other name may stand for a newer file by now.
    start = Start(folder, name, (links if is_linked else source).sha256(name), is_strict)
    PIN_JSON.write(run, start)  # last: what a crash before it leaves is linked again
    return start


def _pieces_of(source: Storage, name: str) -> list[str]:
    try:
        return piece_names(json.loads(TensorFile(source, name).text or "{}").get(PIECES, NO_PIECES))
    except (StorageError, ValueError):  # whoever loads it raises the error
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
    """Return the state_dict in a file of torch's; raises StorageError if it holds none, or code."""
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise StorageError(f"{where}: is no file of weights that can be read without running code: {error}") from None
    if not isinstance(loaded, dict):
        raise StorageError(f"{where}: holds {a_kind(loaded)}, not a state_dict")
    return loaded
