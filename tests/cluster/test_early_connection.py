"""A connection to Ray that a thread makes while the command line imports torch."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dp_ray.cli import main
from dp_ray.cluster import connect, own, workers
from dp_ray.cluster.connect import EarlyConnection, connected, connected_early
from dp_ray.cluster.own import OwnWorkers
from dp_ray.errors import ClusterError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console
from tests.support.cli import status_of

KEYS = WorkerKeys(workers=2)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order, with a connection that takes no Ray."""
    said: list[str] = []

    @contextmanager
    def fake(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[None]:
        thread = threading.current_thread()
        said.append(f"begins to connect to {address}")
        if address == "nowhere":
            raise ClusterError("no Ray answers at nowhere")
        yield
        assert threading.current_thread() is thread, "the kernel ends a Ray with the thread that started it"
        said.append("disconnected")

    monkeypatch.setattr(connect, "_connected", fake)
    return said


def own_workers(early: EarlyConnection | None) -> OwnWorkers:
    return OwnWorkers("again", False, Console("job", quiet=True), early)


def test_ctrl_c_while_it_ends_leaves_no_ray_that_is_still_ending() -> None:
    """The next connection of the process would meet it, half closed."""
    said: list[str] = []
    main_thread = threading.get_ident()

    @contextmanager
    def connection() -> Iterator[None]:
        yield
        signal.pthread_kill(main_thread, signal.SIGINT)
        time.sleep(0.2)
        said.append("disconnected")

    early = EarlyConnection(connection)
    early.start()
    early.wait()
    with pytest.raises(KeyboardInterrupt):
        early.end()
    assert said == ["disconnected"]


def test_ctrl_c_while_ray_is_shut_down_comes_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a session closes: what is left of its Ray would live as long as the process."""
    said: list[str] = []

    def shut_down() -> None:
        signal.raise_signal(signal.SIGINT)
        said.append("shut down")

    monkeypatch.setattr(connect, "_start_ray", lambda *_: None)
    monkeypatch.setattr("ray.shutdown", shut_down)
    with pytest.raises(KeyboardInterrupt), connected(KEYS, "there:1", False):
        pass
    assert said == ["shut down"]


def test_own_workers_take_it_over_and_end_it(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, which were not given it, connect by themselves."""
    monkeypatch.setattr(own, "worker_resources", lambda _: {})
    monkeypatch.setattr(workers, "check_can_run", lambda *_: said.append("can run"))
    job = Job.make({"model": "a:b", "dataset": "a:b", "batch_size": 2, "workers": 2}, "job")
    with connected_early(KEYS, "there", False) as early:
        early.wait()
        with closing(own_workers(early)) as mine:
            assert mine.accept(job, replaces=False) is job
            assert said == ["begins to connect to there"], "a job that replaces nothing need not know whether it fits"
            mine.accept(job, replaces=True)
        said.append("merges")
        with closing(own_workers(None)) as mine:
            mine.accept(job, replaces=True)
    first = ["begins to connect to there", "can run", "disconnected", "merges"]
    assert said == [*first, "begins to connect to again", "can run", "disconnected"]


def test_an_error_before_it_is_taken_over_leaves_nothing(said: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), connected_early(KEYS, "there", False):
        _ = 1 / 0
    assert said == ["begins to connect to there", "disconnected"]
    assert "connection to Ray" not in {thread.name for thread in threading.enumerate()}


def test_its_failure_is_raised_where_it_is_taken_over(said: list[str]) -> None:
    with connected_early(KEYS, "nowhere", False) as early:
        early.wait()
        said.append("the job is checked")
        with pytest.raises(ClusterError, match="no Ray answers at nowhere"), early:
            pass
    assert said == ["begins to connect to nowhere", "the job is checked"]


def test_nobody_is_kept_waiting_by_one_that_has_failed() -> None:
    early = EarlyConnection(failing("broken"))
    early.start()
    early.wait()
    early.end()
    assert not early.is_alive()


def failing(text: str) -> Callable[[], Any]:
    def connect_to_nothing() -> Any:
        raise OSError(text)

    return connect_to_nothing


TUTORIAL = "jobs/tutorial.yaml"
NO_SUCH_MODEL = "model=nowhere.at_all:Model"


def test_a_model_that_cannot_be_imported_is_told_before_the_connection_ends(
    said: list[str], monkeypatch: pytest.MonkeyPatch, in_project: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "show_error", lambda error, is_verbose: said.append(str(error)))
    given = ["run", TUTORIAL, "--workers", "2", "--storage", str(tmp_path), "--quiet"]
    assert status_of(monkeypatch, *given, "--set", NO_SUCH_MODEL) == JobError.exit_status
    first, told, last = said
    assert (first, last) == ("begins to connect to None", "disconnected")
    assert "nowhere.at_all" in told
    assert "connection to Ray" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["run", TUTORIAL, "--set", "batch_sise=3"], JobError.exit_status),
        (["run", TUTORIAL, "--workers", "0", "--storage", "{folder}", "--quiet"], 0),
        (["plan", TUTORIAL], 0),
    ],
    ids=["a bad job", "no workers", "a plan"],
)
def test_what_needs_no_ray_begins_no_connection(
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    in_project: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
) -> None:
    assert status_of(monkeypatch, *(one.format(folder=tmp_path) for one in arguments)) == status
    assert said == []


def test_ctrl_c_while_it_is_made_ends_it(said: list[str], monkeypatch: pytest.MonkeyPatch, in_project: Path) -> None:
    def interrupted(_: EarlyConnection) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EarlyConnection, "wait", interrupted)
    assert status_of(monkeypatch, "run", TUTORIAL, "--workers", "2", "--quiet") == 130
    assert said == ["begins to connect to None", "disconnected"]
    assert "connection to Ray" not in {thread.name for thread in threading.enumerate()}


def test_a_ray_that_does_not_start_is_our_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(connect, "start_local", times_out)
    with pytest.raises(ClusterError, match=r"cannot start Ray on this machine: The current node timed out"):
        connect._start_ray(KEYS, None, False, "/nowhere")
