"""Early stopping, the average of the weights and a plateau scheduler: as written by hand, and after any kill."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dp_ray
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import StoppedEarly
from dp_ray.rundir.checkpoint import load_checkpoint
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import TrainingView
from tests.support import training
from tests.support.cluster import Run
from tests.support.group import StopsBefore, StopsBeforeItsWeights, history_of, run_group, weights_of
from tests.support.training import plain_loop
from tests.support.trainings import assert_close, initial, job_of, mean_loss

if TYPE_CHECKING:  # boto3 is slow to import
    from tests.support.s3 import Server

PATIENCE, DECAY = 3, 0.8
PLATEAU: dict[str, Any] = {
    "target": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "args": {"factor": 0.5, "patience": 0},
    "per": "epoch",
    "metric": "eval_loss",
}
KEYS: dict[str, Any] = {
    "batch_size": 22,
    "shards": 4,
    "bitwise": True,
    "epochs": 20,
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 1.0, "momentum": 0.9}},
    "scheduler": PLATEAU,
    "eval": {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4},
    "early_stopping": {"metric": "eval_loss", "patience": PATIENCE, "min_delta": 0.001},
    "ema": {"decay": DECAY},
    "checkpoint": {"every_steps": 2, "keep": 3, "best": "eval_loss"},
}


class Ended(Exception):
    """The plain loop stops early."""


class ByHand:
    """The evaluations, the scheduler, the average and the early stop of a plain loop, written by hand."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **data: int) -> None:
        self.model = model
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
        self.schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        self.step = self.without = 0
        self.best, self.evaluated = float("inf"), float("nan")
        self.best_weights: dict[str, torch.Tensor] = {}

    def after_step(self) -> None:
        self.step += 1
        self.average.update_parameters(self.model)
        stops = self.step % 4 == 0 and self.has_stopped()
        if self.step % 5 == 0:
            self.schedule.step(self.evaluated)
        if stops:
            raise Ended

    def has_stopped(self) -> bool:
        data = training.Pairs(20)
        self.average.eval()
        with torch.no_grad():
            self.evaluated = nn.functional.cross_entropy(self.average(data.inputs), data.targets).item()
        self.average.train()
        if self.evaluated < self.best - 0.001:
            self.best, self.without = self.evaluated, 0
            return False
        self.without += 1
        return self.without == PATIENCE


def stop_of(messages: list[Any]) -> StoppedEarly:
    (found,) = (message for message in messages if isinstance(message, StoppedEarly))
    return found


def test_it_is_that_of_a_loop_written_by_hand(tmp_path: Path) -> None:
    told = stop_of(run_group(job_of("mlp", workers=2, **KEYS), tmp_path))
    model = initial(training.mlp)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, 0.9)
    by_hand = ByHand(model, optimizer)
    with pytest.raises(Ended):
        plain_loop(model, training.Pairs(), 22, 20, mean_loss, optimizer, after_step=by_hand.after_step)
    assert told.step == by_hand.step and 12 < told.step < 100
    assert told.best == pytest.approx(by_hand.best, rel=1e-6) and told.times == PATIENCE
    assert told.text == (
        f"stopped early after {by_hand.step} steps: eval_loss did not improve on {by_hand.best:.6g} in 3 evaluations"
    )
    history = history_of(tmp_path)
    assert [row["step"] for row in history] == list(range(by_hand.step))
    assert history[-1]["eval_loss"] == pytest.approx(by_hand.evaluated, rel=1e-6)
    assert history[-1]["learning_rate"] < 1.0, "the plateau has lowered it"
    losses = [row["loss"] for row in history]
    assert_close(tmp_path, model, losses, 1e-5)
    (tmp_path / "ema").mkdir()
    (tmp_path / "ema.safetensors").rename(tmp_path / "ema" / "weights.safetensors")
    (tmp_path / "history").rename(tmp_path / "ema" / "history")
    assert_close(tmp_path / "ema", by_hand.average.module, losses, 1e-5)


def ending(folder: Path) -> tuple[Any, ...]:
    """All bits that a training leaves, its last checkpoint's too, and its history."""
    last = max(int(path.stem[5:]) for path in (folder / "checkpoints").glob("step-*.safetensors"))
    kept = load_checkpoint(Storage(str(folder / "checkpoints")), f"step-{last}.safetensors")
    files = [weights_of(folder), load_file(folder / "ema.safetensors"), load_file(folder / "best.safetensors")]
    bits = [{name: value.numpy().tobytes() for name, value in file.items()} for file in files]
    return bits, repr(history_of(folder)), repr((kept.about, kept.state))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_killed_at_each_border_it_ends_as_the_undisturbed_one(tmp_path: Path, model: str) -> None:
    data = {"target": f"tests.support.training:{'Images' if model == 'conv' else 'Pairs'}", "args": {"length": 100}}
    given = {"target": f"tests.support.training:{model}", "args": {"dropout": 0.2} if model == "mlp" else {}}
    evaluated = {"eval": {**KEYS["eval"], "dataset": {**data, "args": {"length": 20}}}}
    keys = {**KEYS, **evaluated, "batch_size": 20, "skip": [3, 57, 99]}
    whole = stop_of(run_group(job_of(given, data, workers=2, **keys), tmp_path / "whole"))
    undisturbed, run = ending(tmp_path / "whole"), tmp_path / "killed"
    assert 12 <= whole.step < 40
    for step in range(1, whole.step):
        assert not told_end(run_group(job_of(given, data, workers=1 + step % 3, **keys), run, StopsBefore(step)))
        assert not (run / "weights.safetensors").exists()
    for workers in (2, 1):  # it has stopped, and dies before it has written its weights
        assert not told_end(run_group(job_of(given, data, workers=workers, **keys), run, StopsBeforeItsWeights()))
    assert not (run / "weights.safetensors").exists()
    assert stop_of(run_group(job_of(given, data, workers=3, **keys), run)) == whole
    assert ending(run) == undisturbed


def told_end(messages: list[Any]) -> bool:
    return any(isinstance(message, StoppedEarly) for message in messages)


@pytest.mark.slow
def test_with_more_patience_a_stopped_run_goes_on_to_the_bits_of_a_patient_one(tmp_path: Path) -> None:
    run_group(job_of("mlp", workers=1, **KEYS), tmp_path / "on")
    patient = {**KEYS, "early_stopping": {**KEYS["early_stopping"], "patience": PATIENCE + 2}}
    first = stop_of(run_group(job_of("mlp", workers=2, **patient), tmp_path / "whole"))
    assert stop_of(run_group(job_of("mlp", workers=2, **patient), tmp_path / "on")) == first
    assert ending(tmp_path / "on") == ending(tmp_path / "whole")
    unlimited = {**KEYS, "early_stopping": None, "max_steps": first.step + 3}
    assert not told_end(run_group(job_of("mlp", workers=2, **unlimited), tmp_path / "on"))
    assert len(history_of(tmp_path / "on")) == first.step + 3


@pytest.mark.slow
def test_the_average_is_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    keys = {**KEYS, "max_steps": 12, "early_stopping": None}
    endings = []
    for workers in (1, 2, 4):
        run_group(
            job_of(
                "conv",
                "Images",
                workers=workers,
                **{**keys, "shards": 5, "eval": None, "scheduler": None, "checkpoint": {}},
            ),
            tmp_path / str(workers),
        )
        ema = load_file(tmp_path / str(workers) / "ema.safetensors")
        endings.append({name: value.numpy().tobytes() for name, value in ema.items()})
    assert endings[0] == endings[1] == endings[2]


@pytest.mark.full
@pytest.mark.slow
def test_on_an_object_store_it_fails_goes_on_and_ends_as_on_a_disk(server: "Server", tmp_path: Path) -> None:
    file = {**KEYS, "task": "train", "model": "tests.support.training:mlp", "dataset": "tests.support.training:Pairs"}
    file |= {"loss": "torch.nn:CrossEntropyLoss", "shuffle": True, "workers": 0, "name": "run", "skip": [3, 5]}
    here = dp_ray.run(**file, storage=str(tmp_path), quiet=True)
    fails = {"on_step": {"target": "tests.tasks.test_steered_trainings:fail_at", "args": {"step": 7}}}
    with pytest.raises(ModelError, match=r"hooks\.on_step"):
        dp_ray.run(**file, storage=server.url("steered"), quiet=True, hooks=fails)
    there = dp_ray.run(**file, storage=server.url("steered"), quiet=True)
    assert there.interruptions and there.stopped_early is not None
    assert there.stopped_early == here.stopped_early
    assert there.ema is not None and here.ema is not None
    assert (there.weights_sha256, there.ema["sha256"]) == (here.weights_sha256, here.ema["sha256"])
    averages, expected = there.ema_weights, here.ema_weights
    assert averages.keys() == expected.keys()
    assert all(torch.equal(averages[name], value) for name, value in expected.items())
    assert there.metrics == here.metrics and len(there.history) == there.stopped_early["step"]


def fail_at(view: TrainingView, step: int) -> None:
    if view.step == step:
        raise RuntimeError("enough")


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_with_a_killed_worker_it_stops_where_one_process_does(run_in_session: Run, tmp_path: Path) -> None:
    file = {**KEYS, "task": "train", "model": "tests.support.training:mlp", "dataset": "tests.support.training:Pairs"}
    file |= {"loss": "torch.nn:CrossEntropyLoss", "shuffle": True}
    hooks = {"on_end": {"target": "tests.tasks.test_steered_trainings:write_step", "args": {"name": "ended"}}}
    here = run_in_session(**file, workers=0, name="here")
    there = run_in_session(**file, workers=2, name="there", hooks=hooks, inject="kill worker 1 at step 7")
    assert there.restarts == 1 and there.status == "done"
    assert there.stopped_early is not None and there.stopped_early == here.stopped_early
    assert there.ema is not None and here.ema is not None
    assert (there.weights_sha256, there.ema["sha256"]) == (here.weights_sha256, here.ema["sha256"])
    assert there.metrics == here.metrics and len(there.history) == there.stopped_early["step"] < there.total_steps
    assert (tmp_path / "there" / "ended").read_text() == str(there.stopped_early["step"] - 1)
    with pytest.raises(JobError, match="stopped early after"):
        run_in_session(**file, workers=2, name="there")


def write_step(view: TrainingView, name: str) -> None:
    (Path(view.run_dir) / name).write_text(str(view.step))
