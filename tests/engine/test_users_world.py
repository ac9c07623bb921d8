"""What the user's code sees of torch.distributed: a world of one process, on any number of workers."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

import dp_ray
from dp_ray.data import Stream
from dp_ray.engine.forward.model import as_module
from dp_ray.engine.world import alone, everyone, has_peers, new_group, pretended
from dp_ray.errors import ModelError
from dp_ray.messages import Note
from tests.support import training
from tests.support.cluster import ROOT
from tests.support.group import run_group, weights_of
from tests.support.merging import merged
from tests.support.sources import nodes_of
from tests.support.training import Pairs
from tests.support.trainings import initial, job_of, mean_loss

pytestmark = pytest.mark.usefixtures("in_project")
HERE = "tests.engine.test_users_world"
ROWS, BATCH = 23, 7


def normalised(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of the losses, and their number; as criteria of detectors, it divides by a count over all ranks."""
    count = torch.tensor(float(len(target)))
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    losses = nn.functional.cross_entropy(outputs, target, reduction="none")
    return losses.sum() / count * len(target), len(target)


def normalised_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    return {"loss": normalised(outputs, batch[1]), "outputs": outputs, "target": batch[1]}


def plainly() -> dict[str, torch.Tensor]:
    """The weights after an epoch of plain torch."""
    model, data = initial(training.mlp), Pairs(ROWS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training.plain_loop(model, data, BATCH, 1, mean_loss, optimizer, order_of=lambda _: range(ROWS))
    return dict(model.state_dict())


@pytest.mark.parametrize(("kind", "workers"), [("step", 1), ("step", 3), ("loss", 2)])
def test_a_criterion_that_sums_over_all_ranks_does_so_over_one(tmp_path: Path, kind: str, workers: int) -> None:
    function = {"step": "normalised_step", "loss": "normalised"}[kind]
    keys: dict[str, Any] = {"loss": None, kind: f"{HERE}:{function}", "shuffle": False, "epochs": 1}
    keys |= {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": ROWS}}, "batch_size": BATCH}
    keys |= {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    run_group(job_of("mlp", workers=workers, shards=3, **keys), tmp_path / "run")
    weights = weights_of(tmp_path / "run")
    for name, value in plainly().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


class SplitByRank(IterableDataset[torch.Tensor]):
    """Rows of 5 numbers, of which each rank reads its own: by torch's group, and by what launchers set."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.ones(())
        dist.all_reduce(total)  # works, if over one
        first, step = rank + int(os.environ.get("RANK", "0")), size * int(os.environ.get("WORLD_SIZE", "1"))
        return (torch.full((5,), float(row)) * total for row in range(first, ROWS, step))


def split_by_rank(loader_context: str | None) -> Any:
    stream: Any = Stream(SplitByRank, ROWS)
    stream.loader_context = loader_context
    return stream


@pytest.mark.full(but=["2-1-None"])
@pytest.mark.parametrize(("processes", "context"), [(0, None), (1, None), (1, "spawn")])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_split_by_rank_gives_all_rows(
    tmp_path: Path, workers: int, processes: int, context: str | None
) -> None:
    loader = {"processes": processes}
    keys: dict[str, Any] = {"model": nn.Identity(), "batch_size": BATCH, "loader": loader, "shards": 2}
    keys["dataset"] = {"target": f"{HERE}:split_by_rank", "args": {"loader_context": context}}
    outputs = predicted(tmp_path, workers, **keys)
    assert outputs[:, 0].tolist() == [float(row) for row in range(ROWS)]


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_the_world_is_of_one_too(run_in_session: Any) -> None:
    keys: dict[str, Any] = {"model": nn.Identity(), "batch_size": BATCH, "workers": 2, "shards": 2}
    keys["dataset"] = {"target": "dp_ray.data:Stream", "args": {"iterable": f"{HERE}:SplitByRank", "rows": ROWS}}
    assert run_in_session(**keys).outputs[:, 0].tolist() == [float(row) for row in range(ROWS)]


def predicted(folder: Path, workers: int, **keys: Any) -> Any:
    """The outputs of a prediction in this process, or on workers without Ray."""
    if not workers:
        return dp_ray.run(**keys, workers=0, storage=str(folder), name="run", quiet=True).outputs
    job = dp_ray.Job.make({**keys, "workers": workers}, "run")
    run_group(job, folder / "run")
    return merged(job, folder / "run", ROWS).read()


def test_a_worker_that_is_alone_leaves_its_callers_group_as_it_was() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    callers, hook = dist.group.WORLD, sys.excepthook
    try:
        with alone(needs_group=True):
            assert dist.group.WORLD not in (None, callers, everyone())
            assert not has_peers()
        assert (dist.group.WORLD, everyone(), sys.excepthook) == (callers, None, hook)
        total = torch.ones(())
        dist.all_reduce(total)
        assert total.item() == 1
        with alone(needs_group=True):
            dist.destroy_process_group()  # as scripts do at their end
        assert (dist.is_initialized(), everyone()) == (False, None), "the caller's went with all others"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Synced(nn.Module):
    """A model that its author made for several GPUs."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.layers = nn.SyncBatchNorm.convert_sync_batchnorm(layers)  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


class Plain(Synced):
    """The same with BatchNorm."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_a_syncbatchnorm_of_the_models_own_follows_the_shard(tmp_path: Path) -> None:
    def trained(model: str, workers: int) -> tuple[dict[str, torch.Tensor], list[str]]:
        folder = tmp_path / f"{model}-{workers}"
        job = job_of({"target": f"{HERE}:{model}"}, batch_size=21, shards=4, workers=workers, bitwise=True)
        told = run_group(job, folder)
        return weights_of(folder), [message.text for message in told if isinstance(message, Note)]

    plain, _ = trained("Plain", 1)
    for workers in (1, 2):
        synced, says = trained("Synced", workers)
        assert all(torch.equal(synced[name], value) for name, value in plain.items())
        assert ["set sync_batchnorm: true" in text for text in says if "SyncBatchNorm" in text] == [True] * (
            workers > 1
        )


def test_the_callers_syncbatchnorm_stays_one(tmp_path: Path) -> None:
    model = Synced()
    dp_ray.run(model=model, dataset=Pairs(8).inputs, batch_size=4, workers=0, storage=str(tmp_path), quiet=True)
    as_module(model)
    assert type(model.layers[1]) is nn.SyncBatchNorm


def test_a_worker_that_plans_names_its_next_group_as_the_others_do() -> None:
    """A group forms by its name: one that planned memory after an error would wait for ever."""
    with alone(needs_group=True):
        first = new_group().group_name
        with pretended(3):
            assert has_peers()
        assert not has_peers()
        number = int(first.rpartition("-")[2])
        assert new_group().group_name == f"dp_ray-{number + 1}"


def test_each_collective_names_its_group() -> None:
    """torch's default group is of one process: what names no group would sum over nobody, or be rank 0 everywhere."""
    makes = {"init_process_group", "destroy_process_group", "is_initialized", "is_available", "is_nccl_available"}
    plain = {"HashStore", "Backend", "GroupName"}
    calls = [
        (path, node)
        for path in (ROOT / "dp_ray").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("dist", "torch.distributed"))
            or (isinstance(node.func, ast.Name) and node.func.id in ("all_gather", "_reduce_scatter"))
        )
        and ast.unparse(node.func).rpartition(".")[2] not in makes | plain
    ]
    unnamed = [
        f"{path.name}:{node.lineno}"
        for path, node in calls
        if "group" not in {keyword.arg for keyword in node.keywords}
    ]
    assert len(calls) > 20
    assert unnamed == []


class Wrapping(nn.Module):
    """A model that is, has, or makes in its forward a DistributedDataParallel."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.wrapped = None if is_late else nn.parallel.DistributedDataParallel(self.inner)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.wrapped is None:
            self.wrapped = nn.parallel.DistributedDataParallel(self.inner)
        outputs: torch.Tensor = self.wrapped(inputs)
        return outputs


def wrapped(kind: str) -> nn.Module:
    made = Wrapping(kind == "forward") if kind != "whole" else nn.Linear(6, 3)
    return nn.parallel.DistributedDataParallel(made) if kind == "whole" else made


@pytest.mark.parametrize(
    ("kind", "says"),
    [("whole", "the model is"), ("part", "the module wrapped is"), ("forward", "the module wrapped is")],
)
def test_a_training_refuses_another_sum_over_workers(tmp_path: Path, kind: str, says: str) -> None:
    """DDP's hooks in the backward wrote over those of dp_ray: gradients were wrong on several workers."""
    model = {"target": f"{HERE}:wrapped", "args": {"kind": kind}}
    job = job_of(model, workers=0, batch_size=BATCH, storage=str(tmp_path))
    with pytest.raises(ModelError, match=f"{says} a DistributedDataParallel"):
        dp_ray.run(job, name="run", quiet=True)
