"""Numbers that are summed over the workers with the gradients: to the bit, and those of a worker without rows too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.engine.sums.votes import StatsBucket
from dp_ray.engine.world import everyone
from dp_ray.job.job import Job
from tests.support.group import Stopped, StopsBefore, history_of, run_group

CPU = torch.device("cpu")
PAIRS: dict[str, Any] = {
    "task": "train",
    "model": {"target": "tests.support.training:mlp"},
    "dataset": {"target": "tests.support.training:Pairs"},
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    "workers": 3,
}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=20),
    st.permutations(range(4)),
)
def test_numbers_of_one_worker_each_arrive_with_their_bits(cells: list[tuple[int, int]], order: list[int]) -> None:
    """Any bits: NaNs with a payload, -0, the smallest numbers. Their places may be summed in any order of workers."""
    bits = np.zeros((4, len(cells)), np.int64)
    for place, (worker, number) in enumerate(cells):
        bits[worker, place] = number
    gradients = []
    for own in bits:
        gradients.append(StatsBucket(len(cells), 3, CPU).gradient(torch.from_numpy(own.view(np.float64)), None))
    told = torch.zeros(len(cells), dtype=torch.float64)
    last = StatsBucket(len(cells), 3, CPU)
    last.parameter.grad = sum((gradients[at] for at in order), torch.zeros_like(gradients[0]))
    assert last.unload(told, True) == [True, True, True]
    assert told.numpy().view(np.int64).tolist() == bits.sum(0).tolist()
    assert last.parameter.grad is None


def test_what_any_worker_used_is_told_beside_the_numbers() -> None:
    bucket = StatsBucket(1, 3, CPU)
    numbers, nothing = torch.tensor([1.5], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    bucket.parameter.grad = bucket.gradient(numbers, [True, False, False]) + bucket.gradient(
        nothing, [True, True, False]
    )
    told = torch.zeros(1, dtype=torch.float64)
    assert bucket.unload(told, True) == [True, True, False]
    assert told.tolist() == [1.5]


class OneAsks(StopsBefore):
    """The last worker asks for a stop, from a step on; the others do not know."""

    def __init__(self, step: int) -> None:
        super().__init__(-1)
        self._from, self._now = step, 0

    def before(self, step: int) -> None:
        self._now = step

    @property
    def wants_stop(self) -> bool:  # type: ignore[override]
        group = everyone()
        assert group is not None
        return group.rank() == group.size() - 1 and self._now >= self._from

    def leave(self) -> None:
        raise Stopped


@pytest.mark.full(but=["keys0"])
@pytest.mark.parametrize(
    "keys", [{}, {"bitwise": True}, {"find_unused_parameters": True}, {"workers": 2, "shards": 4}]
)
def test_a_worker_that_never_has_rows_is_heard(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = Job.make({**PAIRS, "batch_size": 2, "shards": 3, **keys}, "run")
    run_group(job, tmp_path, OneAsks(3))
    # A slow machine may have kept one before, by the clock.
    kept = max(int(path.stem.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert 4 <= kept <= 6, "all stopped soon after the step in which one asked"
    assert len(history_of(tmp_path)) == kept
