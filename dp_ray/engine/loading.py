"""Load one worker's shards: read the samples, collate them, check the rows, copy them to the device.

Begin at `load_steps`: one path of stages, for all tasks. Each stage takes and yields LoadedShards; those that a job
does not need are not there. Samples of the job's `skip` are left out by arithmetic alone, the same on any worker.
"""

import dataclasses
import functools
import itertools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter, itemgetter
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from dp_ray.engine.alignment import aligned_batch, must_align
from dp_ray.engine.bad_samples import (
    BadSample,
    HungRead,
    Quarantine,
    ReadLimit,
    Reference,
    Screen,
    bad_sample,
    choose_reference,
    end_process,
)
from dp_ray.engine.clock import Part, SilentClock, StepClock
from dp_ray.engine.host_copy import entered, side_stream
from dp_ray.engine.items import (
    ColumnSlice,
    ItemKeys,
    PassthroughBatch,
    PassthroughSample,
    Plain,
    WholeColumns,
    collate_passthrough,
    item_keys,
    passthrough_keys,
    passthrough_of,
    whole_columns,
)
from dp_ray.engine.model import ShardSize, advised
from dp_ray.engine.objects import part_that_fails
from dp_ray.engine.random import RngProbe, own_generators, preserved, seed_all, seed_own
from dp_ray.engine.step import ModelInputs
from dp_ray.engine.timed_loader import StepTimes, TimedLoader, begin_process
from dp_ray.engine.user_code import error_text, loader_ended_error, locating, location, read_many, reraise_as
from dp_ray.errors import DataError, Error, JobError, frames_of
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import IndexLists, Indices, ReadRequest, hold_blocks, look_ahead, order_of
from dp_ray.job.targets import bound, build_dataset, dataset_seed, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Split, Work
from dp_ray.tensors.files import moved_batch
from dp_ray.tensors.scatter import cut, num_rows
from dp_ray.tensors.tree import bare_tensors, flatten, holds_objects, map_leaves, sizes, unflatten, with_tensors
from dp_ray.text import listed


class LoadedShard(NamedTuple):
    """A shard as it was read: without the samples that are skipped or set aside; None for a batch without rows.

    Within the path it may be a whole global batch, as shard -1.
    """

    shard: Shard
    indices: Indices
    batch: Any


class LoadedStep(NamedTuple):
    """One worker's part of a step: its shards, maybe none, without the samples that are skipped or set aside.

    `loaded` reads them, in order; the first one is read by the time that the step is given. An error of reading
    names the step and the shard, and of memory what to change. All are to be taken before the next step. `whole` is
    the global batch, without the samples that are skipped.
    """

    step: int
    shards: list[Shard]
    loaded: Iterable[LoadedShard]
    whole: Shard

    @property
    def lacks_shard_0(self) -> bool:
        """Whether this worker has shard 0, without rows."""
        return bool(self.shards) and self.shards[0].shard == 0 and not self.shards[0].rows


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset to load from: the job that reads it, and its name in errors; those of an evaluation say so.

    `told` has the epoch that the dataset was last told, by id. Sources that may have the same dataset share it.
    """

    job: Job
    dataset: Any
    name: str = "the dataset"
    is_evaluation: bool = False
    told: dict[int, int] = dataclasses.field(default_factory=dict)


Pieces: TypeAlias = Callable[[], Iterator[Shard]]
Walk: TypeAlias = Iterator[tuple[int, list[Shard], list[Shard]]]  # steps, their shards, and what is read for these
Pick: TypeAlias = Callable[[Any], Any]
CPU = torch.device("cpu")
CANDIDATES = 5  # good samples of which one becomes the reference


def load_steps(
    source: Source,
    work: Work,
    device: torch.device,
    quarantine: Quarantine | None = None,
    pick: Pick | None = None,
    times: StepTimes | None = None,
    ahead: "OverlappedRead | None" = None,
) -> Generator[LoadedStep, None, None]:
    """Yield the steps of `work`, each with this worker's shards on `device`.

    With a `quarantine`, the bad samples are set aside: then all shards of a step are read before it is given. `pick`
    gives the part of a batch that is taken. `times` measures the wait for shards, and the loader's work. `ahead`
    reads a shard before it is asked for. Close the generator, also after an error: then nothing more is read in the
    background.

    A shard's rows are the samples that were cut for it. What a collate of the user's makes of them is handed on as it
    is, unless it is to be cut (`scatter: batch`): then each leaf needs one row for each sample.

    Raises DataError if reading a sample raises; the message names the sample and the dataset.
    Raises DataError if a leaf that needs one row for each sample has not.
    """
    job, dataset, screen = source.job, source.dataset, None
    hold_blocks(job, dataset, work)
    keys, carry = item_keys(job), passthrough_keys(job)
    if quarantine is None:
        columns = whole_columns(job, dataset, keys)
    else:
        columns, screen = None, new_screen(job, quarantine.reference)
    samples = Samples(dataset, job.seed, source.name, keys, columns, times or StepTimes(), screen, carry, source.told)
    skipping = Skipping(job, dataset) if job.skipped else None
    walk = functools.partial(_walk, work, skipping, job.scatter == "batch")
    for_reading, for_steps = itertools.tee(walk())
    good: dict[int, list[Shard]] = {}  # by step, what is left of the worker's shards by the time that these are read
    loaded = _read(job, samples, lambda: _pieces(walk()), _pieces(for_reading), device)
    if quarantine is not None:
        loaded = _without_bad(quarantine, walk(), loaded, good)
    loaded = _checked(job, pick, loaded)
    if job.scatter == "batch":
        loaded = _scattered(job, walk(), loaded, good if quarantine is not None else None)
    loaded = on_device(loaded, device, None if times is None else times.clock)
    if must_align(job, device):
        loaded = _aligned(loaded)
    if times is not None:
        loaded = times.waiting(loaded)
    if ahead is not None and work.world_size > 1:  # one worker alone does not wait for others
        loaded = ahead.passing(loaded)
    return _steps(source, work.split, for_steps, loaded, good, skipping)


def _walk(work: Work, skipping: "Skipping | None", takes_whole: bool) -> Walk:
    """Yield the steps of a worker, with its shards, and with what is read for them: these, or the global batch."""
    for step, shards in work:
        pieces = shards if not (takes_whole and shards) else [work.split.whole(step)]
        if skipping is not None:
            shards, pieces = list(map(skipping, shards)), list(map(skipping, pieces))
        yield step, shards, pieces


def _pieces(walk: Walk) -> Iterator[Shard]:
    return itertools.chain.from_iterable(map(itemgetter(2), walk))


def _read(
    job: Job,
    samples: "Samples",
    pieces: Pieces,
    due: Iterator[Shard],
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Generator[LoadedShard, None, None]:
    """Yield each piece that is `due`, read and collated; with a screen, its batch is Screened.

    `pieces` gives them from the first one on, for the loader. A loader whose process hangs in a read is replaced.
    """
    screen, num_read = samples.screen, 0
    limit = None if screen is None else screen.limit
    piece = next(due, None)
    while piece is not None:
        left = functools.partial(_filled, pieces, num_read)
        with make_loader(job, samples, left, device, collate) as loader:
            while piece is not None:
                if not piece.rows:
                    yield LoadedShard(piece, *NOTHING)
                else:
                    read = next_batch(loader, limit)
                    if isinstance(read, HungRead):
                        break
                    num_read += 1
                    yield LoadedShard(piece, *read)
                piece = next(due, None)
        if piece is not None:
            assert screen is not None and isinstance(read, HungRead)
            screen.pass_over(read)  # the next loader copies the screen to its processes as it starts


def _filled(pieces: Pieces, first: int) -> Iterator[Shard]:
    """Yield the pieces that have rows, from number `first` of them on."""
    return itertools.islice(filter(attrgetter("rows"), pieces()), first, None)


def _without_bad(
    quarantine: Quarantine, walk: Walk, loaded: Iterator[LoadedShard], good: dict[int, list[Shard]]
) -> Generator[LoadedShard, None, None]:
    """Set the bad samples of each step aside, and yield its pieces without them; `good` gets the step's shards.

    All of a step are taken before its first one is yielded: by then, it is known how many rows the step has.
    """
    for step, shards, pieces in walk:
        read = [next(loaded) for _ in pieces]
        bad: dict[int, BadSample] = {}  # by position
        for one in read:
            if one.batch is not None and one.batch.bad:
                positions = one.shard.positions
                bad |= {positions[place]: sample for place, sample in one.batch.bad.items()}
        for shard in shards:
            mine = {at: bad[at] for at in bad if shard.start <= at < shard.stop}
            if mine:
                quarantine.keep(shard, mine)
        good[step] = [_without(shard, bad) for shard in shards] if bad else shards
        for piece, indices, screened in read:
            left, batch = _without(piece, bad), screened and screened.batch
            if left is not piece:
                indices = indices[[at not in bad for at in piece.positions]]
            yield LoadedShard(left, indices, batch)


def _without(shard: Shard, bad: dict[int, BadSample]) -> Shard:
    """Return the shard without the positions of bad samples."""
    more = [at for at in bad if shard.start <= at < shard.stop]
    return dataclasses.replace(shard, missing=tuple(sorted({*shard.missing, *more}))) if more else shard


def _checked(job: Job, pick: Pick | None, loaded: Iterator[LoadedShard]) -> Generator[LoadedShard, None, None]:
    """Yield each batch, or what `pick` makes of it; of torch's own collate, the inputs have one row for each sample.

    Nobody but the user knows which parts of a batch of their own collate hold rows, or for their own step.
    """
    inputs_of, checks, dim = ModelInputs(job), not job.takes_batches and job.collate is None, job.batch_dim
    for one in loaded:
        shard, indices, batch = one
        if not shard.rows:
            yield one._replace(batch=None)
            continue
        items = batch.batch if isinstance(batch, PassthroughBatch) else batch
        picked = items if pick is None else pick(items)
        if checks:
            inputs = inputs_of(items) if pick is None else picked
            if type(inputs) is not torch.Tensor or dim or not inputs.ndim or inputs.shape[0] != shard.rows:
                check_rows(job, inputs, shard)
        taken = picked if items is batch else batch._replace(batch=picked)
        yield one if taken is batch else LoadedShard(shard, indices, taken)


def check_rows(job: Job, inputs: Any, piece: Shard) -> None:
    """Raise DataError unless each leaf of the inputs has as many rows as the piece, a shard or a global batch.

    A global batch must have such leaves: without any, each shard would get all of it.
    """
    named = f"shard {piece.shard}" if piece.shard >= 0 else "the global batch"
    must = "collate must give one row for each sample"
    if piece.shard < 0:
        must += ", or leave out scatter: batch: then each shard is collated by itself, and may have any form"
    try:
        got = num_rows(inputs, job.batch_dim)
    except DataError as error:
        raise DataError(f"{named} of step {piece.step} cannot be cut: {error}; {must}") from None
    if got is None and piece.shard < 0:
        what = f"{sizes(inputs)}, without tensors or arrays that could be cut"
        raise DataError(f"{named} of step {piece.step} has {piece.rows} rows, but collate gave {what:.300}; {must}")
    if got is not None and got != piece.rows:
        raise DataError(
            f"{named} of step {piece.step} has {piece.rows} rows, but collate gave {got} along dimension "
            f"{job.batch_dim}: {sizes(inputs)}; {must}"
        )


def _scattered(
    job: Job, walk: Walk, loaded: Iterator[LoadedShard], good: dict[int, list[Shard]] | None
) -> Generator[LoadedShard, None, None]:
    """Cut each global batch into this worker's shards: for collates that pad to the batch's longest.

    The shards keep the borders that they have in a batch of which nothing is missing. With a quarantine, `good` has
    what is left of them.
    """
    for step, shards, pieces in walk:
        if not pieces:
            continue
        whole, indices, batch = next(loaded)
        if batch is not None:
            check_rows(job, batch, whole)
        positions = whole.positions
        for shard in shards if good is None else good[step]:
            first = bisect_left(positions, shard.start)
            end = first + shard.rows
            part = cut(batch, first, end, job.batch_dim) if shard.rows else None
            yield LoadedShard(shard, indices[first:end], part)


def _steps(
    source: Source,
    split: Split,
    walk: Walk,
    loaded: Generator[LoadedShard, None, None],
    good: dict[int, list[Shard]],
    skipping: "Skipping | None",
) -> Generator[LoadedStep, None, None]:
    """Yield the steps of the loaded shards; `good` has the shards of those of which samples were set aside."""
    try:
        for step, planned, _ in walk:
            # A name would keep a batch's memory while the next one is read: the first one is handed on in a list.
            read: list[LoadedShard] = []
            in_turn = functools.partial(_next, source, split, loaded, read)
            read += map(in_turn, planned[:1])
            whole = split.whole(step) if skipping is None else skipping(split.whole(step))
            yield LoadedStep(step, good.pop(step, planned), map(in_turn, planned), whole)
    finally:
        loaded.close()


def _next(
    source: Source, split: Split, loaded: Iterator[LoadedShard], read: list[LoadedShard], shard: Shard
) -> LoadedShard:
    """Return the next shard, which may be `read` already; an error says its location, like `step 3, shard 1`."""
    try:
        return read.pop() if read else next(loaded)
    except (Exception, SystemExit):
        where = f"evaluation {location(shard)}" if source.is_evaluation else location(shard)
        key = "eval.batch_size" if source.is_evaluation and source.job.task == "train" else "batch_size"
        size = ShardSize(shard.stop - shard.start, split.largest_batch, split.shards, key)
        with advised(source.job, where, size), locating(where):
            raise


class Read(NamedTuple):
    """The samples of a request, or an error in place of them, and the seconds that reading them took."""

    wanted: ReadRequest
    items: Any
    seconds: float


@dataclasses.dataclass(eq=False)
class Samples(Dataset[Any]):
    """The user's dataset, whose errors name the sample, and whose samples have random numbers of their own.

    Samples are read a shard at a time until one draws a random number. That shard is then read again, and from
    there on each sample is read by itself, after seeding. The result is the same as with seeding from the start.
    A dataset with generators of its own is seeded for each sample from the start. Of each sample, `keys` picks what
    the job takes. Where `columns` cut a batch as it is, no sample is read by itself. A `screen` puts a BadSample in
    the place of each sample that cannot be read. With keys to `carry`, each sample becomes a PassthroughSample.
    A dataset with a `set_epoch` is told each epoch before the first read of it in this process.
    """

    dataset: Any
    seed: int
    name: str = "the dataset"
    keys: ItemKeys | None = None
    columns: WholeColumns | None = None
    times: StepTimes = dataclasses.field(default_factory=StepTimes)
    screen: Screen | None = None
    carry: tuple[str, ...] = ()
    told: dict[int, int] = dataclasses.field(default_factory=dict)  # of Source

    def __post_init__(self) -> None:
        self._tells = callable(getattr(self.dataset, "set_epoch", None))
        if self.screen is not None:
            self.screen.source, self.screen.carried_alone = self._unscreened, self._carried_alone
            self.screen.carry = self.carry
        self._is_bare = self.screen is None and self.keys is None and not self.carry
        self._own = own_generators(self.dataset)
        self._quiet = RngProbe()
        self._draws = bool(self._own)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `times`: no use in a loader's process, and on a GPU they hold events, which stay here.

        The dataset has another id there.
        """
        return {**self.__dict__, "times": None, "told": {}}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: ReadRequest) -> Read:
        """Return the samples of a request; in a loader process, an error in place of them."""
        began = time.perf_counter()
        try:
            if self._tells and self.told.get(id(self.dataset)) != wanted.epoch:
                self._tell(wanted.epoch)
            items: Any = None if self.columns is None else self.columns.cut(wanted.indices)
            if items is None and not self._draws:
                self._quiet.begin()
                items = self._whole(wanted.indices) if self._is_bare else self._read(wanted, wanted.indices)
                self._draws = self._quiet.is_broken()
                if self._draws:
                    items = None
            if items is None:
                items = self._seeded(wanted)
            if wanted.ahead:  # after what is needed now
                self.dataset.read_ahead(wanted.ahead)
        except Error as error:
            items = loader_error(error)
        in_background = getattr(self.dataset, "take_seconds_ahead", None)
        return Read(wanted, items, time.perf_counter() - began + (in_background() if in_background else 0.0))

    def _seeded(self, wanted: ReadRequest) -> list[Any]:
        """Return the samples of a request, each with random numbers of its own."""
        items: list[Any] = []
        for index in wanted.indices:
            number = derive_seed(self.seed, "sample", wanted.epoch, index)
            seed_all(number)
            seed_own(self._own, number)
            items += self._read(wanted, [index])
        return items

    def _tell(self, epoch: int) -> None:
        """Tell the dataset which epoch comes. What it draws for that is the same in every process."""
        number, rows = derive_seed(self.seed, "set_epoch", epoch), len(self.dataset)
        with preserved(CPU), reraise_as(f"set_epoch({epoch}) of {self.name}", kind=DataError):
            seed_all(number)
            seed_own(self._own, number)
            self.dataset.set_epoch(epoch)
        if len(self.dataset) != rows:
            raise DataError(
                f"set_epoch({epoch}) of {self.name} made it {len(self.dataset)} samples long, and it had {rows}: the "
                "steps of all epochs are planned before; keep its length"
            )
        self.told[id(self.dataset)] = epoch
        self._own = own_generators(self.dataset)  # it may have made a new one
        self._draws = self._draws or bool(self._own)

    def _read(self, wanted: ReadRequest, indices: list[int]) -> Any:
        if self.screen is None:
            return self._unscreened(indices)
        return self.screen.read(wanted, indices, at_once=hasattr(self.dataset, "__getitems__"))

    def _unscreened(self, indices: list[int]) -> Any:
        items = self._whole(indices)
        if self.keys is None and not self.carry:
            return items
        made = []
        for index, item in zip(indices, items, strict=True):
            try:
                picked = item if self.keys is None else self.keys.pick(item)
                made.append(
                    PassthroughSample(picked, index, passthrough_of(item, self.carry)) if self.carry else picked
                )
            except DataError as error:
                raise DataError(f"sample {index} of {self.name}: {error}") from None
        return made

    def _carried_alone(self, index: int) -> dict[str, Plain]:
        """Return the carried values of an unreadable sample, as far as the dataset reads columns alone."""
        read = getattr(self.dataset, "read_values", None)
        item = {} if read is None else read(index, self.carry)
        values: dict[str, Plain] = {}
        for key in item:
            with suppress(DataError):  # a value that cannot be carried
                (values[key],) = passthrough_of(item, [key])
        return values

    def _whole(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            return read_many(many, indices, self.name)
        get, index = self.dataset.__getitem__, -1
        try:
            return [get(index := one) for one in indices]
        except Error:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(error_text(f"sample {index} of {self.name}", error)) from error


NOTHING: tuple[Indices, None] = (np.empty(0, np.int64), None)  # a batch without rows
AT_ONCE = 4096  # positions whose samples are computed at once: for one small shard numpy's overhead would dominate
REMEMBERED = 256  # times so many positions: a loader asks for a shard long before its step does


class Skipping:
    """A function of a shard that leaves out the samples of the job's `skip`: their positions are missing from it."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._samples = np.array(job.skipped, np.int64)
        self._order = order_of(job, dataset) if job.skipped else None
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._skipped)

    def __call__(self, shard: Shard) -> Shard:
        """Return the shard without what is skipped."""
        if self._order is None or shard.start == shard.stop:
            return shard
        blocks = range(shard.start // AT_ONCE, (shard.stop - 1) // AT_ONCE + 1)
        skipped = (at for block in blocks for at in self._remembered(shard.epoch, block))
        missing = tuple(at for at in skipped if shard.start <= at < shard.stop)
        return dataclasses.replace(shard, missing=missing) if missing else shard

    def _skipped(self, epoch: int, block: int) -> list[int]:
        """Return the positions of what is skipped, among those of a block of an epoch's order."""
        assert self._order is not None
        start, order = block * AT_ONCE, dataclasses.replace(self._order, epoch=epoch)
        samples = order.indices(start, min(len(order), start + AT_ONCE))
        positions: list[int] = (np.flatnonzero(np.isin(samples, self._samples)) + start).tolist()
        return positions


def make_loader(
    job: Job,
    samples: Samples,
    pieces: Pieces,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> TimedLoader:
    """Start torch's DataLoader of these pieces, by default with the job's collate."""
    loader, processes, screen = job.loader, num_processes(job), samples.screen
    order = order_of(job, samples.dataset)
    # The client of an object store does not survive a fork: a dataset that reads from one asks for "spawn".
    context = loader.context or getattr(samples.dataset, "loader_context", None)
    collate = collate or collate_of(job)
    if samples.carry:
        collate = functools.partial(collate_passthrough, collate, samples.carry)
    seed = None if job.collate is None else job.seed
    made: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=IndexLists(order, pieces, look_ahead(order, samples.dataset, processes)),  # type: ignore[arg-type]
        collate_fn=Collate(collate, seed, screen, picks=samples.keys is not None),  # type: ignore[arg-type]
        num_workers=processes,
        timeout=screen.limit.poll_seconds if screen is not None and screen.limit is not None else 0,
        prefetch_factor=loader.prefetch if processes else None,
        pin_memory=device.type == "cuda" if loader.pin_memory == "auto" else loader.pin_memory,
        persistent_workers=loader.persistent and processes > 0,
        multiprocessing_context=context if processes else None,
        worker_init_fn=begin_process,
    )
    try:
        return TimedLoader(made, samples.times, getattr(samples.dataset, "stop_reading_ahead", None))
    except Exception:
        if isinstance(made.multiprocessing_context, BaseContext):
            _check_can_be_sent(made.multiprocessing_context, samples, collate)
        raise


def _check_can_be_sent(context: BaseContext, samples: Samples, collate: Any) -> None:
    """Raise JobError, which names the part, if the dataset or the collate cannot be sent to a loader's process."""

    def dump(value: Any) -> None:
        with open(os.devnull, "wb") as nowhere:
            ForkingPickler(nowhere).dump(value)

    # As while a process is started: locks and queues of multiprocessing can be pickled only then.
    standing_in: Any = SimpleNamespace(DupFd=int, duplicate_for_child=int)
    set_spawning_popen(standing_in)
    try:
        own = [(samples.name, samples.dataset), ("collate", collate)]
        found = [(what, *fails) for what, one in own if (fails := part_that_fails(one, dump))]
    finally:
        set_spawning_popen(None)
    for what, name, part, error in found:
        if isinstance(part, FunctionType):
            advice = "give a function that has a name in a module, or set loader.context: fork"
        else:
            advice = "open it where it is used first, as in __getitem__, so that each process has its own"
        part_of = f"{what}'s attribute {name}" if name else what
        kind = (
            type(part).__qualname__
            if type(part).__module__ == "builtins"
            else f"{type(part).__module__}.{type(part).__qualname__}"
        )
        raise JobError(
            f"loader.context: {context.get_start_method()} pickles the dataset and the collate for each process, and "
            f"{part_of}, a {kind}, cannot be pickled: {type(error).__name__}: {error}; {advice}"
        ) from error


def num_processes(job: Job) -> int:
    """Return how many processes load for each worker: only in one of them can a sample's read be ended."""
    has_limit = job.on_error is not None and job.on_error.timeout is not None
    return job.loader.processes or int(has_limit)


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """Return the user's collate, or torch's with the rows along `batch_dim`."""
    if job.collate is None:
        return functools.partial(_collate_along, batch_dim=job.batch_dim) if job.batch_dim else default_collate
    collate: Callable[[list[Any]], Any] = bound("collate", job.collate)
    return collate


def _collate_along(items: list[Any], batch_dim: int) -> Any:
    """Collate as torch does, then move the rows from dimension 0 to `batch_dim`; labels of one dimension stay."""

    def along(leaf: Any) -> Any:
        return leaf.movedim(0, batch_dim) if leaf.ndim > batch_dim else leaf

    return map_leaves(along, default_collate(items))


class Collated(NamedTuple):
    """The seconds of reading and collating; and the samples' indices, and their batch."""

    seconds: float
    read: tuple[Indices, Any]

    def pin_memory(self) -> "Collated":
        """Return it in pinned memory; torch's loader, which would walk all tuples around the batch, calls this."""
        indices, batch = self.read
        if type(batch) is torch.Tensor:  # as most of a prediction
            return Collated(self.seconds, (indices, batch.pin_memory()))
        if (bare := bare_tensors(batch)) is not None:
            return Collated(self.seconds, (indices, with_tensors(batch, [one.pin_memory() for one in bare])))
        parts, spec = flatten(batch, is_whole=_can_pin)
        pinned = unflatten(spec, [one.pin_memory() if _can_pin(one) else one for one in parts])
        return Collated(self.seconds, (indices, pinned))


def _can_pin(node: Any) -> bool:
    """Return whether it is a tensor, or an object that puts its tensors into pinned memory itself."""
    return hasattr(node, "pin_memory") and not isinstance(node, type)


@dataclasses.dataclass(frozen=True)
class Collate:
    """Collates the samples that were read; with a `screen`, its batch is Screened.

    Random numbers that the user's collate draws are keyed by `seed` and the shard. `picks` says that `inputs` and
    `target` have picked keys of the items.
    """

    collate: Callable[[Any], Any]
    seed: int | None
    screen: Screen | None
    picks: bool

    def __call__(self, read: Read) -> Collated:
        """Return the batch; in a loader process, an error may be in its place."""
        began = time.perf_counter()
        wanted, items, seconds = read
        indices = np.asarray(wanted.indices, np.int64)
        try:
            if isinstance(items, LoaderError | ColumnSlice):
                batch = items if isinstance(items, LoaderError) else items.batch
            elif self.screen is None:
                batch = self._seeded(wanted, items)
            else:
                batch = self.screen.collate(items, wanted.indices, functools.partial(self._seeded, wanted))
        except Error as error:
            batch = loader_error(error)
        return Collated(seconds + time.perf_counter() - began, (indices, batch))

    def _seeded(self, wanted: ReadRequest, items: Any) -> Any:
        if self.seed is not None:
            seed_all(derive_seed(self.seed, "collate", wanted.epoch, wanted.step, wanted.shard))
        try:
            return self.collate(items)
        except (Exception, SystemExit):
            note = ", of which inputs and target pick keys before the collate" if self.picks else ""
            with reraise_as("collate", lambda _: f"; it got samples {listed(wanted.indices)}{note}", DataError):
                raise


class LoaderError(NamedTuple):
    """An error of a loader process, as sent to the worker, with the user's frames.

    If the error were raised, torch would put the whole traceback into its message.
    """

    error: Error
    frames: str


def loader_error(error: Error) -> LoaderError:
    """Return, in a loader process, the error to send; in the worker itself, raise it."""
    if get_worker_info() is None:
        raise error
    return LoaderError(error, frames_of(error))


def next_batch(loader: Iterator[Any], limit: ReadLimit | None = None) -> tuple[Indices, Any] | HungRead:
    """Return the next batch; raise what a loader process sent in its place, or DataError if one has ended.

    With a limit, return a read that hangs in its place; the process that reads is ended.
    """
    while True:
        try:
            indices, batch = next(loader)
            break
        except RuntimeError as error:
            if "cannot pin" in str(error):
                what = "samples that are on a GPU already, or are not dense, cannot be copied to pinned memory"
                raise DataError(f"{what}; set loader.pin_memory: false") from error
            if limit is None or "DataLoader timed out" not in str(error):
                raise
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # its tensor was to be fetched from a process
            raise loader_ended_error() from error
        if (hung := limit.hung()) is not None:
            end_process(hung.pid)
            return hung
    if not isinstance(batch, LoaderError):
        return indices, batch
    if batch.frames:
        batch.error.add_note(batch.frames)
    raise batch.error


def on_device(
    loaded: Generator[LoadedShard, None, None], device: torch.device, clock: StepClock | None = None
) -> Generator[LoadedShard, None, None]:
    """Return the shards on `device`; on a GPU the next one is copied while the current one is computed."""
    if device.type == "cpu":
        return loaded
    if device.type != "cuda":
        return (one._replace(batch=moved_batch(one.batch, device)) for one in loaded)
    return _copied_ahead(loaded, device, clock or SilentClock())


def _copied_ahead(
    loaded: Iterator[LoadedShard], device: torch.device, clock: StepClock
) -> Generator[LoadedShard, None, None]:
    copies, copied = entered(side_stream(device, "copies")), torch.Event(device)
    ready = None
    for one in loaded:
        before = clock.enter(Part.HOST_TO_DEVICE)
        current = None if ready is None else _wait_for(ready, copied, device)  # before the next batch's copy
        # Of an object's tensors it cannot be told torch that another stream uses them: these are copied by that one.
        has_objects = type(one.batch) is not torch.Tensor and holds_objects(one.batch)
        stream = torch.accelerator.current_stream(device.index) if has_objects else copies
        with stream:
            ready = LoadedShard(one.shard, one.indices, moved_batch(one.batch, device))
        copied.record(stream)
        if current is None:
            clock.enter(before)
        else:  # whoever waits for it enters another part
            yield current
            del current  # a name would keep the batch's memory while the next one is copied
    if ready is not None:
        yield _wait_for(ready, copied, device)


def _aligned(loaded: Generator[LoadedShard, None, None]) -> Generator[LoadedShard, None, None]:
    """Yield the shards with tensors that begin at multiples of 16 bytes, for reductions to have the same bits.

    What comes from the host has memory of its own, and so have the copies that a loss over the batch makes of it.
    Rows of a batch that was collated on the GPU are a view, of which a worker with one shard makes no copy.
    """
    for one in loaded:
        current = [one._replace(batch=aligned_batch(one.batch))]
        del one  # a name would keep the batch's memory while the next one is copied
        yield current.pop()


def _wait_for(one: LoadedShard, copied: torch.Event, device: torch.device) -> LoadedShard:
    """Return the shard once the computing stream waits for its copy, and its memory is not reused too early."""
    computing = torch.accelerator.current_stream(device.index)
    torch.Event.wait(copied, computing)
    for leaf in bare_tensors(one.batch) or flatten(one.batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:  # the lengths in a PackedSequence are not
            leaf.record_stream(computing)
    return one


def seeded_dataset(job: Job, name: str = "dataset") -> Any:
    """Build the job's dataset after seeding: random data is the same on every worker and in every run.

    Raises what `build_dataset` raises.
    """
    if isinstance(job.dataset, Target):
        resolve(name, job.dataset)  # before seeding: a module may draw random numbers, but on its first import only
    with preserved(CPU):
        seed_all(dataset_seed(job, name))
        return build_dataset(job, name)


def new_screen(job: Job, reference: Reference | None = None) -> Screen:
    """Make a screen for a dataset of the job, which must have `on_error`."""
    assert job.on_error is not None
    seconds = job.on_error.timeout
    limit = None if seconds is None else ReadLimit(seconds, num_processes(job))
    return Screen(job.on_error.finite, job.collate is not None, limit, reference)


def find_reference(job: Job, dataset: Any, name: str) -> Reference:
    """Choose the reference among the first good samples of epoch 0's order.

    It is the one with which most others of them can be collated. Raises DataError if there are no good ones.
    """
    assert job.on_error is not None
    samples = Samples(dataset, job.seed, name, item_keys(job), screen=new_screen(job))
    tried = min(len(samples), CANDIDATES + job.on_error.quarantine)
    skipping = Skipping(job, dataset)

    def singly() -> Iterator[Shard]:
        every = (skipping(Shard(-1, -1, at, at + 1)) for at in range(len(samples)))
        return itertools.islice((one for one in every if one.rows), tried)

    good: list[tuple[int, Any]] = []
    why = ""
    for _, indices, screened in _read(job, samples, singly, singly(), CPU, list):  # the items as they are
        index = int(indices[0])
        bad = screened.bad.get(0)
        if bad is None:
            try:
                collate_of(job)([screened.batch[0]])
            except Exception as error:  # a user's collate may raise anything
                bad = bad_sample(index, error)
        if bad is not None:
            why = f"sample {bad.sample}: {bad.kind}: {bad.message}"
            continue
        good.append((index, screened.batch[0]))
        if len(good) == CANDIDATES:
            break
    reference = choose_reference(good, collate_of(job) if job.collate is not None else None)
    if reference is None:
        raise DataError(f"{name}: none of the first {tried} samples is good; the last one tried is {why}")
    return reference


@dataclasses.dataclass
class OverlappedRead:
    """One shard ahead of those that `passing` yields, read where the worker would otherwise wait for the others.

    An error of reading it is raised where that batch is due: a training that ends before it never meets the error.
    """

    _loaded: Generator[LoadedShard, None, None] | None = None
    _ahead: Future[LoadedShard] | None = None  # the batch, or the error of its reading

    def passing(self, loaded: Generator[LoadedShard, None, None]) -> Generator[LoadedShard, None, None]:
        """Yield the same shards; one that was read ahead is there at once. Closing it closes `loaded`."""
        self._loaded = loaded
        try:
            while True:
                ahead, self._ahead = self._ahead, None
                try:
                    one = next(loaded) if ahead is None else ahead.result()
                except StopIteration:
                    return
                del ahead  # it holds the batch, which may be large, until the next one is asked for
                yield one
        finally:
            self._loaded = self._ahead = None
            loaded.close()

    def read(self) -> None:
        """Read the next shard now; nothing happens before the first one is asked for."""
        if self._loaded is None or self._ahead is not None:
            return
        ahead: Future[LoadedShard] = Future()
        try:
            ahead.set_result(next(self._loaded))
        except Exception as error:
            ahead.set_exception(error)
        self._ahead = ahead
