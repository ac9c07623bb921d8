"""Find bad samples where they are loaded, and collate the others.

Whether a sample is bad depends on it and on the run's reference sample alone, never on the workers or on the other
samples. With torch's collate, a sample is bad if its structure or shapes are not the reference's. With a collate of
the user, it is bad if that cannot collate it together with the reference. Begin at `Screen`.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from dp_ray.engine.loads.items import PassthroughSample, Plain, SampleReader
from dp_ray.engine.user_code import error_text
from dp_ray.errors import Error, JobError
from dp_ray.plan.split import Shard
from dp_ray.text import a_kind, hide

ItemForm: TypeAlias = Any  # the structure and shapes of an item, as JSON values
CollateFn: TypeAlias = Callable[[list[Any]], Any]
TEXT_LENGTH = 10_000  # kept of a message or a traceback


class BadSample(NamedTuple):
    """The reason why a sample is bad; it takes the sample's place among those that were read.

    `carried` are its values of the keys that the job carries, as far as they can be had; None if it carries none.
    """

    sample: int
    kind: str
    message: str
    traceback: str = ""
    carried: dict[str, Plain] | None = None


@dataclass(frozen=True)
class Reference:
    """The sample with which the others are compared: its index, and its form."""

    sample: int
    form: ItemForm


class Screened(NamedTuple):
    """The good samples of a shard or of a global batch, collated; None if there are none.

    `bad` has the others, by their places among those that were read.
    """

    batch: Any
    bad: dict[int, BadSample]


class Quarantine(NamedTuple):
    """How samples are set aside: a sample to compare them with, and what keeps a shard's bad ones, by position."""

    reference: Reference
    keep: Callable[[Shard, Mapping[int, BadSample]], None]


@dataclass(eq=False)
class Screen:
    """A filter that sets bad samples of a reader aside where they are loaded."""

    reader: SampleReader
    is_finite: bool
    has_own_collate: bool
    reference: Reference | None = None
    _reference_item: list[Any] = field(default_factory=list)

    def read(self, indices: list[int]) -> list[Any]:
        """Return the samples of these indices, with a BadSample in the place of each that cannot be read.

        Raises errors that no single sample caused.
        """
        if len(indices) > 1:
            try:
                return self.reader(indices)
            except (JobError, MemoryError):
                raise
            except Exception:  # one by one, to find the bad ones
                pass
        return [self._read_one(index) for index in indices]

    def _read_one(self, index: int) -> Any:
        try:
            return self.reader([index])[0]
        except (JobError, MemoryError):
            raise
        except Exception as error:
            bad = bad_sample(index, error)
        carry, carried = self.reader.carry, dict[str, Plain]()
        if not carry:
            return bad
        with suppress(Exception):  # those of its values that can be read
            carried = self.reader.carried_alone(index)
        return bad._replace(carried={key: carried.get(key) for key in carry})

    def collate(self, items: Sequence[Any], indices: Sequence[int], collate: CollateFn) -> Screened:
        """Collate the good samples of those that were read.

        Raises what `collate` raises if no sample alone is to blame.
        """
        bad = {place: item for place, item in enumerate(items) if type(item) is BadSample}
        good = [item for place, item in enumerate(items) if place not in bad]
        batch = None if self.has_own_collate else self._collated_at_once(good, collate)
        if batch is None and good:
            for place, (index, item) in enumerate(zip(indices, items, strict=True)):
                if place not in bad and (misfit := self._misfit(index, item, collate)):
                    if isinstance(item, PassthroughSample):
                        misfit = misfit._replace(carried=dict(zip(self.reader.carry, item.values, strict=True)))
                    bad[place] = misfit
            good = [item for place, item in enumerate(items) if place not in bad]
            batch = collate(good) if good else None
        return Screened(batch, bad)

    def _collated_at_once(self, items: list[Any], collate: CollateFn) -> Any:
        """Collate the samples by torch's collate, if all fit the reference; return None if one does not.

        The other samples of a read must not decide whether one is bad. So torch's collate is no test: it takes a
        number among texts, or drops a key that the first sample lacks.
        """
        if not items or (
            self.reference is not None and any(item_form(item) != self.reference.form for item in items)
        ):
            return None
        try:
            batch = collate(items)
        except Error:
            return None
        return None if self.is_finite and not_finite(batch) else batch

    def _beside_reference(self, index: int, item: Any, collate: CollateFn, reference: Reference) -> BadSample | None:
        """Return why the user's collate cannot collate a sample with the reference; None if it can, in either order.

        Raises what the reader raises if the reference cannot be read any more.
        """
        if not self._reference_item:
            self._reference_item = self.reader([reference.sample])
        beside = self._reference_item[0]
        in_order = _misfit_of(index, [beside, item], collate, reference)
        return in_order if in_order is not None else _misfit_of(index, [item, beside], collate, reference)

    def _misfit(self, index: int, item: Any, collate: CollateFn) -> BadSample | None:
        """Return why a sample that could be read is bad; None if it is good."""
        reference = self.reference
        if self.is_finite and (where := not_finite(item)):
            return BadSample(index, "NotFinite", where)
        if reference is None or index == reference.sample:
            return _misfit_of(index, [item], collate, None)
        if self.has_own_collate:
            return self._beside_reference(index, item, collate, reference)
        if (form := item_form(item)) != reference.form:
            says = f"it is {form}, unlike sample {reference.sample}, which is {reference.form}"
            return BadSample(index, "Misshapen", says.replace("'", ""))
        return _misfit_of(index, [item], collate, None)


def _misfit_of(index: int, items: list[Any], collate: CollateFn, reference: Reference | None) -> BadSample | None:
    try:
        collate(items)
    except Error as error:
        bad = bad_sample(index, error)
        beside = "" if reference is None else f"; collated with sample {reference.sample}"
        return bad._replace(message=f"{bad.message}{beside}")
    return None


def bad_sample(index: int, error: BaseException) -> BadSample:
    """Return the BadSample of a read or collate that raised; its type is the user's own exception.

    An error of dp_ray's own datasets stays as it is: it names the file.
    """
    cause = error.__cause__ if isinstance(error, Error) and error.__cause__ is not None else error
    message = str(cause if str(error).endswith(error_text("", cause)) else error)
    frames = "".join(traceback.format_exception(cause))
    # Hide before cutting: a secret that is cut is no longer seen to be one.
    return BadSample(index, type(cause).__name__, hide(message)[:TEXT_LENGTH], hide(frames)[-TEXT_LENGTH:])


def choose_reference(read: Sequence[tuple[int, Any]], collate: CollateFn | None) -> Reference | None:
    """Choose, from some samples that were read, the first of those with which most others can be collated.

    `collate` is the user's; with torch's, samples of one form can be collated. None if there is no good sample.
    """
    if not read:
        return None
    if collate is None:
        forms = [item_form(item) for _, item in read]
        scores = [forms.count(form) for form in forms]
    else:
        scores = [sum(_can_collate(collate, item, other) for _, other in read) for _, item in read]
    index, item = read[scores.index(max(scores))]
    return Reference(index, item_form(item))


def _can_collate(collate: CollateFn, first: Any, second: Any) -> bool:
    try:
        collate([first, second])
    except Exception:
        return False
    return True


def item_form(item: Any) -> ItemForm:
    """Return the structure and shapes of an item as torch's collate tells them apart, in JSON values.

    >>> item_form((torch.zeros(2, 3), {"label": 1}))
    ['tensor [2, 3]', {'label': 'number'}]
    """
    if isinstance(item, PassthroughSample):
        return item_form(item.item)
    if isinstance(item, torch.Tensor):
        return f"tensor {list(item.shape)}"
    if isinstance(item, np.ndarray) and item.ndim:
        return f"array {list(item.shape)}"
    if isinstance(item, str | bytes):  # numpy's text too
        return "text"
    if isinstance(item, int | float | np.generic | np.ndarray):
        return "number"
    if isinstance(item, Mapping):
        return {hide(str(key)): item_form(item[key]) for key in item}
    if isinstance(item, list | tuple):
        return [item_form(value) for value in item]
    return a_kind(item)


def not_finite(item: Any) -> str:
    """Return where an item holds a NaN or an infinity: `[0]['x'] holds nan`; empty if all numbers are finite."""
    return next(_not_finite(item.item if isinstance(item, PassthroughSample) else item, ""), "")


def _not_finite(item: Any, where: str) -> Iterator[str]:
    if isinstance(item, Mapping):
        yield from chain.from_iterable(_not_finite(item[key], f"{where}[{key!r}]") for key in item)
    elif isinstance(item, list | tuple):
        yield from chain.from_iterable(_not_finite(value, f"{where}[{place}]") for place, value in enumerate(item))
    elif (numbers := _floating(item)) is not None:
        half = numbers.dtype in (torch.float16, torch.bfloat16)
        total = numbers.sum(dtype=torch.float32) if half else numbers.sum()
        # If the sum is finite, so are all numbers.
        if not torch.isfinite(total) and not torch.isfinite(numbers).all():
            wrong = numbers[~torch.isfinite(numbers)]
            yield f"{where or 'it'} holds {wrong.reshape(-1)[0].item()}"


def _floating(item: Any) -> torch.Tensor | None:
    """Return the floating numbers of a leaf; None if it has none."""
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "fc":
        return torch.from_numpy(np.atleast_1d(np.asarray(item)))
    if isinstance(item, float):
        return torch.tensor([item])
    if not isinstance(item, torch.Tensor) or not (item.is_floating_point() or item.is_complex()):
        return None
    if item.layout is torch.strided:
        return item
    return item._values() if item.layout is torch.sparse_coo else item.values()
