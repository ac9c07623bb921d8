"""Several optimizers in a declared job: each parameter has one, and a step updates by all or by none of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import dp_ray
from dp_ray.driver.checks import check_targets
from dp_ray.driver.planning import plan_job, plan_memory_of
from dp_ray.driver.replay import replay
from dp_ray.driver.run import Options
from dp_ray.driver.verify import verify
from dp_ray.engine.optimizer import build_optimizers
from dp_ray.errors import JobError
from dp_ray.job.files import differences, dotted
from dp_ray.job.files import job_of as job_set
from dp_ray.job.job import Job
from dp_ray.replay.replay import StepChoice
from dp_ray.report.charts import charts_of
from dp_ray.tasks.checkpoints import check_updates, updates_of
from tests.rundir.test_resume import ended_by, mortal
from tests.support import training
from tests.support.builders import optimizer_step_of
from tests.support.cli import status_of
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.sweeps import written
from tests.support.trainings import assert_close, initial, job_of, keys_of, mean_loss

CLIP = 0.3
ADAM: dict[str, Any] = {"lr": 0.01, "eps": 0.01}  # whose updates do not magnify rounding
SGD_AND_ADAM: list[Any] = [
    {
        "match": r"^0\.",
        "target": "torch.optim:SGD",
        "args": {"lr": 0.1, "momentum": 0.9},
        "groups": [{"match": "bias$", "args": {"lr": 0.02}}],
    },
    {"target": "torch.optim:Adam", "args": ADAM},
]
MUON_AND_ADAMW: list[Any] = [
    {"match": "weight$", "target": "torch.optim:Muon", "args": {"lr": 0.02}},
    {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
]
HALVING: dict[str, Any] = {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3, "gamma": 0.5}}
FSDP = {"strategy": "fsdp", "fsdp": {"blocks": ["Linear"]}}


class Both:
    """The optimizers of a plain loop, and what it steps after them."""

    def __init__(self, *each: Any) -> None:
        self.each = each

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()


def sgd_and_adam(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    groups: list[Any] = [{"params": [named["0.bias"]], "lr": 0.02}, {"params": [named["0.weight"]]}]
    return torch.optim.SGD(groups, 0.1, 0.9), torch.optim.Adam([named["3.weight"], named["3.bias"]], **ADAM)


def muon_and_adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    muon = torch.optim.Muon([named["0.weight"], named["3.weight"]], 0.02)
    return muon, torch.optim.AdamW([named["0.bias"], named["3.bias"]], 0.01)


def equal(first: Path, second: Path) -> bool:
    """Whether two trainings have the bits of weights and history."""
    weights, others = weights_of(first), weights_of(second)
    return all(torch.equal(weights[name], others[name]) for name in weights) and (
        repr(history_of(first)) == repr(history_of(second))
    )


@pytest.mark.parametrize(
    "keys",
    [{"workers": 1}, {"workers": 3, "shards": 4}, {"workers": 2, **FSDP}, {"workers": 2, **FSDP, "bitwise": True}],
)
def test_a_job_with_two_is_a_plain_loop_with_both(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = job_of("mlp", optimizer=SGD_AND_ADAM, scheduler=HALVING, grad_clip=CLIP, epochs=1, **keys)
    run_group(job, tmp_path)
    model = initial(training.mlp)
    both = sgd_and_adam(model)
    schedules = [StepLR(optimizer, 3, 0.5) for optimizer in both]
    norms: list[float] = []
    rates: list[tuple[float, float]] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        rates.append((both[0].param_groups[0]["lr"], both[1].param_groups[0]["lr"]))

    def step() -> None:
        for schedule in schedules:
            schedule.step()

    plain: Any = Both(*both)
    losses = training.plain_loop(
        model, training.Pairs(), 7, 1, mean_loss, plain, after_backward=clip, after_step=step
    )
    assert_close(tmp_path, model, losses, 1e-5)
    history = history_of(tmp_path)
    assert [row["gradient_norm"] for row in history] == pytest.approx(norms, rel=1e-4)
    assert [(row["learning_rate"], row["learning_rate_1"]) for row in history] == rates
    assert "gradient_norm_1" not in history[0]


def test_muon_beside_adamw_has_the_bits_of_one_worker_on_any_number_also_resumed(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer": MUON_AND_ADAMW, "shards": 3, "bitwise": True, "grad_clip": 1.0}
    keys |= {"scheduler": {"warmup": 2, "shape": "cosine"}, "checkpoint": {"every_steps": 2, "keep": 9}}
    for workers in (1, 2, 3):
        run_group(job_of("mlp", **keys, workers=workers), tmp_path / str(workers))
        assert equal(tmp_path / "1", tmp_path / str(workers)), workers
    given = {**keys, "shuffle": True, "batch_size": 7, "epochs": 2, "storage": str(tmp_path), "name": "here"}
    here = dp_ray.run(**keys_of(**given))
    assert all(torch.equal(weights_of(tmp_path / "1")[name], value) for name, value in here.weights.items())
    model = initial(training.mlp)
    both = muon_and_adamw(model)
    plain: Any = Both(*both)
    # The rates are those of the history, which `test_schedule_lengths` compares with torch's.
    rates = iter([(row["learning_rate"], row["learning_rate_1"]) for row in history_of(tmp_path / "1")])

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(both, next(rates), strict=True):
            optimizer.param_groups[0]["lr"] = rate

    losses = training.plain_loop(model, training.Pairs(), 7, 2, mean_loss, plain, after_backward=clip)
    assert_close(tmp_path / "1", model, losses, 2e-2)  # Muon rounds to bf16


@pytest.mark.slow
def test_a_training_by_both_that_is_killed_goes_on_among_other_workers(tmp_path: Path) -> None:
    both = [{"match": r"\.4\.weight$", "target": "torch.optim:Muon", "args": {"lr": 0.02}}, MUON_AND_ADAMW[1]]
    run_group(mortal(tmp_path, 2, optimizer=both), tmp_path / "whole")
    for workers, dies in ((3, "11"), (1, "33")):
        (tmp_path / "dies").write_text(dies)
        ended_by(mortal(tmp_path, workers, optimizer=both), tmp_path / "killed")
        assert not (tmp_path / "killed" / "weights.safetensors").exists()
    (tmp_path / "dies").unlink()
    assert any((tmp_path / "killed" / "checkpoints").iterdir())
    run_group(mortal(tmp_path, 5, optimizer=both), tmp_path / "killed")
    assert equal(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("keys", [{}, {"precision": "bf16"}])
def test_two_of_a_kind_are_one_of_it(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Also if they switch the weights to evaluate, as schedule-free ones do: each does."""
    one = {"target": "tests.support.schedule_free:ScheduleFree", "args": {"lr": 2.0}}
    evaluates = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4}
    common: dict[str, Any] = {
        "eval": evaluates,
        "workers": 2,
        "shards": 3,
        "bitwise": True,
        "grad_clip": CLIP,
        **keys,
    }
    run_group(job_of("mlp", optimizer=one, **common), tmp_path / "one")
    run_group(job_of("mlp", optimizer=[{"match": "bias", **one}, one], **common), tmp_path / "two")
    weights, others = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    history = [
        {name: value for name, value in row.items() if name != "learning_rate_1"}
        for row in history_of(tmp_path / "two")
    ]
    assert repr(history) == repr(history_of(tmp_path / "one"))
    assert any(row["eval_loss"] is not None for row in history)


def test_under_fp16_all_skip_where_the_gradient_of_one_overflows() -> None:
    model: Any = training.mlp()
    step = optimizer_step_of(job_of("mlp", optimizer=SGD_AND_ADAM, precision="fp16"), model)
    assert step.scaler is not None
    for number, is_finite in enumerate((False, True)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step.gradients.of_loss(torch.ones(()), 1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[3].bias.grad[0] = 1.0 if is_finite else torch.inf
        step.apply(1, 1, number)
        assert step.has_skipped is not is_finite
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert moved == [is_finite] * 4


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_not_elementwise_is_refused_under_fsdp(tmp_path: Path, is_told: bool) -> None:
    adafactor: Any = {"match": "weight", "target": "torch.optim:Adafactor"}
    muon = MUON_AND_ADAMW[0] if is_told else {"match": "weight", "target": f"{__name__}:muon"}
    exact, parts = "may use all of a parameter to update a part of it", "cannot update the parts of parameters"
    for number, (first, name) in enumerate([(muon, "Muon"), (adafactor, "Adafactor")]):
        for bitwise, says in ((True, exact), (False, parts)) if is_told or name != "Muon" else ((False, parts),):
            job = job_of("mlp", optimizer=[first, MUON_AND_ADAMW[1]], workers=2, bitwise=bitwise, **FSDP)
            with pytest.raises(ProcessExit, match=rf"JobError: optimizer\.0: {name} {says}"):
                run_group(job, tmp_path / f"{number}-{bitwise}")


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, 0.02)


def test_each_may_have_a_scheduler_of_its_own_which_is_planned_anew_for_a_longer_training(tmp_path: Path) -> None:
    cosine = {"target": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": "auto"}}
    muon, adamw = MUON_AND_ADAMW
    both = [{**muon, "scheduler": {**cosine, "per": "epoch"}}, adamw]
    job = job_of("mlp", optimizer=both, workers=2)
    run_group(job.model_copy(update={"epochs": 2}), tmp_path / "on")
    run_group(job.model_copy(update={"epochs": 4}), tmp_path / "on")
    run_group(job.model_copy(update={"epochs": 4}), tmp_path / "whole")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.02)
    schedule, rates = CosineAnnealingLR(optimizer, 4), []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for folder, epochs in (("whole", range(4)), ("on", range(2, 4))):
        rows = [row for row in history_of(tmp_path / folder) if row["epoch"] in epochs]
        assert [row["learning_rate"] for row in rows] == pytest.approx([rates[row["epoch"]] for row in rows])
        assert {row["learning_rate_1"] for row in rows} == {0.01}
    with pytest.raises(JobError, match=r"optimizer\.0\.scheduler: this OneCycleLR lasts for 3 steps from here"):
        plan_job(job_of("mlp", optimizer=[{**muon, "scheduler": one_cycle()}, adamw]))
    milestones = {"target": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 3}}
    remarks = plan_job(job_of("mlp", optimizer=[{**muon, "scheduler": milestones}, adamw])).remarks
    assert any(line.startswith("optimizer.0.scheduler: CosineAnnealingLR has T_max 3") for line in remarks)


def one_cycle() -> dict[str, Any]:
    return {"target": "torch.optim.lr_scheduler:OneCycleLR", "args": {"max_lr": 0.1, "total_steps": 3}}


def built(optimizer: Any, **keys: Any) -> list[torch.optim.Optimizer]:
    job = job_of("mlp", optimizer=optimizer, **keys)
    check_targets(job)
    return build_optimizers(job.optimizers, training.mlp())


PLATEAU = {"target": "torch.optim.lr_scheduler:ReduceLROnPlateau"}


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ([], "optimizer: is an empty list; give one optimizer or more"),
        ([{"match": "weight", **MUON_AND_ADAMW[1]}], r"optimizer: no match finds 0\.bias, 3\.bias, so nothing would"),
        (
            [{**MUON_AND_ADAMW[1], "match": "wieght"}, MUON_AND_ADAMW[1]],
            r"optimizer\.0: gets no trainable parameter: 'wieght' matches none that is left; there are 0\.weight",
        ),
        (
            [{**MUON_AND_ADAMW[1], "match": "."}, MUON_AND_ADAMW[1]],
            r"optimizer\.1: gets no trainable parameter: all belong to those before it",
        ),
        (
            [MUON_AND_ADAMW[0], {**MUON_AND_ADAMW[1], "groups": [{"match": "weight", "args": {"lr": 1.0}}]}],
            r"optimizer\.1\.groups: 'weight' matches no trainable parameter that is left; there are 0\.bias, 3\.bias",
        ),
        (MUON_AND_ADAMW[::-1], r"optimizer\.0\.match: is missing, so no parameter is left to those that follow"),
        (
            [{**MUON_AND_ADAMW[0], "match": "("}, MUON_AND_ADAMW[1]],
            r"optimizer\.0\.match: must be a regular expression, got",
        ),
        (
            [{**MUON_AND_ADAMW[0], "match": "^0"}, MUON_AND_ADAMW[1]],
            r"optimizer\.0: Muon takes matrices alone, which are not: 0\.bias \[16\]; let optimizer\.0\.match find "
            "matrices alone, and give the rest to another optimizer",
        ),
        (
            "torch.optim:Muon",
            r"optimizer: Muon takes matrices alone, which are not: 0\.bias \[16\], .* make optimizer a list",
        ),
        (
            [MUON_AND_ADAMW[0], "torch.optim:LBFGS"],
            r"optimizer\.1: LBFGS computes the loss several times in a step, by a closure",
        ),
        ([MUON_AND_ADAMW[0], "torch.nn:Linear"], r"optimizer\.1: must give a torch\.optim\.Optimizer"),
        (
            [MUON_AND_ADAMW[0], {"target": "torch.optim:Adam", "args": {"l": 1}}],
            r"optimizer\.1\.args: .* takes no 'l'",
        ),
        (
            [MUON_AND_ADAMW[0], {"target": "torch.optim:Adam", "lr": 1}],
            r"optimizer\.1\.lr: .* optimizer\.1\.args\.lr",
        ),
        ([None], r"optimizer\.0: must be a target"),
        (
            [torch.optim.SGD([torch.ones(1)], 0.1), "torch.optim:Adam"],
            r"optimizer\.0: must be a target, or a class or function of its parameters, .* got a SGD",
        ),
        ({"match": "weight", **MUON_AND_ADAMW[1]}, r"optimizer\.match: is no key of a job; here it is .* a list of"),
        (
            [{**MUON_AND_ADAMW[0], "scheduler": PLATEAU}, MUON_AND_ADAMW[1]],
            r"optimizer\.0\.scheduler\.per: a ReduceLROnPlateau watches a metric of each epoch",
        ),
        (
            [
                {**MUON_AND_ADAMW[0], "scheduler": {**PLATEAU, "per": "epoch", "metric": "eval_loss"}},
                *SGD_AND_ADAM[1:],
            ],
            r"optimizer\.0\.scheduler\.metric: must be loss or one that eval measures",
        ),
    ],
)
def test_what_is_wrong_with_a_list_is_told_by_its_key(optimizer: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        built(optimizer)


def test_other_keys_that_a_list_contradicts_are_told() -> None:
    own = [{**MUON_AND_ADAMW[0], "scheduler": HALVING}, MUON_AND_ADAMW[1]]
    with pytest.raises(JobError, match=r"scheduler: optimizer\.0\.scheduler is set too; set one for all optimizers"):
        built(own, scheduler=HALVING)
    with pytest.raises(JobError, match=r"metrics\.learning_rate_1: is a column of the history"):
        built(MUON_AND_ADAMW, metrics={"learning_rate_1": "tests.support.training:right"})
    built(MUON_AND_ADAMW[1], metrics={"learning_rate_1": "tests.support.training:right"})  # as in 0.2
    with pytest.raises(JobError, match="scheduler: is a list; give one, which each optimizer gets for itself"):
        built(MUON_AND_ADAMW, scheduler=[HALVING])


def values_of(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in keys_of(**keys).items() if key != "quiet"}


def test_an_entry_is_set_and_shown_by_its_number() -> None:
    values = values_of(optimizer=[*MUON_AND_ADAMW[:1], "torch.optim:AdamW"])
    job = job_set(dict(values), {"optimizer.0.args.lr": 0.5, "optimizer.1.args.weight_decay": 0.0}, "job")
    assert values["optimizer"][0]["args"] == {"lr": 0.02}, "the caller's own are as they were"
    (_, muon), (_, adamw) = job.optimizers
    assert (muon.args, adamw.label, adamw.args) == ({"lr": 0.5}, "torch.optim:AdamW", {"weight_decay": 0.0})
    there, here = (made.describe() for made in (Job.make(values, "job"), job))
    assert list(differences(there, here)) == [
        "optimizer.0.args.lr: 0.02 there, 0.5 here",
        "optimizer.1.args.weight_decay: not set there, 0.0 here",
    ]
    assert dict(dotted(here))["optimizer.0.args.lr"] == 0.5
    assert Job.make(here, "job").fingerprint() == job.fingerprint() != Job.make(values, "job").fingerprint()
    for key in ("optimizer.2.args.lr", "optimizer.args.lr"):
        with pytest.raises(JobError, match=rf"{key}: optimizer is a list of 2; name an item by its number, from 0"):
            job_set(dict(values), {key: 0.5}, "job")


def test_another_runs_checkpoint_goes_on_with_the_same_optimizers_and_with_other_schedules() -> None:
    def made(number: int, gamma: float | None = None) -> Job:
        schedule = {} if gamma is None else {"scheduler": {**HALVING, "args": {"step_size": 3, "gamma": gamma}}}
        return job_of("mlp", optimizer=[{**MUON_AND_ADAMW[0], **schedule}, *MUON_AND_ADAMW[1:]][:number])

    there = updates_of(made(2, 0.5))
    says = check_updates("init_from: x", there, made(2, 0.1), "start anew")
    assert says is not None and "optimizer.0.scheduler.args.gamma: 0.5 there, 0.1 here" in says
    for other in (made(2), made(1, 0.5), job_of("mlp")):
        with pytest.raises(
            JobError, match="init_from: x goes on with the optimizer and scheduler that it was trained"
        ):
            check_updates("init_from: x", there, other, "start anew")


def test_plan_verify_replay_the_report_and_a_sweep_take_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    own = [{**MUON_AND_ADAMW[0], "scheduler": HALVING}, MUON_AND_ADAMW[1]]
    keys = keys_of(
        optimizer=own, bitwise=True, shards=2, storage=str(tmp_path), name="r", checkpoint={"every_steps": 3}
    )
    del keys["quiet"]
    job = Job.make(keys, "job")
    memory = plan_memory_of(job, None)
    floats = 2 * (6 * 16 + 16 * 3) + 2 * (16 + 3)  # Muon keeps one for each number of a matrix, AdamW two of the rest
    (device,) = memory.workers[0].devices
    assert 4 * (floats - 6 * 16 - 16 * 3) <= device.optimizer <= 4 * floats
    verdict = verify(job, [0], Options(overwrite=True, quiet=True), resumed=True)
    assert verdict.same
    result = dp_ray.run(**keys, quiet=True)
    for found in replay(result.run_dir, StepChoice(5), lambda line: None):
        assert found.compared == "bitwise equal"
    history = pa.table({name: [row[name] for row in result.history] for name in result.history[0]})
    rates = [chart for chart in charts_of(history, {}) if chart.title == "Learning rate"]
    assert [[each["name"] for each in chart.series] for chart in rates] == [["learning_rate", "learning_rate_1"]]
    file = written(tmp_path, **{**keys, "name": None, "storage": str(tmp_path / "sweep")})
    assert status_of(monkeypatch, "sweep", file, "--over", "optimizer.0.args.lr=0.02,0.2") == 0
    for number, lr in ((1, 0.02), (2, 0.2)):
        assert dp_ray.load(str(tmp_path / "sweep" / f"job-sweep-{number}")).history[0]["learning_rate"] == lr


def test_hooks_see_the_rates_of_all(tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    def note(view: Any) -> None:
        seen.append((view.learning_rate, view.metrics["learning_rate_1"]))

    dp_ray.run(
        **keys_of(optimizer=MUON_AND_ADAMW, storage=str(tmp_path), name="r", hooks={"on_step": note}, max_steps=2)
    )
    assert seen == [(0.02, 0.01)] * 2


def test_a_stop_before_a_step_keeps_both_states(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer": SGD_AND_ADAM, "scheduler": HALVING, "shards": 3, "bitwise": True}
    keys["checkpoint"] = {"every_steps": 3}
    run_group(job_of("mlp", **keys, workers=1), tmp_path / "whole")
    run_group(job_of("mlp", **keys, workers=3), tmp_path / "on", StopsBefore(7))
    run_group(job_of("mlp", **keys, workers=2), tmp_path / "on")
    assert equal(tmp_path / "whole", tmp_path / "on")
