"""The first seconds of `dp-ray run`: Ray starts or is connected to while torch is imported."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from dp_ray.cluster.ray_version import check_ray
from dp_ray.job import Job
from dp_ray.system.imports import collector_paused
from dp_ray.system.stop_signals import raise_put_off
from dp_ray.text import harmless


@contextmanager
def begun(jobs: Sequence[Job], address: str | None, is_quiet: bool, is_verbose: bool) -> Iterator[None]:
    """Say what begins, and begin to connect to Ray if a single job needs it; what is left of it ends with the block.

    The block begins when Ray is there, or has failed to: the job's own code may change the environment, which a Ray
    that starts takes over.
    """
    name = jobs[0].run_name
    with workers_begun(name, jobs, address, is_quiet):
        if len(jobs) > 1 or jobs[0].max_workers == 0:
            yield  # a session connects with the keys of all jobs
            return
        from dp_ray.cluster.connect import connected_early, what_begins

        say(f"{name}: {what_begins(address)}", is_quiet)
        with connected_early(jobs[0], address, is_verbose) as connection:
            with collector_paused():
                from dp_ray.cluster import workers  # noqa: F401
            raise_put_off()
            connection.wait()
            yield


@contextmanager
def workers_begun(name: str, jobs: Sequence[Job], address: str | None, is_quiet: bool) -> Iterator[None]:
    """Say what begins, and have what workers are forked from begin if jobs need it; it ends with the block."""
    if all(job.max_workers == 0 for job in jobs):
        say(f"{name}: importing torch", is_quiet)
        yield
        return
    say_import(name, is_quiet)
    with forked_early(jobs[0], address):
        yield


@contextmanager
def forked_early(job: Job, address: str | None) -> Iterator[None]:
    """Have the process begin from which the workers of a Ray of its own are forked; it ends with the block."""
    check_ray()
    from dp_ray.cluster.forking import forking_early

    with forking_early(job, address):
        yield


def say_import(name: str, is_quiet: bool) -> None:
    """Say that torch and Ray are being imported, which takes the first seconds of a run."""
    say(f"{name}: importing torch and Ray", is_quiet)


def say(line: str, is_quiet: bool) -> None:
    """Write a line to stderr."""
    if not is_quiet:
        click.echo(harmless(line), err=True)
