"""Run directories with damaged, missing and foreign files: each command answers, and nothing acts on a terminal."""

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dp_ray
from dp_ray.cli.main import cli
from dp_ray.cli.options import show_error
from dp_ray.errors import DataError, Error
from dp_ray.monitor.console import Console
from dp_ray.report.page import page_of
from dp_ray.storage import Storage
from tests.support.training import Pairs, mlp

CLEARS = "\x1b[2J<script>alert(1)</script>"  # a terminal, and a page that does not escape
COMMANDS = (
    *(("report", "RUN"), ("report", "RUN", "--json"), ("report", "RUN", "--shapes"), ("report", "RUN", "--html")),
    *(("compare", "RUN", "OTHER"), ("compare", "OTHER", "RUN", "--json"), ("compare", "RUN", "OTHER", "--html", "X")),
    *(("list", "ALL"), ("list", "ALL", "--json"), ("watch", "RUN"), ("track", "RUN")),
)
ODD: tuple[Any, ...] = (None, CLEARS, -1, 1e308, float("nan"), [], {}, [1, "a"], {"a": {"b": None}}, True, "\ud800")


class Broken(Pairs):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError(CLEARS)
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, a prediction that set a sample aside, and a training that failed."""
    folder = tmp_path_factory.mktemp("runs")
    common: dict[str, Any] = {"model": mlp, "batch_size": 10, "workers": 0, "storage": str(folder), "quiet": True}
    train = {**common, "task": "train", "loss": nn.CrossEntropyLoss, "optimizer": torch.optim.SGD}
    dp_ray.run(**train, dataset=Pairs, name="train", eval={"dataset": Pairs, "every_steps": 3})
    dp_ray.run(**common, task="predict", dataset=Broken, name="predict", inputs="first", on_error={"quarantine": 3})
    with pytest.raises(DataError):
        dp_ray.run(**train, dataset=Broken, name="failed", checkpoint={"every_steps": 1})
    return folder


def answered(*command: str) -> tuple[int, str]:
    """The exit status of a command and all that it prints; what is no error of dp_ray is raised."""
    done = CliRunner().invoke(cli, command, standalone_mode=False, color=True)
    if done.exception is None:
        return 0, done.output
    if isinstance(done.exception, Error):
        with redirect_stderr(shown := io.StringIO()):
            show_error(done.exception, is_verbose=False)
        return done.exception.exit_status, done.output + shown.getvalue()
    if isinstance(done.exception, click.ClickException):
        return 2, done.output
    raise done.exception


def truncated(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(5):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def missing(path: Path, draw: random.Random) -> None:
    path.unlink()


def foreign(path: Path, draw: random.Random) -> None:
    """Valid, and nothing that dp_ray would write."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"x": ["a", None], "step": ["b", "c"]}), path)
    else:
        path.write_text(
            draw.choice(["[]", "null", "3", "{}", '{"job": 3, "status": {}, "metrics": []}', "[" * 10_000])
        )


def odd_values(path: Path, draw: random.Random) -> None:
    """Some values of a JSON file, or a column of a table, are of another type."""
    if path.suffix == ".parquet":
        table = pq.ParquetFile(path).read()
        at = draw.randrange(table.num_columns)
        kind = draw.choice([pa.string(), pa.float64(), pa.list_(pa.int8())])
        pq.write_table(table.set_column(at, table.column_names[at], pa.nulls(len(table), kind)), path)
        return
    values = json.loads(path.read_bytes())
    for inside, key in draw.sample(places := list(_places(values)), min(3, len(places))):
        inside[key] = draw.choice(ODD)
    path.write_text(json.dumps(values))


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = values if isinstance(values, dict) else range(len(values) if isinstance(values, list) else 0)
    for key in keys:
        yield values, key
        yield from _places(values[key])


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (truncated, flipped, missing, foreign, odd_values)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["train", "predict", "failed"])
def test_each_command_answers_in_a_line(
    runs: Path, tmp_path: Path, name: str, damage: Callable[[Path, random.Random], None]
) -> None:
    draw = random.Random(f"{name} {damage.__name__}")
    kept = [path.relative_to(runs) for path in sorted((runs / name).rglob("*.*"))]
    for path in draw.sample([file for file in kept if file.suffix in (".json", ".parquet")], 3):
        everything = tmp_path / path.name
        shutil.copytree(runs, everything)
        damage(everything / path, draw)
        places = {"RUN": name, "OTHER": "train" if name == "predict" else "predict", "ALL": "", "X": "compared.html"}
        for command in COMMANDS:
            if command[0] == "watch" and path.name == "run.json":
                continue  # it waits for a run
            status, said = answered(*(str(everything / places[word]) if word in places else word for word in command))
            assert status in (0, 1, 2), said
            assert all(char.isprintable() or char in "\n\t" for char in said), (command, path, said)
            assert status == 0 or said, command


def test_an_error_with_escapes_acts_on_no_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = answered("report", str(runs / "failed"))
    assert (status, "\\x1b[2J<script>" in said, "\x1b" in said) == (0, True, False)
    Console("job").say(f"failed: {CLEARS}\n\tin a second line")
    assert capsys.readouterr().err == "job: failed: \\x1b[2J<script>alert(1)</script>\n\tin a second line\n"


def test_a_file_name_with_half_a_character_does_not_cost_the_page(runs: Path, tmp_path: Path) -> None:
    """As Linux allows them: `sys.argv` and the working folder hold such names with surrogates."""
    shutil.copytree(runs / "train", tmp_path / "train")
    about = tmp_path / "train" / "about.json"
    values = json.loads(about.read_text())
    values["drivers"][-1]["command"] = "dp-ray run j\udcffob.yaml"
    about.write_text(json.dumps(values))
    page = page_of(Storage(str(tmp_path / "train")))
    assert page.count("dp-ray run j\\udcffob.yaml") == 1


def test_no_text_of_a_page_turns_its_direction(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "failed", tmp_path / "failed")
    result = tmp_path / "failed" / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "error": "a \u202egpj.exe \x1b[0m <b>"}))
    page = page_of(Storage(str(tmp_path / "failed")))
    assert "<pre>a \\u202egpj.exe \\x1b[0m &lt;b&gt;</pre>" in page
