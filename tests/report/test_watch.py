"""`dp-ray watch`: a run in the terminal and on a page that it serves, whatever state the run is in."""

import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dp_ray
from dp_ray.errors import JobError
from dp_ray.report import server as servers
from dp_ray.report.server import LivePage, WatchServer
from dp_ray.report.terminal import Snapshot, Watched, headline, screen, watch_plain
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.history import HISTORY
from dp_ray.rundir.incidents import IncidentKind, IncidentLog, Interruption
from dp_ray.rundir.listing import ListedRun
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from tests.support.builders import held_by, run_dir_of
from tests.support.cluster import ROOT
from tests.support.fresh import loaded_by
from tests.support.trackers import wait_until
from tests.support.trainings import short_training

WORKER = {"rank": 0, "node": "10.0.0.7", "device": "cuda:0", "rows": 12345, "ms": 12.34}


def snapshot(**changed: Any) -> Snapshot:
    row = ListedRun("digits", "running", "train", 3.0, 45, 90, metrics={"loss": 0.394217, "eval_accuracy": 0.97})
    progress = {"rows": 1500, "rows_in_all": 3000, "rows_per_second": 1234.0, "phase": ""}
    progress |= {"workers": [WORKER, {**WORKER, "rank": 1, "ms": None}]}
    lost = Interruption(IncidentKind.WORKER, "SIGKILL", 17, (1,), ("10.0.0.8",), 10, 4.5)
    given = {"row": row, "progress": progress, "losses": [3.0, 2.0, 1.0, float("nan")]}
    return Snapshot(**{**given, "incidents": IncidentLog((2, 2), (lost,)), **changed})


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    failed = ListedRun("digits", "failed", "train", 3.0, 45, 90)
    for shown in (snapshot(), snapshot(row=failed, error="DataError: " + "word " * 50), snapshot(progress={})):
        lines = screen(shown, width)
        assert all(len(line) <= width for line in lines)
    assert len(screen(snapshot(), width, height=3)) == 3


def test_the_screen_of_a_running_run() -> None:
    lines = screen(snapshot(), 80)
    assert lines[0] == "digits  train  running  45/90 steps  1 s left"
    assert lines[1] == "█" * 37 + "░" * 37 + "  50 %"
    assert lines[2] == "1,234 rows/s  loss 0.394217  eval_accuracy 0.97"
    assert lines[3] == "loss  █▅▁!"
    assert lines[4:7] == [
        "2 workers",
        "  rank 0  10.0.0.7  cuda:0  12,345 rows  12.3 ms a step",
        "  rank 1  10.0.0.7  cuda:0  12,345 rows",
    ]
    assert lines[7:] == [
        "1 interruption",
        "  worker: SIGKILL (rank 1 on 10.0.0.8), in step 17, resumed from step 10 after …",
    ]
    assert "  rank 0  12,345 rows  12.3 ms a step" in screen(snapshot(), 40)
    alone = screen(snapshot(progress={"workers": [WORKER]}), 80)
    assert not any("worker" in line for line in alone[:5]), "with workers: 0 there is none"
    text = "digits running, 45/90 steps, 50 %, 1,234 rows/s, loss 0.394217, eval_accuracy 0.97"
    assert headline(snapshot()) == text


def test_a_long_error_keeps_its_words_apart_as_they_were() -> None:
    row = ListedRun("digits", "failed", "train", 3.0, 45, 90)
    lines = screen(snapshot(row=row, error="DataError: " + "word " * 50), 60)
    assert sum(line.count("word word") for line in lines) > 20
    assert not any("word  word" in line for line in lines)


def test_a_name_or_an_error_cannot_act_on_the_terminal() -> None:
    row = ListedRun("a\x1b[2Jb", "failed", note="no")
    lines = screen(Snapshot(row, {"workers": [{**WORKER, "node": "\x07"}]}, error="bad\x1b]0;title\x07\rthing"), 80)
    assert not any(not one.isprintable() for line in lines for one in line)
    assert any(r"a\x1b[2Jb" in line for line in lines)


def in_files(run: Storage, first: int, end: int) -> None:
    clocks = {"rows": 1, "rows_per_second": 5.0, "data_wait_seconds": 0.01}
    both = {"epoch": 0, "learning_rate": 0.1, "gradient_norm": 1.0, **clocks}
    rows = [{"step": step, "loss": 6.0 - step, **both} for step in range(first, end)]
    write_table(run.child(HISTORY), f"steps-{first}-{end}.parquet", pa.Table.from_pylist(rows))


def claimed(folder: Path) -> RunDir:
    """A run that its driver has claimed, with ten steps, of which six are in files."""
    made = run_dir_of(folder)
    run = made.storage
    values = json.loads(run.read_text("run.json"))
    job = {**values["job"], "task": "train", "epochs": 1, "max_steps": None}
    run.write_text("run.json", json.dumps({**values, "rows": {"dataset": 10}, "job": job}))
    run.child(HISTORY).create()
    in_files(run, 0, 6)
    run.write_text("progress.json", json.dumps({"step": 7, "rows_per_second": 5.0, "workers": [WORKER]}))
    return made


def test_a_run_is_waited_for_and_drawn_to_its_end(tmp_path: Path) -> None:
    """Into a file, it is told in lines: that there is no run, that it runs, and all of it at the end."""
    out, watched = io.StringIO(), Watched(Storage(str(tmp_path / "run")))
    thread = threading.Thread(target=watch_plain, args=(watched.look, out, 0.01))
    thread.start()
    wait_until(lambda: "run: waiting, there is no run yet\n" in out.getvalue())
    made = run_dir_of(tmp_path / "other")
    with held_by(made):
        (tmp_path / "other" / "run").rename(tmp_path / "run")
        time.sleep(0.1)
        assert thread.is_alive()
        (tmp_path / "run").rename(tmp_path / "other" / "run")
    (tmp_path / "other" / "run" / "result.json").write_text('{"status": "failed", "error": "DataError: no\\nmore"}')
    (tmp_path / "other" / "run").rename(tmp_path / "run")
    thread.join(30)
    assert out.getvalue().splitlines()[-2:] == ["DataError: no", "more"]


def test_what_a_directory_says_at_a_moment(tmp_path: Path) -> None:
    run = Storage(str(tmp_path / "run"))
    assert not Watched(run).look().has_begun
    with held_by(claimed(tmp_path)):
        seen = Watched(run).look()
        assert (seen.row.status, seen.row.step, seen.row.steps) == ("running", 7, 10)
        assert (seen.losses, seen.has_ended) == ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], False)
    killed = Watched(run).look()
    assert (killed.row.status, killed.has_ended) == ("unfinished", True)
    assert screen(killed, 80)[-1] == "its driver was killed; run the same command to resume"
    (tmp_path / "run" / HISTORY / "steps-0-6.parquet").write_bytes(b"no")
    assert Watched(run).look().losses == []
    (tmp_path / "run" / "run.json").write_text("{")
    assert Watched(run).look().row.status == "damaged"


def test_a_finished_run_is_drawn_once(tmp_path: Path) -> None:
    result = short_training(tmp_path, "one")
    out = io.StringIO()
    assert watch_plain(Watched(Storage(result.run_dir)).look, out, 60.0).row.status == "done"
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("one  train  done  24/24 steps  ")
    assert lines[1].endswith(" 100 %") and f"loss {result.metrics['loss']:.6g}" in lines[2]


@contextlib.contextmanager
def served(run: Storage, host: str = "127.0.0.1", has_ended: bool = False) -> Iterator[WatchServer]:
    server = WatchServer(LivePage(run, lambda: has_ended), host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


def test_only_who_has_the_token_and_the_right_host_gets_the_page(tmp_path: Path) -> None:
    with served(Storage(str(tmp_path / "run"))) as server:
        path = f"/?token={server.token}"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}{path}"
        status, body, headers = asked(server, path)
        assert status == 200 and b"There is no run at" in body
        assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"
        assert asked(server, path, "HEAD")[:2] == (200, b"")
        for wrong in ("/", "/?token=", f"/?token={server.token}x", f"/?token={server.token[:-1]}", "/?token=%ff"):
            assert asked(server, wrong)[0] == 403
        for host in ("evil.example", "127.0.0.1.evil.example", "", "evil.example:80"):
            assert asked(server, path, Host=host)[0] == 403
        for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1234", "[::1]:80"):
            assert asked(server, path, Host=host)[0] == 200
        for other in ("/run.json", "/../run.json", "//evil.example/"):
            assert asked(server, f"{other}?token={server.token}")[0] == 404
        assert asked(server, path, "POST")[0] == 501


def test_a_page_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_training(tmp_path, "one", epochs=1)
    monkeypatch.setattr(servers, "page_of", lambda run, live: dict[str, str]()["<b>"])
    with served(Storage(str(tmp_path / "one"))) as server:
        _, body, _ = asked(server, f"/?token={server.token}")
    assert b"The page cannot be made: KeyError: &#x27;&lt;b&gt;&#x27;" in body


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with served(Storage(str(tmp_path))) as server:
        port = server.server_address[1]
        with pytest.raises(JobError, match=rf"--host 127.0.0.1 --port {port}: cannot be served"):
            WatchServer(LivePage(Storage(str(tmp_path)), lambda: False), "127.0.0.1", port)


def test_a_page_that_the_browser_has_is_not_sent_again(tmp_path: Path) -> None:
    short_training(tmp_path, "one", epochs=1)
    with served(Storage(str(tmp_path / "one")), has_ended=True) as server:
        path = f"/?token={server.token}"
        status, body, headers = asked(server, path)
        assert (status, b"one" in body) == (200, True)
        assert asked(server, path, **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")


@pytest.mark.slow
def test_the_page_of_a_run_grows_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real browser: from no run to its end, without a reload by hand and without an error."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = "/usr/bin/chromium"
    if not Path(chromium).exists():
        pytest.skip("needs Debian's chromium")
    monkeypatch.setattr(servers, "LIVE_SECONDS", 0.5)
    run, errors = Storage(str(tmp_path / "run")), list[str]()
    ends = Watched(run)
    server = WatchServer(LivePage(run, lambda: ends.look().has_ended), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(server.url)
            assert "There is no run at" in page.inner_text("body")
            with held_by(claimed(tmp_path)):
                page.wait_for_function("document.body.innerText.includes('6 of 10')", timeout=30000)
                assert "running" in page.inner_text("body")
                page.evaluate("window.scrollTo(0, 200)")
                in_files(run, 6, 9)
                page.wait_for_function("document.body.innerText.includes('9 of 10')", timeout=30000)
                assert page.evaluate("window.scrollY") == 200
            page.wait_for_function("document.body.innerText.includes('killed')", timeout=30000)
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert errors == []


@pytest.mark.slow
def test_the_command_serves_the_url_that_it_prints_until_ctrl_c(tmp_path: Path) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dp_ray", "watch", str(tmp_path / "run")]
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert (answer.status, b"There is no run at" in answer.read()) == (200, True)
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    waited = f"{tmp_path / 'run'}: there is no run yet, and it is waited for\n"
    assert (process.returncode, err) == (130, f"{waited}\ninterrupted\n")


def test_the_terminals_view_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.report.terminal, dp_ray.report.terminal")


def test_a_run_notes_its_progress(tmp_path: Path) -> None:
    with pytest.raises(dp_ray.Error):
        short_training(tmp_path, "one", metrics={"right": "tests.support.odd:fails"})
    noted = json.loads((tmp_path / "one" / "progress.json").read_text())
    assert (noted["step"], noted["steps"], noted["workers"][0]["rank"]) == (0, 24, 0)
    short_training(tmp_path, "two")
    assert not (tmp_path / "two" / "progress.json").exists(), "only an unfinished run needs it"


@pytest.mark.slow
def test_a_run_in_an_object_store_is_watched(server: Any) -> None:
    run = Storage(server.url("watch/one"))
    dp_ray.run(**{**_keys(server.url("watch")), "name": "one"})
    assert Watched(run).look().row.status == "done"
    with served(run, has_ended=True) as page_server:
        status, body, _ = asked(page_server, f"/?token={page_server.token}")
    assert status == 200 and b"one" in body and b"hush" not in body


def _keys(storage: str) -> dict[str, Any]:
    from tests.support.trainings import keys_of

    return keys_of(storage=storage)
