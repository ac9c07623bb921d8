"""Batches that a dataset cuts from its columns: what collating its items would give, at a fraction of the time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dp_ray.errors import Error
from dp_ray.job import Job
from dp_ray.replica.carry import Carried, CarryingBatch, carried_keys, carried_of
from dp_ray.replica.item_keys import ItemKeys

ReadColumns = Callable[[Sequence[int], Sequence[str] | None], Any]
ReadBeside = Callable[[Sequence[int], Sequence[str] | None, Sequence[str]], Any]


class Cut(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


class WholeColumns(NamedTuple):
    """Cuts batches of the keys that a job takes. With keys to `carry`, these come beside it, from `read_beside`."""

    read: ReadColumns
    keys: ItemKeys | None
    carry: tuple[str, ...] = ()
    read_beside: ReadBeside | None = None

    def cut(self, indices: Sequence[int]) -> Cut | None:
        """The batch of the samples at these indices; None if they must be read as items, which also tell errors."""
        names = None if self.keys is None else self.keys.names
        try:
            if self.read_beside is not None:
                found = self.read_beside(indices, names, self.carry)
                return None if found is None else Cut(self._carrying(indices, *found))
            found = self.read(indices, names)
        except Error:
            return None
        return None if found is None else Cut(self._picked(found))

    def _picked(self, found: Any) -> Any:
        return found if self.keys is None else self.keys.pick(found)

    def _carrying(self, indices: Sequence[int], found: Any, items: Sequence[Any]) -> CarryingBatch:
        rows = [carried_of(item, self.carry) for item in items]
        return CarryingBatch(self._picked(found), Carried(self.carry, dict(zip(indices, rows, strict=True))))


def whole_columns(job: Job, dataset: Any, keys: ItemKeys | None) -> WholeColumns | None:
    """How the dataset cuts batches from its columns; None unless it does, and the job collates as torch does.

    A job that carries values reads items, if the dataset cannot give them beside the columns.
    """
    read, beside = getattr(dataset, "read_columns", None), getattr(dataset, "read_columns_beside", None)
    if read is None or job.collate is not None or job.batch_dim:
        return None
    if carry := carried_keys(job):
        return None if beside is None else WholeColumns(read, keys, carry, beside)
    return WholeColumns(read, keys)
