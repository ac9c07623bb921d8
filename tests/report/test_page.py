"""The page of a run: what it shows of finished, failed, killed and damaged runs, without a browser."""

import ast
import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dp_ray
from dp_ray.errors import DataError, StorageError
from dp_ray.report import page
from dp_ray.report.comparison import comparison_of, save_page
from dp_ray.report.page import REPORT, duration, metrics_of, page_facts, page_of
from dp_ray.report.run_data import read_run, worker_grid
from dp_ray.rundir.history import METRICS
from dp_ray.storage import Storage
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.reported import EVIL, column, history, write_history, write_run, write_times
from tests.support.trainings import keys_of

IMPORTS = ast.Import | ast.ImportFrom


class Elements(HTMLParser):
    """The elements of a page, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def drawing(html: str) -> Any:
    """What the page's script draws."""
    (found,) = re.findall(r'<script type="application/json" id="drawing">(.*?)</script>', html, re.S)
    return json.loads(found)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "run"))


def train(folder: Path, **keys: Any) -> dp_ray.Result:
    return dp_ray.run(**keys_of(**{"storage": str(folder), "name": "run", **keys}))


def test_each_run_leaves_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(tmp_path, eval={"dataset": "tests.support.training:Pairs"}, epochs=2)
    html = (tmp_path / "run" / REPORT).read_text()
    told = Elements(html).text
    for said in (
        "done",
        "run",
        f"{result.metrics['eval_loss']:.6g}",
        "checkpoints every epoch",
        "not started in a git",
    ):
        assert said in told, said
    (driver,) = json.loads((tmp_path / "run" / "about.json").read_text())["drivers"]
    assert driver["packages"]["torch"] and driver["git"] is None and driver["command"] in told
    series = {line["source"]: line for chart in drawing(html)["charts"] for line in chart["series"]}
    run = Storage(str(tmp_path / "run"))
    for name in ("loss", "gradient_norm", "rows_per_second"):
        assert series[name]["y"] == column(run, name).tolist()
    values = column(run, "eval_loss")
    assert series["eval_loss"]["y"] == values[np.isfinite(values)].tolist()


def test_a_value_of_one_batch_says_so(tmp_path: Path) -> None:
    result = train(tmp_path, eval={"dataset": "tests.support.training:Pairs"})
    shown = {metric.label: metric.detail for metric in metrics_of(read_run(Storage(str(tmp_path / "run"))))}
    assert shown.keys() == result.metrics.keys()
    assert {name: detail for name, detail in shown.items() if detail} == {"loss": "of the last batch"}


def test_without_workers_none_are_counted(tmp_path: Path) -> None:
    train(tmp_path)
    (told,) = [fact for fact in page_facts(read_run(Storage(str(tmp_path / "run")))) if fact.label == "workers"]
    assert (told.value, told.detail) == ("0", "in the driver's process")
    assert "Workers (1)" not in (tmp_path / "run" / REPORT).read_text()


def test_a_failed_run_shows_its_error_and_its_newest_steps(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(tmp_path, dataset={"target": "tests.report.test_page:Broken"}, checkpoint={"every_steps": 4})
    html = (tmp_path / "run" / REPORT).read_text()
    told = Elements(html).text
    assert "✗ failed" in told and "DataError: step 4, shard 0: sample 17" in told and "no such image" in told
    assert "▶ running" not in told, "its driver still held the lease when it wrote the page"
    assert re.search(r"<b>sample</b> 17", html)
    (loss,) = [line for chart in drawing(html)["charts"] for line in chart["series"] if line["source"] == "loss"]
    assert loss["x"] == list(range(4)), "a checkpoint has four steps, and there is no fifth"
    (rate,) = [
        line for chart in drawing(html)["charts"] for line in chart["series"] if line["source"] == "learning_rate"
    ]
    assert rate["isStep"] and not loss["isStep"], "a learning rate is drawn as it was, and a loss smoothed"
    assert "in __getitem__" in told and "no such image: <script>" not in html


class Broken:
    """Sixteen good samples, and one that cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        from tests.support.training import Pairs

        if index == 17:
            raise ValueError("no such image: <script>")
        return Pairs(20)[index]


def test_steps_after_the_last_checkpoint_are_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(tmp_path, dataset={"target": "tests.report.test_page:Broken"}, checkpoint={"every_steps": 3})
    assert read_run(Storage(str(tmp_path / "run"))).steps_done == 4


def test_it_escapes_all_that_it_shows(run: Storage) -> None:
    failure = {"rank": 1, "node": EVIL, "step": 2, "sample": 3, "frames": EVIL}
    interruption = {"kind": "node", "what": EVIL, "step": 2, "ranks": [1], "nodes": [EVIL]}
    interruption |= {"resumed_step": 1, "seconds": 3.0}
    write_run(run, 10, error=EVIL, failure=failure, status="failed", verdict=EVIL, time_split={"all": {EVIL: 1.0}})
    run.write_text("story.json", json.dumps({"world_sizes": [2, 2], "interruptions": [interruption]}))
    said = json.loads(run.read_text("run.json"))
    said["job"]["name"] = EVIL
    run.write_text("run.json", json.dumps(said))
    driver = {"command": EVIL, "plan": EVIL, "host": EVIL, "git": {"commit": EVIL, "branch": EVIL, "changed": [EVIL]}}
    run.write_text("about.json", json.dumps({"drivers": [{**driver, "packages": {EVIL: EVIL}}]}))
    write_history(run, history(10, **{EVIL: np.arange(10.0), f"eval_{EVIL}": np.arange(10.0)}))
    write_times(run, 10, workers=2, node=EVIL)
    record = {"sample_index": 1, "epoch": 0, "step": 1, "position": 1, "dataset": EVIL}
    record |= {"type": EVIL, "message": EVIL, "traceback": EVIL}
    run.child("quarantine").create()
    run.child("quarantine").write_text("dataset-1-0.json", json.dumps([record]))
    for html in (page_of(run), comparison_of([run, run])):
        found = Elements(html)
        assert "img" not in found.tags and html.count("<script") == 4, "its own two, BokehJS's two"
        assert found.text.count(EVIL) > 3
        assert html.count(EVIL) == 0


def test_it_runs_no_code_of_the_run(run: Storage) -> None:
    write_run(run, 10)
    write_history(run, history(10))
    before = set(sys.modules)
    assert "nowhere.at_all:model" in Elements(page_of(run)).text
    assert not [name for name in set(sys.modules) - before if name.startswith("nowhere")]


@pytest.mark.parametrize(
    "name", ["result.json", "run.json", "about.json", METRICS, "story.json", "times/part-0.parquet"]
)
def test_a_damaged_file_is_told_and_the_rest_is_shown(run: Storage, name: str) -> None:
    write_run(run, 10)
    write_history(run, history(10))
    write_times(run, 10, workers=1)
    run.write_text(name, "{")
    assert "<h1>" in page_of(run)
    told = read_run(run).problems
    assert told or name in ("about.json", "story.json"), "these two only inform"


def test_a_directory_that_holds_nothing_yet(run: Storage, tmp_path: Path) -> None:
    run.create()
    assert "nothing to draw" in page_of(run)
    with pytest.raises(StorageError, match="is not a run directory"):
        save_page([str(tmp_path)])


def test_a_killed_run_says_so(run: Storage) -> None:
    write_run(run, 10)
    run.delete("result.json")
    write_history(run, history(6))
    data = read_run(run)
    assert (data.status, data.steps_done, data.total_steps) == ("killed", 6, 10)
    assert "left no result" in page_of(run)


def test_the_grid_holds_the_means_of_its_steps(run: Storage) -> None:
    write_times(run, 1000, workers=3)
    grid = worker_grid(run, 2000)
    assert grid is not None and grid.edges[0] == 0 and grid.edges[-1] == 1000 and len(grid.edges) == 241
    for rank in range(3):
        assert np.allclose(grid.milliseconds[rank], 9 * (rank + 1), rtol=1e-5), "nine parts but the exchange"
        assert np.allclose(grid.rows[rank], rank)
    assert np.allclose(grid.parts["forward"], 2, rtol=1e-5) and np.allclose(grid.parts["exchange"], 5, rtol=1e-5)


def test_without_bokeh_the_page_says_what_is_missing(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, 10)
    write_history(run, history(10))
    page.plotting_scripts.cache_clear()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    html = page_of(run)
    page.plotting_scripts.cache_clear()
    assert "pip install bokeh" in html and len(html) < 200_000


def test_a_page_that_cannot_be_made_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(run: Storage) -> None:
        raise RuntimeError("no template")

    monkeypatch.setattr(page, "write_page", raises)
    assert train(tmp_path, quiet=False).status == "done"
    assert "no page of the run: RuntimeError: no template" in capsys.readouterr().err


def test_what_a_run_was_made_with_is_written_after_the_clearing_of_unfinished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    clear = Storage.remove_unfinished

    def cleared(storage: Storage, recursive: bool = False) -> None:
        time.sleep(0.05 * recursive)
        order.extend(["cleared"] * recursive)
        clear(storage, recursive)

    monkeypatch.setattr(Storage, "remove_unfinished", cleared)
    monkeypatch.setattr("dp_ray.rundir.files.git_state", lambda: order.append("kept"))
    train(tmp_path)
    assert order == ["cleared", "kept", "cleared"]


@pytest.mark.full
def test_nothing_of_the_page_is_imported_before_a_runs_end() -> None:
    """Its imports stand inside functions, but in its own package."""
    for path in (ROOT / "dp_ray").rglob("*.py"):
        tops = [ast.unparse(node) for node in ast.parse(path.read_text()).body if isinstance(node, IMPORTS)]
        assert path.parent.name in ("report", "watch") or not re.findall(
            r"jinja2|bokeh|dp_ray\.report", " ".join(tops)
        ), path


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Storage(str(tmp_path / "run"))
    write_run(run, 10)
    monkeypatch.chdir(tmp_path)
    assert status_of(monkeypatch, "report", "run", "--html") == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"
    assert status_of(monkeypatch, "report", "run", "--html", "mine.html") == 0
    assert status_of(monkeypatch, "report", "run", "run", "--html", "both.html") == 0
    assert "reported" in (tmp_path / "mine.html").read_text() and "comparison" in (tmp_path / "both.html").read_text()
    assert status_of(monkeypatch, "report", "run", "run", "--html") == 2


def test_the_first_screen_in_words(run: Storage) -> None:
    write_run(run, 10, seconds=75.0, world_sizes=[2], quarantined=3)
    write_history(run, history(10))
    told = {fact.label: fact.value for fact in page_facts(read_run(run))}
    assert told == {
        "steps": "10",
        "rows per second": "100",
        "time": "1 min 15 s",
        "workers": "2",
        "interruptions": "0",
        "set aside": "3",
    }
    assert duration(7384) == "2 h 3 min"
