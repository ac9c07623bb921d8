"""The run directory: claimed once, resumed only by the same job, seen by every worker or not used at all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dp_ray
from dp_ray.errors import JobError, ModelError, RunInterrupted, StorageError
from dp_ray.job.job import Job
from dp_ray.rundir import files
from dp_ray.rundir.claim import Replace, Wanted, check_claim, check_shared
from dp_ray.rundir.files import CHECKPOINTS
from dp_ray.rundir.history import HISTORY, METRICS
from dp_ray.rundir.ledger import OUTPUTS, PARTS
from dp_ray.rundir.replaced import ReplacedRun
from dp_ray.rundir.settled import settled
from dp_ray.rundir.weights import INDEX, WEIGHTS, write_weights
from dp_ray.storage import Storage, located
from dp_ray.tensors.files import write_tensors
from tests.support.builders import run_dir_of
from tests.support.trainings import trained


def job_of(**keys: Any) -> Job:
    values = {"model": "jobs.tutorial:Model", "dataset": "jobs.tutorial:RandomDataset", "batch_size": 30, **keys}
    return Job.make(values, "job")


def finish(folder: Path, status: str) -> None:
    (folder / "job" / "result.json").write_text(json.dumps({"status": status}))


@pytest.mark.parametrize(("name", "noun"), [*files.NAMED.items(), ("checkpoints/step-4", "1 checkpoint")])
def test_work_is_found_whatever_else_lies_there(tmp_path: Path, name: str, noun: str) -> None:
    run = located(str(tmp_path))
    assert not files.holds_work(run)
    path = tmp_path / name if "." in name or "/" in name else tmp_path / name / "a file"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert files.holds_work(run)
    assert files.replacing(run).endswith(f"deletes its {noun}")


class InFolder:
    """A dataset from Python whose files are in a folder."""

    def __init__(self, root: str) -> None:
        self.root: Any = root


def test_a_new_run_is_claimed(tmp_path: Path) -> None:
    claimed = run_dir_of(tmp_path, job_of())
    assert not claimed.is_resumed
    check_shared(claimed.storage, claimed.token, "rank 0")


@pytest.mark.parametrize("status", [None, "failed", "interrupted"])
def test_an_unfinished_run_of_the_same_job_is_resumed(tmp_path: Path, status: str | None) -> None:
    first = run_dir_of(tmp_path, job_of(shards=8, workers=2))
    (tmp_path / "job" / "parts" / "kept").write_text("x")
    if status:
        finish(tmp_path, status)
    second = run_dir_of(tmp_path, job_of(shards=8, workers=3, retries=0))
    assert second.is_resumed
    assert second.token != first.token
    assert (tmp_path / "job" / "parts" / "kept").exists()
    with pytest.raises(StorageError, match="rank 1 sees another run's"):
        check_shared(first.storage, first.token, "rank 1")


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of())
    finish(tmp_path, "done")
    with pytest.raises(JobError, match=r"finished; load its result \(dp_ray.load\(.*give it another name"):
        run_dir_of(tmp_path, job_of())
    assert not run_dir_of(tmp_path, job_of(), overwrite=True).is_resumed
    assert not (tmp_path / "job" / "result.json").exists()


@pytest.mark.parametrize("change", [{"batch_size": 31}, {"seed": 2}, {"shards": 4}, {"inputs": "first"}])
def test_a_run_of_a_different_job_is_left_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    run_dir_of(tmp_path, job_of())
    key, value = next(iter(change.items()))
    with pytest.raises(JobError, match=rf"holds a run of a different job \({key}: .* there, {value!r} here\)"):
        run_dir_of(tmp_path, job_of(**change))


SGD: dict[str, Any] = {"target": "torch.optim:SGD", "args": {"lr": 0.003, "nested": {"deep": [1, {"a": 2}]}}}


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ({**SGD, "args": {**SGD["args"], "lr": 0.01}}, "optimizer.args.lr: 0.003 there, 0.01 here"),
        ({**SGD, "args": {**SGD["args"], "momentum": 0.9}}, "optimizer.args.momentum: not set there, 0.9 here"),
        ({**SGD, "args": {"lr": 0.003}}, "optimizer.args.nested: set there, not set here"),
        (
            {**SGD, "args": {"lr": 0.003, "nested": {"deep": [1, {"a": 3}]}}},
            "optimizer.args.nested.deep.1.a: 2 there, 3 here",
        ),
        (
            {"target": "torch.optim:Adam", "args": {**SGD["args"], "lr": 1}},
            "optimizer.target: 'torch.optim:SGD' there, 'torch.optim:Adam' here; "
            "optimizer.args.lr: 0.003 there, 1 here",
        ),
    ],
)
def test_what_differs_is_told_by_its_path(tmp_path: Path, here: dict[str, Any], says: str) -> None:
    train = {"task": "train", "loss": "torch.nn:CrossEntropyLoss"}
    run_dir_of(tmp_path, job_of(**train, optimizer=SGD))
    with pytest.raises(JobError) as told:
        run_dir_of(tmp_path, job_of(**train, optimizer=here))
    assert f"a run of a different job ({says}); give it another name" in str(told.value)


def test_a_key_that_an_earlier_version_did_not_have_is_no_difference(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of())
    path = tmp_path / "job" / "run.json"
    kept = json.loads(path.read_text())
    del kept["job"]["strict"]
    path.write_text(json.dumps(kept))
    with pytest.raises(JobError, match=r"a run of a different job \(seed: 0 there, 2 here\)"):
        run_dir_of(tmp_path, job_of(seed=2))
    assert run_dir_of(tmp_path, job_of()).is_resumed


def test_a_target_that_was_not_there_is_told_by_its_name(tmp_path: Path) -> None:
    train = {"task": "train", "loss": "torch.nn:CrossEntropyLoss", "optimizer": SGD}
    run_dir_of(tmp_path, job_of(**train))
    step = {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3}}
    says = r"\(scheduler: None there, 'torch.optim.lr_scheduler:StepLR' here\)"
    with pytest.raises(JobError, match=says):
        run_dir_of(tmp_path, job_of(**train, scheduler=step))


def test_no_advice_names_overwrite_without_what_it_deletes(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of())
    for path in ("checkpoints/step-3.safetensors", "checkpoints/step-6.safetensors", "history/steps-0-3.parquet"):
        (tmp_path / "job" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "job" / path).write_text("x")
    says = r"or replace it \(--overwrite, overwrite=True\), which deletes its 2 checkpoints and history$"
    with pytest.raises(JobError, match=says):
        run_dir_of(tmp_path, job_of(seed=2))
    (tmp_path / "job" / "checkpoints" / "step-3.safetensors").unlink()
    (tmp_path / "job" / "weights.safetensors").write_text("x")
    finish(tmp_path, "done")
    with pytest.raises(JobError, match=r"which deletes its 1 checkpoint, history and weights$"):
        run_dir_of(tmp_path, job_of())


def test_the_files_that_overwrite_deletes_are_those_that_runs_keep() -> None:
    assert {CHECKPOINTS, PARTS} == files.COUNTED.keys()
    assert {HISTORY, METRICS, WEIGHTS, INDEX, OUTPUTS} == files.NAMED.keys()


def resumed(tmp_path: Path, began: dict[str, Any], **here: Any) -> Job:
    run_dir_of(tmp_path, job_of(**began))
    return settled(job_of(**here, storage=str(tmp_path)))


def test_a_run_keeps_the_shards_that_it_began_with(tmp_path: Path) -> None:
    fewer = resumed(tmp_path, {"workers": 2}, workers=1)
    assert (fewer.num_shards, fewer.workers) == (2, 1)
    assert run_dir_of(tmp_path, fewer).is_resumed
    more = settled(job_of(workers=5, storage=str(tmp_path)))
    assert (more.num_shards, more.workers) == (2, 2), "a shard is one worker's"
    assert run_dir_of(tmp_path, more).is_resumed
    elastic = settled(job_of(workers={"min": 1, "max": 8}, storage=str(tmp_path)))
    assert (elastic.num_shards, elastic.min_workers, elastic.max_workers) == (2, 1, 2)
    here = settled(job_of(workers=0, storage=str(tmp_path)))
    assert (here.num_shards, here.workers) == (2, 0)


def test_a_job_that_sets_its_shards_keeps_them(tmp_path: Path) -> None:
    job = resumed(tmp_path, {"workers": 2}, workers=1, shards=1)
    with pytest.raises(JobError, match=r"a run of a different job \(shards: 2 there, 1 here\)"):
        run_dir_of(tmp_path, job)


def test_a_run_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    job = job_of(workers=3, storage=str(tmp_path))
    assert settled(job) is job


def failed_at_once(folder: Path, **began: Any) -> Path:
    """A run that failed before it kept a step, with the files and folders that such a run leaves."""
    run_dir_of(folder, job_of(**began))
    run = folder / "job"
    for path in ("about.json", "report.html", "previews/rows-0.json", "files/cut-1", "tensorboard/events"):
        (run / path).parent.mkdir(exist_ok=True)
        (run / path).write_text("x")
    (run / "checkpoints").mkdir()
    finish(folder, "failed")
    return run


def replaces(store: Storage, job: Job, rows: dict[str, int] | None = None, overwrite: bool = False) -> bool:
    """Claim the directory; whether the new run takes the place of one that had kept nothing."""
    decision = check_claim(store.child("job"), Wanted(job, rows or {}, overwrite=overwrite))
    claimed = run_dir_of(store, job, rows=rows, overwrite=overwrite)
    assert claimed.is_resumed == (not isinstance(decision, Replace))
    return decision == Replace(is_asked=False)


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_kept_nothing_is_replaced_by_the_corrected_job(tmp_path: Path, status: str) -> None:
    run, store = failed_at_once(tmp_path, workers=2), Storage(str(tmp_path))
    finish(tmp_path, status)
    corrected = settled(job_of(call="kwargs", workers=4, storage=str(tmp_path)))
    assert (corrected.num_shards, corrected.workers) == (4, 4), "nothing is bound by the shards of the other run"
    assert replaces(store, corrected)
    assert sorted(path.name for path in run.iterdir()) == ["parts", "run.json"]
    finish(tmp_path, status)
    assert replaces(store, job_of(dataset=InFolder("x")))
    finish(tmp_path, status)
    assert replaces(store, job_of(dataset=InFolder("y"))), "objects cannot be compared, and need not be"
    finish(tmp_path, status)
    assert replaces(store, job_of(), rows={"dataset": 3})
    finish(tmp_path, status)
    assert not replaces(store, job_of(), rows={"dataset": 3}), "the same job goes on"
    assert not replaces(store, job_of(), overwrite=True)


def test_a_number_of_shards_that_was_found_stays_with_the_same_job_alone(tmp_path: Path) -> None:
    failed_at_once(tmp_path, shards=6, workers=2)
    auto = {"shards": "auto", "workers": 2, "storage": str(tmp_path)}
    assert settled(job_of(**auto)).num_shards == 6
    assert settled(job_of(**auto, batch_size=20)).finds_shards


KEPT = ["parts/a.arrow", "checkpoints/step-3.safetensors", "history/steps-0-3.parquet", "outputs/0.parquet"]


@pytest.mark.parametrize("path", [*KEPT, "quarantine/x.parquet", "profile/rank-0.json.gz", "notes.txt", "own/\udcff"])
def test_a_run_that_kept_anything_is_replaced_by_nobody(tmp_path: Path, path: str) -> None:
    kept = failed_at_once(tmp_path) / path
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("x")
    with pytest.raises(JobError, match="holds a run of a different job"):
        run_dir_of(tmp_path, job_of(seed=2))
    assert kept.read_text() == "x"


@pytest.mark.parametrize("status", [None, "done"])
def test_nor_is_one_that_did_not_fail(tmp_path: Path, status: str | None) -> None:
    run = failed_at_once(tmp_path)
    (run / "result.json").unlink()
    if status:
        finish(tmp_path, status)
    with pytest.raises(JobError, match="holds a run of a different job"):
        run_dir_of(tmp_path, job_of(seed=2))
    assert (run / "about.json").exists()


def test_objects_from_python_are_never_taken_for_one_another(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of(dataset=[1, 2]))
    with pytest.raises(JobError, match=r"a run of Python objects \(dataset\); whether these are the same"):
        run_dir_of(tmp_path, job_of(dataset=[3, 4]))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_would_begin_with_nothing_neither_begins_nor_replaces_another(
    tmp_path: Path, overwrite: bool
) -> None:
    if overwrite:
        run_dir_of(tmp_path, job_of())
        finish(tmp_path, "done")
    with pytest.raises(JobError, match=r"init_from: there is no file .*nowhere.pt"):
        run_dir_of(tmp_path, job_of(init_from=str(tmp_path / "nowhere.pt")), overwrite=overwrite)
    assert (tmp_path / "job" / "result.json").exists() == overwrite
    assert (tmp_path / "job").exists() == overwrite


def finished_training(folder: Path) -> Path:
    """A finished training with weights, and a file of a dataset in its folder."""
    run_dir_of(folder, job_of())
    finish(folder, "done")
    run = folder / "job"
    write_weights(Storage(str(run)), {"w": torch.zeros(2)}, lambda tensor: tensor)
    (run / "outputs").mkdir()
    (run / "outputs" / "0.parquet").touch()
    return run


@pytest.mark.parametrize(
    "place", ["{run}", "{run}/weights.safetensors", "{run}/../job", "file://{run}", "job", "link"]
)
def test_overwrite_deletes_no_weights_from_which_the_new_run_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = finished_training(tmp_path)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / WEIGHTS).symlink_to(run / WEIGHTS)
    monkeypatch.chdir(tmp_path)
    job = job_of(init_from=place.format(run=run))
    with pytest.raises(
        JobError, match=r"init_from: \S*weights.safetensors lies in \S*/job, which --overwrite .*--name"
    ):
        run_dir_of(tmp_path, job, overwrite=True)
    assert (run / WEIGHTS).exists() and (run / "result.json").exists()


@pytest.mark.parametrize("name", ["w.pt", "model.safetensors.index.json", "step-3.safetensors"])
def test_nor_any_other_file_that_weights_consist_of(tmp_path: Path, name: str) -> None:
    run, other = finished_training(tmp_path), tmp_path / "other"
    other.mkdir()
    (run / "part").touch()
    if name == "w.pt":
        (other / name).symlink_to(run / WEIGHTS)
    elif name == "model.safetensors.index.json":
        (other / name).write_text(json.dumps({"weight_map": {"w": "part"}}))
        (other / "part").symlink_to(run / "part")
    else:
        write_tensors(Storage(str(other)), name, {}, json.dumps({"pieces": {"step": 3, "sha256": ["00"]}}))
        (other / "pieces").symlink_to(run)
    with pytest.raises(JobError, match=rf"init_from: {other}/\S+ lies in {run}, which"):
        run_dir_of(tmp_path, job_of(init_from=str(other / name)), overwrite=True)
    assert (run / WEIGHTS).exists()


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("dataset", {"target": "a:b", "args": {"paths": ["{run}/outputs/*.parquet"]}}),
        ("dataset", {"target": "a:b", "args": {"nested": {"root": "{run}"}}}),
        ("model", {"target": "a:b", "args": {"weights": "{run}/weights.safetensors"}}),
        ("dataset", InFolder("{run}/outputs")),
    ],
)
def test_nor_what_a_target_would_read(tmp_path: Path, key: str, given: Any) -> None:
    run = finished_training(tmp_path)
    if isinstance(given, InFolder):
        given.root = Path(given.root.format(run=run))
    else:
        given = json.loads(json.dumps(given).replace("{run}", str(run)))
    with pytest.raises(JobError, match=rf"{key}: {run}\S* lies in {run}, which --overwrite"):
        run_dir_of(tmp_path, job_of(**{key: given}), overwrite=True)
    assert (run / "outputs" / "0.parquet").exists()


def test_overwrite_with_what_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_training(tmp_path)
    (tmp_path / "job-2").mkdir()
    torch.save({}, tmp_path / "job-2" / "w.pt")
    monkeypatch.chdir(run)  # then each path that does not exist would lie in it
    dataset = {"target": "a:b", "args": {"reduction": "mean", "empty": "", "n": 3, "url": "https://x/{run}"}}
    hooks = {"on_step": {"target": "a:b", "args": {"log": str(run / WEIGHTS)}}}  # it may write there
    train = {"task": "train", "loss": "torch.nn:MSELoss", "optimizer": "torch.optim:SGD", "hooks": hooks}
    job = job_of(**train, dataset=dataset, init_from=str(tmp_path / "job-2" / "w.pt"))
    assert not run_dir_of(tmp_path, job, overwrite=True).is_resumed
    assert not (run / WEIGHTS).exists()


class NeverBuilt(torch.nn.Module):
    """A model that cannot be built."""

    def __init__(self, error: str) -> None:
        super().__init__()
        raise KeyboardInterrupt if error == "Ctrl-C" else ValueError("no such layer")


class FailsLate(torch.nn.Linear):
    """A model whose 40th forward fails."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.num_forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.num_forwards == 40:
            raise ValueError("the 40th forward")
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("error", "says"), [("ValueError", "no such layer"), ("Ctrl-C", "run the same command to begin anew")]
)
def test_a_run_that_never_begins_leaves_the_one_that_it_would_replace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, says: str
) -> None:
    old = trained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = {"target": "tests.rundir.test_claim:NeverBuilt", "args": {"error": error}}
    with pytest.raises((JobError, ModelError, RunInterrupted), match=says):
        trained(tmp_path, model=model, overwrite=True, quiet=False)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert f"{old.run_dir}: the run that was there before is back" in capsys.readouterr().err
    assert trained(tmp_path, seed=3, overwrite=True).weights_sha256 != old.weights_sha256
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_a_run_that_fails_after_a_step_has_replaced_the_old_one(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(ModelError, match="the 40th forward"):
        trained(tmp_path, model="tests.rundir.test_claim:FailsLate", overwrite=True, flops=False)
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    assert json.loads((tmp_path / "trained" / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("kept", [None, "checkpoints/step-1.safetensors", "result.json"])
def test_after_a_killed_driver_there_is_the_old_run_or_the_new_one(tmp_path: Path, kept: str | None) -> None:
    """The new run has claimed the directory, and perhaps kept a file; its driver is gone."""
    run_dir_of(tmp_path, job_of(seed=1))
    finish(tmp_path, "done")
    assert run_dir_of(tmp_path, job_of(seed=2), overwrite=True).replaced
    if kept is not None:
        (tmp_path / "job" / "checkpoints").mkdir()
        (tmp_path / "job" / kept).write_text('{"status": "done"}')
    run = Storage(str(tmp_path)).child("job")
    replaced = ReplacedRun(run)
    assert replaced.exists
    replaced.settle(steps_done=0)
    assert json.loads((tmp_path / "job" / "run.json").read_text())["job"]["seed"] == (1 if kept is None else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_the_next_driver_settles_what_a_killed_one_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = trained(tmp_path)
    os.rename(old.run_dir, tmp_path / ".trained.replaced")  # killed here, before the new run was claimed
    with pytest.raises(JobError, match="holds this run, finished"):
        trained(tmp_path, quiet=False)
    assert "the run that was there before is back" in capsys.readouterr().err
    assert dp_ray.load(old.run_dir).weights_sha256 == old.weights_sha256


def test_two_drivers_that_put_the_same_run_back_lose_nothing(tmp_path: Path) -> None:
    finished_training(tmp_path)
    run = Storage(str(tmp_path)).child("job")
    with pytest.raises(StorageError, match="cannot be put back"):
        ReplacedRun(run).restore()
    assert (tmp_path / "job" / WEIGHTS).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    thesis = tmp_path / "job" / "in a folder" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    with pytest.raises(JobError, match="holds files that are no run"):
        run_dir_of(tmp_path, job_of(), overwrite=overwrite)
    assert thesis.read_text() == "years of work"


def test_a_damaged_claim_is_told(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of())
    (tmp_path / "job" / "run.json").write_text("{")
    with pytest.raises(StorageError, match=r"run\.json: is damaged"):
        run_dir_of(tmp_path, job_of())


def test_what_a_worker_cannot_see_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="set storage to a folder that every node mounts, or to a URL"):
        check_shared(Storage(str(tmp_path)), "token", "rank 3 on 10.0.0.7")


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    run_dir_of(tmp_path, job_of(env={"TOKEN": "hush"}))
    assert "hush" not in (tmp_path / "job" / "run.json").read_text()


def test_relative_storage_in_a_shipped_folder_is_under_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert located(job_of().storage).path == f"{tmp_path}/runs"
    shipped = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    shipped.mkdir(parents=True)
    monkeypatch.chdir(shipped)
    assert located(job_of().storage).path == f"{Path.home()}/runs"
    assert located(job_of(storage=f"{tmp_path}/x").storage).path == f"{tmp_path}/x"


def test_a_driver_writes_nothing_more_once_another_one_has_claimed_its_run(tmp_path: Path) -> None:
    first = run_dir_of(tmp_path, job_of())
    first.storage.child(PARTS).write_text("early", "x")
    second = run_dir_of(tmp_path, job_of())
    with pytest.raises(StorageError):
        first.storage.child(PARTS).write_text("late", "x")
    with pytest.raises(StorageError):
        first.storage.write_text("result.json", "{}")
    second.storage.write_text("its own", "x")
    assert second.storage.child(PARTS).names() == ["early"] and not second.storage.exists("result.json")
