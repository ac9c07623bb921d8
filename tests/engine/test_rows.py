"""A dataset's length is part of a run's identity: when it is resumed, and on all of its workers."""

from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.engine.world import own_rank
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.outputs import parts
from tests.support import training
from tests.support.builders import run_dir_of
from tests.support.group import ProcessExit, run_group
from tests.support.trainings import job_of

pytestmark = pytest.mark.usefixtures("in_project")


class ByRank(training.Pairs):
    """101 rows, and on rank 2 as many as `others`; as in a folder that is not yet copied to every node."""

    def __init__(self, others: int) -> None:
        super().__init__(others if own_rank() == 2 else 101)


class FromFile(training.Pairs):
    """As many rows as a file says; sample 30 cannot be read while the file `broken` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__(int((Path(folder) / "rows").read_text()))
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 30 and (self.folder / "broken").exists():
            raise OSError("sector 30")
        return super().__getitem__(index)


def by_rank(others: int) -> dict[str, Any]:
    return {"target": "tests.engine.test_rows:ByRank", "args": {"others": others}}


def from_file(folder: Path) -> dict[str, Any]:
    return {"target": "tests.engine.test_rows:FromFile", "args": {"folder": str(folder)}}


DIFFER = r"DataError: {}: its length differs: 101 rows on rank 0, rank 1; {} rows on rank 2"


@pytest.mark.full(but=["60-evaluate"])
@pytest.mark.parametrize("task", ["train", "predict", "evaluate"])
@pytest.mark.parametrize("others", [60, 102])
def test_workers_whose_datasets_differ_are_told_before_the_first_step(tmp_path: Path, task: str, others: int) -> None:
    with pytest.raises(ProcessExit, match=DIFFER.format("dataset", others)):
        run_group(job_of("mlp", by_rank(others), task=task, workers=3, inputs="first"), tmp_path)


def test_so_are_those_whose_evaluations_would_differ(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match=DIFFER.format("eval.dataset", 7)):
        run_group(job_of("mlp", workers=3, eval={"dataset": by_rank(7)}), tmp_path)


def run(folder: Path, **keys: Any) -> dp_ray.Result:
    given = job_of("mlp", from_file(folder), workers=0, shards=3, epochs=1, batch_size=10, name="run", **keys)
    return dp_ray.run(given, storage=str(folder), quiet=True)


def broken_off(folder: Path, rows: int, **keys: Any) -> None:
    (folder / "rows").write_text(str(rows))
    (folder / "broken").touch()
    with pytest.raises(DataError, match="sector 30"):
        run(folder, checkpoint={"every_steps": 1}, **keys)
    (folder / "broken").unlink()


@pytest.mark.parametrize("task", ["train", "predict"])
def test_a_dataset_that_grew_is_not_resumed(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    keys = {"task": task, "inputs": "first", "shuffle": False}
    broken_off(tmp_path, 101, **keys)
    (tmp_path / "rows").write_text("200")
    with pytest.raises(JobError, match=r"a run of a different job \(dataset: 101 rows there, 200 rows here\); give"):
        run(tmp_path, **keys)
    (tmp_path / "rows").write_text("101")
    assert run(tmp_path, **keys).rows == 101


def test_nor_is_one_on_which_a_training_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "rows").write_text("20")
    keys = {"eval": {"dataset": from_file(tmp_path / "eval")}, "shuffle": False}
    broken_off(tmp_path, 101, **keys)
    (tmp_path / "eval" / "rows").write_text("29")
    with pytest.raises(JobError, match=r"\(eval.dataset: 20 rows there, 29 rows here\)"):
        run(tmp_path, **keys)


def test_a_checkpoint_itself_is_not_resumed_over_other_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("50")
    job = job_of("mlp", from_file(tmp_path), workers=1, epochs=2, batch_size=10, checkpoint={"every_steps": 2})
    run_group(job, tmp_path / "run")
    (tmp_path / "rows").write_text("60")
    with pytest.raises(
        ProcessExit, match=r"step-10.safetensors differ from this job's: .*'rows': 50.* there, .*'rows': 60"
    ):
        run_group(job, tmp_path / "run")


class LongerHere(training.Pairs):
    """101 rows when it is built first in a process, 90 from then on: what a worker's node holds."""

    built = 0

    def __init__(self) -> None:
        super().__init__(90 if LongerHere.built else 101)
        LongerHere.built += 1


def test_workers_that_have_other_rows_than_the_driver_are_told(tmp_path: Path) -> None:
    job = job_of("mlp", {"target": "tests.engine.test_rows:LongerHere"}, workers=0, name="run")
    with pytest.raises(DataError, match=r"dataset: its length differs: 101 rows on the driver; 90 rows on rank 0"):
        dp_ray.run(job, storage=str(tmp_path), quiet=True)


def test_a_run_of_an_older_version_which_kept_no_lengths_is_resumed(tmp_path: Path) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1}, "run")
    run_dir_of(tmp_path, job)
    assert run_dir_of(tmp_path, job, rows={"dataset": 5}).is_resumed
