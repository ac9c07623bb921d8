"""The errors that a user can get.

Error                 the base of all errors that dp_ray raises on purpose.
├── JobError          the job file, a flag or a target is wrong (exit status 2).
├── ClusterError      no cluster answers, or the job can never fit into it.
├── DataError         the dataset is wrong, or a batch cannot be cut into shards.
├── ModelError        the model raised, or its outputs cannot be merged.
├── StorageError      the run directory cannot be used, or lacks files or holds damaged ones.
└── WorkerError       a worker was lost.

RunInterrupted is a KeyboardInterrupt: the user stopped the run.
"""

from dp_ray.secrets import hide


class Error(Exception):
    """Base of every error that dp_ray raises on purpose; `exit_status` is the exit status of the command line.

    Neither its message nor its notes hold secrets.
    """

    exit_status = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide(arg) if isinstance(arg, str) else arg for arg in args))

    def add_note(self, note: str) -> None:
        """Add a text that a traceback shows below the message."""
        super().add_note(hide(note))


class JobError(Error):
    """The job is wrong: the message names the key, the value that it has, and the values that it may have."""

    exit_status = 2


class ClusterError(Error):
    """No cluster answers, or the job can never fit into the cluster."""


class DataError(Error):
    """The dataset is empty, an item of it raised, or a batch cannot be cut into shards."""


class ModelError(Error):
    """The model raised, or its outputs cannot be merged."""


class StorageError(Error):
    """The run directory is in use, is not shared by all nodes, lacks files or holds damaged ones."""


class WorkerError(Error):
    """A worker process was lost: it was killed, ran out of memory, or its node was lost."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped the run: the message says after which step, and how to resume."""
