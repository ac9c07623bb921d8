"""What a run asks before its first step: once, of shard 0 of the batch, and the same on any number of workers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.world import own_rank
from dp_ray.job.job import Job
from dp_ray.messages import FlopsCounted
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of

HERE = "tests.tasks.test_preflight"
FACTS = "facts.json"
FORWARD = 2 * (6 * 4)  # operations of a row


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of 6 numbers, each of one of 4 classes."""

    def __init__(self, length: int = 24) -> None:
        made = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(length, 6, generator=made)
        self.classes = torch.randint(4, (length,), generator=made)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.classes[index]


class Telling(nn.Module):
    """Writes into a file, in each forward, its rank and its rows; it gives some prototypes beside its outputs."""

    def __init__(self, file: str, prototypes: int = 4, least: int = 0) -> None:
        super().__init__()
        self.layer, self.prototypes = nn.Linear(6, 4), nn.Parameter(torch.randn(prototypes, 4))
        self.file, self.least = file, least
        self.ran: torch.Tensor
        self.register_buffer("ran", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> Any:
        with Path(self.file).open("a") as file:
            file.write(f"{own_rank()} {len(inputs)}\n")
        self.ran += 1
        if len(inputs) < self.least:
            raise ValueError("too few rows")
        return {"near": self.layer(inputs), "prototypes": self.prototypes * 1.0, "names": ["a"] * len(inputs)}


def to_prototypes(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["near"] @ outputs["prototypes"].T, target)


def training(folder: Path, **keys: Any) -> Job:
    given = {
        "task": "train",
        "model": {"target": f"{HERE}:Telling", "args": {"file": str(folder / "forwards")}},
        "dataset": f"{HERE}:Rows",
        "loss": {"target": f"{HERE}:to_prototypes", "over": "batch"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "batch_size": 12,
        "shards": 3,
        "epochs": 2,
        "bitwise": True,
    }
    return Job.make({**given, **keys}, "job")


def prediction(folder: Path, **keys: Any) -> Job:
    job = training(folder)
    given = {"model": job.model, "dataset": job.dataset, "inputs": "first", "batch_size": 12, "shards": 3}
    return Job.make({**given, "outputs": {"keep": ["near", "names"]}, **keys}, "job")


class Tempered(nn.Module):
    """A temperature of one number beside the outputs: as long as a shard of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(6, 4), nn.Parameter(torch.tensor([2.0]))

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": self.layer(inputs), "temperature": self.temperature.exp()}


def tempered(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    assert outputs["temperature"].shape == (1,), "not one for each row"
    return nn.functional.cross_entropy(outputs["logits"] / outputs["temperature"], target)


def forwards(folder: Path) -> Counter[str]:
    """How often each rank ran so many rows; the file is empty again."""
    file = folder / "forwards"
    found = Counter(file.read_text().splitlines())
    file.unlink()
    return found


def facts(folder: Path) -> list[Any]:
    return list(json.loads((folder / "run" / FACTS).read_text()).values())


@pytest.mark.slow
def test_a_training_asks_once_and_knows_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    """Four steps of three shards of four rows, each run forward twice, but by a worker with one."""
    found = []
    for workers, each in ((1, 2), (2, None), (3, 1)):
        folder = tmp_path / str(workers)
        folder.mkdir()
        run_group(training(folder, workers=workers, flops=True), folder / "run")
        ran = forwards(folder)
        assert {line: count for line, count in ran.items() if line.endswith(" 3")} == {"0 3": 1}, "a row less"
        # All rows for the sizes, and for the operations.
        asked = 2
        shards = sum(count for line, count in ran.items() if line.endswith(" 4"))
        assert shards - asked == 4 * ({2: 1 + 2 * 2, None: 0}.get(workers, 0) or 3 * (each or 0))
        found.append((facts(folder), weights_of(folder / "run"), [row["loss"] for row in history_of(folder / "run")]))
    for known, weights, losses in found:
        assert known == found[0][0] and losses == found[0][2]
        assert all(torch.equal(weights[name], found[0][1][name]) for name in weights)
    ((known,), *_) = found[0]
    assert known["rows"] == {"0.near": True, "0.prototypes": False, "1": True}
    assert known["flops"][0] == FORWARD + FORWARD  # the inputs of the only layer need no gradient


@pytest.mark.slow
def test_a_training_that_goes_on_asks_nothing_again(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 1}, "shards": 4, "flops": True}
    run_group(training(tmp_path, workers=2, **keys), tmp_path / "run", StopsBefore(2))
    assert forwards(tmp_path)["0 2"] == 1, "a row less"
    known = facts(tmp_path)
    told = run_group(training(tmp_path, workers=3, **keys), tmp_path / "run")
    assert {line.split()[1] for line in forwards(tmp_path)} == {"3"}
    assert facts(tmp_path) == known
    assert [message.flops.per_row for message in told if isinstance(message, FlopsCounted)] == [known[0]["flops"][0]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_of_one_row_tell_by_that_row_twice_which_outputs_have_rows(tmp_path: Path, workers: int) -> None:
    keys = {"model": f"{HERE}:Tempered", "loss": {"target": f"{HERE}:tempered", "over": "batch"}}
    run_group(training(tmp_path, workers=workers, batch_size=3, **keys), tmp_path / "run")
    assert facts(tmp_path)[0]["rows"] == {"0.logits": True, "0.temperature": False, "1": True}
    torch.manual_seed(0)
    module, rows, losses = Tempered(), Rows(), []
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(2):
        for start in range(0, 24, 3):
            optimizer.zero_grad()
            loss = tempered(module(rows.inputs[start : start + 3]), rows.classes[start : start + 3])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    assert [row["loss"] for row in history_of(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_prediction_asks_of_shard_0_alone(tmp_path: Path) -> None:
    run_group(prediction(tmp_path, workers=3), tmp_path / "run", StopsBefore(1))
    ran = forwards(tmp_path)
    assert (ran["0 3"], ran["0 4"], ran["1 4"], ran["2 4"]) == (1, 2, 1, 1)
    assert facts(tmp_path) == [{"rows": {"names": True}, "flops": None}]
    run_group(prediction(tmp_path, workers=2), tmp_path / "run")
    assert {line.split()[1] for line in forwards(tmp_path)} == {"4"}, "what goes on asks nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "asked"), [(20, {"0 8": 1, "0 7": 1}), (4, {"0 3": 1, "0 4": 1})])
def test_a_prediction_of_large_shards_asks_a_few_rows(tmp_path: Path, rows: int, asked: dict[str, int]) -> None:
    """Else all workers would wait for two runs of the whole first shard."""
    dataset = {"target": f"{HERE}:Rows", "args": {"length": 4 * rows}}
    run_group(prediction(tmp_path, workers=2, dataset=dataset, batch_size=2 * rows, shards=2), tmp_path / "run")
    assert forwards(tmp_path) == Counter({f"0 {rows}": 2, f"1 {rows}": 2}) + Counter(asked)
    assert facts(tmp_path) == [{"rows": {"names": True}, "flops": None}]


@pytest.mark.slow
def test_a_model_that_wants_many_rows_is_asked_of_a_whole_shard(tmp_path: Path) -> None:
    dataset = {"target": f"{HERE}:Rows", "args": {"length": 40}}
    model = {"target": f"{HERE}:Telling", "args": {"file": str(tmp_path / "forwards"), "least": 10}}
    keys: dict[str, Any] = {"model": model, "dataset": dataset, "batch_size": 20, "shards": 1, "workers": 1}
    run_group(prediction(tmp_path, **keys), tmp_path / "run")
    assert forwards(tmp_path) == Counter({"0 8": 1, "0 19": 1, "0 20": 3})
    assert facts(tmp_path) == [{"rows": {"names": True}, "flops": None}]


@pytest.mark.slow
def test_an_output_as_long_as_a_large_shard_is_asked_of_all_its_rows(tmp_path: Path) -> None:
    dataset = {"target": f"{HERE}:Rows", "args": {"length": 80}}
    model = {"target": f"{HERE}:Telling", "args": {"file": str(tmp_path / "forwards"), "prototypes": 20}}
    keys: dict[str, Any] = {"model": model, "dataset": dataset, "batch_size": 20, "shards": 1, "workers": 1}
    with pytest.raises(ProcessExit, match=r"'prototypes' has the size \[20, 4\] with 20 rows, and \[20, 4\] with 19"):
        run_group(prediction(tmp_path, **keys, outputs={"keep": None}), tmp_path / "run")


@pytest.mark.slow
def test_what_sharded_workers_cannot_be_asked_one_worker_is_asked_later(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 1}, "shards": 2, "batch_size": 6}
    run_group(training(tmp_path, workers=2, strategy="fsdp", **keys), tmp_path / "run", StopsBefore(1))
    assert facts(tmp_path) == [{"rows": {}, "flops": None, "is_asked": False}]
    run_group(training(tmp_path, workers=1, **keys), tmp_path / "run")
    assert facts(tmp_path) == [{"rows": {"0.near": True, "0.prototypes": False, "1": True}, "flops": None}]
