"""`dp-ray watch`: serve the page of a run on localhost while it goes on; a token in the URL protects it.

Begin at `watch_page`.
"""

import hmac
import html
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dp_ray.errors import JobError
from dp_ray.report.page import page_of
from dp_ray.rundir.files import RUN
from dp_ray.rundir.listing import WATCH_SECONDS, watched
from dp_ray.storage import Storage

LIVE_SECONDS = 2.0
# A page is made again only after this many times what making it took.
REST = 4
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the URL holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
}


def watch_page(run: Storage, host: str, port: int, until_end: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, or until the run has ended; `say` gets its URL."""
    server = WatchServer(LivePage(run), host, port)
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    try:
        say(server.url)
        while not (until_end and watched(run).has_ended):
            time.sleep(WATCH_SECONDS[run.is_atomic])
    finally:
        server.shutdown()
        server.server_close()


class LivePage:
    """The page of a run, rendered again at most every few seconds, however many ask."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._page = b""
        self._due = 0.0
        self._is_last = False

    def page(self) -> bytes:
        """Return the page as it is now; the last one asks for no newer."""
        with self._lock:
            if time.monotonic() >= self._due and not self._is_last:
                began = time.monotonic()
                # Asked before the page is made: a run that ends meanwhile gets one more page, which shows its end.
                is_last = watched(self._run).has_ended
                try:
                    if self._run.exists(RUN):
                        page = page_of(self._run, None if is_last else LIVE_SECONDS)
                    else:
                        page = waiting_page(f"There is no run at {self._run} yet. This page waits for it.")
                except Exception as error:  # a damaged file of any kind, which may be whole at the next look
                    page = waiting_page(f"The page cannot be made: {type(error).__name__}: {error}")
                self._page = page.encode()
                self._is_last = is_last
                self._due = time.monotonic() + max(LIVE_SECONDS / 2, REST * (time.monotonic() - began))
            return self._page


def waiting_page(text: str) -> str:
    """Return a page with a line of text that reloads itself."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f'<link rel="icon" href="data:,">'
        f'<meta name="color-scheme" content="light dark"><title>waiting</title><p>{html.escape(text)}</p></html>'
    )


class WatchServer(ThreadingHTTPServer):
    """A server of one page at `url`; it refuses requests with another Host or path, or without the token."""

    daemon_threads = True

    def __init__(self, page: LivePage, host: str, port: int) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24)
        self.given_host = host
        try:
            if ":" in host:
                self.address_family = socket.AF_INET6
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise JobError(f"--host {host} --port {port}: cannot be served: {error}") from None

    @property
    def url(self) -> str:
        """The page's URL, with its token."""
        host = f"[{self.given_host}]" if ":" in self.given_host else self.given_host
        return f"http://{host}:{self.server_address[1]}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""

    def is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server; a foreign name may be a page's with its name rebound."""
        name = (urlsplit(f"//{host}").hostname or "").lower()
        if name in ("localhost", self.given_host.lower(), socket.gethostname().lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "dp_ray"
    sys_version = ""
    timeout = 30  # a client that sends nothing holds its thread no longer

    def do_GET(self) -> None:
        """Answer with the page, with 304 if the browser has it; HEAD without the page."""
        request = urlsplit(self.path)
        token = parse_qs(request.query).get("token", [""])[0]
        if not self.server.is_ours(self.headers.get("Host", "")):
            self._send(403, b"unknown Host\n")
        elif not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            # The comparison takes the same time wherever they differ.
            self._send(403, b"the URL's token is missing or wrong: take the URL that dp-ray watch printed\n")
        elif request.path != "/":
            self._send(404, b"there is only /\n")
        else:
            page = self.server.page.page()
            tag = f'"{sha256(page).hexdigest()[:32]}"'
            is_known = self.headers.get("If-None-Match") == tag
            self._send(304 if is_known else 200, b"" if is_known else page, {**HEADERS, "ETag": tag})

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {**HEADERS, "Content-Type": "text/plain; charset=utf-8"}).items():
            self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""
