"""A step of a loop that runs again: each of its passes has plain torch's losses, and the run's bits."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import dp_ray
from dp_ray.driver.replay import replay
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.replay.replay import StepChoice
from dp_ray.results.replayed import ReplayedLoop, ReplayedPass
from tests.support import drawn_loops, loops
from tests.support.builders import run_dir_of
from tests.support.cli import status_of
from tests.support.group import StopsBefore, history_of, run_group
from tests.support.loops import keys_of

pytestmark = pytest.mark.usefixtures("in_project")

LOOPS = "tests.support.loops"
HERE = "tests.replay.test_replay_of_loops"


def trained(folder: Path, loop: str, *lives: tuple[int, int | None], **keys: Any) -> Path:
    """A run in several lives, without a driver: each on so many workers, and to the step before which all die."""
    job = Job.make(keys_of(loop, **keys), "job")
    run = run_dir_of(folder, job, rows={"dataset": loops.ROWS}).storage
    for workers, dies in lives or ((1, None),):
        control = None if dies is None else StopsBefore(dies)
        run_group(job.model_copy(update={"workers": workers}), run.location, control)
    return Path(run.location)


def here(folder: Path, loop: str, **keys: Any) -> str:
    """A run in this process; its location."""
    return dp_ray.run(**keys_of(loop, **keys), workers=0, storage=str(folder), name="run", quiet=True).location


def again(run: Path | str, step: int, shard: int | None = None) -> ReplayedLoop:
    (found,) = replay(str(run), StepChoice(step, shard), lambda line: None)
    assert isinstance(found, ReplayedLoop)
    return found


def close(found: Any, expected: Any) -> bool:
    return bool(found == pytest.approx(expected, rel=2e-4, abs=1e-6))


def of_rows(losses: torch.Tensor, batch: int) -> dict[int | None, float]:
    """The losses of the rows of a global batch, by their samples; the order is that of the dataset."""
    first = batch % 3 * loops.BATCH
    return {first + at: loss for at, loss in enumerate(losses.tolist())}


def found_rows(one: ReplayedPass) -> dict[int | None, float | None]:
    return {row.sample: row.loss for row in one.rows}


def check_shards(one: ReplayedPass) -> None:
    """The loss of a shard is the mean of its rows', and the largest stand first."""
    assert [row.loss for row in one.rows] == sorted((row.loss or 0.0 for row in one.rows), reverse=True)
    for shard, rows, loss in one.shards:
        own = [row.loss or 0.0 for row in one.rows if row.shard == shard]
        assert len(own) == rows and close(loss, sum(own) / rows)
    assert [shard.loss for shard in one.shards] == sorted((shard.loss or 0.0 for shard in one.shards), reverse=True)


def gan_passes_by_hand(model: Any, batch: Any, updates: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The losses of rows of each pass of a step, as the weights are then."""
    critic, generator, (points, noise) = model.critic, model.generator, batch
    updates["critic"].zero_grad()
    told, made = softplus(-critic(points))[:, 0], softplus(critic(generator(noise).detach()))[:, 0]
    yield told
    yield made
    (told.mean() + made.mean()).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    updates["critic"].step()
    updates["generator"].zero_grad()
    fooled = softplus(-critic(generator(noise)))[:, 0]
    yield fooled
    fooled.mean().backward()  # type: ignore[no-untyped-call]
    updates["generator"].step()


@pytest.mark.full
def test_the_passes_of_a_gan_have_plain_torchs_losses_and_the_runs_bits(tmp_path: Path) -> None:
    """Of a run of two workers, and of three after a kill, replayed on one from its newest checkpoint."""
    keys: dict[str, Any] = {"bitwise": True, "checkpoint": {"every_steps": 2, "keep": 2}}
    run = trained(tmp_path, "gan", (2, 5), (3, None), **keys)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    torch.manual_seed(0)
    model = loops.Gan()
    updates = {"critic": loops.sgd(model.critic), "generator": loops.sgd(model.generator)}
    history = history_of(run)
    for number, batch in enumerate(loops.batches(loops.Points())):
        found = again(run, number)
        assert (found.compared, found.start) == ("bitwise equal", 8 if number == 8 else 0)
        assert {name: values.here for name, values in found.logged.items()} == {
            name: history[number][name] for name in ("critic", "generator", "learning_rate_1", "gradient_norm_1")
        }
        assert [(one.call, one.of, one.place, one.number) for one in found.passes] == [
            ("backward", ("critic",), 0, 0),
            ("backward", ("critic",), 1, 1),
            ("backward", ("generator",), 2, 2),
        ]
        for one, losses in zip(found.passes, gan_passes_by_hand(model, batch, updates), strict=True):
            assert close(found_rows(one), of_rows(losses.detach(), number)), (number, one.place)
            assert close(one.loss, losses.mean().item()) and one.size == len(losses)
            assert one.row_losses == "what the loss returned for each row" and not one.places("pass")
            check_shards(one)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "it writes nothing"


def test_each_call_of_a_closure_is_a_pass(tmp_path: Path) -> None:
    run = trained(tmp_path, "lbfgs", (2, None), bitwise=True, max_steps=2)
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = torch.optim.LBFGS(model.generator.parameters(), lr=0.5, max_iter=4)
    calls: list[torch.Tensor] = []
    for real, noise in list(loops.batches(loops.Points()))[:2]:
        calls.clear()

        def closure(real: torch.Tensor = real, noise: torch.Tensor = noise) -> torch.Tensor:
            optimizer.zero_grad()
            losses = (model.generator(noise) - real).square().mean(1)
            calls.append(losses.detach())
            mean: torch.Tensor = losses.mean()
            mean.backward()  # type: ignore[no-untyped-call]
            return mean

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = again(run, 1)
    assert found.compared == "bitwise equal" and len(calls) > 2
    assert [(one.place, one.number) for one in found.passes] == [(place, 0) for place in range(len(calls))]
    for one, losses in zip(found.passes, calls, strict=True):
        assert found_rows(one) == pytest.approx(of_rows(losses, 1), rel=1e-3, abs=1e-5)
        check_shards(one)
    told = list(found.lines())
    assert sum(line.startswith("pass ") for line in told) == len(calls)
    assert sum("largest loss first" in line for line in told) == 1, "those called again are told in short"


def test_a_loss_over_the_batch_gives_rows_the_norms_of_their_gradients(tmp_path: Path) -> None:
    run = trained(tmp_path, "contrastive", (2, None), bitwise=True)
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = loops.sgd(model)
    for number, (real, noise) in enumerate(loops.batches(loops.Points())):
        optimizer.zero_grad()
        made = model(noise)
        outputs = made.detach().requires_grad_()
        of_batch = loops.spread(outputs, real)
        (slope,) = torch.autograd.grad(of_batch, outputs)
        if number == 4:
            break
        ((made - real).square().mean() + loops.spread(made, real)).backward()
        optimizer.step()
    found = again(run, 4)
    plain, over = found.passes
    assert found.compared == "bitwise equal"
    assert close(found_rows(plain), of_rows((made - real).square().mean(1), 4))
    assert close({row.sample: row.gradient for row in over.rows}, of_rows(slope.norm(dim=1), 4))
    assert close(over.loss, of_batch.item()) and {row.loss for row in over.rows} == {over.rows[0].loss}
    assert [shard.loss for shard in over.shards] == [None] * 3
    assert over.row_losses.startswith("the norm of the gradient that the loss of the whole batch gives")


def test_rows_that_are_set_aside_are_none(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": f"{LOOPS}:Broken", "on_error": {"quarantine": 3}, "bitwise": True}
    run = here(tmp_path, "gan", **keys)
    for step in (0, 4):
        found = again(run, step)
        assert found.compared == "bitwise equal"
        samples = set(range(step % 3 * loops.BATCH, step % 3 * loops.BATCH + loops.BATCH)) - set(loops.BROKEN)
        for one in found.passes:
            assert {row.sample for row in one.rows} == samples
            assert sum(shard.rows for shard in one.shards) == len(samples) == one.size


def test_a_step_without_rows_says_so(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": f"{LOOPS}:Broken", "on_error": {"quarantine": 3}, "skip": [2]}
    found = again(here(tmp_path, "gan", batch_size=2, shards=2, max_steps=2, **keys), 1)
    assert found.compared == "bitwise equal" and math.isnan(found.loss or 0.0)
    assert [(one.size, one.rows, one.shards) for one in found.passes] == [(0, (), ())] * 3
    assert list(found.lines()).count("no rows: all were skipped or set aside") == 3


@pytest.mark.full
def test_what_a_loop_gathers_and_cuts_itself_has_positions_and_no_samples(tmp_path: Path) -> None:
    """Its own state, a count of what was played, is that of the checkpoint."""
    keys: dict[str, Any] = {"model": f"{LOOPS}:Policy", "dataset": f"{LOOPS}:Rows", "bitwise": True}
    run = trained(tmp_path, "ppo", (2, 4), (3, None), checkpoint={"every_steps": 3, "keep": 9}, **keys)
    for step, row in enumerate(history_of(run)):
        found = again(run, step)
        assert found.compared == "bitwise equal" and found.start == step // 3 * 3
        assert found.logged["won"] == (row["won"], row["won"]) and found.logged["played"].here == row["played"]
        gather, *passes = found.passes
        assert (gather.call, gather.function, gather.of, gather.loss) == ("gather", "ppo.play", (), None)
        assert [one.number for one in passes] == [1, 2, 3, 4]
        for one in passes:
            assert one.has_own_batch and sorted(row.position for row in one.rows) == list(range(one.size))
            assert {row.sample for row in one.rows} == {None} and one.size == row["rows"]
            check_shards(one)
    assert passes[0].loss == found.loss


def weighted(run: Any) -> None:
    """A loss that is the sum and the weight of a shard."""
    update = run.optimizer(loops.sgd(run.model.generator))

    def loss(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = (batch[1][:, 0] > 0).float() + 0.25
        return ((run.model(batch[1]) - batch[0]).square().mean(1) * weight).sum(), weight.sum()

    for step in run.steps():
        step.backward(loss, run.model.generator)
        update.step()


def test_a_sum_and_a_weight_give_the_losses_of_shards_alone(tmp_path: Path) -> None:
    run = here(tmp_path, f"{HERE}:weighted", bitwise=True)
    (one,) = again(run, 0).passes
    torch.manual_seed(0)
    model, points = loops.Gan(), loops.Points()
    for at, (start, stop) in enumerate([(0, 4), (4, 8), (8, 10)]):
        weight = (points.noise[start:stop, 0] > 0).float() + 0.25
        losses = (model(points.noise[start:stop]) - points.real[start:stop]).square().mean(1)
        (shard,) = (shard for shard in one.shards if shard.shard == at)
        assert close(shard.loss, ((losses * weight).sum() / weight.sum()).item())
    assert one.row_losses == "not known: the function returns the sum and weight of a shard"
    assert {row.loss for row in one.rows} == {None} and len(one.rows) == 10


PASS, OVER = {"do": "pass", "loss": "left"}, {"do": "pass", "loss": "left", "of": ["trunk", "left"], "over": True}
UPDATE = {"do": "update", "of": "all", "clip": 0.5}
PLANS = {
    "held gradients": [
        {**PASS, "of": ["trunk"]},
        {"do": "hold"},
        {**PASS, "loss": "right", "of": ["trunk", "right"]},
        {"do": "add"},
        UPDATE,
    ],
    "added, weighted and own": [
        {**PASS, "loss": "both", "of": ["trunk", "left"], "weighted": True},
        {"do": "gather"},
        {**PASS, "of": ["trunk"], "rows": 17},
        OVER,
        UPDATE,
        {**OVER, "rows": 2},
        {"do": "update", "of": "heads", "clip": None},
    ],
    "a table with sparse gradients": [{**PASS, "loss": "table", "of": ["left", "table"]}, UPDATE],
}


@pytest.mark.full(but=["held gradients"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_look_at_the_passes_changes_none_of_the_runs_numbers(tmp_path: Path, plan: drawn_loops.Plan) -> None:
    """Gradients that the loop holds, and what a pass adds to, are there after it."""
    loop = {"target": "tests.support.drawn_loops:planned", "args": {"plan": plan}}
    keys = {**keys_of("gan"), "loop": loop, "model": "tests.support.drawn_loops:Parts", "bitwise": True}
    run = dp_ray.run(**keys, workers=0, storage=str(tmp_path), name="run", quiet=True)
    for step in (0, 4):
        found = again(run.location, step)
        assert found.compared == "bitwise equal"
        assert [(name, values.here) for name, values in found.logged.items()] == [
            (name, values.history) for name, values in found.logged.items()
        ]
        assert len(found.passes) == sum(do["do"] in ("pass", "gather") for do in plan)


class Writes(loops.Gan):
    """A GAN whose forwards write statistics, draw numbers, and write a large buffer that no stamp shows."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.register_buffer("bank", torch.ones(70_000))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points."""
        self.bank.data.mul_(0.9)
        made: torch.Tensor = self.generator(noise) * self.bank[:2]
        return made


def makes(run: Any) -> None:
    """Two passes and two updates by what forwards write, and a number that the body draws."""
    update = run.optimizer(loops.sgd(run.model.generator))
    for step in run.steps():
        for _ in range(2):
            loss = step.backward(lambda batch: (run.model(batch[1]) - batch[0]).square().sum(1), run.model.generator)
            update.step()
        step.log(second=loss, bank=run.model.bank[0], drawn=torch.rand(()))


def test_what_forwards_write_and_draw_is_as_in_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path, f"{HERE}:makes", (2, None), bitwise=True, model=f"{HERE}:Writes", batch_size=12)
    for step in (0, 1, 5):
        found = again(run, step)
        assert found.compared == "bitwise equal" and len(found.logged) == 3
        assert all(number.here == number.history for number in found.logged.values())
        for one in found.passes:
            check_shards(one)
            assert sum(row.loss or 0.0 for row in one.rows) / one.size == pytest.approx(one.loss, rel=1e-6)


class Spoilt(loops.Points):
    """Points of which the noise of one is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.noise[12, 1] = math.nan


class Rooted(loops.Gan):
    """A GAN whose critic has finite outputs, of which the gradient is not: that of a root at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 1), Root())


class Root(nn.Module):
    """The root of nothing."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return (inputs * 0).sqrt()


def test_the_pass_the_shard_and_the_row_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """The first pass does not see the noise, and of the second only the generator's output."""
    run = here(tmp_path, "gan", dataset=f"{HERE}:Spoilt", bitwise=True)
    found = again(run, 1)
    assert found.compared == "bitwise equal" and found.loss is not None and math.isfinite(found.loss)
    first, second, third = found.passes
    assert list(first.places("pass")) == ["batch"] and first.batch == "[1] holds nan, in shard 0"
    for one in (second, third):
        assert one.output is not None and one.output["text"] == "output of generator.0 (Linear), in shard 0"
        spoilt = {row.sample for row in one.rows if math.isnan(row.loss or 0.0)}
        assert spoilt == ({12} if one is second else set(range(10, 20)))
        assert math.isnan(one.rows[0].loss or 0.0) and math.isnan(one.shards[0].loss or 0.0)
    assert third.weights == "critic.0.weight", "the critic was updated by the second pass"
    assert "not finite, first in pass 0" in list(found.lines())

    rooted = again(here(tmp_path / "rooted", "gan", model=f"{HERE}:Rooted"), 0).passes[0]
    assert rooted.output is None and rooted.gradient is not None
    assert rooted.gradient["text"] == "gradient of the output of critic.0 (Linear), in shard 0"


def test_only_a_shard(tmp_path: Path) -> None:
    run = here(tmp_path, "gan", bitwise=True)
    whole, found = again(run, 4), again(run, 4, shard=1)
    assert found.compared == "bitwise equal", "a later pass depends on all shards of the one before"
    for one, every in zip(found.passes, whole.passes, strict=True):
        assert one.loss == every.loss
        assert one.rows == tuple(row for row in every.rows if row.shard == 1) and len(one.rows) == 4
        assert one.shards == tuple(shard for shard in every.shards if shard.shard == 1)
    with pytest.raises(JobError, match="--shard 3: step 4 has 3 shards, counted from 0"):
        again(run, 4, shard=3)
    with pytest.raises(JobError, match="--step 9: the training has 9 steps, counted from 0"):
        again(run, 9)


def raises_in_step_2(run: Any) -> None:
    """Raise in the second pass of a step."""
    update = run.optimizer(loops.sgd(run.model.generator))

    def loss(batch: Any) -> torch.Tensor:
        rows: torch.Tensor = (run.model(batch[1]) - batch[0]).square().mean(1)
        return rows

    for step in run.steps():
        step.backward(loss, run.model.generator)
        divisor = "x" if step.number == 2 else "1"
        step.backward(lambda batch, divisor=divisor: loss(batch) / int(divisor), run.model.generator)
        update.step()


def leaves(run: Any) -> None:
    """Stop after a step, and leave it."""
    update = run.optimizer(loops.sgd(run.model.critic))
    for step in run.steps():
        step.backward(lambda batch: run.model.critic(batch[0])[:, 0], run.model.critic)
        update.step()
        if step.number == 1:
            run.stop("enough")
            break


def test_a_step_that_was_not_reached_and_one_that_raised(tmp_path: Path) -> None:
    for loop in (f"{LOOPS}:stops_itself", f"{HERE}:leaves"):
        run = here(tmp_path / loop.partition(":")[2], loop)
        assert again(run, 1).compared != "differs"
        with pytest.raises(JobError, match=r"^--step 3: the loop stops after step 1: enough$"):
            again(run, 3)
    with pytest.raises(ModelError, match=r"step 2, shard 0.*invalid literal"):
        here(tmp_path, f"{HERE}:raises_in_step_2")
    with pytest.raises(ModelError, match=r"step 2, shard 0.*invalid literal"):
        again(tmp_path / "run", 2)
    assert again(tmp_path / "run", 1).compared != "differs"


def test_a_step_that_a_killed_run_has_not_reached_is_run_without_a_comparison(tmp_path: Path) -> None:
    run = trained(tmp_path, "gan", (2, 5), bitwise=True, checkpoint={"every_steps": 2})
    found = again(run, 7)
    assert (found.compared, found.start, len(found.passes)) == ("not compared", 4, 3)
    assert {values.history for values in found.logged.values()} == {None}


def test_a_loop_that_was_given_as_a_function_cannot_be_found_again(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**keys_of("gan"), "loop": lambda run: loops.gan(run), "max_steps": 1}
    run = dp_ray.run(**keys, workers=0, storage=str(tmp_path), name="run", quiet=True)
    with pytest.raises(JobError, match="loop was given as a Python object"):
        again(run.location, 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = here(tmp_path, "gan", dataset=f"{HERE}:Spoilt", bitwise=True)
    capsys.readouterr()
    assert status_of(monkeypatch, "replay", run, "--step", "1", "--json") == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (told["compared"], told["logged"]["critic"]["here"], len(told["passes"])) == ("bitwise equal", "nan", 3)
    one = told["passes"][1]
    assert one["rows"][0] == {"loss": "nan", "sample": 12, "shard": 0, "position": 12}
    assert one["shards"][0] == {"shard": 0, "rows": 4, "loss": "nan"}
    assert (one["place"], one["call"], one["of"], one["size"]) == (1, "backward", ["critic"], 10)
    assert status_of(monkeypatch, "replay", run, "--step", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80, "but for the first, which names the folder"
    assert lines[1].endswith("in the history: bitwise equal")
    assert "pass 2: step.backward(gan.<lambda>, generator)" in lines


def test_the_debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops in the pass that is to be looked at, with the weights that it had."""
    answers: list[str] = []
    monkeypatch.setattr("builtins.input", lambda _: answers.pop(0))
    run = here(tmp_path, "gan", dataset=f"{HERE}:Spoilt", bitwise=True)
    answers[:] = ["p 'in ' + type(self).__name__, input.isnan().sum().item(), self.weight.isnan().any().item()", "q"]
    assert status_of(monkeypatch, "replay", run, "--step", "1", "--pdb") == 0
    out, err = capsys.readouterr()
    assert "('in Linear', 1, False)" in err and "once more, up to pass 1: step.backward(gan.<lambda>, critic)" in err
    assert "pass 2: " in out
    answers[:] = ["p 'rows', len(batch[0])", "c"]
    assert status_of(monkeypatch, "replay", run, "--step", "0", "--pdb") == 0
    assert "('rows', 4)" in capsys.readouterr().err, "in the function of the first pass"
    with pytest.raises(ModelError, match="invalid literal"):
        here(tmp_path / "raises", f"{HERE}:raises_in_step_2")
    answers[:] = ["p 'divisor', divisor", "q"]
    assert status_of(monkeypatch, "replay", str(tmp_path / "raises" / "run"), "--step", "2", "--pdb") == 1
    assert not answers and "('divisor', 'x')" in capsys.readouterr().err
