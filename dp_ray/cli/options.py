"""The arguments and options that several commands take, and what these commands share.

`begun` covers the first seconds of `dp-ray run`: Ray starts or is connected to while torch is imported.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dp_ray.cli.completion import folders, job_files, run_dirs
from dp_ray.cluster.ray_version import check_ray
from dp_ray.errors import Error, JobError, error_report
from dp_ray.job.files import parse_setting, parse_workers
from dp_ray.job.job import Job
from dp_ray.system.imports import collector_paused
from dp_ray.system.process import is_env, without_values
from dp_ray.system.threads import if_longer, raise_put_off
from dp_ray.text import harmless, hide

if TYPE_CHECKING:
    from dp_ray.cluster.connect import EarlyConnection

T = TypeVar("T")


def show_error(error: Error, is_verbose: bool) -> None:
    """Print an error below the frames of its traceback that a user needs."""
    say(error_report(error, is_verbose))


def say(text: str) -> None:
    """Write a text to stderr: stdout has only results and what user code prints."""
    click.echo(harmless(text), err=True)


def terminal_width() -> int | None:
    """Return how many columns stdout has; None if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds arguments and options to a command, in this order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


JOB = click.argument("job_file", metavar="JOB.yaml", type=click.Path(), shell_complete=job_files)
RUN_DIR = click.argument("run_dir", metavar="RUN_DIR", shell_complete=run_dirs)
RUN_DIRS = click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, shell_complete=run_dirs)
WORKERS = click.option("--workers", metavar="N|MIN:MAX", help="Number of workers, or a range of it.")
SETTINGS = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Set any key of the job: --set model.args.width=64."
)
INJECT = click.option(
    "--inject",
    metavar="FAULTS",
    default="",
    help="Faults to inject: 'kill worker 1 at step 20 in exchange; kill node 2 at step 40'.",
)
PROFILE = click.option(
    "--profile", metavar="STEPS[:RANK]", help="Trace steps with torch.profiler: 10-20:0, 10-20:slowest, slowest."
)
NAME = click.option("--name", help="The run's name; its directory is STORAGE/NAME.")
STORAGE = click.option("--storage", help="Folder or URL of the run directories.", shell_complete=folders)
ADDRESS = click.option("--address", help="The Ray cluster's address; default RAY_ADDRESS, else a Ray of its own.")
SHAPES = click.option("--shapes", is_flag=True, help="Print what every shard's model saw.")
RESULT_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on the last line.")
JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
QUIET = click.option("--quiet", is_flag=True, help="No progress.")
VERBOSE = click.option("--verbose", is_flag=True, help="With Ray's own log lines, and all frames of a traceback.")
OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Delete a run of the same name with all that it kept, and start anew."
)


KEYS = together(WORKERS, SETTINGS, NAME, STORAGE)
RUN_FLAGS = together(OVERWRITE, SHAPES, INJECT, PROFILE)
VERBOSITY = together(QUIET, VERBOSE)
OF_A_TRAINING = together(  # the arguments and options of `evaluate` and `predict`
    RUN_DIR,
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
)


@dataclass(frozen=True)
class KeyOptions:
    """The options of a command that set keys of a job."""

    workers: str | None = None
    settings: tuple[str, ...] = ()
    name: str | None = None
    storage: str | None = None
    profile: str | None = None
    dataset: str | None = None

    def overrides(self) -> dict[str, Any]:
        """Return the keys that they set."""
        texts = self.settings if self.dataset is None else (f"dataset={self.dataset}", *self.settings)
        keys: dict[str, Any] = dict(map(parse_setting, texts))
        if self.workers is not None:
            keys["workers"] = parse_workers(self.workers)
        others = {"name": self.name, "storage": self.storage, "profile": self.profile}
        return {**keys, **{key: value for key, value in others.items() if value is not None}}

    def arguments(self) -> list[str]:
        """Return the arguments that set them, for a command that another process runs."""
        given = [("workers", self.workers), *(("set", setting) for setting in self.settings)]
        given += [(key, getattr(self, key)) for key in ("name", "storage", "profile")]
        return [word for key, value in given if value for word in (f"--{key}", value)]


def check_no_secret(command: Sequence[str], where: str) -> None:
    """Raise JobError if a command that others can read holds a secret; `where` says where, and what to do instead."""
    if hide(shlex.join(command)) != shlex.join(command) or any(map(is_env, command)):
        raise JobError(f"{hide(shlex.join(without_values(command)))}: a secret would stand in {where}")


def take(kind: type[T], options: dict[str, Any]) -> T:
    """Take the fields of a dataclass out of the options of a command."""
    return kind(**{name: options.pop(name) for name in signature(kind).parameters if name in options})


@contextmanager
def announced(
    jobs: Sequence[Job], address: str | None, is_quiet: bool, is_verbose: bool
) -> "Iterator[EarlyConnection | None]":
    """Print what begins, and begin to connect to Ray if a single job needs it; the end of the block ends that.

    The block begins once Ray is connected or has failed: a Ray that starts takes over the environment, which the
    job's code may change.
    """
    name = jobs[0].run_name
    say_begin(name, jobs, is_quiet)
    if len(jobs) > 1 or jobs[0].max_workers == 0:
        yield None  # a session connects with the keys of all jobs
        return
    from dp_ray.cluster.connect import AWAIT_SECONDS, connected_early, what_begins, what_is_awaited

    say_unless_quiet(f"{name}: {what_begins(address)}", is_quiet)
    with connected_early(jobs[0], address, is_verbose) as connection:
        with collector_paused():
            from dp_ray.cluster import worker, workers  # noqa: F401
            from dp_ray.monitor import monitor  # noqa: F401
        raise_put_off()
        with if_longer(AWAIT_SECONDS, lambda: say_unless_quiet(f"{name}: {what_is_awaited(address)}", is_quiet)):
            connection.wait()
        yield connection


def say_begin(name: str, jobs: Sequence[Job], is_quiet: bool) -> None:
    """Say what is imported for the jobs; raises ClusterError if they need a Ray, and there is none."""
    if all(job.max_workers == 0 for job in jobs):
        say_unless_quiet(f"{name}: importing torch", is_quiet)
    else:
        say_import(name, is_quiet)
        check_ray()


def say_import(name: str, is_quiet: bool) -> None:
    """Say that torch and Ray are being imported, which takes the first seconds of a run."""
    say_unless_quiet(f"{name}: importing torch and Ray", is_quiet)


def say_unless_quiet(line: str, is_quiet: bool) -> None:
    """Write a line to stderr, but not with `--quiet`."""
    if not is_quiet:
        say(line)
