"""Machines of one's own, reached by ssh: `ray up` with the file of the page, on three hosts with an sshd each."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

import dp_ray
from dp_ray.cluster.internals.variables import AUTH_MODE, TMPDIR
from tests.support.cluster import ROOT
from tests.support.hosts import Host, namespaces
from tests.support.within import within

pytestmark = [pytest.mark.ray, pytest.mark.root, pytest.mark.places]
FILE = ROOT / "jobs" / "places" / "machines.yaml"
CONTROL = Path("/tmp/ray_ssh_*")  # where `ray up` has sockets of ssh; it asks nobody for another place
# A host of its own: its processes, so that `ray stop` reaches no other Ray; its home and /run; and its folder of Ray,
# which is at the same path on all hosts, as Ray wants it.
HOST = """
set -e
own=$0 ; folder=$1 ; ray=$2
mkdir -p "$own/home/.ssh" "$own/ray"
mount --bind "$own/ray" "$ray"
sed "s#^root:\\([^:]*:[^:]*:[^:]*:[^:]*\\):[^:]*:#root:\\1:$own/home:#" /etc/passwd > "$own/passwd"
mount --bind "$own/passwd" /etc/passwd
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$own/host_key"
exec /usr/sbin/sshd -D -e -f "$folder/sshd_config" -h "$own/host_key"
"""
SSHD = """
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""


@contextmanager
def with_sshd(hosts: list[Host], folder: Path) -> Iterator[None]:
    """Have an sshd run on each host, which takes the key in `folder`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    started, of_others = [], set(CONTROL.parent.glob(CONTROL.name))
    try:
        for host in hosts:
            own = folder / f"ssh-{host.number}"
            (own / "home").mkdir(parents=True)
            profile = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}"
            profile += f" {TMPDIR}={host.sockets} TMPDIR={host.sockets}\n"
            for name in (".bashrc", ".bash_profile"):
                (own / "home" / name).write_text(profile)
            line = ["ip", "netns", "exec", host.namespace, "unshare", "--mount", "--pid", "--fork", "--kill-child"]
            line += ["--mount-proc", "sh", "-c", HOST, str(own), str(folder), str(host.sockets)]
            log = (folder / f"sshd-{host.number}.log").open("wb")
            with log:
                started.append(subprocess.Popen(line, stdout=log, stderr=log))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        for left in set(CONTROL.parent.glob(CONTROL.name)) - of_others:
            shutil.rmtree(left)


def ssh(host: Host, folder: Path, command: str, seconds: float = 200) -> "subprocess.CompletedProcess[str]":
    """Run a command on a host, as a user does who is logged in there."""
    options = ["-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    line = ["ip", "netns", "exec", host.namespace, "ssh", "-q", *options, f"root@{host.address}"]
    shell = shlex.join(["bash", "--login", "-c", command])
    return subprocess.run([*line, shell], capture_output=True, text=True, timeout=seconds)


def programs(host: Host) -> set[str]:
    """The names of the programs that run on a host."""
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split()
    return {process.info["name"] for process in psutil.process_iter(["name"]) if str(process.pid) in pids}


def test_ray_up_makes_a_cluster_of_machines_and_a_job_runs_there(tmp_path: Path) -> None:
    if any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in ("sshd", "rsync")):
        pytest.skip("`ray up` needs an sshd on each machine, and rsync")
    tmp_path.chmod(0o755)
    with namespaces(3, tmp_path) as hosts, with_sshd(hosts, tmp_path):
        first = hosts[0]
        assert within(30, lambda: ssh(first, tmp_path, "true").returncode == 0), (tmp_path / "sshd-1.log").read_text()
        config = yaml.safe_load(FILE.read_text())
        assert len(config["provider"]["worker_ips"]) == 2, "three machines, as here"
        config["provider"] |= {"head_ip": first.address, "worker_ips": [host.address for host in hosts[1:]]}
        config["auth"] |= {"ssh_user": "root", "ssh_private_key": str(tmp_path / "key")}
        (tmp_path / "machines.yaml").write_text(yaml.safe_dump(config))
        up = f"ray get-auth-token --generate; cd {tmp_path} && ray up -y machines.yaml"
        done = ssh(first, tmp_path, up)
        assert done.returncode == 0, done.stdout + done.stderr
        status = f"{AUTH_MODE}=token ray status --address {first.address}:6379"
        cpus = f"/{3 * (os.cpu_count() or 1)}.0 CPU"
        assert within(200, lambda: cpus in ssh(first, tmp_path, status).stdout), ssh(first, tmp_path, status)
        run = f"cd {ROOT} && dp-ray run jobs/tutorial.yaml --workers 3 --address {first.address}:6379 "
        ran = ssh(first, tmp_path, f"{run} --storage {tmp_path}/runs --set placement=STRICT_SPREAD")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        result = dp_ray.load(tmp_path / "runs" / "tutorial")
        assert len({worker["node"] for worker in result.workers}) == 3
        down = ssh(first, tmp_path, f"cd {tmp_path} && ray down -y machines.yaml")
        assert down.returncode == 0, down.stdout + down.stderr
        for host in hosts:  # those of the others end once they have missed the head for a minute
            assert within(120, lambda host=host: "raylet" not in programs(host)), programs(host)  # type: ignore[misc]
