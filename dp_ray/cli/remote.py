"""The commands for runs that go on elsewhere: submit, status, logs, stop, fetch."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from dp_ray.cli import options
from dp_ray.cli.completion import folders, run_dirs
from dp_ray.cli.options import KeyOptions, check_no_secret, say, take
from dp_ray.errors import JobError
from dp_ray.job.files import load_job
from dp_ray.system.process import is_env
from dp_ray.text import harmless, hide, json_text

DASHBOARD = click.option("--address", required=True, help="The cluster's dashboard, like http://HEAD:8265.")


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
    """Run a job on a cluster through its dashboard, and follow it; after Ctrl-C it goes on."""
    keys = take(KeyOptions, flags)
    job = load_job(job_file, keys.overrides())
    if not Path(job_file).is_absolute() and not Path(job_file).resolve().is_relative_to(Path.cwd()):
        raise JobError(
            f"{job_file}: is not below {Path.cwd()}, the folder that is sent to the cluster; stand above it"
        )
    from dp_ray.cluster.ray_version import check_ray

    check_ray()
    from dp_ray.cluster.submit import submit_and_follow

    # Values of env are kept out of the command, which Ray's dashboard and logs show.
    secrets = [setting for setting in keys.settings if is_env(setting)]
    shown = replace(keys, settings=tuple(setting for setting in keys.settings if setting not in secrets))
    given = [*shown.arguments(), *(["--inject", flags["inject"]] if flags["inject"] else [])]
    given += [f"--{key.removeprefix('as_')}" for key in ("overwrite", "shapes", "as_json") if flags[key]]
    program = ["python", "-m", "dp_ray", "run", job_file, *given]
    check_no_secret(
        program,
        "Ray's dashboard and logs; write it into the job file, or leave it to the nodes' environment",
    )
    sys.exit(submit_and_follow(address, program, secrets, job.run_name, job.storage))


@click.command()
@click.argument("name", required=False)
@click.option("--address", help="The cluster's dashboard, like http://HEAD:8265.")
@options.JSON
def status(name: str | None, address: str | None, as_json: bool) -> None:
    """Show the submitted jobs of a cluster, or a single one: by its id, or the newest by a run's name."""
    if address is None:
        raise click.UsageError(
            "Missing option '--address', like http://HEAD:8265: status shows what was submitted to a cluster; "
            "dp-ray list shows the runs in a storage, dp-ray report RUN_DIR one of them"
        )
    from dp_ray.cluster.submit import Dashboard

    dashboard = Dashboard(address)
    rows = [_row(job) for job in ([dashboard.find(name)] if name else dashboard.jobs())]
    if as_json:
        click.echo(json_text(rows))
        return
    if not rows:
        click.echo("no job was submitted")
        return
    from dp_ray.results.text import in_columns

    shown = [["-" if row[key] in (None, "") else str(row[key]) for key in SHOWN] for row in rows]
    click.echo(harmless(in_columns([[key.replace("_", " ") for key in SHOWN], *shown])))
    if name and rows[0]["message"]:
        click.echo(harmless(rows[0]["message"]))


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
@click.argument("name")
@click.option(
    "--follow", "-f", "follows", is_flag=True, help="Go on until the job ends; its exit status is the job's."
)
@DASHBOARD
def logs(name: str, follows: bool, address: str) -> None:
    """Show what a submitted job has printed."""
    from dp_ray.cluster.submit import Dashboard, follow

    dashboard = Dashboard(address)
    job = dashboard.find(name)
    if follows:
        sys.exit(follow(dashboard, job.submission_id))
    click.echo(hide(dashboard.logs(job.submission_id)), nl=False)


@click.command()
@click.argument("run", metavar="RUN_DIR|NAME", shell_complete=run_dirs)
@click.option("--address", help="The dashboard of the cluster on which the submitted run NAME is.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it has stopped.")
@click.option(
    "--run-again", is_flag=True, help="Have it end with exit status 75, so that its launcher runs it again."
)
def stop(run: str, address: str | None, no_wait: bool, run_again: bool) -> None:
    """Stop a run or a sweep after its current step, and keep its work: the same command goes on from there."""
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


@click.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", default="runs", shell_complete=folders)
@click.option("--weights", is_flag=True, help="The weights alone; of a training that goes on, its newest checkpoint.")
@click.option("--outputs", is_flag=True, help="The outputs alone.")
@click.option("--page", is_flag=True, help="The page alone.")
@click.option("--address", help="The dashboard of the cluster that ran it, like http://HEAD:8265.")
@click.option(
    "--storage",
    shell_complete=folders,
    help="Where the run lies, as the cluster sees it. Default: where its job put it.",
)
@click.option("--overwrite", is_flag=True, help="Replace a run of this name in DIR.")
def fetch(name: str, folder: str, address: str | None, storage: str | None, overwrite: bool, **kinds: Any) -> None:
    """Bring the run of a submitted job, by its name or the job's id, to DIR/NAME; DIR is `runs` if you name none."""
    from dp_ray.cluster.fetch import FetchRequest, fetch_run

    wanted = tuple(kind for kind, is_wanted in kinds.items() if is_wanted)
    for run_dir in fetch_run(FetchRequest(name, wanted, storage, address, overwrite), Path(folder), say):
        click.echo(harmless(str(run_dir)))
