"""A run in a notebook: a real kernel, whose cells are run as Jupyter runs them."""

import ast
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from dp_ray.cluster.internals.variables import ADDRESS
from dp_ray.results.result import Result, load
from tests.support.cluster import ROOT
from tests.support.screens import as_a_notebook_shows

pytestmark = pytest.mark.slow
FORMAT: Any = nbformat.v4  # whose functions have no types
KEYS = """
import dp_ray
keys = {
    "task": "train", "model": "tests.support.training:mlp", "loss": "torch.nn:CrossEntropyLoss",
    "batch_size": 6, "epochs": 3,
    "dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.01}}, "workers": 0, "shuffle": True,
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}}, "storage": "STORAGE",
    "checkpoint": {"every_steps": None, "every_seconds": None},
}
"""


class Notebook:
    """Runs cells in a kernel of its own, and keeps what they show."""

    def __init__(self, folder: Path) -> None:
        self.client: Any = NotebookClient(FORMAT.new_notebook(), timeout=300, allow_errors=True)
        self.folder = folder
        self.shown: list[Any] = []

    def run(self, code: str) -> list[Any]:
        """The outputs of a cell."""
        cells = self.client.nb.cells
        cells.append(FORMAT.new_code_cell(code))
        outputs: list[Any] = self.client.execute_cell(cells[-1], len(cells) - 1).outputs
        return outputs

    def undisturbed(self) -> Result:
        """The run whose outputs are `shown`."""
        return load(next(self.folder.glob("run-*")))

    def run_and_interrupt(self, code: str, at: str) -> list[Any]:
        """The outputs of a cell that Jupyter's stop button interrupts when it shows `at`."""
        cells = self.client.nb.cells
        seen = len(cells)

        def interrupt() -> None:
            until = time.monotonic() + 200
            while at not in "".join(stderr(cell.outputs) for cell in cells[seen:]) and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(self.client.km.provisioner.pid, signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        outputs = self.run(code)
        thread.join()
        return outputs


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """With the keys of a training of 48 steps, which takes three seconds, and with its result."""
    notebook = Notebook(tmp_path_factory.mktemp("runs"))
    with notebook.client.setup_kernel(cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)}):
        notebook.run(KEYS.replace("STORAGE", str(notebook.folder)))
        notebook.run(
            "import dp_ray.telemetry.times; dp_ray.telemetry.times.JUDGED_FROM = 1e9"
        )  # this run is a short one
        notebook.shown = notebook.run("result = dp_ray.run(**keys)")
        yield notebook


def stderr(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stderr")


def test_the_progress_is_one_line_and_no_line_has_the_name(notebook: Notebook) -> None:
    assert {output.output_type for output in notebook.shown} == {"stream"}, "no error"
    lines = as_a_notebook_shows(stderr(notebook.shown))
    (start,) = (at for at, line in enumerate(lines) if line.startswith("run directory "))
    assert [re.sub(r" [\d.]+( s,.*)?$| \S*run-[^ /]+(/report.html)?$", " _", line) for line in lines[start:]] == [
        "run directory _",
        "in this process (cpu)",
        *(f"epoch {epoch}, step {step}: epoch_loss _" for epoch, step in enumerate((15, 31, 47))),
        "48/48 steps, 288 rows, finishing",
        "done, 3 epochs of 96 rows in _",
        "its page: _",
        "",
    ]


def test_an_interrupt_is_a_planned_stop_and_the_cell_goes_on_when_it_is_run_again(notebook: Notebook) -> None:
    cell = "result = dp_ray.run(**keys, name='mine')"
    outputs = notebook.run_and_interrupt(cell, at="epoch 0")
    (error,) = (output for output in outputs if output.output_type == "error")
    stopped = re.fullmatch(r"interrupted after (\d+) of 48 steps; run the same command to resume", error.evalue)
    assert (error.ename, stopped is not None) == ("RunInterrupted", True)
    assert "stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once" in stderr(
        outputs
    )
    assert "_execute" not in "".join(error.traceback), "frames of dp_ray"
    outputs = notebook.run(cell)
    assert "resuming in " in stderr(outputs)
    result = load(notebook.folder / "mine")
    assert result.status == "done"
    assert [row["loss"] for row in result.history] == [row["loss"] for row in notebook.undisturbed().history]


def test_a_result_and_its_history_show_themselves_as_tables(notebook: Notebook) -> None:
    (result,) = notebook.run("dp_ray.load(result.run_dir)")
    assert result.data["text/plain"].splitlines()[1:3] == ["task            train", "status          done"]
    for row in ("<tr><th>steps</th><td>16 in an epoch</td></tr>", "<tr><th>total_steps</th><td>48</td></tr>"):
        assert row in result.data["text/html"]
    (history,) = notebook.run("result.history")
    assert history.data["text/html"].count("<tr>") == 1 + 5 + 1 + 5


def test_the_lines_of_the_docs_work(notebook: Notebook) -> None:
    section = (ROOT / "docs" / "outputs.md").read_text().partition("## In a notebook\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    cells = [line for line in code.replace('"runs/digits"', "result.run_dir").splitlines() if line]
    assert cells[:2] == ["import dp_ray", "result = dp_ray.load(result.run_dir)"]
    shown = [notebook.run(cell) for cell in cells]
    assert [[output.output_type for output in outputs] for outputs in shown[2:]] == [["execute_result"]] * 3
    assert shown[-1][0].data["text/plain"].split()[:3] == ["rank", "0", "288"]


@pytest.fixture
def own_kernel() -> Iterator[Notebook]:
    """A kernel of the tutorial's own, which starts a Ray of its own."""
    notebook = Notebook(ROOT)
    keys = {key: value for key, value in os.environ.items() if key != ADDRESS}
    with notebook.client.setup_kernel(cwd=str(ROOT), env={**keys, "PYTHONPATH": str(ROOT)}):
        yield notebook


@pytest.mark.full
def test_the_tutorials_notebook_prints_its_sizes(own_kernel: Notebook) -> None:
    """On 8 workers first, which the others then share. The oracle is torch.chunk."""
    read: Any = nbformat.read  # which has no types
    tutorial = read(ROOT / "docs" / "tutorial.ipynb", 4)
    cells = [one.source for one in tutorial.cells if one.cell_type == "code"]
    own_kernel.run(cells[0])
    own_kernel.run(cells[1])
    own_kernel.run("keeper = dp_ray.DataParallel(nn.Identity(), workers=8, cpus_per_worker=0.1, quiet=True)")
    for workers in (8, 3, 2, 1):
        own_kernel.run(f"workers = {workers}")
        made, looped, trained, ended = (own_kernel.run(cell) for cell in cells[2:])
        assert not made, made[0].evalue
        wanted = []
        for rows in (30, 30, 30, 10):
            wanted += [
                f"\tIn Model: input size torch.Size([{len(one)}, 5]) output size torch.Size([{len(one)}, 2])"
                for one in torch.arange(rows).chunk(workers)
            ]
            wanted.append(f"Outside: input size torch.Size([{rows}, 5]) output_size torch.Size([{rows}, 2])")
        assert "".join(one.text for one in looped).splitlines() == wanted
        assert "('fc.weight', [2, 5])" in trained[-1].data["text/plain"]
        sizes = [[len(one), 5] for one in torch.arange(10).chunk(workers)]
        assert ast.literal_eval(ended[-1].data["text/plain"]) == sizes
    own_kernel.run("keeper.close()")
