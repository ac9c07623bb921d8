"""With `reduction: sum` a training is that of plain torch whose loss is a sum, on whole batches of one process."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dp_ray
from dp_ray.engine.forward.step import Metrics, StepOutput, build_loss
from dp_ray.engine.trainer import Update
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import Note
from dp_ray.plan.order import Order
from dp_ray.report.charts import charts_of
from dp_ray.rundir.history import FinishedStep, history_so_far
from dp_ray.tasks.held import Held
from tests.support.group import StopsBefore, history_of, measured, run_group, weights_of
from tests.support.replays import replayed
from tests.support.training import Pairs, mlp, plain_batches
from tests.support.trainings import initial, job_of

HERE = "tests.engine.forward.test_summed_loss"
# Adam's updates hardly depend on a factor of all gradients; with this eps they do.
RATES: dict[str, Any] = {"lr": 0.01, "eps": 0.1}
ADAM = {"target": "torch.optim:Adam", "args": RATES}
SUM = {"target": "torch.nn:CrossEntropyLoss", "reduction": "sum"}
ROWS = 45  # batches of 10, and a last one of 5
PAIRS = {"target": "tests.support.training:Pairs", "args": {"length": ROWS}}
EVAL = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 13}}}
KEYS: dict[str, Any] = {"shards": 3, "batch_size": 10, "optimizer": ADAM, "loss": SUM, "eval": EVAL}


def summed(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sum over a shard's rows."""
    return F.cross_entropy(outputs, target, reduction="sum")


class Summed(nn.Module):
    """The same as a class."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return summed(outputs, target)


class OfTorch(nn.CrossEntropyLoss):
    """A class derived from torch's."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs / 2, target) * 2


def paired(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return summed(outputs, target), len(target)


def averaged(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return summed(model(batch[0]), batch[1])


def loop(run: dp_ray.Loop) -> None:
    """The declared training."""
    update = run.optimizer(torch.optim.Adam(run.model.parameters(), **RATES))
    for one in run.steps():
        told = one.backward(lambda batch: step(run.model, batch), run.model, reduction="sum")
        update.step()
        one.log(told=told)


def loop_of_two(run: dp_ray.Loop) -> None:
    """A sum, and then a mean, whose gradients add up."""
    update = run.optimizer(torch.optim.Adam(run.model.parameters(), **RATES))

    def loss(batch: Any) -> torch.Tensor:
        return F.cross_entropy(run.model(batch[0]), batch[1], reduction="none")

    for one in run.steps():
        told = one.backward(loss, run.model, reduction="sum"), one.backward(loss, run.model)
        update.step()
        one.log(ratio=told[0] / told[1])


Plain = tuple[nn.Module, list[float], list[float]]


def plain(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed,
    clip: float | None = None,
    left_out: Sequence[int] = (),
) -> Plain:
    """Whole batches in one process: the model, its losses, and the norms of its gradients; without some rows."""
    model, losses, norms = initial(mlp), [], []
    optimizer = torch.optim.Adam(model.parameters(), **RATES)
    data = Pairs(ROWS)
    left = {tuple(data[at][0].tolist()) for at in left_out}
    for _, inputs, targets in plain_batches(data, 10, 2):
        kept = torch.tensor([tuple(row.tolist()) not in left for row in inputs])
        if not kept.any():
            continue
        optimizer.zero_grad()
        loss = loss_of(model(inputs[kept]), targets[kept])
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        optimizer.step()
    return model, losses, norms


def assert_is(folder: Path, by_hand: Plain, rtol: float = 1e-5) -> list[dict[str, Any]]:
    """The run in a folder is the training by hand; returns its history."""
    model, losses, norms = by_hand
    weights, history = weights_of(folder), history_of(folder)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=rtol, atol=1e-5)
    rows = [row for row in history if row["rows"]]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=rtol)
    assert [row["gradient_norm"] for row in rows] == pytest.approx(norms, rel=rtol)
    return history


@pytest.mark.full(but=["3-True"])
@pytest.mark.parametrize(("workers", "bitwise"), [(1, False), (2, False), (3, False), (3, True)])
def test_it_is_plain_torchs_with_a_smaller_last_batch(tmp_path: Path, workers: int, bitwise: bool) -> None:
    run_group(job_of("mlp", PAIRS, workers=workers, bitwise=bitwise, **KEYS), tmp_path)
    by_hand = plain()
    history = assert_is(tmp_path, by_hand)
    for epoch, end in enumerate((4, 9)):
        assert history[end]["epoch_loss"] == pytest.approx(sum(by_hand[1][5 * epoch : end + 1]) / ROWS)
    data = Pairs(13)
    with torch.no_grad():
        assert history[-1]["eval_loss"] == pytest.approx(summed(by_hand[0](data.inputs), data.targets).item() / 13)
    of_means = plain(lambda outputs, target: summed(outputs, target) / len(target))[0].state_dict()
    apart = [(tensor - of_means[name]).abs().max() for name, tensor in weights_of(tmp_path).items()]
    assert max(apart) > 0.01, "a mean is another training"


def test_its_bits_are_the_same_on_any_workers_however_it_is_said(tmp_path: Path) -> None:
    """Also by an own function, a class, a step and a loop, whose sums torch rounds otherwise, but not gradients."""
    first: dict[str, torch.Tensor] = {}
    losses: dict[str, list[float]] = {}
    of_torch = {"target": "torch.nn:CrossEntropyLoss", "args": {"reduction": "sum"}}
    own: dict[str, Any] = {
        "torch's": {},
        "args": {"loss": of_torch},
        "a function": {"loss": {"target": f"{HERE}:summed", "reduction": "sum"}},
        "a class": {"loss": {"target": f"{HERE}:Summed", "reduction": "sum"}},
        "a step": {"loss": None, "step": {"target": f"{HERE}:step", "reduction": "sum"}},
        "a loop": {"loss": None, "loop": f"{HERE}:loop", "optimizer": None, "eval": None},
    }
    for workers, (what, keys) in zip((1, 2, 3, 1, 2, 3), own.items(), strict=True):
        folder = tmp_path / what
        run_group(job_of("mlp", PAIRS, **{**KEYS, "workers": workers, "bitwise": True, **keys}), folder)
        weights, history = weights_of(folder), history_of(folder)
        first = first or weights
        assert all(torch.equal(tensor, first[name]) for name, tensor in weights.items()), what
        losses[what] = [row["loss"] for row in history]
        assert losses[what] == losses["torch's" if "loss" not in keys or what == "args" else "a function"], what
    assert losses["a function"] == pytest.approx(losses["torch's"], rel=1e-6)
    assert [row["told"] for row in history] == [row["loss"] for row in history]


def test_one_process_and_one_shard_have_the_bits_of_plain_torch(tmp_path: Path) -> None:
    """Clipped: the norm is that of the sum. Each row goes forward once, but those of the evaluations."""
    keys = {**KEYS, "loss": {"target": summed, "reduction": "sum"}, "shards": 1, "grad_clip": 2.0, "eval": None}
    calls: list[int] = []

    class Counting(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            calls.append(len(inputs))
            outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
            return outputs

    def counting() -> nn.Module:
        return Counting(*mlp().children())

    job = {**keys, "model": counting, "dataset": Pairs(ROWS), "task": "train", "shuffle": True, "epochs": 2}
    result = dp_ray.run(**job, workers=0, quiet=True, storage=str(tmp_path))
    model, losses, norms = plain(clip=2.0)
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in model.state_dict().items())
    assert [row["loss"] for row in result.history] == losses
    assert [row["gradient_norm"] for row in result.history] == norms and max(norms) > 2
    assert calls == [10, 10, 10, 10, 5] * 2


def test_the_scale_of_fp16_sees_the_sum(tmp_path: Path) -> None:
    keys = {**KEYS, "shards": 1, "eval": None, "precision": "fp16", "epochs": 1, "task": "train", "shuffle": True}
    result = dp_ray.run(model=mlp, dataset=Pairs(ROWS), **keys, workers=0, quiet=True, storage=str(tmp_path))
    model, scaler = initial(mlp), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.Adam(model.parameters(), **RATES)
    for _, inputs, targets in plain_batches(Pairs(ROWS), 10, 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = summed(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.full(but=["False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
def test_a_sharded_model_trains_by_it(tmp_path: Path, bitwise: bool) -> None:
    job = job_of("mlp", PAIRS, workers=2, strategy="fsdp", bitwise=bitwise, grad_clip=2.0, **KEYS)
    run_group(job, tmp_path)
    assert_is(tmp_path, plain(clip=2.0))


@pytest.mark.slow
def test_a_killed_run_goes_on_on_other_workers_to_the_same_bits(tmp_path: Path) -> None:
    keys = {**KEYS, "bitwise": True, "shards": 4, "checkpoint": {"every_steps": 2}}
    run_group(job_of("mlp", PAIRS, workers=1, **keys), tmp_path / "whole")
    for workers, control in ((3, StopsBefore(3)), (2, StopsBefore(7)), (4, None)):
        run_group(job_of("mlp", PAIRS, workers=workers, **keys), tmp_path / "killed", control)
    whole, killed = (weights_of(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    assert history_of(tmp_path / "killed") == history_of(tmp_path / "whole")


def test_what_a_process_holds_tells_another_that_losses_are_sums() -> None:
    held, other = Held(state={}), Held()
    for number, is_sum in enumerate((True, False)):
        update = Update(torch.tensor([3.0, 2.0, 0.0, 0.0]), 0.1, torch.tensor(1.0), False, is_sum)
        held.rows.append(FinishedStep(number, update, {}, 0.0, 0.0))
    other.take(held.to_send())
    assert [row.update.is_sum for row in other.rows] == [True, False]


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_that_are_set_aside_count_nothing(tmp_path: Path, workers: int) -> None:
    """One row of a batch, and all rows of another, of which no update comes."""
    order = Order(ROWS, 0, 0, shuffle=True)
    bad = [order[at] for at in (0, *range(10, 20))]
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": ROWS, "raises": bad}}
    run_group(job_of("mlp", data, workers=workers, on_error={"quarantine": 20}, **KEYS), tmp_path)
    by_hand = plain(left_out=bad)
    history = assert_is(tmp_path, by_hand)
    assert history[4]["epoch_loss"] == pytest.approx(sum(by_hand[1][:4]) / (ROWS - 11))


def test_sums_and_means_of_a_loop_add_up(tmp_path: Path) -> None:
    keys = {**KEYS, "loss": None, "optimizer": None, "eval": None, "loop": f"{HERE}:loop_of_two"}
    for workers in (1, 2):
        run_group(job_of("mlp", PAIRS, workers=workers, **keys), tmp_path / str(workers))
        model, losses, _ = plain(lambda outputs, target: summed(outputs, target) * (1 + 1 / len(target)))
        weights, history = weights_of(tmp_path / str(workers)), history_of(tmp_path / str(workers))
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-5)
        rows = [10, 10, 10, 10, 5] * 2
        sums = [loss / (1 + 1 / count) for loss, count in zip(losses, rows, strict=True)]
        assert [row["loss"] for row in history] == pytest.approx(sums, rel=1e-5)
        assert [row["ratio"] for row in history] == pytest.approx(rows, rel=1e-5)


def test_a_step_that_runs_again_has_its_sum_and_those_of_its_rows(tmp_path: Path) -> None:
    keys = {**KEYS, "bitwise": True, "epochs": 1, "task": "train", "eval": None}
    losses = {"torchs": SUM, "own": {"target": f"{HERE}:summed", "reduction": "sum"}}
    for name, loss in losses.items():
        job = {**keys, "model": "tests.support.training:mlp", "dataset": PAIRS, "loss": loss, "name": name}
        result = dp_ray.run(**job, workers=0, quiet=True, storage=str(tmp_path))
        found = replayed(Path(result.run_dir), 4)
        assert found.loss == result.history[4]["loss"] and found.compared == "bitwise equal"
        of_rows = [row.loss for row in found.rows if row.loss is not None]
        assert len(of_rows) == 5 and sum(of_rows) == pytest.approx(found.loss)


def test_an_evaluation_gives_the_sum_by_rows(tmp_path: Path) -> None:
    job = job_of(
        "mlp", PAIRS, workers=2, **{**KEYS, "task": "evaluate", "metrics": {"right": "tests.support.training:right"}}
    )
    data, model = Pairs(13), initial(mlp).eval()
    with torch.no_grad():
        outputs = model(data.inputs)
    found = measured(run_group(job.for_task(), tmp_path))
    expected = summed(outputs, data.targets).item() / 13
    assert found["loss"] == pytest.approx(expected)
    assert found["right"] == (outputs.argmax(1) == data.targets).double().mean()


@pytest.mark.parametrize("weight", [None, [0.2, 1.0, 3.0]])
def test_torchs_losses_give_torchs_sums(weight: list[float] | None) -> None:
    outputs, target = torch.randn(7, 3), torch.tensor([0, 1, 2, 2, 1, 0, 1])
    args = {} if weight is None else {"weight": weight}
    given = None if weight is None else torch.tensor(weight)
    module = nn.CrossEntropyLoss(given, ignore_index=1, reduction="sum")
    functions = {
        "module": {"target": "torch.nn:CrossEntropyLoss", "args": {**args, "ignore_index": 1}, "reduction": "sum"},
        "function": {
            "target": "torch.nn.functional:cross_entropy",
            "args": {**args, "ignore_index": 1, "reduction": "sum"},
        },
        "object": module,
        "partial": functools.partial(F.cross_entropy, weight=given, ignore_index=1, reduction="sum"),
    }
    for what, loss in functions.items():
        job = job_of("mlp", loss=loss)
        assert job.loss_is_sum, what
        compare = build_loss(job.loss, torch.device("cpu"))
        parts = [
            Metrics({}, is_sum=True).loss(StepOutput(compare(outputs[cut], target[cut]), compare=compare), rows)
            for cut, rows in ((slice(3), 3), (slice(3, 7), 4))
        ]
        assert sum(part.sum for part in parts) == pytest.approx(module(outputs, target).item()), what
        assert [part.weight for part in parts] == [3, 4]


def test_a_job_without_it_is_the_same_job_as_before() -> None:
    plainly = job_of("mlp")
    assert job_of("mlp", loss={"target": "torch.nn:CrossEntropyLoss", "reduction": "mean"}).fingerprint() == (
        plainly.fingerprint()
    )
    assert job_of("mlp", loss=SUM).fingerprint() != plainly.fingerprint()
    assert "reduction" not in str(plainly.describe())
    over = {"target": "torch.nn:MSELoss", "args": {"reduction": "sum"}, "over": "batch"}
    assert not job_of("mlp", loss=over).loss_is_sum, "torch reduces the whole batch"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"loss": {**SUM, "reduction": "max"}}, r"loss.reduction: .*'mean'.*'sum'"),
    ({"loss": {**SUM, "over": "batch"}}, "loss: reduction: sum is of a loss of each shard; with over: batch"),
    ({"loss": {**SUM, "args": {"reduction": "mean"}}}, "loss: args.reduction is 'mean', and reduction 'sum'"),
    (
        {"loss": {"target": "torch.nn:MSELoss", "args": {"reduction": "sum"}, "reduction": "mean"}},
        "loss: args.reduction is 'sum', and reduction 'mean'",
    ),
    ({"loss": None, "step": {"target": "a:b", "reduction": "all"}}, r"step.reduction: .*'mean'.*'sum'"),
    (
        {"loss": {"target": "a:b", "over": "batch"}, "step": {"target": "a:b", "reduction": "sum"}},
        "step.reduction: is of a step that returns the loss",
    ),
    ({"metrics": {"m": {"target": "a:b", "reduction": "sum"}}}, "metrics.m.reduction"),
    ({"reduction": "sum"}, r"reduction: .*loss.reduction"),
]


@pytest.mark.parametrize(("keys", "says"), BAD)
def test_what_cannot_be_said_is_an_error_by_its_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of("mlp", **keys)


def test_a_class_of_ones_own_that_reduces_by_itself_names_the_key() -> None:
    job = job_of("mlp", loss={"target": f"{HERE}:OfTorch", "args": {"reduction": "sum"}})
    with pytest.raises(JobError, match=r"made with reduction='sum'.*loss: \{target: \.\.\., reduction: sum\}"):
        build_loss(job.loss, torch.device("cpu"))
    job = job_of("mlp", loss={"target": f"{HERE}:OfTorch", "args": {"reduction": "sum"}, "reduction": "sum"})
    assert build_loss(job.loss, torch.device("cpu"))(torch.randn(7, 3), torch.zeros(7).long()) is not None


def test_a_pair_is_an_error_and_one_number_names_the_key(tmp_path: Path) -> None:
    def run(**keys: Any) -> None:
        dp_ray.run(job_of("mlp", PAIRS, **{**KEYS, "storage": str(tmp_path), "workers": 0, **keys}), quiet=True)

    with pytest.raises(ModelError, match=r"the loss returned a pair; with reduction: sum it returns a tensor"):
        run(loss={"target": f"{HERE}:paired", "reduction": "sum"}, name="a")
    with pytest.raises(ModelError, match=r"returned one number for a shard of 4 rows.*set reduction: sum"):
        run(loss=f"{HERE}:summed", name="b")


def test_a_mean_that_is_said_to_be_a_sum_is_told(tmp_path: Path) -> None:
    def notes(name: str, **keys: Any) -> list[str]:
        loss = {"target": f"{HERE}:{name}", "reduction": "sum"}
        job = job_of("mlp", PAIRS, **{**KEYS, "loss": loss, "eval": None, "max_steps": 1, **keys})
        sent = run_group(job, tmp_path / f"{name}{job.num_shards}")
        return [message.text for message in sent if isinstance(message, Note) and message.text.startswith("loss: ")]

    for shards in (1, 3):
        (said,) = notes("averaged", shards=shards)
        assert "no sum over rows, as reduction: sum says" in said and said.endswith("Return a sum, not a mean")
    assert notes("summed") == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"reduction": "max"}, "step.backward: reduction is 'mean' or 'sum', got 'max'"),
        ({"reduction": "sum", "over": summed}, "step.backward: reduction='sum' is of a loss of each shard; `over`"),
    ],
)
def test_a_loops_wrong_call_is_told(tmp_path: Path, call: dict[str, Any], says: str) -> None:
    def train(run: dp_ray.Loop) -> None:
        run.optimizer(torch.optim.Adam(run.model.parameters()))
        for one in run.steps():
            one.backward(lambda batch: step(run.model, batch), run.model, **call)

    job: dict[str, Any] = {"model": mlp(), "dataset": Pairs(8), "batch_size": 4, "loop": train, "workers": 0}
    with pytest.raises(ModelError, match=says):
        dp_ray.run(**job, quiet=True, storage=str(tmp_path))


SOURCES = (("a", 24), ("b", 24))


def by_class(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Three numbers for each row."""
    return (outputs - F.one_hot(target, outputs.shape[1])).square()


@pytest.mark.parametrize("loss", [SUM, {"target": f"{__name__}:by_class", "reduction": "sum"}])
def test_the_loss_of_each_source_is_a_sum_by_rows(tmp_path: Path, loss: Any) -> None:
    """So they are parts of the epoch's, as the rows of the sources are, whatever a loss has for each row."""
    parts = {name: {"target": "tests.support.training:Pairs", "args": {"length": size}} for name, size in SOURCES}
    mix = {"target": "dp_ray.data:Mix", "args": {"sources": parts, "weights": {"a": "1/2", "b": "1/2"}}}
    run_group(job_of("mlp", mix, workers=2, **{**KEYS, "loss": loss, "epochs": 1}), tmp_path)
    for row in history_of(tmp_path):
        of_sources = sum(row[f"loss_of_{name}"] * row[f"rows_of_{name}"] for name, _ in SOURCES)
        assert of_sources == pytest.approx(row["loss"], rel=1e-6)


def test_the_page_draws_sums_apart_from_what_is_by_rows(tmp_path: Path) -> None:
    def drawn(loss: Any) -> dict[str, list[str]]:
        job = job_of("mlp", PAIRS, **{**KEYS, "loss": loss, "storage": str(tmp_path), "workers": 0})
        result = dp_ray.run(job, quiet=True, overwrite=True)
        charts = charts_of(history_so_far(result.storage()), job.describe())
        return {chart.title: [each["name"] for each in chart.series] for chart in charts}

    titles = drawn(SUM)
    assert (titles["Loss"], titles["Loss by rows"]) == (["loss"], ["epoch_loss", "eval_loss"])
    titles = drawn(SUM["target"])
    assert titles["Loss"] == ["loss", "epoch_loss", "eval_loss"] and "Loss by rows" not in titles


def test_a_job_of_python_says_it_beside_its_function(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": mlp, "dataset": Pairs(8), "batch_size": 4, "workers": 0, "quiet": True}
    given |= {"task": "train", "optimizer": {"target": torch.optim.SGD, "args": {"lr": 0.01}}}
    ways: list[tuple[str, Any]] = [
        ("loss", {"target": summed, "reduction": "sum"}),
        ("step", {"target": step, "reduction": "sum"}),
        ("loss", nn.CrossEntropyLoss(reduction="sum")),
    ]
    found = [
        dp_ray.run(**given, **{key: value}, storage=str(tmp_path / str(at))).history[0]["loss"]
        for at, (key, value) in enumerate(ways)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert job_of("mlp", loss=nn.CrossEntropyLoss()).loss_is_sum is False
