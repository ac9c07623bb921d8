"""Which of how many hosts this is, and where they meet: from the options, else from a launcher's variables."""

import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from dp_ray.errors import JobError

FOLDER = ".dp-ray"  # in the folder from which a job was submitted to Slurm; it is not sent to the workers
# A port for hosts that know only each other's addresses: below those that Linux gives out by itself.
FIRST_PORT, NUM_PORTS = 20000, 10000
# What a launcher says of its own process is wrong for the workers, which Ray starts.
OF_A_PROCESS = re.compile(
    r"(PET|PMI|PMIX|OMPI|PRTE|HYDRA|TORCHELASTIC)_\w+"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|MPI_LOCAL\w+"
)
# Where torchrun meets if nobody says otherwise; and of a job of Slurm, where it began, and that it was not requeued.
DEFAULTS = {
    "MASTER_PORT": "29500",
    "PET_MASTER_PORT": "29500",
    "SLURM_SUBMIT_DIR": ".",
    "SLURM_RESTART_COUNT": "0",
}


class Launcher(NamedTuple):
    """The variables of a launcher, which has started this process if all of those in `when` are set.

    `local` counts the processes on this host, `meet` is a pattern of variables, and `among` lists the hosts' names.
    Of several variables in `hosts`, `local` or `among` the first one that is set counts.
    """

    name: str
    when: str
    rank: str
    hosts: str
    local: str = ""
    meet: str = ""
    among: str = ""


# The innermost first: mpirun within a job of Slurm counts before Slurm. `_derived` adds some variables.
LAUNCHERS = (
    Launcher(
        "torchrun",
        "TORCHELASTIC_RUN_ID",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "{MASTER_ADDR}:{TORCHRUN_PORT}",
    ),
    Launcher("torch's PET_*", "PET_NNODES", "PET_NODE_RANK", "PET_MOST", meet="{PET_MEET}"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        meet="{SKYPILOT_FIRST}:{SKYPILOT_PORT}",
        among="SKYPILOT_NODE_IPS",
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID SLURM_STEP_ID",  # a batch script has the first one too: it is no step
        "SLURM_PROCID",
        "SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES",
        "SLURM_LOCAL",
        "{SLURM_SUBMIT_DIR}/.dp-ray/slurm-{SLURM_JOB_ID}-{SLURM_RESTART_COUNT}-{SLURM_STEP_ID}",
        "SLURM_STEP_NODELIST SLURM_JOB_NODELIST",
    ),
    Launcher("the launcher of PMI_*", "PMI_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    Launcher(
        "RANK and WORLD_SIZE",
        "RANK WORLD_SIZE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "{MASTER_ADDR}:{MASTER_PORT}",
    ),
    Launcher(
        "JobSet",
        "JOBSET_NAME",
        "JOB_COMPLETION_INDEX",
        "NNODES",
        meet="{JOBSET_NAME}-{REPLICATED_JOB_NAME}-0-0.{JOBSET_NAME}:{MASTER_PORT}",
    ),
)
NONE = Launcher("no variable of a launcher", "", "", "")


@dataclass(frozen=True)
class HostPlace:
    """The host of rank `rank` among `hosts`; `meet` is a folder that all share, or the first host's HOST:PORT.

    `among` has the hosts' names as the launcher lists them, if it does.
    """

    hosts: int
    rank: int
    meet: str
    among: str = ""

    @property
    def meets_in_folder(self) -> bool:
        """Whether the hosts meet in a folder."""
        return host_and_port(self.meet) is None

    def name(self, rank: int) -> str:
        """Return how to call the host of a rank in a message."""
        return f"host {rank} of {self.among}" if self.among else f"host {rank}"


def place_of(
    variables: Mapping[str, str], hosts: int | None = None, rank: int | None = None, meet: str | None = None
) -> HostPlace:
    """Return the place of this host; what is given goes before what a launcher's variables tell.

    Raises JobError if something is missing, or if there are several processes to a host.
    """
    told = {**DEFAULTS, **{name: value for name, value in variables.items() if value}}
    told |= _derived(told)
    launcher = next((each for each in LAUNCHERS if told.keys() >= set(each.when.split())), NONE)
    if hosts is None and (local := _number(told, launcher.local) or 1) > 1:
        raise JobError(
            f"{launcher.name} has started {local} processes on this host, and `dp-ray node` is a single one: "
            "start it once on each (Slurm: --ntasks-per-node=1; torchrun: --nproc-per-node=1; "
            "mpirun: --map-by ppr:1:node)"
        )
    hosts = hosts or _number(told, launcher.hosts)
    rank = _number(told, launcher.rank) if rank is None else rank
    meet = meet or _filled(launcher.meet, told)
    if hosts == 1 and rank is None:
        rank = 0
    lacks = [("--hosts", hosts), ("--rank", rank), ("--meet", meet if hosts != 1 else "")]
    missing = [option for option, value in lacks if value is None]
    if hosts is None or rank is None or missing:
        by = "tells" if launcher is NONE else "does not tell"
        raise JobError(
            f"{' and '.join(missing)}: {launcher.name} {by}; give --hosts N, --rank R (0 on the first host) and "
            "--meet with a folder that all hosts share, or with the first host's HOST:PORT"
        )
    if not 0 <= rank < hosts:
        raise JobError(f"--rank {rank}: of {hosts} hosts it is 0 to {hosts - 1}")
    with suppress(ValueError):
        ip_address((meet or "").strip("[]"))
        raise JobError(f"--meet {meet}: an address needs a port, as {meet}:7000; else it names a folder")
    return HostPlace(hosts, rank, meet or "", " ".join(_first(told, launcher.among).split()))


def host_and_port(meet: str) -> tuple[str, int] | None:
    """Return host and port of a meeting point that names these; None of a folder.

    >>> host_and_port("[fe::1]:80"), host_and_port("head:6000"), host_and_port("/shared/a:1/b")
    (('fe::1', 80), ('head', 6000), None)
    """
    found = re.fullmatch(r"(\[[^\]/]+\]|[^:/]+):(\d{1,5})", meet)
    return (found[1].strip("[]"), int(found[2])) if found else None


def without_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which a launcher tells a process its rank."""
    return {name: value for name, value in variables.items() if not OF_A_PROCESS.fullmatch(name)}


def _derived(told: Mapping[str, str]) -> dict[str, str]:
    """Return what launchers tell in forms of their own, as variables of the table; "" for what is no number."""
    nodes = _whole(_first(told, "SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES")) or 1
    port = _whole(told["MASTER_PORT"])  # Kubernetes sets another text for a service of the name "master"
    agents = told.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own store has MASTER_PORT then
    task = zlib.crc32(told.get("SKYPILOT_TASK_ID", "").encode())
    return {
        "TORCHRUN_PORT": str(port + agents) if port else "",
        "PET_MOST": told.get("PET_NNODES", "").rpartition(":")[2],  # of MIN:MAX
        "PET_MEET": told.get("PET_RDZV_ENDPOINT") or _filled("{PET_MASTER_ADDR}:{PET_MASTER_PORT}", told) or "",
        "SLURM_LOCAL": str(-(-(_whole(told.get("SLURM_STEP_NUM_TASKS", "")) or nodes) // nodes)),
        "SKYPILOT_FIRST": (told.get("SKYPILOT_NODE_IPS", "").split() or [""])[0],
        "SKYPILOT_PORT": str(FIRST_PORT + task % NUM_PORTS),
    }


def _first(told: Mapping[str, str], names: str) -> str:
    """Return the value of the first of several variables that is set; "" if none is."""
    return next((told[name] for name in names.split() if told.get(name)), "")


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _number(told: Mapping[str, str], names: str) -> int | None:
    value = _first(told, names)
    if value and not value.isdecimal():
        raise JobError(f"{names}={value}: a number is expected; give --hosts, --rank and --meet instead")
    return int(value) if value else None


def _filled(pattern: str, told: Mapping[str, str]) -> str | None:
    """Return a pattern with its variables in it; None if one of them is not set."""
    given = {name: told.get(name, "") for name in re.findall(r"{(\w+)}", pattern)}
    if not given or not all(given.values()):
        return None
    return pattern.format_map(
        {name: f"[{of}]" if of.count(":") > 1 and "[" not in of else of for name, of in given.items()}
    )
