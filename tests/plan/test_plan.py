"""The plan is what a run does: counted against walking the epochs one batch at a time."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.cli import main
from dp_ray.plan.costs import Plan, plan_table
from dp_ray.plan.split import Split


def walked(rows: int, batch_size: int, epochs: int, max_steps: int | None, drop_last: bool) -> list[list[int]]:
    """The rows of each global batch of each epoch that a run begins."""
    found: list[list[int]] = []
    for _ in range(epochs):
        found.append([])
        for start in range(0, rows, batch_size):
            size = min(batch_size, rows - start)
            if (size == batch_size or not drop_last) and sum(map(len, found)) != max_steps:
                found[-1].append(size)
    return [epoch for epoch in found if epoch]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.none() | st.integers(1, 60), st.booleans())
def test_a_plan_is_what_a_run_does(
    rows: int, batch_size: int, epochs: int, max_steps: int | None, drop_last: bool
) -> None:
    found = walked(rows, batch_size, epochs, max_steps, drop_last)
    planned = Plan(Split(rows, batch_size, 3, drop_last, epochs, max_steps), 2, 2).to_json()
    if not found:
        assert planned["steps"] == 0
        return
    assert planned.get("total_steps", planned["epochs"] * planned["steps"]) == sum(map(len, found))
    assert (planned["epochs"], planned["steps"]) == (len(found), len(found[0]))
    assert [batch["rows"] for batch in planned["batches"] for _ in range(batch["steps"])] == found[0]


def test_the_steps_in_all_are_told() -> None:
    lines = plan_table(Plan(Split(100, 30, 3, epochs=5, max_steps=10), 2, 2)).splitlines()
    assert lines[1] == "3 epochs, 10 steps in all, the last one ends after 2"
    assert "epochs" not in plan_table(Plan(Split(100, 30, 3, max_steps=2), 2, 2))


@pytest.mark.usefixtures("in_project")
def test_the_program_plans_a_training_up_to_max_steps(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "jobs/tutorial.yaml", "--set", "task=train", "--set", "max_steps=3", "--json"]
    train = ["--set", "loss=torch.nn:MSELoss", "--set", "optimizer.target=torch.optim:SGD"]
    main.cli([*args, *train], standalone_mode=False)
    planned: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (planned["epochs"], planned["steps"], len(planned["batches"])) == (1, 3, 1)
