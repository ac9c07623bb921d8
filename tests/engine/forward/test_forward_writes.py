"""What a forward writes: it follows shard 0, is in checkpoints, leaves no trace elsewhere; or an error names it."""

import copy
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import dp_ray
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.trainer import WRITTEN
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.split import Split, Work
from dp_ray.rundir.checkpoint import load_checkpoint, pack
from dp_ray.storage import Storage
from dp_ray.tensors.changed import digests
from dp_ray.tensors.files import write_tensors
from tests.support import training
from tests.support.builders import predictions_of, run_dir_of
from tests.support.chance import examples
from tests.support.group import ProcessExit, StopsBefore, history_of, measured, run_group, weights_of
from tests.support.large import peak_of
from tests.support.merging import merged
from tests.support.patchwork import plain_losses
from tests.support.replays import replayed
from tests.support.trainings import ADAMW, assert_close, initial, job_of
from tests.support.writing import (
    ChangesForms,
    Recomputes,
    Scales,
    SharesMemory,
    WritesInEval,
    WritesItsInputs,
    Writing,
)

pytestmark = pytest.mark.usefixtures("in_project")

DATA = {"target": "tests.support.training:Pairs", "args": {"length": 30}}
WAYS = ["momentum", "momentum_data", "momentum_replaced", "momentum_numpy", "clamp", "normalise", "max_norm"]
WAYS += ["lazily", "hiding", "assigning"]
LARGE = 300  # the width of layers that are not small
INPUTS = training.Pairs(30).inputs[:, 0]
HUGE = 2100  # the width of layers of which no copy is made because they are small: 17 MB each
GENTLE = 1e-3  # the learning rate that they bear


def writing(*ways: str, width: int = 8, late: int = 0) -> dict[str, Any]:
    return {"target": "tests.support.writing:Writing", "args": {"ways": list(ways), "width": width, "late": late}}


def job(*ways: str, width: int = 8, late: int = 0, **keys: Any) -> Job:
    given = {"batch_size": 10, "shards": 4, "epochs": 1, **keys}
    return job_of(writing(*ways, width=width, late=late), DATA, **given)


def assert_as_in_plain_torch(
    ways: tuple[str, ...], folder: Path, width: int = 8, rate: float = 0.1, **keys: Any
) -> None:
    optimized = {"target": "torch.optim:SGD", "args": {"lr": rate, "momentum": 0.9}}
    made = job(*ways, width=width, optimizer=optimized, **keys)
    run_group(made, folder)
    model = initial(Writing, ways, width)
    optimizer = torch.optim.SGD(model.parameters(), rate, 0.9)
    losses = plain_losses(model, training.Pairs(30), optimizer, made.batch_size, made.num_shards, made.epochs)
    assert_close(folder, model, losses, 3e-6)


def ends(made: Job, folder: Path) -> tuple[dict[str, bytes], str]:
    run_group(made, folder)
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_write_follows_shard_0(tmp_path: Path, way: str) -> None:
    """On one worker the shards run from the values of before the step; on two, rank 0's values are sent."""
    assert_as_in_plain_torch((way,), tmp_path / "1", workers=1)
    assert_as_in_plain_torch((way,), tmp_path / "2", workers=2)


@pytest.mark.full(but=["momentum"])
@pytest.mark.parametrize("way", ["momentum", "momentum_data", "momentum_replaced", "momentum_numpy"])
def test_a_momentum_encoder_that_is_not_small_follows_shard_0(tmp_path: Path, way: str) -> None:
    for workers in (1, 3):
        assert_as_in_plain_torch((way,), tmp_path / str(workers), width=LARGE, workers=workers)


@pytest.mark.full(but=["momentum_data-2"])
@pytest.mark.parametrize(("way", "workers"), [("momentum_data", 2), ("replacing", 1)])
def test_a_write_into_a_huge_parameter_that_can_be_undone_follows_shard_0(
    tmp_path: Path, way: str, workers: int
) -> None:
    """A frozen one that is as large as a trained one has a copy; of data that is replaced, the old one is there."""
    assert_as_in_plain_torch((way,), tmp_path, HUGE, GENTLE, workers=workers, batch_size=15, shards=3)


@pytest.mark.full
def test_a_write_that_cannot_be_undone_is_an_error_that_names_it_unless_nobody_needs_what_was_before(
    tmp_path: Path,
) -> None:
    says = r"step 0, shard \d: the forward wrote body.2.weight in place, .* \(parameter.data = value\)"
    for workers in (1, 2):
        with pytest.raises(ProcessExit, match=says):
            run_group(job("shrinking", width=HUGE, workers=workers), tmp_path / str(workers))
    assert_as_in_plain_torch(("shrinking",), tmp_path / "alone", HUGE, GENTLE, workers=1, shards=1)


def test_a_prediction_holds_no_second_copy_of_its_model() -> None:
    made = Job.make({"model": nn.Linear, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    model, inputs = nn.Sequential(*(nn.Linear(HUGE, HUGE) for _ in range(6))), torch.ones(2, HUGE)
    work = Work(Split(12, 4, 2))
    batches = ((None, inputs) for _, shards in work for _ in shards)
    assert peak_of(lambda: predictions_of(made, model, work, batches)) < 60e6, "of 106 MB"


def test_a_prediction_that_cannot_undo_a_write_names_it() -> None:
    made = Job.make({"model": WritesInEval, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    work, mine = Work(Split(12, 4, 2)), training.Pairs(12).inputs
    batches = ((None, mine[shard.start : shard.stop]) for _, shards in work for shard in shards)
    with pytest.raises(ModelError, match=r"the forward wrote target.weight in place"):
        predictions_of(made, initial(WritesInEval, HUGE), work, batches)


class WritesOnce(nn.Module):
    """A model whose forward of `at` rows writes a parameter that is not small, and may raise an error then."""

    def __init__(self, at: int, raises: bool) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(6, 3), nn.Linear(HUGE, HUGE).requires_grad_(False)
        self.at, self.raises = at, raises

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == self.at:
            self.frozen.weight.mul_(1.5)
            if self.raises:
                raise ValueError("not so few")
        outputs: torch.Tensor = self.body(inputs) + self.frozen.weight[0, :3]
        return outputs


@pytest.mark.parametrize("raises", [False, True])
def test_what_the_trial_of_rows_writes_is_an_error_too(tmp_path: Path, raises: bool) -> None:
    """It is the one of four rows: a shard has five."""
    model = {"target": "tests.engine.forward.test_forward_writes:WritesOnce", "args": {"at": 4, "raises": raises}}
    keys = {"model": model, "dataset": DATA, "batch_size": 10, "shards": 2, "flops": True}
    with pytest.raises(ProcessExit, match=r"step 0, shard 0: the forward wrote frozen.weight"):
        run_group(Job.make(keys, "job"), tmp_path)


class Block(nn.Linear):
    """A block that `strategy: fsdp` shards."""


class TakesTurns(nn.Module):
    """A model whose forwards run one block or the other, by a buffer in which they count."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even, self.head = Block(6, 6), Block(6, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        outputs: torch.Tensor = self.head((self.odd if self.count % 2 else self.even)(inputs))
        return outputs


@pytest.mark.parametrize("task", ["evaluate", "predict"])
def test_a_worker_without_rows_runs_the_blocks_of_the_others(tmp_path: Path, task: str) -> None:
    """Of three shards in each step, two workers run two and one: the other gathers the parts of a block with it."""
    keys = {
        "model": {"target": "tests.engine.forward.test_forward_writes:TakesTurns"},
        "dataset": DATA,
        "batch_size": 6,
    }
    keys |= {"task": task, "shards": 3, **({"loss": "torch.nn:CrossEntropyLoss"} if task == "evaluate" else {})}
    found = []
    for workers, more in ((1, {}), (2, {"strategy": "fsdp", "fsdp": {"blocks": ["Block"]}})):
        folder = tmp_path / str(workers)
        job = Job.make({**keys, "workers": workers, **more}, "job")
        messages = run_group(job, folder)
        found.append(measured(messages) if task == "evaluate" else merged(job, folder, 30).read().tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(torch.zeros(1 << 18), torch.full((1 << 18,), 2.0), id="filled"),
        pytest.param(INPUTS.double(), -INPUTS.double(), id="negated"),
        pytest.param(INPUTS, INPUTS.flip(0), id="turned"),
        pytest.param(INPUTS, torch.cat([-INPUTS[:2], INPUTS[2:]]), id="two signs"),
        pytest.param(
            INPUTS.bfloat16()[1:], INPUTS.bfloat16()[1:] * INPUTS[1:].ne(INPUTS[-1]), id="the last of an odd number"
        ),
        pytest.param(torch.arange(9).bool(), torch.ones(9).bool(), id="one byte"),
    ],
)
def test_contents_that_differ_have_other_digests(before: torch.Tensor, after: torch.Tensor) -> None:
    found = digests({"before": before, "the same": before.clone(), "after": after})
    assert found["before"] == found["the same"] != found["after"]


@settings(max_examples=examples(6), deadline=None)
@given(
    st.sets(st.sampled_from(WAYS), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([8, 300]),
)
def test_any_ways_to_write_follow_shard_0(ways: set[str], shards: int, workers: int, width: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = {"shards": max(shards, workers), "workers": workers}
        assert_as_in_plain_torch(tuple(sorted(ways)), Path(folder), width, **keys)


ALL = ("momentum_data", "clamp", "max_norm", "lazily", "hiding", "assigning")


@pytest.mark.full(but=["8"])
@pytest.mark.parametrize("width", [8, LARGE])
def test_the_bits_are_the_same_on_any_workers_and_after_any_kill(tmp_path: Path, width: int) -> None:
    keys: dict[str, Any] = {
        "bitwise": True,
        "epochs": 2,
        "optimizer": ADAMW,
        "ema": {"decay": 0.9, "evaluate": True},
        "eval": {"dataset": DATA, "every_steps": 2},
        "checkpoint": {"every_steps": 2},
    }
    first = ends(job(*ALL, width=width, workers=1, **keys), tmp_path / "1")
    averages = load_file(tmp_path / "1" / "ema.safetensors")
    for workers in (2, 3):
        assert ends(job(*ALL, width=width, workers=workers, **keys), tmp_path / str(workers)) == first
    for before, workers in ((2, 3), (5, 1)):
        run_group(job(*ALL, width=width, workers=4 - workers, **keys), tmp_path / f"k{before}", StopsBefore(before))
        assert ends(job(*ALL, width=width, workers=workers, **keys), tmp_path / f"k{before}") == first
        found = load_file(tmp_path / f"k{before}" / "ema.safetensors")
        assert found.keys() == averages.keys()
        assert all(torch.equal(value, averages[name]) for name, value in found.items())
    assert "hidden" not in weights_of(tmp_path / "1")


def test_workers_that_write_other_parameters_first_have_those_of_shard_0_by_their_names(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"batch_size": 14, "shards": 2, "shuffle": False, "epochs": 2, "bitwise": True}
    first = ends(job_of(writes("ByRows"), writes("Numbered"), workers=1, **keys), tmp_path / "1")
    assert ends(job_of(writes("ByRows"), writes("Numbered"), workers=2, **keys), tmp_path / "2") == first
    found = weights_of(tmp_path / "2")
    assert found["first"].tolist() == [1.0 + 4] * 3 and found["other"].tolist() == [100.0] * 3, "four steps"


def test_a_parameter_that_the_forward_makes_is_refused_in_the_first_step(tmp_path: Path) -> None:
    for workers in (1, 2):
        says = r"step 0, shard \d: the forward made the parameter head.weight, which no optimizer trains"
        with pytest.raises(ProcessExit, match=says):
            run_group(job_of(writes("MakesALayer"), DATA, workers=workers), tmp_path / str(workers))


def test_one_that_a_prediction_makes_is_refused_too(tmp_path: Path) -> None:
    given = {"model": writes("MakesALayer"), "dataset": DATA, "batch_size": 7, "workers": 1}
    for task, loss in (("evaluate", {"loss": "torch.nn:CrossEntropyLoss"}), ("predict", {"inputs": "first"})):
        with pytest.raises(ProcessExit, match=r"step 0, shard 0: the forward made the parameter head.weight"):
            run_group(Job.make({**given, **loss, "task": task}, "job"), tmp_path / task)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_buffer_that_the_forward_makes_is_refused_in_the_first_step(tmp_path: Path, workers: int) -> None:
    says = r"step 0, shard \d: the forward made the buffer made: make it in the constructor"
    with pytest.raises(ProcessExit, match=says):
        run_group(job("making", workers=workers), tmp_path)


@pytest.mark.parametrize("late", [0, 2])
def test_a_buffer_that_a_prediction_makes_is_refused(late: int) -> None:
    made = Job.make({"model": MakesABuffer, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    work = Work(Split(12, 4, 2))
    batches = ((None, torch.ones(2, 6)) for _, shards in work for _ in shards)
    with pytest.raises(ModelError, match=r"the forward made the buffer made: make it in the constructor"):
        predictions_of(made, MakesABuffer(late), work, batches)


class MakesABuffer(nn.Linear):
    """A layer whose forwards make a buffer, after so many without it."""

    def __init__(self, late: int) -> None:
        super().__init__(6, 3)
        self.late, self.runs = late, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs > self.late:
            self.register_buffer("made", torch.zeros(3))
        return super().forward(inputs)


def writes(name: str) -> dict[str, Any]:
    return {"target": f"tests.support.writing:{name}"}


@pytest.mark.parametrize("keys", [{"workers": 2, "shards": 3}, {"workers": 1, "flops": True}])
def test_a_model_that_writes_its_inputs_gets_each_batch_once(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Trials run the first batch before its shard does."""
    run_group(job_of(writes("WritesItsInputs"), DATA, epochs=1, **keys), tmp_path)
    model = initial(WritesItsInputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses = plain_losses(model, training.Pairs(30), optimizer, 7, keys.get("shards", 1), 1)
    assert_close(tmp_path, model, losses)


def test_a_late_write_is_an_error_that_names_it_unless_nobody_needs_what_was_before(tmp_path: Path) -> None:
    says = (
        r"step 4, shard \d: the forward wrote target.0.weight.*, and not in the first 3 steps since "
        r"the workers started, .*register_buffer"
    )
    for workers in (1, 2):
        with pytest.raises(ProcessExit, match=says):
            run_group(job("momentum", width=LARGE, late=4, workers=workers, epochs=2), tmp_path / str(workers))
    run_group(job("momentum", width=LARGE, late=4, workers=1, shards=1, epochs=2), tmp_path / "alone")
    model = initial(Writing, ("momentum",), LARGE, 4)
    losses = plain_losses(model, training.Pairs(30), torch.optim.SGD(model.parameters(), 0.1, 0.9), 10, 1, 2)
    assert_close(tmp_path / "alone", model, losses, 3e-6)


def test_a_late_write_that_no_version_shows_is_an_error_at_a_checkpoint(tmp_path: Path) -> None:
    says = r"the forward wrote target.0.weight, .* through .data, or numpy, and not in the first 3 steps"
    with pytest.raises(ProcessExit, match=says):
        run_group(job("momentum_numpy", width=LARGE, late=4, workers=2, epochs=2), tmp_path)


class OwnModes(Writing):
    """The same, with a `train()` of its own: an evaluation may write what is frozen."""

    def train(self, mode: bool = True) -> "OwnModes":
        super().train(mode)
        return self


@pytest.mark.parametrize(
    ("model", "more"),
    [("OwnModes", {}), ("Writing", {"ema": {"decay": 0.9, "evaluate": True}})],
    ids=["modes", "ema"],
)
def test_evaluations_that_write_the_model_hide_no_late_write(
    tmp_path: Path, model: str, more: dict[str, Any]
) -> None:
    made = {"target": f"{__name__}:{model}", "args": writing("momentum_numpy", width=LARGE, late=4)["args"]}
    keys: dict[str, Any] = {
        **more,
        "batch_size": 10,
        "shards": 4,
        "workers": 2,
        "epochs": 2,
        "eval": {"dataset": DATA, "every_steps": 1},
    }
    says = r"the forward wrote target.0.weight, .* through .data, or numpy, and not in the first 3 steps"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of(made, DATA, **keys, checkpoint={"every_steps": 1}), tmp_path)


def test_a_momentum_encoder_that_was_seen_before_a_kill_may_pause_after_it(tmp_path: Path) -> None:
    """Its name is in the checkpoint."""
    made = job("every_third", width=LARGE, workers=2, bitwise=True, checkpoint={"every_steps": 1})
    first = ends(made, tmp_path / "whole")
    run_group(made, tmp_path / "killed", StopsBefore(1))
    assert ends(made, tmp_path / "killed") == first


@pytest.mark.full(but=["max_norm"])
@pytest.mark.parametrize("way", ["momentum", "clamp", "normalise", "max_norm"])
def test_what_is_written_of_a_sharded_parameter_is_refused(tmp_path: Path, way: str) -> None:
    with pytest.raises(
        ProcessExit, match=r"step 0, shard \d: (model raised ModelError: )?the forward wrote \S+.* of which each"
    ):
        run_group(job(way, workers=2, strategy="fsdp"), tmp_path)


@pytest.mark.full
def test_what_a_sharded_model_holds_whole_follows_shard_0(tmp_path: Path) -> None:
    ways = ("clamp_scale", "lazily", "hiding", "assigning")
    keys: dict[str, Any] = {"strategy": "fsdp", "bitwise": True, "epochs": 2, "checkpoint": {"every_steps": 2}}
    keys["ema"] = {"decay": 0.9, "evaluate": True}
    keys["eval"] = {"dataset": DATA}
    whole = ends(job(*ways, workers=1, **{**keys, "strategy": "ddp"}), tmp_path / "ddp")
    assert ends(job(*ways, workers=2, **keys), tmp_path / "fsdp") == whole
    run_group(job(*ways, workers=3, **keys), tmp_path / "killed", StopsBefore(3))
    assert ends(job(*ways, workers=2, **keys), tmp_path / "killed") == whole


@pytest.mark.parametrize("width", [8, LARGE])
def test_an_evaluation_undoes_what_each_shard_has_written(tmp_path: Path, width: int) -> None:
    model = {"target": "tests.support.writing:WritesInEval", "args": {"width": width}}
    keys = {"model": model, "dataset": DATA, "batch_size": 10, "shards": 4, "loss": "torch.nn:CrossEntropyLoss"}
    total, rows = 0.0, training.Pairs(30)
    for start in range(0, 30, 10):
        inputs, targets = rows.inputs[start : start + 10], rows.targets[start : start + 10]
        for chunk, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            with torch.no_grad():
                outputs = initial(WritesInEval, width).eval()(chunk)
                total += torch.nn.functional.cross_entropy(outputs, target, reduction="sum").item()
    for workers in (1, 3):
        made = Job.make({**keys, "task": "evaluate", "workers": workers}, "job")
        assert measured(run_group(made, tmp_path / str(workers)))["loss"] == pytest.approx(total / 30, rel=1e-6)


def test_a_prediction_leaves_the_model_as_it_was() -> None:
    model = initial(WritesInEval, LARGE)
    before, mine = copy.deepcopy(model.state_dict()), training.Pairs(12).inputs
    made = Job.make({"model": WritesInEval, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    work = Work(Split(12, 4, 2))
    with torch.no_grad():
        expected = [initial(WritesInEval, LARGE).eval()(chunk) for chunk in mine.chunk(6)]
    for _ in range(2):  # in the second one it is known what the forward writes
        batches = ((None, mine[shard.start : shard.stop]) for _, shards in work for shard in shards)
        found = predictions_of(made, model, work, batches).values()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.full(but=["300"])
@pytest.mark.parametrize("width", [8, LARGE])
def test_each_step_that_runs_again_has_the_historys_loss(tmp_path: Path, width: int) -> None:
    keys: dict[str, Any] = {"bitwise": True, "epochs": 2, "checkpoint": {"every_steps": 2}}
    made = job(*ALL, width=width, workers=2, **keys)
    run = run_dir_of(tmp_path, made, rows={"dataset": 30}).storage
    run_group(made, run.location)
    for step, row in enumerate(history_of(Path(run.location))):
        assert replayed(run.location, step).loss == row["loss"]


def test_a_checkpoint_of_before_opens_and_one_of_a_usual_model_is_as_before(tmp_path: Path) -> None:
    """Without the new entries, a buffer that is in no state_dict begins anew."""
    keys: dict[str, Any] = {"workers": 1, "epochs": 2, "checkpoint": {"every_steps": 2}}
    run_group(job("hiding", **keys), tmp_path / "new", StopsBefore(2))
    made = load_checkpoint(Storage(str(tmp_path / "new" / "checkpoints")), "step-2.safetensors")
    about, state = made.about, made.state
    assert state[WRITTEN].keys() == {"buffers"}
    assert state[WRITTEN]["buffers"].keys() == {"hidden"}
    del state[WRITTEN]
    plain, tensors = pack(state)
    folder = Storage(str(tmp_path / "old" / "checkpoints"))
    folder.create()
    write_tensors(folder, "step-2.safetensors", tensors, json.dumps({**about, "state": plain}))
    run_group(job("hiding", **keys), tmp_path / "old")
    assert len(history_of(tmp_path / "old")) == 4
    run_group(job_of("conv", "Images", workers=1, batch_size=14, max_steps=2), tmp_path / "usual")
    (kept,) = (tmp_path / "usual" / "checkpoints").glob("*.safetensors")
    assert WRITTEN not in load_checkpoint(Storage(str(kept.parent)), kept.name).state


def sharing(way: str, late: int = 0, persistent: bool = True, **keys: Any) -> Job:
    """A training whose every second step has no rows for a second worker."""
    args = {"way": way, "late": late, "persistent": persistent}
    model = {"target": "tests.support.writing:SharesMemory", "args": args}
    return job_of(model, DATA, **{"batch_size": 28, "shards": 4, "epochs": 3, **keys})


@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_that_begin_as_one_tensor_follow_shard_0(tmp_path: Path, workers: int) -> None:
    """Each shows what is written in the other in place."""
    run_group(sharing("never", workers=workers), tmp_path)
    model = initial(SharesMemory, "never")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    assert_close(tmp_path, model, plain_losses(model, training.Pairs(30), optimizer, 28, 4, 3), 3e-6)


@pytest.mark.parametrize("persistent", [False, True])
def test_buffers_of_one_tensor_are_kept(tmp_path: Path, persistent: bool) -> None:
    keys: dict[str, Any] = {"bitwise": True, "checkpoint": {"every_steps": 1}, "ema": {"decay": 0.9}}
    first = ends(sharing("never", persistent=persistent, workers=1, **keys), tmp_path / "1")
    run_group(sharing("never", persistent=persistent, workers=2, **keys), tmp_path / "killed", StopsBefore(3))
    assert ends(sharing("never", persistent=persistent, workers=3, **keys), tmp_path / "killed") == first


@pytest.mark.full(but=["joined-0", "anew-4"])
@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("way", ["anew", "second", "joined", "parted", "none"])
def test_to_change_which_buffers_share_memory_is_an_error_that_names_them(
    tmp_path: Path, way: str, late: int
) -> None:
    says = (
        r"shard 0: the forward has \S+ share memory with other buffers, or no longer: give each a tensor of its own"
    )
    for workers in (1, 2):
        with pytest.raises(ProcessExit, match=says):
            run_group(sharing(way, late, workers=workers), tmp_path / str(workers))


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else value.detach().clone() for name, value in model._buffers.items()}


def assert_same(found: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["replaced", "grown", "shrunk", "turned", "cast", "recorded", "none"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_buffer_that_late_gets_another_form_follows_shard_0(way: str, shards: int) -> None:
    """In steps whose copies are in the memory of the last step's."""
    model = ChangesForms(way)
    state = StepState(model)
    for step in range(7):
        state.begin(shards)
        before = buffers_of(model)
        for shard in range(shards):
            if shard:
                state.restore()
            assert_same(buffers_of(model), before)
            with state.forward():
                model.write(step > 3)
            if not shard:
                wanted = buffers_of(model)
                state.keep()
        assert state.finish() == (step < 3)
        assert_same(buffers_of(model), wanted)


@pytest.mark.parametrize(("late", "counts"), [(0, True), (5, True), (0, False)])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_forward_that_runs_again_in_the_backward_writes_once(
    tmp_path: Path, late: int, counts: bool, shards: int
) -> None:
    trained = {"target": "tests.support.writing:Recomputes", "args": {"late": late, "counts": counts}}
    made = job_of(trained, DATA, batch_size=10, shards=shards, epochs=3, workers=0, storage=str(tmp_path))
    weights = dp_ray.run(made, name="run", quiet=True).weights
    model = initial(Recomputes, 99, counts)
    plain_losses(model, training.Pairs(30), torch.optim.SGD(model.parameters(), 0.1, 0.9), 10, shards, 3)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


class FollowsItself(nn.Module):
    """A model without buffers, of which each forward writes a small frozen parameter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.frozen.mul_(0.5)
        outputs: torch.Tensor = self.layer(inputs) * self.frozen
        return outputs


def test_what_a_trial_writes_is_undone_in_a_model_without_buffers() -> None:
    model = FollowsItself()
    state = StepState(model)
    for expected in (0.5, 0.25):
        for num_shards in (2, 1):  # the first forward is that of a trial
            state.begin(num_shards)
            with state.forward():
                model(torch.ones(2, 6))
            if num_shards == 2:
                state.restore()
        state.keep()
        state.finish()
        assert model.frozen.tolist() == [expected] * 3


def test_a_late_write_that_no_version_shows_is_an_error_on_a_rank_that_keeps_no_checkpoint(tmp_path: Path) -> None:
    says = r"the forward wrote frozen.weight through .data, or numpy, and not in the first 3 steps"
    with pytest.raises(ProcessExit, match=says):
        # Of 10 rows, the last shard has one: it is rank 1's.
        run_group(job_of(writes("WritesOnFewRows"), DATA, workers=2, batch_size=10, shards=4, epochs=3), tmp_path)


def test_a_late_write_of_a_prediction_that_no_version_shows_is_an_error() -> None:
    made = Job.make({"model": Scales, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    width, work = 1 << 21, Work(Split(12, 4, 2))  # of which no copy is made
    batches = ((None, torch.ones(2, width)) for _, shards in work for _ in shards)
    with pytest.raises(ModelError, match=r"the forward wrote layer.weight through .data, or numpy, and not in"):
        predictions_of(made, Scales(width, late=4), work, batches)


@pytest.mark.parametrize("width", [6, 1 << 21])
def test_what_a_state_is_told_that_forwards_write_follows_shard_0(width: int) -> None:
    """As of a CUDA graph, whose replay moves no version; the second one is too large for a copy in early steps."""
    model, inputs = Scales(width, late=12), torch.ones(2, width)
    state = StepState(model)
    for step in range(8):
        if step == 6:
            state.follow(["layer.weight"])
        before = model.layer.weight.detach().clone()
        state.begin(2)
        for shard in range(2):
            if shard:
                state.restore()
            assert torch.equal(model.layer.weight, before)
            with state.forward():
                model(inputs)
            if not shard:
                state.keep()
        state.finish()
        torch.testing.assert_close(model.layer.weight.detach(), before * (1.5 if step > 5 else 1))


class HoldsExpanded(nn.Module):
    """A model with a buffer whose rows are one row in memory."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((1, 3), 0.5).expand(7, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs) * self.mask[0]
        return outputs


def test_an_expanded_buffer_stays_as_it_is(tmp_path: Path) -> None:
    for workers in (1, 2):
        trained = {"target": "tests.engine.forward.test_forward_writes:HoldsExpanded"}
        run_group(job_of(trained, DATA, batch_size=10, shards=3, epochs=1, workers=workers), tmp_path / str(workers))
        model = initial(HoldsExpanded)
        losses = plain_losses(model, training.Pairs(30), torch.optim.SGD(model.parameters(), 0.1, 0.9), 10, 3, 1)
        assert_close(tmp_path / str(workers), model, losses, 3e-6)


class HalfFrozen(nn.Sequential):
    """Layers of which one half is frozen, in the sizes of the other one: 71 MB each."""

    def __init__(self) -> None:
        layers = [nn.Linear(HUGE, HUGE) for _ in range(8)]
        for layer in layers[:4]:
            layer.requires_grad_(False)
        super().__init__(*layers)


def bytes_of_large_tensors() -> int:
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.nbytes > HUGE * HUGE]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


def test_after_a_forward_there_is_no_second_copy_of_a_frozen_part() -> None:
    """But during the first one, before there are gradients, of what may be a momentum encoder's."""
    model, inputs = HalfFrozen(), torch.ones(2, HUGE)
    state, before = StepState(model), bytes_of_large_tensors()
    for _ in range(3):
        state.begin(2)
        for shard in range(2):
            if shard:
                state.restore()
            with state.forward():
                model(inputs)
            if not shard:
                state.keep()
            assert bytes_of_large_tensors() == before
        state.finish()
