"""A state that a model keeps in attributes between forwards: a line names it, and what matters to nobody is not told.

The oracle is a plain loop over the chunks of each batch, in which the state goes from chunk to chunk.
"""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.forward.carried import noting_a_read
from dp_ray.job.job import Job
from dp_ray.messages import Note
from tests.support.group import run_group, weights_of
from tests.support.training import Pairs
from tests.support.trainings import initial, job_of

pytestmark = pytest.mark.usefixtures("in_project")
HERE = "tests.engine.forward.test_carried"
ROWS, BATCH, SHARDS = 28, 14, 2
DATA = {"target": "tests.support.training:Pairs", "args": {"length": ROWS}}


class Net(nn.Module):
    """A net, for what its kinds keep."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.changed(self.body(rows)))
        return made

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Counting(Net):
    calls = 0

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * (1 + 0.1 * self.calls)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.hidden: Any = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, state = self.cell(rows, self.hidden)
        self.hidden = hidden.detach(), state.detach()
        made: torch.Tensor = hidden
        return made


class Recurrent(Net):
    """An LSTM of two layers that goes on where the last batch ended; the last attention, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Sequential(Cell(), Cell())

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last_attention = hidden.softmax(1)
        made: torch.Tensor = self.cells(hidden)
        return made


class Resetting(Recurrent):
    """Each forward begins anew, and goes over its cells twice."""

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            cell.hidden = None  # type: ignore[assignment]
        return super().changed(super().changed(hidden))


class Remembering(Net):
    """A memory that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.means = torch.zeros(8), deque([1.0], maxlen=3)

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.memory.mul_(0.9).add_(hidden.detach().mean(0))
        self.means.append(float(hidden.detach().mean()))
        return hidden + self.memory * sum(self.means)


class Harmless(Net):
    """Writes that no later forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "new"
        self.mask: torch.Tensor | None = None
        self.head = nn.utils.spectral_norm(self.head)

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last, self.mode = {"hidden": hidden, "mean": hidden.mean()}, "used"
        if self.mask is None or len(self.mask) < hidden.shape[1]:
            self.mask = torch.arange(hidden.shape[1]) % 3 > 0
        return hidden * self.mask


class Bare(Harmless):
    """The same without attributes."""

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (torch.arange(hidden.shape[1]) % 3 > 0)


class Smoothed(nn.Module):
    """A loss that keeps its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(outputs, target, reduction="none")
        self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
        return losses / self.mean


def train_loop(run: Any) -> None:
    update = run.optimizer(torch.optim.SGD(run.model.parameters(), lr=0.1))

    def loss(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(run.model(batch[0]), batch[1], reduction="none")

    for step in run.steps():
        run.model.temperature = step.number  # a loop's own, which is the same on all workers
        step.backward(loss, run.model)
        update.step()


def model(kind: type[nn.Module]) -> dict[str, Any]:
    return {"target": f"{HERE}:{kind.__name__}"}


def job(kind: type[nn.Module], **keys: Any) -> Job:
    return job_of(model(kind), DATA, **{"batch_size": BATCH, "shards": SHARDS, **keys})


def task(kind: type[nn.Module], task: str, **keys: Any) -> Job:
    given = {"model": model(kind), "dataset": DATA, "batch_size": BATCH, "shards": SHARDS, **keys}
    return Job.make(
        {"task": task, **given, **({"loss": "torch.nn:CrossEntropyLoss"} if task == "evaluate" else {})}, "job"
    )


def lines(messages: list[Any]) -> list[str]:
    told = [message.text for message in messages if isinstance(message, Note)]
    return [text for text in told if "goes on from what the one before has left in" in text]


def names(messages: list[Any]) -> list[str]:
    return [line.split(" has left in ")[1].split(". That is ")[0] for line in lines(messages)]


def test_a_counter_that_a_forward_reads_is_told_and_its_training_depends_on_the_workers(tmp_path: Path) -> None:
    """On one worker the count goes from shard to shard, as in a plain loop over the chunks."""
    found = {}
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        messages = run_group(job(Undropped, shuffle=False, workers=workers), folder)
        assert names(messages) == ["calls"]
        assert "register it as a buffer" in lines(messages)[0]
        found[workers] = weights_of(folder)
    plain = plain_weights()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(found[1][name], found[2][name], atol=1e-4) for name in plain)


class Undropped(Counting):
    """Without what depends on random numbers or statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())


def plain_weights() -> dict[str, torch.Tensor]:
    net = initial(Undropped)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = Pairs(ROWS)
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            optimizer.zero_grad()
            pairs = zip(data.inputs[rows].chunk(SHARDS), data.targets[rows].chunk(SHARDS), strict=True)
            losses = [nn.functional.cross_entropy(net(inputs), target, reduction="sum") for inputs, target in pairs]
            (torch.stack(losses).sum() / BATCH).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: tensor.detach() for name, tensor in net.named_parameters()}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        (Recurrent, {}, ["cells.0.hidden, cells.1.hidden"]),
        (Remembering, {}, ["means, memory"]),
        (Remembering, {"shards": 4, "bitwise": True}, ["means, memory"]),
        (Net, {"loss": f"{HERE}:Smoothed"}, ["loss.mean"]),
        (Counting, {"loss": {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}}, ["calls"]),
        (Counting, {"eval": {"dataset": DATA, "every_epochs": 1}}, ["calls"]),
        (Counting, {"strategy": "fsdp"}, ["calls"]),
        (Counting, {"flops": True}, ["calls"]),
        (Resetting, {}, []),
        (Harmless, {}, []),
        (Net, {}, []),
    ],
)
def test_what_is_told_of_a_training(
    tmp_path: Path, kind: type[nn.Module], keys: dict[str, Any], told: list[str], workers: int
) -> None:
    assert names(run_group(job(kind, **keys, workers=workers), tmp_path)) == told


def test_a_single_shard_goes_from_batch_to_batch_as_in_plain_torch(tmp_path: Path) -> None:
    assert names(run_group(job(Counting, shards=1, workers=1), tmp_path)) == []


@pytest.mark.parametrize(("kind", "told"), [(Counting, ["calls"]), (Harmless, [])])
def test_what_is_told_of_a_loop(tmp_path: Path, kind: type[nn.Module], told: list[str]) -> None:
    keys = {"model": model(kind), "dataset": DATA, "batch_size": BATCH, "shards": SHARDS, "epochs": 2}
    made = Job.make({"task": "train", "loop": f"{HERE}:train_loop", "workers": 2, **keys}, "job")
    assert names(run_group(made, tmp_path)) == told


@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.parametrize(("kind", "told"), [(Counting, ["calls"]), (Harmless, [])])
def test_what_is_told_of_the_other_tasks(tmp_path: Path, kind: type[nn.Module], told: list[str], name: str) -> None:
    assert names(run_group(task(kind, name, workers=2), tmp_path)) == told


def test_the_question_changes_no_bit(tmp_path: Path) -> None:
    """Buffers, random numbers and attributes are those of a run without it."""
    found = []
    for kind in (Harmless, Bare):
        folder = tmp_path / kind.__name__
        run_group(job(kind, workers=1), folder)
        found.append({name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()})
    assert found[0] == found[1]


def test_a_read_is_noted_until_a_write_and_the_class_comes_back() -> None:
    net, read = Harmless(), set[tuple[nn.Module, str]]()
    with noting_a_read(net, "mode", read), noting_a_read(net, "mask", read):
        assert type(net).__name__ == "Harmless" and isinstance(net, Harmless)
        net.mode = "used"
        assert net.mode == "used" and net.mask is None
    assert type(net) is Harmless and read == {(net, "mask")}


class Hooked(Net):
    """Sets a hook on its first forward's features, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.head.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
            self.is_hooked = True
        return hidden


def test_a_flag_that_is_set_once_is_not_told(tmp_path: Path) -> None:
    assert names(run_group(job(Hooked, workers=2), tmp_path)) == []
