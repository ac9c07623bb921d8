"""Audits below Ray, in processes with gloo: who computes wrong is found, and nobody else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.errors import JobError
from dp_ray.job.files import load_job
from dp_ray.job.job import Job
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.trainings import ADAMW, job_of

KEYS: dict[str, Any] = {
    "batch_size": 24,
    "shards": 6,
    "bitwise": True,
    "epochs": 4,
    "audit": 1,
    "optimizer": {"target": "tests.support.faulty:Sgd", "args": {"lr": 0.1}},
    "checkpoint": {"every_steps": 1, "every_seconds": None, "keep": 1},
}


def made(fault: list[Any] | None = None, data: Any = "Pairs", **keys: Any) -> Job:
    model = {"target": "tests.support.faulty:Kernels", "args": {"fault": fault}}
    return job_of(model, data, **{**KEYS, **keys})


def noted(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "audits.json").read_text()))


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(file.stem.split("-")[1]) for file in (folder / "checkpoints").glob("*.safetensors"))


def ended(folder: Path, fault: list[Any], **keys: Any) -> str:
    """The last line of the error by which a run with a fault ends."""
    with pytest.raises(ProcessExit) as raised:
        run_group(made(fault, **keys), folder)
    return str(raised.value).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "run"
    run_group(made(workers=1, audit=None), folder)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert history_of(folder) == history_of(expected)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_right_training_is_as_without_audits(tmp_path: Path, clean: Path, workers: int) -> None:
    told = run_group(made(workers=workers), tmp_path / "run")
    assert not [one for one in told if "audit" in str(one)]
    assert_same(tmp_path / "run", clean)
    assert len(noted(tmp_path / "run")["clean"]) == workers


@pytest.mark.parametrize("kind", ["sizes", "rarely", "buffer"])
@pytest.mark.parametrize("audit", [1, 0.5])
def test_a_steady_fault_convicts_its_worker(tmp_path: Path, clean: Path, kind: str, audit: float) -> None:
    """What it may have spoiled is done again: the weights are those of a right training."""
    line = ended(tmp_path / "run", [2, kind, 60], workers=3, audit=audit)
    found = noted(tmp_path / "run")
    assert re.search(r"audit: step \d+: rank 2 on localhost has other bits of shard", line)
    assert [*found["convicted"]] == ["localhost, cpu 2"]
    assert 0 < max(steps_kept(tmp_path / "run")) <= found["clean"]["localhost, cpu 2"]
    line = ended(tmp_path / "run", [2, "none"], workers=3, audit=audit)  # no other processor
    assert "no other processor is free for it" in line
    run_group(made(workers=2, audit=audit), tmp_path / "run")
    assert_same(tmp_path / "run", clean)


def test_without_a_rewind_the_steps_stay(tmp_path: Path) -> None:
    ended(tmp_path / "run", [2, "sizes", 60], workers=3, audit={"share": 1, "rewind": False})
    found = noted(tmp_path / "run")
    assert steps_kept(tmp_path / "run")[-1] == found["convicted"]["localhost, cpu 2"]


@pytest.mark.parametrize("workers", [2, 3])
def test_one_flip_costs_no_worker(tmp_path: Path, clean: Path, workers: int) -> None:
    for at in (43, 47, 51):  # calls of three kinds: forward, and the gradients of inputs and weights
        folder = tmp_path / str(at)
        told = run_group(made([1, "once", at], workers=workers), folder)
        if noted(folder)["suspects"]:
            assert [*noted(folder)["suspects"]] == ["localhost, cpu 1"]
            assert any("once: the step is done again" in str(one) for one in told)
            assert_same(folder, clean)


def test_of_two_workers_that_both_repeat_it_is_not_known_who_is_wrong(tmp_path: Path) -> None:
    line = ended(tmp_path / "run", [1, "sizes", 60], workers=2)
    assert re.search("rank 0 on localhost, rank 1 on localhost have different bits.*not known which", line)
    assert noted(tmp_path / "run")["convicted"] == {}


def test_a_wrong_weight_is_named_and_undone(tmp_path: Path, clean: Path) -> None:
    line = ended(tmp_path / "run", [2, "weight", 4], workers=3)
    assert "step 4: rank 2 on localhost has other bits of the weights or the optimizer's state" in line
    run_group(made(workers=3), tmp_path / "run")
    assert_same(tmp_path / "run", clean)


def test_a_second_wrong_weight_convicts(tmp_path: Path) -> None:
    ended(tmp_path / "run", [2, "weight", 4], workers=3)
    ended(tmp_path / "run", [2, "weight", 4], workers=3)
    assert [*noted(tmp_path / "run")["convicted"]] == ["localhost, cpu 2"]


def test_other_samples_are_an_error_of_the_data(tmp_path: Path) -> None:
    data = {"target": "tests.support.faulty:OtherRows"}
    with pytest.raises(ProcessExit, match=r"have read other values for sample \d+: a dataset must give the same"):
        run_group(made(data=data, workers=3), tmp_path / "run")
    assert not (tmp_path / "run" / "audits.json").exists() or noted(tmp_path / "run")["convicted"] == {}


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fsdp"},
        {"compile": True},
        {"on_error": {"quarantine": 3}},
        {"skip": [1]},
        {"devices": ["cpu", "cpu"]},
        {"bitwise": False},
        {"loss": {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}},
    ],
)
def test_what_is_not_audited_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="audit: "):
        made(**keys)


@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_other_tasks_take_the_job_of_an_audited_training(task: str) -> None:
    """As `dp-ray predict RUN_DIR` does."""
    assert made(task=task, bitwise=False).task == task


@pytest.mark.parametrize(
    ("calls", "says"), [(1, "rank 1 on localhost had other bits of shard"), (10**5, "computes wrong")]
)
def test_the_example(tmp_path: Path, in_project: Path, calls: int, says: str) -> None:
    job = load_job("jobs/audited.yaml", {"model.args.calls": calls})
    try:
        told = " ".join(map(str, run_group(job, tmp_path / "run")))
    except ProcessExit as error:
        told = str(error)
    assert says in told
    found = noted(tmp_path / "run")
    assert [*found["convicted" if calls > 1 else "suspects"]] == ["localhost, cpu 1"]


WRITING = {"target": "tests.support.writing:Writing", "args": {"ways": ["momentum_data"]}}
AUGMENTED = {"target": "tests.support.training:Pairs", "args": {"augment": True}}
EVAL = {"dataset": {"target": "tests.support.training:Images", "args": {"length": 20}}, "every_steps": 2}
TRAININGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "BatchNorm": ("conv", "Images", {"optimizer": ADAMW, "batch_size": 22}),
    "dropout": ({"target": "tests.support.training:mlp", "args": {"dropout": 0.4}}, "Pairs", {}),
    "transforms with generators": ("mlp", AUGMENTED, {}),
    "transforms in loader processes": ("mlp", AUGMENTED, {"loader": {"processes": 2}}),
    "bf16": ("mlp", "Pairs", {"precision": "bf16"}),
    "fp16": ("mlp", "Pairs", {"precision": "fp16"}),
    "checkpointed activations, tied weights": ("Blocks", "Sentences", {"activation_checkpointing": True}),
    "parameters that some shards use": ("partly_used", "Pairs", {}),
    "averages, a clip and evaluations": ("conv", "Images", {"ema": {"decay": 0.5}, "grad_clip": 0.1, "eval": EVAL}),
    "parameters that forwards write, in a step also of workers without rows": (WRITING, "Pairs", {"batch_size": 3}),
    "a weight for each shard": ("mlp", "PartlyLabelled", {"loss": "tests.support.training:mean_of_labels"}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_no_false_alarm(tmp_path: Path, name: str) -> None:
    model, data, keys = TRAININGS[name]
    common = {"batch_size": 24, "shards": 6, "bitwise": True, "workers": 4, "epochs": 3}
    told = run_group(job_of(model, data, **{**common, **keys, "audit": 1}), tmp_path / "run")
    assert not [one for one in told if "audit" in str(one)]
    found = noted(tmp_path / "run")
    assert found["suspects"] == found["convicted"] == {} and min(found["clean"].values()) > 2
    run_group(job_of(model, data, **{**common, **keys, "workers": 1}), tmp_path / "alone")
    assert_same(tmp_path / "run", tmp_path / "alone")
