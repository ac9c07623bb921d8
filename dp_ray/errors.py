"""The errors that a user can get.

Error                 the base of all errors that dp_ray raises on purpose.
├── JobError          the job file, a flag or a target is wrong (exit status 2).
├── ClusterError      no cluster answers, or the job can never fit into it.
│   └── ClusterLost   the cluster was lost, or too much of it: run again (exit status 75).
├── DataError         the dataset is wrong, or a batch cannot be cut into shards.
├── ModelError        the model raised, or its outputs cannot be merged.
├── StorageError      the run directory cannot be used, or lacks files or holds damaged ones.
└── WorkerError       a worker was lost.

RunInterrupted is a KeyboardInterrupt: the user or a launcher stopped the run (exit status 130 or 75).

`stop_status`, `exit_status_of` and `status_of_several` decide on the exit status of `dp-ray`.

Below them: reports that show only the user's frames of a traceback, since these show where the mistake is.
"""

import functools
import itertools
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from dp_ray.text import hide

DONE, FAILED, BAD_JOB, RUN_AGAIN, INTERRUPTED = 0, 1, 2, 75, 130  # 75 is EX_TEMPFAIL of sysexits.h
# The exit statuses for launchers. docs/commands.md has the same table.
EXIT_STATUSES = {
    DONE: "done",
    FAILED: "the job failed; do not run it again as it is",
    BAD_JOB: "bad job file or usage",
    RUN_AGAIN: "kept and unfinished: run the same command again. A first SIGTERM or SIGUSR2 came, or "
    "`dp-ray stop --run-again`; the cluster was lost after it was reached, or `timeouts.capacity` passed",
    INTERRUPTED: "stopped by a person: Ctrl-C, `dp-ray stop`, or a second signal",
}
_WINS = (INTERRUPTED, BAD_JOB, FAILED, RUN_AGAIN, DONE)  # of several jobs: the first of these wins
LAUNCHERS_SIGNALS = ("SIGTERM", "SIGUSR2")  # SIGUSR2: Slurm's `--signal=USR2@60` sends it before the time is over
STOP_COMMAND, STOP_TO_RUN_AGAIN = "dp-ray stop", "dp-ray stop --run-again"


def stop_status(asked: Sequence[str]) -> int:
    """Return the exit status of what these have stopped, in their order: signals by their names, and requests.

    >>> stop_status(["SIGTERM"]), stop_status(["SIGTERM", "SIGTERM"]), stop_status(["SIGINT"])
    (75, 130, 130)
    """
    is_polite = all(sent in (*LAUNCHERS_SIGNALS, STOP_TO_RUN_AGAIN) for sent in asked)
    num_signals = sum(sent in LAUNCHERS_SIGNALS for sent in asked)
    return RUN_AGAIN if asked and is_polite and num_signals <= 1 else INTERRUPTED


def exit_status_of(error: BaseException | None) -> int:
    """Return the exit status of a command that ends by this error; None: by none."""
    if error is None:
        return DONE
    return int(getattr(error, "exit_status", INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED))


def status_of_several(statuses: Iterable[int]) -> int:
    """Return the exit status of a command whose jobs have these."""
    return min(statuses, key=_WINS.index, default=DONE)


class Error(Exception):
    """Base of every error that dp_ray raises on purpose; `exit_status` is the exit status of the command line.

    Its text holds no secrets. It catches all of those below but RunInterrupted.
    """

    exit_status = FAILED
    comes_back = False  # whether every attempt would raise it again

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide(arg) if isinstance(arg, str) else arg for arg in args))

    def add_note(self, note: str) -> None:
        """Add a text that a traceback shows below the message."""
        super().add_note(hide(note))


class JobError(Error):
    """The job is wrong: the message names the key, its value, and the values that it may have.

    What to do: change that key. `dp-ray plan` finds such errors before anything runs.

    >>> import dp_ray
    >>> dp_ray.run(model="torch.nn:Identity", dataset="a:b", batch_size=0)
    Traceback (most recent call last):
    dp_ray.errors.JobError: batch_size: must be greater than 0, got 0
    """

    exit_status = BAD_JOB


class ClusterError(Error):
    """No cluster answers, or the job can never fit into the cluster.

    What to do: check `--address`, or ask for less with `workers`, `gpus_per_worker`, `cpus_per_worker` and
    `resources_per_worker`.
    """


class ClusterLost(ClusterError):
    """The cluster was lost after it was reached, or has had too few nodes for `timeouts.capacity`: run again.

    What to do: give the same command again, once there is a cluster.
    """

    exit_status = RUN_AGAIN


class DataError(Error):
    """The dataset is empty, an item of it raised, or a batch cannot be cut into shards.

    What to do: mend the sample that the message names, set it aside with `on_error`, or leave it out with `skip`.

    >>> import dp_ray
    >>> dp_ray.run(model="torch.nn:Identity", dataset=[], batch_size=2, workers=0, quiet=True)
    Traceback (most recent call last):
    dp_ray.errors.DataError: dataset: list is empty, there is nothing to run
    """


class ModelError(Error):
    """The model raised, its outputs cannot be merged, or a device has no memory left for it.

    What to do: look at the frames of your code above the message, and at the sizes in it; of memory it says what to
    set. `dp-ray replay` runs that step of a training again, in a debugger if you like.

    >>> import dp_ray, torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         raise ValueError("only squares")
    >>> dp_ray.run(model=Net, dataset=[torch.zeros(3)], batch_size=2, workers=0, quiet=True)
    Traceback (most recent call last):
    dp_ray.errors.ModelError: step 0, shard 0: model raised ValueError: only squares; it got float32 [1, 3]
    """


class StorageError(Error):
    """The run directory is in use, is not shared by all nodes, lacks files or holds damaged ones.

    What to do: give the run another `name`, or a `storage` that all nodes reach. Another job than that of the
    directory needs another name, or `--overwrite`.

    >>> import dp_ray
    >>> dp_ray.load("nothing")
    Traceback (most recent call last):
    dp_ray.errors.StorageError: nothing: holds no result.json: not a run directory ...
    """


class WorkerError(Error):
    """A worker process was lost: it was killed, ran out of memory, or its node was lost.

    It is raised once `retries` are used up. What to do: see what the message says ended the worker. If memory did,
    use a smaller `batch_size`, more `shards`, or fewer workers on a node.
    """


class RunInterrupted(KeyboardInterrupt):
    """A signal or `dp-ray stop` stopped the run: the message says after which step, and how to resume.

    What to do: give the same command again, and the run goes on.

    `by` has who asked, in their order: "SIGINT", "SIGTERM", "SIGUSR2", "dp-ray stop", "dp-ray stop --run-again".
    `exit_status` is what a program should end with: 75 if a launcher is to run it again, else 130.
    """

    exit_status: int = INTERRUPTED

    def __init__(self, message: str = "", by: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.by = tuple(by)
        self.exit_status = stop_status(self.by)


PACKAGE = str(Path(__file__).resolve().parent)
INSTALLED = {"site-packages", "dist-packages"}
COMPILED = {".pyx", ".pxi"}  # Cython files, as pyarrow's: their frames have no folder
IsShown: TypeAlias = Callable[[str], bool]


def is_users(filename: str) -> bool:
    """Return whether a frame's file is in the user's project: not in dp_ray, Python or an installed package."""
    return _is_outside(filename) and not INSTALLED & set(Path(filename).parts)


def is_installed(filename: str) -> bool:
    """Return whether a frame's file is in an installed package."""
    return bool(INSTALLED & set(Path(filename).parts))


def is_others(filename: str) -> bool:
    """Return whether a frame's file is the user's, or in a package other than dp_ray, torch and Ray."""
    parts = Path(filename).parts
    package = next((after for part, after in itertools.pairwise(parts) if part in INSTALLED), "")
    return _is_outside(filename) and package not in ("torch", "ray")


def _is_outside(filename: str) -> bool:
    """Return whether a file is neither in dp_ray nor in Python's standard library."""
    path = Path(filename)
    if filename.startswith("<frozen ") or path.suffix in COMPILED or path.is_relative_to(PACKAGE):
        return False
    return bool(INSTALLED & set(path.parts)) or not any(path.is_relative_to(folder) for folder in _library())


@functools.cache
def _library() -> frozenset[str]:
    known = sysconfig.get_paths()
    folders = {known["stdlib"], known["platstdlib"]}
    return frozenset(folders | {str(Path(folder).resolve()) for folder in folders})


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception of the user's code behind an Error; None if dp_ray itself raised the Error."""
    cause: BaseException | None = error
    while isinstance(cause, Error):
        cause = cause.__cause__
    return cause


def frames_of(error: BaseException) -> str:
    """Return the user's frames of an Error's cause, in Python's format; "" if there are none.

    The last line, with the exception's type and text, is left out: the Error's message has it. For an exception of
    another process, the frames are the Error's notes.
    """
    cause = cause_of(error)
    if (notes := notes_of(error)) or cause is None:
        return notes
    wanted = _frames_to_show(cause)
    shown = traceback.TracebackException.from_exception(cause)
    _keep(shown, wanted)
    final = list(shown.format_exception_only())
    lines = list(shown.format())[: -len(final)]
    lines += final[:-1] if isinstance(cause, SyntaxError) else []  # the place of a SyntaxError is not a frame
    return "".join(lines) if any('File "' in line for line in lines) else ""


def notes_of(error: BaseException) -> str:
    """Return the notes of an Error, which are the user's frames from another process; "" if there are none."""
    return "\n".join(getattr(error, "__notes__", ())) if isinstance(error, Error) else ""


def error_report(error: Error, is_verbose: bool) -> str:
    """Return an error as a user is shown it, below its traceback here or on a worker.

    It keeps the frames of user code, or all frames if `is_verbose`.
    """
    frames = frames_of(error)
    if is_verbose and not notes_of(error) and error.__cause__ is not None:
        frames = "".join(traceback.format_exception(error.__cause__))
    return "\n".join([*([frames.rstrip("\n")] if frames else []), f"error: {error}"])


def shorten(error: Error) -> None:
    """Change an Error, in place, so that Python's traceback of it and its cause shows only the user's frames."""
    error.__traceback__ = None
    error.__cause__ = cause = cause_of(error)
    if cause is None:
        return
    wanted = _frames_to_show(cause)
    seen: list[BaseException] = []
    shown: BaseException | None = cause
    while shown is not None and shown not in seen:  # a chain of causes may be a circle
        seen.append(shown)
        shown.__traceback__ = _part(shown.__traceback__, wanted)
        shown = shown.__cause__ or shown.__context__


def _frames_to_show(cause: BaseException) -> IsShown:
    """Return which frames to show: the user's; if there are none (an installed project), those of other packages."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)]
    return is_users if any(map(is_users, files)) or isinstance(cause, SyntaxError) else is_others


def _keep(shown: traceback.TracebackException, wanted: IsShown) -> bool:
    """Keep only the wanted frames, and drop causes without any; return whether any frame is left."""
    shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if wanted(frame.filename)])
    if shown.__cause__ is not None and not _keep(shown.__cause__, wanted):
        shown.__cause__ = None
    if shown.__context__ is not None and not _keep(shown.__context__, wanted):
        shown.__context__ = None
    return bool(shown.stack) or shown.__cause__ is not None or shown.__context__ is not None


def _part(trace: TracebackType | None, wanted: IsShown) -> TracebackType | None:
    """Return the wanted frames of a traceback."""
    kept: list[TracebackType] = []
    while trace is not None:
        if wanted(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    part: TracebackType | None = None
    for frame in reversed(kept):
        part = TracebackType(part, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return part


def other_calls(calls: Mapping[int, str]) -> str:
    """Return what tells that a loop of the user's makes other calls on some workers, whose calls are by rank."""
    each = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
    return (
        f"loop: the workers make other calls: {each}; each worker must call the same in the same order, so decide by "
        "what all have alike"
    )
