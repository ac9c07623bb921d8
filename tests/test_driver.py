"""A run that broke is resumed: only what is missing is read, and the end is that of one undisturbed run."""

import contextlib
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tensorboardX.proto.event_pb2 import Event

import dp_ray
from dp_ray.driver import run as driver
from dp_ray.driver.in_process import run_in_process
from dp_ray.driver.run import Prepared
from dp_ray.errors import DataError, JobError, StorageError
from dp_ray.job.files import job_from
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor
from dp_ray.outputs import merging, parts
from dp_ray.outputs.files import FileMerge, prove_outputs
from dp_ray.outputs.merging import Merger
from dp_ray.rundir.claim import RunDir
from tests.support import models

pytestmark = pytest.mark.usefixtures("in_project")


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
    target = {"target": "tests.test_driver:Fragile", "args": {"folder": str(folder)}}
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
    seen = [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]


def test_parts_are_gone_once_they_are_merged(tmp_path: Path) -> None:
    result = dp_ray.run(**keys(tmp_path))
    left = sorted(path.name for path in Path(result.run_dir).iterdir())
    told = ["about.json", "previews", "report.html", "times"]
    files = ["outputs", "outputs_manifest.json", "result.json", "run.json", "shapes.parquet"]
    assert left == sorted([*told, *files])


def test_a_part_that_vanished_is_found_out_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, not a hole; the next run fills it."""
    finish = Merger.finish

    def lose_a_part(merger: Merger, control: Any) -> bool:
        (tmp_path / "run" / "parts").joinpath(min(os.listdir(tmp_path / "run" / "parts"))).unlink()
        return finish(merger, control)

    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(merging, "LOOK_SECONDS", 100.0)  # nothing is merged before the loop has ended
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
        patch.setattr(driver, "prove_outputs", lose_a_file)
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
    target = {"target": "tests.test_driver:BreaksIn", "args": {"folder": str(folder)}}
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
    seen = [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in result.shapes]
    assert seen == [(one.step, one.shard, one.rows, one.input_size, one.output_size) for one in undisturbed.shapes]
    assert scalars(tmp_path / "run" / "tensorboard", "loss") == {
        row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in result.history
    }
    left = sorted(path.name for path in Path(result.run_dir).iterdir())
    files = {"metrics.parquet", "result.json", "run.json", "shapes.parquet", "weights.safetensors"}
    assert set(left) == files | {"checkpoints", "tensorboard", "times", "report.html", "about.json"}
    with pytest.raises(JobError, match="holds this run, finished"):
        dp_ray.run(**training(tmp_path))


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
    """Reading sample 70 fills the disk that holds `folder`, while the file `greedy` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 70 and (self.folder / "greedy").exists():
            with (self.folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(4096))
        return super().__getitem__(index)


@pytest.mark.root
def test_a_full_disk_in_the_middle_of_a_training_costs_no_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    dataset = {"target": "tests.test_driver:FillsTheDisk", "args": {"folder": str(small_disk)}}
    keys = training(small_disk, dataset=dataset, checkpoint={"every_steps": 2, "keep": 2})
    (small_disk / "greedy").touch()
    with pytest.raises(StorageError, match="No space left on device"):
        dp_ray.run(**keys)
    kept = sorted((small_disk / "run" / "checkpoints").glob("step-*"))
    assert [path.stem for path in kept] == ["step-4", "step-6"], "those before the disk was full"
    for path in kept:
        load_file(path)
    (small_disk / "filler").unlink()
    (small_disk / "greedy").unlink()
    result = dp_ray.run(**keys)
    undisturbed = dp_ray.run(**training(tmp_path, dataset=dataset, name="undisturbed"))
    assert result.weights_sha256 == undisturbed.weights_sha256
    (one,) = result.interruptions
    assert (one["kind"], one["resumed_step"]) == ("driver", 6)


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["at the end", "while the loop runs"])
def test_an_error_of_the_merging_ends_the_job_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    def fails(_: object) -> bool:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(FileMerge, "advance", fails)
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    dataset = {"target": "tests.test_driver:Slow", "args": {"seconds": seconds}}
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

    def on_ray(prepared: Prepared, claimed: RunDir, monitor: Monitor, console: Console) -> None:
        time.sleep(0.1)
        there.append(page in sys.modules)
        run_in_process(prepared.job, claimed, monitor, prepared.plan.rows)
        for _ in range(500):
            time.sleep(0 if page in sys.modules else 0.02)
        there.append(page in sys.modules)

    job = job_from(None, keys(tmp_path, workers=1))
    result = driver.execute(job, driver.Options(quiet=True), on_ray)
    assert there == [False, True]
    assert (Path(result.run_dir) / "report.html").exists()
    assert not [one for one in threading.enumerate() if one.name == "page"]
