"""Classes, functions and partials wherever a target may stand; a result to start from."""

import functools
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import JobError, StorageError
from dp_ray.job.job import Job
from tests.support import training
from tests.support.three_tasks import FILE, UNTRAINED
from tests.support.trainings import keys_of


class Net(nn.Module):
    """6 numbers to 3 logits."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(inputs)
        return logits

    @classmethod
    def joined(cls, items: list[Any]) -> Any:
        """A shard's items as a batch."""
        return torch.utils.data.default_collate(items)


def accuracy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float()


def target(name: str, **args: Any) -> dict[str, Any]:
    return {"target": name, "args": args}


NAMES: dict[str, Any] = {
    "model": target("tests.job.test_from_python:Net", width=5),
    "dataset": target("tests.support.training:Pairs", length=40),
    "loss": target("torch.nn:CrossEntropyLoss", label_smoothing=0.1),
    "optimizer": target("torch.optim:AdamW", lr=0.02),
    "scheduler": target("torch.optim.lr_scheduler:StepLR", step_size=2),
    "metrics": {
        "right": "tests.job.test_from_python:accuracy",
        "f1": target("torchmetrics:F1Score", task="multiclass", num_classes=3),
    },
    "eval": {"dataset": target("tests.support.training:Pairs", length=20)},
    "collate": "torch.utils.data:default_collate",
}  # fmt: skip


def objects() -> dict[str, Any]:
    """The same as Python objects."""
    import torchmetrics

    return {
        "model": functools.partial(Net, width=5),
        "dataset": functools.partial(training.Pairs, 40),
        "loss": functools.partial(nn.CrossEntropyLoss, label_smoothing=0.1),
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.02),
        "scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
        "metrics": {
            "right": accuracy,
            "f1": {"target": torchmetrics.F1Score, "args": {"task": "multiclass", "num_classes": 3}},
        },
        "eval": {"dataset": lambda: training.Pairs(20)},
        "collate": torch.utils.data.default_collate,
    }


def arguments() -> dict[str, Any]:
    """The same as classes, with their arguments beside them."""
    return {
        **objects(),
        "model": Net,
        "model_args": {"width": 5},
        "dataset": training.Pairs,
        "dataset_args": {"length": 40},
        "loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        "optimizer": {"target": torch.optim.AdamW, "args": {"lr": 0.02}},
        "scheduler": {"target": torch.optim.lr_scheduler.StepLR, "args": {"step_size": 2}},
    }


def run(folder: Path, name: str, **keys: Any) -> dp_ray.Result:
    given = {"task": "train", "batch_size": 11, "shards": 3, "shuffle": True, "seed": 3, "workers": 0}
    return dp_ray.run(**{**given, "storage": str(folder), "name": name, "quiet": True, **keys})


class FromWeight(nn.Linear):
    """A layer that takes a tensor as its weights, as `nn.Embedding.from_pretrained` does."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(6, 3)
        self.weight = nn.Parameter(weight)


def test_objects_train_to_what_their_names_do(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"run-{at}", **keys) for at, keys in enumerate((NAMES, objects(), arguments()))]
    assert len({result.weights_sha256 for result in runs}) == 1
    assert runs[0].metrics == runs[1].metrics == runs[2].metrics
    assert "eval_f1" in runs[0].metrics


def test_classes_alone(tmp_path: Path) -> None:
    job = run(
        tmp_path, "run", model=Net, dataset=training.Pairs, loss=nn.CrossEntropyLoss, optimizer=torch.optim.Adam
    )
    assert job.rows == 101
    assert job.weights["layers.0.weight"].shape == (8, 6)


def test_a_class_is_built_anew_from_the_seed_and_an_object_keeps_its_weights(tmp_path: Path) -> None:
    net, data = Net(), training.Pairs()
    given = {"task": "predict", "dataset": data}
    with torch.no_grad():
        assert torch.allclose(run(tmp_path, "object", model=net, **given).outputs, net(data.inputs), atol=1e-6)
        torch.manual_seed(3)
        assert torch.allclose(run(tmp_path, "class", model=Net, **given).outputs, Net()(data.inputs), atol=1e-6)


def test_an_object_is_trained_as_a_copy_so_that_the_next_run_starts_from_the_same_weights(tmp_path: Path) -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    sgd = {"target": torch.optim.SGD, "args": {"lr": 1.0}}
    given = {"dataset": training.Pairs(), "loss": nn.CrossEntropyLoss, "optimizer": sgd}
    first, second = (run(tmp_path, name, model=net, **given) for name in ("first", "second"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert first.weights_sha256 == second.weights_sha256


@pytest.mark.parametrize("way", ["args", "groups", "partial", "function"])
def test_a_rate_that_is_a_tensor_stays_as_the_caller_gave_it(tmp_path: Path, way: str) -> None:
    rate = torch.tensor(0.1)
    sgd: dict[str, Any] = {
        "args": {"target": torch.optim.SGD, "args": {"lr": rate}},
        "groups": {"target": torch.optim.SGD, "args": {"lr": 0.1}, "groups": [{"match": ".", "args": {"lr": rate}}]},
        "partial": functools.partial(torch.optim.SGD, lr=rate),
        "function": lambda parameters: torch.optim.SGD(parameters, lr=rate),
    }
    decay = {"target": "torch.optim.lr_scheduler:ExponentialLR", "args": {"gamma": 0.9}}
    given = {"model": Net, "dataset": training.Pairs(), "loss": nn.CrossEntropyLoss, "scheduler": decay}
    first = run(tmp_path, "first", optimizer=sgd[way], **given)
    assert rate.item() == pytest.approx(0.1)
    assert run(tmp_path, "second", optimizer=sgd[way], **given).weights_sha256 == first.weights_sha256
    assert first.history[1]["learning_rate"] == pytest.approx(0.09)


def test_weights_among_the_args_of_a_model_stay_as_the_caller_gave_them(tmp_path: Path) -> None:
    weight = torch.zeros(3, 6)
    model = {"target": FromWeight, "args": {"weight": weight}}
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    result = run(tmp_path, "run", model=model, dataset=training.Pairs(), loss=nn.CrossEntropyLoss, optimizer=sgd)
    assert result.weights["weight"].abs().sum() > 0 and not weight.any()


def test_an_object_that_cannot_be_copied_is_refused_before_there_is_a_run_directory(tmp_path: Path) -> None:
    net = Net()
    net.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        JobError, match=r"model: the module's attribute lock cannot be pickled: TypeError: .*; give a function"
    ):
        run(tmp_path, "run", model=net, dataset=training.Pairs(), task="predict")
    assert not (tmp_path / "run").exists()


def test_an_optimizer_that_is_made_already_is_refused_before_there_is_a_run_directory(tmp_path: Path) -> None:
    net = Net()
    made = torch.optim.SGD(net.parameters(), lr=1.0)
    given = {"dataset": training.Pairs(), "loss": nn.CrossEntropyLoss, "optimizer": made}
    with pytest.raises(JobError, match="optimizer: belongs to the parameters it was made with"):
        run(tmp_path, "run", model=net, **given)
    assert not (tmp_path / "run").exists()


def test_weights_of_a_class_that_nobody_trained_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "run", model=Net, dataset=training.Pairs, task="predict", quiet=False)
    assert f"{UNTRAINED} (unless tests.job.test_from_python:Net loads trained ones itself)" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_result_to_start_from(tmp_path: Path) -> None:
    trained = run(tmp_path, "trained", **objects())
    keys = {**objects(), "task": "evaluate"}
    found = run(tmp_path, "evaluated", **keys, init_from=trained)
    assert {f"eval_{name}": metric for name, metric in found.metrics.items()}.items() <= trained.metrics.items()
    assert run(tmp_path, "again", **keys, init_from=Path(trained.run_dir)).metrics == found.metrics


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_args": {"wdith": 3}}, r"Net takes no 'wdith', but width; did you mean 'width'"),
        ({"model": Net(), "model_args": {"width": 3}}, r"must be 'module:attribute'.*or a class or function"),
        ({"optimizer": {"target": torch.optim.Adam, "args": {"rl": 1}}}, r"optimizer\.args: torch\.optim\.adam:Adam"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    given = {"model": Net, "dataset": training.Pairs, "loss": accuracy, "optimizer": torch.optim.Adam, **keys}
    with pytest.raises(JobError, match=says):
        run(tmp_path, "run", **given)


def test_a_job_of_classes_and_functions_that_an_import_finds_is_that_of_their_names() -> None:
    here = "tests.job.test_from_python"
    names = {
        "model": target(f"{here}:Net", width=5),
        "dataset": target("tests.support.training:Pairs", length=40),
        "loss": target("torch.nn.functional:cross_entropy", label_smoothing=0.1),
        "optimizer": target("torch.optim.adam:Adam", lr=0.02),
        "metrics": {"right": f"{here}:accuracy"},
        "collate": f"{here}:Net.joined",
    }
    given = {
        "model": {"target": Net, "args": {"width": 5}},
        "dataset": functools.partial(training.Pairs, 40),
        "loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        "optimizer": {"target": torch.optim.Adam, "args": {"lr": 0.02}},
        "metrics": {"right": accuracy},
        "collate": Net.joined,
    }
    by_name, job = (Job.make({"task": "train", "batch_size": 10, **keys}, "job") for keys in (names, given))
    assert job.is_all_targets and job.describe() == by_name.describe()
    assert job.fingerprint() == by_name.fingerprint()
    sent = pickle.loads(pickle.dumps(job))
    assert sent.is_all_targets and sent.fingerprint() == job.fingerprint()
    assert not Job.make({**FILE, "model": Net}, "job").has_fingerprint(Job.make(FILE, "job").fingerprint())
    again = Job.make({**dict(job), "model_args": {"width": 2}}, "job")
    assert again.describe()["model"] == target(f"{here}:Net", width=2)


def in_a_script() -> Any:
    """A class as a script or a notebook defines it."""
    return type("Net", (Net,), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: Net(), "tests.job.test_from_python:<lambda>"),
        (in_a_script(), "__main__:Net"),
        (type("Accuracy", (), {"__module__": __name__, "__qualname__": "accuracy"}), f"{__name__}:accuracy"),
        (Net(5).double, "torch.nn.modules.module:Module.double"),
        (functools.partial(accuracy, torch.ones(1)), "functools:partial"),
        (type("Odd", (), {"__module__": "no such module"}), "no such module:Odd"),
    ],
    ids=["a lambda", "of a script", "hidden by another", "a method of an object", "a partial", "of no module"],
)
def test_what_no_import_finds_is_shown_as_its_type(given: Any, told: str) -> None:
    job = Job.make({**FILE, "model": given}, "job")
    assert job.untold == ["model"] and job.describe()["model"] == {"target": f"<{told}>", "args": {}}


def test_an_object_is_shown_as_its_type() -> None:
    job = Job.make({**FILE, "model": Net()}, "job")
    assert job.untold == ["model"] and job.describe()["model"] == "<tests.job.test_from_python:Net>"


def test_a_run_of_classes_goes_on_as_that_of_their_names_does(tmp_path: Path) -> None:
    keys = {"dataset": training.Pairs, "loss": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD}
    first = run(tmp_path, "run", model=Net, **keys)
    assert run(tmp_path, "run", model=Net, **keys, epochs=2).total_steps == 2 * first.total_steps
    named = {"model": f"{__name__}:Net", "dataset": "tests.support.training:Pairs"}
    named |= {"loss": "torch.nn.modules.loss:CrossEntropyLoss", "optimizer": "torch.optim.sgd:SGD"}
    assert run(tmp_path, "run", **named, epochs=3).total_steps == 3 * first.total_steps
    with pytest.raises(JobError, match=r"model.target: 'tests\.job\..*:Net' there, '<__main__:Net>' here"):
        run(tmp_path, "run", model=in_a_script(), **keys, epochs=3)


def test_runs_in_threads_give_what_each_gives_alone_and_leave_the_process_as_it_was(tmp_path: Path) -> None:
    """They draw dropout's masks from the process's random state, which is also the caller's."""

    def run(seed: int, name: str) -> dp_ray.Result:
        model = {"target": "tests.support.training:mlp", "args": {"dropout": 0.5}}
        keys = keys_of(storage=str(tmp_path), name=name, model=model, seed=seed, bitwise=True, env={"MINE": name})
        return dp_ray.run(**keys)

    alone = [run(seed, f"alone-{seed}").weights_sha256 for seed in range(4)]
    state, before = torch.get_rng_state(), (sys.stdout, torch.are_deterministic_algorithms_enabled())
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: run(seed, f"thread-{seed}").weights_sha256, range(4)))
    assert together == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert (sys.stdout, torch.are_deterministic_algorithms_enabled()) == before
    assert "MINE" not in os.environ


def test_what_a_task_does_not_give_is_told(tmp_path: Path) -> None:
    result = dp_ray.run("jobs/tutorial.yaml", workers=0, storage=str(tmp_path), quiet=True)
    for name in ("history", "weights"):
        with pytest.raises(StorageError, match=rf"{result.run_dir}: the run has no {name} \(task predict"):
            getattr(result, name)
