"""The command that runs a job with several values of some of its keys: sweep."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from dp_ray.cli import options
from dp_ray.cli.options import KeyOptions, say_begin, take
from dp_ray.errors import JobError
from dp_ray.job.files import job_maker
from dp_ray.system.imports import check_installed, collector_paused
from dp_ray.text import harmless, json_text

if TYPE_CHECKING:
    from dp_ray.storage import Storage
    from dp_ray.sweeps.define import Definition, Mode
    from dp_ray.sweeps.record import SweepRecord

POSITIVE = click.IntRange(1)


@click.command()
@options.JOB
@click.option(
    "--over",
    "overs",
    metavar="KEY=VALUES",
    multiple=True,
    required=True,
    help="A key and its values, --over batch_size=32,64, or with --search a range: 1..10, 0.0..0.5:0.1, "
    "log(1e-5..1e-2). Several: all combinations.",
)
@click.option("--search", type=click.Choice(["optuna"]), help="Have optuna choose the values of each trial.")
@click.option("--trials", type=POSITIVE, metavar="N", help="How many trials a search runs.")
@click.option("--metric", metavar="NAME", help="What compares trials. Default: checkpoint.best's, eval_loss or loss.")
@click.option("--minimize", is_flag=True, help="The least value of the metric is best.")
@click.option("--maximize", is_flag=True, help="The largest value of the metric is best.")
@click.option(
    "--parallel", type=POSITIVE, metavar="N", help="Trials at a time. Default: as many as there is room for."
)
@click.option("--fail-fast", is_flag=True, help="Stop after the first trial that fails.")
@click.option("--dry-run", is_flag=True, help="Check all trials and show them; run nothing.")
@options.WORKERS
@options.SETTINGS
@click.option("--name", help="The sweep's name: it lies in STORAGE/NAME, its runs in STORAGE/NAME-1 ...")
@options.STORAGE
@options.ADDRESS
@click.option("--overwrite", is_flag=True, help="Delete a sweep of the same name with its trials' runs.")
@options.JSON
@options.VERBOSITY
def sweep(job_file: str, parallel: int | None, fail_fast: bool, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Run a job with several values of some of its keys; each trial is a run. The same command resumes the sweep."""
    definition = _defined(job_file, take(TrialOptions, flags), take(KeyOptions, flags))
    jobs = [definition.job(1, picked) for picked in definition.probes()]
    is_new = flags.pop("overwrite")
    from dp_ray.storage import located
    from dp_ray.sweeps.record import open_record

    base = located(jobs[0].storage)
    record = open_record(definition, base, is_new)
    # A sweep that is over is only shown: it needs neither torch nor Ray.
    if not dry_run and not record.is_over:
        say_begin(definition.name, jobs, flags["quiet"])
    if not record.is_over:
        with collector_paused():
            from dp_ray.driver.run import Options
            from dp_ray.sweeps import run
        run.check_jobs(jobs)
        if not is_new:
            run.check_places(record, base)
    if not dry_run and not record.is_over:
        run.run_sweep(record, base, Options(**flags), parallel, fail_fast, is_new)
    _show(record, base, dry_run, as_json)


@dataclass(frozen=True)
class TrialOptions:
    """The options that say which trials a sweep has, and by which metric they are compared."""

    overs: tuple[str, ...]
    search: str | None
    trials: int | None
    metric: str | None
    minimize: bool
    maximize: bool


def _defined(job_file: str, of: TrialOptions, keys: KeyOptions) -> "Definition":
    """Return the sweep that the command line defines; raise JobError that names the option or the key at fault."""
    from dp_ray.sweeps.define import Definition, check_axes, chosen_metric, combinations, parse_axis

    axes = tuple(map(parse_axis, of.overs))
    overrides = replace(keys, name=None).overrides()  # the name is the sweep's
    check_axes(axes, overrides, of.search is not None)
    if of.minimize and of.maximize:
        raise JobError("--minimize, --maximize: give one of them")
    if (of.search is None) != (of.trials is None):
        raise JobError(
            "--trials: says how long a search is, so it needs --search optuna; without it each combination runs once"
            if of.search is None
            else "--search: needs --trials N, the number of trials that it runs"
        )
    if of.search is not None:
        check_installed(f"--search {of.search}: the package", of.search, "sweep")
    make = job_maker(job_file)
    trials = of.trials or combinations(axes)
    sweep = Definition("", lambda picked: make({**overrides, **picked}), axes, trials, of.search)
    first = make({**overrides, **sweep.values(next(sweep.probes()))})
    mode: Mode | None = "min" if of.minimize else "max" if of.maximize else None
    metric, mode = chosen_metric(first, of.metric, mode)
    if of.search is not None and metric is None:
        raise JobError(f"--search {of.search}: the job measures nothing to search by: its task is {first.task}")
    return replace(sweep, name=keys.name or f"{first.run_name}-sweep", metric=metric, mode=mode)


def _show(record: "SweepRecord", base: "Storage", dry_run: bool, as_json: bool) -> None:
    """Print the trials, best first, and exit with status 1 if one has failed."""
    from dp_ray.sweeps.record import space, to_json, trials_table

    if as_json:
        click.echo(json_text(to_json(record, base)))
    else:
        lines = space(record.definition) if dry_run else []
        click.echo(harmless("\n".join([*lines, *([trials_table(record, base)] if record.trials else [])])))
    if not dry_run and any(trial.state == "failed" for trial in record.trials):
        sys.exit(1)
