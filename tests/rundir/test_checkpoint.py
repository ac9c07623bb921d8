"""Checkpoints: any state as plain values and tensors, written beside the training, never unpickled."""

import json
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from dp_ray.engine.forward.weights import load_weights
from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.rundir import checkpoint as state_module
from dp_ray.rundir.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    newest,
    open_checkpoint,
    pack,
    unpack,
)
from dp_ray.rundir.files import steps_of
from dp_ray.rundir.start import read_start
from dp_ray.storage import Storage
from dp_ray.tensors.files import write_tensors

Optimizer = torch.optim.Optimizer
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "multi": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5, 5, 7], 0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, 20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
}


def trained(kind: str, schedule: str) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, SCHEDULERS[schedule](optimizer)


def walk(model: nn.Module, optimizer: Optimizer, scheduler: Any, first: int, end: int) -> list[float]:
    rates = []
    for step in range(first, end):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", list(SCHEDULERS))
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_state_that_went_through_a_file_goes_on_as_if_it_had_not(tmp_path: Path, kind: str, schedule: str) -> None:
    whole = trained(kind, schedule)
    rates = walk(*whole, 0, 12)
    first = trained(kind, schedule)
    assert walk(*first, 0, 5) == rates[:5]
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    writer.save(5, {"said": 1}, [part.state_dict() for part in first])
    writer.wait()
    writer.close()
    read = load_checkpoint(Storage(str(tmp_path)), "step-5.safetensors")
    assert read.about == {"said": 1}
    second = trained(kind, schedule)
    for part, state in zip(second, read.state, strict=True):
        part.load_state_dict(state)
    assert walk(*second, 5, 12) == rates[5:]
    assert repr(second[0].state_dict()) == repr(whole[0].state_dict())
    assert all(
        torch.equal(parameter, two)
        for parameter, two in zip(second[0].parameters(), whole[0].parameters(), strict=True)
    )


def test_nesting_numbers_and_dotted_keys_come_back() -> None:
    given = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1), 3: [1, (2.5, None)], "numpy": np.float64(0.5)},
        "inf": float("inf"),
        "empty": {},
    }
    plain, tensors = pack(given)
    back = unpack(plain, tensors)
    assert torch.equal(back["a.b"], torch.ones(1))
    assert torch.equal(back["a"]["b"], torch.zeros(1))
    assert back["a"][3] == [1, (2.5, None)]
    assert (back["a"]["numpy"], back["inf"], back["empty"]) == (0.5, float("inf"), {})


def test_a_sparse_tensor_is_read_row_by_row_as_a_dense_one(tmp_path: Path) -> None:
    """Momentum of sparse gradients, where a sharded training goes on, or the best weights are taken."""
    indices = torch.tensor([[0, 3, 3, 5]])
    made = torch.sparse_coo_tensor(indices, torch.arange(8.0).view(4, 2), (6, 2), check_invariants=True)
    plain, tensors = pack({"buffer": made})
    write_tensors(Storage(str(tmp_path)), "step-1.safetensors", tensors, json.dumps({"state": plain}))
    stored = open_checkpoint(Storage(str(tmp_path)), "step-1.safetensors").state["buffer"]
    assert stored.shape == (6, 2)
    assert torch.equal(stored.whole(), made.to_dense())
    assert torch.equal(stored.rows(2, 4), made.to_dense()[2:4])
    assert stored.rows(1, 1).shape == (0, 2)
    whole = load_checkpoint(Storage(str(tmp_path)), "step-1.safetensors").state["buffer"]
    assert whole.is_sparse and not whole.is_coalesced(), "a model that is whole goes on with what it had"
    assert torch.equal(whole._values(), made._values()) and torch.equal(whole._indices(), made._indices())


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(ModelError, match=r"the state's 'scheduler.anneal' is of type function"):
        pack({"scheduler": {"anneal": lambda step: step}})


def save(writer: CheckpointWriter, step: int, value: float, best_step: int | None = None) -> None:
    writer.save(step, {"fingerprint": "ours"}, {"model": {"w": torch.full((3,), value)}}, best_step)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    writer = CheckpointWriter(Storage(str(tmp_path)), 2)
    for step in range(1, 7):
        save(writer, step, step, best_step=2 if step >= 2 else None)
    writer.wait()
    writer.close()
    assert steps_of(Storage(str(tmp_path))) == [2, 5, 6]


def test_what_changes_after_the_copy_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = state_module.write_tensors  # type: ignore[attr-defined]

    def held_up(*args: Any) -> None:
        go.wait(100)
        write(*args)

    monkeypatch.setattr(state_module, "write_tensors", held_up)
    writer = CheckpointWriter(Storage(str(tmp_path)), 1)
    live = torch.ones(1000)
    writer.save(1, {}, {"w": live})
    live.fill_(2)
    assert not steps_of(Storage(str(tmp_path))), "the training was made to wait"
    go.set()
    writer.wait()
    writer.close()
    assert load_checkpoint(Storage(str(tmp_path)), "step-1.safetensors").state["w"].eq(1).all()


@pytest.mark.root
def test_a_full_storage_is_told_and_the_checkpoint_before_stays(small_disk: Path) -> None:
    writer = CheckpointWriter(Storage(str(small_disk)), 2)
    writer.save(1, {"fingerprint": "ours"}, {"w": torch.ones(100)})
    writer.wait()
    writer.save(2, {"fingerprint": "ours"}, {"w": torch.ones(1 << 21)})
    with pytest.raises(StorageError, match=r"cannot write step-2.safetensors.*No space left"):
        writer.wait()
    writer.close()
    assert [path.name for path in small_disk.iterdir()] == ["step-1.safetensors"]
    assert load_checkpoint(Storage(str(small_disk)), "step-1.safetensors").state["w"].sum() == 100


def test_damaged_and_foreign_checkpoints_are_passed_over_and_told(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    writer = CheckpointWriter(storage, 9)
    for step in range(1, 6):
        save(writer, step, step)
    writer.wait()
    writer.close()
    (tmp_path / "step-5.safetensors").write_bytes((tmp_path / "step-5.safetensors").read_bytes()[:-5])
    damaged = bytearray((tmp_path / "step-4.safetensors").read_bytes())
    damaged[-1] ^= 4
    (tmp_path / "step-4.safetensors").write_bytes(damaged)
    (tmp_path / "step-9.txt").write_text("nothing")
    told: list[str] = []

    def fits(about: dict[str, Any]) -> str | None:
        return "it is of a different job" if (tmp_path / "foreign").exists() else None

    found = newest(storage, fits, told.append)
    assert found is not None and found.name == "step-3.safetensors"
    assert [line.split()[1] for line in told] == ["step-5.safetensors", "step-4.safetensors"]
    assert "is damaged" in told[0] and "not those that were written" in told[1]
    (tmp_path / "foreign").touch()
    assert newest(storage, fits, told.append) is None
    assert "step-1.safetensors is ignored" in told[-1] and "of a different job" in told[-1]


def test_a_whole_checkpoint_is_read_in_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store each read is a request."""
    (tmp_path / "checkpoints").mkdir()
    storage = Storage(str(tmp_path / "checkpoints"))
    writer = CheckpointWriter(storage, 1)
    save(writer, 3, 1.5)
    writer.wait()
    writer.close()
    run, start = run_of(tmp_path), f"{tmp_path}/checkpoints/step-3.safetensors"
    read_start(run, start)  # which pins it
    read: list[str] = []
    read_bytes = Storage.read_bytes
    monkeypatch.setattr(Storage, "open", None)

    def noted(storage: Storage, name: str) -> bytes:
        read.append(name)
        return read_bytes(storage, name)

    monkeypatch.setattr(Storage, "read_bytes", noted)
    found = newest(storage, lambda about: None, read.append)
    assert found is not None and found.state["model"]["w"].eq(1.5).all()
    weights, _ = read_start(run, start)
    assert weights["w"].eq(1.5).all()
    assert read == ["step-3.safetensors", "init_from.json", "step-3.safetensors"]


def run_of(folder: Path) -> Storage:
    """A run directory in which nothing is pinned."""
    return Storage(tempfile.mkdtemp(dir=folder))


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("w.pt", "w.bin", "step-3.safetensors", "w.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps({"weight": Evil()}, protocol=2))
        with pytest.raises(StorageError):
            read_start(run_of(tmp_path), str(tmp_path / name))
    torch.save({"weight": Evil()}, tmp_path / "x.pt")
    with pytest.raises(StorageError, match="without running code"):
        read_start(run_of(tmp_path), str(tmp_path / "x.pt"))
    assert not (tmp_path / "evil").exists()


def test_weights_of_torchs_own_files_and_of_another_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    weights, checkpoint = read_start(run_of(tmp_path), str(tmp_path / "w.pt"))
    assert checkpoint is None
    other = nn.Linear(3, 2)
    load_weights(other, weights, "w.pt")
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(ModelError, match=r"(?s)the weights of w.pt are not this model's.*0.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 2)), weights, "w.pt")
    with pytest.raises(JobError, match="there is no file"):
        read_start(run_of(tmp_path), str(tmp_path / "none.safetensors"))
    with pytest.raises(JobError, match="holds neither checkpoints nor weights"):
        read_start(run_of(tmp_path), str(tmp_path))
    with pytest.raises(JobError, match=r"none does not exist, or is empty: give a run of task train, or a file"):
        read_start(run_of(tmp_path), str(tmp_path / "none"))
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "own.pt")
    own, _ = read_start(run_of(tmp_path), str(tmp_path / "own.pt"))
    (tmp_path / "job.yaml").write_text("task: train")
    with pytest.raises(JobError, match=r"job.yaml is no file of weights: give a run of task train, or a file"):
        read_start(run_of(tmp_path), str(tmp_path / "job.yaml"))
    with pytest.raises(ModelError, match=r"(?s)own.pt are not this model's.*it holds weights in 'model': save that"):
        load_weights(other, own, "own.pt")
