"""Whole trainings on Ray: the same bits on any number of workers, through kills, and what a user sees of them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import dp_ray
from dp_ray.driver.run import Options
from dp_ray.driver.verify import verify
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from tests.support import models
from tests.support.cli import status_of
from tests.support.cluster import ROOT, Cluster, Run
from tests.support.drivers import SLOW, job_file, told
from tests.support.sessions import share


@pytest.mark.ray
def test_the_digits_train_to_the_same_weights_on_any_number_of_workers(run_in_session: Run, tmp_path: Path) -> None:
    from jobs.digits import Digits, Net  # scikit-learn is slow to import

    here = run_in_session("jobs/digits.yaml", workers=0, name="here", epochs=2)
    there = run_in_session("jobs/digits.yaml", workers=3, name="there", epochs=2)
    assert there.weights_sha256 == here.weights_sha256
    assert told(there) == told(here)
    assert (there.rows, there.steps, there.epochs, there.world_sizes) == (1437, 45, 2, [3])
    assert there.metrics == here.metrics
    assert there.metrics["eval_accuracy"] > 0.9

    weights = load_file(tmp_path / "there" / "weights.safetensors")
    net = Net(16)
    net.load_state_dict(weights)
    test = Digits("test")
    with torch.inference_mode():
        accuracy = (net(test.images).argmax(1) == test.labels).double().mean().item()
    assert accuracy == pytest.approx(there.metrics["eval_accuracy"], abs=1e-12)

    table = pq.read_table(tmp_path / "there" / "metrics.parquet")
    assert table.column("step").to_pylist() == list(range(90))
    assert table.column("epoch").to_pylist() == [0] * 45 + [1] * 45
    assert there.best is not None and there.best["value"] == max(
        value for value in table.column("eval_accuracy").to_pylist() if value is not None
    )
    assert list((tmp_path / "there" / "tensorboard").glob("events.*"))
    shapes = there.shapes
    assert [one.step for one in shapes[:9]] == [0] * 8 + [1]
    assert sum(one.rows for one in shapes) == 2 * 1437
    assert {shape.rank for shape in shapes} == {0, 1, 2}

    test_args = {"target": "jobs.digits:Digits", "args": {"split": "test"}}
    evaluated = run_in_session(
        "jobs/digits.yaml", task="evaluate", dataset=test_args, workers=2, name="e", init_from=there.run_dir
    )
    assert evaluated.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert evaluated.metrics["loss"] == pytest.approx(there.metrics["eval_loss"], rel=1e-6)  # in another order
    predicted = run_in_session(
        "jobs/digits_predict.yaml", workers=2, name="p", init_from=f"{there.run_dir}/weights.safetensors"
    )
    with torch.inference_mode():
        assert torch.allclose(predicted.outputs, net(Digits().images), atol=1e-6)


@pytest.mark.ray
def test_a_worker_imports_nothing_of_ray_that_it_does_not_use(run: Run, tmp_path: Path) -> None:
    """To import Ray Data, Ray Tune and the controller took a second of each worker's start."""
    run(job_file(tmp_path, hooks={"on_end": "tests.support.models:note_modules"}), workers=2)
    modules = set(json.loads((tmp_path / "run" / "modules.json").read_text()))
    assert "ray.train" in modules
    unused = {"ray.data", "ray.tune", "dp_ray.cluster.internals.train"}
    assert modules & unused == set()


@pytest.mark.full
@pytest.mark.ray
def test_ctrl_c_in_a_terminal_is_a_planned_stop_of_a_ray_of_its_own_too(run: Run, tmp_path: Path) -> None:
    """All processes of the terminal get it: Ray's own, and the workers."""
    path = job_file(tmp_path, checkpoint={"every_steps": None, "every_seconds": None})
    line = [sys.executable, "-m", "dp_ray", "run", path, "--workers", "2", "--name", "run"]
    line += ["--storage", str(tmp_path), "--inject", "pause worker 1 for 3s at step 7"]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr
        said = []
        for text in process.stderr:
            said.append(text.rstrip())
            if "fault injection: pause" in text:
                os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    assert process.returncode == 130, said
    stopped = re.fullmatch(r"interrupted after (\d+) of 20 steps; run the same command to resume", said[-1])
    assert stopped and 8 <= int(stopped[1]) < 20, said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{stopped[1]}.safetensors"]
    result = run(path, workers=0, shards=8)
    assert result.weights_sha256 == run(path, workers=0, name="undisturbed").weights_sha256


@pytest.mark.full
@pytest.mark.ray
def test_verify_says_yes_and_removes_what_it_ran(
    cluster: Cluster,
    tmp_path: Path,
    in_project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = ("verify", "jobs/digits.yaml", "--workers", "1,2", "--set", "epochs=1", "--quiet")
    status = status_of(monkeypatch, *line, "--storage", str(tmp_path), "--address", cluster.address)
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert printed.out.endswith("the same, bit for bit\n")
    assert not list(tmp_path.iterdir())


def test_a_metric_of_the_name_that_verify_uses_is_told() -> None:
    metrics = {"outputs_digest": "tests.support.training:right"}
    with pytest.raises(JobError, match=r"metrics\.outputs_digest: is what verify compares the outputs by"):
        verify(Job.make({**SLOW, "metrics": metrics}, "job"), [1, 2], Options())


@pytest.mark.full
@pytest.mark.ray
def test_verify_names_the_first_step_and_parameter_that_differ(
    session: "dp_ray.Session",
    tmp_path: Path,
    in_project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    share(session, monkeypatch)
    keys = {
        "model": "tests.support.models:KnowsItsRank",
        "collate": None,
        "dataset": "tests.support.training:Pairs",
        "shards": None,
        "workers": 1,
    }
    path = job_file(tmp_path, **{**keys, "epochs": 1})
    line = ("verify", path, "--workers", "0,2", "--quiet", "--storage", str(tmp_path / "runs"))
    status = status_of(monkeypatch, *line)
    printed = capfd.readouterr()
    assert status == 1, printed.err
    last = printed.out.splitlines()[-1]
    # A worker runs one forward in each step, and its fourth one is that of step 3.
    assert "on 2 workers against 0, first after step 3: first.weight differs by up to" in last, printed.out
    assert "kept: " in last
    says = printed.out.splitlines()[-2]
    assert (
        "compared with shards: 2 on each number of workers; the job sets none, so a run of it alone takes 1" in says
    )


def test_a_loss_that_is_a_mean_is_told_how_to_be_written(in_project: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step 0, shard \d: the loss returned one number.*reduction='none'"):
        dp_ray.run(**{**SLOW, "loss": "tests.support.models:mean_loss"}, workers=0, storage=str(tmp_path))


def test_what_a_training_lacks_is_told_before_anything_starts(in_project: Path, tmp_path: Path) -> None:
    without = {key: value for key, value in SLOW.items() if key != "optimizer"}
    with pytest.raises(JobError, match="optimizer: is missing"):
        dp_ray.run(**without, storage=str(tmp_path), workers=0)
    with pytest.raises(JobError, match=r"optimizer: torch.optim has no attribute 'AdamX'; did you mean 'Adam'"):
        dp_ray.run(**{**SLOW, "optimizer": "torch.optim:AdamX"}, storage=str(tmp_path), workers=0)


@pytest.mark.ray
def test_objects_from_python_train_too(run_in_session: Run) -> None:
    import functools

    result = run_in_session(
        task="train",
        model=models.KnowsItsRank(),
        dataset=models.SlowPairs(0.0),
        batch_size=32,
        workers=1,
        shards=2,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        epochs=3,
    )
    first, _, last = [row["epoch_loss"] for row in result.history if row["epoch_loss"] is not None]
    assert last < first
    assert set(result.weights) == {"first.weight", "first.bias", "second.weight", "second.bias"}
