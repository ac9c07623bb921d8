"""The errors a user can meet.

Error                 whatever dp_ray raises on purpose
├── JobError          the job file, a flag or a target is wrong (exit status 2)
├── ClusterError      no cluster, or one in which the job can never fit
├── DataError         the dataset, or a batch that cannot be cut
├── ModelError        the model raised, or gave outputs that cannot be merged
├── StorageError      the run directory cannot be used, or does not hold what it should
└── WorkerError       a worker was lost

RunInterrupted is a KeyboardInterrupt: the user stopped the run.
"""

from dp_ray.secrets import hide


class Error(Exception):
    """Base of every error that dp_ray raises on purpose; `exit_status` is the command line's.

    What it says is without the secrets of the URLs in it.
    """

    exit_status = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide(arg) if isinstance(arg, str) else arg for arg in args))


class JobError(Error):
    """The job cannot be understood: the message names the key, what was got and what it may be."""

    exit_status = 2


class ClusterError(Error):
    """No cluster answers, or the job can never fit into the one that does."""


class DataError(Error):
    """The dataset is empty, an item of it raised, or a batch cannot be cut into shards."""


class ModelError(Error):
    """The model raised, or its outputs cannot be merged."""


class StorageError(Error):
    """The run directory is in use, not shared by all nodes, or does not hold what it should."""


class WorkerError(Error):
    """A worker process was lost: killed, out of memory, or its node gone."""


class RunInterrupted(KeyboardInterrupt):
    """The run was stopped by Ctrl-C or SIGTERM: the message says after which step, and how to carry on."""
