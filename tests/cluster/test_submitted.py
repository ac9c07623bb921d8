"""Runs on a cluster that was left: detach, look, follow and stop, over interruptions of the connection."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.cluster import submit
from dp_ray.cluster.internals.variables import AUTH_MODE, AUTH_TOKEN, VARIABLES
from dp_ray.cluster.submit import Dashboard, Follower, sent
from dp_ray.errors import ClusterError
from tests.support.cluster import ROOT, Cluster
from tests.support.drivers import SLOW, told
from tests.support.pages import blocks_of
from tests.support.within import within

QUICK: dict[str, Any] = {**SLOW, "name": "left", "dataset": {"target": "tests.support.models:SlowPairs"}}
KEYS: dict[str, Any] = {**QUICK, "dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.1}}}


def program(*args: str, **streams: Any) -> "subprocess.Popen[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-m", "dp_ray", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen(line, cwd=ROOT, env=kept, text=True, **pipes)


def done(*args: str) -> "subprocess.CompletedProcess[str]":
    with program(*args) as process:
        out, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


class Typed:
    """The program at a terminal of its own, where one can type."""

    def __init__(self, *args: str) -> None:
        self.screen = ""
        self._terminal, theirs = pty.openpty()
        self.process = program(*args, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # the program has ended
            while text := os.read(self._terminal, 4096):
                self.screen += text.decode()

    def shows(self, text: str) -> bool:
        return within(90, lambda: text in self.screen)

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self._terminal)


@pytest.mark.full
@pytest.mark.ray
def test_a_run_that_was_left_is_followed_and_stopped_from_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({**KEYS, "workers": 1, "storage": str(tmp_path)}))
    at = ("--address", cluster.dashboard)
    first = Typed("submit", str(job), "--storage", str(tmp_path), *at)
    assert first.shows("/20 steps, "), first.screen
    sends = re.search(r"sends (\d+) files of .* \([\d.]+ MB, the largest is .*\) and dp_ray", first.screen)
    assert sends, first.screen
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130
    goes_on = re.search(
        r"the job goes on; dp-ray (logs -f left-.*) follows it, dp-ray (stop .*) stops it", first.screen
    )
    assert goes_on, first.screen
    follows, stops = map(shlex.split, goes_on.groups())
    (row,) = [one for one in json.loads(done("status", *at, "--json").stdout) if one["name"] == "left"]
    assert row["status"] == "running"
    assert row["exit_status"] is None
    assert f"{row['id']}  running" in done("status", "left", *at).stdout
    with program(*follows) as following:
        stopped = done(*stops)
        out, _ = following.communicate(timeout=60)
    assert stopped.returncode == 0, stopped.stderr
    assert re.match(
        r"it is stopped: interrupted after \d+ of \d+ steps; run the same command to resume", stopped.stdout
    )
    assert following.returncode == 130
    assert out == done("logs", "left", *at).stdout, "each word once, and all of them"
    assert out.splitlines()[-1].startswith("interrupted after ")
    again = done("stop", "left", *at)
    assert (again.returncode, again.stderr) == (2, f"error: {row['id']} is not running: it is stopped\n")
    unknown = done("logs", "nobody", *at)
    assert unknown.returncode == 2
    assert re.search("has no job 'nobody'; it has .*left", unknown.stderr)
    result = dp_ray.run(**KEYS, workers=1, storage=str(tmp_path), address=cluster.address, quiet=True)
    plain = dp_ray.run(**QUICK, workers=0, storage=str(tmp_path / "plain"), quiet=True)
    assert result.weights_sha256 == plain.weights_sha256
    assert told(result) == told(plain)


@pytest.mark.full
@pytest.mark.ray
def test_rays_own_commands_work_as_the_page_gives_them(cluster: Cluster, tmp_path: Path) -> None:
    """A job of `ray job submit` has the name of its run, by which `dp-ray status` finds it."""
    (block,) = [
        one.text
        for one in blocks_of(ROOT / "docs" / "places" / "any-ray-cluster.md")
        if f"{AUTH_MODE}=token" in one.text
    ]
    assert "\nray status" in block and "\nray job submit" in block
    here = {"10.0.0.1:6379": cluster.address, "http://10.0.0.1:8265": cluster.dashboard}
    # Below the home directory by default; and in the job's own process, which takes fewer seconds.
    here["run jobs/digits_predict.yaml"] = f"run jobs/digits_predict.yaml --workers 0 --storage {tmp_path}/runs"
    for there, value in here.items():
        assert there in block
        block = block.replace(there, value)
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    done = subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\ndigits_predict +raysubmit_\w+ +done ", done.stdout), done.stdout
    assert json.loads((tmp_path / "runs" / "digits_predict" / "result.json").read_text())["status"] == "done"


class Cable:
    """Carries bytes between clients and a server, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._shut(sink)

    def _shut(self, end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Break all connections; new ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            self._shut(end)

    def remove(self) -> None:
        self._listener.close()
        self.cut()


@contextmanager
def cable(to: str) -> Iterator[Cable]:
    made = Cable(int(to.rpartition(":")[2]))
    try:
        yield made
    finally:
        made.remove()


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("variables_kept")
def test_a_follower_prints_each_word_once_though_the_connection_breaks(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "AWAY_SECONDS", 3.0)
    lines = "import time\nfor number in range(30):\n print(number, flush=True); time.sleep(.1)\nraise SystemExit(7)"
    direct = Dashboard(cluster.dashboard)
    submission = direct.client.submit_job(entrypoint=f'python -c "exec({lines!r})"')
    with cable(cluster.dashboard) as wire:
        followed = Follower(Dashboard(f"http://127.0.0.1:{wire.port}"), submission)

        def cut() -> None:
            for _ in range(2):
                time.sleep(1)
                wire.cut()

        threading.Thread(target=cut, daemon=True).start()
        assert followed.follow() == 7
    printed = capfd.readouterr().out
    assert [line for line in printed.splitlines() if line.isdigit()] == [str(number) for number in range(30)]
    assert printed == direct.logs(submission)
    with cable(cluster.dashboard) as wire:
        away = Follower(Dashboard(f"http://127.0.0.1:{wire.port}"), submission)
        wire.remove()
        with pytest.raises(ClusterError, match=r"went away, and whether the job goes on is not known .*logs -f"):
            away.follow()


def test_what_is_sent_is_told_before(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    for name, size in (("a.py", 10), ("keep/b.bin", 120_000_000), ("ignored.bin", 5000), ("runs/old", 70)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    (tmp_path / ".gitignore").write_text("ignored.bin\n")
    code = {"working_dir": str(tmp_path), "excludes": ["/runs/"], "py_modules": []}
    says = (
        f"sends 3 files of {tmp_path} (120.0 MB, the largest is keep/b.bin) and dp_ray, unless the cluster has them"
    )
    assert sent(code) == f"{says}; what a .gitignore names is not sent"
    (tmp_path / ".rayignore").write_text("*.bin\n")
    assert sent(code).startswith(f"sends 3 files of {tmp_path} (0.0 MB, the largest is ")


def test_a_job_file_that_is_not_sent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(KEYS))
    told_of = done("submit", os.path.relpath(tmp_path / "job.yaml", ROOT), "--address", "http://127.0.0.1:1")
    assert told_of.returncode == 2
    assert f"job.yaml: is not below {ROOT}, the folder that is sent to the cluster" in told_of.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    for args in (("status",), ("logs", "x"), ("stop", "x")):
        told_of = done(*args, "--address", f"http://127.0.0.1:{port}")
        assert told_of.returncode == 1
        assert told_of.stderr.startswith(f"error: no Ray dashboard answers at http://127.0.0.1:{port}: ")


@pytest.mark.full
@pytest.mark.slow
def test_a_token_that_is_refused_is_told_in_one_line() -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"Forbidden: Invalid authentication token\nA second line")

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as dashboard:
        threading.Thread(target=dashboard.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{dashboard.server_port}"
        told_of = done("status", "--address", address)
        dashboard.shutdown()
    assert told_of.returncode == 1
    assert told_of.stderr == (
        f"error: the Ray at {address} refuses the token, which is that of {AUTH_TOKEN} or ~/.ray/auth_token: "
        "Authentication failed: Forbidden: Invalid authentication token\n"
    )


@pytest.mark.full
@pytest.mark.slow
def test_an_address_that_is_none_is_a_mistake_of_the_command_line() -> None:
    for address in ("garbage", ""):
        told_of = done("status", "--address", address)
        assert (told_of.returncode, told_of.stderr) == (
            2,
            f"error: --address {address!r}: must be a dashboard's, like http://HEAD:8265\n",
        )
