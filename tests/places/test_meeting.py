"""Hosts meet in a folder or at a port, with a token that none of them sends."""

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from dp_ray.cluster.internals.variables import AUTH_TOKEN, AUTH_TOKEN_PATH
from dp_ray.errors import ClusterLost, JobError
from dp_ray.places import meeting
from dp_ray.places.launchers import HostPlace
from dp_ray.places.meeting import FIRST, GOES, Heard, Line, given_token, join, leave_status, listen_to, open_meeting
from tests.support.cluster import free_port
from tests.support.within import within

TOKEN = "0123456789abcdef" * 4
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_token_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(AUTH_TOKEN, raising=False)
    monkeypatch.setenv(AUTH_TOKEN_PATH, str(tmp_path / "none"))


@contextmanager
def listening(place: HostPlace, token: str = TOKEN) -> Iterator["SimpleQueue[Heard]"]:
    heard: SimpleQueue[Heard] = SimpleQueue()
    with open_meeting(place, token, heard.put):
        yield heard


def joined(place: HostPlace, seconds: float = SECONDS) -> tuple[Line, str]:
    return join(place, {"rank": place.rank}, seconds, lambda: time.sleep(0.05))


def places(hosts: int, meet: object) -> list[HostPlace]:
    return [HostPlace(hosts, rank, str(meet)) for rank in range(hosts)]


def test_the_note_goes_before_the_port_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an attempt that finds the note as its port closes goes on, and then loses its own note."""
    close, left = meeting.Meeting.close, []

    def look_and_close(self: meeting.Meeting) -> None:
        left.append((tmp_path / FIRST).exists())
        close(self)

    monkeypatch.setattr(meeting.Meeting, "close", look_and_close)
    with listening(places(2, tmp_path)[0]):
        assert (tmp_path / FIRST).exists()
    assert left == [False]


def test_hosts_that_come_in_any_order_hear_each_other(tmp_path: Path) -> None:
    first, *others = places(4, tmp_path / "shared")
    lines: dict[int, Line] = {}

    def come(place: HostPlace) -> None:
        line, token = joined(place)
        assert token == TOKEN
        lines[place.rank] = line

    threads = [threading.Thread(target=come, args=[place]) for place in others]
    for thread in threads[:2]:
        thread.start()  # before there is a folder
    with listening(first) as heard:
        threads[2].start()
        came: dict[int, Heard] = {}
        while len(came) < 3:
            one = heard.get(timeout=SECONDS)
            came[one.rank] = one
        assert came.keys() == {1, 2, 3}
        for thread in threads:
            thread.join(SECONDS)
        assert {one.line.own_address for one in came.values()} == {line.own_address for line in lines.values()}
        came[2].line.send(ray="10.0.0.1:6379")
        assert lines[2].receive() == {"ray": "10.0.0.1:6379"}
        lines[1].send(up=True)
        assert heard.get(timeout=SECONDS).message == {"up": True}
        lines[3].close()
        gone = heard.get(timeout=SECONDS)
        assert (gone.rank, gone.message) == (3, {GOES: True})
    assert lines[1].receive() is None, "the first host has hung up"
    for line in lines.values():
        line.close()


def test_what_lies_in_the_folder_is_for_the_user_alone_and_removed(tmp_path: Path) -> None:
    first, other = places(2, tmp_path)
    with listening(first):
        (found,) = tmp_path.iterdir()
        assert stat.S_IMODE(found.stat().st_mode) == 0o600
        assert (found.name, json.loads(found.read_text())["token"]) == (FIRST, TOKEN)
        joined(other)[0].close()
    assert not list(tmp_path.iterdir())
    leave_status(first, 75)
    assert [path.name for path in tmp_path.iterdir()] == ["status"] and (tmp_path / "status").read_text() == "75\n"
    with listening(first):
        assert not (tmp_path / "status").exists(), "that of an earlier attempt"


def test_a_token_in_the_folder_that_is_sent_to_all_nodes_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dp_ray.cluster.connect import code_to_ship
    from dp_ray.cluster.internals.core import packed_files

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    for folder in ("meet", ".dp-ray/slurm-1-0-0", "."):
        with listening(HostPlace(2, 0, folder)):
            code = code_to_ship()
            assert [path.name for path in packed_files(code["working_dir"], code["excludes"])] == ["model.py"]


def test_the_token_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    before = socket.socket.sendall

    def sendall(self: socket.socket, data: Any) -> None:
        sent.append(bytes(data))
        before(self, data)

    monkeypatch.setattr(socket.socket, "sendall", sendall)
    first, other = places(2, tmp_path)
    with listening(first) as heard:
        joined(other)[0].close()
        heard.get(timeout=SECONDS)
    assert len(sent) >= 5 and not any(TOKEN.encode() in data for data in sent)


def test_who_lacks_the_token_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = places(2, f"127.0.0.1:{free_port()}")
    monkeypatch.setenv(AUTH_TOKEN, "f" * 64)
    with listening(first) as heard:
        with pytest.raises(
            ClusterLost, match=r"the first host \(host 0\) did not come .* within 0.5 s.*another token"
        ):
            joined(other, 0.5)
        with socket.create_connection(("127.0.0.1", int(other.meet.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"x" * 1000 + b"\n")
            stranger.settimeout(SECONDS)
            while stranger.recv(4096):
                pass  # its own challenge; then it hangs up
        monkeypatch.setenv(AUTH_TOKEN, TOKEN)
        line, _ = joined(other)
        assert heard.get(timeout=SECONDS).rank == 1
        line.close()


def test_a_proof_of_one_side_is_none_of_the_other(tmp_path: Path) -> None:
    """Else who sends back what it gets would be let in."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        line, answers = Line(server.accept()[0]), []
    thread = threading.Thread(target=lambda: answers.append(line.knows(TOKEN, is_first=True)))
    thread.start()
    with there.makefile("rb") as file:
        there.sendall(file.readline())
        there.sendall(file.readline())
    thread.join(SECONDS)
    assert answers == [False]
    line.close()
    there.close()


@pytest.mark.full
def test_what_a_killed_attempt_has_left_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is closed, or another program's, and its token another one."""
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 1.0)
    first, other = places(2, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as strange:
        strange.settimeout(0.1)
        left = {"addresses": ["127.0.0.1"], "port": strange.getsockname()[1], "token": "0" * 64}
        (tmp_path / FIRST).write_text(json.dumps(left))
        found: list[Line] = []
        thread = threading.Thread(target=lambda: found.append(joined(other)[0]))
        thread.start()
        strange.settimeout(SECONDS)
        strange.accept()[0].close()  # it has asked there
        with listening(first) as heard:
            assert heard.get(timeout=SECONDS).rank == 1
        thread.join(SECONDS)
    found[0].close()
    assert not list(tmp_path.iterdir()), "also the token of the killed attempt"


def test_a_folder_in_which_another_job_meets_is_an_error(tmp_path: Path) -> None:
    first, _ = places(2, tmp_path)
    with (
        listening(first),
        pytest.raises(JobError, match="another job meets there; take a folder for each"),
        listening(first, "1" * 64),
    ):
        pass
    assert not list(tmp_path.iterdir()), "the first one has removed its own"


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(JobError, match=f"--meet head:{port}: port {port} cannot be used on this host"),
            listening(HostPlace(2, 0, f"head:{port}")),
        ):
            pass


def test_a_host_that_is_silent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_SECONDS", 0.5)
    first, other = places(2, tmp_path)
    with listening(first) as heard:
        line, _ = joined(other)  # which sends no sign of life
        heard.get(timeout=SECONDS)
        assert heard.get(timeout=SECONDS).message == {GOES: True}
        line.close()


@pytest.mark.places
def test_signs_of_life_keep_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.1)
    first, other = places(2, tmp_path)
    told: SimpleQueue[Heard] = SimpleQueue()
    with listening(first) as heard:
        line, _ = joined(other)
        thread = threading.Thread(target=listen_to, args=[line, 0, told.put])
        thread.start()
        heard.get(timeout=SECONDS)
        assert not within(4.0, lambda: not heard.empty() or not told.empty())
        line.close()
        thread.join(SECONDS)


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_port, in_folder = HostPlace(2, 0, "head:80"), HostPlace(2, 0, str(tmp_path))
    assert given_token(in_folder) is None and given_token(HostPlace(1, 0, "")) is None
    with pytest.raises(JobError, match=r"the hosts need the same token, and this one has none: .*get-auth-token"):
        given_token(at_port)
    path = Path(os.environ[AUTH_TOKEN_PATH])
    path.write_text("abc\n")
    assert given_token(at_port) == "abc" and given_token(in_folder) is None
    monkeypatch.setenv(AUTH_TOKEN, "def")
    assert given_token(at_port) == given_token(in_folder) == "def"
