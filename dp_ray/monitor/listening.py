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
    monitor: Monitor, receive: Callable[[], list[Message]], abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Feed the monitor in the background; when the block ends, all messages sent by then are taken in.

    If the monitor fails, as on a full disk, the block is aborted, and interrupted too if it runs on the main thread.
    The failure is then raised.
    """
    ended = threading.Event()
    trouble: list[BaseException] = []
    caller = threading.current_thread()

    def listen() -> None:
        try:
            while True:
                last = ended.is_set()
                for message in receive():
                    monitor.take(message)
                monitor.tick()
                if last:
                    return
        except BaseException as error:
            trouble.append(error)
            monitor.is_deaf = True
            while not ended.is_set():
                abort()
                if caller is threading.main_thread():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                ended.wait(INTERRUPT_SECONDS)  # a signal just before the block begins to wait is lost, so repeat it

    thread = threading.Thread(target=listen, name="monitor", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        _join_thread(thread, trouble)
        if trouble:
            raise trouble[0]


def _join_thread(thread: threading.Thread, trouble: list[BaseException]) -> None:
    """Wait for the thread; the interrupt that it sends may arrive only here."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            if not trouble:
                raise
