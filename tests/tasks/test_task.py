"""A job's whole task below Ray, against a plain loop over torch.chunk in one process."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from dp_ray.engine.loads.loader import StepTimes, TimedLoader
from dp_ray.engine.world import World, alone
from dp_ray.errors import DataError, Error, ModelError
from dp_ray.job.job import Job
from dp_ray.messages import Note, Report
from dp_ray.outputs.files import prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import models
from tests.support.chance import examples
from tests.support.group import run_group, shapes_in
from tests.support.merging import merged


def job_of(model: Any, dataset: Any, **keys: Any) -> Job:
    return Job.make({"model": model, "dataset": dataset, "batch_size": 7, **keys}, "job")


def run_alone(job: Job, folder: Path) -> tuple[Merged, list[Report]]:
    """Each of the job's workers after another in this process: none ever waits for another."""
    run = Storage(str(folder))
    run.child(PARTS).create()
    told: list[Any] = []
    for rank in range(job.max_workers):
        run_task(job, World(rank, job.max_workers), run, told.append)
    return merged(job, run, len(job.dataset)), [message for message in told if isinstance(message, Report)]


def plain_loop(job: Job, order: list[int], collate: Callable[[list[Any]], Any], dim: int = 0) -> list[Any]:
    """The oracle: batches of the order, cut by torch.chunk, through the model, one chunk after another."""
    outputs = []
    job.model.eval()
    with torch.inference_mode():
        for start in range(0, len(order), job.batch_size):
            batch = collate([job.dataset[index] for index in order[start : start + job.batch_size]])
            outputs += [job.model(chunk) for chunk in batch.chunk(job.num_shards, dim)]
    return outputs


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    shards=st.integers(1, 9),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_outputs_are_a_plain_loops_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    batch_size: int,
    shards: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    workers = data.draw(st.integers(1, shards))
    order_key = "shuffled" if shuffle else "dataset"
    keys = {"batch_size": batch_size, "shards": shards, "workers": workers, "order": order_key, "seed": 3}
    job = job_of(models.Linear(), models.Rows(rows), **keys)
    merged, reports = run_alone(job, tmp_path_factory.mktemp("run"))
    order = [Order(rows, 3, 0, True)[position] for position in range(rows)] if shuffle else list(range(rows))
    expected = torch.cat(plain_loop(job, order, torch.stack))
    assert torch.equal(merged.read(), expected)
    whole = job.model(torch.stack([job.dataset[index] for index in order])).detach()
    assert torch.allclose(merged.read(), whole, atol=1e-6)
    assert sum(shapes_in(reports, "rows")) == rows


@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (3, 2), (8, 3), (8, 8)])
def test_a_conv_net(tmp_path: Path, shards: int, workers: int) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    images = torch.randn(23, 1, 4, 4)
    job = job_of(net, images, shards=shards, workers=workers)
    merged, _ = run_alone(job, tmp_path)
    assert torch.equal(merged.read(), torch.cat(plain_loop(job, list(range(23)), torch.stack)))


def test_a_recurrent_net_with_the_batch_in_dimension_1(tmp_path: Path) -> None:
    job = job_of(models.Recurrent(), models.Sequences(), shards=3, workers=2, batch_dim=1)
    merged, _ = run_alone(job, tmp_path)
    chunks = plain_loop(job, list(range(17)), lambda items: torch.stack(items, 1), dim=1)
    outputs, state = merged.read()
    assert torch.equal(outputs, torch.cat([chunk[0] for chunk in chunks], 1))
    assert torch.equal(state, torch.cat([chunk[1] for chunk in chunks], 1))
    sizes = [batch[0].shape for batch in merged.batches(7)]
    assert sizes == [torch.Size([4, 7, 6]), torch.Size([4, 7, 6]), torch.Size([4, 3, 6])]


def test_a_dict_in_and_a_model_output_out(tmp_path: Path) -> None:
    job = job_of(models.Transformerish(), models.Tokens(), shards=4, workers=3, call="kwargs")
    merged, _ = run_alone(job, tmp_path)
    outputs: Any = merged.read()
    data = models.Tokens()
    with torch.inference_mode():
        expected: Any = job.model(data.ids, (data.ids > 2).long())
    assert type(outputs).__name__ == "ModelOutput"
    assert list(outputs) == ["logits", "hidden_states"]
    assert outputs.loss is None
    assert torch.allclose(outputs.logits, expected.logits, atol=1e-6)
    assert torch.equal(outputs.hidden_states[0], expected.hidden_states[0])


def test_a_model_without_parameters(tmp_path: Path) -> None:
    job = job_of(models.Doubler(), models.Rows(), shards=4, workers=4)
    merged, _ = run_alone(job, tmp_path)
    assert torch.equal(merged.read(), models.Rows().data * 2)


def test_rows_of_several_lengths_are_padded_by_the_collate(tmp_path: Path) -> None:
    job = job_of(models.Doubler(), models.Ragged(), shards=3, workers=2, collate=models.pad)
    merged, _ = run_alone(job, tmp_path)
    data = models.Ragged()
    padded = nn.utils.rnn.pad_sequence([data[index] for index in range(11)], batch_first=True, padding_value=-1.0)
    assert torch.equal(merged.read(), padded * 2)


@pytest.mark.slow
def test_loader_processes_read_the_same(tmp_path: Path) -> None:
    loader = {"processes": 2, "prefetch": 3}
    job = job_of(models.Linear(), models.Rows(), shards=4, workers=2, loader=loader)
    merged, _ = run_alone(job, tmp_path)
    assert torch.equal(merged.read(), torch.cat(plain_loop(job, list(range(100)), torch.stack)))


class Counted:
    """A dataset that knows what was read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.zeros(5)


def test_a_worker_reads_its_own_rows_only(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(PARTS).create()
    data = Counted()
    job = job_of(models.Linear(), data, batch_size=30, shards=8, workers=8)
    run_task(job, World(7, 8), run, lambda report: None)
    assert data.read == [28, 29, 58, 59, 88, 89]


@pytest.mark.parametrize("loader", [{"processes": 0}, {"processes": 1}])
def test_a_sample_that_raises_is_named(tmp_path: Path, loader: dict[str, int]) -> None:
    job = job_of(models.Linear(), models.Breaks(), workers=2, loader=loader)
    with pytest.raises(DataError, match="sample 7 of the dataset raised OSError: the disk has a hole"):
        run_alone(job, tmp_path)


def test_a_model_that_raises_is_told_by_step_and_shard(tmp_path: Path) -> None:
    job = job_of(models.RaisesOn(12), models.Rows(), workers=2)
    with pytest.raises(
        ModelError, match="step 1, shard 1: model raised ArithmeticError: a number that I do not like"
    ):
        run_alone(job, tmp_path)


@pytest.mark.parametrize(
    ("model", "dataset", "says"), [("Linear", "Breaks", "a hole"), ("RaisesOn", "Rows", "a number")]
)
def test_an_error_ends_the_loaders_processes(tmp_path: Path, model: str, dataset: str, says: str) -> None:
    """At once, though its frames hold the loader; else the collector would come upon it, and torch wait for 5 s."""
    given = (12,) if model == "RaisesOn" else ()
    loader = {"processes": 2}
    job = job_of(getattr(models, model)(*given), getattr(models, dataset)(), workers=2, loader=loader)
    before = set(multiprocessing.active_children())
    with pytest.raises(Error, match=says):
        run_alone(job, tmp_path)
    assert not set(multiprocessing.active_children()) - before


class Hangs(models.Rows):
    """Rows of which those behind the first ones hang, or end the process that reads them."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 14 and self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if index >= 14:
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_processes_in_the_midst_of_a_read_are_ended_within_a_second_or_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 40.0)  # instead of 5
    loader = {"processes": 4}
    job, began = job_of(models.RaisesOn(0), Hangs(ends=False), workers=1, loader=loader), time.monotonic()
    with pytest.raises(ModelError, match="a number that I do not like"):
        run_alone(job, tmp_path)
    assert time.monotonic() - began < 40, "torch alone waits so long for each of four"


def test_a_process_of_a_loader_that_was_killed_is_told_by_step_and_shard(tmp_path: Path) -> None:
    job = job_of(models.Linear(), Hangs(ends=True), workers=1, loader={"processes": 1})
    says = r"step \d, shard 0: a process of the loader has ended in the midst of its work( \(.*SIGKILL\))?, as where"
    with pytest.raises(DataError, match=says):
        run_alone(job, tmp_path)


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "reset"), FileNotFoundError(2, "no socket")])
def test_a_process_that_was_killed_before_its_tensors_were_fetched_is_told(error: Exception) -> None:
    """A batch's memory is asked for from the process that made it, which may be gone by then."""

    class Killed:
        num_workers = 0

        def __iter__(self) -> Iterator[Any]:
            raise error
            yield

    with pytest.raises(DataError, match="a process of the loader has ended in the midst of its work, as where"):
        next(TimedLoader(Killed(), StepTimes()))  # type: ignore[arg-type]


def test_one_number_a_shard_cannot_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step 0, shard 0.*scalar"):
        run_alone(job_of(models.ScalarMean(), models.Rows(), workers=2), tmp_path)


def test_a_collate_that_loses_rows_is_told(tmp_path: Path) -> None:
    job = job_of(models.Linear(), models.Rows(), collate=lambda items: torch.stack(items[1:]))
    with pytest.raises(
        ModelError, match=r"shard 0: output has 6 rows .*, not 7: .* leave no sample out in the collate"
    ):
        run_alone(job, tmp_path)


def test_the_first_of_what_is_no_pair_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="inputs: 'first' needs items that are"):
        run_alone(job_of(models.Linear(), models.Rows(), inputs="first"), tmp_path)


class Unseeded(models.Linear):
    """Weights that no seed fixes: only rank 0's may count."""

    def __init__(self) -> None:
        super().__init__()
        torch.seed()
        nn.init.normal_(self.layer.weight)


@pytest.mark.slow
def test_several_processes_run_rank_0s_weights_and_no_empty_shard_is_waited_for(tmp_path: Path) -> None:
    target = {"target": "tests.tasks.test_task:Unseeded"}
    job = job_of(
        target, {"target": "tests.support.models:Rows", "args": {"length": 32}}, batch_size=30, shards=8, workers=4
    )
    run_group(job, tmp_path)
    run = Storage(str(tmp_path))
    prove_outputs(run, 32)
    outputs = Merged.of(run).read()
    data = torch.cat([models.Rows(32).data, torch.ones(32, 1)], 1)
    solution = torch.linalg.lstsq(data, outputs).solution
    assert torch.allclose(data @ solution, outputs, atol=1e-5), "the rows did not go through one and the same layer"


def notes_of(job: Job, folder: Path) -> list[str]:
    """What the workers of a job told, one after another."""
    run = Storage(str(folder))
    told: list[Any] = []
    run.child(PARTS).create()
    for rank in range(job.max_workers):
        run_task(job, World(rank, job.max_workers), run, told.append)
    return [message.text for message in told if isinstance(message, Note)]


def test_a_registered_class_in_the_outputs_is_a_nesting(tmp_path: Path) -> None:
    merged, _ = run_alone(job_of(models.Caching(), models.Rows(20), workers=3), tmp_path)
    outputs, rows = merged.read(), models.Rows(20).data
    assert (type(outputs["cache"]), outputs["cache"].name) == (models.Cache, "cache")
    assert torch.equal(outputs["cache"].layers[0], rows * 2)
    assert torch.equal(outputs["cache"].layers[1], rows[:, None] + 1)
    assert (outputs["of"], outputs["n"]) == ((1.5, None), 7)
    assert [column.name for column in merged.layout().columns] == ["logits", "cache.0.0", "cache.0.1"]


def test_objects_in_the_outputs_are_left_out_and_told_once(tmp_path: Path) -> None:
    job = job_of(models.Caching(models.PlainCache), models.Rows(20), workers=3)
    merged, reports = run_alone(job, tmp_path / "merged")
    assert merged.read()["cache"] is None
    assert [column.name for column in merged.layout().columns] == ["logits"]
    seen = {*shapes_in(reports, "output_size")}
    assert all("<PlainCache>" in size for size in seen), seen
    assert len(seen) <= 3, "each object looks like another in the reports"
    assert sorted(notes_of(job, tmp_path / "notes")) == [
        "outputs: cache is a PlainCache, no tensor, number or text: it is left out",
        "outputs: of.1 is a dtype, no tensor, number or text: it is left out",
    ]


def test_inputs_may_be_of_a_class_of_the_users(tmp_path: Path) -> None:
    job = job_of(models.OnCaches(), models.Rows(20), workers=3, shards=4, collate=models.cached)
    merged, _ = run_alone(job, tmp_path)
    assert torch.equal(merged.read(), models.Rows(20).data * 4)


@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_where_nothing_is_trained_no_ddp_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """Its gradient buckets would take as much memory as the model."""
    made: list[Any] = []
    before = nn.parallel.DistributedDataParallel.__init__
    monkeypatch.setattr(
        nn.parallel.DistributedDataParallel, "__init__", lambda *args, **keys: made.append(before(*args, **keys))
    )
    data = TensorDataset(models.Rows(20).data, torch.zeros(20, 2)) if task == "evaluate" else models.Rows(20)
    job = job_of(models.Linear(), data, task=task, loss="torch.nn:MSELoss")
    Storage(str(tmp_path)).child(PARTS).create()
    with alone(needs_group=True):
        run_task(job, World(), Storage(str(tmp_path)), lambda _: None)
    assert made == []


def test_predict_takes_devices_of_two_types_on_several_workers(tmp_path: Path) -> None:
    job = job_of(
        {"target": "tests.support.models:OnTwoTypes"},
        {"target": "tests.support.models:Rows"},
        devices=["cpu", "meta"],
        workers=2,
    )
    run_group(job, tmp_path)
    run = Storage(str(tmp_path))
    prove_outputs(run, 100)
    torch.manual_seed(0)
    layer = models.OnTwoTypes([torch.device("cpu")]).layer
    assert torch.allclose(Merged.of(run).read(), layer(models.Rows().data), atol=1e-6)


@pytest.mark.slow
def test_a_torchscript_module_predicts_what_its_module_does(tmp_path: Path) -> None:
    keys = {"dataset": {"target": "tests.support.training:Images"}, "inputs": "first", "workers": 2, "shards": 3}
    outputs = []
    for name in ("conv", "scripted"):
        job = job_of({"target": f"tests.support.training:{name}"}, **keys)
        run_group(job, tmp_path / name)
        run = Storage(str(tmp_path / name))
        prove_outputs(run, 101)
        outputs.append(Merged.of(run).read())
    assert torch.equal(*outputs)
