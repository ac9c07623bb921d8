"""The arguments and options that several commands take, and the keys of a job that they set."""

from pathlib import Path
from typing import Any

import click

from dp_ray.job import Job
from dp_ray.job_file import load_job, parse_setting, parse_workers

JOB = click.argument("job_file", metavar="JOB.yaml", type=click.Path())
WORKERS = click.option("--workers", metavar="N|MIN:MAX", help="Number of workers, or a range of it.")
SETTINGS = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Set any key of the job: --set model.args.width=64."
)
INJECT = click.option(
    "--inject",
    metavar="FAULTS",
    default="",
    help="Faults to inject: 'kill worker 1 at step 20; kill node 2 at step 40'.",
)
PROFILE = click.option(
    "--profile", metavar="STEPS[:RANK]", help="Trace steps with torch.profiler: 10-20:0, 10-20:slowest, slowest."
)
NAME = click.option("--name", help="The run's name; its directory is STORAGE/NAME.")
STORAGE = click.option("--storage", help="Folder or URL of the run directories.")
ADDRESS = click.option("--address", help="The Ray cluster's address; default RAY_ADDRESS, else a Ray of its own.")
SHAPES = click.option("--shapes", is_flag=True, help="Print what every shard's model saw.")
RESULT_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on the last line.")
JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
QUIET = click.option("--quiet", is_flag=True, help="No progress.")
VERBOSE = click.option("--verbose", is_flag=True, help="With Ray's own log lines, and all frames of a traceback.")
OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Delete a run of the same name with all that it kept, and start anew."
)


def of_a_training(command: Any) -> Any:
    """The arguments and options of `evaluate` and `predict`."""
    options = [
        click.argument("run_dir", metavar="RUN_DIR"),
        click.option(
            "--dataset", metavar="TARGET", help="Another dataset: module:attribute, or {target: ..., args: ...}."
        ),
        click.option(
            "--weights",
            type=click.Choice(["best", "last", "ema"]),
            help="Default: best if the training kept them, else those that it evaluated at its end: ema or last.",
        ),
        WORKERS,
        SETTINGS,
        click.option("--name", help="The run's name. Default: the training's name, then the task."),
        ADDRESS,
        click.option("--overwrite", is_flag=True, help="Replace a run of the same name."),
        SHAPES,
        RESULT_JSON,
        QUIET,
        click.option("--verbose", is_flag=True, help="With Ray's own log lines."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def load(job_file: str, workers: str | None, settings: tuple[str, ...], **others: str | None) -> Job:
    """The job in a file, with the keys that the command line sets."""
    return load_job(Path(job_file), overrides_of(workers, settings, **others))


def overrides_of(workers: str | None, settings: tuple[str, ...], **others: str | None) -> dict[str, Any]:
    """The keys of a job that the command line sets."""
    overrides: dict[str, Any] = dict(map(parse_setting, settings))
    if workers is not None:
        overrides["workers"] = parse_workers(workers)
    overrides.update({key: value for key, value in others.items() if value is not None})
    return overrides
