"""Machines of one's own, reached by ssh: `ray up` with the file of the page, on three hosts with an sshd each."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import dp_ray
from tests.support.cluster import ROOT
from tests.support.hosts import Host, namespaces
from tests.support.within import within

pytestmark = [pytest.mark.ray, pytest.mark.root, pytest.mark.places]
FILE = ROOT / "jobs" / "places" / "machines.yaml"
# A host of its own: its processes, so that `ray stop` reaches no other Ray; its home, /run and Ray's folder.
HOST = """
set -e
own=$0 ; folder=$1
mkdir -p "$own/home/.ssh" "$own/ray"
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
    started = []
    try:
        for host in hosts:
            own = Path(f"{host.sockets}/{host.number}")  # a short path: Ray's sockets are below it
            (own / "home").mkdir(parents=True)
            profile = f"export PATH={Path(sys.executable).parent}:$PATH RAY_TMPDIR={own} PYTHONPATH={ROOT}\n"
            for name in (".bashrc", ".bash_profile"):
                (own / "home" / name).write_text(profile)
            line = ["ip", "netns", "exec", host.namespace, "unshare", "--mount", "--pid", "--fork", "--kill-child"]
            line += ["--mount-proc", "sh", "-c", HOST, str(own), str(folder)]
            log = (folder / f"sshd-{host.number}.log").open("wb")
            with log:
                started.append(subprocess.Popen(line, stdout=log, stderr=log))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def ssh(host: Host, folder: Path, command: str, seconds: float = 200) -> "subprocess.CompletedProcess[str]":
    """Run a command on a host, as a user does who is logged in there."""
    options = ["-i", str(folder / "key"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    line = ["ip", "netns", "exec", host.namespace, "ssh", "-q", *options, f"root@{host.address}"]
    shell = shlex.join(["bash", "--login", "-c", command])
    return subprocess.run([*line, shell], capture_output=True, text=True, timeout=seconds)


def test_ray_up_makes_a_cluster_of_machines_and_a_job_runs_there(tmp_path: Path) -> None:
    if any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in ("sshd", "rsync")):
        pytest.skip("`ray up` needs an sshd on each machine, and rsync")
    tmp_path.chmod(0o755)
    with namespaces(3, tmp_path) as hosts, with_sshd(hosts, tmp_path):
        first = hosts[0]
        assert within(30, lambda: ssh(first, tmp_path, "true").returncode == 0), (tmp_path / "sshd-1.log").read_text()
        config = yaml.safe_load(FILE.read_text())
        config["provider"] |= {"head_ip": first.address, "worker_ips": [host.address for host in hosts[1:]]}
        config["auth"] |= {"ssh_user": "root", "ssh_private_key": str(tmp_path / "key")}
        (tmp_path / "machines.yaml").write_text(yaml.safe_dump(config))
        up = f"ray get-auth-token --generate >/dev/null; cd {tmp_path} && ray up -y --no-config-cache machines.yaml"
        done = ssh(first, tmp_path, up)
        print(done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        count = f"RAY_AUTH_MODE=token ray status --address {first.address}:6379"
        assert within(
            100,
            lambda: (
                ssh(first, tmp_path, count).stdout.count(" node_") >= 3
                or ssh(first, tmp_path, count).stdout.count("1 local") >= 1
            ),
        ), ssh(first, tmp_path, count).stdout
        print(ssh(first, tmp_path, count).stdout)
        run = f"cd {ROOT} && dp-ray run jobs/tutorial.yaml --workers 3 --address {first.address}:6379 "
        ran = ssh(first, tmp_path, f"{run} --storage {tmp_path}/runs --set placement=STRICT_SPREAD")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        result = dp_ray.load(tmp_path / "runs" / "tutorial")
        assert len({worker["node"] for worker in result.workers}) == 3
        down = ssh(first, tmp_path, f"cd {tmp_path} && ray down -y machines.yaml")
        print(down.stdout, down.stderr)
