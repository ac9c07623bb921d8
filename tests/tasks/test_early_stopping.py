"""Early stopping: when it stops, what the run says then, and that a later command does not train on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dp_ray
from dp_ray.cli.runs import watched_lines
from dp_ray.engine.trainer import Update
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.report.run_data import read_run
from dp_ray.results.text import list_text
from dp_ray.rundir.listing import listed_runs
from dp_ray.storage import Storage
from dp_ray.tasks.early_stopping import Stopping
from dp_ray.tasks.train_state import TrainState
from tests.support.cli import status_of
from tests.support.group import StopsBefore, history_of, run_group, weights_of
from tests.support.trainings import job_of, keys_of

PAIRS = "tests.support.training:Pairs"
EVAL = {"dataset": {"target": PAIRS, "args": {"length": 20}}, "every_steps": 2}
# Far too fast, so that the loss of the evaluation grows from the first steps on.
FAST = {"target": "torch.optim:SGD", "args": {"lr": 9.0}}
KEYS: dict[str, Any] = {
    "dataset": {"target": PAIRS, "args": {"length": 32}},
    "optimizer": FAST,
    "epochs": 5,
    "eval": EVAL,
    "early_stopping": {"metric": "eval_loss", "patience": 2},
}


def update_of(loss: float, weight: float = 2.0) -> Update:
    """A step whose losses have this mean."""
    return Update(torch.tensor([loss * weight, weight, 0.0, 0.0], dtype=torch.float64), 0.1, torch.zeros(()), False)


def stopping_of(train_state: TrainState, **keys: Any) -> Stopping:
    return Stopping(job_of("mlp", eval=EVAL, early_stopping={"metric": "eval_loss", **keys}), train_state)


def stop_by_hand(values: list[float], patience: int, delta: float, sign: int) -> int | None:
    """After how many values to stop: `patience` in a row that are not better than all before by `delta`."""
    best = None
    without = 0
    for count, value in enumerate(values, 1):
        if value == value and (best is None or sign * (value - best) > delta):
            best, without = value, 0
        else:
            without += 1
        if without == patience:
            return count
    return None


@given(
    values=st.lists(
        st.sampled_from([0.0, 1.0, 1.5, 2.0, 4.0, float("nan"), float("inf"), float("-inf")]), max_size=12
    ),
    patience=st.integers(1, 4),
    delta=st.sampled_from([0.0, 0.5, 1.0]),
    mode=st.sampled_from(["min", "max"]),
    killed=st.integers(0, 12),
)
def test_it_stops_where_a_count_by_hand_does_also_across_a_resume(
    values: list[float], patience: int, delta: float, mode: str, killed: int
) -> None:
    expected = stop_by_hand(values, patience, delta, 1 if mode == "max" else -1)
    train_state, stopped = TrainState(), None
    stopping = stopping_of(train_state, patience=patience, min_delta=delta, mode=mode)
    for count, value in enumerate(values, 1):
        if count == killed:  # its state goes through a checkpoint
            train_state = TrainState(**json.loads(json.dumps(train_state.to_json())))
            stopping = stopping_of(train_state, patience=patience, min_delta=delta, mode=mode)
        assert not stopping.take({"loss": 0.0}, update_of(0.0)), "nothing was evaluated"
        if stopping.take({"eval_loss": value}, update_of(0.0)):
            stopped = count
            break
    assert stopped == expected


def test_another_metric_mode_or_delta_begins_to_count_anew() -> None:
    train_state = TrainState()
    stopping = stopping_of(train_state, patience=2)
    assert [stopping.take({"eval_loss": value}, update_of(0.0)) for value in (1.0, 2.0)] == [False, False]
    assert stopping_of(train_state, patience=1).has_stopped, "with less patience it stops where it is"
    for keys in ({"mode": "max"}, {"min_delta": 0.5}):
        again = TrainState(**json.loads(json.dumps(train_state.to_json())))
        assert not stopping_of(again, patience=1, **keys).has_stopped
    assert not Stopping(job_of("mlp"), train_state).has_stopped and "stopping" not in train_state.to_json()


@given(
    losses=st.lists(st.tuples(st.sampled_from([0.25, 0.5, 1.0, 2.0, float("nan")]), st.integers(0, 2)), max_size=12),
    patience=st.sampled_from([None, 1, 3]),
    below=st.sampled_from([0.3, 0.5, 1.5]),
    killed=st.integers(0, 12),
)
def test_the_loss_of_steps_stops_it_below_a_number_or_without_patience(
    losses: list[tuple[float, int]], patience: int | None, below: float, killed: int
) -> None:
    """A step without a row, whose weight is 0, counts nothing. What was evaluated does not either."""
    keys = {"metric": "loss", "every": "step", "below": below, "patience": patience}
    counted = [loss if weight else None for loss, weight in losses]
    low = next((count for count, loss in enumerate(counted, 1) if loss is not None and loss < below), None)
    late = stop_by_hand([loss for loss in counted if loss is not None], patience or 99, 0.0, -1)
    late = late and [count for count, loss in enumerate(counted, 1) if loss is not None][late - 1]
    train_state, stopped = TrainState(), None
    stopping = stopping_of(train_state, **keys)
    for count, (loss, weight) in enumerate(losses, 1):
        if count == killed:
            train_state = TrainState(**json.loads(json.dumps(train_state.to_json())))
            stopping = stopping_of(train_state, **keys)
        train_state.step = count
        if stopping.take({"eval_loss": 0.0, "epoch_loss": 0.0}, update_of(loss, weight)):
            stopped = count
            break
    assert stopped == min(filter(None, (low, late)), default=None)
    if stopped is not None:
        why = f"loss is {counted[stopped - 1]:.6g}, below {below}" if stopped == low else "loss did not improve on"
        why = why if stopped == low or set(map(str, counted[:stopped])) - {"nan", "None"} else "was never a number"
        assert why in stopping.stopped().text
        assert stopping_of(train_state, **keys).has_stopped, "a driver was killed then"
        lower = stopping_of(train_state, **{**keys, "below": 0.1, "patience": 99})
        assert not lower.has_stopped, "it goes on with a smaller number, and more patience"


def test_a_metric_of_an_evaluation_may_be_good_enough() -> None:
    stopping = stopping_of(TrainState(step=4), below=0.5)
    assert [stopping.take({"eval_loss": value}, update_of(0.0)) for value in (0.7, 0.5, 0.4)] == [False, False, True]
    told = stopping.stopped()
    assert told.text == "stopped early after 4 steps: eval_loss is 0.4, below 0.5"
    assert told.to_json() == {
        "step": 4,
        "metric": "eval_loss",
        "mode": "min",
        "min_delta": 0.0,
        "best": 0.4,
        "times": 0,
        "below": 0.5,
        "text": told.text,
    }


@pytest.mark.full(but=["below"])
@pytest.mark.parametrize("stopping", [{"below": 0.9}, {"patience": 3}], ids=["below", "patience"])
def test_the_loss_of_steps_ends_a_run_on_any_workers_through_a_kill(tmp_path: Path, stopping: dict[str, Any]) -> None:
    """After the step that a count by hand over the losses of a longer run says, with its bits."""
    keys = {**KEYS, "eval": None, "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}}, "batch_size": 8}
    keys |= {"early_stopping": None, "bitwise": True, "shards": 4, "epochs": 20}
    run_group(job_of("mlp", workers=1, **keys), tmp_path / "on")
    losses = [row["loss"] for row in history_of(tmp_path / "on")]
    low = next((count for count, loss in enumerate(losses, 1) if loss < stopping.get("below", 0.0)), None)
    ends = low or stop_by_hand(losses, stopping.get("patience", 99), 0.0, -1)
    assert ends is not None and 3 < ends < len(losses)
    keys |= {"early_stopping": {"metric": "loss", "every": "step", **stopping}, "checkpoint": {"every_steps": 1}}
    for workers in (1, 2, 3):
        if workers == 3:
            run_group(job_of("mlp", workers=2, **keys), tmp_path / "3", StopsBefore(ends - 1))
        run_group(job_of("mlp", workers=workers, **keys), tmp_path / str(workers))
        assert [row["loss"] for row in history_of(tmp_path / str(workers))] == losses[:ends]
        first = weights_of(tmp_path / "1")
        assert all(torch.equal(first[name], each) for name, each in weights_of(tmp_path / str(workers)).items())


@pytest.mark.usefixtures("in_project")
def test_a_run_that_is_good_enough_trains_on_only_for_less(tmp_path: Path) -> None:
    slow = {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}}, "eval": None, "epochs": 20}
    enough = {"metric": "loss", "every": "step", "below": 0.9}
    first = ended_early(tmp_path, early_stopping=enough, **slow)
    assert first.stopped_early is not None and first.stopped_early["best"] < 0.9
    with pytest.raises(
        JobError, match=r"loss is 0\.\d+, below 0\.9; .* give early_stopping a smaller below or leave it out"
    ):
        ended_early(tmp_path, early_stopping=enough, **slow)
    less = {**enough, "below": first.stopped_early["best"]}
    on = ended_early(tmp_path, early_stopping=less, **slow)
    assert on.stopped_early is not None and len(on.history) == on.stopped_early["step"] > first.stopped_early["step"]
    assert on.history[-1]["loss"] < less["below"] <= min(row["loss"] for row in on.history[:-1])


@pytest.mark.parametrize("metric", ["loss", "epoch_loss"])
def test_the_epochs_loss_ends_a_run_with_an_evaluation(tmp_path: Path, metric: str) -> None:
    stopping = {"metric": metric, "patience": 1}
    keys = {**KEYS, "eval": {**EVAL, "every_steps": 100}, "early_stopping": stopping, "batch_size": 8, "epochs": 9}
    run_group(job_of("mlp", workers=1, **keys), tmp_path)
    history = history_of(tmp_path)
    means = [row["epoch_loss"] for row in history if row["epoch_loss"] is not None]
    assert means[-1] >= means[-2] and sorted(means[:-1], reverse=True) == means[:-1]
    assert len(history) == 4 * len(means) < 36
    assert [row["step"] for row in history if row["eval_loss"] is not None] == [len(history) - 1]


def ended_early(folder: Path, **keys: Any) -> dp_ray.Result:
    return dp_ray.run(**keys_of(**{**KEYS, "storage": str(folder), "name": "early", **keys}))


@pytest.mark.usefixtures("in_project")
def test_a_run_that_stopped_early_is_done_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ended_early(tmp_path, quiet=False)
    losses = [row["eval_loss"] for row in result.history if row["eval_loss"] is not None]
    step = len(result.history)
    best = min(losses)
    text = f"stopped early after {step} steps: eval_loss did not improve on {best:.6g} in 2 evaluations"
    assert (result.status, result.total_steps, step) == ("done", 40, 2 * len(losses)) and step < 40
    assert losses.index(best) == len(losses) - 3
    said = " ".join(capsys.readouterr().err.split())
    assert text in said and f"done, stopped early after {step} of 40 steps in " in said
    loaded = dp_ray.load(result.run_dir)
    assert loaded.stopped_early is not None and loaded.stopped_early["text"] == text and text in repr(loaded)
    (row,) = listed_runs(Storage(str(tmp_path)))
    assert (row.status, row.step, row.steps, row.note) == ("done", step, 40, text)
    assert f"{step}/40" in list_text([row])
    line, why = watched_lines(Storage(result.run_dir))
    assert line.startswith(f"early: done, {step}/40 steps") and why == text
    data = read_run(Storage(result.run_dir))
    assert (data.status, data.steps_done, data.total_steps, data.problems) == ("done", step, 40, [])
    page = (Path(result.run_dir) / "report.html").read_text()
    assert text in page and "interrupted" not in page


@pytest.mark.usefixtures("in_project")
def test_the_commands_exit_status_is_0_and_then_that_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(**{**KEYS, "storage": str(tmp_path), "name": "early"})
    del keys["quiet"]
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    assert status_of(monkeypatch, "run", str(tmp_path / "job.yaml"), "--quiet") == 0
    assert status_of(monkeypatch, "run", str(tmp_path / "job.yaml"), "--quiet") == 2
    assert dp_ray.load(tmp_path / "early").stopped_early is not None


@pytest.mark.usefixtures("in_project")
def test_a_later_command_trains_on_only_with_more_patience(tmp_path: Path) -> None:
    first = ended_early(tmp_path)
    for keys in ({}, {"epochs": 7}, {"early_stopping": {"metric": "eval_loss", "patience": 1}}):
        with pytest.raises(
            JobError, match=r"stopped early after \d+ steps: .*give early_stopping more patience or leave"
        ):
            ended_early(tmp_path, **keys)
    assert dp_ray.load(first.run_dir).weights_sha256 == first.weights_sha256
    on = ended_early(tmp_path, early_stopping={"metric": "eval_loss", "patience": 4})
    assert on.stopped_early is not None and on.stopped_early["times"] == 4
    assert first.stopped_early is not None and len(on.history) == first.stopped_early["step"] + 4
    rest = ended_early(tmp_path, early_stopping=None)
    assert rest.stopped_early is None and len(rest.history) == 40


def test_a_run_that_began_without_it_goes_on_with_it(tmp_path: Path) -> None:
    keys = {**KEYS, "batch_size": 8, "epochs": 9}
    run_group(job_of("mlp", workers=1, **{**keys, "early_stopping": None, "max_steps": 4}), tmp_path)
    assert len(history_of(tmp_path)) == 4
    run_group(job_of("mlp", workers=1, **keys), tmp_path)
    assert 4 < len(history_of(tmp_path)) < 36


PLATEAU = {
    "target": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "args": {"patience": 0, "factor": 0.5},
    "per": "epoch",
    "metric": "eval_loss",
}


@pytest.mark.parametrize("scheduler", [None, PLATEAU])
def test_the_evaluation_at_the_end_of_a_piece_counts_for_nothing_later(tmp_path: Path, scheduler: Any) -> None:
    """Neither for patience nor for a scheduler: a training in pieces is that without, to the step and the bit."""
    keys = {**KEYS, "batch_size": 8, "eval": {**EVAL, "every_steps": 3}, "epochs": 9, "scheduler": scheduler}
    keys["early_stopping"] = {"metric": "eval_loss", "patience": 4}
    run_group(job_of("mlp", workers=1, **keys), tmp_path / "whole")
    for most in (4, 7, 8, 11, None):
        run_group(job_of("mlp", workers=1, **keys, max_steps=most), tmp_path / "pieces")
    whole, pieces = history_of(tmp_path / "whole"), history_of(tmp_path / "pieces")
    assert 12 < len(pieces) == len(whole) < 36
    rates = [[row["learning_rate"] for row in rows] for rows in (whole, pieces)]
    assert rates[0] == rates[1] and (scheduler is None or len(set(rates[0])) > 1)
    weights = weights_of(tmp_path / "whole")
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(tmp_path / "pieces").items())


def test_the_keys_at_their_defaults_leave_the_fingerprint_as_it_was() -> None:
    job: dict[str, Any] = {"task": "train", "model": "a:b", "dataset": "a:c", "batch_size": 30}
    job |= {"loss": "torch.nn:CrossEntropyLoss", "optimizer": "torch.optim:SGD"}
    before = "58cb0337a4d56cf58e536cd4244dce8f1cd620654a80b252e782a66887cfee24"  # of the version without these keys
    with_lengths = "fcf3ec6b7d1f0f503e69ff1b4c626f6e2c34bc528a61816385cabfa9d7eb3982"
    plain = Job.make(job, "job")
    assert (plain.fingerprint(), plain.fingerprint(with_lengths=True)) == (before, with_lengths)
    stops = Job.make({**job, "early_stopping": {"metric": "loss", "patience": 2}, "hooks": {"on_end": "a:d"}}, "job")
    assert stops.fingerprint() == before
    of_0_2 = {"metric": "loss", "patience": 2, "min_delta": 0.0, "mode": "min"}
    assert stops.describe()["early_stopping"] == of_0_2, "else a run of that version had another length"
    assert Job.make({**job, "ema": {"decay": 0.9}}, "job").fingerprint() != before


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"early_stopping": {"metric": "eval_loss", "patience": 2}},
         "early_stopping.metric: must be epoch_loss or one that eval measures (nothing: there is no eval), "
         "got 'eval_loss'"),
        ({"early_stopping": {"metric": "loss"}},
         "early_stopping.patience: is missing; give patience, or below, or both"),
        ({"early_stopping": {"metric": "epoch_loss", "every": "step", "below": 1.0}},
         "early_stopping.every: step is for metric: loss, got metric: epoch_loss"),
        ({"early_stopping": {"metric": "loss", "every": "epoch", "below": 1.0}},
         "early_stopping.every: must be 'step', got 'epoch'"),
        ({"early_stopping": {"metric": "loss", "below": 1.0, "mode": "max"}},
         "early_stopping.below: is not for mode: max"),
        ({"early_stopping": {"metric": "loss", "below": float("nan")}}, "early_stopping.below: "),
        ({"early_stopping": {"metric": "loss", "patience": 0}}, "early_stopping.patience: "),
        ({"early_stopping": {"monitor": "loss", "patience": 1}}, "here it is early_stopping.metric"),
        ({"early_stopping": 3}, "early_stopping: must be null or a mapping, like {metric: eval_loss, patience: 3}"),
        ({"ema": {"decay": 1.0}}, "ema.decay: "),
        ({"ema": 0.9}, "ema: must be null or a mapping, like {decay: 0.999, evaluate: true}, got 0.9"),
        ({"hooks": {"on_train_end": "a:b"}}, "hooks.on_train_end: is no key of a job; here it is hooks.on_end"),
        ({"hooks": {"on_step": "a"}}, "hooks.on_step: must be 'module:attribute'"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as caught:
        job_of("mlp", **keys)
    assert says in str(caught.value)
