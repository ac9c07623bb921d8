"""Losses and metrics over the whole batch, against plain torch on the whole batch in one process."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dp_ray.driver.memory import LiveMemory
from dp_ray.engine.sums.whole_batch import ShardOutput, WholeBatches, merged_batch
from dp_ray.engine.world import World
from dp_ray.errors import JobError, ModelError
from dp_ray.job import plan as job_plan
from dp_ray.job.job import Job
from dp_ray.job.targets import unmeasured
from dp_ray.plan.split import Split
from tests.support.builders import run_dir_of, step_of, steps_of, trainer_of
from tests.support.chance import examples
from tests.support.group import ProcessExit, StopsBefore, history_of, measured, run_group, weights_of
from tests.support.replays import replayed
from tests.support.trainings import initial

ROWS, BATCH = 46, 23
ROWS_OF_MANY = 256
HERE = "tests.engine.sums.test_whole_batch"
CONTRASTIVE = {"target": f"{HERE}:contrastive", "over": "batch"}


class Views(torch.utils.data.Dataset[Any]):
    """Two views of each of 46 rows, and their number."""

    def __init__(self, dtype: str = "float64") -> None:
        made = torch.Generator().manual_seed(3)
        self.views = torch.randn(2, ROWS, 6, generator=made).to(getattr(torch, dtype))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return (self.views[0, index], self.views[1, index]), index


class Twins(nn.Module):
    """Two encoders and a learned temperature, which the model gives beside the embeddings, as CLIP does."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(getattr(torch, dtype))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(getattr(torch, dtype))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=getattr(torch, dtype)))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        return {
            "left": nn.functional.normalize(self.left(left), dim=1),
            "right": nn.functional.normalize(self.right(right), dim=1),
            "scale": self.scale.exp(),
        }


def contrastive(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T
    labels = torch.arange(len(logits))
    return (nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)) / 2


def drawing(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss that draws: the workers must draw the same."""
    kept = torch.rand(len(target)) < 0.8
    return contrastive({**outputs, "left": outputs["left"][kept], "right": outputs["right"][kept]}, target[kept])


class Dropping(Twins):
    """Twins with dropout."""

    def __init__(self) -> None:
        super().__init__("float32")
        self.left.append(nn.Dropout(0.3))


def loss_of(name: str) -> dict[str, str]:
    return {"target": f"{HERE}:{name}", "over": "batch"}


def job_of(**keys: Any) -> Job:
    args = {"dtype": keys.pop("dtype", "float64")}
    given = {
        "task": "train",
        "model": {"target": f"{HERE}:Twins", "args": args},
        "dataset": {"target": f"{HERE}:Views", "args": args},
        "call": "args",
        "loss": CONTRASTIVE,
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "batch_size": BATCH,
        "shards": 6,
        "epochs": 2,
        "max_steps": 3,
    }
    return Job.make({**given, **keys}, "job")


def plain(job: Job, loss: Any = contrastive, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and losses of plain torch, which sees each batch as a whole."""
    torch.manual_seed(job.seed)
    args = job.model.args
    model, data = Twins(**args), Views(**args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        rows = [row for row in range(ROWS) if row // BATCH == step % 2 and row not in (job.skip or ())]
        value = loss(model(data.views[0, rows], data.views[1, rows]), torch.tensor(rows))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return model.state_dict(), losses


def check(job: Job, folder: Path, tolerance: float, **keys: Any) -> None:
    weights, losses = plain(job, **keys)
    for name, tensor in weights_of(folder).items():
        assert torch.allclose(tensor, weights[name], rtol=tolerance, atol=tolerance), name
    assert [row["loss"] for row in history_of(folder)] == pytest.approx(losses, rel=tolerance)


@pytest.mark.full(but=["keys0-float64-1e-12"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("keys", [{}, {"strategy": "fsdp"}, {"shards": 3}, {"shards": 3, "strategy": "fsdp"}])
@pytest.mark.slow
def test_it_is_plain_torch_on_the_whole_batch(
    tmp_path: Path, dtype: str, tolerance: float, keys: dict[str, Any]
) -> None:
    """With 3 shards on 3 workers each has one, whose graph is kept."""
    for workers in (1, 2, 3):
        job = job_of(dtype=dtype, workers=workers, **keys)
        run_group(job, tmp_path / str(workers))
        check(job, tmp_path / str(workers), tolerance)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_the_same_bits_on_any_number_of_workers(tmp_path: Path, strategy: str) -> None:
    """Also with dropout, and the loss's own random numbers; 6 shards on 6 workers keep their graphs."""
    for name, more in {"bare": {}, "draws": {"model": f"{HERE}:Dropping", "loss": loss_of("drawing")}}.items():
        found = []
        for workers in (1, 2, 3, 6):
            folder = tmp_path / name / str(workers)
            run_group(job_of(dtype="float32", workers=workers, bitwise=True, strategy=strategy, **more), folder)
            found.append((weights_of(folder), [row["loss"] for row in history_of(folder)]))
        for weights, losses in found[1:]:
            assert losses == found[0][1]
            for key, tensor in weights.items():
                assert torch.equal(tensor, found[0][0][key]), (name, key)


@pytest.mark.slow
def test_it_is_the_mean_over_what_is_left(tmp_path: Path) -> None:
    """Rows that are skipped are not in the batch; shard 0 of each batch loses all of its rows."""
    skip = [0, 1, 2, 3, 9, 23, 24, 25, 26]
    for workers in (1, 3):
        job = job_of(workers=workers, skip=skip)
        run_group(job, tmp_path / str(workers))
        check(job, tmp_path / str(workers), 1e-12)
        assert [row["rows"] for row in history_of(tmp_path / str(workers))] == [18, 19, 18]


@pytest.mark.full(but=["ddp"])
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_goes_on_after_a_kill_on_other_workers(tmp_path: Path, strategy: str) -> None:
    keys = {"bitwise": True, "strategy": strategy, "shuffle": True, "epochs": 3, "max_steps": None}
    run_group(job_of(workers=2, **keys), tmp_path / "whole")
    run_group(job_of(workers=3, checkpoint={"every_steps": 1}, **keys), tmp_path / "cut", StopsBefore(4))
    run_group(job_of(workers=1, checkpoint={"every_steps": 1}, **keys), tmp_path / "cut")
    assert [row["loss"] for row in history_of(tmp_path / "cut")] == [
        row["loss"] for row in history_of(tmp_path / "whole")
    ]
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(tensor, weights_of(tmp_path / "cut")[name])


class Counting(Twins):
    """Twins that count their forwards in a buffer, and have BatchNorm's statistics and an output without use."""

    def __init__(self) -> None:
        super().__init__("float32")
        self.norm = nn.BatchNorm1d(6)
        self.idle = nn.Linear(6, 2)
        self.forwards: torch.Tensor
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        self.forwards.add_(1)
        left = self.norm(left)
        return {**super().forward(left, right), "idle": self.idle(left)}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 6])
def test_what_a_forward_writes_counts_once(tmp_path: Path, workers: int) -> None:
    """As nn.DataParallel: the statistics of shard 0; what reaches only an output without use is not trained."""
    adamw = {"target": "torch.optim:AdamW", "args": {"lr": 0.1, "weight_decay": 0.5}}
    keys = {"find_unused_parameters": "auto", "optimizer": adamw}
    run_group(job_of(model=f"{HERE}:Counting", dtype="float32", workers=workers, **keys), tmp_path)
    torch.manual_seed(0)
    fresh, data = Counting(), Views("float32")
    for start in (0, 23, 0):
        fresh.norm(data.views[0, start : start + 4])  # shard 0 has four rows
    weights = weights_of(tmp_path)
    assert weights["forwards"] == 3
    assert torch.allclose(weights["norm.running_mean"], fresh.get_buffer("norm.running_mean"), atol=1e-6)
    assert torch.equal(weights["idle.weight"], fresh.idle.weight)
    assert not torch.equal(weights["left.0.weight"], fresh.get_parameter("left.0.weight"))


@pytest.mark.full(but=["fp16"])
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_autocast(tmp_path: Path, precision: str) -> None:
    """One scaler: the gradient of the loss is scaled before half-precision outputs take it."""
    found = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        run_group(job_of(dtype="float32", precision=precision, workers=workers), folder)
        found.append(weights_of(folder))
    expected, _ = plain(job_of(dtype="float32"))
    for name, value in expected.items():
        assert torch.allclose(found[0][name], value, atol=0.05), name
        assert torch.allclose(found[0][name], found[1][name], atol=2e-2), name


def stepped(model: nn.Module, batch: Any) -> Any:
    (left, right), target = batch
    return {"outputs": model(left, right), "target": target}


def only_outputs(model: nn.Module, batch: Any) -> Any:
    return model(*batch[0])


def spread(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """A metric of the whole batch: how far the embeddings are apart."""
    return torch.pdist(outputs["left"]).mean()


@pytest.mark.full(but=["3"])
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_and_evaluations(tmp_path: Path, workers: int) -> None:
    """An evaluation is the mean of its batches' numbers, by their rows: 20 and 20 and 6."""
    evaluated = {"dataset": {"target": f"{HERE}:Views"}, "batch_size": 20}
    metrics = {"spread": loss_of("spread")}
    keys = {"call": "auto", "step": f"{HERE}:stepped", "eval": evaluated, "metrics": metrics}
    job = job_of(workers=workers, **keys)
    run_group(job, tmp_path)
    check(job, tmp_path, 1e-12)
    model, data = Twins(), Views()
    model.load_state_dict(weights_of(tmp_path))
    expected = {"loss": 0.0, "spread": 0.0}
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 40), (40, 46)):
            outputs = model(data.views[0, start:stop], data.views[1, start:stop])
            expected["loss"] += contrastive(outputs, torch.arange(stop - start)).item() * (stop - start) / ROWS
            expected["spread"] += spread(outputs, torch.arange(stop - start)).item() * (stop - start) / ROWS
    last = history_of(tmp_path)[-1]
    assert {name: last[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-12)
    alone = {
        "task": "evaluate",
        "model": f"{HERE}:Twins",
        "dataset": f"{HERE}:Views",
        "call": "args",
        "loss": CONTRASTIVE,
        "metrics": metrics,
        "batch_size": 20,
        "shards": 6,
        "workers": workers,
        "init_from": str(tmp_path / "weights.safetensors"),
    }
    told = measured(run_group(Job.make(alone, "alone"), tmp_path / "evaluated"))
    assert told == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_replay_gives_the_loss_and_each_rows_gradient(tmp_path: Path) -> None:
    job = job_of(workers=2, bitwise=True, storage=str(tmp_path))
    run = run_dir_of(tmp_path / "run", job, rows={"dataset": ROWS}).storage
    run_group(job, run.location)
    found = replayed(run.location, 1)
    assert found.loss == found.history_loss
    weights, _ = plain(job, steps=1)
    model, data = Twins(), Views()
    model.load_state_dict(weights)
    outputs = model(data.views[0, BATCH:], data.views[1, BATCH:])
    for one in ("left", "right"):
        outputs[one].retain_grad()
    contrastive(outputs, torch.arange(BATCH)).backward()  # type: ignore[no-untyped-call]
    norms = (outputs["left"].grad.square().sum(1) + outputs["right"].grad.square().sum(1)).sqrt()
    assert [row.gradient for row in found.rows] == pytest.approx(norms.sort(descending=True).values.tolist())
    assert [(row.sample or 0) - BATCH for row in found.rows] == norms.argsort(descending=True).tolist()
    assert [row.loss for row in found.rows] == pytest.approx([found.loss] * BATCH)
    assert "the largest gradient first" in "\n".join(found.lines())
    shard = replayed(run.location, 1, 2)
    assert {row.shard for row in shard.rows} == {2}
    assert [row.gradient for row in shard.rows] == [row.gradient for row in found.rows if row.shard == 2]


def per_row(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    sums: torch.Tensor = outputs["left"].sum(1)
    return sums


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"loss": loss_of("per_row")},
            r"step 0: the loss returned a tensor of size \[23\] for the whole batch of 23 rows",
        ),
        (
            {"step": f"{HERE}:only_outputs", "call": "auto"},
            r"step returned a mapping .*\['left'.*with a loss over: batch, 'outputs'",
        ),
        (
            {
                "metrics": {"m": {"target": "torchmetrics:MeanMetric", "over": "batch"}},
                "eval": {"dataset": f"{HERE}:Views"},
            },
            "metrics.m.over: a metric with a state",
        ),
        (
            {"loss": {"target": f"{HERE}:Learned", "over": "batch"}},
            "loss: has parameters of its own to train; make them the model's",
        ),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    with pytest.raises((ProcessExit, JobError, ModelError), match=text):
        run_group(job_of(workers=1, **keys), tmp_path)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return self.scale * contrastive(outputs, target)


def test_over_is_no_part_of_what_earlier_runs_are_known_by() -> None:
    plain_loss = {"loss": {"target": "torch.nn:CrossEntropyLoss"}}
    said = {"loss": {"target": "torch.nn:CrossEntropyLoss", "over": "shard"}}
    assert job_of(**plain_loss).fingerprint() == job_of(**said).fingerprint()
    assert "over" not in str(job_of(**plain_loss).describe()["loss"])
    over = {"loss": {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}}
    assert job_of(**over).fingerprint() != job_of(**plain_loss).fingerprint()
    assert not job_of(**over).has_fingerprint(job_of(**plain_loss).fingerprint()), "its run is of another job"
    with pytest.raises(JobError, match=r"loss\.over"):
        job_of(loss={"target": "torch.nn:CrossEntropyLoss", "over": "world"})


TREES = st.recursive(
    st.sampled_from(["float32", "float64", "bfloat16", "int64", "bool", "complex64", "one", "none"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


def made(kind: Any, rows: int) -> Any:
    if isinstance(kind, dict):
        return {key: made(value, rows) for key, value in kind.items()}
    if isinstance(kind, list | tuple):
        return type(kind)(made(one, rows) for one in kind)
    if kind == "none":
        return None
    if kind == "one":
        return torch.tensor(2.5)
    return torch.randn(rows, 3).to(getattr(torch, kind))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tree=TREES, rows=st.integers(1, 40), shards=st.integers(1, 8))
def test_any_tree_is_merged_as_it_was_cut(tree: Any, rows: int, shards: int) -> None:
    """The oracle is torch.chunk: pieces of it, merged, are the whole tree."""
    whole = {"rows": torch.arange(rows), "tree": made(tree, rows)}

    def cut(one: Any, start: int, stop: int) -> Any:
        if isinstance(one, dict):
            return {key: cut(inner, start, stop) for key, inner in one.items()}
        if isinstance(one, list | tuple):
            return type(one)(cut(inner, start, stop) for inner in one)
        return one if one is None or one.ndim == 0 else one[start:stop]

    own, start = [], 0
    for shard, piece in zip(Split(rows, rows, shards).worker(1, 0, 0), torch.arange(rows).chunk(shards), strict=True):
        own.append(ShardOutput(shard, cut(whole, start, start + len(piece)), torch.arange(len(piece))))
        start += len(piece)
    merged = merged_batch(own, torch.device("cpu"), WholeBatches(0))
    assert merged is not None and merged.rows == rows
    torch.testing.assert_close(merged.outputs, whole, rtol=0, atol=0, equal_nan=True)


class Deep(nn.Module):
    """Layers whose activations are most of the memory; `calls` counts the forwards of all of them."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 64), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12))
        )
        self.last = nn.Linear(64, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        Deep.calls += 1
        return self.last(self.layers(left + right))


class Many(Views):
    """As many rows as a batch of 64 shards has."""

    def __init__(self) -> None:
        self.views = torch.randn(2, 64 * ROWS_OF_MANY, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return 64 * ROWS_OF_MANY


def far_apart(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - outputs.mean(0)).square().mean()


def steps_of_deep(shards: int, batch_size: int) -> int:
    """Train three steps in this process; return the peak of all tensors' bytes in the last one."""
    keys = {"model": f"{HERE}:Deep", "dataset": f"{HERE}:Many", "loss": loss_of("far_apart")}
    job = job_of(dtype="float32", workers=0, shards=shards, batch_size=batch_size, epochs=3, **keys)
    split = job_plan.split_of(job, 64 * ROWS_OF_MANY)
    with closing(trainer_of(job, World(), split)) as trainer, closing(steps_of(job, Many())) as steps:
        trainer.synchronise()
        for _ in range(2):
            step_of(trainer, steps)
        with LiveMemory() as live:
            step_of(trainer, steps)
    return live.peak["cpu"]


@pytest.mark.full
def test_the_memory_is_that_of_one_shard() -> None:
    """64 shards on one worker, against plain torch on one shard; but for inputs, outputs and their gradients."""
    torch.manual_seed(0)
    model, data = Deep(), Many()
    with LiveMemory() as live:
        far_apart(model(data.views[0, :ROWS_OF_MANY], data.views[1, :ROWS_OF_MANY]), torch.zeros(1)).backward()  # type: ignore[no-untyped-call]
    inputs, outputs = data.views.nbytes, 64 * ROWS_OF_MANY * 2 * 4
    assert steps_of_deep(64, 64 * ROWS_OF_MANY) - inputs - 4 * outputs <= 1.15 * live.peak["cpu"]


def test_a_single_shard_runs_once() -> None:
    """Of several, each runs twice; what is asked before the first step stands above the engine."""
    Deep.calls = 0
    steps_of_deep(1, 32)
    assert Deep.calls == 3
    Deep.calls = 0
    steps_of_deep(4, 128)
    assert Deep.calls == 3 * 2 * 4


def layers(kind: str, dtype: torch.dtype) -> nn.Module:
    made: dict[str, list[nn.Module]] = {
        "linear": [nn.Linear(6, 4)],
        "deep": [nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)],
        "conv": [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)],
        "shared": [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)],
    }
    return nn.Sequential(*made[kind]).to(dtype)


class Drawn(nn.Module):
    """One of several models; one of them has both views go through the same layers."""

    def __init__(self, kind: str, dtype: str) -> None:
        super().__init__()
        self.left = layers(kind, getattr(torch, dtype))
        self.right = self.left if kind == "shared" else layers(kind, getattr(torch, dtype))
        self.scale = nn.Parameter(torch.ones((), dtype=getattr(torch, dtype)))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        return {"left": self.left(left), "right": self.right(right), "scale": self.scale}


@pytest.mark.slow
@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["linear", "deep", "conv", "shared"]),
    dtype=st.sampled_from(["float32", "float64"]),
    batch_size=st.integers(7, 30),
    shards=st.integers(3, 7),
    workers=st.integers(1, 3),
    strategy=st.sampled_from(["ddp", "fsdp"]),
)
def test_any_model_cut_in_any_way_is_plain_torchs(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    dtype: str,
    batch_size: int,
    shards: int,
    workers: int,
    strategy: str,
) -> None:
    keys = {"model": {"target": f"{HERE}:Drawn", "args": {"kind": kind, "dtype": dtype}}, "strategy": strategy}
    keys |= {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    folder = tmp_path_factory.mktemp("drawn")
    run_group(job_of(dtype=dtype, batch_size=batch_size, shards=shards, workers=workers, **keys), folder)
    torch.manual_seed(0)
    model, data = Drawn(kind, dtype), Views(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for rows in (list(range(ROWS)[at : at + batch_size]) for at in [*range(0, ROWS, batch_size)] * 2):
        if len(losses) < 3:
            value = contrastive(model(data.views[0, rows], data.views[1, rows]), torch.tensor(rows))
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    assert [row["loss"] for row in history_of(folder)] == pytest.approx(losses, rel=tolerance)
    for name, tensor in weights_of(folder).items():
        assert torch.allclose(tensor, model.state_dict()[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.full(but=["True-ddp"])
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("bitwise", [False, True])
def test_a_worker_without_rows(tmp_path: Path, strategy: str, bitwise: bool) -> None:
    """The third batch has two rows: two of three workers, or one of two, have none."""
    expected: list[float] = []
    model, data = initial(Twins, "float64"), Views()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in (range(22), range(22, 44), range(44, 46)):
        value = contrastive(model(data.views[0, rows], data.views[1, rows]), torch.tensor(rows))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        run_group(job_of(batch_size=22, workers=workers, strategy=strategy, bitwise=bitwise, epochs=1), folder)
        assert [row["loss"] for row in history_of(folder)] == pytest.approx(expected, rel=1e-12)
        for name, tensor in weights_of(folder).items():
            assert torch.allclose(tensor, model.state_dict()[name], rtol=1e-12, atol=1e-12), name


def test_a_metric_that_nothing_measures_is_told() -> None:
    job = job_of(metrics={"spread": loss_of("spread")})
    only = "metrics.spread: is measured over whole batches, so by evaluations only, and there are none: set eval"
    assert list(unmeasured(job)) == [only]


class OneColumn(nn.Module):
    """Gives a column, which of a shard of one row is a tensor whose only stride is that of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        column: torch.Tensor = self.layer(left - right)[:, 1]
        return column


def test_shards_of_one_row_may_give_a_column(tmp_path: Path) -> None:
    keys = {"model": f"{HERE}:OneColumn", "loss": loss_of("far_apart"), "batch_size": 6, "dtype": "float32"}
    run_group(job_of(workers=1, **keys), tmp_path)
    torch.manual_seed(0)
    outputs = OneColumn()(*Views("float32").views[:, :6])
    assert history_of(tmp_path)[0]["loss"] == pytest.approx(far_apart(outputs, torch.zeros(6)).item(), rel=1e-6)
