"""A training whose loop is the user's, against the same loop in plain torch on whole batches."""

import copy
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dp_ray
from dp_ray.driver.planning import plan_memory_of
from dp_ray.driver.run import Options
from dp_ray.driver.verify import verify
from dp_ray.engine.clock import StepClock
from dp_ray.engine.world import own_rank
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.messages import StepControl, StoppedEarly
from dp_ray.system.threads import last_call
from dp_ray.tasks.own_loop import PlainState
from tests.support import loops
from tests.support.cluster import Run
from tests.support.group import (
    ProcessExit,
    Stopped,
    StopsBefore,
    StopsBeforeItsWeights,
    history_of,
    run_group,
    weights_of,
)
from tests.support.loops import keys_of

LOOPS = "tests.support.loops"


def loop_job(loop: str, workers: int, **keys: Any) -> Job:
    return Job.make({**keys_of(loop, **keys), "workers": workers}, "job")


def trained(
    folder: Path, loop: str, workers: int, control: StepControl | None = None, **keys: Any
) -> dict[str, torch.Tensor]:
    run_group(loop_job(loop, workers, **keys), folder, control)
    return weights_of(folder)


@pytest.mark.full(but=["bitwise"])
@pytest.mark.parametrize("keys", [{}, {"bitwise": True}], ids=["sums", "bitwise"])
def test_a_gan_trains_as_in_plain_torch_on_any_number_of_workers(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected, logged = loops.by_hand(loops.gan_by_hand)
    found = [trained(tmp_path / str(workers), "gan", workers, **keys) for workers in (1, 2, 3)]
    for workers, weights in enumerate(found, 1):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=1e-6)
            if keys:
                assert torch.equal(tensor, found[0][name]), name
        rows = history_of(tmp_path / str(workers))
        for name in ("critic", "generator"):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in logged], rel=1e-4)


@pytest.mark.full(but=["bitwise"])
@pytest.mark.parametrize("keys", [{}, {"bitwise": True}], ids=["sums", "bitwise"])
def test_the_declared_training_as_a_loop_has_its_bits_and_its_history(tmp_path: Path, keys: dict[str, Any]) -> None:
    """The loop is that of the page on loops. The last batch is short, and of several shards."""
    data = {"target": "tests.support.training:Pairs", "args": {"length": 46}}
    given = {"model": f"{LOOPS}:normalised", "dataset": data, "batch_size": 20, "shuffle": True, **keys}
    given |= {"ema": {"decay": 0.9}, "task": "train", "epochs": 2, "shards": 3}
    declared = {
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
        "scheduler": {"target": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": "auto"}},
        "grad_clip": 1.0,
    }
    for workers in (1, 2, 3):
        found = []
        for name, own in (("declared", declared), ("loop", {"loop": f"{LOOPS}:supervised"})):
            folder = tmp_path / f"{name}-{workers}"
            run_group(Job.make({**given, **own, "workers": workers}, "job"), folder)
            found.append((weights_of(folder), load_file(folder / "ema.safetensors"), history_of(folder)))
        (weights, average, history), (own_weights, own_average, own_history) = found
        assert all(torch.equal(tensor, own_weights[name]) for name, tensor in weights.items())
        assert all(torch.equal(tensor, own_average[name]) for name, tensor in average.items())
        assert history == own_history and len(history) == 6


def test_a_hook_on_a_gradient_gets_that_of_the_whole_batch_in_each_pass(tmp_path: Path) -> None:
    expected, _ = loops.by_hand(loops.gan_by_hand, kind=loops.HookedGan)
    plain, _ = loops.by_hand(loops.gan_by_hand)
    for workers in (1, 2, 3):
        found = trained(tmp_path / str(workers), "gan", workers, model=f"{LOOPS}:HookedGan")
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=1e-6)
        assert any((tensor - plain[name]).abs().max() > 0.01 for name, tensor in found.items())


def test_a_gradient_penalty_and_a_generator_of_each_second_step(tmp_path: Path) -> None:
    expected, _ = loops.by_hand(loops.wgan_by_hand)
    for workers in (1, 2, 3):
        for name, tensor in trained(tmp_path / str(workers), "wgan", workers).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def lbfgs_by_hand(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = torch.optim.LBFGS(model.generator.parameters(), lr=0.5, max_iter=4)
    for real, noise in list(loops.batches(loops.Points()))[:steps]:

        def closure(real: torch.Tensor = real, noise: torch.Tensor = noise) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model.generator(noise) - real).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return dict(model.state_dict())


@pytest.mark.full
def test_lbfgs_is_torchs_on_the_whole_batch(tmp_path: Path) -> None:
    """To the bit with one shard; later steps magnify what the order of a sum rounds."""
    for name, tensor in trained(tmp_path / "one", "lbfgs", 1, shards=1).items():
        torch.testing.assert_close(tensor, lbfgs_by_hand(9)[name], rtol=1e-5, atol=1e-7)
    for workers in (1, 2):
        for name, tensor in trained(tmp_path / str(workers), "lbfgs", workers, max_steps=2).items():
            torch.testing.assert_close(tensor, lbfgs_by_hand(2)[name], rtol=1e-4, atol=1e-5)
    found = [trained(tmp_path / f"bits-{workers}", "lbfgs", workers, bitwise=True) for workers in (1, 2, 3)]
    assert all(torch.equal(found[0][name], weights[name]) for weights in found for name in weights)


@pytest.mark.full
def test_a_loss_over_the_batch_adds_to_one_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = loops.sgd(model)
    for real, noise in loops.batches(loops.Points()):
        optimizer.zero_grad()
        made = model(noise)
        ((made - real).square().mean() + loops.spread(made, real)).backward()
        optimizer.step()
    for workers in (1, 2, 3):
        for name, tensor in trained(tmp_path / str(workers), "contrastive", workers).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5)


PPO: dict[str, Any] = {"model": f"{LOOPS}:Policy", "dataset": f"{LOOPS}:Rows", "bitwise": True}


@pytest.mark.full
def test_rollouts_are_gathered_and_cut_into_the_same_shards_on_any_workers(tmp_path: Path) -> None:
    found = [trained(tmp_path / str(workers), "ppo", workers, **PPO) for workers in (1, 2, 3)]
    for weights in found[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in found[0].items())
    rows = [history_of(tmp_path / str(workers)) for workers in (1, 2, 3)]
    assert [row["won"] for row in rows[0]] == [row["won"] for row in rows[1]] == [row["won"] for row in rows[2]]
    assert [row["played"] for row in rows[0]] == [10, 20, 23, 33, 43, 46, 56, 66, 69]


def test_a_batch_of_the_loops_own_has_the_gradient_of_its_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = loops.Gan()
    table = torch.linspace(0, 1, 11)[:, None].expand(11, 3)
    for _ in range(9):
        model.zero_grad()
        model(table).square().sum(1).mean().backward()
        with torch.no_grad():
            for parameter in model.generator.parameters():
                assert parameter.grad is not None
                parameter.sub_(loops.LR * parameter.grad)
    for workers in (1, 3):
        for name, tensor in trained(tmp_path / str(workers), "ppo_of_one_pass", workers).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.full(but=["gan"])
@pytest.mark.parametrize("loop", ["gan", "ppo", "wgan"])
def test_a_loop_that_is_killed_before_any_step_goes_on_to_the_same_bits(tmp_path: Path, loop: str) -> None:
    """On other workers each time; its optimizers, states and random numbers with it."""
    keys: dict[str, Any] = {"bitwise": True, "checkpoint": {"every_steps": 1, "keep": 9}}
    keys |= PPO if loop == "ppo" else {}
    expected = trained(tmp_path / "whole", loop, 2, **keys)
    for at in (1, 4, 8):
        folder = tmp_path / str(at)
        run_group(loop_job(loop, 3, **keys), folder, StopsBefore(at))
        for name, tensor in trained(folder, loop, 2 if at == 1 else 1, **keys).items():
            assert torch.equal(tensor, expected[name]), (at, name)
    plain = history_of(tmp_path / "whole")
    for at in (1, 4, 8):
        again = history_of(tmp_path / str(at))
        assert [row["loss"] for row in again] == [row["loss"] for row in plain]


def here(folder: Path, loop: Any, **keys: Any) -> dp_ray.Result:
    """Run a loop in this process."""
    given = {"model": loops.Gan, "dataset": loops.Points, "batch_size": loops.BATCH, "shards": 3, "shuffle": False}
    given |= {"task": "train", "workers": 0, "storage": str(folder), "name": "run", "quiet": True}
    return dp_ray.run(loop=loop, **{**given, **keys})


def of_generator(batch: Any, run: Any) -> torch.Tensor:
    rows: torch.Tensor = (run.model(batch[1]) - batch[0]).square().mean(1)
    return rows


def test_the_bare_optimizer_is_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        optimizer = loops.sgd(run.model)
        run.optimizer(optimizer)
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            optimizer.step()

    with pytest.raises(ModelError, match=r"SGD.step\(\) was called by itself.*update = run.optimizer\(optimizer\)"):
        here(tmp_path, loop)


def test_another_optimizer_in_a_closure_is_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        other = loops.sgd(run.model.critic)
        update = run.optimizer(torch.optim.LBFGS(run.model.generator.parameters()))
        for _ in run.steps():
            update.step(closure=other.step)

    with pytest.raises(ModelError, match=r"SGD.step\(\) was called by itself"):
        here(tmp_path, loop)


def test_a_backward_of_the_loops_own_is_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for _ in run.steps():
            run.model(torch.ones(2, 3)).sum().backward()
            update.step()

    with pytest.raises(ModelError, match=r"a backward of the loop's own.*write step.backward\(loss, of\)"):
        here(tmp_path, loop)
    assert not any(one._post_accumulate_grad_hooks for one in loops.Gan().parameters())


def test_a_backward_of_the_loops_own_into_what_it_has_unfrozen_is_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        run.model.critic.requires_grad_(False)
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            update.step()
            if step.number == 1:
                run.model.critic.requires_grad_(True)
                run.model.critic(torch.ones(2, 2)).sum().backward()
                update.step()

    with pytest.raises(ModelError, match=r"a backward of the loop's own"):
        here(tmp_path, loop)


def test_rates_and_norms_of_further_optimizers_stand_in_the_history_alone(tmp_path: Path) -> None:
    result = here(tmp_path, loops.gan)
    assert {"learning_rate_1", "gradient_norm_1"} <= result.history[0].keys()
    assert result.metrics.keys() == {"loss", "epoch_loss", "critic", "generator"}


def test_a_gather_of_a_step_whose_rows_are_all_set_aside_is_told(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.gather(lambda batch: batch[0])

    says = r"step 0: step.gather\(.*<lambda>\) has nothing to return, since all rows of the step were set aside"
    with pytest.raises(ModelError, match=says):
        here(tmp_path, loop, dataset=loops.FirstBroken, on_error={"quarantine": loops.BATCH})


def test_an_update_of_what_is_no_part_of_the_model_is_refused(tmp_path: Path) -> None:
    """A pass may have given it a gradient of this worker's shards alone. Before the loop, and in a pass, it may."""

    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        apart, inner = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        of_apart = loops.sgd(apart)
        apart(torch.ones(2, 3)).sum().backward()
        of_apart.step()

        def rows(batch: Any) -> torch.Tensor:
            with torch.enable_grad():
                inner(batch[1]).sum().backward()
            loops.sgd(inner).step()
            error: torch.Tensor = (run.model(batch[1]) - apart(batch[1])).square().mean(1)
            return error

        for step in run.steps():
            step.backward(rows, run.model.generator)
            update.step()
            of_apart.step()

    says = r"SGD.step\(\) was called by itself.* all that it trains be a part of the model"
    with pytest.raises(ModelError, match=says):
        here(tmp_path, loop)


def test_gradients_that_are_left_at_a_steps_end_are_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)

    with pytest.raises(ModelError, match=r"step 0: the gradient of generator.0.weight.* is left.*update.step\(\)"):
        here(tmp_path, loop)


def test_a_pass_that_trains_nothing_of_its_part_names_it(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.critic)

    says = "step 0, shard 0: the loss does not depend on any parameter of critic; name in `of` what it trains"
    with pytest.raises(ModelError, match=says):
        here(tmp_path, loop)


def test_what_is_made_after_the_steps_have_begun_is_refused(tmp_path: Path) -> None:
    def optimizer(run: dp_ray.Loop) -> None:
        for _ in run.steps():
            run.optimizer(loops.sgd(run.model))

    def state(run: dp_ray.Loop) -> None:
        for _ in run.steps():
            run.state("counts", {})

    for loop, what in ((optimizer, "run.optimizer"), (state, "run.state")):
        with pytest.raises(JobError, match=rf"{what}: is called after run.steps\(\); call it before the loop"):
            here(tmp_path, loop, overwrite=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda run: run.optimizer(torch.optim.SGD([torch.zeros(3, requires_grad=True)])),
            "size .3. that is none of",
        ),
        (lambda run: run.optimizer("adam"), "takes a torch.optim.Optimizer, got a str"),
        (
            lambda run: run.optimizer(
                loops.sgd(run.model), torch.optim.lr_scheduler.StepLR(loops.sgd(run.model.critic), 1)
            ),
            "the StepLR is of another optimizer",
        ),
        (lambda run: run.state("seen", {1, 2}), r"run.state\('seen'\): is a set; give an object with state_dict"),
        (lambda run: run.state("seen", {"a": object()}), r"run.state\('seen'\): cannot be kept: .*a"),
        (lambda run: (run.state("a", {}), run.state("a", [])), "two states of the name 'a'"),
        (
            lambda run: [run.optimizer(one) for one in [loops.sgd(run.model)] * 2],
            "was called for this optimizer before",
        ),
        (lambda run: (yield run), "has yield, so a call does not run it"),
    ],
)
def test_what_cannot_be_kept_or_updated_is_refused(tmp_path: Path, make: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        here(tmp_path, make)


def test_a_loop_that_ends_early_says_how_many_steps_are_left(tmp_path: Path) -> None:
    def breaks(run: dp_ray.Loop) -> None:
        for step in run.steps():
            if step.number == 1:
                break

    def never(run: dp_ray.Loop) -> None:
        """Take no step."""

    with pytest.raises(ModelError, match=r"ended in step 1, and 2 of 3 steps are left; .* call run.stop\(reason\)"):
        here(tmp_path, breaks)
    with pytest.raises(ModelError, match="3 of 3 steps are left"):
        here(tmp_path, never, overwrite=True)


def test_a_loop_that_closes_the_steps_ends_early(tmp_path: Path) -> None:
    def closes(run: dp_ray.Loop) -> None:
        steps: Any = run.steps()
        next(steps)
        steps.close()

    with pytest.raises(ModelError, match="3 of 3 steps are left"):
        here(tmp_path, closes)


@pytest.mark.parametrize("leaves", ["break", "return"])
def test_a_loop_that_stops_itself_may_leave_the_step(tmp_path: Path, leaves: str) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            update.step()
            if step.number == 1:
                run.stop("good enough")
                if leaves == "return":
                    return
                break

    result = here(tmp_path, loop)
    assert result.stopped_early is not None
    assert result.stopped_early["text"] == "stopped early after 2 steps: good enough"
    assert len(result.history) == 2


def test_a_loop_that_catches_the_error_of_a_pass_ends_with_it(tmp_path: Path) -> None:
    """Other workers may still wait in that pass, so none goes on."""

    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            with suppress(ModelError):
                step.backward(lambda batch: 1 / 0, run.model)
            update.step()

    with pytest.raises(ModelError, match=r"step 0, shard 0: .*loop.<lambda> raised ZeroDivisionError"):
        here(tmp_path, loop)


def test_a_stop_iteration_in_the_loop_is_told(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for _ in run.steps():
            next(iter(()))

    with pytest.raises(ModelError, match="loop raised StopIteration"):
        here(tmp_path, loop)


def test_a_group_that_the_loop_adds_is_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        first, _, last = run.model.generator
        optimizer = loops.sgd(first)
        update = run.optimizer(optimizer)
        for step in run.steps():
            if step.number == 1:
                optimizer.add_param_group({"params": list(last.parameters())})
            step.backward(lambda batch: of_generator(batch, run), run.model.generator if step.number else first)
            update.step()

    with pytest.raises(ModelError, match="step 1: an optimizer has other parameters than where it was made"):
        here(tmp_path, loop)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda run, step, _: step.backward(lambda batch: batch, run.model.parameters()), "parts, and got Parameter"),
        (lambda run, step, _: step.backward(lambda batch: batch, []), "parts, and got no part"),
        (lambda run, step, first: first.gather(lambda batch: batch), "step 0 has ended"),
        (
            lambda run, step, _: step.gather(lambda batch: step.gather(lambda batch: batch)),
            "call these in the loop's body",
        ),
        (lambda run, step, _: step.log(learning_rate_1=1.0), "learning_rate_1 is a column that each history has"),
        (lambda run, step, _: step.log(a=torch.tensor(1j)), "a is a Tensor; log one number"),
        (lambda run, step, _: step.backward(torch.ones(3), run.model), "loss is a function, got a Tensor"),
        (lambda run, step, _: step.backward(of_generator, run.model, over=3), "over is a function, got an int"),
        (lambda run, step, _: step.gather(lambda batch: None), r"step 1: step.gather\(.*<lambda>\): no output"),
        (
            lambda run, step, _: step.gather(lambda batch: 1 / 0),
            "^step 1, shard 0: .*lambda> raised ZeroDivisionError",
        ),
        (
            lambda run, step, _: run.update.step(clip=-1.0),
            "clip is the largest norm of the gradient, above 0; got -1",
        ),
        (lambda run, step, _: run.update.step(closure=lambda: None), "the closure returned None"),
    ],
)
def test_a_wrong_call_is_told(tmp_path: Path, call: Any, says: str) -> None:
    def loop(run: Any) -> None:
        first = None
        run.update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            first = first or step
            if step.number:
                call(run, step, first)

    with pytest.raises(ModelError, match=says):
        here(tmp_path, loop)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            lambda step, mean: mean.backward(),
            r"RuntimeError: .*grad_fn; step\.backward\(loss, of\) runs the backward",
        ),
        (lambda step, _: list(step), r"not iterable; the step has no batch .* each shard's batch"),
        (lambda step, _: step[0], r"not subscriptable; the step has no batch"),
        (lambda step, _: int("x"), r"ValueError: invalid literal for int\(\) with base 10: 'x'$"),
    ],
)
def test_what_a_plain_loop_does_is_answered_with_what_to_write(tmp_path: Path, body: Any, says: str) -> None:
    def loop(run: Any) -> None:
        run.optimizer(loops.sgd(run.model.generator))
        for step in run.steps():
            body(step, step.backward(lambda batch: of_generator(batch, run), run.model.generator))

    with pytest.raises(ModelError, match=rf"loop raised .*{says}"):
        here(tmp_path, loop)


def test_a_number_is_logged_as_it_is_then(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        count = torch.zeros(())
        for step in run.steps():
            step.log(count=count)
            count += 1

    assert [row["count"] for row in here(tmp_path, loop).history] == [0.0, 1.0, 2.0]


def test_numpys_numbers_are_logged(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        for step in run.steps():
            step.log(a=np.float32(0.5), b=np.int64(step.number))

    assert [(row["a"], row["b"]) for row in here(tmp_path, loop).history] == [(0.5, 0.0), (0.5, 1.0), (0.5, 2.0)]


def test_a_gather_has_each_rows_item_and_no_graph(tmp_path: Path) -> None:
    """Lists too, also where those of all shards are alike, as of one row each in the last step."""
    counts = []

    def made(batch: Any, run: Any) -> dict[str, Any]:
        with torch.enable_grad():
            return {"made": run.model(batch[1]), "names": ["x"] * len(batch[0])}

    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        for step in run.steps():
            found = step.gather(lambda batch: made(batch, run))
            assert not found["made"].requires_grad
            counts.append((len(found["made"]), found["names"]))

    here(tmp_path, loop)
    assert counts == [(rows, ["x"] * rows) for rows in (10, 10, 3)]


@pytest.mark.parametrize(
    ("of_own", "says"),
    [
        (False, "shards have 4 rows; .*shards: 6 instead of 3 .*, a smaller batch_size,"),
        (True, "shards have 9 rows; .*shards: 6 instead of 3 .*, a smaller batch,"),
    ],
)
def test_a_pass_without_memory_says_what_to_change(tmp_path: Path, of_own: bool, says: str) -> None:
    def without_memory(batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.backward(without_memory, run.model, batch=torch.ones(27, 3) if of_own else None)

    with pytest.raises(ModelError, match=f"step 0, shard 0: .*without_memory raised OutOfMemoryError.*{says}"):
        here(tmp_path, loop)


def test_a_pass_trains_within_no_grad_too(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            with torch.no_grad():
                step.backward(lambda batch: of_generator(batch, run), run.model.generator)
                update.step()

    losses = [row["loss"] for row in here(tmp_path, loop, epochs=3).history]
    assert losses[-1] < losses[0]


def test_a_loss_that_is_not_finite_is_told_with_its_step_after_steps_without_a_pass(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            if step.number % 2:
                run.model.factor = float("nan") if step.number == 3 else 1.0
                step.backward(lambda batch: of_generator(batch, run) * run.model.factor, run.model.generator)
                update.step()

    with pytest.raises(ModelError, match="step 3: the loss is nan"):
        here(tmp_path, loop, epochs=2, stop_on_nan=True)


def test_a_gather_before_the_first_pass_ends_the_early_steps(tmp_path: Path) -> None:
    """In which all that forwards write is looked for."""
    early = []

    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        for step in run.steps():
            step.gather(lambda batch: batch[0])
            early.append(step._model.state._is_early)

    here(tmp_path, loop, epochs=2)
    assert early == [True, True, False, False, False, False]


def test_numbers_may_be_logged_in_another_order(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        for step in run.steps():
            step.log(**({"a": 1.0, "b": 2.0} if step.number else {"b": 2.0, "a": 1.0}))

    assert [(row["a"], row["b"]) for row in here(tmp_path, loop).history] == [(1.0, 2.0)] * 3


def test_a_loop_stops_itself_and_the_run_says_why(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model))
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            update.step()
            if step.number == 3:
                run.stop("good enough")

    result = here(tmp_path, loop, epochs=3)
    assert result.stopped_early is not None
    assert result.stopped_early["text"] == "stopped early after 4 steps: good enough"
    assert (result.status, len(result.history)) == ("done", 4)


def test_a_loop_that_has_stopped_itself_stays_so_where_its_driver_was_killed(tmp_path: Path) -> None:
    """Its last checkpoint says so; the run that goes on takes no further step."""
    run_group(loop_job("stops_itself", 1), tmp_path, StopsBeforeItsWeights())
    sent = run_group(loop_job("stops_itself", 1), tmp_path)
    assert [message.text for message in sent if isinstance(message, StoppedEarly)] == [
        "stopped early after 2 steps: enough"
    ]
    assert weights_of(tmp_path)


def test_other_names_in_a_later_step_are_refused(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.log(**{f"a{step.number}": 1.0})

    with pytest.raises(ModelError, match=r"step 1: step\.log has the names a1, and in the first step it had a0"):
        here(tmp_path, loop)

    def reserved(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.log(loss=1.0)

    with pytest.raises(ModelError, match=r"step\.log: loss is a column that each history has"):
        here(tmp_path, reserved, overwrite=True)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss": "torch.nn:MSELoss"}, r"loss: is not used.*step.backward\(loss, of\)"),
        ({"grad_clip": 1.0}, r"grad_clip: is not used.*update.step\(clip="),
        ({"optimizer": "torch.optim:SGD"}, r"optimizer: is not used.*run.optimizer"),
        ({"precision": "fp16"}, "precision: fp16 is not possible with loop yet"),
        ({"strategy": "fsdp"}, "strategy: fsdp is not possible with loop yet"),
        ({"shards": "auto"}, "shards: auto is not possible with loop yet"),
    ],
)
def test_keys_that_a_loop_takes_the_place_of_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        loop_job("gan", 2, **keys)


def test_what_a_loop_cannot_have_yet_is_told() -> None:
    with pytest.raises(JobError, match="--memory: is not possible with loop yet"):
        plan_memory_of(loop_job("gan", 2), None)


MISMATCHES = [
    "another_order",
    "a_pass_left_out",
    "one_ends_early",
    "another_part",
    "one_stops",
    "one_stops_where_kept",
]
EVALUATED: dict[str, Any] = {
    "eval": {"dataset": f"{LOOPS}:Pairs", "every_steps": 2},
    "metrics": {"error": f"{LOOPS}:error"},
}


def test_optimizers_in_another_order_than_the_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"loop": f"{LOOPS}:in_an_order", "model": f"{LOOPS}:Gan", "dataset": f"{LOOPS}:Points"}
    monkeypatch.setenv("PARTS", "critic generator")
    here(tmp_path, max_steps=2, **named)
    monkeypatch.setenv("PARTS", "generator critic")
    with pytest.raises(ModelError, match=r"call run\.optimizer in the same order, for the same parameters"):
        here(tmp_path, max_steps=3, **named)


@pytest.mark.full(but=["one_ends_early"])
@pytest.mark.parametrize("loop", MISMATCHES)
def test_workers_that_make_other_calls_end_the_job_with_both(tmp_path: Path, loop: str) -> None:
    began = time.monotonic()
    with pytest.raises(ProcessExit, match=r"the workers make other calls: rank 0: .*; rank 1: ") as raised:
        trained(tmp_path, loop, 2)
    assert "step 1" in str(raised.value)
    assert time.monotonic() - began < 60  # far below timeouts.step, on a busy machine too


@pytest.mark.parametrize("loop", ["a_pass_left_out", "one_stops"])
def test_other_calls_are_told_where_an_evaluation_follows(tmp_path: Path, loop: str) -> None:
    """It has collectives of its own, in which the others would meet the comparison of the one that goes on."""
    says = r"the workers make other calls: rank 0: step 1.*; rank 1: step 1: its end, with (no )?run.stop"
    with pytest.raises(ProcessExit, match=says):
        trained(tmp_path, loop, 2, **EVALUATED)


def test_the_beats_know_the_last_call_of_a_loop(tmp_path: Path) -> None:
    trained(tmp_path, "looks_at_its_calls", 2)
    assert history_of(tmp_path)[-1]["last"] == 6  # after a gather and a pass in each of three steps
    assert last_call() == (0, "")


@pytest.mark.parametrize(("loop", "is_same"), [("remembers", True), ("forgets", False)])
@pytest.mark.parametrize("bitwise", [False, True])
def test_verify_resumed_finds_what_a_loop_forgets(tmp_path: Path, loop: str, is_same: bool, bitwise: bool) -> None:
    job = loop_job(loop, 0, bitwise=bitwise, storage=str(tmp_path), name="x")
    verdict = verify(job, [0], Options(overwrite=True, quiet=True), resumed=True)
    assert verdict.same is is_same
    assert [(row.is_resumed, row.same) for row in verdict.rows] == [(False, True), (True, is_same)]
    assert "0, resumed" in str(verdict)
    assert ("run.state" in str(verdict)) is (bitwise and not is_same)


def test_a_state_is_filled_where_the_loop_holds_parts_of_it(tmp_path: Path) -> None:
    """A name of the loop's own for a part of it stands for what was kept, and objects that are there twice do not."""
    held: list[Any] = []

    def loop(run: dp_ray.Loop) -> None:
        run._has_trained = True  # as far as this test goes
        table, twice = torch.zeros(3, 2), torch.zeros(2)
        state = run.state(
            "all", {"table": table, 1: {"seen": []}, "twice": [twice, twice], "wide": twice.expand(3, 2)}
        )
        seen = state[1]["seen"]
        for step in run.steps():
            seen.append((step.number, torch.full((step.number,), 1.0)))
            table[step.number % 3] += step.number
            state["twice"] = [state["twice"][0] + 1, state["twice"][1] + 2]
        held[:] = [table, seen, state]

    for epochs in (1, 2):  # the second goes on from the first one's checkpoint
        here(
            tmp_path,
            loop,
            epochs=epochs,
            name=f"run-{epochs}",
            init_from=None if epochs == 1 else str(tmp_path / "run-1"),
        )
    table, seen, state = held
    assert table.tolist() == [[3, 3], [5, 5], [7, 7]]
    assert state["table"] is table
    assert [number for number, _ in seen] == list(range(6))
    assert [len(ones) for _, ones in seen] == list(range(6))
    assert [one.tolist() for one in state["twice"]] == [[6, 6], [12, 12]]


@pytest.mark.parametrize("ends", ["at the last step", "by run.stop"])
def test_a_loop_that_trains_nothing_ends_in_an_error_before_weights_are_kept(tmp_path: Path, ends: str) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model.generator))
        for step in run.steps():
            step.gather(lambda batch: of_generator(batch, run))
            update.step()  # of no gradient
            if step.number == 1 and ends == "by run.stop":
                run.stop("enough")

    steps = 2 if ends == "by run.stop" else 3
    with pytest.raises(ModelError, match=f"loop: none of its {steps} steps has trained anything; call step.backward"):
        here(tmp_path, loop, epochs=1)
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_a_loop_may_train_by_gradients_of_its_own(tmp_path: Path) -> None:
    """And by none in most steps: it may fill a buffer first."""

    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(torch.optim.SGD(run.model.generator.parameters(), 0.1))
        for step in run.steps():
            if step.number == run.num_steps - 1:
                for parameter in run.model.generator.parameters():
                    parameter.grad = torch.ones_like(parameter)
                update.step()

    weights = here(tmp_path, loop, epochs=1).weights
    torch.manual_seed(0)
    plain = loops.Gan().generator
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(weights[f"generator.{name}"], tensor.detach() - 0.1)


class Point(NamedTuple):
    x: int
    table: torch.Tensor


def test_a_resumed_loop_finds_each_kind_of_state_as_it_was(tmp_path: Path) -> None:
    """Under the loop's own names too: as if it had not been resumed."""
    held: list[Any] = []

    def loop(run: dp_ray.Loop) -> None:
        table, twice = torch.zeros(2), torch.zeros(1)
        rows: list[int] = []
        seen: Counter[int] = Counter()
        state: Any = {"by": defaultdict(list), "order": OrderedDict(a=0, b=0), "rows": rows, "again": {"rows": rows}}
        state |= {"pair": (table, "b"), "point": Point(3, table), "rate": np.float32(0.1), "twice": [twice, twice]}
        state["self"] = state
        run.state("all", state)
        run.state("seen", seen)
        first, _, last = run.model.generator
        groups: Any = [{"params": list(first.parameters())}, {"params": list(last.parameters()), "lr": 0.01}]
        update = run.optimizer(torch.optim.SGD(groups, 0.1, 0.9))
        for step in run.steps():
            step.backward(lambda batch: of_generator(batch, run), run.model.generator if step.number else first)
            update.step()
            seen[step.number % 2] += 1
            state["by"][step.number % 4].append(step.number)
            state["order"].move_to_end("ab"[step.number % 2])
            rows.append(len(state["again"]["rows"]))
            table += step.number
            twice += 1
            state["rate"] *= np.float32(1.1)
            if step.number == 1:
                state["pair"] = (*state["pair"], step.number)
        state["self"]["self"] = None
        held.append([seen, {**state}, table, type(state["rate"]), state["again"]["rows"] is rows])

    weights = []
    for name, parts in (("whole", [2]), ("parts", [1, 2])):
        for epochs in parts:
            result = here(tmp_path, loop, epochs=epochs, name=name, resume=True)
        weights.append(result.weights)
    assert repr(held[0]) == repr(held[2]), "plainly in one go, and resumed"
    assert list(held[2][1]["order"]) == ["a", "b"] and held[2][1]["point"].x == 3 and held[2][-1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def _replaced(state: Any, at: int) -> None:
    state["pair"][at] = torch.full((2,), 5.0)


def _exchanged(state: Any) -> None:
    state["old"], state["new"] = state["new"], state["old"]


def _turned(state: Any) -> None:
    state["old"], state["new"] = state["new"], {"rows": [7]}


@pytest.mark.parametrize(
    "change", [partial(_replaced, at=0), partial(_replaced, at=1), _exchanged, _turned, lambda state: state.popitem()]
)
def test_what_stands_elsewhere_than_at_the_begin_is_filled_there(change: Callable[[Any], object]) -> None:
    """Each name of the loop's own has what it had, and the state holds it where it held it."""

    def begun() -> tuple[Any, list[Any]]:
        tensor, rows = torch.zeros(2), [1]
        old, new = {"rows": rows}, {"rows": [2]}
        state = {"pair": [tensor, tensor], "old": old, "new": new}
        return state, [tensor, rows, old, new, new["rows"], state["pair"]]

    state, names = begun()
    kept = PlainState("state", state)
    change(state)
    names[0] += 1
    names[1].append(3)
    written = copy.deepcopy(kept.state_dict())

    resumed, own = begun()
    PlainState("state", resumed).load_state_dict(written)
    assert repr(resumed) == repr(state)

    def holds(state: Any, names: list[Any]) -> list[list[bool]]:
        inner = [*state.values(), *state["pair"], *(part["rows"] for key, part in state.items() if key != "pair")]
        return [[part is name for part in inner] for name in names]

    there = holds(state, names)
    assert holds(resumed, own) == there
    for name, mine, is_there in zip(names, own, map(any, there), strict=True):
        assert not is_there or repr(mine) == repr(name)


class OwnDict(dict[str, int]):
    """A dict of the user's, whose items may need more than to be set."""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [np.zeros(3)]}, "the state's 'value.a.0' is of type ndarray.*torch.from_numpy"),
        ({"a": np.zeros(1)}, "the state's 'value.a' is of type ndarray"),
        ({"a": OwnDict()}, "the state's 'seen.a' is a OwnDict, and only a dict, list or tuple comes back"),
        ({"a": torch.zeros(2).shape}, "the state's 'seen.a' is a Size"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_by_its_path(tmp_path: Path, value: Any, says: str) -> None:
    def loop(run: dp_ray.Loop) -> None:
        run.state("seen", value)

    with pytest.raises(JobError, match=says):
        here(tmp_path, loop)


def test_a_kind_of_state_that_comes_later_is_refused_before_a_checkpoint_has_it(tmp_path: Path) -> None:
    def late(run: dp_ray.Loop) -> None:
        state: Any = run.state("late", {"a": {}})
        update = run.optimizer(loops.sgd(run.model.generator))
        for step in run.steps():
            state["a"] = Counter("ab")
            step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            update.step()

    with pytest.raises(ModelError, match=r"'late.a' is a Counter, .* when run.state was called"):
        here(tmp_path, late)


def test_a_state_that_differs_by_worker_ends_the_job_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match=r"step 2: run.state\('seen'\) is another one on rank 1 than on rank 0"):
        trained(tmp_path, "counts_by_rank", 2)


class AskedToStop(StepControl):
    """Asks rank 1 to stop once step 4 is about to run, as a driver does."""

    def runs_on(self, clock: StepClock) -> None:
        """Note the rank."""
        self._rank = own_rank()

    def before(self, step: int) -> None:
        """Ask in step 4."""
        self.wants_stop = step >= 4 and self._rank == 1

    def leave(self) -> None:
        """End the process as one that has kept its work."""
        raise Stopped


def test_a_planned_stop_of_one_worker_stops_all_after_a_step_and_the_run_goes_on(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole", "gan", 2, bitwise=True)
    run_group(loop_job("gan", 2, bitwise=True), tmp_path / "stopped", AskedToStop())
    kept = {path.name for path in (tmp_path / "stopped" / "checkpoints").glob("step-*")}
    assert max(kept) == "step-5.safetensors"
    assert not (tmp_path / "stopped" / "weights.safetensors").exists()
    for name, tensor in trained(tmp_path / "stopped", "gan", 3, bitwise=True).items():
        assert torch.equal(tensor, expected[name]), name


def test_ema_evaluations_and_early_stopping_follow_a_loop(tmp_path: Path) -> None:
    """The average is that of torch's own, once a step; an evaluation is of the whole dataset."""
    keys: dict[str, Any] = {
        "ema": {"decay": 0.5},
        "eval": {"dataset": f"{LOOPS}:Pairs", "every_steps": 2},
        "metrics": {"error": f"{LOOPS}:error"},
        "early_stopping": {"metric": "eval_error", "patience": 99},
    }
    averaged, history = loops.averaged_gan_by_hand()
    for workers in (1, 2):
        trained(tmp_path / str(workers), "gan", workers, **keys)
        found = load_file(tmp_path / str(workers) / "ema.safetensors")
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, averaged[name], rtol=2e-5, atol=1e-6)
        rows = history_of(tmp_path / str(workers))
        measured = [row["eval_error"] for row in rows if row["eval_error"] is not None]
        assert measured == pytest.approx(history, rel=1e-4)


def test_rows_that_are_set_aside_count_nothing(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"dataset": f"{LOOPS}:Broken", "on_error": {"quarantine": 3}, "model": f"{LOOPS}:Gan"}
    expected, _ = loops.by_hand(loops.gan_by_hand, without=loops.BROKEN)
    for workers in (1, 3):
        for name, tensor in trained(tmp_path / str(workers), "gan", workers, **keys).items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=1e-6)


@pytest.mark.ray
def test_on_ray_a_loop_gives_the_bits_of_this_process_through_a_kill(run_in_session: Run, tmp_path: Path) -> None:
    """Where a worker is killed, the others go on from the last checkpoint; and the next job of the session runs."""
    keys: dict[str, Any] = {**PPO, "checkpoint": {"every_steps": 2, "every_seconds": None}}
    here = run_in_session(**keys_of("ppo", **keys), workers=0, name="here")
    there = run_in_session(**keys_of("ppo", **keys), workers=2, name="there")
    assert there.weights_sha256 == here.weights_sha256
    assert [row["won"] for row in there.history] == [row["won"] for row in here.history]
    killed = run_in_session(**keys_of("ppo", **keys), workers=2, name="killed", inject="kill worker 1 at step 5")
    assert killed.weights_sha256 == here.weights_sha256 and killed.restarts == 1
    assert [row["played"] for row in killed.history] == [row["played"] for row in here.history]
