"""The feed of a tracker: a tracker that is down, slow, hangs or forgets gets each step once, and holds no run up."""

import json
import os
import posixpath
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import dp_ray
from dp_ray.driver import checks
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.rundir.files import RESULT_JSON
from dp_ray.rundir.history import HISTORY, METRICS, RECENT_SECONDS, RecentHistory
from dp_ray.storage import Storage
from dp_ray.system import imports
from dp_ray.system.threads import repeated
from dp_ray.tables import write_table
from dp_ray.trackers import feed as feeds
from dp_ray.trackers import process
from dp_ray.trackers.clients import mlflow_name
from dp_ray.trackers.feed import TRACKED_JSON, TRACKERS, TrackedRun, about_run
from dp_ray.trackers.process import RunTrackers, TrackerProcess
from tests.support.builders import run_dir_of
from tests.support.cluster import ROOT
from tests.support.fresh import loaded_by
from tests.support.s3 import IN_URL, SECRET
from tests.support.tracked import WAITING
from tests.support.trackers import FakeTracker, wait_until
from tests.support.trainings import keys_of

LOOK_SECONDS = dict(feeds.LOOK_SECONDS)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "LOOK_SECONDS", {False: 0.01, True: 0.01})
    monkeypatch.setattr(feeds, "RETRY_SECONDS", (0.02,))
    monkeypatch.setattr(feeds, "END_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(feeds, "ROWS_AT_ONCE", 4)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    """The directory of a training that has begun."""
    storage = run_dir_of(tmp_path, Job.make(keys_of_job(), "run")).storage
    storage.child(HISTORY).create()
    return storage


def rows(first: int, end: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step)} for step in range(first, end)]


def in_files(run: Storage, first: int, end: int) -> None:
    write_table(run.child(HISTORY), f"steps-{first}-{end}.parquet", pa.Table.from_pylist(rows(first, end)))


def recent(run: Storage, first: int, end: int) -> None:
    """The rows that the driver has written since the last checkpoint."""
    write_table(run, "recent.parquet", pa.Table.from_pylist(rows(first, end)))


class Fed:
    """A feed in a thread; `end` is the driver's word that the run has ended, `leave` the death of the driver."""

    def __init__(self, tracker: FakeTracker, run: Storage, said: list[str] | None = None) -> None:
        self.run = run
        theirs, ours = os.pipe()
        self.stream, self.ours = FileIO(theirs), FileIO(ours, "w")
        tell = (said if said is not None else []).append
        self.thread = threading.Thread(target=feeds.feed, args=("fake", run, tracker.connect, self.stream, tell))
        self.thread.start()

    def end(self, status: str = "done") -> None:
        metrics = {"loss": 0.5, "eval_outputs_digest": 1.0, "eval_right": None}
        RESULT_JSON.write(self.run, {"status": status, "metrics": metrics})
        self.ours.write(feeds.ENDED)
        self.thread.join(60)
        assert not self.thread.is_alive()

    def leave(self) -> None:
        self.ours.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def made() -> Iterator[list[Fed]]:
    """The feeds of a test, of which none is left."""
    feeds: list[Fed] = []
    yield feeds
    for fed in feeds:
        fed.leave()
        fed.stream.close()


@pytest.fixture
def fed(made: list[Fed]) -> Any:
    def begin(tracker: FakeTracker, run: Storage, said: list[str] | None = None) -> Fed:
        made.append(Fed(tracker, run, said))
        return made[-1]

    return begin


def test_a_tracker_gets_each_row_once_and_the_end(run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    for end in range(3, 31, 3):
        recent(run, 0, end)
        time.sleep(0.02)
    in_files(run, 0, 30)
    feed.end()
    assert tracker.rows == rows(0, 30)
    ((status, metrics),) = tracker.ended
    assert (status, metrics["loss"]) == ("done", 0.5)
    assert metrics.keys() == {"loss", "eval_right"} and metrics["eval_right"] != metrics["eval_right"], "nan"
    assert TRACKED_JSON.read(run.child(TRACKERS), "fake.json") == TrackedRun("run-1", 30, "done")


def test_a_process_with_many_open_files_is_fed_too(many_files: list[int], run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    assert feed.stream.fileno() >= 1024
    in_files(run, 0, 5)
    feed.end()
    assert tracker.rows == rows(0, 5)


def test_a_tracker_that_is_down_for_a_while_misses_nothing(run: Storage, fed: Any) -> None:
    tracker, said = FakeTracker(), list[str]()
    feed = fed(tracker, run, said)
    recent(run, 0, 5)
    wait_until(lambda: tracker.steps == [0, 1, 2, 3, 4])
    tracker.is_down = True
    recent(run, 0, 12)
    wait_until(lambda: len(said) > 1)
    assert said[:2] == ["", "ConnectionRefusedError: connection refused"]
    tracker.is_down = False
    recent(run, 0, 20)
    wait_until(lambda: len(tracker.steps) == 20)
    in_files(run, 0, 20)
    feed.end()
    assert tracker.rows == rows(0, 20)
    assert said[-1] == "", "it answers again"


def test_an_answer_that_is_lost_doubles_nothing_if_the_tracker_knows_its_steps(run: Storage, fed: Any) -> None:
    tracker = FakeTracker(knows_its_steps=True)
    tracker.loses_answers = 2
    feed = fed(tracker, run)
    recent(run, 0, 20)
    wait_until(lambda: len(tracker.steps) >= 20)
    in_files(run, 0, 20)
    feed.end()
    assert tracker.rows == rows(0, 20)


def test_rows_that_are_sent_again_have_the_same_time(run: Storage, fed: Any) -> None:
    """So a server that has them already can tell that they are the same."""
    tracker = FakeTracker()
    tracker.loses_answers = 1
    feed = fed(tracker, run)
    recent(run, 0, 3)
    wait_until(lambda: len(tracker.steps) == 6)
    feed.end()
    assert tracker.times[:3] == tracker.times[3:6]


def test_a_storage_that_fails_is_read_again_and_nothing_is_said(run: Storage, fed: Any) -> None:
    tracker, said = FakeTracker(), list[str]()
    feed = fed(tracker, run, said)
    run.write_text("recent.parquet", "damaged")
    time.sleep(0.1)
    recent(run, 0, 3)
    wait_until(lambda: len(tracker.steps) == 3)
    feed.end()
    assert said == [""]


def test_a_driver_that_is_gone_leaves_the_trackers_run_as_it_is(run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    recent(run, 0, 3)
    wait_until(lambda: len(tracker.steps) == 3)
    feed.leave()
    assert tracker.is_closed and not tracker.ended
    assert TRACKED_JSON.read(run.child(TRACKERS), "fake.json") == TrackedRun("run-1", 3)


def test_a_driver_that_is_gone_ends_a_feed_that_has_much_to_send_or_a_tracker_that_is_down(
    run: Storage, fed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(feeds, "RETRY_SECONDS", (60.0,))
    slow, down = FakeTracker(), FakeTracker()
    slow.seconds = 0.05
    down.is_down = True
    recent(run, 0, 5000)
    first = fed(slow, run)
    wait_until(lambda: len(slow.steps) > 2)
    first.leave()
    assert len(slow.steps) < 1000
    said: list[str] = []
    second = fed(down, run, said)
    wait_until(lambda: bool(said))
    second.leave()
    assert not down.rows and len(said) == 1, "it is tried again after a minute only"


def test_a_tracker_that_is_down_is_tried_more_and_more_rarely_until_the_run_ends(
    run: Storage, fed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "RETRY_SECONDS", (0.01, 0.01, 60.0))
    tracker, said = FakeTracker(), list[str]()
    tracker.is_down = True
    in_files(run, 0, 3)
    feed = fed(tracker, run, said)
    wait_until(lambda: len(said) == 3)
    time.sleep(0.2)
    assert len(said) == 3
    tracker.is_down = False
    feed.end()
    assert tracker.rows == rows(0, 3)


def test_rows_after_a_gap_wait_for_the_steps_that_run_again(run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    remember(run, TrackedRun("theirs", 3))
    recent(run, 6, 9)
    feed = fed(tracker, run)
    in_files(run, 0, 5)
    wait_until(lambda: tracker.steps == [3, 4])
    time.sleep(0.1)
    assert tracker.steps == [3, 4], "the one before those that are there is in no file yet"
    recent(run, 5, 12)
    wait_until(lambda: tracker.steps == list(range(3, 12)))
    in_files(run, 5, 15)
    feed.end()
    assert tracker.rows == rows(3, 15)


def remember(run: Storage, memory: TrackedRun) -> None:
    run.child(TRACKERS).create()
    assert TRACKED_JSON.write(run.child(TRACKERS), memory, "fake.json")


def test_a_resumed_run_sends_exactly_the_steps_that_are_lacking(run: Storage, fed: Any) -> None:
    """Its driver was killed after step 12; the tracker has 10 steps, and the checkpoint is of step 8."""
    remember(run, TrackedRun("theirs", 10))
    in_files(run, 0, 8)
    tracker = FakeTracker()
    feed = fed(tracker, run)
    for end in range(10, 22, 2):
        recent(run, 8, end)
        time.sleep(0.02)
    in_files(run, 8, 20)
    feed.end()
    assert tracker.opened == ["theirs"]
    assert tracker.rows == rows(10, 20)


def test_a_resumed_run_whose_tracker_was_down_sends_what_was_before(run: Storage, fed: Any) -> None:
    remember(run, TrackedRun("theirs", 3))
    in_files(run, 0, 8)
    tracker = FakeTracker()
    feed = fed(tracker, run)
    recent(run, 8, 10)
    wait_until(lambda: len(tracker.steps) == 7)
    assert tracker.rows == rows(3, 10)
    feed.end("failed")
    assert tracker.ended[0][0] == "failed"


def test_an_interruption_that_repeats_steps_sends_them_once(run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    driver = RecentHistory(run, is_followed=True)
    feed = fed(tracker, run)
    driver.add(rows(0, 6))
    driver.save_if_due()
    wait_until(lambda: len(tracker.steps) == 6)
    tracker.is_down = True
    driver.add(rows(6, 9))
    driver.save_if_due()
    driver.add(rows(4, 12))  # the workers begin again at the checkpoint of step 4
    tracker.is_down = False
    driver.save_if_due()
    wait_until(lambda: len(tracker.steps) == 12)
    in_files(run, 0, 12)
    feed.end()
    assert tracker.rows == rows(0, 12)


def test_a_run_that_begins_at_a_later_step_waits_for_no_earlier_ones(run: Storage, fed: Any) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    recent(run, 100, 103)
    wait_until(lambda: tracker.steps == [100, 101, 102])
    feed.end()


def test_a_package_that_is_missing_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name == "mlflow" else find_spec(name))
    with pytest.raises(JobError, match=r"trackers: mlflow is not installed; pip install 'dp-ray\[mlflow\]'"):
        dp_ray.run(**keys_of(storage=str(tmp_path), name="run", trackers=["tensorboard", "mlflow"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("trackers", "is_there"), [(None, True), (["tensorboard"], True), ([], False)])
def test_tensorboard_is_the_default(tmp_path: Path, trackers: Any, is_there: bool) -> None:
    dp_ray.run(**keys_of(storage=str(tmp_path), name="run", trackers=trackers))
    assert (tmp_path / "run" / "tensorboard").exists() == is_there


def test_trackers_change_no_fingerprint() -> None:
    without, some = (Job.make(keys_of_job(trackers=value), "job") for value in (None, ["mlflow"]))
    assert without.fingerprint() == some.fingerprint()


def keys_of_job(**keys: Any) -> dict[str, Any]:
    given = keys_of(**keys)
    del given["quiet"]
    return given


def test_parameters_are_the_jobs_dotted_keys_without_secrets() -> None:
    job = Job.make(keys_of_job(storage="s3://key:hush@bucket/runs", env={"TOKEN": "hush"}, epochs=3), "job")
    about = about_run(job.describe(), "s3://bucket/runs/job")
    params = about["params"]
    assert (params["epochs"], params["optimizer.args.lr"], params["batch_size"]) == (3, 0.1, 4)
    assert params["model.target"] == "tests.support.training:mlp"
    assert params["storage"] == "s3://bucket/runs"
    assert "hush" not in json.dumps(about) and not [key for key in params if key.startswith("env")]
    assert about["tags"] == {"dp_ray.task": "train", "dp_ray.run_dir": "s3://bucket/runs/job"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder whose package `trackio` takes the place of the real one."""
    (tmp_path / "site" / "trackio").mkdir(parents=True)
    return tmp_path / "site"


THEIRS = """
import json, os, sys, time
def tell(what):
    with open(os.environ["TRACKED"], "a") as file:
        print(json.dumps(what), file=file)
class Run:
    name = "theirs"
    def log(self, values, step):
        tell({"step": step, **values})
    def finish(self):
        tell("finished")
def init(**asked):
    tell({"pid": os.getpid(), "token": os.environ.get("TOKEN")})
    return Run()
is_first = not os.path.exists(os.environ["TRACKED"])
tell("imported")
"""


def package(site: Path, code: str = "") -> dict[str, str]:
    """The environment in which a tracker's package is THEIRS, then this code."""
    (site / "trackio" / "__init__.py").write_text(THEIRS + code)
    return {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "TRACKED": str(site / "told"), "TOKEN": "hush"}


def told(site: Path) -> list[Any]:
    return [json.loads(line) for line in (site / "told").read_text().splitlines()] if (site / "told").exists() else []


def rows_told(site: Path) -> list[dict[str, Any]]:
    return [what for what in told(site) if isinstance(what, dict) and "step" in what]


def impatient(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Have the processes begin with other settings of the feed."""
    code = "".join(f"feed.{name} = {value!r}; " for name, value in settings.items())
    monkeypatch.setattr(process, "PROGRAM", process.PROGRAM.replace("feed.main()", f"{code}feed.main()"))


def have_ended(site: Path) -> bool:
    pids = [what["pid"] for what in told(site) if isinstance(what, dict) and "pid" in what]
    return not any(psutil.pid_exists(pid) for pid in pids)


FAILS = "trackio does not answer, the run goes on; it gets later what it misses: "


def test_a_process_sends_the_rows_and_the_end_and_shows_no_secret(site: Path, run: Storage) -> None:
    said: list[str] = []
    trackers = RunTrackers(["tensorboard", "trackio"], run, package(site), said.append)
    recent(run, 0, 3)
    wait_until(lambda: len(rows_told(site)) == 3)
    opened = next(what for what in told(site) if isinstance(what, dict))
    command = " ".join(psutil.Process(opened["pid"]).cmdline())
    assert opened["token"] == "hush" and run.location not in command and "hush" not in command
    in_files(run, 0, 5)
    RESULT_JSON.write(run, {"status": "done", "metrics": {"loss": 0.5}})
    trackers.finish("done")
    assert rows_told(site) == [{"step": row["step"], "loss": row["loss"]} for row in rows(0, 5)]
    assert told(site)[-1] == "finished" and have_ended(site) and said == []
    kept = b"".join(path.read_bytes() for path in Path(run.path).rglob("*") if path.is_file())
    assert b"hush" not in kept


@pytest.mark.full
@pytest.mark.slow
def test_a_run_in_an_object_store_is_fed_as_it_goes_on_and_no_command_shows_the_stores_secret(
    site: Path, server: Any
) -> None:
    run = run_dir_of(Storage(server.url("tracked")), Job.make(keys_of_job(), "run")).storage
    driver = RecentHistory(run, is_followed=True)
    said: list[str] = []
    trackers = RunTrackers(["trackio"], run, package(site), said.append)
    with repeated("recent history", RECENT_SECONDS, driver.save_if_due):
        for first in range(0, 12, 3):
            driver.add(rows(first, first + 3))
            wait_until(lambda end=first + 3: len(rows_told(site)) == end)  # type: ignore[misc]
        (pid,) = (what["pid"] for what in told(site) if isinstance(what, dict) and "pid" in what)
        assert not [part for part in psutil.Process(pid).cmdline() if SECRET in part or IN_URL in part]
        in_files(run, 0, 12)
        driver.add(rows(12, 14))
    driver.close()
    RESULT_JSON.write(run, {"status": "done", "metrics": {}})
    trackers.finish("done")
    assert [row["step"] for row in rows_told(site)] == list(range(14)) and said == []
    assert RECENT_SECONDS + max(LOOK_SECONDS.values()) <= 5, "what a row waits for, at most, besides the requests"


@pytest.mark.full(but=["time.sleep(600)-no answer within 1 s"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (r"raise RuntimeError('no\nway')", "RuntimeError: no way"),
        (r"print('out'); os.write(2, b'bye\n'); os._exit(3)", "bye"),
        ("time.sleep(600)", "no answer within 1 s"),
    ],
)
def test_a_package_that_raises_ends_its_process_or_hangs_is_told_and_left_after_the_limit(
    site: Path, run: Storage, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    in_files(run, 0, 8)
    impatient(monkeypatch, OPEN_SECONDS=1.0 if "sleep" in code else 60.0)
    said: list[str] = []
    tracker = TrackerProcess("trackio", run, package(site, code), said.append)
    wait_until(lambda: bool(said))
    assert said == [FAILS + says]
    tracker.end()
    began = time.monotonic()
    tracker.leave(began + 0.3)
    assert 0.3 <= time.monotonic() - began < 30
    assert said[1:] == [f"trackio has 0 steps and lacks the run's end; `dp-ray track {run}` sends what it lacks"]
    assert not tracker.is_done and have_ended(site)


@pytest.mark.full(but=["if is_first: Run.log = lambda self, values, step: time.sleep(600)-no answer within 1 s"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("is_first and os._exit(3)", "its process has ended"),
        ("if is_first: Run.log = lambda self, values, step: time.sleep(600)", "no answer within 1 s"),
    ],
)
def test_a_process_that_ends_or_hangs_is_started_anew(
    site: Path, run: Storage, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    impatient(monkeypatch, LOG_SECONDS=1.0)
    monkeypatch.setattr(process, "RETRY_SECONDS", (0.02,))
    said: list[str] = []
    recent(run, 0, 3)
    trackers = RunTrackers(["trackio"], run, package(site, code), said.append)
    wait_until(lambda: len(rows_told(site)) == 3)
    recent(run, 0, 6)
    in_files(run, 0, 6)
    RESULT_JSON.write(run, {"status": "done", "metrics": {}})
    trackers.finish("done")
    assert [row["step"] for row in rows_told(site)] == list(range(6))
    assert said == [FAILS + says, "trackio answers again"] and have_ended(site)


@pytest.mark.full
def test_the_end_of_the_run_does_not_wait_for_the_next_try(
    site: Path, run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RETRY_SECONDS", (600.0,))
    said: list[str] = []
    trackers = RunTrackers(["trackio"], run, package(site, "is_first and os._exit(3)"), said.append)
    wait_until(lambda: bool(said))
    in_files(run, 0, 6)
    RESULT_JSON.write(run, {"status": "failed", "metrics": {}})
    monkeypatch.setattr(process, "STOP_SECONDS", 60.0)
    trackers.finish("failed")
    assert [row["step"] for row in rows_told(site)] == list(range(6)) and told(site)[-1] == "finished"


def test_a_run_that_is_lost_to_another_driver_is_left_without_a_word(site: Path, run: Storage) -> None:
    said: list[str] = []
    trackers = RunTrackers(["trackio"], run, package(site), said.append)
    wait_until(lambda: any("pid" in what for what in told(site)))
    trackers.close()
    assert have_ended(site) and said == [] and "finished" not in told(site)


@pytest.mark.full
@pytest.mark.parametrize("has_child", [False, True])
def test_a_killed_driver_leaves_no_process(site: Path, run: Storage, has_child: bool) -> None:
    """Not even if a process that it has forked lives on, and holds all that it held."""
    program = (
        "import os, sys, time; from dp_ray.storage import Storage; "
        "from dp_ray.trackers.process import RunTrackers; "
        f"RunTrackers(['trackio'], Storage({run.location!r}), {package(site)!r}, print); "
        "sys.stdin.readline(); child = sys.argv[1] == 'True' and (os.fork() or time.sleep(600)); "
        "print(child, flush=True); sys.stdin.read()"
    )
    recent(run, 0, 3)
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-c", program, str(has_child)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        wait_until(lambda: len(rows_told(site)) == 3)
        print(file=driver.stdin, flush=True)
        child = driver.stdout.readline().strip()
        driver.kill()
        driver.wait()
        try:
            wait_until(lambda: have_ended(site))
        finally:
            if has_child:
                os.kill(int(child), signal.SIGKILL)
    assert told(site)[-1] == "finished", "its client was closed"
    assert TRACKED_JSON.read(run.child(TRACKERS), "trackio.json") == TrackedRun("theirs", 3)


def test_a_trackers_process_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.trackers.feed, dp_ray.trackers.process")


@pytest.mark.slow
def test_a_run_whose_tracker_hangs_ends_as_without(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "check_installed", lambda *_: None)
    monkeypatch.setattr(process, "END_SECONDS", 0.5)
    env = package(site, "time.sleep(60)")
    keys = keys_of(storage=str(tmp_path), epochs=2, quiet=False)
    plain = dp_ray.run(**keys, name="plain")
    tracked = dp_ray.run(**keys, name="run", trackers=["trackio"], env=env)
    assert tracked.weights_sha256 == plain.weights_sha256
    assert "trackio has 0 steps and lacks the run's end" in capsys.readouterr().err
    assert (tmp_path / "run" / METRICS).exists() and have_ended(site)


@pytest.mark.full
@pytest.mark.slow
def test_a_step_that_takes_long_keeps_no_row_from_the_tracker(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `workers: 0` nothing happens on the driver within a step; the rows before it are written all the same."""
    monkeypatch.setattr(checks, "check_installed", lambda *_: None)
    monkeypatch.chdir(ROOT)
    keys = keys_of(storage=str(tmp_path), name="run", model=WAITING, batch_size=1, workers=0, trackers=["trackio"])
    monkeypatch.setenv("WAITED_FOR", str(tmp_path / "seen"))
    results: list[dp_ray.Result] = []
    run = threading.Thread(target=lambda: results.append(dp_ray.run(**keys, env=package(site))))
    run.start()
    wait_until(lambda: len(rows_told(site)) >= 5)
    (tmp_path / "seen").touch()
    run.join(120)
    assert [row["step"] for row in rows_told(site)] == list(range(results[0].total_steps))


@pytest.mark.parametrize(
    "name",
    [
        "loss_of_web (en)",
        "args.x[0]",
        "a//b",
        "a/",
        "/a",
        "../x",
        "..",
        ".",
        "./a",
        "a/./b",
        "x" * 300,
        "a\nb",
        "ü:%",
    ],
)
def test_mlflow_takes_any_name_of_a_parameter_or_metric(name: str) -> None:
    """By the rule that MLflow states in its errors: some letters, and no path that leads to another name."""
    sent = mlflow_name(name)
    assert re.fullmatch(r"[/\w.\- ]*", sent)
    assert len(sent) <= 250
    assert not sent or (posixpath.normpath(sent) == sent and not sent.startswith(("..", "/")) and sent != ".")
    assert mlflow_name("eval_loss.of/web-2") == "eval_loss.of/web-2"
