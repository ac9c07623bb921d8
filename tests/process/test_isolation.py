"""What a job leaves behind in its process: undone, or named."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch

from dp_ray.process import isolation
from dp_ray.process.isolation import isolated
from tests.support.cluster import ROOT
from tests.support.messy import Messy, settings


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The settings of this process, whatever a test finds."""
    folder = Path.cwd()
    yield
    os.chdir(folder)


def test_all_that_a_job_changes_is_as_before(tmp_path: Path) -> None:
    before, children = settings(), psutil.Process().children()
    with isolated() as remains:
        Messy(str(tmp_path))
        changed = {key for key, value in settings().items() if value != before[key]}
        assert changed == before.keys(), "the messy model changes all that is looked at"
    del before["random"], before["children"]
    after = settings()
    assert {key: after[key] for key in before} == before
    assert psutil.Process().children() == children, "processes that the job started have ended"
    assert remains == []


def test_variables_that_a_job_has_set_or_removed_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP_RAY_TEST_SET", "before")
    monkeypatch.setenv("DP_RAY_TEST_GONE", "before")
    with isolated():
        os.environ["DP_RAY_TEST_SET"] = "by the job"
        del os.environ["DP_RAY_TEST_GONE"]
    assert (os.environ["DP_RAY_TEST_SET"], os.environ.get("DP_RAY_TEST_GONE")) == ("before", "before")


def test_it_is_as_before_after_an_error_too(tmp_path: Path) -> None:
    before = settings()
    with contextlib.suppress(LookupError), isolated():
        Messy(str(tmp_path))
        raise LookupError
    assert settings()["folder"] == before["folder"]
    assert settings()["dtype"] == before["dtype"]


@pytest.mark.full
@pytest.mark.slow
def test_a_job_that_compiles_nothing_does_not_wait_for_torchs_compiler() -> None:
    """Its import takes as long as that of torch, on each worker."""
    code = "from dp_ray.process.isolation import isolated\nwith isolated():\n    pass\n"
    code += (
        "import sys; print([name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


BITWISE_PREDICTIONS = """
import os, sys, torch, dp_ray
model = "tests.support.compiler:Deterministic"
given = {"workers": 0, "bitwise": True, "storage": sys.argv[1], "quiet": True, "dataset.args.length": 30}
if sys.argv[2] == "warns":
    torch.use_deterministic_algorithms(True, warn_only=True)
modes = [torch.get_deterministic_debug_mode()]
if sys.argv[2] == "plain":
    dp_ray.run("jobs/tutorial.yaml", name="one", model=model, **given)
    modes.append(torch.get_deterministic_debug_mode())
dp_ray.run("jobs/tutorial.yaml", name="two", model={"target": model, "args": {"imports": True}}, **given)
modes.append(torch.get_deterministic_debug_mode())
print(set(modes), torch._inductor.config.deterministic, "TORCHINDUCTOR_DETERMINISTIC" in os.environ)
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("caller", "says"), [("plain", "{0} False False"), ("warns", "{1} True False")])
def test_a_bitwise_prediction_is_deterministic_without_torchs_compiler(
    caller: str, says: str, tmp_path: Path
) -> None:
    """What user code compiles is deterministic too, and the caller's own settings come back."""
    line = [sys.executable, "-c", BITWISE_PREDICTIONS, str(tmp_path), caller]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [says], done.stderr


def test_the_process_that_frees_shared_memory_goes_on() -> None:
    with isolated():
        SharedMemory(create=True, size=8).unlink()
    tracker = psutil.Process(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    assert tracker.status() != psutil.STATUS_ZOMBIE


SERVED = """
import multiprocessing, os

if __name__ == "__main__":
    from dp_ray.process.isolation import isolated  # here, for each child imports this file

    for _ in range(2):
        with isolated() as remains:
            child = multiprocessing.get_context("forkserver").Process(target=os.getpid)
            child.start()
            child.join()
            assert child.exitcode == 0
        assert remains == []
        print(multiprocessing.forkserver._forkserver._forkserver_pid, flush=True)
    os._exit(0)  # as a worker that is ended: nothing is cleared up any more
"""


@pytest.mark.full
@pytest.mark.slow
def test_python_starts_its_server_of_forked_processes_again(tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    with TemporaryDirectory(dir="/tmp") as folder:  # a socket's path is short
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, "None\nNone\n"), done.stderr
        assert not list(Path(folder).glob("pymp-*")), "the folder of the server's socket"


def test_a_librarys_thread_that_serves_any_job_does_not_remain() -> None:
    with isolated() as remains, ThreadPoolExecutor(1) as pool:
        pool.submit(os.getpid).result()
        kept = ThreadPoolExecutor(1)
        kept.submit(os.getpid).result()
    kept.shutdown()
    assert remains == []


def test_what_cannot_be_restored_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with isolated() as remains:
        os.chdir(tmp_path)
        gone.rmdir()
    assert remains == ["the setting working directory"]


def test_a_thread_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "END_SECONDS", 0.1)
    end = threading.Event()
    with isolated() as remains:
        threading.Thread(target=end.wait, name="endless").start()
    end.set()
    assert remains == ["the thread 'endless'"]


def test_a_thread_that_ends_soon_does_not_remain() -> None:
    with isolated() as remains:
        threading.Timer(0.2, lambda: None).start()
    assert remains == []


def test_random_numbers_are_left_to_the_task() -> None:
    torch.manual_seed(5)
    with isolated():
        pass
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
