"""The secret of a storage URL is neither shown nor kept, and is no part of what a job is."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.errors import Error, JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.results.result import Result
from dp_ray.storage import Storage
from dp_ray.text import hide, hide_in
from dp_ray.trackers.feed import about_run
from tests.support.builders import run_dir_of
from tests.support.cli import status_of
from tests.support.sources import nodes_of
from tests.support.training import Pairs


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:hush@bucket/a", "s3://bucket/a"),
        ("cannot read 's3://key:hush@bucket/a', nor 's3://b/c'", "cannot read 's3://bucket/a', nor 's3://b/c'"),
        ("s3://key:hu/sh@bucket/a@b", "s3://b"),
        ("s3://key:hush", "s3://"),
        ("s3://key:hu/sh", "s3://"),
        ("abfs://c@a.net/x?client_secret=hush&tls=true", "abfs://a.net/x?client_secret=(hidden)&tls=true"),
        ("s3://key:12/hush@bucket/a", "s3://bucket/a"),
        ("s3://AKIAIOSFODNN7EXAMPLE:1/hush", "s3://"),
        ("https://h/x?X-Amz-Expires=9&X-Amz-Signature=hush", "https://h/x?X-Amz-Expires=9&X-Amz-Signature=(hidden)"),
        ("no url: /x?X-Amz-Security-Token=hush", "no url: /x?X-Amz-Security-Token=(hidden)"),
        ("https://h/x?X-Goog-Signature=hush'", "https://h/x?X-Goog-Signature=(hidden)'"),
        ("https://a.net/c?sv=1&sig=hush%3D&se=2", "https://a.net/c?sv=1&sig=(hidden)&se=2"),
        ("https://h/x?api_key=hush and ?auth=hush", "https://h/x?api_key=(hidden) and ?auth=(hidden)"),
        ("connect(api_key='hush', secure=True)", "connect(api_key='(hidden)', secure=True)"),
        ("{'db.password': 'hush'}", "{'db.password': '(hidden)'}"),
        ("AccountName=a;AccountKey=hush==;x", "AccountName=a;AccountKey=(hidden);x"),
        ("{'Authorization': 'Bearer hush'}", "{'Authorization': 'Bearer (hidden)'}"),
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
        "s3://localhost:9000/bucket/a@b",
        "s3://minio.local:9000/bucket/a@b",
        "https://h.org: no such host",
        "s3://bucket: cannot be listed",
        "/data/12345/x@y and 2024/01",
        "commit 12345/3f2a9c1d0b",
        "Client(auth=False, token=None, password=None)",
        "https://h/x?auth=False&key=name&author=me&design=2",
        "api_key: must be a text, got int",
        "max_tokens=512, pad_token='<pad>'",
        "password=getpass(prompt)",
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
    monkeypatch.setattr("dp_ray.rundir.claim.check_start", lambda *_: None)  # there is no such bucket
    job = job_of("hush")
    assert job.fingerprint() == job_of("other").fingerprint()
    assert job.storage == "s3://key:hush@bucket/runs"
    run_dir_of(tmp_path, job)
    assert run_dir_of(tmp_path, job_of("other")).is_resumed
    kept = (tmp_path / "job" / "run.json").read_text()
    assert "hush" not in kept and "s3://bucket/runs/x" in kept
    with pytest.raises(JobError) as raised:
        run_dir_of(tmp_path, job_of("hush", init_from="s3://key:hush@bucket/" + "y" * 90))
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


def test_keys_are_hidden_too_and_none_is_lost() -> None:
    told = {"s3://key:a@b": 1, "s3://key:c@b": 2, "api_key": "hush", "password": "", "secret": 3, 4: ["s3://k:x@y"]}
    shown = {"s3://b": 1, "s3://b (2)": 2, "api_key": "(hidden)", "password": "", "secret": 3, 4: ["s3://y"]}
    assert hide_in(told) == shown == hide_in(shown)


MARK = "hush-7f3a"  # in each secret that is planted
KINDS = (
    "s3://KEY:{}@bucket/x",
    "s3://KEY:12/{}@bucket/x",
    "https://user:{}@host/x",
    "https://{}@host/x",
    "https://b.s3.amazonaws.com/x?X-Amz-Expires=60&X-Amz-Signature={}",
    "https://b.s3.amazonaws.com/x?X-Amz-Security-Token={}&y=1",
    "/path?X-Goog-Signature={}",
    "https://a.blob.core.windows.net/c?sv=1&sig={}&se=2",
    "https://host/x?api_key={}",
    "https://host/x?auth={}",
    "postgresql://user:{}@db/x?sslmode=require",
    "api_key={}",
    "AccountKey={};EndpointSuffix=x",
)
SECRETS = [one.format(f"{MARK}-{number}") for number, one in enumerate(KINDS)]


class Telling(Pairs):
    """Pairs whose sample 5 tells a secret in its error, each epoch another one, and is set aside."""

    def __init__(self, secrets: list[str], by_name: dict[str, int], api_key: str, fails: bool = False) -> None:
        super().__init__()
        assert secrets == SECRETS and list(by_name) == SECRETS and api_key == f"{MARK}-key", "a run has its secrets"
        self.secrets, self.fails = secrets, fails

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 5 or self.fails:
            raise ValueError("cannot read " + " nor ".join(self.secrets))
        inputs, target = super().__getitem__(index)
        return inputs, target


def planted(folder: Path, **keys: Any) -> str:
    """A job file with secrets wherever it may hold texts."""
    args = {"secrets": SECRETS, "by_name": dict.fromkeys(SECRETS, 1), "api_key": f"{MARK}-key"}
    job = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.test_secrets:Telling", "args": args},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "batch_size": 32,
        "workers": 0,
        "shards": 1,
        "on_error": {"quarantine": 3},
        "storage": str(folder / "runs"),
        "env": {"A_TOKEN": f"{MARK}-env", "A_URL": SECRETS[0]},
    }
    (folder / "job.yaml").write_text(json.dumps({**job, **keys}))
    return str(folder / "job.yaml")


def texts_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """All that the files in a folder hold, as text."""
    for path in sorted(folder.rglob("*")):
        yield path, path.name
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            yield path, f"{table.schema.metadata} {table.to_pylist()}"
        if path.is_file():
            yield path, path.read_bytes().decode(errors="replace")


def check_no_secret(folder: Path, said: str) -> None:
    leaks = {str(path.relative_to(folder)) for path, text in texts_below(folder) if MARK in text}
    assert not leaks
    assert MARK not in said, said[max(0, said.index(MARK) - 300) : said.index(MARK) + 100]


def test_what_a_run_leaves_behind_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], in_project: Path
) -> None:
    job, runs = planted(tmp_path), tmp_path / "runs"
    monkeypatch.setattr("sys.orig_argv", ["dp-ray", "run", job, "--set", f"dataset.args.api_key={MARK}-key"])
    note = ("--set", f"env.B_URL={SECRETS[1]}")
    assert status_of(monkeypatch, "run", job, "--name", "one", "--json", *note) == 0
    assert status_of(monkeypatch, "run", job, "--name", "two", "--set", "dataset.args.fails=true") == 1
    (runs / "two" / "parts" / "kept").touch()  # else the next one would replace it
    assert status_of(monkeypatch, "run", job, "--name", "two", *note) == 2, "another job: its error tells both"
    runs_told = [str(runs / "one"), str(runs / "two")]
    over = ("--over", f"init_from={SECRETS[0]},{SECRETS[4]}")
    assert status_of(monkeypatch, "sweep", job, *over, "--name", "swept", "--json") in (0, 1, 2)
    for command in (
        *(
            ["list", str(runs)],
            ["list", str(runs), "--json"],
            ["compare", *runs_told],
            ["compare", *runs_told, "--json"],
        ),
        *(["plan", job], ["plan", job, "--json"], ["report", runs_told[0]], ["report", runs_told[1], "--json"]),
        *(
            ["report", runs_told[1]],
            ["watch", runs_told[1]],
            ["compare", *runs_told, "--html", f"{runs}/c.html"],
        ),
    ):
        assert status_of(monkeypatch, *command) == 0, command
    for bad in (f"workers={SECRETS[0]}", f"batch_size={SECRETS[4]}", f"task={SECRETS[7]}", f"{SECRETS[5]}=1"):
        assert status_of(monkeypatch, "plan", job, "--set", bad) == 2
    assert status_of(monkeypatch, "report", SECRETS[0]) != 0
    assert status_of(monkeypatch, "replay", "--step", SECRETS[11], "x") == 2
    address = ("--address", "http://127.0.0.1:1")
    assert status_of(monkeypatch, "submit", job, "--set", f"dataset.args.secrets=['{SECRETS[5]}']", *address) == 2
    out, errors = capfd.readouterr()
    (tmp_path / "job.yaml").unlink()
    check_no_secret(tmp_path, out + errors)
    (aside,) = pq.read_table(runs / "one" / "quarantine.parquet").to_pylist()
    assert "s3://bucket/x nor" in aside["message"] and "X-Amz-Signature=(hidden)" in aside["traceback"]
    page = (runs / "one" / "report.html").read_text()
    assert "X-Amz-Signature=(hidden)" in page
    described = json.loads((runs / "one" / "run.json").read_text())["job"]
    assert MARK not in str(about_run(described, str(runs / "one")))


def test_what_an_earlier_version_has_kept_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], in_project: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        assert status_of(monkeypatch, "run", planted(tmp_path), "--name", name, "--quiet") == 0
        claimed = json.loads((runs / name / "run.json").read_text())
        claimed["job"]["dataset"]["args"]["secrets"] = [f"{one}{name}" for one in SECRETS]
        claimed["job"]["dataset"]["args"]["by_name"] = dict.fromkeys(SECRETS, name)
        (runs / name / "run.json").write_text(json.dumps(claimed))
        result = json.loads((runs / name / "result.json").read_text())
        result |= {"status": "failed", "error": f"ValueError: {SECRETS[4]}"}
        (runs / name / "result.json").write_text(json.dumps(result))
    both = [str(runs / "one"), str(runs / "two")]
    capfd.readouterr()
    for command in (
        ["list", str(runs)],
        ["list", str(runs), "--json"],
        ["compare", *both],
        ["compare", *both, "--json"],
    ):
        assert status_of(monkeypatch, *command) == 0
    for command in (
        ["report"],
        ["report", "--json"],
        ["report", "--html", f"{tmp_path}/page.html"],
        ["watch"],
    ):
        assert status_of(monkeypatch, command[0], both[0], *command[1:]) == 0
    assert MARK not in "".join(capfd.readouterr())
    assert MARK not in (tmp_path / "page.html").read_text()
    assert MARK not in str(about_run(json.loads((runs / "one" / "run.json").read_text())["job"], both[0]))


def test_a_run_that_goes_on_has_its_secrets_still(tmp_path: Path, in_project: Path) -> None:
    """Telling checks them when it is made."""
    job = planted(tmp_path, epochs=2)
    assert dp_ray.run(job, name="run", epochs=1, quiet=True).status == "done"
    resumed = dp_ray.run(job, name="run", quiet=True)
    assert (resumed.status, len(resumed.history)) == (
        "done",
        2 * len(dp_ray.run(job, name="b", epochs=1, quiet=True).history),
    )


def test_a_job_that_is_made_of_a_run_wants_what_that_has_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], in_project: Path
) -> None:
    assert status_of(monkeypatch, "run", planted(tmp_path), "--name", "run", "--quiet") == 0
    assert status_of(monkeypatch, "evaluate", str(tmp_path / "runs" / "run"), "--quiet") == 2
    says = capfd.readouterr().err
    assert "dataset.args.secrets held a secret, which no file of the run holds" in says
    assert "give it again (--set dataset.args.secrets=...)" in says


def test_errors_and_their_notes_tell_none() -> None:
    for secret in SECRETS:
        error = Error(f"cannot read {secret}")
        error.add_note(f"a frame: {secret}")
        assert MARK not in str(error) + str(error.__notes__)


# Files of numbers and of names that dp_ray gives; those of set-aside samples carry data, and hide what tells of it.
PLAIN_JSON = {"rundir/lease.py", "outputs/files.py", "system/process.py", "rundir/quarantine.py"}
PLAIN_JSON |= {"tasks/setup.py"}  # whose keys `form_of` hides


def test_every_text_goes_through_what_hides() -> None:
    """A line of the command line is `harmless(...)` or `json_text(...)`, or what those have made."""
    package = Path(dp_ray.__file__).parent
    bare = []
    for path in sorted((package / "cli").glob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.echo":
                told = ast.unparse(node.args[0])
                if not any(
                    hides in told for hides in ("harmless(", "json_text(", "hide(", "json_schema(", "'no job")
                ):
                    bare.append(f"{path.name}:{node.lineno}: {told}")
    assert not bare
    for path in sorted(package.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("write_text"):
                assert "json.dumps" not in ast.unparse(node) or path.relative_to(package).as_posix() in PLAIN_JSON, (
                    f"{path}:{node.lineno}"
                )
