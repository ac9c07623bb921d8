"""`--over`: the notation of values and ranges, the trials that follow, and every wrong option told before a run."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.errors import JobError
from dp_ray.job.files import job_maker
from dp_ray.job.job import Job
from dp_ray.sweeps.define import Choices, Definition, ValueRange, chosen_metric, combinations, parse_axis
from tests.support.cli import status_of
from tests.support.sweeps import evaluation_job, training_job

pytestmark = pytest.mark.usefixtures("in_project")

SCALARS = st.one_of(
    st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.text("ab ,[]{}:#'\"", max_size=5)
)


@given(st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=1, max_size=5, unique_by=repr))
def test_values_are_yaml_with_commas_between_them(values: list[Any]) -> None:
    written = yaml.safe_dump(values, default_flow_style=True, width=10**6).strip()
    axis = parse_axis(f"model.args.x={written[1:-1]}")
    assert isinstance(axis, Choices)
    assert (axis.key, list(axis.values)) == ("model.args.x", values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1..10", (1, 10, False, None)),
        ("-3..-1", (-3, -1, False, None)),
        ("0.0..1", (0.0, 1.0, False, None)),
        ("0...5", (0.0, 0.5, False, None)),
        ("0..1:0.1", (0.0, 1.0, False, 0.1)),
        ("8..64:8", (8, 64, False, 8)),
        ("log(1e-5..1e-2)", (1e-5, 1e-2, True, None)),
        ("log( 8 .. 512 )", (8, 512, True, None)),
    ],
)
def test_a_range(text: str, expected: tuple[Any, ...]) -> None:
    axis = parse_axis(f"batch_size={text}")
    assert isinstance(axis, ValueRange)
    got = (axis.low, axis.high, axis.is_log, axis.step)
    assert got == expected and list(map(type, got)) == list(map(type, expected))
    assert parse_axis(f"batch_size={axis}") == axis


def test_what_only_looks_like_a_range_is_text() -> None:
    assert parse_axis("dataset.args.root=../a,../b") == Choices("dataset.args.root", ("../a", "../b"))
    assert parse_axis("model.args.x='1..10','log(1..10)'") == Choices("model.args.x", ("1..10", "log(1..10)"))


def test_the_trials_are_all_combinations_the_last_key_fastest(tmp_path: Path) -> None:
    axes = tuple(map(parse_axis, ["optimizer.args.lr=1e-3,3e-4", "batch_size=32,64", "model_args.dropout=0,0.5"]))
    sweep = Definition("s", job_maker(training_job(tmp_path)), axes, combinations(axes))
    jobs = [sweep.job(number, picked) for number, picked in enumerate(sweep.probes(), start=1)]
    assert [job.run_name for job in jobs] == [f"s-{number}" for number in range(1, 9)]
    found = [(job.targets["optimizer"].args["lr"], job.batch_size, job.model.args["dropout"]) for job in jobs]
    assert found == list(itertools.product([1e-3, 3e-4], [32, 64], [0, 0.5]))


OVER = ["--over", "batch_size=16,32"]
WRONG = [
    (["--over", "batch_sise=16,32"], "batch_sise: is no key of a job; did you mean batch_size?"),
    (["--over", "batch_size=16,many"], "batch_size: must be a valid integer, got 'many'"),
    (["--over", "batch_size=16,0"], "batch_size: must be greater than 0"),
    (["--over", "batch_size=16,0"], "so is the trial with batch_size=0"),
    (["--over", "optimizer.args.lrr=1,2"], "optimizer.args: torch.optim:SGD"),
    (["--over", "optimizer.target='torch.optim:Adamm',x"], "optimizer"),
    (["--over", "epochs.x=1,2"], "epochs.x: epochs is 2, which has no keys of its own"),
    (["--over", "batch_size"], "--over 'batch_size': must be KEY=VALUES"),
    (["--over", "=1,2"], "--over '=1,2': must be KEY=VALUES"),
    (["--over", "batch_size="], "names no value"),
    (["--over", "batch_size=16,,32"], "the values are not YAML with commas between them"),
    (["--over", "batch_size=16,16"], "16 is given twice"),
    (["--over", "optimizer.args.lr=0.1,.nan"], "nan is no value"),
    (["--over", "batch_size=16..32,64"], "16..32 is no range; one stands alone"),
    (["--over", "optimizer.args.lr=log(1e-3,1e-2)"], "log(1e-3 is no range; one stands alone"),
    (["--over", "batch_size=16..32"], "--over batch_size=16..32: values are drawn from a range by a search"),
    (["--over", "batch_size=32..16", "--search", "optuna", "--trials", "2"], "the range must go up, got 32 to 16"),
    (["--over", "optimizer.args.lr=log(0..1)", "--search", "optuna", "--trials", "2"], "needs a range above 0"),
    (["--over", "optimizer.args.lr=log(1..9:2)", "--search", "optuna", "--trials", "2"], "has no step"),
    (["--over", "batch_size=8..16:9", "--search", "optuna", "--trials", "2"], "the step must be above 0 and fit"),
    (["--over", "batch_size=0..16", "--search", "optuna", "--trials", "2"], "batch_size: must be greater than 0"),
    (["--over", "batch_size=8.0..16", "--search", "optuna", "--trials", "2"], "batch_size: must be a valid integer"),
    (["--over", "name=a,b"], "name cannot be swept"),
    (["--over", "storage=a,b"], "storage cannot be swept"),
    (["--over", "env.TOKEN=a,b"], "the values of env are not kept"),
    ([*OVER, "--over", "batch_size=64"], "--over batch_size: is given twice"),
    ([*OVER, "--over", "optimizer.args.lr=1,2", "--over", "optimizer=a"], "overlaps --over optimizer.args.lr"),
    ([*OVER, "--set", "batch_size=3"], "--over batch_size: batch_size is set on the command line too"),
    (["--over", "workers=0,0", "--workers", "0"], "0 is given twice"),
    (["--over", "workers=0,1", "--workers", "0"], "--over workers: workers is set on the command line too"),
    ([*OVER, "--metric", "eval_los"], "--metric eval_los: the job measures loss, epoch_loss, accuracy"),
    ([*OVER, "--metric", "accuracy"], "--metric accuracy: say which value is best: --minimize or --maximize"),
    ([*OVER, "--minimize", "--maximize"], "--minimize, --maximize: give one of them"),
    ([*OVER, "--trials", "3"], "--trials: says how long a search is, so it needs --search optuna"),
    ([*OVER, "--search", "optuna"], "--search: needs --trials N"),
    ([*OVER, "--search", "optuna", "--trials", "0"], "'--trials': 0 is not in the range x>=1"),
    ([*OVER, "--search", "tune", "--trials", "3"], "'--search': 'tune' is not 'optuna'"),
    ([*OVER, "--parallel", "0"], "'--parallel': 0 is not in the range x>=1"),
    ([*OVER, "--parallel", "2"], "--parallel 2: with workers: 0 the trials run in this process"),
    ([*OVER, "--name", "a/b"], "name: must be one folder's name"),
    ([], "Missing option '--over'"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_is_wrong_is_told_before_anything_runs(
    args: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = training_job(tmp_path, metrics={"accuracy": "tests.support.training:right"})
    assert status_of(monkeypatch, "sweep", job, *args) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("run.json"))


def test_a_prediction_measures_nothing_to_search_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = evaluation_job(tmp_path, task="predict")
    search = ["--search", "optuna", "--trials", "2"]
    assert status_of(monkeypatch, "sweep", job, "--over", "batch_size=1..4", *search) == 2
    assert "--search optuna: the job measures nothing to search by: its task is predict" in capsys.readouterr().err
    assert status_of(monkeypatch, "sweep", job, *OVER, "--maximize") == 2
    assert "--maximize: the job measures nothing that could be best" in capsys.readouterr().err


def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "optuna").exists()])
    monkeypatch.delitem(sys.modules, "optuna", raising=False)
    search = ["--search", "optuna", "--trials", "2"]
    assert status_of(monkeypatch, "sweep", evaluation_job(tmp_path), "--over", "model.args.x=0.0..1.0", *search) == 2
    assert "--search optuna: the package is not installed; pip install 'dp-ray[sweep]'" in capsys.readouterr().err


BEST = {"best": {"metric": "eval_accuracy", "mode": "max"}}
EVAL: dict[str, Any] = {
    "eval": {"dataset": "tests.support.training:Pairs"},
    "metrics": {"accuracy": "tests.support.training:right"},
}


@pytest.mark.parametrize(
    ("keys", "asked", "expected"),
    [
        ({}, (None, None), ("loss", "min")),
        (EVAL, (None, None), ("eval_loss", "min")),
        ({**EVAL, "checkpoint": BEST}, (None, None), ("eval_accuracy", "max")),
        ({**EVAL, "checkpoint": BEST}, ("eval_accuracy", None), ("eval_accuracy", "max")),
        ({**EVAL, "checkpoint": BEST}, ("eval_loss", None), ("eval_loss", "min")),
        (EVAL, ("accuracy", "max"), ("accuracy", "max")),
        (EVAL, ("eval_accuracy_0", "min"), ("eval_accuracy_0", "min")),
    ],
)
def test_the_metric_that_counts(
    keys: dict[str, Any], asked: tuple[Any, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    job: Job = job_maker(training_job(tmp_path, **keys))({})
    assert chosen_metric(job, *asked) == expected


@pytest.mark.full
def test_a_changed_sweep_is_refused_by_name_and_more_trials_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = evaluation_job(tmp_path)
    line = ["sweep", job, "--quiet", "--over", "model.args.x=1,2", "--over", "model.args.y=0,1"]
    assert status_of(monkeypatch, *line) == 0
    for args, says in [
        (
            ["sweep", job, "--over", "model.args.x=1,3", "--over", "model.args.y=0,1"],
            "over.model.args.x.1: 2 there, 3 here",
        ),
        (["sweep", job, "--over", "model.args.x=1,2"], "over.model.args.y: [0, 1] there, not set here"),
        ([*line, "--set", "batch_size=2"], "batch_size: 4 there, 2 here"),
        ([*line, "--search", "optuna", "--trials", "3"], "search: None there, 'optuna' here"),
    ]:
        assert status_of(monkeypatch, *args) == 2
        said = capsys.readouterr().err
        assert "job-sweep holds a different sweep (" in said
        assert says in said
    # Version 0.2 kept the job as the file has it, without the first trial's values.
    sweep = tmp_path / "runs" / "job-sweep" / "sweep.json"
    kept = json.loads(sweep.read_text())
    older = json.loads(sweep.read_text())
    older["definition"]["job"]["model"]["args"] = {}
    sweep.write_text(json.dumps(older))
    assert status_of(monkeypatch, *line, "--set", "batch_size=2") == 2
    assert "(batch_size: 4 there, 2 here)" in capsys.readouterr().err
    sweep.write_text(json.dumps(kept))
    order = ["sweep", job, "--over", "model.args.y=0,1", "--over", "model.args.x=1,2", "--json"]
    capsys.readouterr()
    assert status_of(monkeypatch, *order) == 0  # the order of keys is that of the sweep which goes on
    first = json.loads(capsys.readouterr().out)["trials"][0]
    assert (first["number"], first["values"]) == (4, {"model.args.x": 2, "model.args.y": 1})


def test_json_values_of_a_yaml_date(tmp_path: Path) -> None:
    axes = (parse_axis("model.args.x=2026-01-01,2026-01-02"),)
    told = Definition("s", job_maker(evaluation_job(tmp_path)), axes, 2).describe()
    assert told["over"] == {"model.args.x": ["2026-01-01", "2026-01-02"]}


def test_more_wrong_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = evaluation_job(tmp_path)
    line = ["sweep", job, "--quiet", "--over", "model.args.x=1,2"]
    (tmp_path / "runs" / "job-sweep-2").mkdir(parents=True)
    (tmp_path / "runs" / "job-sweep-2" / "mine.txt").touch()
    assert status_of(monkeypatch, *line) == 2
    assert "job-sweep-2: trial 2 would run there, and it is not empty" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "job-sweep").exists()
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "mine.txt").touch()
    assert status_of(monkeypatch, *line, "--name", "mine") == 2
    assert "holds files that are no sweep" in capsys.readouterr().err
    assert status_of(monkeypatch, "run", job, "--quiet") == 0
    assert status_of(monkeypatch, *line, "--name", "job") == 2
    assert "holds a run; give the sweep another name (--name)" in capsys.readouterr().err
    with pytest.raises(JobError, match="must be KEY=VALUES"):
        parse_axis("a..b=1")
