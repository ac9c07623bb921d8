"""What fits into a cluster, and how it is found; the arithmetic without Ray, placement on made-up GPUs."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import ray
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster as SeveralNodes

import dp_ray
from dp_ray.cluster import connect
from dp_ray.cluster.connect import check_fits, connected, in_ray_job, worker_resources
from dp_ray.cluster.group import named_devices
from dp_ray.cluster.internals import forked_worker, train_worker
from dp_ray.cluster.internals.context import gpus_of
from dp_ray.cluster.internals.core import types_in, wants_token
from dp_ray.cluster.internals.variables import ADDRESS, JOB_CONFIG, TMPDIR
from dp_ray.cluster.resources import NodeType, addable, capacity_for, free_for, gpus_by_default
from dp_ray.cluster.workers import backend_of
from dp_ray.engine.devices import input_device
from dp_ray.errors import ClusterError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.system.process import interface_of
from dp_ray.system.threads import handlers_kept
from tests.support import ray_forks
from tests.support.cluster import ROOT, Cluster, Run, free_port


@pytest.mark.parametrize(
    ("each", "nodes", "placement", "capacity"),
    [
        ({"CPU": 1}, [{"CPU": 4}, {"CPU": 3}], "PACK", 7),
        ({"CPU": 2}, [{"CPU": 3}, {"CPU": 3}], "PACK", 2),
        ({"CPU": 1, "GPU": 1}, [{"CPU": 8, "GPU": 2}, {"CPU": 8}], "PACK", 2),
        ({"GPU": 2}, [{"GPU": 1}, {"GPU": 1}], "PACK", 0),
        ({"GPU": 0.5}, [{"GPU": 1}, {"GPU": 1}], "SPREAD", 4),
        ({"GPU": 0.4}, [{"GPU": 2}], "PACK", 4),  # not 5: a part of a GPU is a part of one
        ({"GPU": 0.4}, [{"GPU": 1.5}], "PACK", 3),
        ({"CPU": 1}, [{"CPU": 4}, {"CPU": 3}], "STRICT_PACK", 4),
        ({"CPU": 1}, [{"CPU": 4}, {"CPU": 3}, {"CPU": 0.5}], "STRICT_SPREAD", 2),
        ({"CPU": 0.1}, [{"CPU": 1}], "PACK", 10),
        ({"CPU": 1}, [], "PACK", 0),
    ],
)
def test_capacity_is_counted_node_by_node(
    each: dict[str, float], nodes: list[dict[str, float]], placement: str, capacity: int
) -> None:
    assert capacity_for(each, nodes, placement) == capacity


BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("keys", "gpus", "backend"),
    [
        ({"workers": 2}, 0.5, "gloo"),  # they may share a GPU, which NCCL calls "Duplicate GPU"
        ({"workers": {"min": 1, "max": 4}}, 0.25, "gloo"),
        ({"workers": 1}, 0.5, BOTH),
        ({"workers": 2}, 1, BOTH),
        ({"workers": 2}, 2, BOTH),
        ({"workers": 2}, 0, "gloo"),
        ({"workers": 2, "gpus_per_worker": 0}, 1, "gloo"),
        ({"workers": 2, "devices": ["cpu", "cpu"]}, 0, "gloo"),
        ({"workers": 2, "devices": ["cuda:0"]}, 1, BOTH),
        ({"workers": 2, "devices": ["cuda:0"]}, 0.5, "gloo"),
        ({"workers": 2, "devices": ["cuda:0", "cpu"]}, 1, BOTH),
        ({"workers": 2, "devices": ["cuda:0", "cpu"]}, 0.5, "gloo"),
    ],
)
def test_workers_that_may_share_a_gpu_exchange_by_gloo(keys: dict[str, Any], gpus: float, backend: str) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 8, **keys}, "job")
    assert backend_of(job, gpus) == backend


@pytest.mark.parametrize(
    ("keys", "gpus", "why"),
    [
        ({}, 0, ""),
        ({"on_lost_worker": "go_on"}, 0, ""),
        ({"on_lost_worker": "restart"}, 0, "on_lost_worker: restart"),
        ({"workers": {"min": 1, "max": 4}}, 0, ""),
        ({"workers": 1}, 0, "one worker"),
        ({"shards": "auto"}, 0, "shards: auto"),
        ({}, 1, "GPUs"),
        ({"on_lost_worker": "go_on"}, 1, "GPUs"),
        ({}, 0.5, "GPUs"),  # though they exchange by gloo
        ({"devices": ["cuda:0"]}, 0.5, "GPUs"),
        ({"devices": ["cuda:0"], "placement": "STRICT_SPREAD"}, 0, "GPUs"),
        ({"devices": ["cpu"]}, 1, ""),  # of a session with GPUs
        ({"gpus_per_worker": 0}, 1, ""),
        ({"strategy": "fsdp"}, 0, ""),
    ],
)
def test_survivors_go_on_by_default_where_no_worker_computes_on_a_gpu(
    keys: dict[str, Any], gpus: float, why: str
) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 8, "workers": 2, **keys}, "job")
    assert job.why_restarts(gpus) == why


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [
        ({"workers": 2, "devices": ["cuda:0"]}, 1),
        ({"workers": 2, "devices": ["cuda"]}, 1),
        ({"workers": 2, "devices": ["cuda:0", "cuda:1"]}, 2),
        ({"workers": 2, "devices": ["cuda:1", "cpu"]}, 2),
        ({"workers": {"min": 1, "max": 2}, "devices": ["cuda:0", "cuda:0"]}, 1),
        ({"workers": 2, "devices": ["cpu", "cpu"]}, 0),
        ({"workers": 2, "devices": None}, 0),
        ({"workers": 1, "devices": ["cuda:3"]}, 0),  # those of its machine, as it is alone there
        ({"workers": 0, "devices": ["cuda:3"]}, 0),
        ({"workers": 2, "devices": ["cuda:3"], "placement": "STRICT_SPREAD"}, 0),
    ],
)
def test_workers_that_may_share_a_node_need_gpus_of_their_own(keys: dict[str, Any], gpus: int) -> None:
    assert WorkerKeys.model_validate(keys).own_gpus == gpus


def test_a_named_gpu_is_one_of_the_workers_own() -> None:
    """The last two workers of a node of six GPUs, of which each sees all."""
    second, third = ([torch.device("cuda", number) for number in own] for own in ((2, 3), (4, 5)))
    cpu = torch.device("cpu")
    assert named_devices(["cuda:0", "cpu", "cuda:1"], second) == [second[0], cpu, second[1]]
    assert named_devices(["cuda:1", "cuda"], third) == third[::-1]
    assert named_devices(["cuda:3", "cpu"], None) == [torch.device("cuda", 3), cpu]
    assert named_devices(["cpu", "cpu"], [cpu]) == [cpu, cpu]
    with pytest.raises(JobError, match="devices: cuda:2 is of the worker's own GPUs, of which it has 2"):
        named_devices(["cuda:2"], third)
    with pytest.raises(JobError, match="devices: cuda:0 is of the worker's own GPUs, of which it has 0"):
        named_devices(["cuda:0"], [cpu])


@pytest.mark.parametrize(
    ("devices", "named", "expected"),
    [
        (["cuda:0", "cuda:1"], "cuda:1", "cuda:3"),
        (["cpu", "cuda:0"], "cuda:0", "cuda:3"),  # the place counts
        (None, "cuda:1", "cuda:3"),
        (None, "cpu", "cpu"),
        (["cuda:0", "cuda:1"], "cpu", "cpu"),
        (["cuda:0", "cuda:1"], None, "cuda:2"),
    ],
)
def test_the_inputs_go_to_the_workers_own_gpu(devices: list[str] | None, named: str | None, expected: str) -> None:
    keys = {"devices": devices, "input_device": named}
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 8, **keys}, "job")
    given = [torch.device("cuda", 2), torch.device("cuda", 3)]
    assert input_device(job, torch.nn.Identity(), given) == torch.device(expected)


def test_only_nodes_of_the_accelerator_type_count() -> None:
    nodes = [{"GPU": 4.0, "accelerator_type:H100": 1.0}, {"GPU": 4.0, "accelerator_type:A100": 1.0}]
    assert capacity_for({"GPU": 1}, nodes, "PACK", "H100") == 4
    assert capacity_for({"GPU": 1}, nodes, "PACK", "V100") == 0


@pytest.mark.parametrize(
    ("each", "free", "fit"),
    [
        ({"CPU": 1}, {"CPU": 10.0}, 10),
        ({"CPU": 1}, {"CPU": 3.0}, 3),
        ({"CPU": 2}, {"CPU": 10.0}, 4),  # each node has one CPU left
        ({"CPU": 1, "GPU": 1}, {"CPU": 10.0}, 0),
        ({"CPU": 0.1}, {"CPU": 0.3}, 3),
    ],
)
def test_what_others_use_is_not_free(each: dict[str, float], free: dict[str, float], fit: int) -> None:
    nodes = [{"CPU": 5.0, "GPU": 2.0}, {"CPU": 5.0, "GPU": 2.0}]
    assert free_for(each, nodes, free, "PACK", None) == fit


def test_node_types_are_read_from_a_clusters_file() -> None:
    file = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert types_in(file) == (NodeType("gpus", {"CPU": 48, "GPU": 4}, 4),)
    file["max_workers"] = 3
    del file["available_node_types"]["gpus"]["max_workers"]
    assert [one.max_count for one in types_in(file)] == [3]
    assert types_in({}) == ()


GPUS, CPUS = NodeType("gpus", {"CPU": 8, "GPU": 4}, 3), NodeType("cpus", {"CPU": 8}, 9)


@pytest.mark.parametrize(
    ("types", "up", "added"),
    [
        ([GPUS], ["head"], 3),
        ([GPUS], ["head", "gpus", "gpus"], 1),
        ([GPUS], ["gpus"] * 5, 0),
        ([GPUS, CPUS], [""], 3 + 5),
        ([replace(GPUS, max_count=-1)], [], 5),
        ([], ["head"], 0),
    ],
)
def test_an_autoscaler_adds_nodes_up_to_the_most_of_each_type(
    types: list[NodeType], up: list[str], added: int
) -> None:
    assert len(addable(types, up, 5)) == added


@pytest.mark.parametrize(
    ("up", "types", "gpus"),
    [
        (4, None, 1),
        (0, None, 0),
        (0, (), 0),
        (0, (CPUS,), 0),
        (0, (CPUS, GPUS), 1),
        (0, (replace(GPUS, max_count=-1),), 1),
        (0, (replace(GPUS, max_count=0),), 0),
    ],
)
def test_gpus_that_may_be_added_count_for_auto(up: float, types: tuple[NodeType, ...] | None, gpus: int) -> None:
    assert gpus_by_default(up, types) == gpus


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4))
def test_capacity_is_never_more_than_a_greedy_packing_finds(cpus: list[int], need: int) -> None:
    packed = 0
    for node in cpus:
        while node >= need:
            node -= need
            packed += 1
    assert capacity_for({"CPU": need}, [{"CPU": float(node)} for node in cpus]) == packed


@pytest.mark.parametrize(
    ("ids", "variables", "is_amd", "devices"),
    [
        ([], {}, False, []),
        (["1"], {"CUDA_VISIBLE_DEVICES": "0,1,3"}, False, ["cuda:1"]),
        (["3", "0"], {"CUDA_VISIBLE_DEVICES": "0,1,3"}, False, ["cuda:2", "cuda:0"]),
        (["3"], {}, False, ["cuda:3"]),  # Ray was told to leave the variable alone: torch sees all
        (["GPU-5f"], {"CUDA_VISIBLE_DEVICES": "GPU-1c,GPU-5f"}, False, ["cuda:1"]),
        (["3"], {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,3"}, True, ["cuda:0"]),
        (["3"], {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,3"}, False, ["cuda:1"]),
        (["1"], {"CUDA_VISIBLE_DEVICES": "0,1"}, True, ["cuda:1"]),
        (["MIG-7"], {"CUDA_VISIBLE_DEVICES": "MIG-7"}, False, ["cuda:0"]),
    ],
)
def test_a_workers_gpus_are_named_as_torch_counts_them(
    ids: list[str], variables: dict[str, str], is_amd: bool, devices: list[str]
) -> None:
    assert [str(one) for one in gpus_of(ids, variables, is_amd)] == devices


@pytest.mark.parametrize(
    ("ids", "visible", "says"),
    [
        (["3"], "0,1", "GPU 3, which CUDA_VISIBLE_DEVICES=0,1 hides from it"),
        (["MIG-7"], "MIG-6,MIG-7", "cut into slices .MIG.: MIG-6, MIG-7"),
    ],
)
def test_gpus_that_a_worker_cannot_use_are_refused(ids: list[str], visible: str, says: str) -> None:
    with pytest.raises(JobError, match=f"gpus_per_worker: .*{says}"):
        gpus_of(ids, {"CUDA_VISIBLE_DEVICES": visible}, is_amd=False)


@pytest.mark.parametrize("given", [{}, {"NCCL_SOCKET_IFNAME": "ib0"}])
def test_nccl_takes_the_interface_by_its_whole_name(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(os, "environ", variables := dict(given))
    train_worker.enter_process({})
    loopback = interface_of("127.0.0.1")
    assert variables == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}", **given}


def test_the_interface_of_an_address_is_found() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert any(one.address == "127.0.0.1" for one in psutil.net_if_addrs()[loopback])
    assert interface_of("203.0.113.77") is None


def test_an_address_where_nothing_listens_is_an_error_at_once() -> None:
    with pytest.raises(ConnectionError, match="unavailable"):
        wants_token(f"127.0.0.1:{free_port()}")


@pytest.mark.full
@pytest.mark.ray
def test_a_cluster_tells_whether_it_wants_a_token(cluster: Cluster, made_up_gpus: str) -> None:
    assert not wants_token(made_up_gpus)
    if (Path.home() / ".ray" / "auth_token").exists():
        assert wants_token(cluster.address)


def test_in_ray_job_is_told_by_rays_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_ray_job()
    monkeypatch.setenv(JOB_CONFIG, "{}")
    assert in_ray_job()


@pytest.mark.slow
def test_a_job_is_for_the_cluster_that_runs_it(tmp_path: Path) -> None:
    """Ray tells a job the address of the cluster that was started last on the host: here 127.0.0.1:9, another one."""
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("sh") or "", raylet)
    code = "import os; from dp_ray.cluster.connect import address_of as of; print(of(None), of('127.0.0.1:5')); "
    code += f"del os.environ[{JOB_CONFIG!r}]; print(of(None))"
    line = [str(raylet), "-c", '"$0" -c "$1"; true', sys.executable, code, "--gcs-address=127.0.0.1:7"]
    environment = {**os.environ, ADDRESS: "127.0.0.1:9", JOB_CONFIG: "{}"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["127.0.0.1:7", "127.0.0.1:5", "127.0.0.1:9"], done.stderr


@pytest.fixture(scope="module")
def made_up_gpus(cluster: Cluster) -> Iterator[str]:
    """Three nodes on this machine, two of them with two GPUs that nobody built; without a token.

    Their workers are forked by the server of the shared cluster. Each node has a folder of its own: it writes a job's
    code there, and would do so again where another node's workers start from it just then.
    """
    before = dict(os.environ)
    temporary = tempfile.TemporaryDirectory(prefix="gpus-", dir="/tmp", ignore_cleanup_errors=True)
    with handlers_kept(), temporary as sockets, ray_forks.forked_by(cluster.folder / ray_forks.SOCKET):
        own = {"include_dashboard": False, "temp_dir": sockets}
        ports = {"dashboard_agent_listen_port": free_port()}
        Path(sockets, "ray").mkdir()  # there, and not in Ray's usual folder, it notes the address
        with mock.patch.dict(os.environ, {TMPDIR: sockets}):
            nodes: Any = SeveralNodes(initialize_head=True, head_node_args={"num_cpus": 1, **own, **ports})
        for node in "12":
            own = {"temp_dir": str(Path(sockets, node)), "dashboard_agent_listen_port": free_port()}
            nodes.add_node(num_cpus=4, num_gpus=2, **own)
        yield nodes.address
        ray.shutdown()
        with mock.patch.dict(os.environ, {TMPDIR: sockets}):
            nodes.shutdown()
    for key in set(os.environ) - set(before):
        del os.environ[key]


@pytest.mark.ray
def test_each_worker_gets_a_gpu_of_its_own(made_up_gpus: str, tmp_path: Path, in_project: Path) -> None:
    keys: dict[str, Any] = {"gpus_per_worker": 1, "devices": ["cpu"], "storage": str(tmp_path)}
    result = dp_ray.run("jobs/tutorial.yaml", workers=4, address=made_up_gpus, name="four", **keys)
    assert sorted(tuple(worker["gpu_ids"]) for worker in result.workers) == [("0",), ("0",), ("1",), ("1",)]
    with pytest.raises(ClusterError, match=r"5 workers need 5 CPU, 5 GPU .*3 nodes has 9 CPU, 4 GPU, room for 4"):
        dp_ray.run("jobs/tutorial.yaml", workers=5, address=made_up_gpus, name="five", **keys)


@pytest.mark.full
@pytest.mark.ray
def test_named_gpus_of_several_workers_are_reserved(made_up_gpus: str, tmp_path: Path, in_project: Path) -> None:
    """They are not used here, as torch has no CUDA: a run that fits would fail where its first worker needs one."""
    several = WorkerKeys(workers=4, devices=["cuda:0", "cpu"])
    with connected(several, made_up_gpus, False):
        assert worker_resources(several) == {"CPU": 1, "GPU": 1}
        assert check_fits(several, worker_resources(several)) is None
        assert worker_resources(several.model_copy(update={"devices": ["cpu"]})) == {"CPU": 1}
        assert worker_resources(several.model_copy(update={"workers": 1})) == {"CPU": 1}
        assert worker_resources(several.model_copy(update={"gpus_per_worker": 0.5})) == {"CPU": 1, "GPU": 0.5}
    keys: dict[str, Any] = {"storage": str(tmp_path), "address": made_up_gpus, "quiet": True, "name": "few"}
    says = r"^devices: cuda:0, cuda:1 are of each worker's own GPUs; 3 workers need 3 CPU, 6 GPU .* 9 CPU, 4 GPU"
    with pytest.raises(JobError, match=says):
        dp_ray.run("jobs/model_parallel.yaml", workers=3, devices=["cuda:0", "cuda:1"], **keys)


@pytest.mark.full
@pytest.mark.ray
def test_a_model_over_two_devices_gets_both_on_one_node(made_up_gpus: str, tmp_path: Path, in_project: Path) -> None:
    keys: dict[str, Any] = {"gpus_per_worker": 2, "storage": str(tmp_path), "address": made_up_gpus, "quiet": True}
    result = dp_ray.run("jobs/model_parallel_train.yaml", workers=2, name="two", **keys)
    assert [sorted(worker["gpu_ids"]) for worker in result.workers] == [["0", "1"], ["0", "1"]]
    here = dp_ray.run("jobs/model_parallel_train.yaml", workers=0, storage=str(tmp_path), name="here", quiet=True)
    assert result.weights_sha256 == here.weights_sha256
    keys |= {"gpus_per_worker": 3, "devices": ["cpu"] * 3}
    says = (
        r"^1 worker needs 1 CPU, 3 GPU; the cluster of 3 nodes .* room for 0 workers: one worker takes 3 GPU of ONE "
    )
    with pytest.raises(ClusterError, match=f"{says}node, .* largest has 2"):
        dp_ray.run("jobs/model_parallel.yaml", workers=1, shards=2, name="three", **keys)
    assert not (tmp_path / "three").exists()


@pytest.mark.ray
def test_env_reaches_the_workers_before_torch_is_imported_and_is_not_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On Ray's own workers, since those of the shared cluster have torch imported before they get `env`."""
    code = {**connect.code_to_ship(), "env_vars": {forked_worker.SERVER: "nobody"}}
    monkeypatch.setattr(connect, "code_to_ship", lambda: code)
    env = {"DP_SECRET": "hush", "TORCH_DISTRIBUTED_DEBUG": "INFO"}  # torch reads the second one when it is imported
    result = run("jobs/tutorial.yaml", workers=2, dataset="tests.support.models:SaysSecret", env=env)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank ")]
    assert sorted(said) == [f"[rank {rank}] the secret has 4 letters, and torch says INFO" for rank in range(2)]
    kept = "".join(path.read_text() for path in Path(result.run_dir).glob("*.json"))
    assert "hush" not in kept


@pytest.mark.slow
def test_the_cluster_file_is_one_that_ray_takes() -> None:
    """`ray up` checks a cluster file against its own schema before it does anything."""
    code = "import yaml; from ray.autoscaler._private.util import prepare_config, validate_config\n"
    code += "validate_config(prepare_config(yaml.safe_load(open('cluster.yaml'))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def setup_commands() -> list[str]:
    """What `ray up cluster.yaml` runs on each node before it starts Ray."""
    return list(yaml.safe_load((ROOT / "cluster.yaml").read_text())["setup_commands"])


def test_the_cluster_file_installs_what_dp_ray_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (line for line in map(shlex.split, setup_commands()) if any(one.startswith("torch") for one in line))
    assert line == ["python3", "-m", "pip", "install", *project["dependencies"]]


@pytest.mark.parametrize("version", [(3, 8, 2), (3, 10, 14), (3, 11, 0), (3, 13, 1)])
def test_the_cluster_file_asks_for_the_python_that_dp_ray_needs(version: tuple[int, ...], tmp_path: Path) -> None:
    """Its first command, with a `python3` that is this one and says that it is another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11", "then cluster.yaml must ask for another one, too"
    name = ".".join(map(str, version))
    posed = f"import sys; sys.version_info, sys.version = {version}, '{name} (main)'; exec(sys.argv[1])"
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{posed}" "$2"\n')
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", setup_commands()[0]], env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    old = f"cluster.yaml: dp_ray needs Python 3.11 or newer, and this image has {name}; choose another docker.image\n"
    assert (done.returncode, done.stderr) == ((0, "") if version >= (3, 11) else (1, old))
