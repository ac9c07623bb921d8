"""The commands for runs that go on elsewhere: submit, status, logs, stop."""

import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from dp_ray.cli import options
from dp_ray.cli.completion import run_dirs
from dp_ray.cli.options import KeyOptions, say
from dp_ray.errors import JobError
from dp_ray.job.files import load_job
from dp_ray.text import harmless, hide, json_text

DASHBOARD = click.option("--address", required=True, help="The cluster's dashboard, like http://HEAD:8265.")
OF_SLURM = "slurm:"  # before the id of a job of Slurm
DASHBOARD_OR_SLURM = click.option(
    "--address", help="The cluster's dashboard, like http://HEAD:8265; none for slurm:ID."
)


def _slurm_job(name: str | None, address: str | None) -> str | None:
    """Return the id of a job of Slurm; None for one of a cluster with a dashboard, whose address it must have."""
    if name is not None and name.startswith(OF_SLURM):
        if address is not None:
            raise click.UsageError(f"{name} is a job of Slurm, which has no --address")
        if not re.fullmatch(r"\d+([_+]\d+)?", job := name.removeprefix(OF_SLURM)):
            raise click.UsageError(f"{name}: a job of Slurm is slurm:ID, and a task of an array slurm:ID_TASK")
        return job
    if address is None:
        raise click.UsageError("Missing option '--address'; or name a job of Slurm, as slurm:12345.")
    return None


@click.command()
@options.JOB
@options.WORKERS
@options.SETTINGS
@click.option("--name", help="The run's name.")
@click.option("--storage", help="Folder or URL of the run directories, as the cluster sees it.")
@DASHBOARD
@options.RUN_FLAGS
@options.RESULT_JSON
def submit(job_file: str, address: str, **flags: Any) -> None:
    """Run a job on a cluster through its dashboard, and follow it; Ctrl-C asks whether to stop it or to detach."""
    keys = KeyOptions(**{key: flags[key] for key in ("workers", "settings", "name", "storage", "profile")})
    job = load_job(job_file, keys.overrides())
    if not Path(job_file).is_absolute() and not Path(job_file).resolve().is_relative_to(Path.cwd()):
        raise JobError(
            f"{job_file}: is not below {Path.cwd()}, the folder that is sent to the cluster; stand above it"
        )
    from dp_ray.cluster.ray_version import check_ray

    check_ray()
    from dp_ray.cluster.submit import submit_and_follow
    from dp_ray.system.process import is_env

    given = ["--workers", keys.workers] if keys.workers else []
    given += [part for setting in keys.settings if not is_env(setting) for part in ("--set", setting)]
    valued = [key for key in ("name", "storage", "inject", "profile") if flags[key]]
    given += [part for key in valued for part in (f"--{key}", flags[key])]
    given += [f"--{key}" for key in ("overwrite", "shapes") if flags[key]]
    given += ["--json"] if flags["as_json"] else []
    program = ["python", "-m", "dp_ray", "run", job_file, *given]
    if hide(shlex.join(program)) != shlex.join(program):
        raise JobError(
            f"{hide(shlex.join(program))}: a secret in a URL would stand in Ray's dashboard and logs; "
            "write the URL into the job file, or leave the secret to the nodes' environment"
        )
    # Values of env are kept out of the command, which Ray's dashboard and logs show.
    secrets = [setting for setting in keys.settings if is_env(setting)]
    sys.exit(submit_and_follow(address, program, secrets, job.run_name, job.storage))


@click.command()
@click.argument("name", metavar="[NAME|slurm:ID]", required=False)
@DASHBOARD_OR_SLURM
@options.JSON
def status(name: str | None, address: str | None, as_json: bool) -> None:
    """Show the submitted jobs of a cluster, or a single one: by its id, or the newest by a run's name."""
    if (of_slurm := _slurm_job(name, address)) is not None:
        from dp_ray.places.slurm import jobs_in_slurm

        tasks = [job.to_json() for job in jobs_in_slurm(of_slurm)]
        if as_json:
            click.echo(json_text(tasks))
        else:
            _print_columns(tasks, [key for key in tasks[0] if key != "output"])
        return
    from dp_ray.cluster.submit import Dashboard

    dashboard = Dashboard(address or "")
    rows = [_row(job) for job in ([dashboard.find(name)] if name else dashboard.jobs())]
    if as_json:
        click.echo(json_text(rows))
        return
    if not rows:
        click.echo("no job was submitted")
        return
    _print_columns(rows, SHOWN)
    if name and rows[0]["message"]:
        click.echo(harmless(rows[0]["message"]))


def _print_columns(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    from dp_ray.results.text import in_columns

    shown = [["-" if row[key] in (None, "") else str(row[key]) for key in keys] for row in rows]
    click.echo(harmless(in_columns([[key.replace("_", " ") for key in keys], *shown])))


SHOWN = ("name", "id", "status", "started", "seconds", "exit_status")


def _row(job: Any) -> dict[str, Any]:
    from dp_ray.cluster.submit import STATUSES, job_exit_status, run_name_of

    started = None if job.start_time is None else datetime.fromtimestamp(job.start_time / 1000).astimezone()
    ended = datetime.now().timestamp() if not job.end_time else job.end_time / 1000
    return {
        "name": run_name_of(job),
        "id": job.submission_id,
        "status": STATUSES[job.status],
        "started": started and started.isoformat(timespec="seconds"),
        "seconds": started and round(ended - started.timestamp(), 1),
        "exit_status": job_exit_status(job) if job.status.is_terminal() else None,
        "entrypoint": job.entrypoint,
        "message": job.message,
    }


@click.command()
@click.argument("name", metavar="NAME|slurm:ID")
@click.option(
    "--follow", "-f", "follows", is_flag=True, help="Go on until the job ends; its exit status is the job's."
)
@DASHBOARD_OR_SLURM
def logs(name: str, follows: bool, address: str | None) -> None:
    """Show what a submitted job has printed."""
    if (of_slurm := _slurm_job(name, address)) is not None:
        from dp_ray.places.slurm import printed, single

        for text in printed(of_slurm, follows):
            click.echo(harmless(hide(text)), nl=False)
        sys.exit((single(of_slurm).exit_status or 0) if follows else 0)
    from dp_ray.cluster.submit import Dashboard, follow

    dashboard = Dashboard(address or "")
    job = dashboard.find(name)
    if follows:
        sys.exit(follow(dashboard, job.submission_id))
    click.echo(hide(dashboard.logs(job.submission_id)), nl=False)


@click.command()
@click.argument("run", metavar="RUN_DIR|NAME|slurm:ID", shell_complete=run_dirs)
@click.option("--address", help="The dashboard of the cluster on which the submitted run NAME is.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has stopped.")
@click.option(
    "--run-again", is_flag=True, help="Have it end with exit status 75, so that its launcher runs it again."
)
def stop(run: str, address: str | None, no_wait: bool, run_again: bool) -> None:
    """Stop a run or a sweep after its current step, and keep its work: the same command goes on from there."""
    if run.startswith(OF_SLURM):
        from dp_ray.places.slurm import stop_in_slurm

        click.echo(harmless(stop_in_slurm(str(_slurm_job(run, address)), not no_wait, say, run_again)))
        return
    if address is None:
        from dp_ray.rundir.lease import stop_run

        click.echo(harmless(stop_run(run, not no_wait, say, run_again)))
        return
    if run_again:
        raise click.UsageError(
            "--run-again: Ray keeps no exit status of a job that it stops; name the RUN_DIR instead"
        )
    from dp_ray.cluster.submit import Dashboard, stop_job

    click.echo(harmless(stop_job(Dashboard(address), run, not no_wait, say)))
