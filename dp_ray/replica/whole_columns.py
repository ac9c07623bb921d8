"""Batches that a dataset cuts from its columns: what collating its items would give, at a fraction of the time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dp_ray.errors import Error
from dp_ray.job import Job
from dp_ray.replica.carry import carried_keys
from dp_ray.replica.item_keys import ItemKeys

ReadColumns = Callable[[Sequence[int], Sequence[str] | None], Any]


class Cut(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


class WholeColumns(NamedTuple):
    """Cuts batches of the keys that a job takes."""

    read: ReadColumns
    keys: ItemKeys | None

    def cut(self, indices: Sequence[int]) -> Cut | None:
        """The batch of the samples at these indices; None if they must be read as items, which also tell errors."""
        try:
            found = self.read(indices, None if self.keys is None else self.keys.names)
        except Error:
            return None
        return None if found is None else Cut(found if self.keys is None else self.keys.pick(found))


def whole_columns(job: Job, dataset: Any, keys: ItemKeys | None) -> WholeColumns | None:
    """How the dataset cuts batches from its columns; None unless it does, and the job collates as torch does.

    A job that carries values of the items reads items.
    """
    read = getattr(dataset, "read_columns", None)
    takes_items = job.collate is not None or job.batch_dim or carried_keys(job)
    return None if read is None or takes_items else WholeColumns(read, keys)
