"""Weights above a limit are several files in the layout of Hugging Face: the same tensors, wherever they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.errors import StorageError
from dp_ray.messages import StepControl
from dp_ray.rundir import weights
from dp_ray.rundir.weights import INDEX, open_weights, read_weights, tensors_of_files, weights_path, write_weights
from dp_ray.storage import Storage
from dp_ray.tensors.files import sha256_of
from tests.support.group import run_group
from tests.support.trainings import job_of

STILL = {"target": "torch.optim:SGD", "args": {"lr": 0.0}}
SIZES: dict[str, torch.Tensor] = {"a": torch.arange(30.0), "b": torch.ones(2, 3).bfloat16(), "c": torch.tensor(1)}


class InSmallFiles(StepControl):
    """Makes the limit small in each worker."""

    def storage(self, folder: str) -> Storage:
        weights.LIMIT = 300
        return Storage(folder)


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor], limit: int) -> Storage:
    monkeypatch.setattr(weights, "LIMIT", limit)
    run = Storage(str(folder))
    write_weights(run, tensors, lambda tensor: tensor)
    return run


def test_a_file_holds_as_much_as_the_limit_but_at_least_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LIMIT", 20)
    assert [list(tensors) for tensors in tensors_of_files(SIZES)] == [["a"], ["b", "c"]]
    assert tensors_of_files({}) == [{}]


def test_several_files_are_the_same_weights_and_the_same_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = written(tmp_path, monkeypatch, SIZES, 10**9)
    before = sha256_of(open_weights(single)), weights_path(single)
    several = written(tmp_path, monkeypatch, SIZES, 20)
    assert sha256_of(open_weights(several)) == before[0]
    assert before[1].endswith("weights.safetensors")
    assert weights_path(several).endswith(INDEX)
    assert not (tmp_path / "weights.safetensors").exists()
    got = read_weights(several)
    assert got.keys() == SIZES.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in SIZES.items())
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 140


def test_a_damaged_file_and_a_wrong_index_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, monkeypatch, SIZES, 20)
    last = tmp_path / "model-00002-of-00002.safetensors"
    data = last.read_bytes()
    last.write_bytes(data[:-1] + b"?")
    with pytest.raises(StorageError, match=r"00002\.safetensors: is damaged"):
        read_weights(run)
    last.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(StorageError, match="is not the file that was written with model"):
        read_weights(run)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(StorageError, match="names a file that is not beside it"):
        read_weights(run)


@pytest.mark.slow
def test_sharded_trainings_write_them_and_begin_from_them(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"epochs": 1, "max_steps": 1}
    run_group(job_of("mlp", workers=2, strategy="fsdp", **keys), tmp_path / "small", InSmallFiles())
    run_group(job_of("mlp", workers=2, strategy="fsdp", **keys), tmp_path / "one")
    assert len(list((tmp_path / "small").glob("model-*-of-00002.safetensors"))) == 2
    expected = read_weights(Storage(str(tmp_path / "one")))
    for strategy in ("fsdp", "ddp"):
        job = job_of(
            "mlp",
            **{**keys, "workers": 2, "strategy": strategy, "optimizer": STILL},
            init_from=str(tmp_path / "small" / INDEX),
        )
        run_group(job, tmp_path / strategy)
        got = read_weights(Storage(str(tmp_path / strategy)))
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items()), strategy


def test_transformers_loads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    written(tmp_path, monkeypatch, model.state_dict(), 5000)
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
