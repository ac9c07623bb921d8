"""What a step sums and computes beside the gradients: the stats, norms, and the seeds of an update."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.forward.step import Weighted, as_tensor, row_of
from dp_ray.engine.optimizer import runs_users_code
from dp_ray.engine.sums.votes import StepSums, Totals
from dp_ray.engine.world import CPU, World, own_rank
from tests.support.group import history_of, run_group
from tests.support.trainings import job_of

HERE = "tests.engine.sums.test_beside_gradients"
WIDE = 600  # a layer of 1.4 MB, more than the 1 MB of DDP's first bucket


class Noting(torch.optim.SGD):
    """SGD that notes the norm of all gradients on each rank."""

    def __init__(self, parameters: Any, folder: str) -> None:
        super().__init__(parameters, 0.1)
        self.folder = folder

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [param.grad for group in self.param_groups for param in group["params"]]
        norm = nn.utils.get_total_norm(gradients).item()
        with Path(self.folder, f"norms-{own_rank()}.jsonl").open("a") as file:
            file.write(f"{json.dumps(norm)}\n")
        super().step(closure)


class Patient(torch.autograd.Function):
    """Lets the buckets that are complete be summed before it goes on with the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradients[0]


class Wide(nn.Module):
    """Its last layers fill DDP's first bucket, which is summed before the first layer has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Patient.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        outputs: torch.Tensor = self.last(self.second(hidden))
        return outputs


def some_ignored(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose weight is not the rows: each first row of a shard counts nothing."""
    counts = torch.ones(len(target))
    counts[0] = 0
    return (nn.functional.cross_entropy(outputs, target, reduction="none") * counts).sum(), counts.sum()


@pytest.mark.full(but=["torch.nn:CrossEntropyLoss"])
@pytest.mark.parametrize("loss", ["torch.nn:CrossEntropyLoss", f"{HERE}:some_ignored"])
def test_norms_are_torchs_to_the_bit(tmp_path: Path, loss: str) -> None:
    optimizer = {"target": f"{HERE}:Noting", "args": {"folder": str(tmp_path)}}
    job = job_of({"target": f"{HERE}:Wide"}, workers=2, epochs=1, loss=loss, optimizer=optimizer)
    run_group(job, tmp_path / "run")
    norms = [row["gradient_norm"] for row in history_of(tmp_path / "run")]
    for rank in range(2):
        noted = (tmp_path / f"norms-{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in noted] == norms


@given(
    st.integers(1, 300),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 299), st.floats(-1e6, 1e6), st.floats(0, 1e3)), max_size=40),
)
def test_stats_sum_as_a_table_of_torch_does(shards: int, measures: int, rows: list[tuple[int, float, float]]) -> None:
    """The bits are those of the sums alone, whose table has neither votes nor counts."""
    stats, table = StepSums(shards, measures, World()), torch.zeros(shards, 2 * measures, dtype=torch.float64)
    for number, total, weight in rows:
        shard = number % shards
        measured = [Weighted(torch.tensor(total * (1 + at)), weight) for at in range(measures)]
        stats.put(shard, row_of(measured, CPU))
        table[shard] = torch.stack([torch.as_tensor(one, dtype=torch.float64) for pair in measured for one in pair])
    stats.vote()
    stats.set_aside(7)
    totals, sums = stats.total(), table.sum(0)
    assert torch.equal(totals.row, torch.cat([sums, torch.tensor([1.0, 7.0])]))
    assert totals[1:] == (*sums[:2].tolist(), 1.0, 7.0, False)
    means = [None if sums[at + 1] == 0 else (sums[at] / sums[at + 1]).item() for at in range(0, 2 * measures, 2)]
    assert Totals.means(totals.row.tolist()) == (means, 7)


@given(st.integers(1, 50), st.data())
def test_each_worker_votes_and_counts_in_a_row_of_its_own(shards: int, data: st.DataObject) -> None:
    """So that of each number all workers but one have 0, and its sum is exact."""
    size = data.draw(st.integers(1, shards))
    told = []
    for rank in range(size):
        stats = StepSums(shards, 1, World(rank, size))
        stats.vote()
        stats.set_aside(rank + 1)
        told.append(stats.numbers)
    assert (torch.stack(told).count_nonzero(0) <= 1).all()
    assert torch.stack(told).sum((0, 1)).tolist() == [0.0, 0.0, size, size * (size + 1) / 2]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_a_row_is_the_same_read_at_once_or_left_where_it_is(dtype: torch.dtype) -> None:
    class Elsewhere(torch.Tensor):
        """A tensor that is not read at once, like a fake one."""

    numbers = torch.tensor([0.1, 3.7, 1e4]).to(dtype)
    measured = [Weighted(numbers[0], 3), Weighted(numbers[1], numbers[2])]
    left = [Weighted(one.sum.as_subclass(Elsewhere), one.weight) for one in measured]
    assert torch.equal(
        as_tensor(row_of(measured, CPU), CPU), as_tensor(row_of(left, CPU), CPU).as_subclass(torch.Tensor)
    )


def lively(optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of the user's own."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(torch.rand(())))


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ({}, False),
        ({"optimizer": {"target": torch.optim.AdamW}}, False),
        ({"scheduler": {"target": "torch.optim.lr_scheduler:MultiStepLR", "args": {"milestones": [2, 4]}}}, False),
        ({"optimizer": {"target": f"{HERE}:Noting", "args": {"folder": "."}}}, True),
        ({"scheduler": {"target": f"{HERE}:lively"}}, True),
        ({"scheduler": {"target": "torch.optim.lr_scheduler:LambdaLR", "args": {"lr_lambda": [abs]}}}, True),
        (
            {"scheduler": {"target": "torch.optim.lr_scheduler:LambdaLR", "args": {"lr_lambda": {"of": [[abs]]}}}},
            True,
        ),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1)}, True),
    ],
)
def test_what_may_draw_random_numbers_in_an_update_is_known(keys: dict[str, Any], runs: bool) -> None:
    job = job_of("mlp", **keys)
    assert any(map(runs_users_code, (job.optimizer, job.scheduler))) == runs


@pytest.mark.full(but=["keys0"])
@pytest.mark.parametrize(
    "keys", [{"scheduler": {"target": f"{HERE}:lively"}}, {"hooks": {"on_step": f"{HERE}:drawing"}}]
)
def test_what_a_users_code_draws_after_a_step_is_the_same_on_any_number_of_workers(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    def drawn(workers: int) -> list[Any]:
        job = job_of("mlp", workers=workers, shards=2, bitwise=True, epochs=1, **keys)
        run_group(job, tmp_path / str(workers))
        kept = tmp_path / str(workers) / "drawn.txt"
        rows = [row["learning_rate"] for row in history_of(tmp_path / str(workers))]
        return [rows, kept.read_text() if kept.exists() else ""]

    alone = drawn(1)
    assert len(set(alone[0])) > 1 or len(set(alone[1].splitlines())) > 1, "nothing was drawn"
    assert drawn(2) == alone


def drawing(view: Any) -> None:
    """A hook that draws a random number, and notes it."""
    with Path(view.run_dir, "drawn.txt").open("a") as file:
        file.write(f"{torch.rand(()).item()}\n")
