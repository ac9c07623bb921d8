"""A system that lacks what Linux has, such as macOS: the fallbacks of `system/linux.py`, on Linux with it hidden."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dp_ray
from dp_ray.cluster.internals.quick_start import SWITCH, forking, is_quick
from dp_ray.engine.user_code import loader_ended_error
from dp_ray.job.keys import WorkerKeys
from dp_ray.process.isolation import isolated
from dp_ray.system import linux
from dp_ray.system.process import Process, is_dead, this_process
from dp_ray.system.threads import handlers_kept
from tests.support.cluster import ROOT

PACKAGE = Path(dp_ray.__file__).parent
LINUX_ALONE = ("prctl", "/proc", "/dev/shm", "/sys/", "sys.platform", "CDLL", "sched_setaffinity", "mallopt", "setns")


def hide_linux(nothing: Path) -> None:
    """Have this process find nothing of what Linux alone has."""
    linux.PROC, linux.SHARED_MEMORY = f"{nothing}/proc", f"{nothing}/shm"
    linux.LIBC, linux.IS_LINUX = SimpleNamespace(), False  # type: ignore[assignment]
    del os.sched_getaffinity, os.sched_setaffinity


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROC", "SHARED_MEMORY", "LIBC", "IS_LINUX"):
        monkeypatch.setattr(linux, name, getattr(linux, name))
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.setattr(os, name, getattr(os, name))
    hide_linux(tmp_path / "nothing")


def test_no_other_module_names_what_linux_alone_has() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        found = [name for name in LINUX_ALONE if name in path.read_text()]
        is_of_pods = path.name == "kuberay.py"  # which run Linux, whatever prints their manifest
        assert not found or is_of_pods or path == Path(linux.__file__), f"{path.relative_to(ROOT)} names {found}"
    assert all(name in Path(linux.__file__).read_text() for name in LINUX_ALONE if name != "setns")


@pytest.mark.usefixtures("elsewhere")
def test_a_process_is_known_by_its_host_and_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = this_process()
        there = Process(here.host, here.machine, child.pid, linux.start_of(child.pid) or "")
        assert here.machine.startswith(f"{os.uname().nodename} ")
        assert not is_dead(here) and not is_dead(there)
        assert float(there.started) > float(here.started)
        assert is_dead(Process(here.host, here.machine, child.pid, here.started)), "the number was given again"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(there), "nobody has waited for it"
    assert is_dead(there)


@pytest.mark.usefixtures("elsewhere")
def test_what_is_not_there_is_left_out() -> None:
    assert linux.gpu_models() == []
    assert not linux.keep_freed_memory()
    assert "because memory is full: take fewer" in str(loader_ended_error())
    with isolated() as remains:
        assert linux.cores() == set()
    assert not remains


@pytest.mark.usefixtures("elsewhere")
def test_handlers_of_python_are_restored_though_not_those_of_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with handlers_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("elsewhere")
def test_no_worker_is_forked_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert not is_quick()
    with forking(WorkerKeys(workers=2)) as server:
        assert server is None
    monkeypatch.setenv(SWITCH, "1")
    assert is_quick()


PROGRAM = """
import sys
from pathlib import Path
from tests.system.test_other_systems import hide_linux

hide_linux(Path(sys.argv.pop()))
from dp_ray.__main__ import program

program()
"""


def began(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-c", PROGRAM, *arguments, "--storage", str(folder), str(folder / "nothing")]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.full
@pytest.mark.slow
def test_a_run_begins_and_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    run = ["run", "jobs/digits.yaml", "--workers", "0", "--set", "epochs=1", "--name", "run"]
    assert (done := began(*run, "--set", "max_steps=3", folder=tmp_path)).returncode == 0, done.stderr
    about = json.loads((tmp_path / "run/about.json").read_text())["drivers"][-1]
    assert about["gpus"] == []
    assert (done := began(*run, folder=tmp_path)).returncode == 0, done.stderr
    assert "run: continues to step 45 (max_steps: 3 before, none now)\n" in done.stderr
    here = [sys.executable, "-m", "dp_ray", "run", "jobs/digits.yaml", *run[2:-1], "here", "--storage", str(tmp_path)]
    assert subprocess.run(here, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode == 0
    there, other = (dp_ray.load(tmp_path / name).weights_sha256 for name in ("run", "here"))
    assert there == other
