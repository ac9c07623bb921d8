"""docs/recipes.md and docs/data.md; docs/losses.md and docs/steps.md for dict items and losses of one number."""

import functools
import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import dp_ray
from dp_ray.errors import Error, ModelError
from dp_ray.job.job import Job
from jobs.digits import Digits, Net
from tests.support import training
from tests.support.cluster import ROOT
from tests.support.group import ProcessExit, history_of, run_group
from tests.support.page_runs import run_page, standing_in


class Items(training.Pairs):
    """Dicts, as a Hugging Face tokenizer gives them; some labels do not count."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.inputs[index], "labels": self.targets[index] if index % 4 else torch.tensor(-100)}


class Outputs(dict[str, torch.Tensor]):
    """As a ModelOutput of Hugging Face's: its keys are attributes too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in self:
            return self[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class WithLoss(nn.Module):
    """A model that computes its own loss, the mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outputs:
        logits = self.layer(inputs)
        return Outputs(loss=F.cross_entropy(logits, labels), logits=logits)


def step(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(**batch)
    n = (batch["labels"] != -100).sum()
    return {"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}


def step_of_one_number(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def entropy_of_one_number(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target)


def entropy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target, reduction="none")


def distance_of_one_number(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target[:, None]).abs().mean()


def distance(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target[:, None]).abs()


HERE = "tests.test_recipes"


def job_of(**keys: Any) -> Job:
    """101 rows in one batch, in shards of 34, 34 and 33 rows."""
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": "tests.support.training:Pairs",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "batch_size": 101,
        "shards": 3,
        "workers": 2,
        **keys,
    }
    return Job.make(given, "job")


@pytest.mark.full(but=["first-train", "auto-evaluate"])
@pytest.mark.parametrize("task", ["train", "evaluate"])
@pytest.mark.parametrize("inputs", ["auto", "all", "first"])
def test_dict_items_are_answered_with_one_recipe(tmp_path: Path, task: str, inputs: str) -> None:
    given = job_of(task=task, dataset=f"{HERE}:Items", loss="torch.nn:CrossEntropyLoss", inputs=inputs)
    with pytest.raises(ProcessExit) as raised:
        run_group(given, tmp_path)
    says = str(raised.value)
    assert f"task {task} needs items that are (inputs, target), got a batch of a dict; name keys of its items" in says
    assert "inputs: [x] and target: y (it has " in says
    assert '{"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}' in says
    assert "set inputs: all" not in says


BEFORE_AND_AFTER = [
    ({"loss": f"{HERE}:entropy_of_one_number"}, {"loss": f"{HERE}:entropy"}),
    (
        {"step": f"{HERE}:step_of_one_number", "model": f"{HERE}:WithLoss", "dataset": f"{HERE}:Items"},
        {"step": f"{HERE}:step", "model": f"{HERE}:WithLoss", "dataset": f"{HERE}:Items"},
    ),
    ({"loss": f"{HERE}:distance_of_one_number"}, {"loss": f"{HERE}:distance"}),
]


@pytest.mark.full(but=["before0-after0"])
@pytest.mark.parametrize(("before", "after"), BEFORE_AND_AFTER)
def test_the_three_losses_of_one_number(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Written as for one GPU they are an error; written as docs/losses.md says, they are what they were there."""
    with pytest.raises(ProcessExit, match="returned one number for a shard") as raised:
        run_group(job_of(**before), tmp_path / "before")
    assert "(loss * n, n)" in str(raised.value)
    run_group(job_of(**after), tmp_path / "after")
    assert history_of(tmp_path / "after")[0]["loss"] == pytest.approx(on_one_gpu(before), rel=1e-6)


def on_one_gpu(before: dict[str, Any]) -> float:
    """The loss over the whole batch, in one process."""
    torch.manual_seed(0)
    if "step" in before:
        model, items = WithLoss(), Items()
        batch = torch.utils.data.default_collate([items[index] for index in range(101)])
        return float(model(**batch).loss.detach())
    data = training.Pairs()
    name = str(before["loss"]).partition(":")[2]
    return float(globals()[name](training.mlp()(data.inputs), data.targets).detach())


class Pairs(Items):
    """A dict of the model's keywords, and the label beside it."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return {"inputs": item["inputs"]}, item["labels"]


class Logits(nn.Module):
    """A model that gives a mapping, as those of Hugging Face do, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> Outputs:
        return Outputs(loss_weight=torch.ones(()), logits=self.layer(inputs))


DICTS = {"dataset": Items(), "model": WithLoss}
OF_KEYWORDS = {"dataset": Pairs(), "model": Logits, "call": "kwargs"}


@pytest.mark.parametrize(
    "keys", [{"step": step_of_one_number}, {"loss": nn.CrossEntropyLoss()}], ids=["own mean", "dict items"]
)
def test_the_step_that_an_error_shows_is_the_right_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Of a model that gives its own mean: the loss is that of the whole batch in one process."""
    given: dict[str, Any] = {"batch_size": 101, "shards": 3, "workers": 0, "quiet": True}
    given |= {"storage": str(tmp_path), "task": "train"}
    given |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), **DICTS, **keys}
    with pytest.raises(Error) as raised:
        dp_ray.run(**given)
    _, _, code = str(raised.value).partition(":\n")
    assert len(code.splitlines()) == 3
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    result = dp_ray.run(**{**given, "loss": None, "step": names["step"]})
    torch.manual_seed(0)
    batch = torch.utils.data.default_collate([given["dataset"][index] for index in range(101)])
    outputs = given["model"]().layer(batch["inputs"])
    assert result.history[0]["loss"] == pytest.approx(
        float(F.cross_entropy(outputs, batch["labels"]).detach()), rel=1e-6
    )


def test_a_loss_that_takes_no_mapping_is_told_what_it_got_and_that_a_step_picks(tmp_path: Path) -> None:
    loss = {"target": "torch.nn:CrossEntropyLoss", "args": {"weight": [1, 2, 3]}}
    given: dict[str, Any] = {"batch_size": 101, "shards": 3, "workers": 0, "quiet": True}
    given |= {"storage": str(tmp_path), "task": "train"}
    given |= {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), **OF_KEYWORDS, "loss": loss}
    with pytest.raises(ModelError, match=r"not Outputs; it got outputs \{.*\}, target int64 \[34\]; leave loss out"):
        dp_ray.run(**given)


class Triples(training.Pairs):
    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), index


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"loss": nn.TripletMarginLoss},
            r"'negative'; it got .*; a loss gets \(outputs, target\) alone: .* a step\(",
        ),
        ({"loss": F.cosine_embedding_loss}, r"'target'; it got .*; a loss gets \(outputs, target\) alone"),
        (
            {"dataset": Triples(101), "inputs": "all", "loss": nn.CrossEntropyLoss},
            r"got a batch of a list of 3; inputs: all gives the model all of an item, but the target is the second "
            r"of two: a model of several inputs takes items like \(\(a, b\), target\); or write a step",
        ),
    ],
)
def test_what_a_declared_loss_or_pair_cannot_be_is_answered_with_a_step(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    given: dict[str, Any] = {"batch_size": 101, "shards": 3, "workers": 0, "quiet": True, "storage": str(tmp_path)}
    given |= {"task": "train", "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    with pytest.raises(Error, match=says):
        dp_ray.run(**{**given, "model": training.mlp, "dataset": training.Pairs(101), **keys})


def test_the_recipe_stands_in_the_docs() -> None:
    page = (ROOT / "docs" / "steps.md").read_text()
    assert '{"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}' in page


def loaded(name: str) -> Any:
    return dp_ray.load(f"runs/{name}")


@pytest.mark.full
@pytest.mark.slow
def test_the_page_of_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "torchmetrics"):
        pytest.importorskip(package)
    with standing_in(tmp_path, monkeypatch):
        said = run_page(ROOT / "docs" / "recipes.md", tmp_path, capsys)
        check_recipes(said)


@pytest.mark.full
@pytest.mark.slow
def test_the_page_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchmetrics")
    with standing_in(tmp_path, monkeypatch):
        run_page(ROOT / "docs" / "data.md", tmp_path, capsys)
        check_houses()
        check_texts()


def check_recipes(said: str) -> None:
    """Check what the recipes leave, in their folder."""
    images, best = loaded("images"), loaded("images").best["weights"]
    assert {"eval_accuracy", "eval_loss"} <= images.metrics.keys()
    assert any(not torch.equal(tensor, images.weights[name]) for name, tensor in images.ema_weights.items())
    start = Net(16)
    start.load_state_dict(safetensors.torch.load_file(best))
    check_predicted_reviews()
    told = "loads 4 of 6 tensors of the model; of another size: layers.6.weight [10, 256] in place of [3, 256], "
    assert told + "layers.6.bias [10] in place of [3]" in said
    frozen = {"newhead": "layers.[02]", "lora": "layers.*(weight|bias)"}
    for name, pattern in frozen.items():
        same = [one for one, tensor in loaded(name).weights.items() if same_in(start, one, tensor)]
        assert same == [one for one in start.state_dict() if re.match(pattern, one)], name
    assert loaded("lora").weights["layers.6.up"].abs().sum() > 0
    check_looked(start.eval())
    check_folds()
    check_graph()
    check_muon()


def check_muon() -> None:
    """Each optimizer has its rate, and the model learns."""
    both, alone = loaded("muon"), loaded("adamw")
    assert len(both.history) == len(alone.history) == 64  # of one epoch
    assert "learning_rate_1" in both.history[0] and "learning_rate_1" not in alone.history[0]
    assert both.history[-1]["loss"] < both.history[0]["loss"]  # the page's figures are of four epochs


def check_houses() -> None:
    """The root of the mean error, and the predictions of new rows, by plain torch."""
    houses, trained, predicted = importlib.import_module("houses"), loaded("houses"), loaded("houses-predict")
    model = houses.Net()
    model.load_state_dict(trained.weights)
    rows = [houses.part(1)[at] for at in range(100)]
    size, rooms, price = (torch.tensor([row[name] for row in rows]) for name in ("size", "rooms", "price"))
    with torch.no_grad():
        error = F.mse_loss(model(size, rooms), price).sqrt()
        wanted = model(
            *(torch.tensor([dp_ray.data.Csv("new.csv")[at][name] for at in range(5)]) for name in ("size", "rooms"))
        )
    assert trained.metrics["eval_rmse"] == pytest.approx(error.item(), rel=1e-5)
    torch.testing.assert_close(predicted.outputs, wanted)
    assert predicted.carried["id"] == [f"new-{at}" for at in range(5)]


def check_graph() -> None:
    """The weights and the accuracy are those of a plain loop over the whole graph."""
    graph = importlib.import_module("graph")
    result = dp_ray.run("graph.yaml", name="whole", epochs=30, quiet=True)  # the page's run is of one
    torch.manual_seed(0)
    model, item, test = graph.Net(), graph.Graph("train")[0], graph.Graph("test")[0]["labels"]
    inputs = item["features"][None], item["edges"][None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(*inputs)[0].T, item["labels"])
        loss.backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.weights[name], tensor, rtol=1e-4, atol=1e-5)
    right = model(*inputs)[0].argmax(0) == test
    assert result.metrics["eval_accuracy"] == pytest.approx(float(right.sum() / (test != -100).sum()))
    assert result.metrics["eval_accuracy"] > 0.9


def check_texts() -> None:
    """The first loss of the padded texts, by plain torch: the collate gets its args."""
    texts = importlib.import_module("texts")
    torch.manual_seed(0)
    model = nn.EmbeddingBag(8, 2, padding_idx=7)
    tokens, labels = texts.pad(texts.texts()[:20], value=7)
    assert (tokens == 7).any()
    loss = F.cross_entropy(model(tokens), labels).item()
    assert loaded("texts").history[0]["loss"] == pytest.approx(loss, rel=1e-5)


def same_in(model: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    there = model.state_dict().get(name)
    return there is not None and torch.equal(there, tensor)


def check_predicted_reviews() -> None:
    """F1 and the predictions, by plain torch and by counting."""
    reviews, trained, predicted = importlib.import_module("reviews"), loaded("reviews"), loaded("reviews-predict")
    model = reviews.model().eval()
    model.load_state_dict(trained.weights)

    def guessed(data: Any) -> list[int]:
        with torch.no_grad():
            return [int(model(**reviews.collate([data[index]])).logits.argmax(1)) for index in range(len(data))]

    data, some = reviews.Reviews(), reviews.Reviews(length=50)
    assert predicted.outputs["logits"].argmax(1).tolist() == guessed(data)
    assert predicted.outputs.keys() == {"logits"}
    assert list(predicted.carried["id"]) == [f"review-{index}" for index in range(200)]
    pairs, scores = list(zip(guessed(some), some.labels, strict=True)), []
    for label in (0, 1):
        right = sum(pair == other == label for pair, other in pairs)
        scores.append(2 * right / max(1, sum((pair == label) + (other == label) for pair, other in pairs)))
    assert trained.metrics["eval_f1"] == pytest.approx(sum(scores) / 2)


def check_looked(model: nn.Module) -> None:
    data, result = Digits("train"), loaded("looked")
    with torch.no_grad():
        losses = F.cross_entropy(model(data.images), data.labels, reduction="none")
        embeddings = model.layers[:6](data.images)  # type: ignore[operator, index]
    assert torch.allclose(result.outputs["loss"], losses, atol=1e-5)
    assert torch.allclose(result.outputs["embedding"], embeddings, atol=1e-5)
    assert torch.equal(result.outputs["label"], data.labels)


def check_folds() -> None:
    """The accuracy of each fold's best weights on what it held out, by plain torch."""
    data = Digits("train")
    for fold in range(3):
        best, model = loaded(f"fold-{fold}").best, Net(16).eval()
        model.load_state_dict(safetensors.torch.load_file(best["weights"]))
        with torch.no_grad():
            right = model(data.images[fold::3]).argmax(1) == data.labels[fold::3]
        assert best["value"] == pytest.approx(right.float().mean().item())
