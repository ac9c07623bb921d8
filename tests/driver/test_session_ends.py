"""How a session ends, without Ray: its jobs have `workers: 0`, so they run in this process."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.cluster.workers import Reached, StartedWorkers
from dp_ray.driver.sessions import Session, SessionWorkers
from dp_ray.errors import ClusterError
from dp_ray.job.keys import WorkerKeys
from tests.support import models

Open = Callable[..., Session]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a session that connects to nothing."""
    monkeypatch.setattr(SessionWorkers, "_connect", lambda self: None)
    return lambda **keys: dp_ray.session(workers=1, quiet=True, **keys)


def job(tmp_path: Path, model: Any = None) -> dict[str, Any]:
    keys = {"dataset": models.Rows(4), "batch_size": 2, "workers": 0, "storage": str(tmp_path), "overwrite": True}
    return {"model": model or models.Linear(), **keys}


def has_ended(session: Session, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not session.has_ended:
        time.sleep(0.01)
    return session.has_ended


def test_an_idle_session_ends_however_soon_its_timer_comes(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = Session._wait_idle

    def slowly(self: Session) -> None:
        begins(self)
        time.sleep(0.1)  # the timer comes while the job's end is still under way

    session = opened()
    session._idle_seconds = 0.02
    monkeypatch.setattr(Session, "_wait_idle", slowly)
    session.run(None, **job(tmp_path))
    assert has_ended(session, 5)
    with pytest.raises(ClusterError, match=r"the session has ended: it ran no job for 0\.02 s"):
        session.run(None, **job(tmp_path))


@pytest.mark.full
@pytest.mark.slow
def test_a_session_does_not_end_while_a_job_runs_and_counts_anew_after_it(opened: Open, tmp_path: Path) -> None:
    class Slow(models.Linear):
        def forward(self, inputs: Any) -> Any:
            time.sleep(0.3)
            return super().forward(inputs)

    session = opened(idle_seconds=0.5)
    assert session.run(None, **job(tmp_path, Slow())).status == "done"
    assert not has_ended(session, 0.3)
    assert has_ended(session, 5)


def test_a_session_cannot_be_closed_from_within_its_job(opened: Open, tmp_path: Path) -> None:
    session = opened()
    told: list[str] = []

    class Closes(models.Linear):
        def forward(self, inputs: Any) -> Any:
            with contextlib.suppress(ClusterError):
                session.close()
                told.append("closed")
            return super().forward(inputs)

    signal.alarm(20)  # in place of waiting for ever
    try:
        assert session.run(None, **job(tmp_path, Closes())).status == "done"
    finally:
        signal.alarm(0)
    assert not told
    assert not session.has_ended
    session.close()
    assert session.has_ended


def test_another_thread_closes_a_session_after_its_job(opened: Open, tmp_path: Path) -> None:
    session = opened()
    closing = threading.Thread(target=session.close)

    class Begins(models.Linear):
        def forward(self, inputs: Any) -> Any:
            if not closing.ident:
                closing.start()
            assert not session.has_ended
            return super().forward(inputs)

    assert session.run(None, **job(tmp_path, Begins())).status == "done"
    closing.join(5)
    assert session.has_ended


def test_a_session_that_cannot_connect_again_ends(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened()

    def fails(self: SessionWorkers) -> None:
        raise ClusterError("no Ray answers at elsewhere")

    monkeypatch.setattr(SessionWorkers, "_connect", fails)
    with pytest.raises(ClusterError, match="no Ray answers at elsewhere"):
        session._workers._reconnect()
    with pytest.raises(ClusterError, match="the session has ended: no Ray answers at elsewhere"):
        session.run(None, **job(tmp_path))
    session.close()


def test_a_session_that_has_ended_serves_no_module(opened: Open) -> None:
    """As where a closed module of it is copied, which begins anew."""
    session = opened()
    session.close()
    with pytest.raises(ClusterError, match="the session has ended: it was closed"):
        session._workers.serve(WorkerKeys(workers=1))


class Trainer:
    """Stands for a trainer whose controller is killed by `abort`, or has ended by itself."""

    def __init__(self, has_ended: bool) -> None:
        self.has_ended = has_ended

    def abort(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("has_ended", [True, False])
def test_workers_that_were_ended_at_once_have_not_left(has_ended: bool) -> None:
    """Ray then holds what they held until the connection ends, so that a session connects again."""
    trainer: Any = Trainer(has_ended)
    workers = StartedWorkers(trainer, None, {}, False, Reached("", {}))
    if not has_ended:
        workers._abort()
    assert workers.close(0) is has_ended
