"""Runs on an object store: a real server of the S3 protocol, looked at by boto3."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.errors import StorageError
from dp_ray.job.job import Job
from dp_ray.outputs import parts
from dp_ray.storage import Storage
from dp_ray.tensors.files import read_tensors
from tests.support import forked, models
from tests.support.cluster import Cluster
from tests.support.group import StopsBefore, run_group, weights_of
from tests.support.s3 import IN_URL, SECRET, Server
from tests.support.trainings import job_of

OUTPUT_FILES = ("outputs/00000-of-00001.parquet", "outputs_manifest.json")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_project")]
MEGABYTE = 1 << 20


def predicting(server: Server, folder: str, **keys: Any) -> dict[str, Any]:
    dataset = {"target": "tests.support.models:Rows", "args": {"length": 101}}
    values = {"model": "tests.support.models:Linear", "dataset": dataset, "batch_size": 7, "shards": 3, "workers": 0}
    return {**values, "name": "run", "storage": server.url(folder), "quiet": True, **keys}


def training(server: Server, folder: str, **keys: Any) -> dict[str, Any]:
    given = {"task": "train", "model": "tests.support.training:mlp", "loss": "torch.nn:CrossEntropyLoss"}
    dataset = {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.0}}
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    values = {**given, "dataset": dataset, "optimizer": optimizer, "batch_size": 10, "shards": 3, "workers": 0}
    checkpoint = {"checkpoint": {"every_steps": 2}, "bitwise": True}
    return {**values, **checkpoint, "name": "run", "storage": server.url(folder), "quiet": True, **keys}


def fail(storage: Storage, size: int) -> None:
    with storage.writing("x") as stream:
        stream.write(b"x" * size)
        raise KeyboardInterrupt


def write_parts(storage: Storage, count: int) -> None:
    with storage.writing("x") as stream:
        for _ in range(count):
            stream.write(b"x" * 10 * MEGABYTE)


@pytest.mark.full(but=["26214400"])
@pytest.mark.parametrize("size", [0, 10, 25 * MEGABYTE])
def test_a_block_that_raises_leaves_no_object_nor_an_upload(server: Server, size: int) -> None:
    storage = Storage(server.url(f"raises-{size}"))
    with pytest.raises(KeyboardInterrupt):
        fail(storage, size)
    assert server.objects(f"raises-{size}") == {}
    storage.write_text("x", "old")
    with pytest.raises(KeyboardInterrupt):
        fail(storage, size)
    assert storage.read_text("x") == "old"
    storage.remove_unfinished()
    assert server.uploads(f"raises-{size}") == []


@pytest.mark.full
def test_a_program_that_ends_while_it_writes_completes_nothing(server: Server) -> None:
    code = f"""
from dp_ray.storage import Storage, UnfinishedFile
stream = UnfinishedFile(Storage({server.url("ends")!r}), "x")
stream.write(b"x" * {25 * MEGABYTE})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert server.objects("ends") == {}
    Storage(server.url("ends")).remove_unfinished()
    assert server.uploads("ends") == []


def test_uploads_are_removed_from_one_folder_or_all_below_it(server: Server) -> None:
    storage = Storage(server.url("cut"))
    storage.child("below").child("deep").write_text("x", "")
    storage.write_text("a", "")
    assert storage.entries() == {"a", "below"}
    for folder in (storage, storage.child("below"), Storage(server.url("cut-other"))):
        with pytest.raises(KeyboardInterrupt):
            fail(folder, 10)
    storage.remove_unfinished()
    assert (server.uploads("cut"), server.uploads("cut-other")) == (["below/x"], ["x"])
    storage.remove_unfinished(recursive=True)
    assert (server.uploads("cut"), server.uploads("cut-other")) == ([], ["x"])


def test_an_upload_that_the_store_cuts_is_an_error_and_no_file(server: Server) -> None:
    """The server refuses the fifth part."""
    with pytest.raises(StorageError, match="cannot write x"):
        write_parts(Storage(server.url("refused")), 8)
    assert server.objects("refused") == {}


@pytest.mark.full(but=["True"])
@pytest.mark.parametrize("named", [True, False])
def test_a_large_file_is_sent_once_and_never_copied(server: Server, named: bool) -> None:
    storage = Storage(server.url(f"large-{named}"))
    unfinished = storage.unnamed() if not named else None
    if unfinished:
        unfinished.write(b"x" * 30 * MEGABYTE)
        unfinished.commit("y")
    else:
        with storage.writing("y") as stream:
            stream.write(b"x" * 30 * MEGABYTE)
    assert server.objects(f"large-{named}") == {"y": 30 * MEGABYTE}
    assert server.sent(f"large-{named}/y") < 31 * MEGABYTE  # S3's own framing is some bytes a part
    assert server.copies() == []


def test_a_file_is_read_in_one_request(server: Server) -> None:
    """Else a file that is replaced meanwhile would be read in parts of two versions."""
    storage = Storage(server.url("counted"))
    with storage.writing("x") as stream:
        stream.write(b"xyz" * MEGABYTE)
    assert storage.read_bytes("x") == b"xyz" * MEGABYTE
    assert reads(server, "/counted/x") == 1


def reads(server: Server, path: str) -> int:
    """How often a file was read so far."""
    return sum(line.startswith("GET ") and path in line for line in server.log.read_text().splitlines())


@pytest.mark.full
def test_one_of_several_workers_reads_a_checkpoint(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keys = server.url("counted/once"), {"shards": 3, "bitwise": True, "checkpoint": {"every_steps": 4}}
    run_group(job_of("mlp", workers=3, **keys), url, StopsBefore(10))
    newest = max(Storage(url).child("checkpoints").numbered("step-{}.safetensors"))
    before = reads(server, f"/counted/once/checkpoints/{newest}")
    run_group(job_of("mlp", workers=3, **keys), url)
    assert reads(server, f"/counted/once/checkpoints/{newest}") == before + 1
    run_group(job_of("mlp", workers=1, **keys), tmp_path)
    got, expected = read_tensors(Storage(url), "weights.safetensors")[0], weights_of(tmp_path)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    last = list(Storage(url).child("checkpoints").numbered("step-{}.safetensors"))[-1]
    before = reads(server, f"/counted/once/checkpoints/{last}")
    run_group(job_of("mlp", workers=3, epochs=3, init_from=url, **keys), server.url("longer"))
    assert reads(server, f"/counted/once/checkpoints/{last}") == before + 2, (
        "once for the hash that is pinned, and once by all"
    )


def assert_ended(server: Server, run: str) -> None:
    """The files of a prediction that has ended are there, and no others."""
    left = {name for name in server.objects(run) if not name.startswith(("times/", "previews/"))}
    told = {"result.json", "run.json", "shapes.parquet", "report.html", "about.json"}
    assert left == {*OUTPUT_FILES, *told}


@pytest.mark.full
def test_a_predict_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    result = dp_ray.run(**predicting(server, "predict"))
    local = dp_ray.run(**predicting(server, "predict", storage=str(tmp_path)))
    assert result.outputs_sha256 == local.outputs_sha256
    assert torch.equal(result.outputs, local.outputs)
    assert_ended(server, "predict/run")
    assert (server.uploads("predict"), server.copies()) == ([], [])
    assert torch.equal(dp_ray.load(server.url("predict/run")).outputs, local.outputs)
    with pytest.raises(dp_ray.Error, match="holds this run, finished"):
        dp_ray.run(**predicting(server, "predict"))


@pytest.mark.full
def test_a_training_run(server: Server, tmp_path: Path) -> None:
    result = dp_ray.run(**training(server, "train"))
    local = dp_ray.run(**training(server, "train", storage=str(tmp_path)))
    assert result.weights_sha256 == local.weights_sha256
    others = ("tensorboard", "checkpoints", "times")
    left = {name for name in server.objects("train/run") if not name.startswith(others)}
    told = {"result.json", "run.json", "shapes.parquet", "report.html", "about.json"}
    assert left == {"metrics.parquet", "weights.safetensors", *told}
    assert (server.uploads("train"), server.copies()) == ([], [])


class Kills(models.SlowPairs):
    """Reading sample 70 kills the process, while the file `deadly` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 70 and (self.folder / "deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.full
def test_a_killed_driver_is_resumed(server: Server, tmp_path: Path) -> None:
    dataset = {"target": "tests.driver.test_runs_on_s3:Kills", "args": {"folder": str(tmp_path)}}
    keys = training(server, "killed", dataset=dataset)
    (tmp_path / "deadly").touch()
    killed = forked.ended(forked.run_job, keys)
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "deadly").unlink()
    with pytest.raises(KeyboardInterrupt):  # an upload that the killed driver left
        fail(Storage(server.url("killed/run/checkpoints")), 10)
    result = dp_ray.run(**keys)
    undisturbed = dp_ray.run(**training(server, "undisturbed", dataset=dataset))
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert len(result.interruptions) == 1
    assert server.uploads("killed") == []


@pytest.mark.full
def test_the_secret_is_neither_shown_nor_kept(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    job = training(server, "secret", quiet=False)
    result = dp_ray.run(**job)
    again = predicting(
        server, "secret", name="again", init_from=server.url("secret/run"), model="tests.support.training:mlp"
    )
    dataset = {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.0}}
    dp_ray.run(**{**again, "dataset": dataset, "inputs": "first", "quiet": False})
    with pytest.raises(dp_ray.Error, match="holds this run, finished") as finished:
        dp_ray.run(**job)
    assert server.objects("secret/again")
    told = "".join(capfd.readouterr()) + str(finished.value) + repr(result) + str(result.to_json())
    for name in server.objects("secret"):
        told += (
            server.client().get_object(Bucket="bucket", Key=f"secret/{name}")["Body"].read().decode(errors="replace")
        )
    assert "secret/run" in told
    assert SECRET not in told and IN_URL not in told
    assert result.weights and dp_ray.load(server.url("secret/run")).weights


@pytest.mark.full
def test_two_workers_merge_their_parts(server: Server) -> None:
    values = predicting(server, "group", workers=2, shards=2)
    del values["quiet"]
    run_group(Job.make(values, "run"), server.url("group/run"))
    assert server.objects("group/run/parts") == {}
    (name,) = server.objects("group/run/outputs")
    assert pq.read_metadata(Storage(server.url("group/run/outputs")).open(name)).num_rows == 101
    assert (server.uploads("group"), server.copies()) == ([], [])


@pytest.mark.ray
def test_a_run_through_ray(
    server: Server, tmp_path: Path, cluster: Cluster, session: "dp_ray.Session", capfd: pytest.CaptureFixture[str]
) -> None:
    result = session.run(**predicting(server, "ray", workers=2))
    local = dp_ray.run(**predicting(server, "ray", storage=str(tmp_path)))
    assert result.outputs_sha256 == local.outputs_sha256
    assert_ended(server, "ray/run")
    assert (server.uploads("ray"), server.copies()) == ([], [])
    logs = [path for path in (cluster.folder / "session_latest" / "logs").rglob("*") if path.is_file()]
    told = "".join(path.read_text(errors="replace") for path in logs) + "".join(capfd.readouterr())
    assert len(logs) > 5
    assert SECRET not in told and IN_URL not in told


@pytest.mark.full
def test_pieces_of_a_sharded_training_and_a_damaged_one(server: Server, tmp_path: Path) -> None:
    """3 workers end early; 2 go on from the checkpoint before the damaged one, to the bits of one process."""
    url = server.url("pieces")
    run = Storage(url)
    keys = {"shards": 3, "bitwise": True, "checkpoint": {"every_steps": 4, "keep": 2}}
    run_group(job_of("mlp", workers=1, **keys), tmp_path)
    run_group(job_of("mlp", workers=3, strategy="fsdp", **keys), url, StopsBefore(10))
    pieces = sorted(name for name in server.objects("pieces") if "/pieces/" in name)
    assert pieces == [
        f"checkpoints/pieces/step-{step}.{rank}-of-3.safetensors" for step in (4, 8) for rank in range(3)
    ]
    folder = run.child("checkpoints/pieces")
    data = folder.read_bytes("step-8.1-of-3.safetensors")
    with folder.writing("step-8.1-of-3.safetensors") as stream:
        stream.write(data[:-1] + b"?")
    told = run_group(job_of("mlp", workers=2, strategy="fsdp", **keys), url)
    assert any("checkpoint step-8.safetensors is ignored" in getattr(one, "text", "") for one in told)
    got, _ = read_tensors(run, "weights.safetensors")
    expected = weights_of(tmp_path)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    begun = job_of("mlp", workers=2, strategy="fsdp", epochs=3, init_from=url, **keys)
    run_group(begun, server.url("begun"))
    assert len(Storage(server.url("begun")).child("checkpoints/pieces").names()) == 4
