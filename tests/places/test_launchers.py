"""Which host this is, of how many, and where they meet: as each launcher's documentation names its variables."""

from collections.abc import Mapping

import pytest

from dp_ray.errors import JobError
from dp_ray.places.launchers import HostPlace, host_and_port, place_of, without_own

NODES = "gpu[01-03],big7"
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": NODES,
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": NODES,
    "SLURM_PROCID": "2",
    "SLURM_SUBMIT_DIR": "/home/me/project",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PET = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-worker-0", "PET_MASTER_PORT": "23456"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "0"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-2026",
}
JOBSET = {"JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers", "JOB_COMPLETION_INDEX": "1", "NNODES": "2"}
OF_PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (SLURM, HostPlace(4, 2, "/home/me/project/.dp-ray/slurm-12345-0-0", NODES)),
        (SLURM | {"SLURM_RESTART_COUNT": "3"}, HostPlace(4, 2, "/home/me/project/.dp-ray/slurm-12345-3-0", NODES)),
        (TORCHRUN, HostPlace(2, 1, "10.0.0.1:29500")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, HostPlace(2, 1, "10.0.0.1:29501")),
        (PET, HostPlace(3, 2, "job-worker-0:23456")),
        (PET | {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job:80"}, HostPlace(3, 2, "job:80")),
        (OF_PYTORCH_JOB, HostPlace(3, 1, "job-master-0:23456")),
        (JOBSET, HostPlace(2, 1, "train-workers-0-0.train:29500")),
        (SLURM | OPEN_MPI, HostPlace(2, 1, "/shared")),
        (SLURM | PMI, HostPlace(4, 2, "/home/me/project/.dp-ray/slurm-12345-0-0", NODES)),
        (PMI, HostPlace(2, 0, "/shared")),
        (SLURM | OF_PYTORCH_JOB, HostPlace(4, 2, "/home/me/project/.dp-ray/slurm-12345-0-0", NODES)),
    ],
    ids=lambda one: one.meet if isinstance(one, HostPlace) else None,
)
def test_a_launchers_variables(variables: Mapping[str, str], place: HostPlace) -> None:
    assert place_of(variables, meet="/shared" if place.meet == "/shared" else None) == place


@pytest.mark.parametrize(
    ("variables", "rank", "place"),
    [
        ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", "PMI_SIZE": "2", "PMI_RANK": "1"}, None, (2, 1)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", **OF_PYTORCH_JOB}, None, (3, 1)),
        ({"PET_NNODES": "3", "PET_RDZV_ENDPOINT": "job:80"}, 2, (3, 2)),
        ({"JOBSET_NAME": "train", "NNODES": "2", "RANK": "0"}, 1, (2, 1)),
        ({"JOB_COMPLETION_INDEX": "0", **OF_PYTORCH_JOB}, None, (3, 1)),
    ],
    ids=[
        "batch script with PMI",
        "batch script with RANK",
        "PET without a rank",
        "JobSet and RANK",
        "an index alone",
    ],
)
def test_a_launcher_counts_if_its_own_variables_are_there(
    variables: Mapping[str, str], rank: int | None, place: tuple[int, int]
) -> None:
    found = place_of(variables, rank=rank, meet="/shared")
    assert (found.hosts, found.rank) == place


def test_texts_of_others_matter_to_nobody() -> None:
    others = {"MASTER_PORT": "tcp://10.0.0.5:29500", "SLURM_JOB_NUM_NODES": "x", "PMI_SIZE": "many"}
    assert place_of(others, hosts=2, rank=1, meet="/shared") == HostPlace(2, 1, "/shared")


def test_skypilot_names_no_port_and_all_hosts_take_the_same() -> None:
    places = [place_of(SKYPILOT | {"SKYPILOT_NODE_RANK": str(rank)}) for rank in (0, 1)]
    assert [place.rank for place in places] == [0, 1]
    at = {host_and_port(place.meet) for place in places}
    ((host, port),) = [one for one in at if one]
    assert host == "10.0.0.4" and 20000 <= port < 30000
    assert place_of(SKYPILOT | {"SKYPILOT_TASK_ID": "another"}).meet != places[0].meet


def test_options_go_before_variables() -> None:
    assert place_of(SLURM, hosts=2, rank=0, meet="head:80") == HostPlace(2, 0, "head:80", NODES)
    assert place_of({}, hosts=1) == HostPlace(1, 0, "")


@pytest.mark.parametrize(
    ("variables", "options", "says"),
    [
        ({}, {}, "--hosts and --rank and --meet: no variable of a launcher tells; give --hosts N"),
        ({}, {"hosts": 2, "rank": 1}, "--meet: no variable"),
        (OPEN_MPI, {}, "--meet: Open MPI does not tell"),
        (JOBSET | {"NNODES": ""}, {}, "--hosts: JobSet does not tell"),
        ({}, {"hosts": 2, "rank": 2, "meet": "/a"}, "--rank 2: of 2 hosts it is 0 to 1"),
        ({}, {"hosts": 2, "rank": 0, "meet": "10.0.0.1"}, "--meet 10.0.0.1: an address needs a port"),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "32"},
            {},
            "Slurm has started 8 processes on this host.*--ntasks-per-node=1",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, "torchrun has started 8 processes.*--nproc-per-node=1"),
        (PMI | {"PMI_RANK": "x"}, {}, "PMI_RANK=x: a number is expected"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    variables: Mapping[str, str], options: dict[str, object], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        place_of(variables, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("meet", "at"),
    [("head:6000", ("head", 6000)), ("[fe80::1]:80", ("fe80::1", 80)), ("/a/b:1", None), ("a/b", None), ("C", None)],
)
def test_a_meeting_point_is_a_port_or_a_folder(meet: str, at: object) -> None:
    assert host_and_port(meet) == at


def test_the_ranks_of_a_launcher_do_not_reach_what_runs_on_ray() -> None:
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "1", "RANKS": "mine", "NCCL_DEBUG": "INFO"}
    assert without_own({**kept, **TORCHRUN, **PET, **OPEN_MPI, **PMI}) == kept
