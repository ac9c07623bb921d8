"""The command line: `main` runs it; the commands run, plan, verify, evaluate, predict, retry and schema.

The commands to begin with, for sweeps, for submitted jobs and for showing runs stand beside this module.
"""

import io
import json
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TextIO

import click

from dp_ray import __version__
from dp_ray.cli import completion, options
from dp_ray.cli.begin import FIRST_SCREEN, init
from dp_ray.cli.options import KeyOptions, announced, say, say_import, show_error, take
from dp_ray.cli.places import kuberay, node, slurm
from dp_ray.cli.remote import fetch, logs, status, stop, submit
from dp_ray.cli.runs import compare, list_runs, replay, report, track, watch
from dp_ray.cli.sweep import sweep
from dp_ray.errors import BAD_JOB, ClusterLost, Error, exit_status_of, status_of_several
from dp_ray.job.files import load_job, parse_counts
from dp_ray.system.imports import collector_paused
from dp_ray.text import harmless, json_text

_at_end = ExitStack()  # closed when the outcome has been said


def main() -> None:
    """Run the program; its exit status is one of `dp_ray.errors.EXIT_STATUSES`."""
    with _at_end:
        try:
            cli(standalone_mode=False, complete_var=completion.VARIABLE)
        except click.exceptions.Exit as leaving:
            sys.exit(leaving.exit_code)
        except click.ClickException as error:
            error.show(shown := io.StringIO())
            say(shown.getvalue().rstrip("\n"))
            sys.exit(BAD_JOB)
        except (click.Abort, KeyboardInterrupt) as stopped:
            says = stopped.__cause__ if isinstance(stopped, click.Abort) else stopped
            say(str(says or "") or "interrupted")
            sys.exit(exit_status_of(says or KeyboardInterrupt()))
        except Error as error:
            show_error(error, is_verbose="--verbose" in sys.argv)
            sys.exit(exit_status_of(error))
        except Exception as error:  # a mistake of dp_ray's own
            say(traceback.format_exc().rstrip("\n"))
            sys.exit(exit_status_of(error))


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(__version__)
@click.pass_context
def cli(context: click.Context) -> None:
    """Run PyTorch models data-parallel on Ray clusters: exact, elastic, merged."""
    if context.invoked_subcommand is None:
        click.echo(harmless(FIRST_SCREEN))


@cli.command()
@click.argument(
    "job_files", metavar="JOB.yaml", nargs=-1, required=True, type=click.Path(), shell_complete=completion.job_files
)
@options.KEYS
@options.ADDRESS
@options.RUN_FLAGS
@click.option("--keep-going", is_flag=True, help="Of several jobs: run the rest after one has failed.")
@options.RESULT_JSON
@options.VERBOSITY
@click.option("--env-from", hidden=True, help="Where `submit` left the settings of env.")
def run(job_files: tuple[str, ...], keep_going: bool, as_json: bool, env_from: str | None, **flags: Any) -> None:
    """Run a job to its end, or resume its unfinished run; several jobs run on the same workers, one after another."""
    keys = take(KeyOptions, flags)
    if env_from is not None:
        from dp_ray.cluster.submit import take_settings

        keys = replace(keys, settings=(*keys.settings, *take_settings(env_from)))
    jobs = [load_job(job_file, keys.overrides()) for job_file in job_files]
    # Before the imports below, which take seconds: Ray starts meanwhile.
    connection = _at_end.enter_context(announced(jobs, flags["address"], flags["quiet"], flags["verbose"]))
    from dp_ray.driver.run import Options
    from dp_ray.driver.several import running

    failures: list[int] = []
    of_each = Options(**flags, connection=connection)
    with running(jobs, of_each) as execute:
        for job in jobs:
            try:
                result = execute(job, of_each)
            except (KeyboardInterrupt, ClusterLost) as ended:  # no other job can run
                vars(ended)["exit_status"] = status_of_several([*failures, exit_status_of(ended)])
                raise
            except Error as error:
                if not keep_going:
                    raise
                show_error(error, flags["verbose"])
                failures.append(error.exit_status)
                continue
            if as_json:
                click.echo(json_text(result.to_json()))
    if failures:
        sys.exit(status_of_several(failures))


@cli.command()
@options.JOB
@options.KEYS
@click.option("--memory", is_flag=True, help="Also the memory of a worker's devices, for each number of workers.")
@click.option(
    "--gpu-memory",
    type=click.FloatRange(0, min_open=True),
    metavar="GIB",
    help="What a GPU has. Default: this machine's.",
)
@options.JSON
def plan(job_file: str, memory: bool, gpu_memory: float | None, as_json: bool, **keys: Any) -> None:
    """Show what a run of a job will do: its steps, and which worker gets which shards; starts no Ray."""
    job = load_job(job_file, KeyOptions(**keys).overrides())
    from dp_ray.driver.planning import plan_job, plan_memory_of
    from dp_ray.plan.costs import plan_table

    planned = plan_job(job)
    needed = plan_memory_of(job, gpu_memory) if memory or gpu_memory is not None else None
    if as_json:
        click.echo(json_text({**planned.to_json(), **({} if needed is None else {"memory": needed.to_json()})}))
    else:
        click.echo(harmless("\n".join([plan_table(planned), *(() if needed is None else needed.lines())])))


@cli.command()
@options.JOB
@click.option("--workers", metavar="N,N,...", required=True, help="The numbers of workers to compare: 1,2,3,8.")
@options.SETTINGS
@options.STORAGE
@options.ADDRESS
@click.option("--tolerance", type=float, help="Relative difference to allow where the job is not bitwise.")
@click.option("--resumed", is_flag=True, help="Also stop a training halfway and let it go on.")
@options.JSON
@options.VERBOSITY
def verify(job_file: str, workers: str, tolerance: float | None, resumed: bool, as_json: bool, **flags: Any) -> None:
    """Run a job on several numbers of workers and check that the results are the same."""
    counts = parse_counts(workers)
    job = load_job(job_file, replace(take(KeyOptions, flags), workers=str(counts[0])).overrides())
    say_import(job.run_name, flags["quiet"])
    with collector_paused():
        from dp_ray.driver.run import Options
        from dp_ray.driver.verify import verify as run_verify

    of_each = Options(**flags, overwrite=True, brief=True)
    verdict = run_verify(job, counts, of_each, tolerance, resumed)
    click.echo(verdict.to_json() if as_json else harmless(str(verdict)))
    sys.exit(0 if verdict.same else 1)


@cli.command()
@options.OF_A_TRAINING
def evaluate(**flags: Any) -> None:
    """Evaluate the weights of a training."""
    _follow_up("evaluate", **flags)


@cli.command()
@options.OF_A_TRAINING
def predict(**flags: Any) -> None:
    """Predict with the weights of a training."""
    _follow_up("predict", **flags)


def _follow_up(task: Any, run_dir: str, weights: Any, as_json: bool, **flags: Any) -> None:
    keys = take(KeyOptions, flags)
    say_import(keys.name or run_dir, flags["quiet"])
    from dp_ray.driver.from_run import follow_up
    from dp_ray.driver.run import Options, execute

    job, lines = follow_up(task, run_dir, weights, keys.overrides())
    # On stderr, as all that is not asked for: with --json, stdout has the result alone.
    for line in () if flags["quiet"] else lines:
        say(line)
    result = execute(job, Options(**flags))
    if as_json:
        click.echo(json_text(result.to_json()))


@cli.command()
@options.RUN_DIR
@options.WORKERS
@options.SETTINGS
@options.ADDRESS
@options.RESULT_JSON
@options.VERBOSITY
def retry(run_dir: str, as_json: bool, **flags: Any) -> None:
    """Run again what a prediction has set aside; what succeeds takes its place in the order of the outputs."""
    say_import(run_dir, flags["quiet"])
    from dp_ray.driver.from_run import reopened, retried
    from dp_ray.driver.run import Options, execute

    keys = take(KeyOptions, flags)
    result = execute(retried(run_dir, keys.overrides()), Options(**flags), reopen=reopened)
    if as_json:
        click.echo(json_text(result.to_json()))


@cli.command()
@click.option(
    "--out", metavar="FILE", type=click.File("w", atomic=True), default="-", help="File to write; default stdout."
)
def schema(out: TextIO) -> None:
    """Print the JSON schema of job files, for editors."""
    from dp_ray.job.files import json_schema

    click.echo(json.dumps(json_schema(), indent=2), file=out)


for command in (
    init,
    completion.completion,
    sweep,
    submit,
    status,
    logs,
    stop,
    fetch,
    kuberay,
    report,
    compare,
    list_runs,
    watch,
    track,
    replay,
    node,
    slurm,
):
    cli.add_command(command)
