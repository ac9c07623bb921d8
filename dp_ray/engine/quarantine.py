"""Load one worker's shards without their bad samples, and know which rows of a shard are missing.

Begin at `load_good`: it loads as `loading.load_shards` does, but takes the samples of a step before its first shard.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import torch

from dp_ray.engine.bad_samples import (
    BadSample,
    HungRead,
    ReadLimit,
    Reference,
    Screen,
    Screened,
    bad_sample,
    choose_reference,
    end_process,
)
from dp_ray.engine.items import item_keys, passthrough_keys
from dp_ray.engine.loading import (
    CPU,
    NOTHING,
    Batch,
    LoadedShard,
    LoadedStep,
    Pick,
    Samples,
    Skipping,
    check_rows,
    checked,
    collate_of,
    filled_batches,
    filled_shards,
    load_shards,
    make_loader,
    next_batch,
    num_processes,
    on_device,
    pieces_of,
)
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.user_code import location
from dp_ray.engine.user_code import next_batch as located_batch
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices, hold_blocks
from dp_ray.plan.split import Shard, Work

ShardFilter: TypeAlias = Callable[[Shard], Shard]  # a shard without the samples that were set aside
Keep: TypeAlias = Callable[[Shard, Mapping[int, BadSample]], None]  # keeps a shard's bad samples, by position
Pieces: TypeAlias = Callable[[], Iterator[Shard]]
UNREAD: tuple[Indices, Screened] = (NOTHING[0], Screened(None, {}))
CANDIDATES = 5  # good samples of which one becomes the reference


def keep_all(shard: Shard) -> Shard:
    """Return the shard itself, of a job that sets nothing aside."""
    return shard


@dataclasses.dataclass(eq=False)
class Quarantine:
    """The samples that this worker has set aside; `keep` gets each shard's bad samples before the shard runs.

    `skipping` gives a shard without what the job skips, which is not read.
    """

    reference: Reference
    keep: Keep
    skipping: ShardFilter = keep_all
    _missing: dict[tuple[int, int], tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def take(self, shard: Shard, bad: Mapping[int, BadSample]) -> Shard:
        """Set samples of a shard aside, by their positions; return the shard without them."""
        self._missing.pop((shard.step, shard.shard), None)  # an earlier evaluation's
        if bad:
            self.keep(shard, bad)
            self._missing[shard.step, shard.shard] = tuple(sorted(bad))
        return self.without_set_aside(shard)

    def without_set_aside(self, shard: Shard) -> Shard:
        """Return the shard without what is skipped, and what was set aside.

        The latter is known of all shards of a step once its first one is loaded.
        """
        return _without(self.skipping(shard), self._missing.get((shard.step, shard.shard), ()))


def load_good(
    job: Job,
    dataset: Any,
    work: Work,
    device: torch.device,
    quarantine: Quarantine | None,
    pick: Pick | None = None,
    name: str = "the dataset",
    times: StepTimes | None = None,
) -> Generator[Batch, None, None]:
    """Yield what `load_shards` yields, without the bad samples; of a shard that has no others, no batch but None."""
    if quarantine is None:
        return load_shards(job, dataset, work, device, pick, name, times)
    hold_blocks(job, dataset, work)
    make = _whole_batches if job.scatter == "batch" else _shards
    times = times or StepTimes()
    screen = new_screen(job, quarantine.reference)
    samples = Samples(
        dataset, job.seed, name, item_keys(job), times=times, screen=screen, carry=passthrough_keys(job)
    )
    return times.waiting(on_device(make(job, samples, quarantine, work, device, pick), device, times.clock))


def load_steps(
    batches: Iterator[Batch], work: Work, without_set_aside: ShardFilter, what: str = ""
) -> Iterator[LoadedStep]:
    """Yield the steps of `work`, each with this worker's shards of `batches`."""
    for step, shards in work:
        first = [
            located_batch(batches, what + location(one)) for one in shards[:1]
        ]  # now the step's bad samples are known
        good = [without_set_aside(shard) for shard in shards]
        rest = itertools.chain(first, (located_batch(batches, what + location(one)) for one in shards[1:]))
        yield LoadedStep(
            step,
            good,
            (LoadedShard(shard, *one) for shard, one in zip(good, rest, strict=True)),
            without_set_aside(work.split.whole(step)),
        )


def _shards(
    job: Job, samples: Samples, quarantine: Quarantine, work: Work, device: torch.device, pick: Pick | None
) -> Iterator[Batch]:
    """Yield each shard, collated by itself. All shards of a step are read before its first one is given."""
    skipping = quarantine.skipping
    loaded = _loaded(job, samples, functools.partial(filled_shards, work, skipping), device)
    for _, shards in work:
        read = [(one, *(next_batch(loaded) if one.rows else UNREAD)) for one in map(skipping, shards)]
        # All of the step's shards are taken before its first one is yielded: by then, it is known how many rows the
        # step has.
        good = [quarantine.take(asked, _by_position(asked, screened)) for asked, _, screened in read]
        for shard, (asked, indices, screened) in zip(good, read, strict=True):
            inputs = checked(job, screened.batch, pick, shard.rows, f"shard {shard.shard} of step {shard.step}")
            yield _of(indices, asked, shard), inputs


def _whole_batches(
    job: Job, samples: Samples, quarantine: Quarantine, work: Work, device: torch.device, pick: Pick | None
) -> Iterator[Batch]:
    """Yield the good samples of each global batch, collated together, cut at the borders of the full batch."""
    loaded = _loaded(job, samples, functools.partial(filled_batches, work, quarantine.skipping), device)
    for step, shards in work:
        if not shards:
            continue
        asked = quarantine.skipping(work.split.whole(step))
        indices, screened = next_batch(loaded) if asked.rows else UNREAD
        bad = _by_position(asked, screened)
        whole = _without(asked, tuple(bad))
        picked = checked(job, screened.batch, pick, whole.rows, f"the global batch of step {step}")
        if picked is not None:
            check_rows(job, picked, whole.rows, f"the global batch of step {step}")
        good = [quarantine.take(one, {at: bad[at] for at in bad if one.start <= at < one.stop}) for one in shards]
        yield from pieces_of(whole, good, _of(indices, asked, whole), picked, job.batch_dim)


def _by_position(piece: Shard, screened: Screened) -> dict[int, BadSample]:
    positions = piece.positions if screened.bad else []
    return {positions[place]: bad for place, bad in screened.bad.items()}


def _without(shard: Shard, more: tuple[int, ...]) -> Shard:
    """Return the shard with more of its positions missing."""
    return dataclasses.replace(shard, missing=tuple(sorted({*shard.missing, *more}))) if more else shard


def _of(indices: Indices, asked: Shard, shard: Shard) -> Indices:
    """Return the sample indices of the shard's rows, of those that were asked for."""
    if asked.missing == shard.missing:
        return indices
    missing = set(shard.missing)
    return indices[[at not in missing for at in asked.positions]]


def _loaded(job: Job, samples: Samples, pieces: Pieces, device: torch.device, collate: Any = None) -> Iterator[Batch]:
    """Yield each piece, read and collated. A loader whose process hangs in a read is replaced by a new one."""
    done = 0
    while True:
        with make_loader(job, samples, functools.partial(_rest, pieces, done), device, collate) as loaded:
            batch = _next_or_hung(loaded, samples.screen)
            while not isinstance(batch, HungRead):
                if batch is None:
                    return
                done += 1
                yield batch
                batch = _next_or_hung(loaded, samples.screen)
        screen, hung = samples.screen, batch
        assert screen is not None and screen.limit is not None
        # The next loader copies the screen to its processes as it starts: they must know of the hung read by then.
        screen.limit.clear()
        if hung.sample is None:  # it is not known which of several hangs, so they are read one by one
            screen.careful.add((hung.epoch, hung.step, hung.shard))
        else:
            says = f"reading took more than {screen.limit.seconds:g} s and ignored an alarm, so its process was ended"
            screen.hung[hung.epoch, hung.sample] = BadSample(hung.sample, "ReadTimeout", says)


def _rest(pieces: Pieces, done: int) -> Iterator[Shard]:
    return islice(pieces(), done, None)


def _next_or_hung(loaded: Iterator[Batch], screen: Screen | None) -> Batch | HungRead | None:
    """Return the next batch, None after the last; or the read that hangs, whose process is ended."""
    while True:
        try:
            return next(loaded, None)
        except RuntimeError as error:
            if screen is None or screen.limit is None or "DataLoader timed out" not in str(error):
                raise
        if (hung := screen.limit.hung()) is not None:
            end_process(hung.pid)
            return hung


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
        return islice((one for one in every if one.rows), tried)

    good: list[tuple[int, Any]] = []
    why = ""
    for indices, screened in _loaded(job, samples, singly, CPU, list):  # the items as they are
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
