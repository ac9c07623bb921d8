"""Batches of any form, as a collate of the user's makes them. The oracle is plain torch on whole batches."""

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence, unpack_sequence
from torch.utils.data import Dataset

import dp_ray
from dp_ray.driver.planning import plan_memory_of
from dp_ray.engine.loads.bad_samples import not_finite
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.replay.inspect_step import OF_SHARD
from dp_ray.tensors.files import moved_batch
from dp_ray.tensors.tree import bare_tensors, copied, flatten, holds_objects, map_leaves, with_tensors
from tests.support.group import StopsBefore, history_of, run_group, weights_of
from tests.support.replays import replayed

HERE = "tests.engine.loads.test_batches"
ROWS, BATCH = 23, 10


class Sequences(Dataset[Any]):
    """Pairs of [n, 3] numbers and [n] targets, in float64; n is 1 to 5."""

    loader_context = "fork"

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        numbers = torch.randn(1 + index % 5, 3, generator=generator, dtype=torch.float64)
        return numbers, numbers.sum(1).sin()


class Broken(Sequences):
    """Sample 5 cannot be read, and sample 12 has NaN for a number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5:
            raise OSError("torn")
        numbers, targets = super().__getitem__(index)
        return (numbers * torch.nan if index == 12 else numbers), targets


class Graph:
    """Like torch_geometric's Batch: an object of nodes and edges of all graphs, and of the graph of each node."""

    def __init__(self, nodes: torch.Tensor, targets: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> None:
        self.nodes = nodes
        self.targets = targets
        self.edges = edges
        self.graph = graph

    def to(self, device: torch.device) -> "Graph":
        return Graph(*(value.to(device) for value in vars(self).values()))


@dataclasses.dataclass
class Padded:
    """Padded numbers, their lengths, and names that are no tensors."""

    numbers: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    names: tuple[str, ...]
    temperature: float = 1.0


class Net(nn.Module):
    """A number for each node of its own numbers and the mean of those around it, for batches of each form."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, Graph):
            source, target = batch.edges
            around = torch.zeros_like(batch.nodes).index_add_(0, target, batch.nodes[source])
            around = around / batch.graph.bincount()[batch.graph][:, None]
            return self.of(batch.nodes, around)
        rows = unpack_sequence(batch) if isinstance(batch, PackedSequence) else batch
        return self.of(torch.cat(list(rows)), torch.cat([row.mean(0).expand_as(row) for row in rows]))

    def of(self, numbers: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(torch.cat([numbers, around], 1))[:, 0]
        return made


def as_lists(items: list[Any]) -> Any:
    return [numbers for numbers, _ in items], [{"target": target, "name": f"of {len(target)}"} for _, target in items]


def as_packed(items: list[Any]) -> Any:
    packed = (pack_sequence(list(column), enforce_sorted=False) for column in zip(*items, strict=True))
    return dict(zip(("numbers", "targets"), packed, strict=True))


def as_graph(items: list[Any]) -> Graph:
    graph = torch.cat([torch.full((len(target),), number) for number, (_, target) in enumerate(items)])
    edges = (graph[:, None] == graph).nonzero().t()
    numbers, targets = (torch.cat(list(column)) for column in zip(*items, strict=True))
    return Graph(numbers, targets, edges, graph)


def as_padded(items: list[Any]) -> Padded:
    numbers, targets = (pad_sequence(list(column), batch_first=True) for column in zip(*items, strict=True))
    return Padded(numbers, targets, [len(one) for _, one in items], tuple(f"row of {len(one)}" for _, one in items))


def step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The squares of all nodes, of which each counts 1."""
    inputs: Any
    if isinstance(batch, Graph):
        inputs, target = batch, batch.targets
    elif isinstance(batch, Padded):
        inputs = [row[:length] for row, length in zip(batch.numbers, batch.lengths, strict=True)]
        target = torch.cat([row[:length] for row, length in zip(batch.targets, batch.lengths, strict=True)])
        assert all(name.startswith("row of") for name in batch.names) and batch.temperature == 1.0
    elif isinstance(batch, dict):
        inputs, target = batch["numbers"], torch.cat(unpack_sequence(batch["targets"]))
    else:
        inputs, target = batch[0], torch.cat([one["target"] for one in batch[1]])
    errors = (model(inputs) - target) ** 2
    return {"loss": (errors.sum(), len(errors)), "outputs": errors, "target": batch}


def plainly(skipped: tuple[int, ...] = ()) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and losses of a plain loop over whole batches, in lists."""
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            rows = [Sequences()[at] for at in range(start, min(start + BATCH, ROWS)) if at not in skipped]
            optimizer.zero_grad()
            outputs = model([numbers for numbers, _ in rows])
            loss = ((outputs - torch.cat([target for _, target in rows])) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, losses


def keys(form: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"model": f"{HERE}:Net", "dataset": f"{HERE}:Sequences", "collate": f"{HERE}:as_{form}"}
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    made |= {"task": "train", "step": f"{HERE}:step", "batch_size": BATCH, "shards": 6, "epochs": 2, "optimizer": sgd}
    return {**made, "bitwise": True, **more}


def job(form: str, **more: Any) -> Job:
    return Job.make(keys(form, **more), "job")


def assert_plain(weights: dict[str, torch.Tensor], history: Any, skipped: tuple[int, ...] = ()) -> None:
    wanted, losses = plainly(skipped)
    assert all(torch.allclose(weights[name], value, rtol=1e-12, atol=1e-14) for name, value in wanted.items())
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-12)


FORMS = ["lists", "packed", "graph", "padded"]


@pytest.mark.full(but=["graph"])
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_training_of_any_form_is_that_of_whole_batches_on_any_number_of_workers(tmp_path: Path, form: str) -> None:
    result = dp_ray.run(**keys(form, workers=0), storage=str(tmp_path), name="0", quiet=True)
    assert_plain(result.weights, result.history)
    loader = {"processes": 1}
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        run_group(job(form, workers=workers, loader=loader if workers == 2 else {}), folder)
        assert all(torch.equal(weights_of(folder)[name], tensor) for name, tensor in result.weights.items())
        assert [row["loss"] for row in history_of(folder)] == [row["loss"] for row in result.history]
    assert {report.rows for report in result.shapes} == {1, 2}
    assert sum(report.rows for report in result.shapes) == 2 * ROWS


@pytest.mark.full(but=["packed"])
@pytest.mark.slow
@pytest.mark.parametrize("form", ["graph", "packed"])
def test_sharded_workers_without_rows_run_a_copy_of_such_a_batch(tmp_path: Path, form: str) -> None:
    run_group(job(form, workers=2, shards=2, batch_size=BATCH, strategy="fsdp", bitwise=False), tmp_path / "two")
    assert_plain(weights_of(tmp_path / "two"), history_of(tmp_path / "two"))
    few = job(
        form, workers=2, shards=2, batch_size=22, strategy="fsdp", bitwise=False, max_steps=2
    )  # 22 rows, then 1
    run_group(few, tmp_path / "few")
    assert len(history_of(tmp_path / "few")) == 2


@pytest.mark.slow
def test_bad_and_skipped_samples_are_left_out_and_a_killed_training_goes_on(tmp_path: Path) -> None:
    more = {"skip": [3], "on_error": {"quarantine": 9, "finite": True}, "dataset": f"{HERE}:Broken"}
    whole = job("lists", workers=2, checkpoint={"every_steps": 2}, **more)
    run_group(whole, tmp_path / "whole")
    assert_plain(weights_of(tmp_path / "whole"), history_of(tmp_path / "whole"), skipped=(3, 5, 12))
    run_group(whole, tmp_path / "killed", StopsBefore(3))
    run_group(job("lists", workers=3, checkpoint={"every_steps": 2}, **more), tmp_path / "killed")
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(weights_of(tmp_path / "killed")[name], tensor)


def as_one_list(items: list[Any]) -> Any:
    images, targets = as_lists(items)
    return (images,), targets


def own_loss(outputs: torch.Tensor, target: list[Any]) -> Any:
    errors = (outputs - torch.cat([one["target"] for one in target])) ** 2
    return errors.sum(), len(errors)


def test_without_a_step_the_loss_gets_the_collates_target_as_it_is(tmp_path: Path) -> None:
    more = {"step": None, "loss": f"{HERE}:own_loss", "collate": f"{HERE}:as_one_list"}
    result = dp_ray.run(**keys("lists", workers=0, **more), storage=str(tmp_path), name="run", quiet=True)
    assert_plain(result.weights, result.history)


class Errors:
    """A metric with a state of plain Python, of outputs and targets of any form."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []
        self.rows = 0

    def update(self, outputs: torch.Tensor, target: Any) -> None:
        self.seen += outputs.tolist()
        self.rows += len(target[0])

    def merge_state(self, other: "Errors") -> None:
        self.seen += other.seen
        self.rows += other.rows

    def compute(self) -> dict[str, float]:
        return {"median": sorted(self.seen)[len(self.seen) // 2], "rows": self.rows}


def without_loss_in_evaluations(model: nn.Module, batch: Any) -> dict[str, Any]:
    made = step(model, batch)
    if not model.training:
        del made["loss"]
    return made


@pytest.mark.slow
def test_an_evaluation_measures_lists_and_needs_no_loss(tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval": {"dataset": f"{HERE}:Sequences"}, "metrics": {"of": f"{HERE}:Errors"}}
    more["step"] = f"{HERE}:without_loss_in_evaluations"
    result = dp_ray.run(**keys("lists", workers=0, **more), storage=str(tmp_path), name="run", quiet=True)
    model = Net()
    model.load_state_dict(plainly()[0])
    errors = step(model, as_lists([Sequences()[at] for at in range(ROWS)]))["outputs"].tolist()
    last = result.history[-1]
    assert (last["eval_of_median"], last["eval_of_rows"]) == (pytest.approx(sorted(errors)[len(errors) // 2]), ROWS)
    assert last.get("eval_loss") is None, "a step that gives none"
    assert_plain(result.weights, result.history)
    run_group(job("lists", workers=2, **more), tmp_path / "two")
    assert history_of(tmp_path / "two")[-1]["eval_of_median"] == last["eval_of_median"]
    watched = {**more, "checkpoint": {"best": "eval_loss"}}
    with pytest.raises(JobError, match=r"checkpoint.best.metric: eval measures eval_of_median, eval_of_rows; got"):
        dp_ray.run(**keys("lists", workers=0, **watched), storage=str(tmp_path), name="watched", quiet=True)


@pytest.mark.slow
def test_a_replay_says_that_the_losses_of_rows_are_not_known(tmp_path: Path) -> None:
    for form in FORMS:
        dp_ray.run(**keys(form, workers=0), storage=str(tmp_path), name=form, quiet=True)
        found = replayed(tmp_path / form, 1)
        assert found.loss == found.history_loss
        assert found.row_losses == OF_SHARD
        assert all(row.loss is None for row in found.rows)


def test_the_memory_of_lists_is_planned_and_that_of_objects_said_not_to_be() -> None:
    assert plan_memory_of(job("lists", workers=2), 1.0).workers[0].devices[0].activations > 0
    with pytest.raises(JobError, match="collate: the collate makes objects whose tensors cannot be replaced by ones"):
        plan_memory_of(job("graph", workers=2), 1.0)


def test_the_number_of_shards_is_found_for_a_batch_of_any_form(tmp_path: Path) -> None:
    for form in FORMS:
        keep = keys(form, workers=0, shards="auto", max_steps=1)
        assert dp_ray.run(**keep, storage=str(tmp_path), name=form, quiet=True).shards == 1


def without_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"outputs": model(batch[0])}


def test_a_training_needs_a_loss(tmp_path: Path) -> None:
    more = {"workers": 0, "step": f"{HERE}:without_loss"}
    with pytest.raises(ModelError, match="step returned a mapping without 'loss'"):
        dp_ray.run(**keys("lists", **more), storage=str(tmp_path), name="run", quiet=True)


META = torch.device("meta")


def test_a_batch_is_moved_through_containers_and_by_the_objects_own_method() -> None:
    items = [Sequences()[at] for at in (4, 0, 2)]
    for form, collate in zip(FORMS, (as_lists, as_packed, as_graph, as_padded), strict=True):
        assert holds_objects(collate(items)) == (form == "graph")
    images, targets = moved_batch(as_lists(items), META)
    assert {image.device for image in images} == {target["target"].device for target in targets} == {META}
    assert targets[0]["name"] == "of 5"
    packed = moved_batch(as_packed(items), META)["numbers"]
    assert isinstance(packed, PackedSequence) and packed.data.device == META
    assert packed.batch_sizes.device.type == "cpu", "as torch's RNNs want the lengths"
    graph = moved_batch([as_graph(items)], META)[0]
    assert isinstance(graph, Graph) and graph.edges.device == META
    padded = moved_batch(as_padded(items), META)
    assert (padded.numbers.device, padded.lengths, padded.names[1]) == (META, [5, 1, 3], "row of 1")
    assert moved_batch(torch.float64, META) is torch.float64


class Pair(NamedTuple):
    inputs: Any
    targets: Any


ONE, TWO = torch.zeros(2), torch.ones(3)
BATCHES: dict[str, tuple[Any, bool]] = {  # and whether it needs no walk
    "tensor": (ONE, True),
    "tuple": ((ONE, TWO), True),
    "list": ([ONE, TWO], True),
    "dict": ({"b": ONE, "a": TWO}, True),
    "nothing": ((), True),
    "nested": ((ONE, [TWO]), False),
    "name": ({"a": ONE, "name": "x"}, False),
    "array": ([ONE, np.ones(3)], False),
    "parameter": ((nn.Parameter(ONE), TWO), False),
    "named tuple": (Pair(ONE, TWO), False),
    "ordered dict": (OrderedDict(a=ONE), False),
}


@pytest.mark.parametrize("form", BATCHES)
def test_a_batch_that_needs_no_walk_is_moved_as_any_other(form: str) -> None:
    batch, is_bare = BATCHES[form]
    bare = bare_tensors(batch)
    assert (bare is not None) == is_bare
    if bare is not None:
        assert list(map(id, bare)) == list(map(id, flatten(batch)[0]))
        again = with_tensors(batch, bare)
        assert type(again) is type(batch) and list(map(id, flatten(again)[0])) == list(map(id, bare))
    moved = map_leaves(lambda leaf: leaf.to(META) if isinstance(leaf, torch.Tensor) else leaf, batch)
    assert repr(moved_batch(batch, META)) == repr(moved)


def test_a_copy_shares_no_memory_with_a_batch_of_any_form() -> None:
    items = [Sequences()[at] for at in (4, 0, 2)]
    graph = as_graph(items)
    copied(graph).nodes.zero_()
    packed = as_packed(items)
    copied(packed)["numbers"].data.zero_()
    assert graph.nodes.abs().min() > 0 and packed["numbers"].data.abs().min() > 0


nested = st.recursive(
    st.integers(0, 4).map(torch.ones) | st.none() | st.text(max_size=2) | st.just("a graph"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=1), inner, max_size=3),
)


@given(nested)
def test_moving_and_copying_change_no_form(tree: Any) -> None:
    def filled(node: Any) -> Any:
        if isinstance(node, list | dict):
            return (
                [*map(filled, node)]
                if isinstance(node, list)
                else {key: filled(value) for key, value in node.items()}
            )
        return as_graph([Sequences()[1]]) if isinstance(node, str) and node == "a graph" else node

    def told(node: Any) -> Any:
        if isinstance(node, list | dict):
            return [*map(told, node)] if isinstance(node, list) else {key: told(value) for key, value in node.items()}
        if isinstance(node, Graph):
            return told([*vars(node).values()])
        return (node.dtype, node.shape, node.tolist()) if isinstance(node, torch.Tensor) else node

    batch = filled(tree)
    assert told(moved_batch(batch, torch.device("cpu"))) == told(copied(batch)) == told(batch)
    assert not not_finite(batch)
