"""Collates the samples that a loader has read."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import default_collate, get_worker_info

from dp_ray.errors import DataError, Error
from dp_ray.job import Job
from dp_ray.plan.seeds import derive_seed
from dp_ray.replica.read_requests import Indices, ReadRequest
from dp_ray.replica.rng import seed_all
from dp_ray.replica.screening import Screen
from dp_ray.replica.targets import bound
from dp_ray.replica.user_code import raising
from dp_ray.replica.whole_columns import Cut
from dp_ray.tensors.nested import map_leaves
from dp_ray.text import listed
from dp_ray.tracebacks import frames_of

Batch: TypeAlias = tuple[Indices, Any]


class LoaderError(NamedTuple):
    """An error of a loader process, as sent to the worker, with the user's frames.

    If the error were raised, torch would put the whole traceback into its message.
    """

    error: Error
    frames: str


def loader_error(error: Error) -> LoaderError:
    """In a loader process, the error to send; in the worker itself, raise it."""
    if get_worker_info() is None:
        raise error
    return LoaderError(error, frames_of(error))


def collated(
    read: tuple[ReadRequest, Any], collate: Callable[[Any], Any], seed: int | None, screen: Screen | None
) -> Batch:
    """Collate the samples that were read; with a `screen`, its Screened ones."""
    wanted, items = read
    indices = np.asarray(wanted.indices, np.int64)
    if isinstance(items, LoaderError | Cut):
        return indices, items if isinstance(items, LoaderError) else items.batch
    seeded = functools.partial(_collate_seeded, wanted, collate, seed)
    try:
        return indices, seeded(items) if screen is None else screen.collate(items, wanted.indices, seeded)
    except Error as error:
        return indices, loader_error(error)


def _collate_seeded(wanted: ReadRequest, collate: Callable[[Any], Any], seed: int | None, items: Any) -> Any:
    """Collate samples; random numbers that the user's collate draws are keyed by the shard."""
    if seed is not None:
        seed_all(derive_seed(seed, "collate", wanted.epoch, wanted.step, wanted.shard))
    with raising("collate", lambda _: f"; it got samples {listed(wanted.indices)}", DataError):
        return collate(items)


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """The user's collate, or torch's with the rows along `batch_dim`."""
    if job.collate is None:
        return functools.partial(_default_collate, batch_dim=job.batch_dim)
    collate: Callable[[list[Any]], Any] = bound("collate", job.collate)
    return collate


def _default_collate(items: list[Any], batch_dim: int) -> Any:
    """torch's collate, with the rows moved from dimension 0 to `batch_dim`; labels of one dimension stay the same."""
    batch = default_collate(items)
    if batch_dim == 0:
        return batch

    def along(leaf: Any) -> Any:
        return leaf.movedim(0, batch_dim) if leaf.ndim > batch_dim else leaf

    return map_leaves(along, batch)
