"""Reads a worker's next batch where the worker would otherwise wait for the others."""

from collections.abc import Generator
from concurrent.futures import Future

from dp_ray.replica.collating import Batch

Batches = Generator[Batch, None, None]


class OneAhead:
    """Keeps one batch ahead of those that `passing` gives, each time that `read` asks for it.

    An error of reading it is raised where that batch is due: a training that ends before it never meets the error.
    """

    def __init__(self) -> None:
        self._batches: Batches | None = None
        self._ahead: Future[Batch] | None = None  # the batch, or the error of its reading

    def passing(self, batches: Batches) -> Batches:
        """The same batches; one that was read ahead is there at once. Closing it closes `batches`."""
        self._batches = batches
        try:
            while True:
                ahead, self._ahead = self._ahead, None
                try:
                    batch = next(batches) if ahead is None else ahead.result()
                except StopIteration:
                    return
                del ahead  # it holds the batch, which may be large
                yield batch
        finally:
            self._batches = self._ahead = None
            batches.close()

    def read(self) -> None:
        """Read the next batch now; nothing happens before the first one is asked for."""
        if self._batches is None or self._ahead is not None:
            return
        ahead: Future[Batch] = Future()
        try:
            ahead.set_result(next(self._batches))
        except Exception as error:
            ahead.set_exception(error)
        self._ahead = ahead
