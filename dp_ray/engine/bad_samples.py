"""Where samples are loaded: finds the bad ones, and collates the others.

Which sample is bad depends on the sample and on the run's reference sample alone, never on the workers or on what is
read with it. With torch's collate, a sample is bad if its structure or shapes are not the reference's. With a
collate of the user, it is bad if that cannot collate it together with the reference.

A time limit for reading samples in the processes of a loader.

Within its process, an alarm turns a read that takes too long into an error. A read that does not return even then, in
C code that ignores signals, is ended with its process: each process notes in shared memory what it reads since when.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dp_ray.engine.items import Carrying, Plain
from dp_ray.engine.user_code import said
from dp_ray.errors import DataError, Error, JobError
from dp_ray.job.samples import ReadRequest
from dp_ray.text import hide

SLOT = 8  # numbers that each process notes: its pid, since when it reads, how long it may, and what
_SINCE, _SAMPLE = 1, 6
TICKS = 4  # how often the limit is checked within its length
_OVER = 1.5  # of its time, a read may take until its process is ended


class ReadTimeout(BaseException):
    """A read takes longer than it may. No Exception, so that a dataset's own `except Exception` lets it pass."""


class HungRead(NamedTuple):
    """A read that did not end, of process `pid`, and its place; `sample` is None if several were read."""

    pid: int
    epoch: int
    step: int
    shard: int
    sample: int | None


class _Noted(list[int]):
    """Sample indices that are noted one after another, as they are iterated."""

    def __init__(self, indices: list[int], slots: Any, at: int) -> None:
        super().__init__(indices)
        self._slots = slots
        self._at = at

    def __iter__(self) -> Iterator[int]:
        slots, since, sample, now = self._slots, self._at + _SINCE, self._at + _SAMPLE, time.monotonic
        for index in super().__iter__():
            slots[sample] = index
            slots[since] = now()
            yield index


class ReadLimit:
    """The time limit of each sample's read, in `processes` loader processes that share it with the worker."""

    def __init__(self, seconds: float, processes: int) -> None:
        self.seconds = seconds
        self._slots: Any = RawArray("d", SLOT * processes)
        self._at: int | None = None

    @property
    def poll_seconds(self) -> float:
        """How often the worker looks at what its loader processes read."""
        return max(1.0, self.seconds / TICKS)

    def arm(self, process: int) -> None:
        """Begin to enforce the limit in this loader process."""
        self._at = SLOT * process
        self._slots[self._at : self._at + SLOT] = [os.getpid(), *[0.0] * (SLOT - 1)]
        signal.signal(signal.SIGALRM, self._tick)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, self.seconds / TICKS, self.seconds / TICKS)

    @contextmanager
    def reading(self, wanted: ReadRequest, indices: Sequence[int]) -> Iterator[None]:
        """Within the block these samples are read; raises ReadTimeout after `seconds` for each."""
        at = self._at
        if at is None:
            yield
            return
        slots = self._slots
        slots[at + 2 : at + SLOT] = [self.seconds * len(indices), *wanted[:3], indices[0], len(indices)]
        slots[at + _SINCE] = time.monotonic()
        try:
            yield
        finally:
            slots[at + _SINCE] = 0.0

    @contextmanager
    def reading_each(self, wanted: ReadRequest, indices: list[int]) -> Iterator[list[int]]:
        """Within the block these samples are read one after another, as the list that it gives is iterated.

        Each may take `seconds`; `at` is the one that is being read.
        """
        with self.reading(wanted, indices[:1]):
            yield indices if self._at is None else _Noted(indices, self._slots, self._at)

    @property
    def at(self) -> int | None:
        """The sample whose read began last; None in a process in which the limit is not enforced."""
        return None if self._at is None else int(self._slots[self._at + _SAMPLE])

    def _tick(self, *_: object) -> None:
        assert self._at is not None
        since, allowed = self._slots[self._at + 1 : self._at + 3]
        if since and time.monotonic() - since > allowed:
            raise ReadTimeout(f"reading took more than {allowed:g} s")

    def hung(self) -> HungRead | None:
        """A read that its process's alarm did not end, if there is one."""
        now = time.monotonic()
        for at in range(0, len(self._slots), SLOT):
            pid, since, allowed, epoch, step, shard, index, many = self._slots[at : at + SLOT]
            if since and now - since > allowed * _OVER + 1:
                return HungRead(int(pid), int(epoch), int(step), int(shard), int(index) if many == 1 else None)
        return None

    def clear(self) -> None:
        """Forget what ended processes were reading."""
        self._slots[:] = [0.0] * len(self._slots)


def arm_loader(process: int) -> None:
    """Begin to enforce the limit of the loader's dataset, if it has one, in this loader process."""
    told: Any = get_worker_info()
    screen = told and told.dataset.dataset.screen  # of Samples, in TimedReads
    if screen is not None and screen.limit is not None:
        screen.limit.arm(process)


def end_process(pid: int) -> None:
    """Kill a loader process and wait for its end."""
    try:
        os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            os.kill(pid, 0)
            time.sleep(0.01)
    except (ProcessLookupError, RuntimeError):  # in a main thread, torch raises when a loader process dies
        return


Form: TypeAlias = Any  # the structure and shapes of an item, as JSON values
Collate: TypeAlias = Callable[[list[Any]], Any]
TEXT_LENGTH = 10_000  # kept of a message or a traceback


class BadSample(NamedTuple):
    """Why a sample is bad; it takes the sample's place among those that were read.

    `carried` are its values of the keys that the job carries, as far as they can be had; None if it carries none.
    """

    sample: int
    kind: str
    message: str
    traceback: str = ""
    carried: dict[str, Plain] | None = None


class Reference(NamedTuple):
    """The sample with which the others are compared: its index, and its form."""

    sample: int
    form: Form


class Screened(NamedTuple):
    """The good samples of a shard or of a global batch, collated; None if there are none.

    `bad` has the others, by their places among those that were read.
    """

    batch: Any
    bad: dict[int, BadSample]


def _nothing(index: int) -> Mapping[str, Plain]:
    """The carried values of a sample of which none can be read alone; no lambda, so that a Screen can be pickled."""
    return {}


class Screen:
    """Sets bad samples aside where they are loaded; `source` reads samples without it.

    `carry` are the keys that the job carries; `carried_alone` gives their values of a sample that cannot be read.
    `hung` are samples, by epoch, whose read ended its process. `careful` are requests whose samples are to be read
    one by one, since one of them did so.
    """

    def __init__(self, is_finite: bool, has_own_collate: bool, limit: ReadLimit | None = None) -> None:
        self.limit = limit
        self.reference: Reference | None = None
        self.source: Callable[[list[int]], list[Any]] = list
        self.carry: tuple[str, ...] = ()
        self.carried_alone: Callable[[int], Mapping[str, Plain]] = _nothing
        self.hung: dict[tuple[int, int], BadSample] = {}
        self.careful: set[tuple[int, int, int]] = set()
        self._is_finite = is_finite
        self._has_own_collate = has_own_collate
        self._reference_item: list[Any] = []
        self._wanted = ReadRequest(0, 0, 0, [])

    def begin(self, wanted: ReadRequest) -> None:
        """Begin to read what is asked for."""
        self._wanted = wanted

    def read(self, indices: list[int], at_once: bool) -> list[Any]:
        """The samples, with a BadSample in the place of each that cannot be read.

        `at_once` says that the dataset reads several faster than one by one. Raises what is no sample's own mistake.
        """
        wanted = self._wanted
        found: dict[int, BadSample] = {}
        if (
            len(indices) > 1
            and wanted[:3] not in self.careful
            and not (self.hung and any((wanted.epoch, index) in self.hung for index in indices))
        ):
            try:
                return self._read_together(indices, at_once)
            except (JobError, MemoryError):
                raise
            except (Exception, ReadTimeout) as error:  # one by one, to find the bad ones
                if not at_once and self.limit is not None and (at := self.limit.at) is not None:
                    found[at] = self._unread(at, error)
        return [found.get(index) or self._read_one(index) for index in indices]

    def _read_together(self, indices: list[int], at_once: bool) -> list[Any]:
        if at_once or self.limit is None:
            return self._within_limit(indices)
        with self.limit.reading_each(self._wanted, indices) as noted:
            return self.source(noted)

    def _read_one(self, index: int) -> Any:
        if (known := self.hung.get((self._wanted.epoch, index))) is not None:
            return known
        try:
            return self._within_limit([index])[0]
        except (JobError, MemoryError):
            raise
        except (Exception, ReadTimeout) as error:
            return self._unread(index, error)

    def _unread(self, index: int, error: BaseException) -> BadSample:
        """A sample that could not be read, with those of its carried values that can."""
        bad = bad_sample(index, error)
        if not self.carry:
            return bad
        found: Mapping[str, Plain] = {}
        limited = nullcontext() if self.limit is None else self.limit.reading(self._wanted, [index])
        with suppress(Exception, ReadTimeout), limited:
            found = self.carried_alone(index)
        return bad._replace(carried={key: found.get(key) for key in self.carry})

    def _within_limit(self, indices: list[int]) -> list[Any]:
        if self.limit is None:
            return self.source(indices)
        with self.limit.reading(self._wanted, indices):
            return self.source(indices)

    def collate(self, items: Sequence[Any], indices: Sequence[int], collate: Collate) -> Screened:
        """The good samples of those that were read, collated.

        Raises what `collate` raises if no sample alone is to blame.
        """
        bad = _bad_ones(items)
        good = _without(items, bad)
        batch = self._at_once(good, collate)
        if batch is None and good:
            for place, index in enumerate(indices):
                if place not in bad and (found := self._misfit(index, items[place], collate)):
                    bad[place] = self._with_carried(found, items[place])
            good = _without(items, bad)
            batch = collate(good) if good else None
        return Screened(batch, bad)

    def _with_carried(self, bad: BadSample, item: Any) -> BadSample:
        """With what is carried of the sample, which was read."""
        if not isinstance(item, Carrying):
            return bad
        return bad._replace(carried=dict(zip(self.carry, item.values, strict=True)))

    def _at_once(self, good: list[Any], collate: Collate) -> Any:
        """All of them collated, if none is bad; else None."""
        if not good or not self._looks_good(good, collate):
            return None
        try:
            batch = collate(good)
        except Error:
            return None
        return None if self._is_finite and not self._has_own_collate and not_finite(batch) else batch

    def _looks_good(self, good: list[Any], collate: Collate) -> bool:
        """Whether each of them fits the reference; what is read beside a sample must not decide whether it is bad.

        torch's collate alone would not tell: it takes a number among texts, or drops a key that the first one lacks.
        """
        reference = self.reference
        if not self._has_own_collate:
            return reference is None or all(form_of(item) == reference.form for item in good)
        if self._is_finite and any(not_finite(item) for item in good):  # which the collate may hide
            return False
        return reference is None or not any(self._beside_reference(0, item, collate, reference) for item in good)

    def _beside_reference(self, index: int, item: Any, collate: Collate, reference: Reference) -> BadSample | None:
        """Why the user's collate cannot collate a sample with the reference; None if it can, in either order."""
        beside = self._item_of(reference)
        pairs = [beside, item], [item, beside]
        return _first(_misfit_of(index, pair, collate, reference) for pair in pairs)

    def _misfit(self, index: int, item: Any, collate: Collate) -> BadSample | None:
        """What is bad about a sample that could be read; None if it is good."""
        if self._is_finite and (where := not_finite(item)):
            return BadSample(index, "NotFinite", where)
        if self.reference is None or index == self.reference.sample:
            return _alone(index, item, collate)
        if self._has_own_collate:
            return self._beside_reference(index, item, collate, self.reference)
        if (form := form_of(item)) != self.reference.form:
            says = (
                f"it is {_shown(form)}, unlike sample {self.reference.sample}, which is {_shown(self.reference.form)}"
            )
            return BadSample(index, "Misshapen", says)
        return _alone(index, item, collate)

    def _item_of(self, reference: Reference) -> Any:
        """The reference itself; raises DataError if it cannot be read any more."""
        if not self._reference_item:
            try:
                self._reference_item = list(self._within_limit([reference.sample]))
            except ReadTimeout as error:
                raise DataError(f"sample {reference.sample}, with which others are compared: {error}") from None
        return self._reference_item[0]


def choose_reference(read: Sequence[tuple[int, Any]], collate: Collate | None) -> Reference | None:
    """The sample, of some that were read, with which most of the others can be collated; the first of several such.

    `collate` is the user's; with torch's, samples of one form can be collated. None if there is no good sample.
    """
    fits = _have_one_form if collate is None else lambda one, two: _can_collate(collate, one, two)
    scores = [sum(fits(item, other) for _, other in read) for _, item in read]
    if not scores:
        return None
    index, item = read[scores.index(max(scores))]
    return Reference(index, form_of(item))


def _have_one_form(one: Any, two: Any) -> bool:
    return bool(form_of(one) == form_of(two))


def _can_collate(collate: Collate, one: Any, two: Any) -> bool:
    try:
        collate([one, two])
    except Exception:
        return False
    return True


def bad_sample(index: int, error: BaseException) -> BadSample:
    """The sample whose reading, or whose collating, raised; the type is that of the user's own exception.

    What a dataset of files says itself of its file stays: it names the file.
    """
    cause = error.__cause__ if isinstance(error, Error) and error.__cause__ is not None else error
    message = str(cause if str(error).endswith(said("", cause)) else error)
    frames = "".join(traceback.format_exception(cause))
    # What is hidden must be whole: of a secret that is cut, nobody knows that it is one.
    return BadSample(index, type(cause).__name__, hide(message)[:TEXT_LENGTH], hide(frames)[-TEXT_LENGTH:])


def form_of(item: Any) -> Form:
    """The structure and shapes of an item as torch's collate tells them apart, in JSON values.

    >>> form_of((torch.zeros(2, 3), {"label": 1}))
    ['tensor [2, 3]', {'label': 'number'}]
    """
    if isinstance(item, Carrying):
        return form_of(item.item)
    if isinstance(item, torch.Tensor):
        return f"tensor {list(item.shape)}"
    if isinstance(item, np.ndarray) and item.ndim:
        return f"array {list(item.shape)}"
    if isinstance(item, str | bytes):  # numpy's text too
        return "text"
    if isinstance(item, int | float | np.generic | np.ndarray):
        return "number"
    if isinstance(item, Mapping):
        return {hide(str(key)): form_of(item[key]) for key in item}
    if isinstance(item, list | tuple):
        return [form_of(one) for one in item]
    return f"a {type(item).__qualname__}"


def not_finite(item: Any) -> str:
    """Where an item holds a NaN or an infinity: `[0]['x'] holds nan`; empty if all its numbers are finite."""
    return next(_not_finite(item.item if isinstance(item, Carrying) else item, ""), "")


def _not_finite(item: Any, where: str) -> Iterator[str]:
    if isinstance(item, Mapping):
        yield from chain.from_iterable(_not_finite(item[key], f"{where}[{key!r}]") for key in item)
    elif isinstance(item, list | tuple):
        yield from chain.from_iterable(_not_finite(one, f"{where}[{place}]") for place, one in enumerate(item))
    elif (numbers := _floating(item)) is not None and not _is_finite(numbers):
        wrong = numbers[~torch.isfinite(numbers)]
        yield f"{where or 'it'} holds {wrong.reshape(-1)[0].item()}"


def _floating(item: Any) -> torch.Tensor | None:
    """The floating numbers of a leaf; None if it has none."""
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "fc":
        return torch.from_numpy(np.atleast_1d(np.asarray(item)))
    if isinstance(item, float):
        return torch.tensor([item])
    if not isinstance(item, torch.Tensor) or not (item.is_floating_point() or item.is_complex()):
        return None
    if item.layout is torch.strided:
        return item
    return item._values() if item.layout is torch.sparse_coo else item.values()


def _is_finite(numbers: torch.Tensor) -> bool:
    """Whether all numbers are finite; a finite sum says so at once."""
    half = numbers.dtype in (torch.float16, torch.bfloat16)
    total = numbers.sum(dtype=torch.float32) if half else numbers.sum()
    return bool(torch.isfinite(total)) or bool(torch.isfinite(numbers).all())


def _bad_ones(items: Sequence[Any]) -> dict[int, BadSample]:
    """The samples that could not be read, by their places; of most batches there are none, which is soon seen."""
    if BadSample not in set(map(type, items)):
        return {}
    return {place: item for place, item in enumerate(items) if isinstance(item, BadSample)}


def _without(items: Sequence[Any], bad: Mapping[int, BadSample]) -> list[Any]:
    if not bad:
        return list(items)
    return [item for place, item in enumerate(items) if place not in bad]


def _alone(index: int, item: Any, collate: Collate) -> BadSample | None:
    return _misfit_of(index, [item], collate, None)


def _misfit_of(index: int, items: list[Any], collate: Collate, reference: Reference | None) -> BadSample | None:
    try:
        collate(items)
    except Error as error:
        found = bad_sample(index, error)
        beside = "" if reference is None else f"; collated with sample {reference.sample}"
        return found._replace(message=f"{found.message}{beside}")
    return None


def _first(found: Iterator[BadSample | None]) -> BadSample | None:
    return next((one for one in found if one is not None), None)


def _shown(form: Form) -> str:
    return str(form).replace("'", "")
