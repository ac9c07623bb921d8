"""`dp-ray init`: each template is made, planned and run by the commands that it prints; what is there stays."""

import csv
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import load_file

import dp_ray
from dp_ray.cli import main
from dp_ray.cli.begin import FIRST_SCREEN, TEMPLATES
from dp_ray.cluster.internals.variables import ADDRESS
from tests.support import forked
from tests.support.cli import status_of
from tests.support.cluster import Cluster

NAMES = ("image", "predict", "table", "text")
LEAST = {"image": 0.9, "table": 0.9, "text": 0.8}  # of the accuracy; to guess gives 0.25 or 0.33
ROWS = {"image": 2000, "table": 120, "text": 120, "predict": 150}
ON_RAY = "dp-ray run job.yaml --workers 2 --name two"

PROGRAMS: dict[str, Callable[..., None]] = {"dp-ray": forked.dp_ray_program, "python": forked.python_script}

each = pytest.mark.parametrize("template", NAMES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder to stand in; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("model", None)


def made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    """Make a folder; the commands that are printed to type next."""
    assert status_of(monkeypatch, "init", *args) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) < 80
    return [line.partition("  #")[0].strip() for line in printed.splitlines() if line.startswith("  ")]


def contents(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in found}


def test_the_templates_are_those_that_can_be_chosen() -> None:
    (option,) = [parameter for parameter in main.cli.commands["init"].params if parameter.name == "template"]
    assert isinstance(option.type, click.Choice) and sorted(option.type.choices) == list(NAMES)
    assert sorted(path.name for path in TEMPLATES.iterdir()) == list(NAMES)


@each
def test_what_it_makes_is_short(template: str, folder: Path) -> None:
    main.cli(["init", "--template", template], standalone_mode=False)
    assert 30 <= len((folder / "model.py").read_text().splitlines()) <= 60
    job = (folder / "job.yaml").read_text()
    assert len(job.splitlines()) <= 40 and job.count("#") > 10
    assert max(map(len, [*job.splitlines(), *(folder / "model.py").read_text().splitlines()])) <= 115
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000
    assert not [path for path in folder.iterdir() if path.suffix == ".py-tpl"]


def did_all(folder: Path, commands: list[str]) -> str:
    """Type commands in a folder, each as a program of its own; what they print."""
    said = ""
    for command in commands:
        program, *args = shlex.split(command)
        done = forked.ended(PROGRAMS[program], *args, cwd=folder)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    return said


def check_training(folder: Path, template: str) -> None:
    """The model has learned what it was to learn, and its scores have the order of the data."""
    trained = dp_ray.load(folder / "runs" / "job")
    assert trained.rows == ROWS[template] and trained.metrics["eval_accuracy"] >= LEAST[template]
    assert trained.best is not None and (folder / "runs" / "job" / "best.safetensors").exists()
    predicted = dp_ray.load(folder / "runs" / "job-predict")
    assert predicted.sample_index.tolist() == list(range(ROWS[template]))
    labels = {"image": shapes_of, "table": flowers_of, "text": languages_of}[template](folder)
    assert (predicted.outputs.argmax(1) == labels).float().mean() >= 0.9


def shapes_of(folder: Path) -> torch.Tensor:
    return torch.arange(ROWS["image"]) % 4


def flowers_of(folder: Path) -> torch.Tensor:
    with (folder / "train.csv").open() as file:
        names = [row["species"] for row in csv.DictReader(file)]
    return torch.tensor([("setosa", "versicolor", "virginica").index(name) for name in names])


def languages_of(folder: Path) -> torch.Tensor:
    names = [json.loads(line)["language"] for line in (folder / "train.jsonl").read_text().splitlines()]
    return torch.tensor([("de", "en", "es", "fr").index(name) for name in names])


def check_outputs(folder: Path) -> None:
    """The outputs are what the weights give in plain torch, in the order of the table, and right."""
    result = dp_ray.load(folder / "runs" / "job")
    with (folder / "flowers.csv").open() as file:
        ids, *columns = zip(*list(csv.reader(file))[1:], strict=True)
    weights = load_file(folder / "weights.safetensors")
    mean, spread = torch.tensor([[5.8, 3.1, 3.8, 1.2], [0.8, 0.4, 1.8, 0.8]])[:, None]
    hidden = (torch.tensor([list(map(float, column)) for column in columns]).T - mean) / spread
    hidden = torch.relu(hidden @ weights["layers.0.weight"].T + weights["layers.0.bias"])
    scores = (hidden @ weights["layers.2.weight"].T + weights["layers.2.bias"]).softmax(1)
    assert list(result.carried["id"]) == list(ids) and result.sample_index.tolist() == list(range(150))
    assert torch.equal(result.outputs["species"], scores.argmax(1))
    assert torch.allclose(result.outputs["probability"], scores.amax(1))
    # The template `table` has the same flowers with their species.
    rows = [line.split(",") for name in ("train", "test") for line in (TEMPLATES / f"table/{name}.csv").open()]
    known = {tuple(row[:4]): row[4].strip() for row in rows}
    names = ("setosa", "versicolor", "virginica")
    right = [
        known[one] == names[kind]
        for one, kind in zip(zip(*columns, strict=True), result.outputs["species"], strict=True)
    ]
    assert len(right) == 150 and sum(right) >= 145


@pytest.mark.full(but=["table"])
@pytest.mark.slow
@pytest.mark.parametrize("template", ["table", "text"])
def test_a_training_in_this_process(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = made(monkeypatch, capsys, "--template", template)
    planned, trained, on_ray, compared, predicted = commands
    assert (on_ray, compared) == (ON_RAY, "dp-ray compare runs/job runs/two")
    did_all(folder, [planned, trained, predicted])
    check_training(folder, template)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("template", ["image", "predict"])
def test_all_that_is_printed_also_on_ray(
    template: str,
    folder: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = made(monkeypatch, capsys, "--template", template)
    assert ON_RAY in commands and len(commands) == 5
    monkeypatch.setenv(ADDRESS, cluster.address)
    said = did_all(folder, commands)
    one, two = (dp_ray.load(folder / "runs" / name) for name in ("job", "two"))
    assert (one.world_sizes, two.world_sizes) == ([1], [2])
    if template == "image":
        assert one.weights_sha256 == two.weights_sha256 and one.metrics == two.metrics
        assert "the same weights" in said
        check_training(folder, template)
    else:
        assert torch.equal(one.outputs["probability"], two.outputs["probability"])
        assert "the same outputs" in said and "\n150 flowers: {'setosa': 50, " in said
        check_outputs(folder)


@each
def test_nothing_is_overwritten(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(monkeypatch, capsys, "whole", "--template", template)
    for name in [path.name for path in (folder / "whole").iterdir()]:
        taken = folder / f"with-{name}" / name
        taken.parent.mkdir()
        taken.write_text("mine")
        before = contents(folder)
        assert status_of(monkeypatch, "init", taken.parent.name, "--template", template) == 2
        printed = capsys.readouterr()
        assert f"with-{name}/{name}: there already" in printed.err and printed.out == ""
        assert contents(folder) == before
    assert status_of(monkeypatch, "init", "whole", "--template", template) == 2
    assert "whole/job.yaml, whole/model.py" in capsys.readouterr().err.replace("whole/flowers.csv, ", "")


def test_a_folder_and_a_link_are_not_overwritten_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").symlink_to(folder / "nowhere.yaml")
    (folder / "model.py").mkdir()
    assert status_of(monkeypatch, "init") == 2
    assert "job.yaml, model.py: there already" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "model.py"]


def test_other_files_stay(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("mine")
    made(monkeypatch, capsys, ".")
    assert (folder / "README.md").read_text() == "mine"
    assert sorted(contents(folder)) == ["README.md", "job.yaml", "model.py"]


def test_a_new_folder_below_others_is_entered_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = made(monkeypatch, capsys, "a/b c", "--template", "table")
    assert shlex.split(first) == ["cd", "a/b c"] and others[0] == "dp-ray plan job.yaml"
    monkeypatch.chdir(folder / "a" / "b c")
    assert status_of(monkeypatch, "plan", "job.yaml") == 0
    assert capsys.readouterr().out.startswith("120 rows in global batches of 20")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["file"], "file"),
        (["file/below"], "file"),
        (["/proc/first"], "/proc/first: cannot be written"),
        (["--template", "audio"], "'audio' is not one of 'image', 'text', 'table', 'predict'"),
    ],
)
def test_what_cannot_be_made_is_said(
    args: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("mine")
    assert status_of(monkeypatch, "init", *args) == 2
    printed = capsys.readouterr()
    assert says in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert contents(folder) == {"file": b"mine"}


def test_the_program_alone_says_what_to_do_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out == FIRST_SCREEN + "\n" and printed.err == ""
    lines = printed.out.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) < 80 and dp_ray.__version__ in lines[0]
    for line in lines:
        if line.startswith("  dp-ray "):
            _, name, *args = line.split("   ")[0].split()
            main.cli.commands[name].make_context(name, args)
    assert status_of(monkeypatch, "--help") == 0
    assert capsys.readouterr().out.startswith("Usage: ")
    assert contents(folder) == {}
