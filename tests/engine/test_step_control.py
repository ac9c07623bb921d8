"""Between two steps: stopping where all agree, keeping what is done when asked, and what a watchdog is told."""

from pathlib import Path
from typing import Any

import pytest

from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.job.job import Job
from dp_ray.messages import StepControl, StopRequested
from dp_ray.outputs import merging
from dp_ray.rundir import ledger
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support.group import run_group, weights_of
from tests.support.trainings import job_of

NEVER = {"every_steps": None, "every_seconds": None}


class Asks(StepControl):
    """Asks for something before a step, and writes down what it hears."""

    def __init__(self, stop: int = -1, save: int = -1) -> None:
        self.stop, self.save = stop, save
        self.heard: list[Any] = []

    def before(self, step: int) -> None:
        self.heard.append(step)
        self.wants_stop = step == self.stop
        self.saves = step == self.save

    def take_save(self) -> bool:
        taken, self.saves = self.saves, False
        return taken

    def touch(self) -> None:
        self.heard.append("touch")

    def through(self) -> None:
        self.heard.append("through")


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in folder.glob("checkpoints/step-*"))


def training(**keys: Any) -> Job:
    return job_of("mlp", workers=1, shards=2, bitwise=True, checkpoint=NEVER, **keys)


def test_a_training_that_is_asked_to_stop_keeps_that_step_and_goes_on_to_the_same_end(tmp_path: Path) -> None:
    run_group(training(), tmp_path / "undisturbed")
    run = Storage(str(tmp_path / "stopped"))
    run.create()
    with pytest.raises(StopRequested):
        run_task(training(), World(), run, lambda what: None, Asks(stop=4))
    assert kept(tmp_path / "stopped") == [5]
    control = Asks(stop=29)  # there is nothing after the last step to stop before
    run_task(training(), World(), run, lambda what: None, control)
    assert control.heard == [*range(5, 30), "through", "through"]
    stopped, undisturbed = weights_of(tmp_path / "stopped"), weights_of(tmp_path / "undisturbed")
    assert all(stopped[name].equal(undisturbed[name]) for name in undisturbed)


def test_a_training_that_is_asked_to_save_does_so_once_and_goes_on(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run_task(training(), World(), run, lambda what: None, Asks(save=9))
    assert kept(tmp_path) == [10, 30]


def test_a_prediction_that_is_asked_to_save_commits_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LOOK_SECONDS", 100.0)  # nothing is merged before the loop has ended
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    keys = {
        "model": "tests.support.models:Linear",
        "dataset": "tests.support.models:Rows",
        "batch_size": 10,
        "workers": 1,
    }
    kept = []

    class AsksAndLooks(Asks):
        def through(self) -> None:
            kept.extend(ledger.done_ranges(ledger.committed(run)))

    run_task(Job.make(keys, "job"), World(), run, lambda what: None, AsksAndLooks(save=4))
    assert [tuple(done) for done in kept] == [(0, 4, 0, 1), (4, 10, 0, 1)]
    assert [tuple(done) for done in ledger.done_ranges(ledger.committed(run))] == [(0, 10, 0, 1)]


def test_an_evaluation_within_a_training_tells_that_it_is_at_work(tmp_path: Path) -> None:
    control = Asks()
    evaluation = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 21}}, "batch_size": 7}
    run_task(training(epochs=1, eval=evaluation), World(), Storage(str(tmp_path)), lambda what: None, control)
    assert control.heard == [*range(15), *["touch"] * 3, "through", "through"]


def test_what_a_worker_of_a_dead_attempt_keeps_is_refused(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))

    class Superseded(Asks):
        def before(self, step: int) -> None:
            super().before(step)
            if step == 6:
                ledger.begin(run, "f" * 32)

    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        run_task(training(), World(), run, lambda what: None, Superseded(save=8))
    assert kept(tmp_path) == []
    assert not run.exists("weights.safetensors")
