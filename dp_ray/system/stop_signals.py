"""SIGINT (Ctrl-C) and SIGTERM as planned stops: the first asks the run to stop, the second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def planned_stops(ask: Callable[[str], bool]) -> Iterator[Callable[[], object]]:
    """While the block runs, SIGINT and SIGTERM call `ask` with their name.

    If `ask` returns False, the handler raises KeyboardInterrupt. Yields what another thread calls to have the same
    happen; where no handler is, that only calls `ask`.
    `ask` runs inside a signal handler, so it must not wait for anything. Outside the main thread Python allows no
    handlers: there, `ask_others` calls it. An ignored signal stays ignored, like SIGINT in a shell's background job.
    """
    if threading.current_thread() is not threading.main_thread():
        with _listed(ask):
            yield lambda: ask("")
        return
    owner = os.getpid()

    def on_signal(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:
            _in_forked_process(number)
        elif not ask(signal.Signals(number).name):
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: before for number, before in handlers.items() if before not in (None, signal.SIG_IGN)}
    try:
        for number in taken:
            signal.signal(number, on_signal)
        yield lambda: os.kill(owner, max(taken)) if taken else ask("")
    finally:
        for number, before in taken.items():
            signal.signal(number, before)


_others: list[Callable[[str], bool]] = []  # what blocks of other threads than the main one want to be asked


@contextmanager
def _listed(ask: Callable[[str], bool]) -> Iterator[None]:
    _others.append(ask)
    try:
        yield
    finally:
        _others.remove(ask)


def ask_others(signal_name: str) -> None:
    """Ask what other threads run to stop, as a signal asks what the main thread runs; it may be asked again."""
    for ask in list(_others):
        ask(signal_name)


@contextmanager
def interrupts_after() -> Iterator[None]:
    """Ctrl-C within the block raises KeyboardInterrupt at its end, a second one at once.

    For imports: one that is interrupted leaves half a module, which fails in another way when it is used.
    """
    before = signal.getsignal(signal.SIGINT)
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@contextmanager
def handlers_kept() -> Iterator[None]:
    """After the block, restore the handlers that SIGINT and SIGTERM had before it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


def _in_forked_process(number: int) -> None:
    """Ignore SIGINT, since a terminal's Ctrl-C reaches forked processes too and the step needs them; obey SIGTERM."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
