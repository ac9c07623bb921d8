"""The commands that bring a job to the hosts that a launcher gives: node, slurm."""

import os
import sys
from contextlib import suppress
from typing import Any

import click

from dp_ray.cli.options import KeyOptions, say, take
from dp_ray.errors import Error, JobError
from dp_ray.job.files import load_job
from dp_ray.job.job import Job
from dp_ray.text import listed

ON_HOSTS = ("run", "sweep", "evaluate", "predict", "retry", "verify")  # the commands that `node` runs
COMMAND = click.argument("command", metavar="-- run JOB.yaml ...", nargs=-1, required=True, type=click.UNPROCESSED)


@click.command()
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
    jobs: list[Job] = []
    with suppress(*(() if place.rank == 0 else (Error,))):  # another host may lack the job's file
        jobs = jobs_of(command)
    from dp_ray.cluster.ray_version import check_ray
    from dp_ray.places.node import Wanted, run_on_this_host
    from dp_ray.places.own_ray import Machine

    check_ray()
    capacities = [job.timeouts.capacity for job in jobs] or [Wanted.capacity]
    capacity = None if None in capacities else max(filter(None, capacities))
    wanted = Wanted(command, capacity, bool(jobs) and all(job.min_workers < job.max_workers for job in jobs))
    sys.exit(run_on_this_host(place, wanted, Machine(**machine), lambda text: say(f"dp-ray node: {text}")))


def jobs_of(command: tuple[str, ...]) -> list[Job]:
    """Return the jobs that the arguments of dp-ray run, none if they name no job file; raises JobError if wrong."""
    name, *arguments = command
    if name not in ON_HOSTS:
        raise JobError(f"{name}: `dp-ray node` runs one of {listed(ON_HOSTS)}: dp-ray node ... -- run JOB.yaml")
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group), "it has the commands"
    with group.commands[name].make_context(f"dp-ray {name}", list(arguments)) as given:
        flags = dict(given.params)
    if flags.get("address"):
        raise JobError(
            f"--address {flags['address']}: `dp-ray node` starts the Ray that the job runs on; leave it out"
        )
    files = flags.get("job_files") or [flags[key] for key in ("job_file",) if key in flags]
    if name == "verify":
        flags.pop("workers")
    jobs = [load_job(job_file, take(KeyOptions, dict(flags)).overrides()) for job_file in files]
    if here := [job.run_name for job in jobs if job.max_workers == 0]:
        raise JobError(f"workers: 0 runs {listed(here)} in a single process; `dp-ray node` is for several hosts")
    return jobs
