"""Which of how many hosts this is, and where they meet: from the options, else from a launcher's variables."""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from dp_ray.errors import JobError

# A port for hosts that know only each other's addresses: below those that Linux gives out by itself.
FIRST_PORT, NUM_PORTS = 20000, 10000
TORCHS_PORT = "29500"  # where torchrun meets, if nobody says otherwise
FOLDER = ".dp-ray"  # in the folder from which a job was submitted to Slurm
# What a launcher says of its own process is wrong for the workers, which Ray starts.
OF_A_PROCESS = re.compile(
    r"(PET|PMI|PMIX|OMPI|PRTE|HYDRA|TORCHELASTIC)_\w+"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|MPI_LOCAL\w+"
)


@dataclass(frozen=True)
class HostPlace:
    """The host of rank `rank` among `hosts`; `meet` is a folder that all share, or the first host's HOST:PORT.

    `names` are the hosts' names in the order of their ranks, if the launcher tells them.
    """

    hosts: int
    rank: int
    meet: str
    names: tuple[str, ...] = ()

    @property
    def meets_in_folder(self) -> bool:
        """Whether the hosts meet in a folder."""
        return host_and_port(self.meet) is None

    def name(self, rank: int) -> str:
        """Return how to call the host of a rank in a message."""
        return f"host {rank} ({self.names[rank]})" if rank < len(self.names) else f"host {rank}"


@dataclass(frozen=True)
class _Told:
    """What a launcher's variables tell; None for what they do not."""

    launcher: str
    hosts: int | None = None
    rank: int | None = None
    meet: str | None = None
    names: tuple[str, ...] = ()
    local: int = 1  # processes on this host


def place_of(
    variables: Mapping[str, str], hosts: int | None = None, rank: int | None = None, meet: str | None = None
) -> HostPlace:
    """Return the place of this host; what is given goes before what a launcher's variables tell.

    Raises JobError if something is missing, or if there are several processes to a host.
    """
    told = next(_told(variables), _Told("no launcher"))
    if hosts is None and told.local > 1:
        raise JobError(
            f"{told.launcher} has started {told.local} processes on this host, and `dp-ray node` is a single one: "
            "start it once on each (Slurm: --ntasks-per-node=1; torchrun: --nproc-per-node=1; "
            "mpirun: --map-by ppr:1:node)"
        )
    hosts, rank, meet = hosts or told.hosts, told.rank if rank is None else rank, meet or told.meet
    if hosts == 1 and rank is None:
        rank = 0
    lacks = [("--hosts", hosts), ("--rank", rank), ("--meet", meet if hosts != 1 else "")]
    missing = [option for option, value in lacks if value is None]
    if hosts is None or rank is None or missing:
        by = f"{told.launcher} does not tell" if told.launcher != "no launcher" else "no variable of a launcher tells"
        raise JobError(
            f"{' and '.join(missing)}: {by}; give --hosts N, --rank R (0 on the first host) and "
            "--meet with a folder that all hosts share, or with the first host's HOST:PORT"
        )
    if not 0 <= rank < hosts:
        raise JobError(f"--rank {rank}: of {hosts} hosts it is 0 to {hosts - 1}")
    if meet and _is_address(meet):
        raise JobError(f"--meet {meet}: an address needs a port, as {meet}:7000; else it names a folder")
    return HostPlace(hosts, rank, meet or "", told.names)


def host_and_port(meet: str) -> tuple[str, int] | None:
    """Return host and port of a meeting point that names these; None of a folder.

    >>> host_and_port("[fe::1]:80"), host_and_port("head:6000"), host_and_port("/shared/a:1/b")
    (('fe::1', 80), ('head', 6000), None)
    """
    found = re.fullmatch(r"(\[[^\]/]+\]|[^:/]+):(\d{1,5})", meet)
    return (found[1].strip("[]"), int(found[2])) if found else None


def _is_address(meet: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(meet.strip("[]")))
    return False


def without_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which a launcher tells a process its rank."""
    return {name: value for name, value in variables.items() if not OF_A_PROCESS.fullmatch(name)}


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names in a list of hosts as Slurm writes it.

    >>> expand_hosts("gpu[1-3,07],login")
    ('gpu1', 'gpu2', 'gpu3', 'gpu07', 'login')
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        grown = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            numbers = [number for part in ranges.split(",") for number in _numbers(part)]
            grown = [before + plain + number for before in grown for number in numbers]
        names += grown
    return tuple(names)


def _numbers(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)] if dash else [text]


def _told(of: Mapping[str, str]) -> Iterator[_Told]:
    """Yield what launchers tell, the innermost first: mpirun within a job of Slurm counts before Slurm."""
    processes = _number(of, "LOCAL_WORLD_SIZE") or 1
    if "TORCHELASTIC_RUN_ID" in of:  # torchrun's own children; its store may have the port
        port = (_number(of, "MASTER_PORT") or 0) + (of.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        groups, rank = _number(of, "GROUP_WORLD_SIZE"), _number(of, "GROUP_RANK")
        yield _Told("torchrun", groups, rank, _at(of.get("MASTER_ADDR"), port), local=processes)
    if "PET_NNODES" in of:
        meet = of.get("PET_RDZV_ENDPOINT") or _at(of.get("PET_MASTER_ADDR"), of.get("PET_MASTER_PORT", TORCHS_PORT))
        most = int(of["PET_NNODES"].rpartition(":")[2])  # of MIN:MAX
        yield _Told("torch's PET_*", most, _number(of, "PET_NODE_RANK"), meet)
    if "OMPI_COMM_WORLD_SIZE" in of:
        size, rank = _number(of, "OMPI_COMM_WORLD_SIZE"), _number(of, "OMPI_COMM_WORLD_RANK")
        yield _Told("Open MPI", size, rank, local=_number(of, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    if "SKYPILOT_NUM_NODES" in of:
        names = tuple(of.get("SKYPILOT_NODE_IPS", "").split())
        free = FIRST_PORT + zlib.crc32(of.get("SKYPILOT_TASK_ID", "").encode()) % NUM_PORTS
        meet = _at(names[0] if names else None, free)
        yield _Told("SkyPilot", _number(of, "SKYPILOT_NUM_NODES"), _number(of, "SKYPILOT_NODE_RANK"), meet, names)
    if "SLURM_PROCID" in of and "SLURM_STEP_ID" in of:
        nodes = _number(of, "SLURM_STEP_NUM_NODES") or _number(of, "SLURM_JOB_NUM_NODES") or 1
        names = expand_hosts(of.get("SLURM_STEP_NODELIST", of.get("SLURM_JOB_NODELIST", "")))
        local = -(-(_number(of, "SLURM_STEP_NUM_TASKS") or nodes) // nodes)
        yield _Told("Slurm", nodes, _number(of, "SLURM_PROCID"), meeting_folder(of), names, local)
    if "PMI_SIZE" in of:
        local = _number(of, "MPI_LOCALNRANKS") or 1
        yield _Told("the launcher of PMI_*", _number(of, "PMI_SIZE"), _number(of, "PMI_RANK"), local=local)
    if {"RANK", "WORLD_SIZE"} <= of.keys():
        meet = _at(of.get("MASTER_ADDR"), of.get("MASTER_PORT", TORCHS_PORT))
        yield _Told("RANK and WORLD_SIZE", _number(of, "WORLD_SIZE"), _number(of, "RANK"), meet, local=processes)
    if "JOBSET_NAME" in of:
        name, group = of["JOBSET_NAME"], of.get("REPLICATED_JOB_NAME")
        meet = _at(group and f"{name}-{group}-0-0.{name}", of.get("MASTER_PORT", TORCHS_PORT))
        yield _Told("JobSet", _number(of, "NNODES"), _number(of, "JOB_COMPLETION_INDEX"), meet)


def meeting_folder(of: Mapping[str, str]) -> str:
    """Return where the hosts of this attempt of a job of Slurm meet: below the folder from which it was submitted."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    attempt = "-".join(of.get(name) or "0" for name in names)
    return os.path.join(of.get("SLURM_SUBMIT_DIR", "."), FOLDER, f"slurm-{attempt}")


def _number(of: Mapping[str, str], name: str) -> int | None:
    value = of.get(name)
    if value is None or value == "":
        return None
    if not re.fullmatch(r"\d+", value):
        raise JobError(f"{name}={value}: a number is expected; give --hosts, --rank and --meet instead")
    return int(value)


def _at(host: str | None, port: int | str) -> str | None:
    if not host:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
