"""Load one worker's shards: read the samples, collate them, check the rows, copy them to the device.

Begin at `load_steps`: one path of stages, for all tasks. Each stage takes and yields LoadedShards; those that a job
does not need are not there. Samples of the job's `skip` are left out by arithmetic alone, the same on any worker.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.engine.alignment import aligned_batch, must_align
from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.step import ModelInputs
from dp_ray.engine.host_copy import entered, side_stream
from dp_ray.engine.loads.bad_samples import BadSample, Quarantine, Reference, bad_sample, choose_reference
from dp_ray.engine.loads.items import PassthroughBatch, SampleReader, item_keys, passthrough_keys, whole_columns
from dp_ray.engine.loads.loader import Pieces, Samples, StepTimes, collate_of, make_loader, new_screen
from dp_ray.engine.loads.packing import packed_dataset
from dp_ray.engine.random import preserved, seed_all
from dp_ray.engine.user_code import ShardSize, advised, locating, location
from dp_ray.engine.world import CPU
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import Indices, hold_blocks, order_of
from dp_ray.job.targets import build_dataset, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Split, Work
from dp_ray.tensors.files import moved_batch
from dp_ray.tensors.scatter import num_rows
from dp_ray.tensors.tree import bare_tensors, flatten, holds_objects, sizes


class LoadedShard(NamedTuple):
    """A shard as it was read: without the samples that are skipped or set aside; None for a batch without rows."""

    shard: Shard
    indices: Indices
    batch: Any


class LoadedStep(NamedTuple):
    """One worker's part of a step: its shards, maybe none, without the samples that are skipped or set aside.

    `loaded` reads them, in order; the first one is read by the time that the step is given. An error of reading
    names the step and the shard, and of memory what to change. All are to be taken before the next step. `whole` is
    the global batch, without the samples that are skipped. `again` are shards of another worker's, to be taken after
    its own, that this one runs again in an audit.
    """

    step: int
    shards: list[Shard]
    loaded: Iterable[LoadedShard]
    whole: Shard
    again: Iterable[LoadedShard] = ()

    @property
    def lacks_shard_0(self) -> bool:
        """Whether this worker has shard 0, without rows."""
        return bool(self.shards) and self.shards[0].shard == 0 and not self.shards[0].rows


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset to load from: the job that reads it, and its name in errors; of an evaluation these begin with `of`.

    `told` has the epoch that the dataset was last told, by id. Sources that may have the same dataset share it.
    """

    job: Job
    dataset: Any
    name: str = "the dataset"
    of: str = ""
    told: dict[int, int] = dataclasses.field(default_factory=dict)


Walk: TypeAlias = Iterator[tuple[int, list[Shard]]]  # steps, and a worker's shards of each
Pick: TypeAlias = Callable[[Any], Any]
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
    is.

    Raises DataError if reading a sample raises; the message names the sample and the dataset.
    Raises DataError if torch's own collate gives the model a leaf that has not one row for each sample.
    """
    job, dataset, screen = source.job, source.dataset, None
    hold_blocks(job, dataset, work)
    keys = item_keys(job)
    reader = SampleReader(dataset, source.name, keys, passthrough_keys(job))
    if quarantine is None:
        columns = whole_columns(job, dataset, keys)
    else:
        columns, screen = None, new_screen(job, reader, quarantine.reference)
    samples = Samples(reader, job.seed, columns, times or StepTimes(), screen, source.told)
    skipping = Skipping(job, dataset) if job.skipped else None
    walk = functools.partial(_walk, work, skipping)
    for_reading, for_steps = itertools.tee(walk())
    good: dict[int, list[Shard]] = {}  # by step, what is left of the worker's shards by the time that these are read
    loaded = _read(job, samples, lambda: _pieces(walk()), _pieces(for_reading), device)
    if quarantine is not None:
        loaded = _without_bad(quarantine, walk(), loaded, good)
    loaded = _checked(job, pick, loaded)
    loaded = on_device(loaded, device, None if times is None else times.clock)
    if must_align(job, device):
        loaded = _aligned(loaded)
    if times is not None:
        loaded = times.waiting(loaded)
    if ahead is not None and work.world_size > 1:  # one worker alone does not wait for others
        loaded = ahead.passing(loaded)
    return _steps(source, work, for_steps, loaded, good, skipping)


def _walk(work: Work, skipping: "Skipping | None") -> Walk:
    """Yield the steps of a worker, with its shards as they are read: without what is skipped.

    Those of another worker that it runs again come last.
    """
    for step, own in work:
        shards = own if work.again is None else [*own, *work.again(step)]
        yield step, shards if skipping is None else list(map(skipping, shards))


def _pieces(walk: Walk) -> Iterator[Shard]:
    return itertools.chain.from_iterable(map(itemgetter(1), walk))


def _read(
    job: Job,
    samples: "Samples",
    pieces: Pieces,
    due: Iterator[Shard],
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Generator[LoadedShard, None, None]:
    """Yield each piece that is `due`, read and collated; with a screen, its batch is Screened.

    `pieces` gives them for the loader.
    """
    with make_loader(job, samples, lambda: filter(attrgetter("rows"), pieces()), device, collate) as loader:
        for piece in due:
            yield LoadedShard(piece, *(next(loader) if piece.rows else NOTHING))


def _without_bad(
    quarantine: Quarantine, walk: Walk, loaded: Iterator[LoadedShard], good: dict[int, list[Shard]]
) -> Generator[LoadedShard, None, None]:
    """Set the bad samples of each step aside, and yield its pieces without them; `good` gets the step's shards.

    All of a step are taken before its first one is yielded: by then, it is known how many rows the step has.
    """
    for step, shards in walk:
        read = [next(loaded) for _ in shards]
        left = [_set_aside(quarantine, shard) for shard in read]
        good[step] = [shard.shard for shard in left]
        yield from left


def _set_aside(quarantine: Quarantine, loaded: LoadedShard) -> LoadedShard:
    """Return a screened shard without its bad samples, which the quarantine keeps."""
    shard, indices, screened = loaded
    if screened is None or not screened.bad:
        return loaded._replace(batch=screened and screened.batch)
    positions = shard.positions
    bad: dict[int, BadSample] = {positions[place]: sample for place, sample in screened.bad.items()}
    quarantine.keep(shard, bad)
    left = dataclasses.replace(shard, missing=tuple(sorted({*shard.missing, *bad})))
    return LoadedShard(left, indices[[at not in bad for at in positions]], screened.batch)


def _checked(job: Job, pick: Pick | None, loaded: Iterator[LoadedShard]) -> Generator[LoadedShard, None, None]:
    """Yield each batch, or what `pick` makes of it; of torch's own collate, the inputs have one row for each sample.

    Nobody but the user knows which parts of a batch of their own collate hold rows, or for their own step.
    """
    inputs_of, checks, dim = ModelInputs(job), not job.takes_batches and job.collate is None, job.batch_dim
    for loaded_shard in loaded:
        shard, indices, batch = loaded_shard
        if not shard.rows:
            yield loaded_shard._replace(batch=None)
            continue
        items = batch.batch if isinstance(batch, PassthroughBatch) else batch
        picked = items if pick is None else pick(items)
        if checks:
            inputs = inputs_of(items) if pick is None else picked
            if type(inputs) is not torch.Tensor or dim or not inputs.ndim or inputs.shape[0] != shard.rows:
                check_rows(job, inputs, shard)
        taken = picked if items is batch else batch._replace(batch=picked)
        yield loaded_shard if taken is batch else LoadedShard(shard, indices, taken)


def check_rows(job: Job, inputs: Any, shard: Shard) -> None:
    """Raise DataError unless each leaf of the inputs has as many rows as the shard."""
    named, must = f"shard {shard.shard} of step {shard.step}", "collate must give one row for each sample"
    try:
        got = num_rows(inputs, job.batch_dim)
    except DataError as error:
        raise DataError(f"{named} cannot be cut: {error}; {must}") from None
    if got is not None and got != shard.rows:
        gave = f"{got} along dimension {job.batch_dim}: {f'{sizes(inputs)}':.300}"
        raise DataError(f"{named} has {shard.rows} rows, but collate gave {gave}; {must}")


def _steps(
    source: Source,
    work: Work,
    walk: Walk,
    loaded: Generator[LoadedShard, None, None],
    good: dict[int, list[Shard]],
    skipping: "Skipping | None",
) -> Generator[LoadedStep, None, None]:
    """Yield the steps of the loaded shards; `good` has the shards of those of which samples were set aside.

    What a worker runs again in a step are the last of its shards.
    """
    split = work.split
    try:
        for step, planned in walk:
            # A name would keep a batch's memory while the next one is read: the first one is handed on in a list.
            read: list[LoadedShard] = []
            in_turn = functools.partial(_next, source, split, loaded, read)
            read += map(in_turn, planned[:1])
            whole = split.whole(step) if skipping is None else skipping(split.whole(step))
            own = len(planned) - (0 if work.again is None else len(work.again(step)))
            others, planned = planned[own:], planned[:own]
            yield LoadedStep(step, good.pop(step, planned), map(in_turn, planned), whole, map(in_turn, others))
    finally:
        loaded.close()


def _next(
    source: Source, split: Split, loaded: Iterator[LoadedShard], read: list[LoadedShard], shard: Shard
) -> LoadedShard:
    """Return the next shard, which may be `read` already; an error says its location, like `step 3, shard 1`."""
    try:
        return read.pop() if read else next(loaded)
    except (Exception, SystemExit):
        where = source.of + location(shard)
        is_eval = source.of and source.job.task == "train"
        key = f"{source.name.removesuffix('dataset')}batch_size" if is_eval else "batch_size"
        size = ShardSize(shard.planned_rows, split.largest_batch, split.shards, key)
        with advised(source.job, where, size), locating(where):
            raise


NOTHING: tuple[Indices, None] = (np.empty(0, np.int64), None)  # a batch without rows


class Skipping:
    """A function of a shard that leaves out the samples of the job's `skip`: their positions are missing from it."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._samples, self._order = np.array(job.skipped, np.int64), order_of(job, dataset)

    def __call__(self, shard: Shard) -> Shard:
        """Return the shard without what is skipped."""
        order = dataclasses.replace(self._order, epoch=shard.epoch)
        skipped = np.isin(order.indices(shard.start, shard.stop), self._samples)
        missing = tuple((np.flatnonzero(skipped) + shard.start).tolist())
        return dataclasses.replace(shard, missing=missing) if missing else shard


def on_device(
    loaded: Generator[LoadedShard, None, None], device: torch.device, clock: StepClock | None = None
) -> Generator[LoadedShard, None, None]:
    """Return the shards on `device`; on a GPU the next one is copied while the current one is computed."""
    if device.type == "cpu":
        return loaded
    if device.type != "cuda":
        return (shard._replace(batch=moved_batch(shard.batch, device)) for shard in loaded)
    return _copied_ahead(loaded, device, clock or StepClock())


def _copied_ahead(
    loaded: Iterator[LoadedShard], device: torch.device, clock: StepClock
) -> Generator[LoadedShard, None, None]:
    copies, copied = entered(side_stream(device, "copies")), torch.Event(device)
    ready = None
    for shard in loaded:
        before = clock.enter(Part.HOST_TO_DEVICE)
        current = None if ready is None else _wait_for(ready, copied, device)  # before the next batch's copy
        # Of an object's tensors it cannot be told torch that another stream uses them: these are copied by that one.
        has_objects = type(shard.batch) is not torch.Tensor and holds_objects(shard.batch)
        stream = torch.accelerator.current_stream(device.index) if has_objects else copies
        with stream:
            ready = LoadedShard(shard.shard, shard.indices, moved_batch(shard.batch, device))
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
    What a collate of the user's gives on the GPU may be a view, of which a worker with one shard makes no copy.
    """
    for shard in loaded:
        current = [shard._replace(batch=aligned_batch(shard.batch))]
        del shard  # a name would keep the batch's memory while the next one is copied
        yield current.pop()


def _wait_for(shard: LoadedShard, copied: torch.Event, device: torch.device) -> LoadedShard:
    """Return the shard once the computing stream waits for its copy, and its memory is not reused too early."""
    computing = torch.accelerator.current_stream(device.index)
    torch.Event.wait(copied, computing)
    for leaf in bare_tensors(shard.batch) or flatten(shard.batch)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:  # the lengths in a PackedSequence are not
            leaf.record_stream(computing)
    return shard


def seeded_dataset(job: Job, name: str = "dataset") -> Any:
    """Build the job's dataset after seeding: random data is the same on every worker and in every run.

    With `pack` its samples are windows. Raises what `build_dataset` and `packed_dataset` raise.
    """
    if isinstance(job.dataset, Target):
        resolve(name, job.dataset)  # before seeding: a module may draw random numbers, but on its first import only
    with preserved(CPU):
        seed_all(derive_seed(job.seed, "dataset", name != "dataset"))
        return packed_dataset(job, build_dataset(job, name), name)


def find_reference(job: Job, dataset: Any, name: str) -> Reference:
    """Choose the reference among the first good samples of epoch 0's order.

    It is the one with which most others of them can be collated. Raises DataError if there are no good ones.
    """
    assert job.on_error is not None
    reader = SampleReader(dataset, name, item_keys(job))
    samples = Samples(reader, job.seed, screen=new_screen(job, reader))
    tried = min(len(samples), CANDIDATES + job.on_error.quarantine)

    def singly() -> Iterator[Shard]:
        every: Iterator[Shard] = (Shard(-1, -1, at, at + 1) for at in range(len(samples)))
        if job.skipped:
            every = filter(attrgetter("rows"), map(Skipping(job, dataset), every))
        return itertools.islice(every, tried)

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
                    step = next(loaded) if ahead is None else ahead.result()
                except StopIteration:
                    return
                del ahead  # it holds the batch, which may be large, until the next one is asked for
                yield step
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
