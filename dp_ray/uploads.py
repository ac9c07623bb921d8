"""Abort unfinished multipart uploads of S3, with boto3 if it is installed: pyarrow cannot abort them."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


def abort_uploads(location: str, path: str, recursive: bool) -> None:
    """Abort the unfinished uploads directly in the folder `path` (BUCKET/KEYS), or with `recursive` also below it.

    Without boto3, or without the right to list uploads, they stay. They are not objects, but S3 charges for them.
    `location` is the folder's URL, with its secrets.
    """
    if importlib.util.find_spec("boto3") is None:
        return
    failures = importlib.import_module("botocore.exceptions")
    bucket, _, folder = path.partition("/")
    try:
        client = _client(location)
        for upload in list(_uploads(client, bucket, f"{folder.rstrip('/')}/")):
            if recursive or "/" not in upload["Key"][len(folder.rstrip("/")) + 1 :]:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except (failures.BotoCoreError, failures.ClientError):
        return


def _client(location: str) -> Any:
    """An S3 client with the options that pyarrow reads from the same URL, and boto3's defaults for the others."""
    url = urlsplit(location)
    options = {name: values[-1] for name, values in parse_qs(url.query).items()}
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    return importlib.import_module("boto3").client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region"),
        aws_access_key_id=unquote(url.username) if url.username else None,
        aws_secret_access_key=unquote(url.password) if url.password else None,
    )


def _uploads(client: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        yield from page.get("Uploads", ())
