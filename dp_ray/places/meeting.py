"""The hosts of a Ray tell each other what they need to know, and learn when one of them goes.

The first host listens at a free port. It leaves its addresses in the shared folder, or listens at the HOST:PORT that
all are given. Each other host connects to it and stays connected. Both sides prove that they have the token of this
Ray, and neither sends it; what they say is JSON, a line each.

A folder may hold what an earlier attempt has left: nobody answers there who has its token, so it is asked again.
No side compares clocks.
"""

import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dp_ray.cluster.internals.variables import AUTH_TOKEN, AUTH_TOKEN_PATH
from dp_ray.errors import ClusterLost, JobError
from dp_ray.places.launchers import HostPlace, host_and_port
from dp_ray.system.threads import repeated

# In a folder where hosts meet: where the first one listens, and its token; and how the run has ended.
FIRST, STATUS = "dp-ray-meeting.json", "status"  # a folder that is sent to workers is sent without the first one
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # after which the other side counts as gone
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 0.5
LONGEST = 1 << 20  # bytes of a line
LONGEST_OF_A_STRANGER = 200
GOES = "goes"  # in a message that a line makes itself: the other side is gone

HostMessage = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """What came by a line: `rank` is the sender's."""

    rank: int
    line: "Line"
    message: HostMessage


class Line:
    """A connection to another host, over which both send messages; it is used once both have shown the token."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._file, self._sends = connection, connection.makefile("rb"), threading.Lock()
        # By which the other one reaches us.
        self.own_address: str = connection.getsockname()[0].removeprefix("::ffff:")

    def send(self, **message: Any) -> None:
        """Send a message; if the other side is gone, its silence tells."""
        with suppress(OSError), self._sends:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, longest: int = LONGEST) -> HostMessage | None:
        """Return the next message; None if the other side is gone or silent, or says what is none."""
        with suppress(OSError, ValueError):
            text = self._file.readline(longest)
            message = json.loads(text) if text.endswith(b"\n") else None
            return message if isinstance(message, dict) else None
        return None

    def knows(self, token: str, is_first: bool) -> bool:
        """Show that we have the token, and return whether the other side has it too."""
        self._socket.settimeout(CONNECT_SECONDS)  # a stranger does not keep us
        own = secrets.token_hex(16)
        self.send(nonce=own)
        theirs = str((self.receive(LONGEST_OF_A_STRANGER) or {}).get("nonce"))

        def proof(first: bool) -> str:
            text = f"{'first' if first else 'other'} {own if first == is_first else theirs} "
            text += theirs if first == is_first else own
            return hmac.digest(token.encode(), text.encode(), "sha256").hex()

        self.send(proof=proof(is_first))
        shown = str((self.receive(LONGEST_OF_A_STRANGER) or {}).get("proof"))
        self._socket.settimeout(SILENT_SECONDS)
        return hmac.compare_digest(shown.encode(), proof(not is_first).encode())

    def close(self) -> None:
        """Hang up: both sides' reads end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen_to(line: Line, rank: int, heard: Callable[[Heard], None]) -> None:
    """Hand on each message of a line until the other side is gone, and then that; in the thread that calls."""
    with repeated("sign of life", BEAT_SECONDS, line.send):
        while (message := line.receive()) is not None:
            if message:  # else it is a sign of life
                heard(Heard(rank, line, message))
    heard(Heard(rank, line, {GOES: True}))
    line.close()


class Meeting:
    """The first host's side: it hears the others, each in a thread of its own."""

    def __init__(self, place: HostPlace, token: str, heard: Callable[[Heard], None]) -> None:
        self._token, self._heard, self._lines = token, heard, set[Line]()
        at = None if place.meets_in_folder else host_and_port(place.meet)
        port = at[1] if at else 0
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._listener = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
        except OSError as error:
            says = f"--meet {place.meet}: port {port} cannot be used on this host: {error.strerror}"
            raise JobError(says) from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=[connection], name="a host", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        hello = line.receive() if line.knows(self._token, is_first=True) else None
        rank = (hello or {}).get("rank")
        if hello is None or not isinstance(rank, int):
            line.close()
            return
        self._lines.add(line)
        self._heard(Heard(rank, line, hello))
        listen_to(line, rank, self._heard)

    def close(self) -> None:
        """Hang up all lines."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread stays in `accept`
        self._listener.close()
        for line in set(self._lines):
            line.close()


@contextmanager
def open_meeting(place: HostPlace, token: str, heard: Callable[[Heard], None]) -> Iterator[None]:
    """Listen to the other hosts while the block runs, and have the folder say where, if they meet in one."""
    if place.hosts == 1:
        yield
        return
    folder = Path(place.meet) if place.meets_in_folder else None
    if folder and (found := _read(folder)) and (line := _line_to(**found)):
        line.close()
        raise JobError(f"--meet {folder}: another job meets there; take a folder for each job")
    meeting = Meeting(place, token, heard)
    told = {"addresses": own_addresses(), "port": meeting.port, "token": token}
    try:
        if folder:
            _leave(folder, told)
        yield
    finally:
        try:
            # Before the port closes: whoever finds the note until then is refused, and cannot lose its own.
            if folder and _read(folder) == told:  # else another attempt has begun
                (folder / FIRST).unlink(missing_ok=True)
        finally:
            meeting.close()


def _leave(folder: Path, told: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATUS).unlink(missing_ok=True)
        _write(folder / FIRST, json.dumps(told))
    except OSError as error:
        raise JobError(f"--meet {folder}: cannot be written: {error.strerror or error}") from None


def leave_status(place: HostPlace, status: int) -> None:
    """Leave the run's exit status in the folder, for the script of a launcher."""
    if place.meet and place.meets_in_folder:
        with suppress(OSError):
            Path(place.meet).mkdir(parents=True, exist_ok=True)
            _write(Path(place.meet) / STATUS, f"{status}\n", 0o644)


def join(place: HostPlace, hello: HostMessage, seconds: float | None, waits: Callable[[], None]) -> tuple[Line, str]:
    """Connect to the first host, and return the line, which has said `hello`, and the token.

    Calls `waits` now and then. Raises ClusterLost if the first host does not answer within `seconds`, or has another
    token.
    """
    until = math.inf if seconds is None else time.monotonic() + seconds
    at = host_and_port(place.meet)
    while True:
        if at is not None:
            found: dict[str, Any] | None = {"addresses": [at[0]], "port": at[1], "token": given_token(place)}
        elif found := _read(Path(place.meet)):
            found["token"] = os.environ.get(AUTH_TOKEN) or found["token"]
        if found and (line := _line_to(**found)):
            line.send(**hello)
            return line, found["token"]
        if time.monotonic() > until:
            raise ClusterLost(
                f"the first host ({place.name(0)}) did not come to {place.meet} within {seconds:g} s "
                "(timeouts.capacity), or has another token than this host"
            )
        waits()


def given_token(place: HostPlace) -> str | None:
    """Return the token that all hosts were given; None if the first host makes one, for a folder that all share.

    Raises JobError if the hosts have no folder and no token.
    """
    if token := os.environ.get(AUTH_TOKEN):
        return token
    if place.hosts == 1 or place.meets_in_folder:
        return None
    path = Path(os.environ.get(AUTH_TOKEN_PATH) or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if token := path.read_text().strip():
            return token
    raise JobError(
        f"--meet {place.meet}: the hosts need the same token, and this one has none: make it on one host with "
        f"`ray get-auth-token --generate`, and copy {path} to the others, or set {AUTH_TOKEN} on all; "
        "with --meet FOLDER, which all share, the first host makes one"
    )


def own_addresses() -> list[str]:
    """Return the addresses by which others may reach this host; the one of its name first, IPv4 before IPv6."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        address.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == family and name in up
    ]
    outer = [own for own in found if not own.startswith(("127.", "169.254.", "fe80:")) and own != "::1"]
    with suppress(OSError):
        named = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        outer.sort(key=lambda address: address not in named)
    return outer or ["127.0.0.1"]


def _line_to(addresses: list[str], port: int, token: str) -> Line | None:
    """Return a line to whoever listens at one of the addresses and has the token; None if nobody does."""
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), CONNECT_SECONDS)
        except OSError:
            continue
        line = Line(connection)
        if line.knows(token, is_first=False):
            return line
        line.close()
    return None


def _read(folder: Path) -> dict[str, Any] | None:
    """Return what the first host has left in the folder; None if it has not."""
    with suppress(OSError, ValueError, KeyError):
        os.listdir(folder)  # NFS learns of new files by it
        found = json.loads((folder / FIRST).read_text())
        return {key: found[key] for key in ("addresses", "port", "token")}
    return None


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file that appears whole, for this user alone."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
