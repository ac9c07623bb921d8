"""What a loop takes from one step into the next: what its passes keep, what was evaluated, and an early end by it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dp_ray
from dp_ray.driver.run import Options
from dp_ray.driver.verify import verify
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.messages import StoppedEarly
from tests.support import loops
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.loops import keys_of
from tests.tasks.test_loops import EVALUATED, LOOPS, here, loop_job, of_generator, trained

STEPS = 9


def kept_by(folder: Path, workers: int, rank: int = 0) -> list[Any]:
    return [torch.load(folder / str(workers) / f"{step}-{rank}.pt", weights_only=False) for step in range(STEPS)]


def leaves(kept: dict[str, Any]) -> list[torch.Tensor]:
    noise, (best,) = kept["seen"]
    return [kept["made"], noise, best]


@pytest.mark.full(but=["batch", "over"])
@pytest.mark.parametrize(
    ("rows", "over"),
    [(None, False), (17, False), (2, False), (None, True), (17, True)],
    ids=["batch", "own", "empty-shard", "over", "over-own"],
)
def test_what_a_pass_keeps_is_the_whole_batchs_in_order_on_all_workers(
    tmp_path: Path, rows: int | None, over: bool
) -> None:
    """And without a graph; of the step's batch, whose last one has uneven shards, or of one of the loop's own."""
    by_hand = loops.keeps_by_hand(rows, over)
    for workers in range(4):
        folder = tmp_path / str(workers)
        folder.mkdir()
        args = {"folder": str(folder), "rows": rows, "over": over}
        keys = {**keys_of("keeps", bitwise=True), "loop": {"target": f"{LOOPS}:keeps", "args": args}}
        if workers:
            run_group(Job.make({**keys, "workers": workers}, "job"), tmp_path / f"run-{workers}")
        else:
            dp_ray.run(**keys, workers=0, storage=str(tmp_path), name="run-0", quiet=True)
    for workers in range(4):
        for rank in range(max(1, workers)):
            for found, first, expected in zip(
                kept_by(tmp_path, workers, rank), kept_by(tmp_path, 1), by_hand, strict=True
            ):
                assert found["names"] == expected["names"]
                assert not any(leaf.requires_grad for leaf in leaves(found))
                assert all(map(torch.equal, leaves(found), leaves(first)))
                for leaf, plain in zip(leaves(found), leaves(expected), strict=True):
                    torch.testing.assert_close(leaf, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda step, run: step.backward(lambda batch: batch, run.model, keep=torch.ones(3)),
         r"step.backward: keep is a dict, .*run.state\('hidden', {}\); got a Tensor"),
        (lambda step, run: step.backward(lambda batch: of_generator(batch, run), run.model.generator, keep={}),
         r"step 1, shard 0: step.backward: with keep, .*<lambda> returns .*it returned a tensor of size \[4\]"),
        (lambda step, run: step.backward(
            lambda batch: {"loss": of_generator(batch, run), "outputs": batch[0]}, run.model.generator, keep={}),
         r"step 1, shard 0: .* returned as outputs a tensor of size \[4, 2\]"),
        (lambda step, run: step.backward(
            lambda batch: {"outputs": run.model(batch[1]), "target": batch[0]}, run.model.generator,
            over=loops.spread, keep={}),
         r"step 1, shard 0: .*\(with over, no loss, and maybe a target\), and it returned as outputs a tensor"),
        (lambda step, run: step.backward(
            lambda batch: {"loss": of_generator(batch, run), "outputs": {"mean": batch[0].mean(0)}},
            run.model.generator, keep={}),
         r"step 1: step.backward\(.*<lambda>, keep\): output 'mean' has no row for each sample"),
        (lambda step, run: step.backward(
            lambda batch: {"loss": run.model.critic(batch[0])[:, 0], "outputs": {}}, run.model.generator, keep={}),
         "the loss does not depend on any parameter of generator; name in `of` what it trains"),
    ],
)  # fmt: skip
def test_a_wrong_way_to_keep_is_told(tmp_path: Path, call: Any, says: str) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(loops.sgd(run.model.generator))
        for step in run.steps():
            if step.number:
                call(step, run)
            else:
                step.backward(lambda batch: of_generator(batch, run), run.model.generator)
            update.step()

    with pytest.raises(ModelError, match=says):
        here(tmp_path, loop)


def test_a_step_whose_rows_are_all_set_aside_has_nothing_to_keep(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        for step in run.steps():
            step.backward(
                lambda batch: {"loss": of_generator(batch, run), "outputs": {"seen": batch[1]}}, run.model, keep={}
            )

    with pytest.raises(ModelError, match=r"step 0: step.backward\(.*, keep\) has nothing to return, since all rows"):
        here(tmp_path, loop, dataset=loops.FirstBroken, on_error={"quarantine": 20})


def test_workers_of_which_one_keeps_end_the_job_with_both_calls(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match=r"other calls: rank 0: .*critic, keep\); rank 1: .*critic\)"):
        trained(tmp_path, "one_keeps", 2)


def test_verify_finds_what_is_kept_in_a_variable_of_the_loops_own(tmp_path: Path) -> None:
    """A run that goes on has it only by run.state."""
    for loop, is_same in (("recurs_by_state", True), ("recurs_by_variable", False)):
        job = loop_job(loop, 0, bitwise=True, storage=str(tmp_path), name=loop)
        assert verify(job, [0], Options(overwrite=True, quiet=True), resumed=True).same is is_same


def is_evaluated(history: list[dict[str, Any]]) -> None:
    """Each step has what was measured last before it."""
    last, named = 1.0, 0.0
    for row in history:
        assert (row["last"], row["named"]) == (last, named)
        if row["eval_error"] is not None:
            last, named = row["eval_error"], 1.0
    assert len({row["last"] for row in history}) > 2


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_loop_has_what_was_evaluated_last_through_a_kill(tmp_path: Path, workers: int) -> None:
    keys = {**EVALUATED, "checkpoint": {"every_steps": 1, "keep": 9}, "bitwise": True}
    if not workers:
        whole = dp_ray.run(**keys_of("anneals", **keys), workers=0, storage=str(tmp_path), name="whole", quiet=True)
        is_evaluated(whole.history)
        return
    run_group(loop_job("anneals", workers, **keys), tmp_path / "whole")
    is_evaluated(history_of(tmp_path / "whole"))
    run_group(loop_job("anneals", workers, **keys), tmp_path / "killed", StopsBefore(5))  # the last one is of step 3
    run_group(loop_job("anneals", workers % 3 + 1, **keys), tmp_path / "killed")
    assert history_of(tmp_path / "killed") == history_of(tmp_path / "whole")
    weights = weights_of(tmp_path / "whole")
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(tmp_path / "killed").items())


def test_what_is_evaluated_as_a_piece_ends_is_not_seen_by_a_loop_that_goes_on(tmp_path: Path) -> None:
    keys = {**EVALUATED, "checkpoint": {"every_steps": 1, "keep": 9}, "bitwise": True}
    run_group(loop_job("anneals", 1, **keys), tmp_path / "whole")
    for most in (3, 6, 7, None):
        run_group(loop_job("anneals", 2, **keys, max_steps=most), tmp_path / "pieces")
    assert [row["last"] for row in history_of(tmp_path / "pieces")] == [
        row["last"] for row in history_of(tmp_path / "whole")
    ]


def test_after_its_steps_a_loop_has_the_evaluation_of_their_end(tmp_path: Path) -> None:
    seen: list[Any] = []

    def loop(run: dp_ray.Loop) -> None:
        loops.anneals(run)
        seen.append(run.evaluated)

    result = here(tmp_path, loop, **EVALUATED, epochs=1)
    assert seen == [{"eval_error": result.history[-1]["eval_error"]}]


def test_all_workers_have_rank_0s_numbers_of_a_metric_that_differs(tmp_path: Path) -> None:
    """Else each would weigh its loss by its own, and their sums were of no batch."""
    keys = {**EVALUATED, "metrics": {"error": f"{LOOPS}:RankError"}, "bitwise": True}
    found = [trained(tmp_path / str(workers), "anneals", workers, **keys) for workers in (1, 2)]
    is_evaluated(history_of(tmp_path / "2"))
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize(("key", "loop"), [("below", "remembers"), ("patience", "gan")])
def test_the_loss_of_steps_ends_a_loop_on_any_workers_through_a_kill(tmp_path: Path, key: str, loop: str) -> None:
    """After the same step, which is that of a count by hand over the steps of a loop that goes on."""
    keys: dict[str, Any] = {"bitwise": True, "epochs": 6, "checkpoint": {"every_steps": 1, "keep": 99}}
    run_group(loop_job(loop, 1, **keys), tmp_path / "on")
    losses = [row["loss"] for row in history_of(tmp_path / "on")]
    lows = [min(losses[:at]) for at in range(3, len(losses)) if losses[at] < min(losses[:at])]
    stopping: dict[str, Any] = {"below": lows[0]} if key == "below" else {"patience": 2}
    ends = ended_by_hand(losses, **stopping)
    assert 2 < ends < len(losses)
    keys["early_stopping"] = {"metric": "loss", "every": "step", **stopping}
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        if workers == 3:
            run_group(loop_job(loop, 2, **keys), folder, StopsBefore(ends - 1))
        sent = run_group(loop_job(loop, workers, **keys), folder)
        (told,) = (message for message in sent if isinstance(message, StoppedEarly))
        assert told.step == ends
        assert [row["loss"] for row in history_of(folder)] == losses[:ends]
        assert all(torch.equal(weights_of(tmp_path / "1")[name], each) for name, each in weights_of(folder).items())


def ended_by_hand(losses: list[float], below: float = float("-inf"), patience: int = 10**9) -> int:
    """After how many steps one is below, or so many in a row are no better than all before."""
    best, without = float("inf"), 0
    for count, loss in enumerate(losses, 1):
        best, without = (loss, 0) if loss < best else (best, without + 1)
        if loss < below or without == patience:
            return count
    return len(losses) + 1
