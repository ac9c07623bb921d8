"""Slurm on hosts of this machine: a controller and a slurmd on each, with a key and sockets of their own."""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import ROOT
from tests.support.hosts import Host, namespaces
from tests.support.within import within

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
SECONDS = 120.0  # the machine may be busy
# Without cgroups, of which a machine has one set. As with them, a signal is for tasks, not for what they start.
# The time limits are for a busy machine; a requeued job waits for `cred_expire`.
CONF = """\
ClusterName=tests
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=120
KillWait=120
MinJobAge=3600
NodeName=n[1-{count}] NodeAddr=10.77.0.[1-{count}] CPUs=4 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def needs_slurm() -> None:
    """Skip where Slurm cannot be started."""
    sbin = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=sbin) is None]:
        pytest.skip(f"Slurm is not installed here (Debian's slurm-wlm and munge): no {', '.join(missing)}")


@dataclass
class Slurm:
    """A cluster of Slurm."""

    hosts: list[Host]
    folder: Path
    cwd: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{kept['PATH']}:/usr/sbin",
        }

    def on(self, host: Host, *command: str) -> list[str]:
        """The command line that runs a command on a host, under its own name."""
        named = 'hostname "$0" && exec "$@"'
        within = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", named]
        return [*within, f"n{host.number}", *command]

    def run(self, *command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the first host, in the folder of the jobs."""
        line, own = self.on(self.hosts[0], *command), {**self.environment, **variables}
        return subprocess.run(line, capture_output=True, text=True, timeout=2 * SECONDS, cwd=self.cwd, env=own)

    def start(self, name: str, host: Host, *command: str) -> None:
        """Start a daemon on a host."""
        with (self.folder / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(self.on(host, *command), stdout=log, stderr=log, env=self.environment, cwd="/")
        host.processes.append(process)

    def start_slurmd(self, host: Host) -> None:
        conf = str(self.folder / "slurm.conf")
        self.start(f"slurmd-{host.number}", host, "slurmd", "-D", "-N", f"n{host.number}", "-f", conf)

    def field(self, job: str, name: str) -> str:
        """A field that Slurm shows of a job."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def wait_for(self, job: str, *states: str, seconds: float = SECONDS) -> None:
        """Wait until a job is in one of these states."""
        assert within(seconds, lambda: self.field(job, "JobState") in states), (
            self.run("scontrol", "show", "job", job).stdout + self.log(job) + self._logs()
        )

    def kill_node(self, host: Host) -> None:
        """A host loses its power, and Slurm has noticed."""
        host.kill()
        host.processes.clear()
        self.run("scontrol", "update", f"NodeName=n{host.number}", "State=DOWN", "Reason=lost")

    def revive_node(self, host: Host) -> None:
        self.start_slurmd(host)
        self.run("scontrol", "update", f"NodeName=n{host.number}", "State=RESUME")

    def log(self, job: str) -> str:
        """What a job has printed."""
        path = self.cwd / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until_said(self, job: str, what: str, seconds: float = SECONDS) -> None:
        """Wait until a job has printed something."""
        assert within(seconds, lambda: what in self.log(job)), (
            self.log(job) + self.run("scontrol", "show", "job", job).stdout + self._logs()
        )

    def wait_until_up(self) -> None:
        """Wait until all nodes take jobs."""
        states = ("sinfo", "--noheader", "--format=%n %t")
        until = time.monotonic() + SECONDS
        while not all(line.endswith((" idle", " mix", " alloc")) for line in self._up(states)):
            assert time.monotonic() < until, self._logs()
            time.sleep(0.5)

    def _up(self, states: tuple[str, ...]) -> list[str]:
        lines = self.run(*states).stdout.splitlines()
        return lines if len(lines) >= len(self.hosts) else ["none"]

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))

    def processes(self) -> list[str]:
        """What runs on the hosts, but for Slurm itself."""
        found = []
        for host in self.hosts:
            pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(int(pid))
                    if process.name() not in ("slurmd", "slurmctld", "munged", "slurmstepd", "slurmscriptd"):
                        found.append(f"{host.namespace}: {' '.join(process.cmdline()) or process.name()}")
        return found


@contextlib.contextmanager
def slurm(count: int, cwd: Path) -> Iterator[Slurm]:
    """Slurm on `count` hosts, whose jobs run in `cwd`; all of it ends with the block."""
    needs_slurm()
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as short,
        namespaces(count, cwd) as hosts,
    ):
        folder = Path(short)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, count=count))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        made = Slurm(hosts, folder, cwd)
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
        munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        made.start("munged", hosts[0], *munged)
        assert within(SECONDS, (folder / "munge.socket").exists), (folder / "munged.out").read_text()
        made.start("slurmctld", hosts[0], "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for host in hosts:
            made.start_slurmd(host)
        made.wait_until_up()
        yield made
        made.run("scancel", "--signal=KILL", "--user=root")
        for host in reversed(hosts):
            host.kill()
