"""The secret of a storage URL is neither shown nor kept, and is no part of what a job is."""

from pathlib import Path
from typing import Any

import pytest

from dp_ray.errors import JobError, StorageError
from dp_ray.job import Job
from dp_ray.results.result import Result
from dp_ray.rundir.claim import claim
from dp_ray.secrets import hide
from dp_ray.storage import Storage


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:hush@bucket/a", "s3://bucket/a"),
        ("cannot read 's3://key:hush@bucket/a', nor 's3://b/c'", "cannot read 's3://bucket/a', nor 's3://b/c'"),
        ("s3://key:hu/sh@bucket/a@b", "s3://b"),
        ("s3://key:hush", "s3://"),
        ("s3://key:hu/sh", "s3://"),
        ("abfs://c@a.net/x?client_secret=hush&tls=true", "abfs://a.net/x?client_secret=(hidden)&tls=true"),
    ],
)
def test_secrets_are_taken_out(text: str, shown: str) -> None:
    assert hide(text) == shown
    assert hide(hide(text)) == hide(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a:b@c",
        "http://127.0.0.1:8265/x@y",
        "file:///home/me@here/x",
        "mock:///a?endpoint=localhost:9000",
        "http://[::1]:80/x",
        "a:b and c@d",
        "hdfs://host:8020/user@x",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert hide(text) == text


def job_of(secret: str, **keys: Any) -> Job:
    url = f"s3://key:{secret}@bucket/runs"
    dataset = {"target": "a:c", "args": {"url": url, "more": [url]}}
    values = {"model": "a:b", "dataset": dataset, "batch_size": 30, "storage": url, "init_from": f"{url}/x"}
    return Job.make({**values, **keys}, "job")


def test_the_secret_is_no_part_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("find_start", "check_start"):  # there is no such bucket
        monkeypatch.setattr(f"dp_ray.rundir.claim.{name}", lambda *_: None)
    job = job_of("hush")
    assert job.fingerprint() == job_of("other").fingerprint()
    assert job.storage == "s3://key:hush@bucket/runs"
    claim(job, Storage(str(tmp_path)))
    assert claim(job_of("other"), Storage(str(tmp_path))).is_resumed
    kept = (tmp_path / "job" / "run.json").read_text()
    assert "hush" not in kept and "s3://bucket/runs/x" in kept
    with pytest.raises(JobError) as raised:
        claim(job_of("hush", init_from="s3://key:hush@bucket/" + "y" * 90), Storage(str(tmp_path)))
    assert "hush" not in str(raised.value) + repr(job)


def test_errors_do_not_tell_it() -> None:
    storage = Storage("s3://key:hush@bucket/runs?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1")
    assert str(storage) == "s3://bucket/runs?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    assert "key:hush@" in storage.location and "key:hush@" in storage.child("a").location
    for bad in ("s3://key:hu/sh@bucket/runs", "s4://key:hush@bucket"):
        with pytest.raises(StorageError, match=r"storage 's\d://bucket") as raised:
            Storage(bad)
        assert "hush" not in str(raised.value) and "hu/sh" not in str(raised.value)
    with pytest.raises(JobError) as wrong:
        Job.make({"storage": ["s3://key:" + "hush" * 40 + "@bucket"]}, "job")
    assert "hush" not in str(wrong.value)


def test_a_result_is_read_with_the_secret_and_kept_without_it() -> None:
    location = "s3://key:hush@bucket/runs/run?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    result = Result(str(Storage(location)), "run", "predict", "done", location=location)
    assert result.storage().location == location
    assert "hush" not in repr(result) + str(result.to_json())
