"""`dp-ray watch`: the page of a run on localhost, or its state in the terminal."""

import threading
import time
from collections.abc import Callable

from dp_ray.storage import Storage
from dp_ray.watch.server import LivePage, WatchServer
from dp_ray.watch.snapshot import LOOK_SECONDS, Watched


def watch_page(run: Storage, host: str, port: int, until_end: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, or until the run has ended; `say` gets its URL."""
    watched = Watched(run)
    server = WatchServer(LivePage(run, lambda: watched.look().has_ended), host, port)
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    try:
        say(server.url)
        while not (until_end and watched.look().has_ended):
            time.sleep(LOOK_SECONDS[run.is_atomic])
    finally:
        server.shutdown()
        server.server_close()
