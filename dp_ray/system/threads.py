"""Threads in the background, the task's waits for other workers, and signals as planned stops.

The task sets that it waits, and the heartbeat reports it: if one worker hangs, all others wait for it. The one that
does not wait is the cause. The first SIGINT (Ctrl-C), SIGTERM or SIGUSR2 asks the run to stop, the second ends it at
once.
"""

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dp_ray.errors import INTERRUPTED, LAUNCHERS_SIGNALS, stop_status
from dp_ray.system.linux import signal_actions_kept

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
IMPORT = "<frozen importlib._bootstrap>"  # the file of the frames that each import has
AGAIN_SECONDS = 0.01
_waits: list[str] = []  # innermost last; the task's thread alone writes
_call = 0, ""  # the task's thread alone writes
_others: list[Callable[[str], bool]] = []  # to ask for blocks in other threads than the main one
_askers: list[str] = []  # who asks by way of the next signals to this process
_accepted: list[str] = []  # who has asked blocks that have not ended, which said that they will stop


@contextmanager
def repeated(name: str, seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Repeat the call every so many seconds, in a thread of that name, while the block runs.

    The first call comes after the first interval. The end of the block waits for a call that is under way.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def if_longer(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Call once, in a thread, if the block takes longer than so many seconds."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark the task as waiting for `what`, which depends on other workers, while the block runs."""
    _waits.append(what)
    try:
        yield
    finally:
        _waits.pop()


def waits_for() -> str:
    """Return what the task waits for; "" if it does not wait for other workers."""
    innermost = _waits[-1:]  # in one read: the task's thread may leave its block meanwhile
    return innermost[0] if innermost else ""


def note_call(number: int, what: str) -> None:
    """Note the call that the task begins, of those that all workers make alike; 0 for none any more."""
    global _call
    _call = number, what


def last_call() -> tuple[int, str]:
    """Return the number and the name of the call that the task began last, of those that all workers make alike."""
    return _call


@contextmanager
def planned_stops(ask: Callable[[str], bool]) -> Iterator[Callable[[str], object]]:
    """While the block runs, the SIGNALS call `ask` with their name.

    If `ask` returns False, the handler raises KeyboardInterrupt. Yields what another thread calls with its own name
    to have the same happen; where no handler is, that only calls `ask`.
    `ask` runs inside a signal handler, so it must not wait for anything. Outside the main thread Python allows no
    handlers: there, `ask_others` calls it. An ignored signal stays ignored, like SIGINT in a shell's background job.
    A block within a block that is about to stop is asked when it begins.
    """
    if threading.current_thread() is not threading.main_thread():
        _others.append(ask)
        try:
            yield ask
        finally:
            _others.remove(ask)
        return
    owner, accepted_before = os.getpid(), list(_accepted)

    def on_signal(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:
            _in_forked_process(number)
            return
        _Program.num_signals += 1
        # Another thread may have sent the signal for somebody.
        name = _askers.pop(0) if _askers else signal.Signals(number).name
        if not ask(name):
            raise KeyboardInterrupt
        _accepted.append(name)

    def ask_as(name: str) -> None:
        if not taken:
            ask(name)
            return
        _askers.append(name)
        os.kill(owner, max(taken))

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: before for number, before in handlers.items() if before not in (None, signal.SIG_IGN)}
    try:
        for number in taken:
            signal.signal(number, on_signal)
        if not all(ask(name) for name in accepted_before):
            raise KeyboardInterrupt
        yield ask_as
    finally:
        _accepted[:] = accepted_before
        for number, before in taken.items():
            signal.signal(number, before)


def ask_others(signal_name: str) -> None:
    """Ask the runs of other threads to stop, as a signal asks the main thread's; it may be asked again."""
    for ask in list(_others):
        ask(signal_name)


class Terminated(KeyboardInterrupt):
    """The first signal is a launcher's, SIGTERM or SIGUSR2: nobody is there to be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_status = _Program.status_if_terminated


class _Program:
    """The state of the handlers of the program `dp-ray`."""

    pid = 0
    status_if_terminated = INTERRUPTED
    num_signals = 0
    has_begun = False
    is_done = False
    put_off: int | None = None  # the signal that is put off
    is_sent_again = False


RESUMED = ("run", "sweep", "evaluate", "predict", "retry", "node")  # the commands that may be run again


def interrupts(command: str) -> None:
    """For the program `dp-ray COMMAND`: from now on the SIGNALS raise KeyboardInterrupt, but not within an import.

    There Python prints errors of its own callbacks, or leaves half a module. As long as nothing `has_begun`, the
    process ends at once. Later the interrupt waits for the import's end, and a second one does not.
    """
    _Program.pid = os.getpid()
    _Program.status_if_terminated = stop_status(LAUNCHERS_SIGNALS[:1]) if command in RESUMED else INTERRUPTED
    _handle(_interrupt)


def has_begun() -> None:
    """From now on there is something to undo: a folder, a process, a run directory in use."""
    _Program.has_begun = True


def is_done() -> None:
    """The run is done: until another one begins, put off a launcher's first signal, since nothing is left to stop."""
    _Program.is_done = True


def raise_put_off() -> None:
    """Raise the interrupt that waits for the end of an import or for a run to begin, if there is one."""
    _Program.is_done = False
    if (number := _Program.put_off) is not None:
        _Program.put_off = None
        raise _interruption(number)


def ends_at_once(status: int) -> None:
    """From now on the SIGNALS end the process of `dp-ray`: it has undone what there was to undo, and has this status.

    So a launcher that ends it learns the job's status.
    """
    _Program.status_if_terminated = status
    _handle(_end)


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is in a shell's background job
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _Program.pid:
        _in_forked_process(number)
        return
    is_sent_again, _Program.is_sent_again = _Program.is_sent_again, False
    _Program.num_signals += not is_sent_again
    is_second = _Program.put_off is not None and not is_sent_again
    imports = frame
    while imports is not None and imports.f_code.co_filename != IMPORT:
        imports = imports.f_back
    if is_sent_again and _Program.put_off is None:
        return  # a second signal has been faster
    if _Program.is_done and _is_terminated(number):
        _Program.put_off = number
    elif is_second or imports is None:
        _Program.put_off = None
        raise _interruption(number)
    elif not _Program.has_begun:
        _end(number, frame)
    else:
        _Program.put_off = number
        _thread.start_new_thread(_send_again, (number,))  # not `threading`, whose locks the import may hold


def _is_terminated(number: int) -> bool:
    """Return whether this signal, the last that came, is a launcher's, and was the first of all."""
    return _Program.num_signals <= 1 and signal.Signals(number).name in LAUNCHERS_SIGNALS


def _interruption(number: int) -> KeyboardInterrupt:
    return Terminated() if _is_terminated(number) else KeyboardInterrupt()


def _send_again(number: int) -> None:
    time.sleep(AGAIN_SECONDS)
    _Program.is_sent_again = True
    os.kill(_Program.pid, number)


def _end(number: int, _: FrameType | None) -> None:
    if os.getpid() != _Program.pid:
        _in_forked_process(number)
    else:
        os.write(2, b"interrupted\n")
        is_launchers = signal.Signals(number).name in LAUNCHERS_SIGNALS
        os._exit(_Program.status_if_terminated if is_launchers else INTERRUPTED)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """After the block, restore the handlers that the SIGNALS had before it.

    Ray may set some in C too, in whichever thread connects: after them SIGTERM would abort the process.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with signal_actions_kept(SIGNALS):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


@contextmanager
def signals_put_off() -> Iterator[None]:
    """In the main thread, have one of the SIGNALS that comes within the block call its handler at the block's end.

    An exception in the midst of the block would leave half of what it makes. A second signal does not wait: it raises
    KeyboardInterrupt. Nothing is blocked, so the processes that the block starts get all signals.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    if threading.current_thread() is not threading.main_thread():
        taken = {}  # Python calls handlers in the main thread, which is elsewhere
    owner, came = os.getpid(), list[int]()

    def on_signal(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:
            _in_forked_process(number)
        elif came:
            came.clear()  # else the first would still be handled, as if it were alone
            raise KeyboardInterrupt
        else:
            came.append(number)

    try:
        for number in taken:
            signal.signal(number, on_signal)
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)


def _in_forked_process(number: int) -> None:
    """Ignore SIGINT and SIGUSR2, which reach forked processes too, since the step needs them; obey SIGTERM."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
