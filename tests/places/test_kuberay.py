"""A job as a RayJob: what it says, that KubeRay's schema takes it, and that its entrypoint does what it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import dp_ray
from dp_ray.cli import main
from dp_ray.cli.in_kubernetes import run_unless_ended
from dp_ray.cluster.internals.variables import JOB_STOP_WAIT, VARIABLES
from dp_ray.cluster.submit import Dashboard
from dp_ray.places.kuberay import ID, LAST_END_JSON, LONGEST, LastEnd, final_status, kubernetes_name
from dp_ray.rundir.lease import held
from dp_ray.storage import Storage
from tests.support.cli import status_of
from tests.support.cluster import ROOT, Cluster
from tests.support.hosts import hosts
from tests.support.within import within

CRD = "DP_RAY_RAYJOB_CRD"  # where KubeRay's ray.io_rayjobs.yaml is
SCHEMA = Path(__file__).with_name("rayjob_schema.yaml")  # of the keys that we set, as KubeRay 1.6 has them
IMAGE = "registry.example/team/dp-ray:1"
ALL = [
    *("--claim", "shared", "--nodes", "2", "--gpus-per-node", "8", "--workers", "4:16", "--code-in", "/app"),
    *("--set", "shards=32"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with jobs and what is not to be sent."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(ROOT / "jobs", "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    Path(".gitignore").write_text("*.bin\n")
    Path("large.bin").write_bytes(b"0" * 1000)
    return tmp_path / "work"


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    capsys.readouterr()
    main.cli(["kuberay", "jobs/digits.yaml", "--image", IMAGE, *args], standalone_mode=False)
    return yaml.safe_load(capsys.readouterr().out)


def test_the_manifest_of_all_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = printed(capsys, *ALL)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"] == {"name": "digits"}
    spec = job["spec"]
    assert spec["entrypoint"] == (
        "python -m dp_ray.cli.in_kubernetes /app/jobs/digits.yaml --workers 4:16 --set shards=32 "
        "--name digits --storage /storage/runs"
    )
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] == 20
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment["env_vars"].pop(ID)
    assert environment == {"env_vars": {JOB_STOP_WAIT: "600", "PYTHONPATH": "/app"}}
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == version("ray")
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 2)
    assert head["rayStartParams"] == {"num-cpus": "0"}
    for template, limits in (
        (head["template"]["spec"], {"cpu": "2", "memory": "16Gi"}),
        (group["template"]["spec"], {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 8}),
    ):
        (container,) = template["containers"]
        assert container["image"] == IMAGE
        assert container["resources"] == {"limits": limits}, "what a pod requests is its limits, if nothing is given"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        assert volumes[mounts["/storage"]]["persistentVolumeClaim"] == {"claimName": "shared"}
        assert template["terminationGracePeriodSeconds"] > 600
    assert head["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == (
        ["python", "-m", "dp_ray", "stop", "--run-again", "/storage/runs/digits"]
    )
    assert group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == (
        ["python", "-m", "dp_ray.places.pod", "600"]
    )
    assert printed(capsys, *ALL)["spec"]["runtimeEnvYAML"] != spec["runtimeEnvYAML"], "each printing draws an id"


def test_the_code_may_be_a_zip_that_ray_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = printed(capsys, "--storage", "s3://b/runs", "--code-in", "s3://b/code.zip")["spec"]
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment["working_dir"] == "s3://b/code.zip" and "PYTHONPATH" not in environment["env_vars"]
    assert spec["entrypoint"].startswith("python -m dp_ray.cli.in_kubernetes jobs/digits.yaml ")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--code-in", "/a"],
            "storage: runs is a folder of this machine, and pods share none; give --storage s3://",
        ),
        (
            ["--storage", "s3://b/runs", "--claim", "c", "--code-in", "/a"],
            "--claim c: the storage is s3://b/runs, so no claim is needed",
        ),
        (
            ["--storage", "/data", "--claim", "c", "--code-in", "/a"],
            "/data is not below /storage, where the pods mount the claim c",
        ),
        (["--storage", "s3://K:S@b/runs", "--code-in", "/app"], "--storage s3://b/runs: a secret would stand in the"),
        (
            ["--set", "env.TOKEN=abc", "--storage", "s3://b/r", "--code-in", "/a"],
            "env.TOKEN=.not shown.' .*: a secret",
        ),
        (["--storage", "s3://b/r", "--code-in", "/a", "--nodes", "0"], "--nodes.: 0 is not in the range x>=1"),
        (["--claim", "c"], "Missing option '--code-in'"),
        *(
            (["--storage", "s3://b/r", "--code-in", "/a", option, name], f"{option} {name}: must be ")
            for option, name in [
                ("--claim", "S3_KEYS"),
                ("--claim", "-a"),
                ("--image", "team/Image:1"),
                ("--image", "team/image:1 "),
            ]
        ),
    ],
)
def test_what_pods_cannot_do_is_told(
    args: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "kuberay", "jobs/digits.yaml", "--image", IMAGE, *args) == 2
    told = capsys.readouterr()
    assert re.search(says, told.err), told.err
    assert told.out == ""


def test_names_of_jobs() -> None:
    assert kubernetes_name("run_20.Nov") == "run-20-nov"
    long = [kubernetes_name("x" * (LONGEST - 1) + end) for end in ("_y", "_z", "yz")]
    assert len(set(long)) == 3, "names of runs that differ in their ends stay apart"
    for name in (*long, *map(kubernetes_name, ("7b-sft", "2026.11", "9" * 99, "___", "_7b", "A" * 47))):
        assert len(name) <= LONGEST
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), "DNS-1035, as KubeRay asks of a RayJob"
    assert kubernetes_name("7b-sft") == "job-7b-sft"


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Where a value does not fit an OpenAPI schema: types, enums, what is required, what is not known."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{where}: {value!r} is neither a number nor a text"]
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    kind = schema.get("type")
    if kind in kinds and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
    found = [f"{where}: {value!r} is none of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, list):
        return found + [each for part in value for each in problems(part, schema["items"], f"{where}[]")]
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{where}: lacks {name}" for name in schema.get("required", ()) if name not in value]
        for name, part in value.items():
            if name in known or rest:
                found += problems(part, known.get(name, rest), f"{where}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields") and "properties" in schema:
                found.append(f"{where}: knows no {name}")
    return found


def schemas() -> list[Any]:
    path = os.environ.get(CRD)
    lacks = pytest.mark.skipif(path is None, reason=f"{CRD} does not name KubeRay's ray.io_rayjobs.yaml")
    return [pytest.param(str(SCHEMA), id="ours"), pytest.param(path, id="KubeRay's", marks=lacks)]


def schema_in(path: str) -> dict[str, Any]:
    """The schema of a RayJob of version v1 in a CustomResourceDefinition."""
    (version,) = [one for one in yaml.safe_load(Path(path).read_text())["spec"]["versions"] if one["name"] == "v1"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("path", schemas())
def test_the_schema_takes_the_manifest(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = schema_in(path)
    few = ["--storage", "s3://bucket/runs", "--code-in", "/app"]
    for args in (ALL, few):
        assert problems(printed(capsys, *args), schema) == []
    uncommented = re.sub(r"(?m)^( *)# (?=[\w./]+: |- {)", r"\1", (ROOT / "jobs/places/rayjob.yaml").read_text())
    edited = yaml.safe_load(uncommented)
    assert problems(edited, schema) == []
    assert edited["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["tolerations"]
    wrong = printed(capsys, *ALL)
    wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["tmplate"] = {}
    wrong["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "tokens"
    wrong["spec"]["backoffLimit"] = "5"
    del wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"]
    assert len(problems(wrong, schema)) == 4


def test_a_later_cluster_ends_at_once_only_after_a_failure_of_its_own_manifest(tmp_path: Path) -> None:
    run = Storage(str(tmp_path / "runs" / "r"))
    assert final_status(run, "m") is None
    for status, is_final in ((0, True), (1, True), (2, True), (75, False), (130, False)):
        run.create()
        LAST_END_JSON.write(run, LastEnd("m", status))
        assert final_status(run, "m") == (status if is_final else None)
        assert final_status(run, "another printing") is None
    (tmp_path / "runs" / "r" / "kuberay.json").write_text("{")
    assert final_status(run, "m") is None, "a damaged note is none"


def entrypoint(job: Any, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run the entrypoint of a manifest as a shell does, with its environment, here."""
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    own = {**kept, "PATH": path, **environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}"}
    return subprocess.run(
        job["spec"]["entrypoint"], shell=True, cwd=cwd, env=own, capture_output=True, text=True, timeout=240
    )


@pytest.mark.full
@pytest.mark.slow
def test_the_entrypoint_notes_how_the_job_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = folder.parent / "runs"
    more = ["--storage", f"file://{storage}", "--workers", "0", "--code-in", "."]
    broken = printed(capsys, *more, "--set", "model=jobs.digits:Nobody")
    first = entrypoint(broken, folder)
    assert first.returncode == 2, first.stderr
    assert "Nobody" in first.stderr
    again = entrypoint(broken, folder)
    assert again.returncode == 2
    assert "a cluster of this manifest has ended the job with exit status 2, which a new try does not" in again.stderr


def test_a_try_beside_an_earlier_one_is_refused_and_ends_the_job_for_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KubeRay may begin a try while pods of another one run: the lease refuses it, and the next may go on."""
    monkeypatch.setenv(ID, "m")
    monkeypatch.setattr(sys, "argv", sys.argv)
    run = Storage(str(folder.parent / "runs" / "digits"))
    run.create()
    asked = ["jobs/digits.yaml", "--workers", "0", "--name", "digits", "--storage", str(folder.parent / "runs")]
    with held(run, "the first try", lambda: True):
        assert run_unless_ended(asked) == 2
        assert "is being run by" in capsys.readouterr().err
        assert final_status(run, "m") is None
    assert run_unless_ended([*asked, "--set", "model=jobs.digits:Nobody"]) == 2
    assert final_status(run, "m") == 2, "a wrong job ends for good"


@pytest.mark.places
def test_a_job_that_is_mended_or_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another printing of the manifest runs it again; a later cluster of that one ends at once."""
    storage = folder.parent / "runs"
    more = ["--storage", f"file://{storage}", "--workers", "0", "--code-in", "."]
    assert entrypoint(printed(capsys, *more, "--set", "model=jobs.digits:Nobody"), folder).returncode == 2
    whole = printed(capsys, *more, "--set", "epochs=1")
    done = entrypoint(whole, folder)
    assert done.returncode == 0, done.stderr
    later = entrypoint(whole, folder)  # of a cluster that was made though the job was done
    assert (later.returncode, later.stderr) == (0, "a cluster of this manifest has done the job\n")
    assert json.loads((storage / "digits" / "result.json").read_text())["status"] == "done"
    assert json.loads((storage / "digits" / "kuberay.json").read_text())["exit_status"] == 0


SLOW_ROWS = """
import time

import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.full((4,), index / 60), torch.tensor(index % 2)
"""
SLOW_JOB = {
    "task": "train",
    "model": {"target": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 2}},
    "dataset": "slow:Rows",
    "batch_size": 10,
    "shards": 2,
    "workers": 2,
    "epochs": 4,
    "bitwise": True,
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    "checkpoint": {"every_steps": 2},
    "trackers": [],
}


@pytest.mark.ray
@pytest.mark.places
@pytest.mark.usefixtures("variables_kept")
def test_a_local_ray_runs_the_manifest_and_its_hook_has_it_run_again(
    cluster: Cluster, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As KubeRay does: the entrypoint is submitted with its environment; the head pod's hook stops the run."""
    (folder / "slow.py").write_text(SLOW_ROWS)
    (folder / "slow.yaml").write_text(json.dumps(SLOW_JOB))
    storage = folder.parent / "runs"
    capsys.readouterr()
    given = ["slow.yaml", "--image", IMAGE, "--storage", f"file://{storage}", "--code-in", str(folder)]
    main.cli(["kuberay", *given], standalone_mode=False)
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    hook = [sys.executable if word == "python" else word for word in head["lifecycle"]["preStop"]["exec"]["command"]]
    dashboard, environment = Dashboard(cluster.dashboard), yaml.safe_load(spec["runtimeEnvYAML"])
    statuses = []
    for number in range(2):
        job = dashboard.client.submit_job(entrypoint=spec["entrypoint"], runtime_env=environment)
        if number == 0:
            assert within(120, lambda: any(storage.glob("slow/checkpoints/step-*"))), dashboard.logs(job)
            stopped = subprocess.run(hook, cwd="/", env=os.environ, capture_output=True, text=True, timeout=120)
            assert stopped.returncode == 0, stopped.stderr
        assert within(180, lambda job=job: dashboard.details(job).status.is_terminal())  # type: ignore[misc]
        statuses.append(dashboard.details(job).driver_exit_code)
        noted = json.loads((storage / "slow" / "kuberay.json").read_text())
        assert noted == {"manifest": environment["env_vars"][ID], "exit_status": statuses[-1]}
    assert statuses == [75, 0], dashboard.logs(job)
    result = dp_ray.load(storage / "slow")
    assert result.restarts + len(result.interruptions) > 0
    plain = dp_ray.run(str(folder / "slow.yaml"), workers=0, storage=str(folder.parent / "plain"), quiet=True)
    assert result.weights_sha256 == plain.weights_sha256


@pytest.mark.ray
@pytest.mark.root
@pytest.mark.places
def test_a_worker_pods_hook_drains_its_node_and_waits_until_it_has_ended(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as (head, worker):
        of_worker = f"--node_ip_address={worker.address}"
        (raylet,) = [
            one for one in psutil.process_iter(["name", "cmdline"]) if of_worker in (one.info["cmdline"] or ())
        ]
        code = "import sys; import psutil; from dp_ray.places.pod import leave\n"
        code += f"sys.exit(leave([psutil.Process({raylet.pid})], 60))"
        left = worker.run(sys.executable, "-c", code, cwd=ROOT)
        assert left.returncode == 0, left.stdout + left.stderr
        assert not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE
        assert head.is_up
