"""Which parts count: a worker of an attempt that is over may commit what it likes, and none of it is merged."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dp_ray.engine.votes import StepControl, StopRequested
from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.job.job import Job
from dp_ray.outputs import files, merging
from dp_ray.outputs.files import FILE_JSON, prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import Range, Split
from dp_ray.rundir import ledger
from dp_ray.steps.shapes import Report
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import models
from tests.support.builders import file_merge_of

JOB = Job.make(
    {"model": "tests.support.models:Linear", "dataset": models.Rows(60), "batch_size": 10, "workers": 1, "shards": 2},
    "j",
)


class StopsAt(StepControl):
    """Asks to stop before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before(self, step: int) -> None:
        self.wants_stop = step == self.step

    def through(self) -> None:
        self.wants_stop = True


def run_until(run: Storage, step: int) -> None:
    with pytest.raises(StopRequested):
        run_task(JOB, World(), run, lambda report: None, StopsAt(step))


def expected() -> torch.Tensor:
    torch.manual_seed(0)
    with torch.inference_mode():
        return models.Linear()(models.Rows(60).data)  # type: ignore[no-any-return]


def test_what_a_dead_attempt_commits_later_is_not_merged(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    run_until(run, 2)
    (first,) = run.child(ledger.PARTS).names()
    run_until(run, 4)
    assert len(ledger.committed(run)) == 3, "two parts, and into how many files the outputs are cut"
    run_until(run, 5)
    # The first attempt was only cut off: it goes on, and commits steps that the others have run since.
    late = tmp_path / "parts" / first.replace("steps-0-2", "steps-2-6")
    shutil.copy(tmp_path / "parts" / first, late)
    assert len(run.child(ledger.PARTS).names()) == 4
    committed = ledger.committed(run)
    assert len(committed) == 4 and late.name not in committed
    run_task(JOB, World(), run, lambda report: None)
    prove_outputs(run, 60)
    assert torch.allclose(Merged.of(run).read(), expected(), atol=1e-6)


def test_a_superseded_worker_gets_no_file_and_removes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LOOK_SECONDS", 100.0)  # nothing is merged before the loop has ended
    run, split = Storage(str(tmp_path)), Split(60, 10, 2)
    run_until(run, 5)
    old = ledger.read(run)
    late = file_merge_of(run, split, Order(60, shuffle=False), begun=old)
    assert not late.advance()
    run_until(run, 6)  # the newer attempt commits the last step, and stops before it has merged the file
    parts = run.child(ledger.PARTS).names()
    stray = ledger.part_name(Range(5, 6, 0, 2), old.attempt)
    (last,) = (name for name in parts if old.attempt not in name)
    shutil.copy(tmp_path / "parts" / last, tmp_path / "parts" / stray)
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        late.advance()
    late.close()
    assert run.child("outputs").names() == [] and run.child(ledger.PARTS).names() == sorted([*parts, stray])
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        ledger.note_files(ledger.fenced(run, old.attempt), old.attempt, 7)
    ledger.note_files(run, old.attempt, 7)  # it passed the check just before the newer attempt began
    assert ledger.files_in(ledger.committed(run)) == 1
    run_task(JOB, World(), run, lambda report: None)
    prove_outputs(run, 60)
    assert torch.allclose(Merged.of(run).read(), expected(), atol=1e-6)


def test_parts_stay_if_the_record_of_their_file_comes_too_late_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Storage(str(tmp_path))
    monkeypatch.setattr(merging, "LOOK_SECONDS", 100.0)
    run_until(run, 6)

    def late(folder: Storage, record: Any, name: str) -> None:
        """It passed the check just before the newer attempt began."""
        ledger.begin(run, "b" * 32)
        FILE_JSON.write(folder, record, name)

    monkeypatch.setattr(files, "FILE_JSON", SimpleNamespace(write=late))
    merge = file_merge_of(run, Split(60, 10, 2), Order(60, shuffle=False))
    parts = run.child(ledger.PARTS).names()
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        merge.advance()
    assert run.child(ledger.PARTS).names() == parts != []


def test_a_later_attempt_runs_only_what_is_in_no_part_that_counts(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    run_until(run, 4)
    (whole,) = run.child(ledger.PARTS).names()
    stray = tmp_path / "parts" / ledger.part_name(Range(4, 6, 0, 2), "f" * 32)
    shutil.copy(tmp_path / "parts" / whole, stray)
    steps: set[int] = set()

    def send(told: Any) -> None:
        for one in told.spans if isinstance(told, Report) else ():
            steps.update(range(one.first_step, one.first_step + one.num_steps))

    run_task(JOB, World(), run, send)
    assert steps == {4, 5}, "what a stranger's part says it holds is run all the same"


def test_a_worker_of_an_attempt_that_is_over_is_refused_what_it_keeps(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.create()
    ledger.begin(run, "a" * 32)
    ledger.check_newest(run, "a" * 32)
    ledger.begin(run, "b" * 32)
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        ledger.check_newest(run, "a" * 32)


def test_a_damaged_ledger_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ledger.LEDGER).write_text('{"attempt": "a", "parts": 7}')
    with pytest.raises(StorageError, match=r"attempt\.json: is damaged: .*; start anew \(--overwrite"):
        ledger.committed(Storage(str(tmp_path)))
