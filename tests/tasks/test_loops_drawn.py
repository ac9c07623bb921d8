"""Loops of drawn passes and updates, against plain torch on whole batches, on several numbers of workers."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.job.job import Job
from tests.support import loops
from tests.support.chance import examples
from tests.support.drawn_loops import LOSSES, REACHED, Plan, plainly, planned
from tests.support.group import history_of, run_group, weights_of

LOOPS = "tests.support.drawn_loops"


def planned_job(plan: Plan, workers: int, **keys: Any) -> Job:
    given = {
        "task": "train",
        "model": f"{LOOPS}:Parts",
        "dataset": "tests.support.loops:Points",
        "loop": {"target": f"{LOOPS}:planned", "args": {"plan": plan}},
        "workers": workers,
        "batch_size": loops.BATCH,
        "epochs": 2,
        "shuffle": False,
        "shards": 3,
    }
    return Job.make({**given, **keys}, "job")


def check(folder: Path, plan: Plan, workers: int, **keys: Any) -> dict[str, torch.Tensor]:
    """Run a plan; return its weights, which are those of plain torch."""
    run_group(planned_job(plan, workers, **keys), folder)
    expected, logged = plainly(planned, batch_size=keys.get("batch_size", loops.BATCH), epochs=2, plan=plan)
    found = weights_of(folder)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert [row["sum"] for row in history_of(folder)] == pytest.approx([row["sum"] for row in logged], rel=1e-4)
    return found


def a_pass(loss: str, of: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"do": "pass", "loss": loss, "of": of or REACHED[loss], **more}


def an_update(of: str, clip: float | None = None) -> dict[str, Any]:
    return {"do": "update", "of": of, "clip": clip}


@pytest.mark.full(but=["2"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_that_a_loop_holds_stay_as_they_are_when_the_pass_runs_again(tmp_path: Path, workers: int) -> None:
    """As PCGrad does: the functions of both passes are made at one place, and so it is one pass."""
    plan = [a_pass("left", ["trunk"]), {"do": "hold"}, a_pass("right", ["trunk"]), {"do": "add"}, an_update("trunk")]
    check(tmp_path, plan, workers)


def test_a_pass_that_leaves_parameters_unused_beside_one_that_uses_them(tmp_path: Path) -> None:
    """They stay without a gradient, and so without the decay of an optimizer."""
    check(tmp_path, [a_pass("right", ["right"]), an_update("all"), a_pass("left", ["left", "right"])], 2)


PARTS = st.lists(st.sampled_from(["trunk", "left", "right", "table"]), max_size=2)


@st.composite
def passes(draw: st.DrawFn) -> dict[str, Any]:
    loss = draw(st.sampled_from(sorted(LOSSES)))
    own = draw(st.lists(st.sampled_from(REACHED[loss]), min_size=1, max_size=3))
    more = {"over": True} if loss == "left" and draw(st.booleans()) else {"weighted": draw(st.booleans())}
    rows = draw(st.sampled_from([None, None, 1, 2, 17]))
    return a_pass(loss, own + draw(PARTS), rows=rows, **more)


UPDATES = st.builds(an_update, st.sampled_from(["all", "trunk", "heads"]), st.sampled_from([None, 0.3]))
OTHERS = st.sampled_from(
    [{"do": "hold"}, {"do": "add"}, {"do": "zero"}, {"do": "gather"}, {"do": "gather", "rows": 2}]
)


@settings(max_examples=examples(10))
@given(
    plan=st.lists(st.one_of(passes(), passes(), UPDATES, OTHERS), min_size=1, max_size=6),
    shards=st.integers(3, 5),
    batch_size=st.sampled_from([3, 10, 11]),
    workers=st.sampled_from([(1, 2), (2, 3), (3, 1)]),
    is_bitwise=st.booleans(),
)
def test_a_drawn_loop_is_that_of_plain_torch(
    plan: Plan, shards: int, batch_size: int, workers: tuple[int, int], is_bitwise: bool
) -> None:
    keys: dict[str, Any] = {"shards": shards, "batch_size": batch_size, "bitwise": is_bitwise}
    with TemporaryDirectory() as folder:
        whole = [*plan, an_update("all")]
        one, other = (check(Path(folder) / str(count), whole, count, **keys) for count in workers)
    if is_bitwise:
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
