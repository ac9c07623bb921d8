"""moto's server of the S3 protocol. It refuses copies, as S3 does above 5 GiB, and the fifth part of an upload.

Of eight requests that read below a folder `shaky` one gets an error, one breaks after a while, one ends in the middle
of its answer, and five are answered. Below a folder `broken` all get an error while a file beside the log is there,
whose name ends in `.broken`. Below a folder `counted` reads are logged too.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

ERROR = b"<Error><Code>InternalError</Code></Error>"
Application = Callable[[dict[str, Any], Any], Any]


def serve(port: int, log: Path) -> None:
    """Serve until the process is killed; log each request that writes, and each that gets no good answer."""
    turns = itertools.count()
    inner = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        trouble = _trouble(method, path, turns, log.with_suffix(".broken"))
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        if trouble or is_copy or method == "PUT" or (method == "GET" and "/counted/" in path):
            with log.open("a") as lines:
                lines.write(
                    f"{'COPY' if is_copy else trouble or method} {path} {environ.get('CONTENT_LENGTH') or 0}\n"
                )
        if trouble:
            return ANSWERS[trouble](inner, environ, start_response)
        if is_copy or parse_qs(environ["QUERY_STRING"]).get("partNumber") == ["5"]:
            start_response("400 Bad Request", [])  # an object too large for a copy, and an upload that breaks
            return [b"<Error><Code>EntityTooLarge</Code></Error>"]
        return inner(environ, start_response)

    run_simple("127.0.0.1", port, application, threaded=True)


def _trouble(method: str, path: str, turns: Iterator[int], broken: Path) -> str:
    """What befalls a request; nothing, mostly."""
    if method == "GET" and "/broken/" in path and broken.exists():
        return "FAIL"
    if method == "GET" and "/shaky/" in path:
        return ["FAIL", "CUT", "", "", "", "HALF", "", ""][next(turns) % 8]
    return ""


def _fail(inner: Application, environ: dict[str, Any], start_response: Any) -> Any:
    start_response("500 Internal Server Error", [])
    return [ERROR]


def _cut(inner: Application, environ: dict[str, Any], start_response: Any) -> Any:
    time.sleep(0.2)
    environ["werkzeug.socket"].close()
    return []


def _half(inner: Application, environ: dict[str, Any], start_response: Any) -> Any:
    """Half of the answer, which was to be whole by its length; the connection ends then."""
    answer = b"".join(inner(environ, start_response))
    return [answer[: len(answer) // 2]]


ANSWERS = {"FAIL": _fail, "CUT": _cut, "HALF": _half}


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
