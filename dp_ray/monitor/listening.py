"""Feeds the workers' messages to the monitor, in a thread of its own."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dp_ray.monitor.messages import Message
from dp_ray.monitor.monitor import Monitor

INTERRUPT_SECONDS = 10.0


@contextmanager
def listening(
    monitor: Monitor, receive: Callable[[bool], list[Message]], abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Feed the monitor in the background; when the block ends, all messages sent by then are taken in.

    `receive` gives the messages that have arrived; if its argument is True, it waits a moment for the first.

    If the monitor fails, as on a full disk, the block is aborted, and interrupted too if it runs on the main thread.
    The failure is then raised.
    """
    listener = Listener(monitor, receive, abort)
    try:
        listener.start()
        yield
    finally:
        listener.finish()
        if listener.failure is not None:
            raise listener.failure


class Listener(threading.Thread):
    """Feeds the monitor until it is told to finish; `failure` is what the monitor raised."""

    def __init__(self, monitor: Monitor, receive: Callable[[bool], list[Message]], abort: Callable[[], None]) -> None:
        super().__init__(name="monitor", daemon=True)
        self.failure: BaseException | None = None
        self._monitor = monitor
        self._receive = receive
        self._abort = abort
        self._ended = threading.Event()
        self._caller = threading.current_thread()

    def run(self) -> None:
        """Take in messages, also the last ones; if the monitor fails, abort the caller's block."""
        try:
            self._listen()
        except BaseException as error:
            self.failure = error
            self._monitor.planned_stop.is_closed = True
            self._interrupt()

    def finish(self) -> None:
        """Let the thread take in the last messages, and wait for it; its interrupt may arrive only here."""
        self._ended.set()
        while self.is_alive():
            try:
                self.join()
            except KeyboardInterrupt:
                if self.failure is None:
                    raise

    def _listen(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.is_set() or self._monitor.end.has_come
            for message in self._receive(not is_last):
                self._monitor.take(message)
            self._monitor.tick()

    def _interrupt(self) -> None:
        while not self._ended.is_set():
            self._abort()
            if self._caller is threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._ended.wait(INTERRUPT_SECONDS)  # a signal just before the block begins to wait is lost: repeat it
