"""Run a command of dp-ray on several hosts: each runs this, and starts its part of a Ray that is there for it alone.

The first host starts the Ray and waits for the others. Then it runs the command, and tells all how that ended. Each
ends what it has started.

A signal to the first host is the run's planned stop. Another host asks the first one what its signal means: if all
have got one, the run stops anyway; else its node is drained, and the host waits until the run has left it.
"""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import node as host_name
from platform import python_version
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any

from dp_ray.cluster.internals.variables import ADDRESS
from dp_ray.errors import (
    RUN_AGAIN,
    ClusterError,
    ClusterLost,
    Error,
    JobError,
    RunInterrupted,
    exit_status_of,
    stop_status,
)
from dp_ray.places import meeting
from dp_ray.places.launchers import HostPlace
from dp_ray.places.meeting import GOES, Heard, Line
from dp_ray.places.own_ray import Machine, OwnRay, clients_environment, started
from dp_ray.system.linux import ended_with_this_process
from dp_ray.system.process import own_folder, short_folder
from dp_ray.system.threads import planned_stops
from dp_ray.text import counted, listed

PROGRAM = [sys.executable, "-m", "dp_ray"]
LOOK_SECONDS = 0.2
TELL_SECONDS, SOON_SECONDS = 10.0, 1.0
TELL_END_SECONDS = 60.0  # for which a host that cannot take part stays at the meeting point, to tell why
START_SECONDS = 300.0  # a Ray that is not up after that never will be
AT_MOST = " at most; Ctrl-C ends this"
GRACE_SECONDS = 3.0  # in which a signal that all hosts get reaches the first one
Say = Callable[[str], None]


@dataclass(frozen=True)
class HostsCommand:
    """What to run, and on fewer hosts if the job is elastic and not all come within `capacity` seconds.

    `mistake` is why this host cannot take part: it is told to the others, and then raised.
    """

    arguments: tuple[str, ...]
    capacity: float | None = 600.0
    is_elastic: bool = False
    mistake: Error | None = None


def run_on_this_host(place: HostPlace, command: HostsCommand, machine: Machine, say: Say) -> int:
    """Do this host's part, and return its exit status: on all hosts the run's, or 75 where the first host was lost.

    Raises RunInterrupted if a signal came before the run began, or took this host out of it, ClusterError if a Ray
    cannot be started or too few hosts come, and the command's mistake.
    """
    events: SimpleQueue[Any] = SimpleQueue()  # of all that happens; which a signal handler may use

    def take(name: str) -> bool:
        events.put(name)
        return True

    with own_folder(short_folder()) as folder, planned_stops(take):
        host = _First if place.rank == 0 else _Other
        return host(place, command, machine, say, Path(folder), events).run()


@dataclass
class _Host:
    place: HostPlace
    command: HostsCommand
    machine: Machine
    say: Say
    folder: Path
    events: "SimpleQueue[Any]"
    signals: list[str] = field(default_factory=list)

    def wait(self) -> str | None:
        """Wait a moment, and handle what another host says; return the name of a signal if one came."""
        try:
            event = self.events.get(timeout=LOOK_SECONDS)
        except Empty:
            return None
        if isinstance(event, str):
            self.signals.append(event)
            return event
        self.handle(event)
        return None

    def wait_or_leave(self) -> None:
        """Do the same; a signal ends this host, since the run has not begun."""
        if name := self.wait():
            raise RunInterrupted(f"{name} came before the run had begun", self.signals)

    def say_after(self, due: float, says: str) -> float:
        """Say something that takes long if it is due; return when it is to be said again."""
        if time.monotonic() < due:
            return due
        self.say(says)
        return time.monotonic() + 6 * TELL_SECONDS

    def ray_up(self, ray: OwnRay) -> str:
        """Wait until this host's part of the Ray is up, and return the Ray's address."""
        until = time.monotonic() + START_SECONDS
        while (address := ray.address()) is None:
            self.check_on_first()
            if not ray.is_alive and ray.starts_again():
                self.say(f"Ray has given up its start on {host_name()} after its own 30 s, and is started once more")
            if not ray.is_alive or time.monotonic() > until:
                raise ClusterError(f"Ray cannot be started on {host_name()}: {ray.last_lines()}")
            self.wait_or_leave()
        return address

    def check_on_first(self) -> None:
        """Raise what ends this host's part, if the first host has told it or is lost."""

    def handle(self, heard: Heard) -> None:
        """Take in what another host says."""

    def versions(self) -> dict[str, Any]:
        """Return what is to be the same on all hosts."""
        return {"python": python_version(), "ray": version("ray"), "hosts": self.place.hosts}


@dataclass
class _Guest:
    """Another host, as the first one knows it."""

    line: Line
    host: str
    is_up: bool = False


@dataclass
class _First(_Host):
    guests: dict[int, _Guest] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # why a host cannot take part
    came: set[int] = field(default_factory=set)  # also those that have gone
    drains: dict[int, float] = field(default_factory=dict)  # when a host asked whether to drain its node
    reached_at: str | None = None  # this host's address on the route from the others
    tells: dict[str, Any] = field(default_factory=dict)  # where the Ray is, or that all is over: also who comes later
    late: float = field(init=False)  # when the others should have come

    def __post_init__(self) -> None:
        capacity = self.command.capacity
        self.late = math.inf if capacity is None else time.monotonic() + capacity

    def run(self) -> int:
        """Start the Ray, wait for the others, run the command, and return its exit status."""
        place = self.place
        token = meeting.given_token(place) or token_hex(32)
        with meeting.open_meeting(place, token, self.events.put), self._end_told():
            if self.command.mistake is not None:
                raise self.command.mistake
            if place.hosts == 1:
                own = "127.0.0.1"
            elif self._wait_for(lambda: self.reached_at is not None):  # the first guest tells
                own = str(self.reached_at)
            else:
                self._go_on_without()
                own = meeting.own_addresses()[0]
            with started(self.folder, token, own, self.machine) as ray:
                address = self.ray_up(ray)
                self._tell(ray=address)
                if not self._wait_for(lambda: len(self._up()) == place.hosts - 1):
                    self._go_on_without()
                self.say(f"Ray is up on {counted(1 + len(self._up()), 'host')}, at {address}")
                status = self._follow(address)
                self._tell(over=status)
                meeting.leave_status(place, status)
        return status

    @contextmanager
    def _end_told(self) -> Iterator[None]:
        """If the block ends by an error, tell the other hosts, also those that come a little later."""
        try:
            yield
        except BaseException as error:
            status = exit_status_of(error)
            why = str(error) if isinstance(error, Error | RunInterrupted) else f"{type(error).__name__}: {error}"
            self._tell(over=status, why=why)
            meeting.leave_status(self.place, status)
            if isinstance(error, Exception):
                self._wait_to_tell(why)
            raise

    def _tell(self, **tells: Any) -> None:
        self.tells = tells
        for guest in self.guests.values():
            guest.line.send(**tells)

    def _wait_to_tell(self, why: str) -> None:
        """Wait until all have come and been told; a signal ends that."""
        until, due = min(self.late, time.monotonic() + TELL_END_SECONDS), time.monotonic() + SOON_SECONDS
        while (missing := set(range(1, self.place.hosts)) - self.came) and time.monotonic() < until:
            names = listed(self._name(rank) for rank in sorted(missing))
            due = self.say_after(due, f"{why}\nwaits for {names}, to tell it so, {TELL_END_SECONDS:.0f} s{AT_MOST}")
            if self.wait():
                return

    def handle(self, heard: Heard) -> None:
        """Take in what another host says."""
        rank, message = heard.rank, heard.message
        guest = self.guests.get(rank)
        if "python" in message:
            self._welcome(heard)
        elif guest is None or guest.line is not heard.line:
            return
        elif "up" in message:
            guest.is_up = True
        elif "failed" in message:
            self.refused[rank] = message["failed"]
        elif "asks" in message:
            self.say(f"{self._name(rank)} got {message['asks']}")
            self.drains[rank] = time.monotonic() + GRACE_SECONDS
        elif GOES in message:
            self.say(f"{self._name(rank)} went away")
            del self.guests[rank]

    def _welcome(self, heard: Heard) -> None:
        """Take a host in, or tell it why not."""
        rank, said, own = heard.rank, heard.message, self.versions()
        self.came.add(rank)
        differs = [f"{key} is {said[key]} there and {own[key]} here" for key in own if said[key] != own[key]]
        if rank in self.guests:
            differs = [f"there is a host {rank} already, {self.guests[rank].host}"]
        elif not 0 < rank < self.place.hosts:
            differs = [f"of {self.place.hosts} hosts it is 1 to {self.place.hosts - 1}"]
        if differs:
            why = f"--rank {rank} on {said['host']}: {listed(differs)}"
            heard.line.send(refused=why)
            if rank not in self.guests and 0 < rank < self.place.hosts:
                self.refused[rank] = why
        elif "failed" in said:
            self.refused[rank] = said["failed"]
        else:
            self.refused.pop(rank, None)
            self.guests[rank] = _Guest(heard.line, said["host"])
            self.reached_at = self.reached_at or heard.line.own_address
            if self.tells:
                heard.line.send(**self.tells)

    def _wait_for(self, holds: Callable[[], bool]) -> bool:
        """Wait until something holds, or it is late; return whether it holds. Say for whom, if it takes long."""
        due = time.monotonic() + TELL_SECONDS
        while not holds():
            if time.monotonic() > self.late:
                return False
            due = self.say_after(due, f"waiting for {listed(self._missing())}")
            if self.refused and not self.command.is_elastic:
                raise ClusterError(listed([f"{self._name(rank)}: {why}" for rank, why in self.refused.items()]))
            self.wait_or_leave()
            for rank in self.drains.keys() & self.guests.keys():  # it leaves before the run has begun
                self.guests[rank].line.send(drain=True)
            self.drains.clear()
        return True

    def _go_on_without(self) -> None:
        missing, seconds = self._missing(), self.command.capacity
        says = f"{listed(missing)} did not come within {seconds:g} s (timeouts.capacity)"
        if not self.command.is_elastic:
            raise ClusterLost(f"{says}, and the job takes no fewer workers; run it again once all hosts are there")
        self.say(f"{says}; the job is elastic, and goes on without")

    def _follow(self, address: str) -> int:
        """Run the command, hand it the signals that come, and return its exit status."""
        own = {**clients_environment(self.folder), ADDRESS: address}
        line = ended_with_this_process([*PROGRAM, *self.command.arguments])
        with subprocess.Popen(line, env=own, start_new_session=True) as run:  # so that Ctrl-C reaches it once
            while (status := run.poll()) is None:
                if name := self.wait():
                    self.drains.clear()  # the stop wins
                    with suppress(ProcessLookupError):
                        run.send_signal(signal.Signals[name])
                for rank in [rank for rank, due in self.drains.items() if due < time.monotonic()]:
                    del self.drains[rank]
                    if rank in self.guests and not self.signals:
                        self.say(f"Ray drains {self._name(rank)}")
                        self.guests[rank].line.send(drain=True)
        if status < 0:  # it was killed, and what it has kept is there
            return stop_status(self.signals) if self.signals else RUN_AGAIN
        return status

    def _up(self) -> list[int]:
        return [rank for rank, guest in self.guests.items() if guest.is_up]

    def _missing(self) -> list[str]:
        missing = [rank for rank in range(1, self.place.hosts) if rank not in self._up()]
        return [", ".join(filter(None, [self._name(rank), self.refused.get(rank)])) for rank in missing]

    def _name(self, rank: int) -> str:
        guest = self.guests.get(rank)
        return f"host {rank} ({guest.host})" if guest else self.place.name(rank)


class _RunOver(Exception):
    """The first host has told that the run is over; its argument is the exit status."""


@dataclass
class _Other(_Host):
    ray: str | None = None
    over: int | None = None
    is_lost: bool = False
    is_drained: bool = False

    def run(self) -> int:
        """Join the Ray of the first host, and stay until the run is over or has left this host."""
        place, mistake = self.place, self.command.mistake
        hello = {"rank": place.rank, "host": host_name(), **self.versions()}
        if mistake is not None:
            with suppress(ClusterLost, RunInterrupted):
                meeting.join(place, {**hello, "failed": str(mistake)}, TELL_END_SECONDS, self._waiter())[0].close()
            raise mistake
        line, token = meeting.join(place, hello, self.command.capacity, self._waiter())
        threading.Thread(
            target=meeting.listen_to, args=[line, 0, self.events.put], name="the first host", daemon=True
        ).start()
        try:
            while self.ray is None:
                self.check_on_first()
                self.wait_or_leave()
            with started(self.folder, token, line.own_address, self.machine, self.ray) as ray:
                try:
                    self.ray_up(ray)
                except ClusterError as error:
                    line.send(failed=str(error))
                    raise
                line.send(up=True)
                self.say(f"host {place.rank} ({host_name()}) is part of the Ray at {self.ray}")
                self._stay(ray, line)
        except _RunOver as over:
            return int(over.args[0])
        finally:
            line.close()
        raise RunInterrupted("the run has left this host", self.signals)

    def _waiter(self) -> Callable[[], None]:
        """Return a function that waits a moment for the first host, and says so now and then."""
        says = f"waiting for the first host ({self.place.name(0)}) at {self.place.meet}"
        due = time.monotonic() + (SOON_SECONDS if self.command.mistake else TELL_SECONDS)
        if self.command.mistake:
            says = f"{self.command.mistake}\n{says}, to tell it so, {TELL_END_SECONDS:.0f} s{AT_MOST}"

        def wait() -> None:
            nonlocal due
            due = self.say_after(due, says)
            self.wait_or_leave()

        return wait

    def handle(self, heard: Heard) -> None:
        """Take in what the first host says."""
        message = heard.message
        self.ray = message.get("ray", self.ray)
        self.over = message.get("over", self.over)
        self.is_drained |= "drain" in message
        self.is_lost |= GOES in message
        if "why" in message:
            self.say(f"the first host ({self.place.name(0)}) has ended: {message['why']}")
        if "refused" in message:
            raise JobError(message["refused"])

    def check_on_first(self) -> None:
        """Raise _RunOver if the run is over, and ClusterLost if the first host went away before."""
        if self.over is not None:
            raise _RunOver(self.over)
        if self.is_lost:
            raise ClusterLost(f"the first host ({self.place.name(0)}) went away; run the same again on all hosts")

    def _stay(self, ray: OwnRay, line: Line) -> None:
        """Stay until the run has left this host after a signal; raises what ends it before."""
        drain, is_told = None, False
        while True:
            self.check_on_first()
            if name := self.wait():
                if len(self.signals) > 1:
                    raise RunInterrupted(f"left at once, after {listed(self.signals)}", self.signals)
                line.send(asks=name)
                self.say(f"{name}: this host waits until the run has stopped, or has left it")
            if self.is_drained and drain is None and ray.is_alive:
                drain = ray.drain(f"{listed(self.signals)} on {host_name()}")
            if drain is not None and drain.poll() and not is_told:
                self.say(f"Ray does not drain this host: {ray.last_lines()}")
                is_told = True
            if not ray.is_alive:
                if drain is not None:
                    return
                if not is_told:
                    self.say(f"Ray has ended on this host, which waits for the end of the run: {ray.last_lines()}")
                    is_told = True
