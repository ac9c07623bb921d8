"""How the program's process ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cluster import ROOT

LEAVES = """
import atexit, sys, threading, time
from torch.utils.data import TensorDataset
import torch

atexit.register(print, "an exit handler")

def late():
    time.sleep(0.5)
    print("a thread", "x" * 100_000, flush=False)

def data():
    threading.Thread(target=late).start()
    return TensorDataset(torch.zeros(10, 1))
"""


def dp_ray(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dp_ray", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("arguments", "status"), [(["-h"], 0), (["run", "no.yaml"], 2), (["plan"], 2)])
def test_its_status_is_what_the_command_line_says(arguments: list[str], status: int) -> None:
    assert dp_ray(*arguments).returncode == status


@pytest.mark.full
@pytest.mark.slow
def test_what_is_to_happen_at_the_end_happens(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    (tmp_path / "job.yaml").write_text("{model: 'torch.nn:Identity', dataset: 'leaves:data', batch_size: 5}")
    done = dp_ray("plan", "job.yaml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    written = done.stdout + done.stderr  # a plan keeps stdout free of what user code prints
    assert "an exit handler" in written
    assert f"a thread {'x' * 100_000}\n" in written


# Sends this process a signal when it imports a module, and runs the program.
SIGNALLED = """
import os, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
from dp_ray.__main__ import program
program()
"""
TUTORIAL = "jobs/tutorial.yaml"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.full(but=["arguments3-pyarrow-12-130"])
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("arguments", "module", "number", "status"),
    [
        (["list"], "dp_ray.cli.main", signal.SIGINT, 130),
        (["list"], "pydantic", signal.SIGTERM, 130),
        (["list", "{folder}"], "dp_ray.rundir.listing", signal.SIGINT, 130),
        (["compare", "a", "b"], "pyarrow", signal.SIGUSR2, 130),
        (["plan", TUTORIAL], "torch", signal.SIGINT, 130),
        (["run", TUTORIAL, "--workers", "0", "--storage", "{folder}"], "dp_ray.driver.run", signal.SIGTERM, 75),
        (["run", TUTORIAL, "--workers", "0", "--storage", "{folder}"], "dp_ray.job.files", signal.SIGINT, 130),
    ],
)
def test_a_signal_within_its_first_imports_ends_it(
    arguments: list[str], module: str, number: int, status: int, tmp_path: Path
) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    ended = python(SIGNALLED.format(module=module, number=int(number)), *given)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.stderr and not ended.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.full(but=["arguments1-2"])
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments", [["list"], ["plan", TUTORIAL], ["run", TUTORIAL, "--workers", "0", "--storage", "{folder}"]]
)
def test_a_signal_in_its_first_half_second_shows_no_traceback(
    arguments: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """Until Python has started and runs a line of dp_ray, a signal is Python's own matter."""
    line = [sys.executable, "-m", "dp_ray", *(argument.format(folder=tmp_path) for argument in arguments)]
    ended: list[int] = []
    wanted = 75 if arguments[0] == "run" and number == signal.SIGTERM else 130
    for milliseconds in (0, 20, 50, 100, 200, 400, 1000, 3000):
        if milliseconds > 400 and wanted in ended:
            break  # only on a busy machine has Python not started by then
        with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            time.sleep(milliseconds / 1000)
            running.send_signal(number)
            _, errors = running.communicate(timeout=120)
        assert "Traceback" not in errors or f"{ROOT}/dp_ray/" not in errors, errors
        ended.append(running.returncode)
    own = {0, 1, 2}  # Python's, as it starts; or it is done by then: `list` ends with 2 where there are no runs
    assert wanted in ended and {*ended} <= {wanted, *own, -number, 1}, ended


# What an import does that is interrupted while there is something to undo.
HOLDING = """
import os, sys, time
from dp_ray.system.threads import has_begun, interrupts

interrupts("run")
has_begun()
sys.path.insert(0, {folder!r})
try:
    import interrupted_module
    sys.stdout.write("the import has ended\\n")  # at once, as print does not
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", "interrupted_module" in sys.modules)
time.sleep(0.2)
"""


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("times", "says"), [(1, "the import has ended\ninterrupted True\n"), (2, "interrupted False\n")]
)
def test_an_import_is_ended_first_if_there_is_something_to_undo(times: int, says: str, tmp_path: Path) -> None:
    module = f"import os, signal, time\nfor _ in range({times}):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "interrupted_module.py").write_text(f"{module}time.sleep(0.2)\n")
    ended = python(HOLDING.format(folder=str(tmp_path)))
    assert (ended.stdout, ended.stderr, ended.returncode) == (says, "", 0)
