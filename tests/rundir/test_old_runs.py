"""Runs that an earlier version began and did not end: this one reports, loads and resumes them.

What it restores is what that version's files hold, to the bit, as other readers read them. From there on it ends
where one process of plain torch ends from the same files. So no bits of the processor that began the runs are needed.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from torch import nn

import dp_ray
from dp_ray.job.job import Job
from dp_ray.plan.order import Order, derive_seed
from dp_ray.rundir.files import RUN_JSON, kept_job
from dp_ray.storage import Storage
from dp_ray.system.linux import machine
from tests.support import forked
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.old_runs import AXIS, DATA, JOBS, KILLED_AT, TRAINING, Net, Pairs
from tests.support.trainings import initial

OLD = ROOT / "tests" / "kept"
VERSIONS = sorted(path.name for path in OLD.iterdir() if path.is_dir())
SIZE, SHARDS, EPOCHS = DATA["batch_size"], DATA["shards"], TRAINING["epochs"]
STEPS = len(Pairs()) // SIZE  # of an epoch
SAME = ["step", "epoch", "loss", "learning_rate", "gradient_norm", "rows", "epoch_loss"]  # but times
CALLS_LEFT = (STEPS * EPOCHS - 4) * SHARDS  # of the model, after step 4
each_version = pytest.mark.parametrize("version", VERSIONS)


def program(*arguments: str, calls: int | None = None) -> str:
    """What dp-ray says; with `calls`, it is killed if it calls the model more often."""
    with pytest.MonkeyPatch.context() as patch:
        if calls is not None:
            patch.setenv(KILLED_AT, str(calls + 1))
        done = forked.ended(forked.dp_ray_program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def copied(version: str, name: str, to: Path) -> None:
    """Copy a run, as if it had been killed on this machine: a driver waits 30 s for one that it cannot know of."""
    shutil.copytree(OLD / version / name, to / name)
    if (lease := to / name / "lease.json").exists():
        kept = json.loads(lease.read_text())
        lease.write_text(json.dumps({**kept, "driver": {**kept["driver"], "machine": machine()}}))


def resumed(version: str, name: str, tmp_path: Path, calls: int) -> tuple[str, dp_ray.Result]:
    """What is said while a copy of the old run goes on, and its result."""
    copied(version, name, tmp_path)
    program("report", str(tmp_path / name))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(JOBS[name]))
    says = program("run", str(job), "--name", name, "--storage", str(tmp_path), calls=calls)
    return says, dp_ray.load(tmp_path / name)


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a file of tensors says of itself, and its tensors."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["state"] or "{}")
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping


def read_checkpoint(run: Path, step: int) -> tuple[dict[str, Any], Any]:
    """What a checkpoint says of the training, and its state: nested, as torch's `load_state_dict` takes it."""
    about, tensors = read(run / "checkpoints" / f"step-{step}.safetensors")
    pieces = [read(path)[1] for path in sorted((run / "checkpoints").glob(f"pieces/step-{step}.*"))]  # with fsdp
    tensors |= {name: torch.cat([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}

    def nested(packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((kind, value),) = packed.items()
        make: dict[str, Callable[[Any], Any]] = {
            "tensor": lambda name: tensors.pop(name),
            "dict": lambda pairs: {key: nested(value) for key, value in pairs},
            "list": lambda items: [nested(item) for item in items],
            "tuple": lambda items: tuple(nested(item) for item in items),
        }
        return make[kind](value)

    state = nested(about["state"])
    assert not tensors
    return about, state


def trained_on(run: Path, step: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The oracle: one process of plain torch goes on from a checkpoint; its last weights, and each step's history."""
    about, state = read_checkpoint(run, step)
    model, data = Net(), Pairs()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for kept, name in ((model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")):
        kept.load_state_dict(state[name])
    epoch_loss = about["running"]["epoch_loss"][0]
    history = []
    with torch.random.fork_rng():
        for at in range(step, STEPS * EPOCHS):
            epoch, first = at // STEPS, at % STEPS * SIZE
            order = Order(len(data), 0, epoch, shuffle=True)
            picked = [order[first + row] for row in range(SIZE)]
            optimizer.zero_grad()
            total = 0.0
            for shard, rows in enumerate(torch.tensor(picked).chunk(SHARDS)):
                torch.manual_seed(derive_seed(0, "forward", epoch, at, shard))  # that of the dropout
                losses = nn.functional.cross_entropy(model(data.inputs[rows]), data.targets[rows], reduction="none")
                (losses.sum() / SIZE).backward()
                total += losses.sum().item()
            row = {"learning_rate": optimizer.param_groups[0]["lr"], "loss": total / SIZE}
            history.append(row)
            optimizer.step()
            scheduler.step()
            epoch_loss += total
            if (at + 1) % STEPS == 0:
                row["epoch_loss"], epoch_loss = epoch_loss / len(data), 0.0
    return model.state_dict(), history


def history_of(*files: Path) -> list[dict[str, Any]]:
    """The rows of files of a history, without their times."""
    return [row for file in files for row in pq.read_table(file, columns=SAME).to_pylist()]


def goes_on_from(old: Path, run: Path, step: int) -> None:
    """Check that a run kept the steps that a copy of it had done, and then trained as plain torch does."""
    weights, steps = trained_on(old, step)
    ended, tensors = history_of(run / "metrics.parquet"), read(run / "weights.safetensors")[1]
    pieces = (old / "history" / f"steps-{at}-{at + 2}.parquet" for at in range(0, step, 2))
    assert ended[:step] == history_of(*pieces)
    assert [{key: row[key] for key in there} for row, there in zip(ended[step:], steps, strict=True)] == steps
    assert tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
@each_version
def test_an_old_training_is_reported_resumed_and_loaded(version: str, name: str, tmp_path: Path) -> None:
    says, result = resumed(version, name, tmp_path, calls=CALLS_LEFT)
    assert re.search(rf"^{name}: resumed from step 4(, 1 step again)?$", says, re.M)
    goes_on_from(OLD / version / name, tmp_path / name, 4)
    assert (result.status, len(result.history)) == ("done", STEPS * EPOCHS)


@pytest.mark.slow
@each_version
def test_an_old_prediction_is_reported_resumed_and_loaded(version: str, tmp_path: Path) -> None:
    # Before the first step the first shard runs, and once more with one row less.
    says, result = resumed(version, "predict", tmp_path, calls=(STEPS - 3) * SHARDS + 2)
    assert "predict: resumed from step 3\n" in says
    data, model = Pairs(), initial(Net).eval()
    committed: list[torch.Tensor] = []
    for part in sorted((OLD / version / "predict" / "parts").iterdir()):
        table = pa.ipc.open_file(part).read_all()
        assert table["position"].to_pylist() == list(range(len(committed) * SIZE, (len(committed) + 1) * SIZE))
        committed.append(torch.from_numpy(np.stack(table["output"].combine_chunks().to_numpy_ndarray())))
    assert len(committed) == 3
    with torch.no_grad():
        batches = [data.inputs[at : at + SIZE] for at in range(3 * SIZE, len(data), SIZE)]
        own = [model(shard) for batch in batches for shard in batch.chunk(SHARDS)]
    assert torch.equal(result.outputs, torch.cat([*committed, *own]))
    assert result.sample_index.tolist() == list(range(len(data)))


@pytest.mark.slow
@each_version
def test_an_old_sweep_goes_on(version: str, tmp_path: Path) -> None:
    for name in ("sweep", "sweep-1", "sweep-2"):
        copied(version, name, tmp_path)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(JOBS["sweep"]))
    keys = ["--over", AXIS, "--name", "sweep", "--storage", str(tmp_path)]
    says = program("sweep", str(job), *keys, calls=CALLS_LEFT)
    assert "sweep-2: resumed from step 4\n" in says
    goes_on_from(OLD / version / "sweep-2", tmp_path / "sweep-2", 4)
    ended = dp_ray.load(tmp_path / "sweep-1")
    weights = read(OLD / version / "sweep-1" / "weights.safetensors")[1]
    assert ended.weights.keys() == weights.keys()
    assert all(torch.equal(ended.weights[name], tensor) for name, tensor in weights.items())


@each_version
def test_an_old_run_that_cut_whole_batches_is_shown_and_does_not_go_on(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ddp", "sweep-1"):
        copied(version, name, tmp_path)
    run = Storage(str(tmp_path / "ddp"))
    claimed = RUN_JSON.read(run)
    RUN_JSON.write(run, {**claimed, "fingerprint": "", "job": {**claimed["job"], "scatter": "batch"}})
    before = {path: path.read_bytes() for path in (tmp_path / "ddp").rglob("*") if path.is_file()}
    (tmp_path / "job.json").write_text(json.dumps(JOBS["ddp"]))
    keys = ["--name", "ddp", "--storage", str(tmp_path), "--workers", "0"]
    assert status_of(monkeypatch, "run", str(tmp_path / "job.json"), *keys) == 2
    assert (
        "ddp holds a run of a different job (its scatter: batch is gone, so no job goes on" in capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in before} == before
    for command, says in (("list", "ddp"), ("report", "newest checkpoint after 4 of"), ("compare", "scatter")):
        others = {"list": [str(tmp_path)], "compare": [run.path, str(tmp_path / "sweep-1")]}
        assert status_of(monkeypatch, command, *others.get(command, [run.path])) == 0
        assert says in capsys.readouterr().out
    assert status_of(monkeypatch, "replay", run.path, "--step", "1") == 2
    assert "scatter: is no key of a job; here it is collate" in capsys.readouterr().err


def test_each_release_that_is_out_has_runs_that_this_version_is_tested_with() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released
    there = {path.name for path in OLD.iterdir() if path.is_dir()}
    assert set(released) <= there
    assert all((OLD / version / "jobs.json").exists() for version in there), "of tests/job/test_old_jobs.py"


def test_the_job_of_a_run_is_read_without_the_keys_that_have_gone(tmp_path: Path) -> None:
    today = {"model": "a:b", "dataset": "a:c", "batch_size": 2, "devices": ["cpu", "cpu"]}
    for there, here in (
        ({"device_map": None, "blocks": None, "on_error": None}, {"device_map": None, "on_error": None}),
        ({"device_map": "auto", "blocks": ["a", "b"]}, {"device_map": ["a", "b"]}),
        (
            {"on_error": {"quarantine": 3, "timeout": 30.0, "finite": True}},
            {"on_error": {"quarantine": 3, "finite": True}},
        ),
        ({"scatter": "samples", "call": "one"}, {"call": "auto"}),
        ({"loader": {"processes": 1, "context": "spawn"}}, {"loader": {"processes": 1}}),
    ):
        RUN_JSON.write(Storage(str(tmp_path)), {"job": {**today, **there}})
        kept = kept_job(Storage(str(tmp_path)), "a training")
        assert kept == {**today, **here}
        assert Job.make(kept, "run").run_name == "run"
