"""A server of the S3 protocol on localhost: moto's, as a process. It refuses copies, as S3 does above 5 GiB.

Of the requests that read below a folder `shaky`, only each third one is answered well: one gets an error, one is slow
and its connection breaks.
"""

import contextlib
import itertools
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

from tests.support.cluster import free_port, wait_for_port

SECRET = f"hush/{secrets.token_hex(8)}+hush"  # its text stands in no file of the project
IN_URL = SECRET.replace("/", "%2F").replace("+", "%2B")


@dataclass(frozen=True)
class Server:
    """A started server with a bucket; `log` holds a line for each request that writes: method, path, bytes."""

    port: int
    log: Path

    def url(self, folder: str) -> str:
        options = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        return f"s3://key:{IN_URL}@bucket/{folder}?{options}"

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="key",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def objects(self, folder: str) -> dict[str, int]:
        """The size of each object below the folder, but the empty ones that stand for folders."""
        found = self.client().list_objects_v2(Bucket="bucket", Prefix=f"{folder}/").get("Contents", [])
        named = {one["Key"].removeprefix(f"{folder}/"): one["Size"] for one in found}
        return {name: size for name, size in named.items() if name and not name.endswith("/")}

    def uploads(self, folder: str) -> list[str]:
        """The keys of the unfinished uploads below the folder."""
        found = self.client().list_multipart_uploads(Bucket="bucket", Prefix=f"{folder}/").get("Uploads", [])
        return [one["Key"].removeprefix(f"{folder}/") for one in found]

    def sent(self, path: str) -> int:
        """The bytes that were sent to objects whose path holds `path`."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return sum(int(size) for _, there, size in lines if path in there)

    def copies(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("COPY")]


@contextlib.contextmanager
def serving(log: Path) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    port = free_port()
    log.touch()
    with (
        log.with_suffix(".err").open("wb") as trouble,
        subprocess.Popen([sys.executable, "-m", "tests.support.s3", str(port), str(log)], stderr=trouble) as process,
    ):
        try:
            wait_for_port(port, process)
            server = Server(port, log)
            server.client().create_bucket(Bucket="bucket")
            yield server
        finally:
            process.kill()


def _serve(port: int, log: Path) -> None:
    turns = itertools.count()
    inner = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        if is_copy or environ["REQUEST_METHOD"] == "PUT":
            with log.open("a") as lines:
                method = "COPY" if is_copy else "PUT"
                lines.write(f"{method} {environ['PATH_INFO']} {environ.get('CONTENT_LENGTH') or 0}\n")
        if is_copy or parse_qs(environ["QUERY_STRING"]).get("partNumber") == ["13"]:
            start_response("400 Bad Request", [])  # an object too large for a copy, and an upload that breaks
            return [b"<Error><Code>EntityTooLarge</Code></Error>"]
        if environ["REQUEST_METHOD"] == "GET" and "/shaky/" in environ["PATH_INFO"]:
            match next(turns) % 3:
                case 0:
                    start_response("500 Internal Server Error", [])
                    return [b"<Error><Code>InternalError</Code></Error>"]
                case 1:
                    time.sleep(0.3)
                    environ["werkzeug.socket"].close()
                    return []
        return inner(environ, start_response)

    run_simple("127.0.0.1", port, application, threaded=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
