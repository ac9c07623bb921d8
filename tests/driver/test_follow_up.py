"""`dp-ray evaluate RUN_DIR` and `dp-ray predict RUN_DIR`: with what a training left, beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dp_ray
from dp_ray.rundir.start import _split_location
from tests.support import training
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.three_tasks import FILE
from tests.support.trainings import eval_loss, trained

pytestmark = pytest.mark.usefixtures("in_project")
PAIRS = "{target: 'tests.support.training:Pairs', args: {length: 30}}"


class Inputs(training.Pairs):
    """Items without a target."""

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return Path(trained(tmp_path_factory.mktemp("runs"), quiet=True, env={"SOME": "value"}).run_dir)


def follow(monkeypatch: pytest.MonkeyPatch, task: str, *args: Any) -> int:
    return status_of(monkeypatch, task, *map(str, args))


def weights(run_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir / f"{name}.safetensors")


def test_evaluate_takes_the_best_weights_on_the_dataset_of_eval(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(monkeypatch, "evaluate", run_dir, "--json") == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    best = dp_ray.load(run_dir).best
    assert best is not None
    assert (result["name"], result["rows"]) == ("trained-evaluate", 20)
    assert result["run_dir"] == str(run_dir.parent / "trained-evaluate")
    assert result["metrics"]["loss"] == pytest.approx(best["value"], rel=1e-6)
    assert said.err.splitlines()[1] == (
        f"trained-evaluate: evaluates the best weights of {run_dir} on its eval.dataset tests.support.training:Pairs"
    )


def test_each_has_a_name_of_its_own_and_the_last_weights_are_to_be_had(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert follow(monkeypatch, "evaluate", run_dir, "--weights", "last", "--name", "last", "--overwrite") == 0
    loss = dp_ray.load(run_dir.parent / "last").metrics["loss"]
    assert loss == pytest.approx(eval_loss(weights(run_dir, "weights")), rel=1e-6)
    for place in ("trained-predict", "trained-predict-2"):
        assert follow(monkeypatch, "predict", run_dir) == 0
        assert dp_ray.load(run_dir.parent / place).rows == 101


@pytest.mark.parametrize("task", ["evaluate", "predict"])
def test_neither_takes_the_place_of_the_training_whose_weights_it_reads(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    assert follow(monkeypatch, task, run_dir, "--name", run_dir.name, "--overwrite") == 2
    assert f"init_from: {run_dir}/best.safetensors lies in {run_dir}, which --overwrite" in capsys.readouterr().err
    assert dp_ray.load(run_dir).weights


def test_a_key_of_a_dataset_that_is_not_used_is_said(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(monkeypatch, "evaluate", run_dir, "--set", "dataset.args.length=3", "--name", "unused") == 0
    assert "dataset.args.length is not used: evaluate uses eval.dataset" in capsys.readouterr().err
    assert dp_ray.load(run_dir.parent / "unused").rows == 20


def test_another_dataset(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(monkeypatch, "evaluate", run_dir, "--dataset", PAIRS, "--name", "other") == 0
    model, data = training.mlp().eval(), training.Pairs(30)
    model.load_state_dict(weights(run_dir, "best"))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(data.inputs), data.targets).item()
    result = dp_ray.load(run_dir.parent / "other")
    assert result.rows == 30
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-6)


def test_predict_on_items_without_a_target(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--dataset", "tests.driver.test_follow_up:Inputs", "--workers", "0", "--name", "inputs"]
    assert follow(monkeypatch, "predict", run_dir, *args) == 0
    model = training.mlp().eval()
    model.load_state_dict(weights(run_dir, "best"))
    with torch.no_grad():
        expected = model(training.Pairs().inputs)
    result = dp_ray.load(run_dir.parent / "inputs")
    assert result.sample_index.tolist() == list(range(101))
    assert torch.allclose(result.outputs, expected, atol=1e-6)
    err = capsys.readouterr().err
    assert "leaves the target out" not in err
    assert "its env is not kept: set it again where it is needed (--set env.SOME=...)" in " ".join(err.split())


def test_an_unfinished_one_goes_on_under_its_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follow(monkeypatch, "predict", run_dir, "--set", "seed=7") == 0
    names = {path.name for path in run_dir.parent.iterdir() if path.name.startswith("trained-predict")}
    newest = run_dir.parent / sorted(names)[-1]
    result = json.loads((newest / "result.json").read_text())
    (newest / "result.json").write_text(json.dumps({**result, "status": "failed"}))
    assert follow(monkeypatch, "predict", run_dir, "--set", "seed=7") == 0
    assert {path.name for path in run_dir.parent.iterdir() if path.name.startswith("trained-predict")} == names
    assert dp_ray.load(newest).status == "done"


@pytest.mark.full(but=["changes0-args0-holds no best.safetensors: set checkpoint.best"])
@pytest.mark.parametrize(
    ("changes", "args", "says"),
    [
        ({"checkpoint": {}}, ["--weights", "best"], "holds no best.safetensors: set checkpoint.best"),
        (
            {"model": training.mlp()},
            [],
            "model was given as a Python object (<torch.nn.modules.container:Sequential>)",
        ),
        ({"task": "evaluate"}, [], "is a run of task evaluate, not of a training"),
        ({"outputs": {"after": lambda found: found}}, [], "outputs.after was given as a Python object (<tests.dri"),
    ],
)
def test_what_cannot_be_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: Any,
    args: Any,
    says: str,
) -> None:
    dp_ray.run(**{**FILE, "workers": 0, "storage": str(tmp_path), "name": "trained", "quiet": True, **changes})
    assert follow(monkeypatch, "predict", tmp_path / "trained", *args) == 2
    assert says in capsys.readouterr().err


def test_a_training_of_classes_is_followed_as_that_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"model": training.mlp, "dataset": training.Pairs, "loss": torch.nn.CrossEntropyLoss}
    keys = {**FILE, **given, "eval": {"dataset": training.Pairs}, "metrics": {"right": training.right}}
    run = dp_ray.run(**{**keys, "workers": 0, "storage": str(tmp_path), "name": "trained", "quiet": True})
    for task in ("predict", "evaluate"):
        assert follow(monkeypatch, task, tmp_path / "trained") == 0
    assert dp_ray.load(tmp_path / "trained-evaluate").metrics["right"] == run.metrics["eval_right"]
    assert dp_ray.load(tmp_path / "trained-predict").rows == 101


def test_a_folder_that_is_no_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(monkeypatch, "evaluate", tmp_path) == 2
    assert f"{tmp_path} holds no run.json: name the run directory of a training" in capsys.readouterr().err


def test_a_file_in_a_url_with_options_is_a_file() -> None:
    storage, name = _split_location("mock:///runs/trained/best.safetensors?region=here")
    assert (name, storage.location) == ("best.safetensors", "mock:///runs/trained?region=here")
