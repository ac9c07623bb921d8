"""The commands that bring a job to the hosts that a launcher gives: node, slurm, kuberay."""

import json
import os
import re
import shlex
import sys
import uuid
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from dp_ray.cli import options
from dp_ray.cli.options import KeyOptions, check_no_secret, say, take
from dp_ray.errors import Error, JobError
from dp_ray.job.files import load_job
from dp_ray.job.job import Job
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
@options.KEYS
@options.OVERWRITE
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.option(
    "--program", metavar="WORDS", help="How a node runs dp-ray, in a container for instance; default: as here."
)
@click.argument("sbatch", metavar="[OPTION OF SBATCH]...", nargs=-1, type=click.UNPROCESSED)
def slurm(
    job_file: str, sbatch: tuple[str, ...], dry_run: bool, program: str | None, overwrite: bool, **flags: Any
) -> None:
    """Submit a job to Slurm: --nodes 4 --gpus-per-node 8 --time 2:00:00, and any option of sbatch, go to it.

    Slurm requeues the job when its time is over or a node is lost, and it goes on from where it was. For more, print
    the script with --dry-run, edit it, and give it to sbatch.
    """
    from dp_ray.places.launchers import FOLDER
    from dp_ray.places.templates import filled, submitted_to_slurm

    if job_file.startswith("-") or (sbatch and not sbatch[0].startswith("-")):
        raise click.UsageError("JOB.yaml comes first, and then options of sbatch, as --time 2:00:00")
    if any(re.match("--array|-a", option) for option in sbatch):
        raise click.UsageError(
            "--array: give each task a run of its own in the script that --dry-run prints, at job="
        )
    keys = take(KeyOptions, flags)
    job = load_job(job_file, keys.overrides())
    check_workers(job)
    command = ["run", job_file, *keys.arguments()]
    check_no_secret(
        command,
        "the script, which Slurm keeps; export it as a variable before, which Slurm hands on, or write it into the "
        "job file",
    )
    is_elastic = job.min_workers < job.max_workers
    lines = {
        "#SBATCH --job-name=": f"#SBATCH --job-name={job.run_name}",
        "#SBATCH --no-kill=off": f"#SBATCH --no-kill{'' if is_elastic else '=off'}",
        "#SBATCH --nodes=": f"#SBATCH {shlex.join(sbatch) or '--nodes=1'}",
        "program=": f"program=({program or f'{shlex.quote(sys.executable)} -m dp_ray'})",
        "job=": f"job=({shlex.join(command)})",
        "overwrite=": f"overwrite={'--overwrite' if overwrite else ''}",
        "elastic=": f"elastic={'--no-kill' if is_elastic else ''}",
    }
    text = filled("job.sbatch", lines)
    if dry_run:
        click.echo(hide(text), nl=False)
        return
    submitted = submitted_to_slurm(text, Path(FOLDER, f"{job.run_name}.sbatch"))
    say(hide(f"squeue -j {submitted} shows it; dp-ray stop {job.storage}/{job.run_name} stops it once it runs"))
    click.echo(hide(submitted))


@click.command()
@options.JOB
@options.KEYS
@click.option("--image", required=True, help="The pods' image: Python, Ray, torch and dp_ray, as here.")
@click.option("--claim", help="A PersistentVolumeClaim that all pods mount at /storage; STORAGE is below that then.")
@click.option(
    "--code-in",
    metavar="DIR|URL",
    required=True,
    help="Where the pods have your code: a folder, or a zip that Ray reads.",
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of worker pods.")
@click.option("--gpus-per-node", type=click.IntRange(0), default=0, help="GPUs of a worker pod.")
@click.option(
    "--out", metavar="FILE", type=click.File("w", atomic=True), default="-", help="File to write; default stdout."
)
def kuberay(
    job_file: str, image: str, claim: str | None, code_in: str, nodes: int, out: TextIO, **flags: Any
) -> None:
    """Print a job as a RayJob for KubeRay, for `kubectl apply -f`.

    What a pod asks for, and all else, stands in the manifest with comments: edit it.
    """
    from dp_ray.places.kuberay import CLAIM, ID, IMAGE, kubernetes_name
    from dp_ray.places.templates import filled

    for option, name, (rule, says) in (("--image", image, IMAGE), ("--claim", claim or "none", CLAIM)):
        if not rule.fullmatch(name):
            raise JobError(f"{option} {name}: must be {says}")
    path, keys = Path(job_file), take(KeyOptions, flags)
    if path.is_absolute() or not path.resolve().is_relative_to(Path.cwd()):
        raise JobError(f"{job_file}: name it as it stands below {Path.cwd()}, the folder that holds the code")
    job = load_job(job_file, keys.overrides())
    storage = _storage_of_pods(job.storage, claim)
    keys = replace(keys, name=job.run_name, storage=storage)
    there = job_file if "://" in code_in else str(Path(code_in, job_file))
    command = ["python", "-m", "dp_ray.cli.in_kubernetes", there, *keys.arguments()]
    for words in (command, ["--code-in", code_in]):
        check_no_secret(
            words, "the manifest; put it into a secret of Kubernetes, which envFrom names in the manifest"
        )
    run_dir, gpus = f"{storage.rstrip('/')}/{job.run_name}", flags["gpus_per_node"]
    stops = "preStop: {exec: {command: [python, -m, dp_ray, stop, --run-again, "
    lines = {
        "name: job": f"name: {json.dumps(kubernetes_name(job.run_name))}",
        "entrypoint:": f"entrypoint: {json.dumps(shlex.join(command))}",
        f"{ID}:": f"{ID}: {json.dumps(uuid.uuid4().hex)}",
        "rayVersion:": f"rayVersion: {json.dumps(version('ray'))}",
        "image:": f"image: {json.dumps(image)}",
        stops: f"{stops}{json.dumps(run_dir)}]}}}}",
        **{key: f"{key} {nodes}" for key in ("replicas:", "minReplicas:", "maxReplicas:")},
    }
    if gpus:
        lines["# nvidia.com/gpu:"] = f"nvidia.com/gpu: {gpus}"
    if claim is not None:
        lines["# - {name: storage, mount"] = "- {name: storage, mountPath: /storage}"
        lines["# - {name: storage, pers"] = f'- {{name: storage, persistentVolumeClaim: {{claimName: "{claim}"}}}}'
    if "://" in code_in:
        lines["working_dir:"] = f"working_dir: {json.dumps(code_in)}"
    else:
        lines |= {"working_dir:": "# working_dir: none", "# PYTHONPATH:": f"PYTHONPATH: {json.dumps(code_in)}"}
    click.echo(hide(filled("rayjob.yaml", lines)), nl=False, file=out)


def _storage_of_pods(storage: str, claim: str | None) -> str:
    """Return the storage as the pods see it: a URL, or a folder of the claim. Raises JobError if it is none."""
    if "://" in storage:
        if claim is not None:
            raise JobError(f"--claim {claim}: the storage is {hide(storage)}, so no claim is needed; leave one out")
        return storage
    if claim is None:
        raise JobError(
            f"storage: {storage} is a folder of this machine, and pods share none; give --storage s3://bucket/runs, "
            "or --claim NAME, a PersistentVolumeClaim that several pods can mount (ReadWriteMany)"
        )
    if not Path("/storage", storage).is_relative_to("/storage"):
        raise JobError(f"storage: {storage} is not below /storage, where the pods mount the claim {claim}")
    return str(Path("/storage", storage))


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
