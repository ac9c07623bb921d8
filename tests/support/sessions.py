"""The session that tests share."""

import contextlib

import pytest
import ray

from dp_ray.driver import sessions
from tests.support.within import within


def await_all(session: sessions.Session) -> None:
    """Wait for the workers in the places of those that an earlier test has killed: a job begins without them."""
    channel = session._workers.started.channel
    assert within(240, lambda: not ray.get(channel.lost.remote()))


def share(session: sessions.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `verify` and `run` of several jobs take this session, in place of one of their own."""
    monkeypatch.setattr(sessions, "Session", lambda *_: contextlib.nullcontext(session))
