"""The first seconds of a command that starts a Ray of its own: what ends it then leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import dp_ray
from dp_ray.cluster.internals.quick_start import SWITCH, is_quick
from dp_ray.cluster.internals.variables import AUTH_MODE, VARIABLES
from dp_ray.errors import JobError
from dp_ray.system.process import OWNER
from tests.support.cluster import ROOT
from tests.support.commands import Command, started
from tests.support.within import within

SECONDS = 120.0  # the machine may be busy


def owner_of(folder: Path) -> str:
    with suppress(OSError):
        return (folder / OWNER).read_text()
    return ""


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("process", "number", "status"), [("gcs_server", signal.SIGTERM, 75), ("raylet", signal.SIGINT, 130)]
)
def test_a_signal_while_ray_starts_ends_it_and_leaves_no_ray(
    process: str, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    before = set(Path("/tmp").glob("dp_ray-*"))
    with started("--storage", str(tmp_path)) as command:
        assert within(SECONDS, lambda: any(process in line for line in command.processes().values()))
        command.running.send_signal(number)
        ended, errors = command.ends()
        assert ended == status, errors
        assert errors.splitlines()[-1] == "interrupted"
        assert "Traceback" not in errors
    assert not list(tmp_path.iterdir()), "no run has begun"
    ours = [one for one in set(Path("/tmp").glob("dp_ray-*")) - before if str(command.running.pid) in owner_of(one)]
    assert not ours


# Sends its process SIGTERM at a moment within ray.init, and runs the program, or a job from Python.
SIGNALLED = """
import os, signal, sys, time
import ray

moment, way, *sys.argv[1:] = sys.argv[1:]

def signalled(owner, name):
    before = getattr(owner, name)
    def call(*args, **keys):
        result = before(*args, **keys)
        assert "\\nSigBlk:\\t0000000000000000\\n" in open("/proc/self/status").read()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        print("connected" if ray._private.worker.global_worker.connected else "begun", file=sys.stderr, flush=True)
        return result
    setattr(owner, name, call)

if moment == "node":
    signalled(ray._private.node.Node, "start_ray_processes")
else:
    signalled(ray._private.worker, "connect")
if way == "program":
    from dp_ray.__main__ import program
    program()
import dp_ray.errors
folder = sys.argv[sys.argv.index("--storage") + 1]
try:
    dp_ray.run("jobs/tutorial.yaml", workers=2, storage=folder)
except dp_ray.errors.RunInterrupted as error:
    print(f"interrupted: {error}, and {'a' if ray.is_initialized() else 'no'} Ray", file=sys.stderr)
    sys.exit(error.exit_status)
"""


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(("moment", "way"), [("connect", "program"), ("connect", "python"), ("node", "python")])
def test_a_signal_within_ray_init_is_the_planned_stop_once_it_has_returned(
    moment: str, way: str, tmp_path: Path
) -> None:
    """Also where Ray sets handlers of its own, which print stacks and abort the process."""
    with started("--storage", str(tmp_path), program=("-c", SIGNALLED, moment, way)) as command:
        status, errors = command.ends()
    assert status == 75, errors
    assert "received at time" not in errors, errors
    assert "Traceback" not in errors, errors
    assert ("connected" if moment == "connect" else "begun") in errors.splitlines(), "it has returned"
    assert errors.splitlines()[-1].startswith("interrupted")
    if way == "python":
        assert errors.splitlines()[-1].endswith("and no Ray")


@pytest.mark.ray
def test_a_killed_command_leaves_no_ray(tmp_path: Path) -> None:
    with started("--storage", str(tmp_path)) as command:
        assert within(SECONDS, lambda: any("raylet" in line for line in command.processes().values()))
        assert any("fork_server.py" in line for line in command.processes().values()) == is_quick()
        command.running.kill()


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_the_quick_start_ray_starts_as_it_does_itself_and_the_outputs_are_the_same(
    switch: str, tmp_path: Path
) -> None:
    expected = {"0": {"/monitor.py", "/log_monitor.py"}, "1": {"/fork_server.py", "/agents.py"}}
    seen: set[str] = set()

    def ends(command: Command) -> bool:
        lines = list(command.processes().values())
        seen.update(one for program in expected.values() for one in program if any(one in line for line in lines))
        return command.running.poll() is not None

    with started("--storage", str(tmp_path), "--name", "on-ray", **{SWITCH: switch}) as command:
        assert within(SECONDS, lambda: ends(command))
        status, errors = command.ends()
        assert status == 0, errors
    assert seen == expected[switch]
    keys = {"workers": 0, "shards": 2, "quiet": True, "storage": str(tmp_path), "name": "alone"}
    alone = dp_ray.run(str(ROOT / "jobs" / "tutorial.yaml"), **keys)
    result = json.loads((tmp_path / "on-ray" / "result.json").read_text())
    assert result["shards"] == 2
    assert result["outputs_sha256"] == alone.outputs_sha256


@pytest.mark.ray
def test_a_model_that_cannot_be_imported_leaves_no_ray(tmp_path: Path) -> None:
    with started("--storage", str(tmp_path), "--set", "model=nowhere.at_all:Model") as command:
        status, errors = command.ends()
        assert status == JobError.exit_status, errors
        assert "nowhere.at_all" in errors.splitlines()[-1]
    assert not list(tmp_path.iterdir())


# A Ray with a token, as `ray.init` starts one; then one without, in the same process, by the caller and by dp_ray.
ONE_AFTER_ANOTHER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import ray
from dp_ray.cluster.internals.core import put_apart
from dp_ray.cluster.internals.quick_start import SWITCH, is_quick
from dp_ray.cluster.internals.variables import AUTH_MODE
from ray.cluster_utils import Cluster
import dp_ray

before = dict(os.environ)
quietly = {"log_to_driver": False, "logging_level": "ERROR"}

def in_a_new_thread(function, *args, **keys):
    with ThreadPoolExecutor(1) as one:
        return one.submit(function, *args, **keys).result()

def put_in(address, put, num_cpus=None):
    ray.init(address, num_cpus=num_cpus, include_dashboard=False, **quietly)
    return put("an object of this Ray"), ray.put("another")

# The kernel ends a raylet when the thread that started it ends, so that one stays until the Ray is shut down.
with ThreadPoolExecutor(1) as starter:
    left = starter.submit(put_in, "local", put_apart, 1).result()
    ray.shutdown()
os.environ.clear()
os.environ.update(before)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
keys = {"workers": 1, "storage": sys.argv[1], "quiet": True}
ours, theirs = in_a_new_thread(put_in, cluster.address, put_apart)
print(ours.hex() == left[0].hex(), theirs.hex() == left[1].hex())
ray.shutdown()
print(dp_ray.run("jobs/tutorial.yaml", name="by-dp-ray", address=cluster.address, **keys).status)
ray.init(cluster.address, **quietly)
print(dp_ray.run("jobs/tutorial.yaml", name="by-the-caller", **keys).status)
ray.shutdown()
os.environ[AUTH_MODE] = "token"
try:
    dp_ray.run("jobs/tutorial.yaml", name="demanded", address=cluster.address, **keys)
except dp_ray.errors.ClusterError as error:
    print(error)
cluster.shutdown()
"""


@pytest.mark.full
@pytest.mark.ray
def test_a_process_may_use_a_ray_without_a_token_after_one_with(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-u", "-X", "faulthandler", "-c", ONE_AFTER_ANOTHER, str(tmp_path)]
    began = time.time()
    ended = subprocess.run(line, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=2 * SECONDS)
    # A driver whose raylet is gone ends with status 1 and says so in its log alone.
    logs = [one for one in Path("/tmp/ray").glob("session_*/logs/*core-driver*") if one.stat().st_mtime >= began]
    says = "\n".join(f"{one}:\n" + "\n".join(one.read_text().splitlines()[-5:]) for one in logs)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{says}"
    same_names, by_dp_ray, by_the_caller, demanded = ended.stdout.splitlines()
    assert same_names == "False True", "a reference of the first Ray would free an object of the second"
    assert f"{AUTH_MODE}=token, which a ray.init sets too, demands one of it; unset {AUTH_MODE}" in demanded
    assert (by_dp_ray, by_the_caller) == ("done", "done")
