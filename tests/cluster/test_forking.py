"""The fork server: what a forked worker has of the process that asked for it, and how the server ends."""

import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dp_ray.cluster.internals import forked_worker, quick_start
from dp_ray.job.job import Job
from dp_ray.job.keys import ModuleKeys, WorkerKeys
from dp_ray.system.process import remove_orphans

KEYS = WorkerKeys(workers=2)
SECONDS = 60.0
# In place of Ray's program: writes what it is to stdout, and what it has from its server.
PROGRAM = """
import json, os, random, signal, sys
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "mark": os.environ.get("MARK"), "path": sys.path,
    "threads": os.environ.get("OMP_NUM_THREADS"), "parent": os.getppid(), "random": random.random(),
    "drawn": sys.modules["numpy"].random.rand() if "numpy" in sys.modules else None,
    "modules": [one for one in ("wave", "ray", "dp_ray.cluster") if one in sys.modules],
    "leads": os.getpgid(0) == os.getpid(),
    "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "children": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
}), flush=True)
sys.stderr.write("heard\\n")
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is of the quick start, also where the suite runs without it."""
    monkeypatch.delenv(quick_start.SWITCH, raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's program; the server imports a module of Python alone, so that it starts at once."""
    monkeypatch.setattr(quick_start, "MODULES", ("wave", "numpy.random", "no_such_module_anywhere"))
    path = tmp_path / "default_worker.py"
    path.write_text(PROGRAM)
    return path


def asked(
    server: Path | str, program: Path, folder: Path, group: int | None = 0, **more: str
) -> tuple[dict[str, Any], str, int]:
    """What a worker says that is started as the raylet does; its stderr, and the process that asked for it.

    `group` is its process group: 0 is one of its own, None that of this process.
    """
    given = {forked_worker.SERVER: str(server), forked_worker.DEFAULT_WORKER: str(program)}
    kept = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    line = [sys.executable, forked_worker.__file__, "--node-id=1", "a b"]
    with subprocess.Popen(
        line,
        cwd=folder,
        env={**kept, **given, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=group,
    ) as asking:
        out, errors = asking.communicate(timeout=SECONDS)
    return json.loads(out), errors, asking.pid


def test_a_forked_worker_is_what_the_asking_process_is(program: Path, tmp_path: Path) -> None:
    with quick_start.forking(KEYS) as server:
        assert server is not None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            said, errors, _ = asked(server, program, tmp_path, MARK="é\n")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        again, _, _ = asked(server, program, tmp_path, group=None)
    assert said["arguments"] == [str(program), "--node-id=1", "a b"]
    assert (said["folder"], said["mark"], again["mark"]) == (str(tmp_path), "é\n", None)
    assert said["path"][0] == str(program.parent), "as a program's own folder is"
    assert said["threads"] is None, "Ray sets it"
    assert signal.SIGINT in said["blocked"]
    assert signal.SIGINT not in again["blocked"], "the server blocks it"
    assert said["children"]
    assert (said["leads"], again["leads"]) == (True, False)
    assert errors == "heard\n"
    assert said["random"] != again["random"]
    assert said["drawn"] != again["drawn"]


def test_it_has_what_the_server_has_imported_and_not_ray(program: Path, tmp_path: Path) -> None:
    with quick_start.forking(KEYS) as server:
        assert server is not None
        said, _, asking = asked(server, program, tmp_path)
    assert said["modules"] == ["wave"]
    assert said["parent"] not in (os.getpid(), asking)


def test_its_path_for_imports_is_that_of_its_own_environment(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/server")
    with quick_start.forking(KEYS) as server:
        assert server is not None
        said, _, _ = asked(server, program, tmp_path, PYTHONPATH="/own:/too")
        again, _, _ = asked(server, program, tmp_path)
    assert said["path"][:3] == [str(program.parent), "/own", "/too"]
    assert "/of/the/server" not in said["path"]
    assert again["path"] == [str(program.parent), "/of/the/server", *said["path"][3:]]


def test_who_is_killed_while_he_asks_ends_no_server(program: Path, tmp_path: Path) -> None:
    with quick_start.forking(KEYS) as server:
        assert server is not None
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(server))
        with socket.socket(socket.AF_UNIX) as leaving:
            leaving.connect(str(server))
            request = marshal.dumps(([str(program)], {}, str(tmp_path), [], False, 1))
            with open(os.devnull, "r+b") as nowhere:
                socket.send_fds(leaving, [request], [nowhere.fileno()] * 3)
        said, _, _ = asked(server, program, tmp_path)
    assert said["modules"] == ["wave"]


def test_without_a_server_the_worker_is_rays_own(program: Path, tmp_path: Path) -> None:
    said, errors, _ = asked(tmp_path / "nobody", program, tmp_path, MARK="1")
    assert (said["arguments"], said["mark"]) == ([str(program), "--node-id=1", "a b"], "1")
    assert said["modules"] == []
    assert errors == "heard\n"


def test_a_server_that_dies_while_a_worker_waits_leaves_it_rays_own(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_now.py").write_text("import os; os._exit(1)")
    monkeypatch.setattr(quick_start, "MODULES", ("fails_now",))
    monkeypatch.syspath_prepend(str(tmp_path))
    with quick_start.forking(KEYS) as server:
        assert server is not None
        said, _, _ = asked(server, program, tmp_path)
    assert said["modules"] == []


@pytest.mark.full
@pytest.mark.slow
def test_a_training_has_imported_what_torch_imports_with_the_first_optimizer() -> None:
    """Each worker would take nearly two seconds for it; a prediction and a session's first start do without."""
    trains = {"task": "train", "loss": "torch.nn:MSELoss", "optimizer": "torch.optim:SGD"}
    job = {"model": "torch.nn:Linear", "dataset": "a:B", "batch_size": 2}
    assert set(quick_start.imports_of(Job.make({**job, **trains}, "a"))) == {*quick_start.MODULES, "torch._dynamo"}
    assert quick_start.imports_of(Job.make(job, "a")) == quick_start.MODULES
    assert quick_start.imports_of(KEYS) == quick_start.MODULES
    of_modules = quick_start.imports_of(ModuleKeys())
    assert "dp_ray.tasks.serve" in of_modules and "dp_ray.tasks.task" not in of_modules
    asks = f"print(*sorted({set(quick_start.OF_TRAINING)!r} & {{*sys.modules}}))"
    code = f"import torch, sys; torch.optim.SGD([torch.ones(1)], 0.1); {asks}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.split() == sorted(quick_start.OF_TRAINING), done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_what_the_server_imports_is_torch_and_not_ray_and_starts_no_thread() -> None:
    """Ray starts threads and reads its environment when it is imported; a fork keeps neither."""
    code = (
        "import contextlib, importlib, os, sys\n"
        "from dp_ray.cluster.internals.quick_start import MODULES, OF_TRAINING\n"
        "for name in MODULES + OF_TRAINING: importlib.import_module(name)\n"
        "assert 'torch' in sys.modules and 'ray' not in sys.modules\n"
        "print(*(open(f'/proc/self/task/{one}/comm').read() for one in os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    # pyarrow's jemalloc has a thread that it starts again in a forked process.
    assert {one for one in done.stdout.split() if one != "jemalloc_bg_thd"} == {"python"}, done.stdout


def test_env_has_to_be_set_before_torch_is_imported_so_nothing_is_forked() -> None:
    with quick_start.forking(WorkerKeys(workers=2, env={"OMP_NUM_THREADS": "3"})) as server:
        assert server is None


def test_without_the_quick_start_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(quick_start.SWITCH, "0")
    with quick_start.forking(KEYS) as server:
        assert server is None


def test_the_server_ends_with_its_block(program: Path) -> None:
    with quick_start.forking(KEYS) as server:
        assert server is not None and server.exists()
    assert not server.exists()


@pytest.mark.parametrize(("cpus", "threads"), [(0, "1"), (0.5, "1"), (1, "1"), (2.5, "2")])
def test_torch_gets_the_threads_that_ray_would_set(
    cpus: float, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert quick_start.threads_of(WorkerKeys(cpus_per_worker=cpus)) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert quick_start.threads_of(WorkerKeys(cpus_per_worker=cpus)) == "7"


@pytest.mark.full
@pytest.mark.slow
def test_a_killed_driver_ends_its_server(program: Path) -> None:
    code = (
        "import time\nfrom dp_ray.cluster.internals import quick_start\nfrom dp_ray.job.keys import WorkerKeys\n"
        "quick_start.MODULES = ()\n"
        "with quick_start.forking(WorkerKeys(workers=2)) as server:\n print(server, flush=True)\n time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip()).parent
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        driver.kill()
    until = time.monotonic() + SECONDS
    while any(Path(f"/proc/{one}").exists() for one in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()
    remove_orphans(folder.parent)
    assert not folder.exists(), "the next driver removes it"
