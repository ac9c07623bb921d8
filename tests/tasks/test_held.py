"""A training goes on from what its process holds, wherever in a step its group was lost: the undisturbed bits.

In this process, whose group is itself: the loss of a peer is raised where a collective would raise it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch

from dp_ray.engine import trainer
from dp_ray.engine.loads.loading import seeded_dataset
from dp_ray.engine.placement import place
from dp_ray.engine.world import World
from dp_ray.errors import WorkerError
from dp_ray.job.job import Job
from dp_ray.messages import StepControl, StopRequested
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.rundir.files import steps_of
from dp_ray.rundir.history import HISTORY, FinishedStep, end_of_pieces, forget_from, write_piece
from dp_ray.storage import Storage
from dp_ray.tasks import checkpoints, evaluate, held, setup, train, views
from dp_ray.tasks.task import run_task
from tests.support.group import history_of, weights_of
from tests.support.trainings import ADAMW, job_of

IMAGES = {"target": "tests.support.training:Images", "args": {"length": 40}}
EVAL = {"dataset": {"target": "tests.support.training:Images", "args": {"length": 12}}, "every_steps": 3}
KEYS: dict[str, Any] = {
    "dataset": IMAGES,
    "batch_size": 8,
    "shards": 3,
    "bitwise": True,
    "epochs": 2,
    "optimizer": ADAMW,
    "scheduler": "tests.support.training:warm_up",
    "eval": EVAL,
    "ema": {"decay": 0.8},
    "checkpoint": {"every_steps": 4, "best": "eval_loss"},
}
PARTS: dict[str, tuple[Any, str]] = {
    "backward": (trainer.Pass, "_backward"),
    "update": (trainer.TrainingStep, "update"),
    "after": (train.AfterStep, "take"),
    "evaluation": (evaluate.Evaluator, "measure"),
    "weights": (train, "keep_weights"),
}


class Knows(StepControl):
    """Knows the step that runs, and asks to leave after `leaves`, once."""

    step = -1
    leaves: int | None = None

    def before(self, step: int) -> None:
        self.step = step

    @property
    def is_asked(self) -> bool:
        return self.step == self.leaves

    wants_stop = is_to_rejoin = is_asked


@contextmanager
def lost_in(part: str, step: int, control: Knows, call: int = 0) -> Iterator[None]:
    """Raise the loss of a peer at a call within a step, once."""
    owner, name = PARTS[part]
    function, calls = getattr(owner, name), []

    def lost(*args: Any, **keys: Any) -> Any:
        if control.step == step:
            calls.append(step)
            if len(calls) == call + 1:
                raise WorkerError("another worker was lost")
        return function(*args, **keys)

    with patch.object(owner, name, lost):
        yield


def made_run(folder: Path) -> Storage:
    run = Storage(str(folder))
    run.create()
    return run


def run_to_its_end(job: Job, folder: Path, control: Knows | None = None) -> None:
    """Call the task again and again, as long as its group is lost."""
    own, calls, run = held.Held(), 0, made_run(folder)
    control = control or Knows()
    while True:
        calls += 1
        assert calls < 5
        try:
            run_task(job, World(), run, lambda _: None, control, held=own)
            return
        except StopRequested:
            control.leaves = None
        except WorkerError:
            pass


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert there.keys() == here.keys()
    differ = [name for name in there if not torch.equal(there[name], here[name])]
    assert not differ, f"{folder}: {differ}"
    assert repr(history_of(folder)) == repr(history_of(expected))  # NaN equals itself
    best = [(one / "best.safetensors").read_bytes() for one in (folder, expected)]
    assert best[0] == best[1]


def undisturbed(tmp_path: Path, **keys: Any) -> tuple[Job, Path]:
    job = job_of("conv", **{**KEYS, **keys})
    run_task(job, World(), made_run(tmp_path / "undisturbed"), lambda _: None)
    return job, tmp_path / "undisturbed"


@pytest.mark.full
@pytest.mark.parametrize("shards", [1, 3])
def test_lost_at_each_step_in_each_part(tmp_path: Path, shards: int) -> None:
    job, expected = undisturbed(tmp_path, shards=shards)
    places = [(part, step, 0) for part in ("backward", "update", "after") for step in range(0, 10, 3)]
    places += [("evaluation", 5, 0), ("backward", 4, shards - 1), ("weights", 9, 0)]
    for part, step, call in places:
        control = Knows()
        folder = tmp_path / f"{part}-{step}-{call}"
        with lost_in(part, step, control, call):
            run_to_its_end(job, folder, control)
        assert_same(folder, expected)


def test_lost_in_the_evaluation_after_the_last_step_which_no_checkpoint_holds_yet(tmp_path: Path) -> None:
    """The weights are as far as they will be; the checkpoint and the rows of the history are yet to be written."""
    keys = {"checkpoint": {"every_steps": 4}}
    run_task(job := job_of("conv", **{**KEYS, **keys}), World(), made_run(tmp_path / "undisturbed"), lambda _: None)
    control = Knows()
    with lost_in("evaluation", 9, control):
        run_to_its_end(job, tmp_path / "run", control)
    assert repr(history_of(tmp_path / "run")) == repr(history_of(tmp_path / "undisturbed"))
    steps = [steps_of(Storage(str(tmp_path / name / "checkpoints"))) for name in ("run", "undisturbed")]
    assert steps[0] == steps[1] == [8, 10]


def test_a_piece_with_a_step_that_is_lost_is_removed_and_its_other_rows_are_held(tmp_path: Path) -> None:
    """Rank 0 writes a step's row that no survivor has finished, and dies; one of them has looked at the pieces."""
    folder = made_run(tmp_path).child(HISTORY)
    folder.create()
    for steps in ([0, 1], [2, 3, 4]):
        write_piece(folder, pa.table({"step": steps}))
    own = held.Held(rows=[FinishedStep(step, None, {}, 0.0, 0.0) for step in range(4)])  # type: ignore[arg-type]
    own.look(Storage(str(tmp_path)))
    assert [row[0] for row in own.rows] == [2, 3]
    forget_from(folder, 4)
    assert end_of_pieces(folder) == 2


def test_nothing_is_read_or_built_again(tmp_path: Path) -> None:
    job, expected = undisturbed(tmp_path)
    control = Knows()
    with (
        lost_in("backward", 6, control),
        patch.object(train, "restored", wraps=checkpoints.restored) as restored,
        patch.object(held, "seeded_dataset", wraps=seeded_dataset) as read,
        patch.object(setup, "place", wraps=place) as built,
    ):
        run_to_its_end(job, tmp_path / "run", control)
    assert restored.call_count == 1 and built.call_count == 1 and read.call_count == 2, "of training and evaluation"
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("leaves", [0, 4, 8])
def test_a_planned_leave_keeps_no_checkpoint_and_goes_on(tmp_path: Path, leaves: int) -> None:
    job, expected = undisturbed(tmp_path, checkpoint={"every_steps": 100, "best": "eval_loss"})
    control = Knows()
    control.leaves = leaves
    with patch.object(CheckpointWriter, "save", autospec=True, side_effect=CheckpointWriter.save) as saved:
        run_to_its_end(job, tmp_path / "run", control)
    steps = [call.args[1] for call in saved.call_args_list]
    assert leaves + 1 not in steps or leaves + 1 in (3, 6, 9, 10), "a best evaluation is kept"
    assert_same(tmp_path / "run", expected)


def test_an_early_stop_counts_each_evaluation_once(tmp_path: Path) -> None:
    stops = {"early_stopping": {"metric": "eval_loss", "patience": 1, "min_delta": 1.0}, "epochs": 4}
    job, expected = undisturbed(tmp_path, **stops)
    for step in (2, 5):
        control = Knows()
        with lost_in("evaluation", step, control):
            run_to_its_end(job, tmp_path / f"run-{step}", control)
        assert_same(tmp_path / f"run-{step}", expected)


def test_the_best_weights_that_nobody_has_kept_are_computed_again(tmp_path: Path) -> None:
    """Rank 0 dies with the checkpoint of the best evaluation: the survivors do not have those weights any more."""
    job, expected = undisturbed(tmp_path)
    control, real, lost = Knows(), views.levelled, list[str]()

    def levelled(training: Any) -> Any:
        here = training.context.held
        if here.progress > 0:
            checkpoints = training.context.run.child("checkpoints")
            lost.extend(name for name in checkpoints.names() if name.startswith(f"step-{here.running.best_step}."))
            checkpoints.delete(lost[0])
        return real(training)

    with lost_in("backward", 7, control), patch.object(train, "levelled", levelled):
        run_to_its_end(job, tmp_path / "run", control)
    assert len(lost) == 1
    assert_same(tmp_path / "run", expected)


@pytest.mark.full
def test_a_checkpoint_of_a_step_that_only_the_lost_one_has_finished_keeps_its_rows(tmp_path: Path) -> None:
    """Its writer is lost once it is whole; those that go on are lost too, and a restart reads it."""
    job, expected = undisturbed(tmp_path)
    run, survivor, control = made_run(tmp_path / "run"), held.Held(), Knows()
    for own, control.leaves in ((survivor, 6), (held.Held(), 7)):
        with pytest.raises(StopRequested):
            run_task(job, World(), run, lambda _: None, control, held=own)
    assert survivor.running.step == 7 and steps_of(run.child("checkpoints"))[-1] == 8
    control.leaves = None
    with lost_in("backward", 7, control), pytest.raises(WorkerError):
        run_task(job, World(), run, lambda _: None, control, held=survivor)
    run_task(job, World(), run, lambda _: None, control, held=held.Held())
    assert_same(tmp_path / "run", expected)
