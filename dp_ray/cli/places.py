"""The commands that bring a job to the hosts that a launcher gives: node, slurm."""

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dp_ray.cli import options
from dp_ray.cli.options import KeyOptions, say, take
from dp_ray.errors import Error, JobError
from dp_ray.job.files import load_job
from dp_ray.job.job import LONGEST_NAME, Job
from dp_ray.text import hide, listed

if TYPE_CHECKING:
    from dp_ray.places.node import HostsCommand

ON_HOSTS = ("run", "sweep", "evaluate", "predict", "retry", "verify")  # the commands that `node` runs
COMMAND = click.argument("command", metavar="-- run JOB.yaml ...", nargs=-1, required=True, type=click.UNPROCESSED)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=click.IntRange(1), metavar="N", help="How many hosts there are.")
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Which of them this is; 0 is the first.")
@click.option(
    "--meet", metavar="DIR|HOST:PORT", help="Where they meet: a folder that all share, or a port of the first host."
)
@click.option("--cpus", type=click.FloatRange(0), metavar="N", help="CPUs of this host for workers; default: all.")
@click.option("--gpus", type=click.FloatRange(0), metavar="N", help="GPUs of this host for workers; default: all.")
@click.option("--dashboard", is_flag=True, help="Also start Ray's dashboard, on the first host.")
@COMMAND
def node(hosts: int | None, rank: int | None, meet: str | None, command: tuple[str, ...], **machine: Any) -> None:
    """Run a job on several hosts: the same command on each starts a private Ray, and the first one runs the job.

    A launcher's variables (of Slurm, torchrun, JobSet, Open MPI, PMI, SkyPilot) tell --hosts, --rank and --meet.
    """
    from dp_ray.places.launchers import place_of

    place = place_of(os.environ, hosts, rank, meet)
    from dp_ray.places.node import run_on_this_host
    from dp_ray.places.own_ray import Machine

    on_hosts = _command_on_hosts(command, may_lack=place.rank > 0)
    sys.exit(run_on_this_host(place, on_hosts, Machine(**machine), lambda text: say(f"dp-ray node: {text}")))


def _command_on_hosts(command: tuple[str, ...], may_lack: bool) -> "HostsCommand":
    """Return what the hosts are to run, with the mistake in it if there is one."""
    from dp_ray.cluster.ray_version import check_ray
    from dp_ray.places.node import HostsCommand

    try:
        jobs = jobs_of(command, may_lack)
        check_ray()
    except Error as mistake:
        return HostsCommand(command, mistake=mistake)
    capacities = [job.timeouts.capacity for job in jobs] or [HostsCommand.capacity]
    capacity = None if None in capacities else max(filter(None, capacities))
    return HostsCommand(command, capacity, bool(jobs) and all(job.min_workers < job.max_workers for job in jobs))


@click.command(context_settings={"ignore_unknown_options": True})
@options.JOB
@options.WORKERS
@options.SETTINGS
@options.NAME
@options.STORAGE
@options.OVERWRITE
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.option(
    "--max-requeues", type=click.IntRange(0), default=20, show_default=True, help="How often it may be requeued."
)
@click.option(
    "--program", metavar="WORDS", help="How a node runs dp-ray, in a container for instance; default: as here."
)
@click.argument("sbatch", metavar="[OPTION OF SBATCH]...", nargs=-1, type=click.UNPROCESSED)
def slurm(
    job_file: str, sbatch: tuple[str, ...], dry_run: bool, max_requeues: int, program: str | None, **flags: Any
) -> None:
    """Submit a job to Slurm: --nodes 4 --gpus-per-node 8 --time 2:00:00, and any option of sbatch, go to it.

    Slurm requeues the job when its time is over or a node is lost, and it goes on from where it was. In an array
    (--array), %a in an option of the job is the number of the task.
    """
    from dp_ray.places.launchers import FOLDER
    from dp_ray.places.slurm import PREFIX, TASK, Script, parse_options, submit_to_slurm
    from dp_ray.system.process import is_env, without_values

    if job_file.startswith("-"):
        raise click.UsageError(f"JOB.yaml comes first, before {job_file} and the other options of sbatch")
    passed, overwrites = parse_options(sbatch), flags.pop("overwrite")
    keys = take(KeyOptions, flags)
    if "--array" in passed and TASK not in "".join([keys.name or "", keys.storage or ""]):
        keys = replace(keys, name=f"{keys.name or load_job(job_file).run_name}-{TASK}")  # a run for each task
    # What stands for the number of a task is checked as the first one.
    first = {
        key: value and value.replace(TASK, "0") for key, value in [("name", keys.name), ("storage", keys.storage)]
    }
    settings = tuple(setting.replace(TASK, "0") for setting in keys.settings)
    job = load_job(job_file, (replace(keys, **first, settings=settings) if "--array" in passed else keys).overrides())
    check_workers(job)
    given = ["--workers", keys.workers] if keys.workers else []
    given += [part for setting in keys.settings for part in ("--set", setting)]
    given += [part for key in ("name", "storage") for part in (f"--{key}", getattr(keys, key)) if getattr(keys, key)]
    command = ("run", job_file, *given)
    secret = [setting for setting in keys.settings if is_env(setting)]
    if secret or hide(shlex.join(command)) != shlex.join(command):
        raise JobError(
            f"{hide(shlex.join(without_values(command)))}: a secret would stand in the script, which Slurm keeps; "
            "export it as a variable before, which Slurm hands on, or write it into the job file"
        )
    own = f"{shlex.quote(sys.executable)} -m dp_ray"
    in_container = any(option.startswith("--container") for option in passed)
    script = Script(
        name=passed.pop("--job-name", None) or job.run_name,
        command=command,
        options=passed,
        program=program or ("dp-ray" if in_container else own),
        is_elastic=job.min_workers < job.max_workers,
        overwrites=overwrites,
        max_requeues=max_requeues,
    )
    if dry_run:
        click.echo(hide(script.text()), nl=False)
        return
    file = re.sub(r"[^\w.-]", "-", script.name)[:LONGEST_NAME]  # a name of Slurm may be any text
    submitted = submit_to_slurm(script.text(), Path(FOLDER, f"{file}.sbatch"))
    say(f"submitted as {PREFIX}{submitted}; dp-ray logs -f {PREFIX}{submitted} follows it, dp-ray stop stops it")
    click.echo(hide(f"{PREFIX}{submitted}"))


def jobs_of(command: tuple[str, ...], may_lack: bool = False) -> list[Job]:
    """Return the jobs that the arguments of dp-ray run, none if they name no job file; raises JobError if wrong.

    A host that `may_lack` files passes over those that it has not: it learns all else from the first host.
    """
    name, *arguments = command
    if name not in ON_HOSTS:
        raise JobError(f"{name}: `dp-ray node` runs one of {listed(ON_HOSTS)}: dp-ray node ... -- run JOB.yaml")
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group), "it has the commands"
    try:
        with group.commands[name].make_context(f"dp-ray {name}", list(arguments)) as given:
            flags = dict(given.params)
    except click.UsageError as error:
        raise JobError(f"dp-ray {name}: {error.format_message()}") from None
    if flags.get("address"):
        raise JobError(
            f"--address {flags['address']}: `dp-ray node` starts the Ray that the job runs on; leave it out"
        )
    files = flags.get("job_files") or [flags[key] for key in ("job_file",) if key in flags]
    if name == "verify":
        flags.pop("workers")
    files = [job_file for job_file in files if not may_lack or Path(job_file).exists()]
    jobs = [load_job(job_file, take(KeyOptions, dict(flags)).overrides()) for job_file in files]
    for job in jobs:
        check_workers(job)
    return jobs


def check_workers(job: Job) -> None:
    """Raise JobError if a job runs in a single process."""
    if job.max_workers == 0:
        raise JobError(f"workers: 0 runs {job.run_name} in a single process, and these are hosts for its workers")
