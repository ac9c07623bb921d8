"""Loops of drawn passes and updates, against plain torch on whole batches, on several numbers of workers."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dp_ray.job.job import Job
from tests.support import loops
from tests.support.chance import examples
from tests.support.drawn_loops import LOSSES, REACHED, Plan, plainly, planned
from tests.support.group import history_of, run_group, weights_of

LOOPS = "tests.support.drawn_loops"


def planned_job(args: dict[str, Any], workers: int, evaluates: int | None, **keys: Any) -> Job:
    evaluation = {"dataset": "tests.support.loops:Pairs", "every_steps": evaluates, "batch_size": 4}
    given = {
        "task": "train",
        "model": f"{LOOPS}:Parts",
        "dataset": "tests.support.loops:Points",
        "loop": {"target": f"{LOOPS}:planned", "args": args},
        "eval": evaluation if evaluates else None,
        "metrics": {"error": "tests.support.loops:error"} if evaluates else {},
        "workers": workers,
        "batch_size": loops.BATCH,
        "epochs": 2,
        "shuffle": False,
        "shards": 3,
    }
    return Job.make({**given, **keys}, "job")


def check(
    folder: Path, plan: Plan, workers: int, evaluates: int | None = None, of_loop: Any = None, **keys: Any
) -> dict[str, torch.Tensor]:
    """Run a plan; return its weights, which are those of plain torch."""
    args = {"plan": plan, **(of_loop or {})}
    run_group(planned_job(args, workers, evaluates, **keys), folder)
    size = keys.get("batch_size", loops.BATCH)
    try:
        expected, logged, errors = plainly(planned, batch_size=size, epochs=2, evaluates=evaluates, **args)
    except RuntimeError as error:
        if "sparse" in str(error):
            reject()  # torch's momentum takes no dense gradient after a sparse one
        raise
    found, history = weights_of(folder), history_of(folder)
    if not all((tensor.abs() < 10).all() for tensor in expected.values()):
        reject()  # a drawn plan may diverge, in plain torch too, where each rounding grows
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert [row["sum"] for row in history] == pytest.approx([row["sum"] for row in logged], rel=1e-4, abs=1e-5)
    told = [row["eval_error"] for row in history if row.get("eval_error") is not None]
    assert told == pytest.approx(errors, rel=1e-4)
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
    own += ["trunk"] if set(own) <= {"adapter", "experts", "frozen"} else []  # a plan may not reach these
    more = {"over": True} if loss == "left" and draw(st.booleans()) else {"weighted": draw(st.booleans())}
    rows = draw(st.sampled_from([None, None, 1, 2, 17]))
    return a_pass(loss, own + draw(PARTS), rows=rows, **more)


UPDATES = st.builds(an_update, st.sampled_from(["all", "trunk", "heads"]), st.sampled_from([None, 0.3]))
OTHERS = st.sampled_from(
    [{"do": "hold"}, {"do": "add"}, {"do": "zero"}, {"do": "gather"}, {"do": "gather", "rows": 2}]
)
REQUIRES = st.builds(
    lambda of, gradient: {"do": "requires", "of": of, "gradient": gradient},
    st.sampled_from(["frozen", "frozen", "experts"]),
    st.booleans(),
)
WHEN = st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1), (3, 1)])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A plan, of which some is done in every few steps alone, and what runs it."""
    parts = st.one_of(passes(), passes(), UPDATES, OTHERS, REQUIRES)
    before, after = (draw(st.lists(parts, max_size=3)) for _ in range(2))
    plan = [
        {**do, "when": draw(WHEN)} for do in (*before, draw(passes()), *after)
    ]  # one that trains nothing is an error
    is_sparse = any(do.get("loss") == "table" for do in plan)
    adam = not is_sparse and draw(st.booleans())
    return {
        "plan": plan,
        "shards": draw(st.integers(3, 5)),
        "batch_size": draw(st.sampled_from([3, 10, 11])),
        "workers": draw(st.sampled_from([(1, 2), (2, 3), (3, 1)])),
        "bitwise": draw(st.booleans()),
        "evaluates": draw(st.sampled_from([None, 1, 2, 3])),
        "of_loop": {"decay": 0.0 if is_sparse else draw(st.sampled_from([0.0, 0.1])), "adam": adam},
    }


def check_case(case: dict[str, Any]) -> None:
    workers, plan = case["workers"], [*case["plan"], an_update("all")]
    keys = {name: case[name] for name in ("shards", "batch_size", "bitwise", "evaluates", "of_loop")}
    with TemporaryDirectory() as folder:
        first, other = (check(Path(folder) / str(count), plan, count, **keys) for count in workers)
    if case["bitwise"]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@settings(max_examples=examples(10))
@given(case=cases())
def test_a_drawn_loop_is_that_of_plain_torch(case: dict[str, Any]) -> None:
    check_case(case)
