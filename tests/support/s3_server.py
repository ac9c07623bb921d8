"""moto's server of the S3 protocol. It refuses copies, as S3 does above 5 GiB, and the fifth part of an upload.

Of three requests that read below a folder `shaky` one gets an error, one breaks after a while, and one is answered.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple


def serve(port: int, log: Path) -> None:
    """Serve until the process is killed; log each request that writes."""
    turns = itertools.count()
    inner = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        is_shaky = environ["REQUEST_METHOD"] == "GET" and "/shaky/" in environ["PATH_INFO"]
        turn = next(turns) % 3 if is_shaky else 2
        if is_copy or turn < 2 or environ["REQUEST_METHOD"] == "PUT":
            with log.open("a") as lines:
                method = "COPY" if is_copy else ["FAIL", "CUT", "PUT"][turn]
                lines.write(f"{method} {environ['PATH_INFO']} {environ.get('CONTENT_LENGTH') or 0}\n")
        if turn == 0:
            start_response("500 Internal Server Error", [])
            return [b"<Error><Code>InternalError</Code></Error>"]
        if turn == 1:
            time.sleep(0.3)
            environ["werkzeug.socket"].close()
            return []
        if is_copy or parse_qs(environ["QUERY_STRING"]).get("partNumber") == ["5"]:
            start_response("400 Bad Request", [])  # an object too large for a copy, and an upload that breaks
            return [b"<Error><Code>EntityTooLarge</Code></Error>"]
        return inner(environ, start_response)

    run_simple("127.0.0.1", port, application, threaded=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
