"""What the benchmarks' tables rest on: quartiles, verdicts, and two loops that take turns."""

import time
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu
from benchmarks.compare import AHEAD, Goal, Quartiles, at_least, at_most, compared, in_rounds, quartiles
from benchmarks.peers.sides import STAMPS, Stamp, stamps_in, times_of
from benchmarks.table import line, ratio_text
from benchmarks.turns import take_turns
from dp_ray.messages import StepControl


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40))
def test_quartiles_are_numpys(values: list[float]) -> None:
    np.testing.assert_allclose(quartiles(values), np.quantile(values, [0.25, 0.5, 0.75]), rtol=1e-9)


@pytest.mark.parametrize(
    ("goal", "found", "is_reached"),
    [
        (at_least(0.98), Quartiles(0.98, 0.99, 1.2), True),
        (at_least(0.98), Quartiles(0.97, 1.1, 1.2), False),
        (at_most(0.5), Quartiles(0.1, 0.2, 0.5), True),
        (at_most(0.5), Quartiles(0.1, 0.2, 0.51), False),
        (AHEAD, Quartiles(0.99, 1.3, 1.4), False),
    ],
)
def test_a_goal_is_reached_where_the_worse_quartile_is(goal: Goal, found: Quartiles, is_reached: bool) -> None:
    assert goal.is_reached(found) is is_reached


def test_a_row_has_the_ratios_within_the_pairs() -> None:
    # The medians of the sides, 30 and 40, would give 0.75; the pairs give 0.5, 1.5 and 1.0.
    pairs = [(10.0, 20.0), (60.0, 40.0), (30.0, 30.0)]
    row = compared("x", pairs, "{:.0f} s".format, "torch", at_most(1.25))
    assert line(row) == "| x | 30 s | 30 s torch | 1 (0.75 to 1.25) | at most 1.25 | yes |"


def test_an_absolute_goal_is_about_dp_rays_own_figure() -> None:
    fast = Goal("at least 200/s", 200, is_least=True, absolute=True)
    row = compared("x", [(190.0, 1.0), (210.0, 1.0), (230.0, 1.0)], "{:.0f}/s".format, "8 workers", fast)
    assert (row.dp_ray, row.reached) == ("210/s (200/s to 220/s)", True)
    both = compared("x", [(210.0, 200.0), (230.0, 240.0)], "{:.0f}/s".format, "8 workers", fast, AHEAD)
    assert (both.to_reach, both.reached) == ("at least 200/s, and ahead", False)


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.974, "0.974"), (1.5, "1.5"), (320.42, "320"), (1 / 22547, "1/22,547")]
)
def test_a_ratio_has_three_digits(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


def test_loops_take_turns_every_few_steps() -> None:
    ran: list[str] = []

    def loop(name: str, control: StepControl) -> None:
        ran.append(f"{name} builds")
        for step in range(5):
            control.before(step)
            ran.append(name)

    pairs = take_turns(partial(loop, "a"), partial(loop, "b"), 2)
    first = ["a builds", "a", "a", "b builds", "b", "b"]
    assert ran == [*first, "a", "a", "b", "b", "a", "b"]
    assert len(pairs) == 2
    assert all(cost.cpu > 0 and cost.wall > 0 for pair in pairs for cost in pair)


@pytest.mark.full
@pytest.mark.slow
def test_the_first_step_of_a_turn_is_not_measured_on_either_side() -> None:
    def loop(control: StepControl) -> None:
        for step in range(9):
            control.before(step)
            time.sleep(0.2 if step % 4 == 0 else 0.002)

    for pair in take_turns(loop, loop, 4):
        assert max(cost.wall for cost in pair) < 0.05, "a step of 0.2 s would be in it"


def test_of_each_round_the_pair_with_the_median_ratio_is_taken() -> None:
    first, second = [(3.0, 1.0), (1.0, 1.0), (4.0, 2.0)], [(1.0, 9.0), (2.0, 9.0), (9.0, 1.0)]
    assert in_rounds([*first, *second, (5.0, 1.0)], 3) == [(4.0, 2.0), (2.0, 9.0)]


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=5, max_size=40))
def test_rounds_favour_no_side(pairs: list[tuple[float, float]]) -> None:
    turned = in_rounds([(theirs, ours) for ours, theirs in pairs], 5)
    assert [theirs / ours for ours, theirs in turned] == [ours / theirs for ours, theirs in in_rounds(pairs, 5)]


def test_a_loop_that_fails_lets_the_other_end() -> None:
    def fails(control: StepControl) -> None:
        control.before(0)
        raise ValueError("no")

    def steps(control: StepControl) -> None:
        for step in range(9):
            control.before(step)
            ran.append(step)

    ran: list[int] = []
    with pytest.raises(ValueError, match="no"):
        take_turns(fails, steps, 2)
    assert ran == [*range(9)]


@pytest.mark.full
@pytest.mark.slow
def test_the_cases_of_a_gpu_run_on_the_cpu() -> None:
    quick = replace(gpu.SMALL, block=1, warm=0, pairs=1)
    for part, cases in (("small", 4), ("gpt", 2), ("resnet", 4)):
        rows = list(gpu.measure(part, torch.device("cpu"), quick))
        assert len(rows) == cases * len(gpu.peers(part))
        assert len({(row.what, row.against.split(" rows/s ")[1]) for row in rows}) == len(rows)


@pytest.fixture
def stamps() -> Any:
    spec = spec_from_file_location("stamps", STAMPS / "sitecustomize.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_process_may_look_for_torchvision_several_times(stamps: Any) -> None:
    for _ in range(2):
        assert stamps.AtImport().find_spec("torchvision") is None


def test_each_step_is_kept_with_its_time_and_every_second_one_with_its_bits(
    stamps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAMPS", str(tmp_path))
    monkeypatch.setenv("BITS", "2")
    weight = torch.zeros(2, 3).t().requires_grad_()  # not contiguous
    optimizer, other = (SimpleNamespace(param_groups=[{"params": [each]}]) for each in (weight, torch.zeros(3, 2)))
    began = time.time()
    for _ in range(4):
        stamps.keep(optimizer)
        with torch.no_grad():
            weight.mul_(-1)  # to -0.0, and back: other bits of an equal number
    (kept,) = stamps_in(tmp_path).values()
    assert [stamp.bits != 0 for stamp in kept] == [False, True, False, True]
    assert kept[1].bits == kept[3].bits != stamps.bits(other)
    assert began <= kept[0].at <= kept[3].at <= time.time()


@pytest.mark.parametrize("in_flight", [10.3, 10.9])
def test_what_a_kill_costs_is_the_step_that_waits_for_it(in_flight: float) -> None:
    """The step in flight may be finished or not; a later pause, as another process joins, is not the kill's."""

    def kept(*times: float) -> list[Stamp]:
        return [Stamp(time, 0) for time in times]

    steady = [6.0, 7.0, 8.0, 9.0]
    others = [kept(*steady, in_flight, first, first + 1, first + 9) for first in (13.0, 13.2)]
    stamps = {3: others[0], 5: others[1], 7: kept(*steady, 10.1), 8: kept(23.0, 24.0)}
    found = times_of(stamps, began=1.0, killed=10.2, steady=slice(0, 4))
    assert [found.start, found.step, found.lost] == pytest.approx([5.0, 1.0, 3.0])
