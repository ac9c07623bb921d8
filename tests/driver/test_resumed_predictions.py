"""A run that broke is resumed: only what is missing is read, and the end is that of one undisturbed run.

How each attempt ended is told as it was, and a run that has not finished says what is there.
"""

import contextlib
import json
import os
import re
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tensorboardX.proto.event_pb2 import Event

import dp_ray
from dp_ray.cli.runs import report
from dp_ray.driver import finish
from dp_ray.driver import run as driver
from dp_ray.errors import DataError, JobError, RunInterrupted, StorageError
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.messages import Interrupted
from dp_ray.monitor.attempts import interruption_of
from dp_ray.monitor.in_process import InProcess
from dp_ray.monitor.monitor import Monitor
from dp_ray.outputs import merging, parts
from dp_ray.outputs.files import FileMerge, prove_outputs
from dp_ray.outputs.merging import Merger
from dp_ray.rundir import checkpoint
from dp_ray.rundir.checkpoint import checkpoint_name
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.incidents import IncidentKind, Interruption
from dp_ray.rundir.lease import LEASE
from dp_ray.storage import Storage
from dp_ray.tensors.files import write_tensors
from tests.support import forked, models
from tests.support.builders import run_dir_of
from tests.support.trainings import keys_of
from tests.support.within import within

pytestmark = pytest.mark.usefixtures("in_project", "foreground")


class Fragile(models.Rows):
    """Sample 50 cannot be read while the file `broken` is there; what is read is written down."""

    def __init__(self, folder: str) -> None:
        super().__init__(101)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 50 and (self.folder / "broken").exists():
            raise OSError("sector 50")
        with (self.folder / "read").open("a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


def keys(folder: Path, **others: Any) -> dict[str, Any]:
    target = {"target": "tests.driver.test_resumed_predictions:Fragile", "args": {"folder": str(folder)}}
    values = {"model": "tests.support.models:Linear", "dataset": target, "batch_size": 7, "shards": 3, "workers": 0}
    return {**values, "name": "run", "storage": str(folder), **others}


def test_a_broken_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    (tmp_path / "broken").touch()
    with pytest.raises(DataError, match="sample 50 of the dataset raised OSError: sector 50"):
        dp_ray.run(**keys(tmp_path))
    broken = dp_ray.load(tmp_path / "run")
    assert broken.status == "failed"
    assert {report.step for report in broken.shapes} == set(range(7)) | ({7} & {r.step for r in broken.shapes})
    (tmp_path / "broken").unlink()
    (tmp_path / "read").unlink()
    result = dp_ray.run(**keys(tmp_path))
    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert sorted(read) == list(range(49, 101)), "steps 0 to 6 were committed and step 7 was not"
    undisturbed = dp_ray.run(**keys(tmp_path, name="undisturbed"))
    assert result.outputs_sha256 == undisturbed.outputs_sha256
    seen = [(shape.step, shape.shard, shape.rows, shape.input_size, shape.output_size) for shape in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]


def test_parts_are_gone_once_they_are_merged(tmp_path: Path) -> None:
    result = dp_ray.run(**keys(tmp_path))
    left = sorted(path.name for path in Path(result.run_dir).iterdir())
    told = ["about.json", "previews", "report.html", "times"]
    files = ["outputs", "outputs_manifest.json", "result.json", "run.json", "shapes.parquet"]
    assert left == sorted([*told, *files])


def test_a_part_that_vanished_is_found_out_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, not a hole; the next run fills it."""
    finish, merge_files = Merger.finish, Merger._merge_files

    def lose_a_part(merger: Merger, control: Any) -> bool:
        (tmp_path / "run" / "parts").joinpath(min(os.listdir(tmp_path / "run" / "parts"))).unlink()
        return finish(merger, control)

    def merge_at_the_end(merger: Merger) -> None:
        merger._has_ended.wait()
        merge_files(merger)

    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Merger, "_merge_files", merge_at_the_end)  # else a part that is merged already may be lost
        patch.setattr(Merger, "finish", lose_a_part)
        with pytest.raises(StorageError, match="position 0 is missing"):
            dp_ray.run(**keys(tmp_path))
    result = dp_ray.run(**keys(tmp_path))
    assert result.outputs_sha256 == dp_ray.run(**keys(tmp_path, name="undisturbed")).outputs_sha256


@pytest.mark.parametrize("cut", [None, -1])
def test_a_file_that_vanished_or_was_cut_is_found_out_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int | None
) -> None:
    def lose_a_file(run: Any, *rest: Any) -> None:
        path = Path(run.file("outputs/00001-of-00003.parquet"))
        if cut is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:cut])
        prove_outputs(run, *rest)

    several = {"outputs": {"file_bytes": 700}}
    with monkeypatch.context() as patch:
        patch.setattr(finish, "prove_outputs", lose_a_file)
        with pytest.raises(StorageError, match=r"00001-of-00003\.parquet: (is gone|has \d+ bytes, where)"):
            dp_ray.run(**keys(tmp_path, **several))
    (tmp_path / "read").unlink()
    result = dp_ray.run(**keys(tmp_path, **several))
    read = {int(line) for line in (tmp_path / "read").read_text().split()}
    assert read == set(range(35, 70)), "the steps of this file alone are run again"
    assert result.outputs_sha256 == dp_ray.run(**keys(tmp_path, name="undisturbed")).outputs_sha256


def test_the_outputs_so_far_are_read_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.01)
    dataset = Reads(str(tmp_path))
    result = dp_ray.run(**keys(tmp_path, dataset=dataset, outputs={"file_bytes": 700}))
    whole = dp_ray.run(**keys(tmp_path, name="whole", dataset=models.Rows(101))).outputs
    assert (dataset.found.task, dataset.found.status) == ("predict", "running")
    assert torch.equal(dataset.so_far, whole[:35]) and dataset.samples == list(range(35))
    assert torch.equal(result.outputs_so_far, whole) and torch.equal(result.outputs, whole)


class Reads(models.Rows):
    """Before the last sample is read, the first file of the run is waited for, and the outputs so far are read."""

    def __init__(self, folder: str) -> None:
        super().__init__(101)
        self.run = Path(folder) / "run"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 60:
            while not list((self.run / "files").glob("file-0-*")):
                time.sleep(0.01)
            self.found = dp_ray.load(self.run)
            self.so_far = self.found.outputs_so_far
            self.samples = pd.read_parquet(self.run / "outputs")["sample_index"].tolist()
        return super().__getitem__(index)


def test_an_unknown_keyword_is_the_jobs_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="batchsize: is no key of a job; did you mean batch_size"):
        dp_ray.run(**keys(tmp_path, batchsize=3))


def test_a_job_can_be_given_whole_and_changed(tmp_path: Path) -> None:
    job = dp_ray.Job.make(keys(tmp_path), "job")
    first = dp_ray.run(job)
    second = dp_ray.run(job, name="second", batch_size=10)
    assert (first.name, first.steps) == ("run", 15)
    assert (second.name, second.steps) == ("second", 11)
    assert torch.allclose(first.outputs, second.outputs, atol=1e-6)


def test_a_run_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    values = keys(tmp_path)
    del values["name"]
    names = {dp_ray.run(**values).name for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("run-") for name in names)


class BreaksIn(models.SlowPairs):
    """Sample 70 cannot be read while the file `broken` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 70 and (self.folder / "broken").exists():
            raise OSError("sector 70")
        return super().__getitem__(index)


def training(folder: Path, **others: Any) -> dict[str, Any]:
    target = {"target": "tests.driver.test_resumed_predictions:BreaksIn", "args": {"folder": str(folder)}}
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": target,
        "loss": "torch.nn:CrossEntropyLoss",
    }
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    keys = {**given, "optimizer": optimizer, "batch_size": 10, "shards": 3, "workers": 0, "bitwise": True}
    return {**keys, "checkpoint": {"every_steps": 2}, "name": "run", "storage": str(folder), "quiet": True, **others}


def test_a_broken_training_is_resumed_with_its_shapes_and_its_scalars(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(DataError, match="sample 70 of the dataset raised OSError: sector 70"):
        dp_ray.run(**training(tmp_path))
    broken = dp_ray.load(tmp_path / "run")
    assert (broken.status, broken.weights_path, broken.weights_sha256) == ("failed", None, None)
    assert broken.metrics == {}
    (tmp_path / "broken").unlink()
    result = dp_ray.run(**training(tmp_path))
    undisturbed = dp_ray.run(**training(tmp_path, name="undisturbed"))
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert [row["loss"] for row in result.history] == [row["loss"] for row in undisturbed.history]
    seen = [(shape.step, shape.shard, shape.rows, shape.input_size, shape.output_size) for shape in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]
    assert scalars(tmp_path / "run" / "tensorboard", "loss") == {
        row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in result.history
    }
    left = sorted(path.name for path in Path(result.run_dir).iterdir())
    files = {"metrics.parquet", "result.json", "run.json", "shapes.parquet", "weights.safetensors"}
    assert set(left) == files | {"checkpoints", "tensorboard", "times", "report.html", "about.json"}
    with pytest.raises(JobError, match="holds this run, finished"):
        dp_ray.run(**training(tmp_path))


@pytest.mark.slow
def test_a_training_whose_driver_was_killed_tells_each_step_once(tmp_path: Path) -> None:
    kills = {"target": "tests.driver.test_runs_on_s3:Kills", "args": {"folder": str(tmp_path)}}
    (tmp_path / "deadly").touch()
    killed = forked.ended(forked.run_job, training(tmp_path, dataset=kills))
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "deadly").unlink()
    result = dp_ray.run(**training(tmp_path, dataset=kills))
    assert result.interruptions[0]["resumed_step"] > 0
    undisturbed = dp_ray.run(**training(tmp_path, dataset=kills, name="undisturbed"))
    seen = [(shape.step, shape.shard, shape.rows, shape.input_size, shape.output_size) for shape in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]
    assert not (tmp_path / "run" / "reports").exists()


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """What TensorBoard would show: the last value of each step, of event files in the order of their making."""
    found: dict[int, float] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # a record: its length, a checksum, an event, a checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.tag == tag:
                    found[event.step] = value.simple_value
    return found


class FillsTheDisk(models.SlowPairs):
    """Reading sample 70 fills the disk that holds `folder`, while the file `greedy` is there.

    The checkpoints `kept`, and no others, are there by then.
    """

    def __init__(self, folder: str, kept: list[str]) -> None:
        super().__init__(0.0)
        self.folder, self.kept = Path(folder), kept

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 70 and (self.folder / "greedy").exists():
            assert within(60, lambda: names_of_checkpoints(self.folder) == self.kept)
            with (self.folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(4096))
        return super().__getitem__(index)


def names_of_checkpoints(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "run" / "checkpoints").glob("step-*.safetensors"))


@pytest.mark.full(but=["while one is written"])
@pytest.mark.root
@pytest.mark.parametrize("kept", [[4, 6], [2, 4]], ids=["between two", "while one is written"])
def test_a_full_disk_in_the_middle_of_a_training_costs_no_checkpoint(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, kept: list[int]
) -> None:
    def write_late(storage: Storage, name: str, *rest: Any) -> Any:
        """Of the checkpoint that is not to be kept, write nothing before the disk is full."""
        if name == checkpoint_name(kept[1] + 2) and (small_disk / "greedy").exists():
            assert within(60, lambda: os.statvfs(small_disk).f_bavail == 0)
        return write_tensors(storage, name, *rest)

    monkeypatch.setattr(checkpoint, "write_tensors", write_late)
    names = [f"step-{step}" for step in kept]
    target = "tests.driver.test_resumed_predictions:FillsTheDisk"
    # A checkpoint is larger than what becomes free when the driver replaces a file.
    large = {"target": "tests.support.training:mlp", "args": {"width": 4000}}
    dataset = {"target": target, "args": {"folder": str(small_disk), "kept": names}}
    keys = training(small_disk, dataset=dataset, model=large, checkpoint={"every_steps": 2, "keep": 2})
    (small_disk / "greedy").touch()
    with pytest.raises(StorageError, match="No space left on device"):
        dp_ray.run(**keys)
    assert names_of_checkpoints(small_disk) == names, "those before the disk was full"
    for name in names:
        load_file(small_disk / "run" / "checkpoints" / f"{name}.safetensors")
    (small_disk / "filler").unlink()
    (small_disk / "greedy").unlink()
    result = dp_ray.run(**keys)
    undisturbed = dp_ray.run(**training(tmp_path, dataset=dataset, model=large, name="undisturbed"))
    assert result.weights_sha256 == undisturbed.weights_sha256
    (one,) = result.interruptions
    assert (one["kind"], one["resumed_step"]) == ("driver", kept[1])


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["at the end", "while the loop runs"])
def test_an_error_of_the_merging_ends_the_job_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    def fails(_: object) -> bool:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(FileMerge, "advance", fails)
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    dataset = {"target": "tests.driver.test_resumed_predictions:Slow", "args": {"seconds": seconds}}
    with pytest.raises(StorageError, match="the disk is gone"):
        dp_ray.run(**{**keys(tmp_path), "dataset": dataset})
    if seconds:
        done = {report.step for report in dp_ray.load(tmp_path / "run").shapes}
        assert len(done) < 15, "the loop has not waited for its end"


class Slow(models.Rows):
    """101 rows; each takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(101)
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def test_what_the_page_needs_is_imported_while_the_workers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the end of a run does not wait for that; nor does its start, which comes before the first step."""
    page = "dp_ray.report.page"
    monkeypatch.setattr(driver, "PAGE_SECONDS", 0.02)
    monkeypatch.delattr(page, raising=False)  # where an earlier test has imported it, the package holds it too
    monkeypatch.delitem(sys.modules, page, raising=False)
    there: list[bool] = []

    class Elsewhere(InProcess):
        is_here = False

        def run(self, job: Job, claimed: RunDir, rows: Any, monitor: Monitor, faults: Any = ()) -> None:
            time.sleep(0.1)
            there.append(page in sys.modules)
            super().run(job, claimed, rows, monitor)
            for _ in range(500):
                time.sleep(0 if page in sys.modules else 0.02)
            there.append(page in sys.modules)

    job = job_from(None, keys(tmp_path, workers=1))
    result = driver.execute(job, driver.Options(quiet=True), Elsewhere())
    assert there == [False, True]
    assert (Path(result.run_dir) / "report.html").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "page"]


NEVER = {"every_steps": None, "every_seconds": None}


class Ends(models.SlowPairs):
    """96 pairs; the file `ends` says at which read of this process it ends, and by what.

    Before a SIGKILL there is time for the driver to hear of the steps that are done.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.ends, self.reads = Path(folder) / "ends", 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if self.ends.exists():
            at, by = self.ends.read_text().split()
            if self.reads == int(at):
                self.ends.unlink()
                if by == "OSError":
                    raise OSError("sector 7")
                time.sleep(2.5 if by == "SIGKILL" else 0)
                os.kill(os.getpid(), signal.Signals[by])
        return super().__getitem__(index)


def forty_eight_steps(folder: Path, **others: Any) -> dict[str, Any]:
    """A training of 48 steps of 6 rows, which keeps nothing but what it keeps when it is stopped."""
    dataset = {"target": "tests.driver.test_resumed_predictions:Ends", "args": {"folder": str(folder)}}
    how: dict[str, Any] = {"dataset": dataset, "batch_size": 6, "epochs": 3, "checkpoint": NEVER}
    return training(folder, **{**how, **others})


def ended(folder: Path, step: int, first: int, by: str, **others: Any) -> None:
    """Run, in a process of its own where that is killed, until it is ended in a step; it begins with step `first`."""
    (folder / "ends").write_text(f"{(step - first) * 6 + 2} {by}")
    if by != "SIGKILL":
        with contextlib.suppress(RunInterrupted, dp_ray.Error):
            dp_ray.run(**forty_eight_steps(folder, **others))
        return
    assert forked.ended(forked.run_job, forty_eight_steps(folder, **others)).returncode == -signal.SIGKILL


def told(result: dp_ray.Result) -> list[tuple[str, str, int, int]]:
    return [
        (interruption["kind"], interruption["what"], interruption["step"], interruption["resumed_step"])
        for interruption in result.interruptions
    ]


def reported(run_dir: Path, capsys: pytest.CaptureFixture[str], as_json: bool = False) -> str:
    capsys.readouterr()
    assert report.callback
    report.callback(run_dirs=(str(run_dir),), shapes=False, as_json=as_json)
    return capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
def test_each_attempts_end_is_told_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 15, 0, "SIGINT")
    ended(tmp_path, 31, 16, "SIGKILL")
    ended(tmp_path, 20, 16, "OSError")
    ended(tmp_path, 18, 16, "SIGTERM")
    result = dp_ray.run(**forty_eight_steps(tmp_path, quiet=False))
    first, second, third, fourth = told(result)
    assert first == ("driver", "stopped by SIGINT after 16 steps", 16, 16)
    assert second == ("driver", "killed, or its machine lost, after 31 steps (as far as it reported)", 31, 16)
    assert re.match("ended after 20 steps by DataError: .*sector 7", third[1]) and third[2:] == (20, 16)
    assert fourth == ("driver", "stopped by SIGTERM after 19 steps", 19, 19)
    assert result.world_sizes == [1] * 5
    assert "run: the last driver was stopped by SIGTERM after 19 steps\n" in capsys.readouterr().err
    assert (
        "driver: killed, or its machine lost, after 31 steps (as far as it reported); driver: ended after 20 steps by"
        in reported(tmp_path / "run", capsys)
    )


def test_the_result_of_one_driver_is_never_taken_for_that_of_the_next(tmp_path: Path) -> None:
    job = Job.make({name: value for name, value in forty_eight_steps(tmp_path).items() if name != "quiet"}, "run")
    run_dir_of(tmp_path, job)
    (tmp_path / "run" / "result.json").write_text(json.dumps({"status": "interrupted", "error": "KeyboardInterrupt"}))
    run_dir_of(tmp_path, job)
    assert not (tmp_path / "run" / "result.json").exists()


CLOCK = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"


@pytest.mark.slow
def test_a_run_that_was_killed_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 31, 0, "SIGKILL", checkpoint={"every_steps": 10, "every_seconds": None})
    assert json.loads((tmp_path / "run" / LEASE).read_text())["step"] == 31
    shown = reported(tmp_path / "run", capsys)
    says = (
        rf"unfinished: newest checkpoint after 30 of 48 steps, last alive {CLOCK}\nrun the same command to resume\n"
    )
    assert re.fullmatch(says, shown), shown
    values = json.loads(reported(tmp_path / "run", capsys, as_json=True))
    assert (values["status"], values["step"], values["steps"]) == ("unfinished", 30, 48)
    with pytest.raises(StorageError, match=r"holds no result\.json: the run has not finished \(dp-ray report "):
        dp_ray.load(tmp_path / "run")


def test_a_run_that_was_stopped_says_so_above_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 15, 0, "SIGINT")
    first, *_ = reported(tmp_path / "run", capsys).splitlines()
    assert re.fullmatch(rf"unfinished: newest checkpoint after 16 of 48 steps, last alive {CLOCK}", first)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("train", "no checkpoint yet of 48 steps"),
        ("predict", "outputs of 0 of 16 steps"),
        ("evaluate", "an evaluation keeps nothing"),
    ],
)
def test_so_does_one_that_has_kept_nothing(
    tmp_path: Path, task: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: value for name, value in forty_eight_steps(tmp_path, task=task).items() if name != "quiet"}
    run_dir_of(tmp_path, Job.make(given, "run"), rows={"dataset": 96})
    assert reported(tmp_path / "run", capsys).startswith(f"unfinished: {says}, last alive ")


def test_what_is_no_run_is_an_error_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageError, match=r"holds no result\.json: not a run directory"):
        reported(tmp_path, capsys)


@pytest.mark.parametrize(
    ("kind", "what", "told"),
    [
        (IncidentKind.WORKER, "SIGKILL", "worker: SIGKILL, in step 4"),
        (
            IncidentKind.ERROR,
            "step 4, shard 0: model raised",
            "error: step 4, shard 0: model raised",
        ),
        (IncidentKind.ERROR, "sample 7 is in no step 42", "error: sample 7 is in no step 42, in step 4"),
        (IncidentKind.DRIVER, "the driver ended after 3 steps", "driver: the driver ended after 3 steps"),
    ],
)
def test_an_interruption_names_its_step_once(kind: IncidentKind, what: str, told: str) -> None:
    assert str(Interruption(kind, what, 4)) == told


def test_an_error_that_comes_before_the_last_reports_tells_the_step() -> None:
    error = Interrupted(IncidentKind.ERROR, "step 7, shard 1: sample 50 of the dataset raised", (0,))
    died = Interrupted(IncidentKind.WORKER, "SIGKILL", (0,))
    assert interruption_of(error, [], "", 5, Mock()).step == 7
    assert interruption_of(died, [], "", 5, Mock()).step == 5


class Holed(models.SlowPairs):
    """96 pairs, of which one cannot be read."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 17:
            raise OSError("a hole")
        return super().__getitem__(index)


def test_a_failed_step_is_named_and_not_counted_as_done(tmp_path: Path) -> None:
    """Of step 4 its first shard has run, and told of its shapes."""
    keys = keys_of(dataset="tests.driver.test_resumed_predictions:Holed", storage=str(tmp_path), name="run", shards=4)
    with pytest.raises(DataError, match=r"^step 4, shard 1: sample 17 of the dataset raised OSError: a hole$"):
        dp_ray.run(**keys)
    (end,) = json.loads((tmp_path / "run" / "story.json").read_text())["interruptions"]
    assert (end["step"], end["what"].partition(" by ")[0]) == (4, "ended after 4 steps")
    failure = json.loads((tmp_path / "run" / "result.json").read_text())["failure"]
    assert (failure["step"], failure["sample"]) == (4, 17)
