"""Find the workers that hang, among all those that wait for them.

Python tells which worker waits. On GPUs all do, since each loop runs ahead of its GPU: there the place of each GPU
tells the one that is stuck from those that wait for it in a collective. torch's flight recorder tells the collective.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dp_ray.engine.clock import DevicePlace, Part
from dp_ray.errors import ModelError, other_calls
from dp_ray.messages import STATES, Beat, Collective, WorkerReady, beat_interval
from dp_ray.rundir.files import FLIGHT_RECORDER
from dp_ray.text import listed

SILENT_BEATS = 10


@dataclass
class _WorkerState:
    worker: WorkerReady
    heard: float  # when the last beat came
    moved: float  # when its step began
    step: int | None = None
    stack: str = ""
    waits_for: str = ""
    device: DevicePlace | None = None
    collectives: tuple[Collective, ...] = ()
    call: tuple[int, str] = (0, "")


def devices_behind(places: Mapping[int, DevicePlace]) -> tuple[int, ...]:
    """Return the ranks whose GPU is stuck, while those of all other ranks wait for it; none if all are equally far.

    A GPU that raises runs nothing any more. Else those are stuck that are in the earliest step and not in the
    exchange, where a GPU waits for the others. If all of that step are in the exchange, they have not left it.
    """
    behind = [rank for rank, place in places.items() if place.error]
    if not behind:
        steps = {rank: -1 if place.step is None else place.step for rank, place in places.items()}
        first = [rank for rank, step in steps.items() if step == min(steps.values())]
        behind = [rank for rank in first if places[rank].part is not Part.EXCHANGE] or first
    return () if len(behind) == len(places) else tuple(sorted(behind))


def describe_devices(places: Mapping[int, DevicePlace]) -> str:
    """Return which GPUs are behind, and how far that of each rank has come; "" without GPUs."""
    if not places:
        return ""
    found = ""
    if behind := devices_behind(places):
        found = f"the GPU of {_ranks(behind)} is behind: "
    elif len(places) > 1:
        is_collective = all(place.part is Part.EXCHANGE for place in places.values())
        found = f"no GPU is behind{', the collective itself hangs' if is_collective else ''}: "
    return f"; {found}{_grouped((rank, f'the GPU {place}') for rank, place in places.items())}"


def collectives_behind(stands: Mapping[int, Collective]) -> tuple[int, ...]:
    """Return the ranks that have come less far than another one in the collectives of a process group."""
    furthest = max((stand.at for stand in stands.values()), default=None)
    return tuple(sorted(rank for rank, stand in stands.items() if stand.at != furthest))


def describe_collectives(collectives: Mapping[int, Sequence[Collective]]) -> str:
    """Return where the ranks stand in each process group of which a collective is not over, and which are behind.

    It is "" if all are over. A rank that has told nothing is in no group.
    """
    by_group: dict[str, dict[int, Collective]] = {}
    for rank, all_of_rank in collectives.items():
        for collective in all_of_rank:
            by_group.setdefault(collective.group, {})[rank] = collective
    text = ""
    for group, stands in by_group.items():
        if all(stand.state == STATES[-1] for stand in stands.values()):
            continue
        found = ""
        if behind := collectives_behind(stands):
            found = f" {_ranks(behind)} {'is' if len(behind) == 1 else 'are'} behind"
        elif len(stands) == len(collectives):
            found = " no rank is behind"
        text += f"; in the collectives of {group}{found}: {_grouped(stands.items())}"
    return f"{text} (more in {FLIGHT_RECORDER}/)" if text else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _grouped(texts: Iterable[tuple[int, object]]) -> str:
    """Return the text of each rank, with ranks of the same text together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts, key=lambda pair: pair[0]):
        by_text.setdefault(str(text), []).append(rank)
    return listed(f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items())


@dataclass(frozen=True)
class Hang:
    """Workers that have been in one step for too long; the other workers wait for them, or hang in the same way.

    `found` says what GPUs and collectives tell of all workers, as a continuation of a line; "" if nothing.
    """

    workers: tuple[WorkerReady, ...]
    step: int
    seconds: float
    stack: str
    found: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that hang."""
        return tuple(worker.world.rank for worker in self.workers)

    def __str__(self) -> str:
        who = ", ".join(str(worker.world) for worker in self.workers)
        has = "has" if len(self.workers) == 1 else "have"
        at = (
            f"; its stack is\n{self.stack.rstrip()}"
            if self.stack
            else "; it does not answer: its process is stopped, or its node is cut off"
        )
        return f"{who} {has} been in step {self.step} for {self.seconds:.0f} s{self.found}{at}"


class Watchdog:
    """A watchdog of one attempt's workers; `limit` is the seconds allowed for one step, None: no limit."""

    def __init__(self, limit: float | None, workers: Sequence[WorkerReady]) -> None:
        self._limit = limit
        self._interval = beat_interval(len(workers))
        now = time.monotonic()
        self._states = {worker.world.rank: _WorkerState(worker, now, now) for worker in workers}
        self._is_reported = False

    def start(self, rank: int, step: int) -> None:
        """Note that a worker is about to run its first step, since it may hang before its next beat."""
        if rank in self._states:
            now = time.monotonic()
            state = self._states[rank]
            state.heard, state.moved, state.step = now, now, step

    def take(self, beat: Beat) -> None:
        """Take in a worker's beat."""
        now = time.monotonic()
        state = self._states.get(beat.rank)
        if state is None:
            return
        state.heard, state.moved, state.step = now, now - beat.seconds, beat.step
        state.stack, state.waits_for = beat.stack, beat.waits_for
        state.device, state.collectives = beat.device, beat.collectives
        state.call = beat.call

    def check_calls(self) -> None:
        """Raise ModelError if the loops of workers make other calls: then these wait in other collectives, for ever.

        On GPUs the workers may not find it themselves, since a host waits for its GPU.
        """
        by_number: dict[int, dict[int, str]] = {}
        for rank, state in sorted(self._states.items()):
            number, what = state.call
            by_number.setdefault(number, {})[rank] = what
        for number, calls in by_number.items():
            if number and len(set(calls.values())) > 1:
                raise ModelError(other_calls(calls))

    @property
    def found(self) -> str:
        """What the GPUs and the collectives of the workers that are late tell, to be put behind a sentence."""
        places = {rank: state.device for rank, state in self._states.items() if state.device is not None}
        stands = {rank: state.collectives for rank, state in self._states.items()}
        return describe_devices(places) + describe_collectives(stands)

    def hang(self) -> Hang | None:
        """Return the workers that hang, None if none do; once.

        It waits four more beat intervals after the limit, so that it has heard from all workers.
        """
        if self._limit is None or self._is_reported:
            return None
        now, patience = time.monotonic(), self._limit + 4 * self._interval
        late = [
            state for state in self._states.values() if state.step is not None and now - state.moved > self._limit
        ]
        if not any(now - state.moved > patience for state in late):
            return None
        blamed = self._blame(late, now)
        if not blamed:
            return None
        self._is_reported = True
        step = min(state.step or 0 for state in blamed)
        workers = tuple(state.worker for state in blamed)
        return Hang(workers, step, now - min(state.moved for state in blamed), blamed[0].stack, self.found)

    def _blame(self, late: list[_WorkerState], now: float) -> list[_WorkerState]:
        """Return the late workers to blame.

        These are the silent ones; else those whose GPU is behind, if all workers are late; else those in the earliest
        step that wait for no other worker. Else all in that step, if all workers are late; otherwise none, because
        some are only slow.
        """
        silent = [state for state in late if now - state.heard > SILENT_BEATS * self._interval]
        if silent:
            for state in silent:
                # What an earlier beat told does not show where the worker is now.
                state.stack, state.device, state.collectives = "", None, ()
            return silent
        last = min(state.step or 0 for state in late)
        behind = [state for state in late if state.step == last]
        hung = [state for state in behind if state.stack and not state.waits_for]
        all_late = len(late) == sum(state.step is not None for state in self._states.values())
        stuck: Sequence[int] = ()
        if all_late:
            stuck = devices_behind({state.worker.world.rank: state.device for state in late if state.device})
        return [self._states[rank] for rank in stuck] or hung or (behind if all_late else [])
