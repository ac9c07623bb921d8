"""Runs trials: on the workers of sessions, as many side by side as there is room for, or in this process."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dp_ray.driver import Options, execute
from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.results.result import Result
from dp_ray.system.stop_signals import ask_others, planned_stops

if TYPE_CHECKING:
    from dp_ray.sessions import Session

Say = Callable[[str], None]
LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Lane:
    """Runs one job at a time: `execute` runs it to its end, `abort` ends the workers on which it runs."""

    execute: Callable[[Job], Result]
    abort: Callable[[], None]


@contextmanager
def opened(jobs: Sequence[Job], count: int, options: Options, parallel: int | None, say: Say) -> Iterator[list[Lane]]:
    """Lanes for `count` jobs such as these: `parallel` of them, or as many as there are free resources for.

    Raises JobError if the jobs cannot share workers, or run in this process and shall run side by side.
    """
    on_ray = [job for job in jobs if job.max_workers > 0]
    is_here = len(on_ray) < len(jobs)
    if is_here and parallel not in (None, 1):
        raise JobError(f"--parallel {parallel}: with workers: 0 the trials run in this process, one after another")
    if not on_ray:
        yield [Lane(lambda job: execute(job, options), lambda: None)]
        return
    from dp_ray.sessions import Session, keys_for  # imports Ray, which `workers: 0` does not need

    keys, wanted = keys_for(on_ray), 1 if is_here or count == 1 else parallel and min(parallel, count)
    how = options.address, None, options.quiet, options.verbose
    with ExitStack() as closing:
        sessions = [closing.enter_context(Session(keys, *how, at_a_time=wanted))]
        fits = sessions[0].at_a_time or 1
        if wanted is not None and fits < wanted:
            say(f"there is room for {fits} of {wanted} trials at a time")
        sessions += [closing.enter_context(Session(keys, *how)) for _ in range(min(fits, count) - 1)]
        try:
            yield [Lane(partial(_execute_on, one, options), one.abort) for one in sessions]
        finally:
            for one in sessions:
                one.abort()  # no job runs now, and the end of the connection frees what they hold


def _execute_on(session: "Session", options: Options, job: Job) -> Result:
    return session.execute(job, options)


class Stop:
    """Whether the trials that run shall stop after their step, and no other begin; or whether all end at once."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_by_signal = False
        self.is_at_once = False
        self._by = "SIGTERM"

    def ask(self, signal_name: str) -> bool:
        """Ask for it, as a signal does; False if it was asked for before."""
        if self.is_asked:
            return False
        self.is_asked, self.is_by_signal, self._by = True, True, signal_name
        return True

    def pass_on(self) -> None:
        """Ask the jobs of other threads, if it is asked for; to be called again, until each runs a step."""
        if self.is_asked:
            ask_others(self._by)


def run_side_by_side(lanes: Sequence[Lane], work: Callable[[Lane], None], stop: Stop) -> None:
    """Call `work` for each lane: for one in this thread, for several in threads of their own.

    Ctrl-C and SIGTERM ask the trials to stop after their step; a second one ends their workers at once.
    Raises KeyboardInterrupt if one came, and the first error of the threads, both after all have ended.
    """
    if len(lanes) == 1:
        with planned_stops(stop.ask):  # between two trials: each has handlers of its own
            work(lanes[0])
        if stop.is_by_signal:
            raise KeyboardInterrupt
        return
    threads = _Threads(lanes, work, stop)
    try:
        with planned_stops(stop.ask):
            threads.start()
            while threads.run(LOOK_SECONDS):
                stop.pass_on()
    except KeyboardInterrupt:
        stop.is_asked = stop.is_at_once = True
        stop.pass_on()
        for lane in lanes:
            lane.abort()
        while threads.run(LOOK_SECONDS):
            pass
        raise
    if threads.errors:
        raise threads.errors[0]
    if stop.is_by_signal:
        raise KeyboardInterrupt


class _Threads:
    """A thread for each lane. They are not joined: Python 3.11 takes a thread for ended whose join is interrupted."""

    def __init__(self, lanes: Sequence[Lane], work: Callable[[Lane], None], stop: Stop) -> None:
        self.errors: list[BaseException] = []
        self._work = work
        self._stop = stop
        self._left = list(lanes)
        self._one_ended = threading.Event()

    def start(self) -> None:
        """Start them all."""
        for lane in list(self._left):
            threading.Thread(target=self._run, args=(lane,), name="trials", daemon=True).start()

    def run(self, seconds: float) -> bool:
        """Whether any still runs, after a wait of some seconds or until one has ended."""
        if self._left:
            self._one_ended.wait(seconds)
            self._one_ended.clear()
        return bool(self._left)

    def _run(self, lane: Lane) -> None:
        try:
            self._work(lane)
        except KeyboardInterrupt:
            self._stop.ask("SIGTERM")  # it was asked before, but where `dp-ray stop` has stopped this run alone
        except BaseException as error:  # raised when all have ended
            self.errors.append(error)
            self._stop.is_asked = True
        finally:
            self._left.remove(lane)
            self._one_ended.set()
