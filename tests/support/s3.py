"""A server of the S3 protocol on localhost, as a process: tests/support/s3_server.py."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

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
        # A key may hold spaces.
        lines = [line.partition(" ")[2].rsplit(" ", 1) for line in self.log.read_text().splitlines()]
        return sum(int(size) for there, size in lines if path in there)

    def copies(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("COPY")]


@contextlib.contextmanager
def serving(log: Path) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    port = free_port()
    line = [sys.executable, "-m", "tests.support.s3_server", str(port), str(log)]
    log.touch()
    with (
        log.with_suffix(".err").open("wb") as trouble,
        subprocess.Popen(line, stderr=trouble) as process,
    ):
        try:
            wait_for_port(port, process)
            server = Server(port, log)
            server.client().create_bucket(Bucket="bucket")
            yield server
        finally:
            process.kill()
