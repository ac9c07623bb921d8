"""The feed of a tracker: a tracker that is down, slow, hangs or forgets gets each step once, and holds no run up."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dp_ray
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.rundir.history import HISTORY, METRICS
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from dp_ray.trackers import feed as feeds
from dp_ray.trackers import feed as run_trackers
from dp_ray.trackers import process
from dp_ray.trackers.feed import MEMORY_JSON, TRACKERS, Feed, Memory, about_run
from tests.support.trackers import FakeTracker, wait_until
from tests.support.trainings import keys_of


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(feeds, "RETRY_SECONDS", (0.02,))
    monkeypatch.setattr(feeds, "END_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(feeds, "ROWS_AT_ONCE", 4)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    storage = Storage(str(tmp_path / "run"))
    storage.child(HISTORY).create()
    return storage


def rows(first: int, end: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": float(step)} for step in range(first, end)]


def in_files(run: Storage, first: int, end: int) -> None:
    write_table(run.child(HISTORY), f"steps-{first}-{end}.parquet", pa.Table.from_pylist(rows(first, end)))


def fed(tracker: FakeTracker, run: Storage, said: list[str] | None = None) -> Feed:
    return Feed("fake", tracker.connect, run, (said if said is not None else []).append)


def ended(feed: Feed, seconds: float = 10.0, status: str = "done") -> float:
    """End a feed; the seconds that it took."""
    began = time.monotonic()
    feed.end(status, {"loss": 0.5, "eval_outputs_digest": 1.0}, began + seconds)
    feed.leave()
    return time.monotonic() - began


def test_a_tracker_gets_each_row_once_and_the_end(run: Storage) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    for first in range(0, 30, 3):
        feed.add(rows(first, first + 3))
    in_files(run, 0, 30)
    ended(feed)
    assert tracker.rows == rows(0, 30)
    assert tracker.ended == [("done", {"loss": 0.5})]
    assert MEMORY_JSON.read(run.child(TRACKERS), "fake.json") == Memory("run-1", 30, "done")


def test_a_tracker_that_is_down_for_a_while_misses_nothing(run: Storage) -> None:
    tracker, said = FakeTracker(), list[str]()
    feed = fed(tracker, run, said)
    feed.add(rows(0, 5))
    wait_until(lambda: tracker.steps == [0, 1, 2, 3, 4])
    tracker.is_down = True
    feed.add(rows(5, 12))
    wait_until(lambda: len(said) == 1)
    assert "fake does not answer, the run goes on; it gets later what it misses: connection refused" in said[0]
    tracker.is_down = False
    feed.add(rows(12, 20))
    wait_until(lambda: len(tracker.steps) == 20)
    in_files(run, 0, 20)
    ended(feed)
    assert tracker.rows == rows(0, 20)
    assert said[1:] == ["fake answers again"]


def test_an_answer_that_is_lost_doubles_nothing_if_the_tracker_knows_its_steps(run: Storage) -> None:
    tracker = FakeTracker(knows_its_steps=True)
    tracker.loses_answers = 2
    feed = fed(tracker, run)
    feed.add(rows(0, 20))
    wait_until(lambda: len(tracker.steps) >= 20)
    in_files(run, 0, 20)
    ended(feed)
    assert tracker.rows == rows(0, 20)


def test_rows_that_are_sent_again_have_the_same_time(run: Storage) -> None:
    """So a server that has them already can tell that they are the same."""
    tracker = FakeTracker()
    tracker.loses_answers = 1
    feed = fed(tracker, run)
    feed.add(rows(0, 3))
    wait_until(lambda: len(tracker.steps) == 6)
    ended(feed)
    assert tracker.times[:3] == tracker.times[3:6]


@pytest.mark.parametrize("is_hung", [True, False])
def test_a_tracker_that_hangs_or_is_down_is_left_after_the_limit(run: Storage, is_hung: bool) -> None:
    in_files(run, 0, 8)
    tracker, said = FakeTracker(), list[str]()
    tracker.is_down = not is_hung
    if is_hung:
        tracker.hangs.set()
    feed = fed(tracker, run, said)
    began = time.monotonic()
    for first in range(8):
        feed.add(rows(first, first + 1))
    assert time.monotonic() - began < 30, "the run never waits: a tracker hangs for a minute"
    assert 0.3 <= ended(feed, 0.3) < 30
    assert f"fake lacks 8 steps and the run's end; `dp-ray track {run}` sends it" in said
    assert tracker.closed.is_set() and not tracker.rows


def test_what_the_queue_cannot_hold_is_read_from_the_files(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "QUEUED_ROWS", 10)
    tracker = FakeTracker()
    tracker.is_down = True
    feed = fed(tracker, run)
    for first in range(0, 40, 4):
        feed.add(rows(first, first + 4))
    in_files(run, 0, 20)
    tracker.is_down = False
    wait_until(lambda: len(tracker.steps) >= 20)
    time.sleep(0.1)
    assert tracker.steps == list(range(20)), "the others before those in the queue are in no file yet"
    in_files(run, 20, 35)
    wait_until(lambda: len(tracker.steps) >= 40)
    feed.add(rows(40, 42))
    in_files(run, 35, 42)
    ended(feed)
    assert tracker.rows == rows(0, 42)


def remember(run: Storage, memory: Memory) -> None:
    run.child(TRACKERS).create()
    assert MEMORY_JSON.write(run.child(TRACKERS), memory, "fake.json")


def test_a_resumed_run_sends_exactly_the_steps_that_are_lacking(run: Storage) -> None:
    """Its driver was killed after step 12; the tracker has 10 steps, and the checkpoint is of step 8."""
    remember(run, Memory("theirs", 10))
    in_files(run, 0, 8)
    tracker = FakeTracker()
    feed = fed(tracker, run)
    for first in range(8, 20, 2):
        feed.add(rows(first, first + 2))
    in_files(run, 8, 20)
    ended(feed)
    assert tracker.opened == ["theirs"]
    assert tracker.rows == rows(10, 20)


def test_a_resumed_run_whose_tracker_was_down_sends_what_was_before(run: Storage) -> None:
    remember(run, Memory("theirs", 3))
    in_files(run, 0, 8)
    tracker = FakeTracker()
    feed = fed(tracker, run)
    feed.add(rows(8, 10))
    wait_until(lambda: len(tracker.steps) == 7)
    assert tracker.rows == rows(3, 10)
    ended(feed, status="failed")
    assert tracker.ended[0][0] == "failed"


def test_an_interruption_that_repeats_steps_sends_them_once(run: Storage) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    feed.add(rows(0, 6))
    wait_until(lambda: len(tracker.steps) == 6)
    tracker.is_down = True
    feed.add(rows(6, 9))
    feed.add(rows(4, 12))  # the workers begin again at the checkpoint of step 4
    tracker.is_down = False
    in_files(run, 0, 12)
    ended(feed)
    assert tracker.rows == rows(0, 12)


def test_a_run_that_begins_at_a_later_step_waits_for_no_earlier_ones(run: Storage) -> None:
    tracker = FakeTracker()
    feed = fed(tracker, run)
    feed.add(rows(100, 103))
    wait_until(lambda: tracker.steps == [100, 101, 102])
    ended(feed)


def test_a_package_that_is_missing_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PACKAGES", {"mlflow": "no_such_package_of_ours"})
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
    """A folder whose package `mlflow` takes the place of the real one."""
    (tmp_path / "site" / "mlflow").mkdir(parents=True)
    return tmp_path / "site"


def package(site: Path, code: str) -> dict[str, str]:
    """The environment in which a tracker's package is this code."""
    (site / "mlflow" / "__init__.py").write_text(code)
    return {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (r"raise RuntimeError('no\nway')", process.TrackerRefused, "RuntimeError: no way"),
        (r"import os; print('out'); os.write(2, b'bye\n'); os._exit(3)", process.TrackerError, "bye"),
        ("import time; time.sleep(60)", process.TrackerError, "no answer within"),
    ],
)
def test_a_package_that_raises_ends_its_process_or_hangs_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception], says: str
) -> None:
    monkeypatch.setattr(process, "OPEN_SECONDS", 0.5 if "sleep" in code else 30.0)
    tracker = process.TrackerProcess("mlflow", {"name": "run"}, package(site, code))
    try:
        with pytest.raises(kind, match=says):
            tracker.open(None, 0)
    finally:
        tracker.close()


@pytest.mark.slow
def test_a_run_whose_tracker_hangs_ends_as_without(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setattr(run_trackers, "END_SECONDS", 0.5)
    env = package(site, "import time; time.sleep(60)")
    keys = keys_of(storage=str(tmp_path), epochs=2, quiet=False)
    plain = dp_ray.run(**keys, name="plain")
    tracked = dp_ray.run(**keys, name="run", trackers=["mlflow"], env=env)
    assert tracked.weights_sha256 == plain.weights_sha256
    assert f"mlflow lacks {tracked.total_steps} steps and the run's end" in capsys.readouterr().err
    assert (tmp_path / "run" / METRICS).exists()
