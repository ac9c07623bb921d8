"""Outputs whose size is that of the rows by chance, against plain torch on whole batches in one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.world import World
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.messages import Note
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import derive_seed
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support.builders import run_dir_of
from tests.support.group import ProcessExit, history_of, run_group, shapes_in, weights_of
from tests.support.merging import merged
from tests.support.replays import replayed

ROWS = 24
HERE = "tests.engine.forward.test_sizes_by_chance"


class Data(torch.utils.data.Dataset[Any]):
    """24 rows of 5 numbers, each of one of 4 classes."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(ROWS, 5, generator=made)
        self.classes = torch.randint(4, (ROWS,), generator=made)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.classes[index]


class Names(Data):
    """Targets with a name for each row."""

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], {"class": self.classes[index], "name": f"row {index}"}


def alone(job: Job, folder: Path) -> list[Any]:
    """Run the job in this process; what it told."""
    run = Storage(str(folder))
    told: list[Any] = []
    run.child(PARTS).create()
    run_task(job, World(), run, told.append)
    return told


def notes(told: list[Any]) -> list[str]:
    return [message.text for message in told if isinstance(message, Note)]


# Predictions.


class Recurrent(nn.Module):
    """Two layers, whose hidden state is [layers, rows, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 3, num_layers=2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs, (hidden, _) = self.lstm(inputs.unsqueeze(2))
        return {"last": outputs[:, -1], "hidden": hidden}


class Prototypes(nn.Module):
    """Embeddings, and 4 prototypes to which they are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.prototypes = nn.Parameter(torch.randn(4, 3))

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"near": self.layer(inputs), "prototypes": self.prototypes * 1.0}


class Weighing(nn.Module):
    """Gives a weight for each of 2 classes beside what it makes of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs), self.layer.bias.detach()


class Listing(nn.Module):
    """Gives a list of the outputs of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, inputs: torch.Tensor) -> Any:
        return [layer(inputs) for layer in self.layers]


def predicting(model: Any, rows_of_a_shard: int, **keys: Any) -> Job:
    given = {"model": model, "dataset": Data().inputs, "batch_size": 2 * rows_of_a_shard, "shards": 2}
    return Job.make({**given, **keys}, "job")


@pytest.mark.parametrize(
    ("model", "rows", "keys", "text"),
    [
        (
            Recurrent,
            2,
            {},
            r"step 0, shard 0: output 'hidden' has the size \[2, 2, 3\] with 2 rows, and \[2, 1, 3\] with 1: its "
            r"rows are in dimension 1, not in 0; transpose it so that they are, or set batch_dim: 1 if .* keep the "
            r"others alone: outputs.keep: \[last\]",
        ),
        (
            Prototypes,
            4,
            {},
            r"output 'prototypes' has the size \[4, 3\] with 4 rows, and \[4, 3\] with 3: so it does not have a row "
            r"for each sample; keep the others alone: outputs.keep: \[near\]",
        ),
        (Weighing, 2, {}, r"output '1' has the size \[2\] with 2 rows, and \[2\] with 1: so it does not"),
        (Listing, 2, {"outputs": {"ragged": True}}, r"the output has the size \[2\] with 2 rows, and \[2\] with 1"),
    ],
)
def test_a_prediction_tells_a_size_that_fits_by_chance(
    tmp_path: Path, model: Any, rows: int, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        alone(predicting(model(), rows, **keys), tmp_path)
    assert not list((tmp_path / PARTS).iterdir())


@pytest.mark.parametrize("model", [Recurrent, Prototypes, nn.Flatten])
def test_what_is_kept_is_a_plain_loops_to_the_bit(tmp_path: Path, model: Any) -> None:
    """Sizes that fit by chance are no error if they are left out; the reports tell of no trial."""
    keep = {"Recurrent": ["last"], "Prototypes": ["near"]}.get(model.__name__)
    job = predicting(model(), 4 if model is Prototypes else 2, outputs={"keep": keep})
    told = alone(job, tmp_path)
    found: Merged = merged(job, Storage(str(tmp_path)), ROWS)
    with torch.inference_mode():
        whole = [job.model(chunk) for chunk in Data().inputs.chunk(2 * ROWS // job.batch_size)]
    pieces = [one if keep is None else one[keep[0]] for one in whole]
    read = found.read()
    assert torch.equal(read if keep is None else read[keep[0]], torch.cat(pieces))
    assert {*shapes_in(told, "input_size")} == {f"[{job.batch_size // 2}, 5]"}
    assert notes(told) == []


class Squeezing(nn.Module):
    """Leaves dimensions of length one out, those of the rows too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs.squeeze()


class Drawing(nn.Module):
    """Adds noise in the memory of its inputs, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: torch.Tensor
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards.add_(1)
        return inputs.mul_(2).add_(torch.rand_like(inputs)).add_(self.forwards)


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_that_squeezes_is_taken_as_it_is(tmp_path: Path, size: int) -> None:
    job = predicting(Squeezing(size), 2)
    assert notes(alone(job, tmp_path)) == []
    assert torch.allclose(
        merged(job, Storage(str(tmp_path)), ROWS).read(), job.model(Data().inputs).detach(), atol=1e-6
    )


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither random numbers, nor a buffer's value, nor inputs that the model has written."""
    model = Drawing()
    job = predicting(model, 2, seed=4)
    alone(job, tmp_path)
    expected = []
    for number, chunk in enumerate(Data().inputs.chunk(ROWS // 2)):
        torch.manual_seed(derive_seed(4, "forward", 0, number // 2, number % 2))
        expected.append((chunk * 2).add(torch.rand_like(chunk)) + 1)
    assert torch.equal(merged(job, Storage(str(tmp_path)), ROWS).read(), torch.cat(expected))
    assert model.forwards == 0


class OfOneSize(nn.Module):
    """Takes 3 rows at a time."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) != 3:
            raise ValueError("takes 3 rows")
        return inputs * 2


def with_names(items: list[torch.Tensor]) -> Any:
    return {"inputs": torch.stack(items), "names": [f"{item[0]:.2f}" for item in items]}


class OfADict(nn.Module):
    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return inputs["inputs"] * 2


def test_what_cannot_be_tried_is_told_once(tmp_path: Path) -> None:
    told = notes(alone(predicting(OfOneSize(), 3), tmp_path / "size"))
    assert told == [
        "outputs: only sizes tell which have a row for each sample, since with one row less, 2, the model raised "
        "ValueError: takes 3 rows; one whose dimension 0 is by chance as long as a shard has rows counts as such"
    ]
    told = notes(alone(predicting(OfADict(), 3, collate=with_names), tmp_path / "names"))
    assert len(told) == 1 and "since the batch of a shard cannot be cut" in told[0]
    for folder in ("size", "names"):
        read = merged(predicting(OfADict(), 3), Storage(str(tmp_path / folder)), ROWS).read()
        assert torch.equal(read, Data().inputs * 2)


# Losses and metrics over the batch.


def to_prototypes(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["near"] @ outputs["prototypes"].T, target)


def training(model: str, loss: str, **keys: Any) -> Job:
    given = {
        "task": "train",
        "model": f"{HERE}:{model}",
        "dataset": f"{HERE}:Data",
        "loss": {"target": f"{HERE}:{loss}", "over": "batch"},
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "batch_size": 12,
        "shards": 3,
        "epochs": 1,
    }
    return Job.make({**given, **keys}, "job")


def plain(model: nn.Module, loss: Any, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of plain torch, which sees each batch as a whole."""
    optimizer, data, losses = torch.optim.SGD(model.parameters(), lr=0.5), Data(), []
    for inputs, target in list(zip(data.inputs.chunk(2), data.classes.chunk(2), strict=True))[:steps]:
        value = loss(model(inputs), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model.state_dict()


def seeded(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def check(folder: Path, expected: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = expected
    assert [row["loss"] for row in history_of(folder)] == pytest.approx(losses, rel=1e-5)
    for name, tensor in weights_of(folder).items():
        assert torch.allclose(tensor, weights[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_prototypes_are_no_rows(tmp_path: Path, shards: int) -> None:
    """Three shards have four rows each, as many as there are prototypes."""
    alone(training("Prototypes", "to_prototypes", shards=shards), tmp_path)
    check(tmp_path, plain(seeded(Prototypes), to_prototypes))


@pytest.mark.slow
def test_prototypes_are_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    """Three workers have a shard each, whose graph is kept but in the step of the trial."""
    found = []
    for workers in (1, 2, 3):
        run_group(training("Prototypes", "to_prototypes", workers=workers, bitwise=True), tmp_path / str(workers))
        found.append((weights_of(tmp_path / str(workers)), history_of(tmp_path / str(workers))))
    check(tmp_path / "3", plain(seeded(Prototypes), to_prototypes))
    for weights, rows in found[1:]:
        assert [row["loss"] for row in rows] == [row["loss"] for row in found[0][1]]
        assert all(torch.equal(tensor, found[0][0][name]) for name, tensor in weights.items())


def test_evaluations_and_replay_know_prototypes_too(tmp_path: Path) -> None:
    near = {"near": {"target": f"{HERE}:to_prototypes", "over": "batch"}}
    job = training("Prototypes", "to_prototypes", metrics=near, eval={"dataset": f"{HERE}:Data"}, bitwise=True)
    job = job.model_copy(update={"storage": str(tmp_path)})
    run = run_dir_of(tmp_path / "run", job, rows={"dataset": ROWS, "eval.dataset": ROWS}).storage
    run_task(job, World(), run, lambda message: None)
    model, data = Prototypes(), Data()
    model.load_state_dict(weights_of(Path(run.location)))
    with torch.no_grad():
        pairs = zip(data.inputs.chunk(2), data.classes.chunk(2), strict=True)
        expected = sum(to_prototypes(model(inputs), target).item() for inputs, target in pairs) / 2
    last = history_of(Path(run.location))[-1]
    assert (last["eval_loss"], last["eval_near"]) == pytest.approx((expected, expected), rel=1e-5)
    found = replayed(run.location, 1)
    assert found.loss == found.history_loss == last["loss"]
    _, weights = plain(seeded(Prototypes), to_prototypes, steps=1)
    model.load_state_dict(weights)
    outputs = model(data.inputs[12:])
    outputs["near"].retain_grad()
    to_prototypes(outputs, data.classes[12:]).backward()  # type: ignore[no-untyped-call]
    norms = outputs["near"].grad.norm(dim=1).sort(descending=True).values
    assert [row.gradient for row in found.rows] == pytest.approx(norms.tolist(), rel=1e-4)


class Experts(nn.Module):
    """Two experts, the part of the rows that the gate gives each, and their balance in what `gives` says."""

    gives = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 2)
        self.experts = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)])

    def forward(self, inputs: torch.Tensor) -> Any:
        gate = self.gate(inputs).softmax(1)
        outputs = sum(gate[:, at, None] * expert(inputs) for at, expert in enumerate(self.experts))
        balance = gate.mean(0).square().sum()
        return {"logits": outputs, "balance": balance if self.gives == "tensor" else balance.item()}


class Numbers(Experts):
    gives = "number"


class Counting(nn.Module):
    """Gives the number of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": self.layer(inputs), "rows": len(inputs)}


class Holder:
    """An object around what it has of a shard."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Holding(Counting):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": self.layer(inputs), "rows": Holder(inputs)}


class Hidden(nn.Module):
    """Gives the hidden state of two layers, `[layers, rows, size]`, beside the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, num_layers=2, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs, (hidden, _) = self.lstm(inputs.unsqueeze(2))
        return {"logits": outputs[:, -1], "hidden": hidden}


def balanced(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(outputs["logits"], target) + outputs["balance"]
    return loss


def by_rows(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(outputs["logits"], target, reduction="sum") / outputs["rows"]
    return loss


def of_logits(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"], target)


WRONG = [
    (
        "Experts",
        "balanced",
        {},
        r"output 'balance' has no row for each sample, and is another one with 4 rows of shard 0",
    ),
    # In shards of one row nothing is tried.
    (
        "Experts",
        "balanced",
        {"batch_size": 3},
        r"output 'balance' .* is not the same in the shards 0 and 1: with over",
    ),
    ("Numbers", "balanced", {}, r"output 'balance' has no row for each sample, and is another one"),
    ("Numbers", "balanced", {"batch_size": 3}, r"output 'balance' is 0\.\d+ in shard 0, and 0\.\d+ in shard 1: with"),
    (
        "Counting",
        "by_rows",
        {},
        r"output 'rows' has no row for each sample, and is another one with 4 rows of shard 0",
    ),
    (
        "Holding",
        "of_logits",
        {"batch_size": 3},
        r"output 'rows' has no row for each sample, and is another one with 1 row of shard 0 than with 2: with over",
    ),
    (
        "Hidden",
        "of_logits",
        {"shards": 6},
        r"shard 0: output 'hidden' has the size \[2, 2, 4\] with 2 rows, and \[2, 1, 4\] with 1: its rows are in "
        r"dimension 1, not in 0; transpose it",
    ),
    (
        "Hidden",
        "of_logits",
        {},
        r"shard 0: output 'hidden' has the size \[2, 4, 4\] with 4 rows, and \[2, 3, 4\] with 3",
    ),
]


@pytest.mark.parametrize(("model", "loss", "keys", "text"), WRONG)
def test_what_one_shard_has_computed_is_no_constant(
    tmp_path: Path, model: str, loss: str, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        alone(training(model, loss, **keys), tmp_path)


@pytest.mark.parametrize(
    ("model", "loss"), [("Experts", "balanced"), ("Counting", "by_rows"), ("Hidden", "of_logits")]
)
def test_a_single_shard_is_the_whole_batch(tmp_path: Path, model: str, loss: str) -> None:
    """Nothing is wrong then, and nothing is tried."""
    alone(training(model, loss, shards=1), tmp_path)
    check(tmp_path, plain(seeded(globals()[model]), globals()[loss]))


@pytest.mark.slow
def test_workers_compare_constants_with_each_other(tmp_path: Path) -> None:
    """Each of three workers has one shard, of one row."""
    for model in ("Experts", "Numbers"):
        with pytest.raises(ProcessExit, match=r"output 'balance' .*shard"):
            run_group(training(model, "balanced", batch_size=3, workers=3), tmp_path / model)


def named(outputs: Any, target: Any) -> torch.Tensor:
    """A loss that weighs rows by their names."""
    assert len(target["name"]) == len(outputs)
    weights = torch.tensor([1.0 + int(name.split()[1]) / ROWS for name in target["name"]])
    return (nn.functional.cross_entropy(outputs, target["class"], reduction="none") * weights).mean()


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 4)


@pytest.mark.parametrize("shards", [3, 5])
def test_a_list_with_a_name_for_each_row_is_joined(tmp_path: Path, shards: int) -> None:
    told = alone(training("Linear", "named", dataset=f"{HERE}:Names", shards=shards), tmp_path)
    losses, expected = [], seeded(Linear)
    optimizer, data = torch.optim.SGD(expected.parameters(), lr=0.5), Data()
    for rows in torch.arange(ROWS).chunk(2):
        target = {"class": data.classes[rows], "name": [f"row {row}" for row in rows.tolist()]}
        value = named(expected(data.inputs[rows]), target)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    check(tmp_path, (losses, expected.state_dict()))
    assert not [note for note in notes(told) if "only sizes tell" in note]


def writing(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that writes its target in place, and a copy of its outputs."""
    outputs = outputs - outputs.mean(0)
    torch.relu_(outputs[:, :2])
    nn.functional.normalize(outputs, dim=1, out=None)
    target.remainder_(3)
    return nn.functional.cross_entropy(outputs, target)


def mean_of_targets(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean() + target.double().mean()


def of_rows(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean(1) + target


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_a_loss_may_write_its_target(tmp_path: Path, shards: int) -> None:
    """And a metric gets what the model gave, whether it is measured of shards, or of the batch after the loss."""
    metrics = {"each": f"{HERE}:of_rows", "batch": {"target": f"{HERE}:mean_of_targets", "over": "batch"}}
    job = training("Linear", "writing", shards=shards, metrics=metrics, eval={"dataset": f"{HERE}:Data"})
    alone(job, tmp_path)
    model, data = seeded(Linear), Data()
    seen = [of_rows(model(data.inputs[:12]), data.classes[:12]).mean().item()]
    check(tmp_path, plain(model, lambda outputs, target: writing(outputs, target.clone())))
    first, last = history_of(tmp_path)
    assert first["each"] == pytest.approx(seen[0], rel=1e-5)
    with torch.no_grad():
        outputs = model(data.inputs)
    expected = mean_of_targets(outputs, data.classes).item()
    assert (last["eval_batch"], last["eval_each"]) == pytest.approx((expected, expected), rel=1e-5)


def test_a_loss_that_writes_its_outputs_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step 0: the loss raised RuntimeError: a leaf .* in-place operation"):
        alone(training("Linear", "writing_outputs", shards=2), tmp_path)


def writing_outputs(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    outputs -= outputs.mean(0)
    return nn.functional.cross_entropy(outputs, target)
