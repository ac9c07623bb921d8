"""The commands that show runs: report, compare, list, watch, track, replay."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dp_ray.cli import options
from dp_ray.cli.completion import folders
from dp_ray.cli.options import say
from dp_ray.errors import JobError, StorageError
from dp_ray.text import harmless, json_text

if TYPE_CHECKING:
    from dp_ray.storage import Storage


@click.command()
@options.RUN_DIRS
@options.SHAPES
@click.option(
    "--html",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Write the page of the run, or of several, to FILE; default report.html in the first one's directory.",
)
@options.RESULT_JSON
def report(run_dirs: tuple[str, ...], shapes: bool, as_json: bool, html: str | None = None) -> None:
    """Show a run's result, or what an unfinished run has kept; compare several runs side by side."""
    if html is not None:
        from dp_ray.report.comparison import save_page

        if len(run_dirs) > 1 and not html:
            raise click.UsageError("--html needs a FILE for the page that compares several runs")
        click.echo(harmless(save_page(run_dirs, html or None)))
        return
    if len(run_dirs) > 1:
        if shapes:
            raise click.UsageError(f"--shapes takes one RUN_DIR, got {len(run_dirs)}")
        _compare(run_dirs, as_json)
        return
    from dp_ray.records import damage_told

    with damage_told(run_dirs[0]):
        lines = list(_reported(run_dirs[0], shapes, as_json))
    for line in lines:
        click.echo(harmless(line))


def _reported(run_dir: str, shapes: bool, as_json: bool) -> Iterator[str]:
    """Yield the lines on a run: if it is unfinished, what it has kept; and its result, if it has one."""
    from dp_ray.results.result import lines, load
    from dp_ray.rundir.unfinished import unfinished

    state = unfinished(run_dir) if not shapes else None
    if state and not as_json:
        yield str(state)
        if state.status != "running":
            yield "run the same command to resume"
    if state and not state.has_result:
        if as_json:
            yield json_text(state.to_json())
        return
    result = load(run_dir)
    if shapes:
        yield from result.shape_lines()
    if as_json:
        yield json_text(result.to_json())
    elif not shapes:
        if result.status == "failed":
            yield f"failed: {result.error}"
        yield from lines(result)


@click.command()
@options.RUN_DIRS
@options.JSON
@click.option("--html", metavar="FILE", help="Write a page with the runs' curves laid over each other.")
def compare(run_dirs: tuple[str, ...], as_json: bool, html: str | None) -> None:
    """Compare runs: what differs in their jobs and environments, their metrics, speed and curves."""
    if len(run_dirs) < 2:
        raise click.UsageError("compare takes at least two RUN_DIRs")
    if html is not None:
        from dp_ray.report.comparison import save_page

        save_page(run_dirs, html)
    _compare(run_dirs, as_json)


def _compare(run_dirs: tuple[str, ...], as_json: bool) -> None:
    from dp_ray.records import damage_told
    from dp_ray.results.compare import comparison_text, comparison_values, read_compared_run
    from dp_ray.storage import Storage

    runs = []
    for run_dir in run_dirs:
        with damage_told(run_dir):
            runs.append(read_compared_run(Storage(run_dir)))
    with damage_told(" or ".join(run_dirs)):
        text = json_text(comparison_values(runs)) if as_json else comparison_text(runs, options.terminal_width())
        click.echo(text if as_json else harmless(text))


@click.command()
@options.RUN_DIR
@click.option("--wait", type=click.FloatRange(0), default=60.0, metavar="SECONDS", help="For the run to begin: 60.")
def watch(run_dir: str, wait: float) -> None:
    """Watch a run from another terminal: print the lines of its console until it ends."""
    from dp_ray.records import damage_told
    from dp_ray.rundir.files import RUN, runs_there
    from dp_ray.storage import located

    run = located(run_dir)
    with suppress(StorageError):  # an object store that does not answer for a moment
        if not run.exists(RUN):
            say(f"{run}: there is no run yet, and it is waited for, {wait:g} s{runs_there(run)}")
    with damage_told(run):
        for line in watched_lines(run, wait):
            click.echo(harmless(line))


def watched_lines(run: "Storage", wait: float = math.inf) -> Iterator[str]:
    """Yield the lines of a run's console while another process drives it, and how it ended.

    Raises JobError if there is no run within `wait` seconds: its name may be mistyped.
    """
    from dp_ray.monitor.console import LINE_SECONDS, progress_line
    from dp_ray.results.text import measured, time_span
    from dp_ray.rundir.files import RESULT, RESULT_JSON, runs_there
    from dp_ray.rundir.incidents import INCIDENTS, INCIDENTS_JSON
    from dp_ray.rundir.listing import NO_RUN, PROGRESS_JSON, WATCH_SECONDS, watched

    num_told, line_told, due, last = 0, "", 0.0, time.monotonic() + wait
    while True:
        row = watched(run)
        if row.status != NO_RUN:
            last = math.inf
        elif time.monotonic() > last:
            raise JobError(f"{run}: no run has begun there within {wait:g} s; --wait sets how long{runs_there(run)}")
        log = INCIDENTS_JSON.read(run, RESULT if row.status == "done" else INCIDENTS)
        events = [text for by in log.interruptions for text in (f"interrupted, {by}", by.resumption)]
        if log.is_interrupted:
            events.pop()  # it has not resumed yet
        yield from (f"{row.name}: {event}" for event in events[num_told:])
        num_told = len(events)
        if row.has_ended:
            break
        line = "waiting, there is no run yet" if row.status == NO_RUN else "starting"
        if row.status != NO_RUN and (noted := PROGRESS_JSON.read(run)):
            line = progress_line(noted, noted["rows_per_second"], noted["metrics"], time.time() - noted["at"])
        if line != line_told and time.monotonic() >= due:
            yield f"{row.name}: {line}"
            line_told, due = line, time.monotonic() + LINE_SECONDS
        time.sleep(WATCH_SECONDS[run.is_atomic])
    steps = f", {row.step}/{row.steps} steps" if row.steps else ""
    ago = "" if row.age is None else f", {time_span(row.age)} ago"
    metrics = "".join(f", {name} {value}" for name, value in measured(row.metrics).items())
    yield f"{row.name}: {row.status}{steps}{ago}{metrics}"
    if row.status == "unfinished":
        yield "its driver was killed; run the same command to resume"
    error = RESULT_JSON.read(run).get("error") if row.status == "failed" else None
    yield from str(error or row.note).splitlines()


@click.command()
@options.RUN_DIR
def track(run_dir: str) -> None:
    """Send to the trackers of a run that has ended the rows that they lack."""
    from dp_ray.records import damage_told
    from dp_ray.trackers.process import send_late

    with damage_told(run_dir):
        for line in send_late(run_dir):
            say(line)


@click.command()
@options.RUN_DIR
@click.option("--step", type=click.IntRange(0), required=True, help="The step, counted from 0 over all epochs.")
@click.option("--shard", type=click.IntRange(0), help="Look at this shard of the step alone.")
@click.option("--pdb", "debugs", is_flag=True, help="Then debug the first module that is not finite, or what raised.")
@options.JSON
def replay(run_dir: str, step: int, shard: int | None, debugs: bool, as_json: bool) -> None:
    """Run a step of a training again in this process: its loss, its rows, what is not finite; writes nothing."""
    from dp_ray.driver.replay import replay as run_replay
    from dp_ray.replay.replay import StepChoice

    stdout = sys.stdout  # the replay redirects it while user code runs
    for replayed in run_replay(run_dir, StepChoice(step, shard), say, debugs):
        click.echo(json_text(replayed.to_json()) if as_json else harmless("\n".join(replayed.lines())), file=stdout)


@click.command("list")
@click.argument("storage", metavar="[STORAGE]", default="runs", shell_complete=folders)
@click.option("--sort", metavar="KEY", default="age", help="A column or a metric; default: age, the newest first.")
@click.option("--reverse", "is_reversed", is_flag=True, help="The largest first.")
@options.JSON
def list_runs(storage: str, sort: str, is_reversed: bool, as_json: bool) -> None:
    """List all runs in a storage (default: runs, as of a job): status, age, steps, metrics."""
    from dp_ray.results.text import list_text
    from dp_ray.rundir.listing import listed_runs, sorted_by
    from dp_ray.storage import located

    rows = sorted_by(listed_runs(located(storage)), sort, is_reversed)
    click.echo(
        json_text([row.to_json() for row in rows]) if as_json else harmless(list_text(rows, options.terminal_width()))
    )
