"""A mixture of datasets by weights. `plan/mixture.py` has its order; here its sources are built and read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from dp_ray.errors import DataError, Error, JobError
from dp_ray.job.targets import bind, build, check_dataset, target_of
from dp_ray.plan.mixture import Mixture, Stage
from dp_ray.text import did_you_mean, listed

Weights: TypeAlias = Mapping[str, Any]
FROM = "from"  # beside the weights of a stage: the row at which it begins
STOPS = ("first", "all")


class Mix(Dataset[Any]):
    """The rows of several map-style datasets, by weights: a dataset with an order of its own, which a job follows.

    `sources` has a dataset for each name, or the target of one: `module:attribute`, or `{target: ..., args: ...}`.
    `weights` has the share of each, which add up to 1; as text fractions are exact: `1/3`. A list of such mappings,
    each with the row `from` which it holds, changes them as the run goes on. `stop` ends an epoch with the source
    that is through `first`, when `all` are, or after `{rows: N}`. `fields` are the keys that are taken of each item.

    Raises JobError for arguments that do not go together, and DataError for a source without rows, and for a column
    that text files of one source give another type than those of another.

    An index is the row's id, not a place in the order: the row's index among those of all sources, in the order of
    their names, plus the source's epoch times the number of these. `locate` tells it.

    >>> import dp_ray
    >>> mix = dp_ray.data.Mix({"web": [1.0] * 6, "code": [2.0] * 3}, {"web": "2/3", "code": "1/3"})
    >>> len(mix)
    8
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | Sequence[Weights],
        stop: str | Mapping[str, int] = "first",
        fields: Sequence[str] | None = None,
    ) -> None:
        stages, end = self.check(sources, weights, stop, fields)
        self.sources = {name: _built(f"sources.{name}", sources[name]) for name in sorted(sources)}
        try:
            self.mixture = Mixture(tuple(self.sources), tuple(map(len, self.sources.values())), stages, end)
        except ValueError as error:
            raise JobError(f"Mix: stop: {stop}: {error}") from None
        self._weights, self._stop = weights, stop
        self._fields = None if fields is None else list(fields)
        _check_types(self.sources, self._fields)
        self._first: tuple[str, int, str] | None = None  # the first item in this process: its source, row and form

    @staticmethod
    def check(
        sources: Mapping[str, Any],
        weights: Weights | Sequence[Weights],
        stop: str | Mapping[str, int] = "first",
        fields: Sequence[str] | None = None,
    ) -> tuple[tuple[Stage, ...], str | int]:
        """Check the arguments without building a source; return the stages of weights, and what ends an epoch."""
        are_named = isinstance(sources, Mapping) and all(name and isinstance(name, str) for name in sources)
        if not are_named or not sources or FROM in sources:
            says = f"must map names to datasets, none of them {FROM!r}"
            raise JobError(f"Mix: sources: {says}, got {sources!r:.80}")
        for name, source in sources.items():
            if isinstance(source, str | Mapping):
                bind(f"sources.{name}", target_of(f"Mix: sources.{name}", source))
        if fields is not None and (isinstance(fields, str) or not isinstance(fields, Sequence) or not fields):
            raise JobError(f"Mix: fields: must be a list of keys that each item has, like [text]; got {fields!r:.80}")
        return _stages(sorted(sources), weights), _stop(stop)

    def __len__(self) -> int:
        return self.mixture.rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __iter__(self) -> Iterator[Any]:
        """Go through the first ids: each id is a row, so that without an end here a plain `for` would have none."""
        return (self[index] for index in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows with these ids, in order. Raises DataError, which names the source and the row."""
        rows = self.mixture.locate(np.asarray(indices, np.int64))
        items: list[Any] = [None] * len(indices)
        for source in dict.fromkeys(rows.sources.tolist()):
            places = np.flatnonzero(rows.sources == source)
            name, own = self.mixture.names[source], rows.indices[places].tolist()
            for place, row, item in zip(places.tolist(), own, self._read(name, own), strict=True):
                items[place] = item if self._fields is None else self._of_fields(name, row, item)
                # Not of a row by itself: a job that sets bad samples aside compares each with a good one.
                if self._fields is None and len(indices) > 1:
                    self._check_fields(name, row, item)
        return items

    def with_sources(self, change: Callable[[str, Any], Any]) -> "Mix":
        """Return the same mixture of other sources: what `change` makes of each name and source.

        Their items may have other fields, so all are taken.
        """
        sources = {name: change(name, source) for name, source in self.sources.items()}
        return Mix(sources, self._weights, self._stop)

    def locate(self, index: int) -> tuple[str, int, int]:
        """Return the source of the row with an id, the source's epoch, and the row's index in the source."""
        return self.mixture.row(index)

    @property
    def set_epoch(self) -> Any:
        """A function that tells each source with a `set_epoch` the epoch of the mixture; None if none has one."""
        told = [call for source in self.sources.values() if callable(call := getattr(source, "set_epoch", None))]
        return (lambda epoch: [call(epoch) for call in told]) if told else None

    @property
    def reads_forward(self) -> bool:
        """Whether a source can only be read forward, so that nothing can be shuffled."""
        return any(getattr(source, "reads_forward", False) for source in self.sources.values())

    @cached_property  # which may be set to another
    def loader_context(self) -> str | None:
        """How processes that read are started: as the first source asks that does ask."""
        return next(filter(None, (getattr(source, "loader_context", None) for source in self.sources.values())), None)

    @property
    def pins(self) -> dict[str, str] | None:
        """The state of each file of the sources that tell it; None if none does."""
        pins = [own for source in self.sources.values() if isinstance(own := getattr(source, "pins", None), dict)]
        return {file: state for own in pins for file, state in own.items()} if pins else None

    def _read(self, name: str, rows: list[int]) -> list[Any]:
        """Read some rows of a source."""
        source, reading = self.sources[name], rows
        try:
            if (many := getattr(source, "__getitems__", None)) is None:
                return [source[(reading := [row])[0]] for row in rows]
            items: list[Any] = many(rows)
        except Exception as error:
            what = "window" if hasattr(source, "parts") else "row"  # of a source that `pack` has packed
            where = f"{what}{'s' * (len(reading) > 1)} {listed(reading)} of source {name!r}"
            if isinstance(error, Error):
                raise type(error)(f"{where}: {error}") from error
            raise DataError(f"{where} raised {type(error).__name__}: {error}") from error
        if len(items) != len(rows):
            raise DataError(
                f"source {name!r} gave {len(items)} items for {len(rows)} rows: it must give one for each"
            )
        return items

    def _of_fields(self, name: str, row: int, item: Any) -> Any:
        """Return the fields that are taken of an item. Raises DataError if it has not all of them."""
        fields = self._fields or []
        lacking = [key for key in fields if key not in item] if isinstance(item, Mapping) else fields
        if lacking:
            has = f"has no {lacking[0]!r}, but {listed(list(item))}" if isinstance(item, Mapping) else "is no dict"
            raise DataError(f"row {row} of source {name!r} {has}; fields names keys that each item has")
        return {key: item[key] for key in fields}

    def _check_fields(self, name: str, row: int, item: Any) -> None:
        """Raise DataError unless an item has the fields of other sources' items, as far as this process has seen."""
        if self._first is None:
            self._first = name, row, _form_of(item)
        first, first_row, there = self._first
        if name != first and (form := _form_of(item)) != there:
            raise DataError(
                f"row {row} of source {name!r} is {form}, and row {first_row} of source {first!r} is {there}; give "
                "all sources the same fields, or name those to take of each item: fields: [...]"
            )


def _built(key: str, source: Any) -> Any:
    """Return the dataset of a source, which may be a target. Raises what `target_of` and `check_dataset` raise."""
    is_target = isinstance(source, str | Mapping)
    dataset = build(key, target_of(f"Mix: {key}", source)) if is_target else source
    if isinstance(dataset, Mix):
        raise JobError(f"Mix: {key}: is a Mix itself; put its sources and their weights into this one")
    check_dataset(f"Mix: {key}", dataset)
    return dataset


def _check_types(sources: Mapping[str, Any], fields: Sequence[str] | None) -> None:
    """Raise DataError for a column of text files to which two sources give other types: no batch could hold both."""
    seen: dict[str, tuple[str, str]] = {}
    for name, source in sources.items():
        for column, kind in getattr(source, "column_types", {}).items():
            first, there = seen.setdefault(column, (name, kind))
            if kind != there and (fields is None or column in fields):
                wider = kind if "int" in there else there
                raise DataError(
                    f"column {column!r} is {there} in source {first!r}, and {kind} in source {name!r}; give it one "
                    f"type in both, as by types: {{{column}: {wider}}}"
                )


def _stages(names: list[str], weights: Any) -> tuple[Stage, ...]:
    """Return the stages of weights. Raises JobError, which names the stage and the source."""
    if isinstance(weights, Mapping):
        return (Stage(0, _shares("weights", names, weights)),)
    if isinstance(weights, str) or not isinstance(weights, Sequence) or not weights:
        raise JobError(f"Mix: weights: must map each source to its share, or be a list of such, got {weights!r:.80}")
    stages: list[Stage] = []
    for number, given in enumerate(weights):
        key = f"weights[{number}]"
        start = given.get(FROM) if isinstance(given, Mapping) else None
        least = stages[-1].start + 1 if stages else 0
        most = 2**63 if number else 1
        if not isinstance(start, int) or isinstance(start, bool) or not least <= start < most:
            must = f"a row of the run, above {least - 1} and below 2**63" if number else "0, where the run begins"
            raise JobError(f"Mix: {key}.{FROM}: must be {must}; got {start!r}")
        stages.append(Stage(start, _shares(key, names, {name: own for name, own in given.items() if name != FROM})))
    return tuple(stages)


def _shares(key: str, names: list[str], weights: Weights) -> tuple[Fraction, ...]:
    """Return the weight of each source, as exact fractions that add up to 1."""
    for name in weights:
        if name not in names:
            raise JobError(
                f"Mix: {key}.{name}: there is no such source{did_you_mean(str(name), names)}; {listed(names)}"
            )
    lacking = [name for name in names if name not in weights]
    if lacking:
        raise JobError(f"Mix: {key}: source {lacking[0]!r} has no weight; give it one, or 0 to leave it out")
    shares = []
    for name in names:
        try:
            share = Fraction(str(weights[name]))
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if share < 0 or isinstance(weights[name], bool):
            says = f"must be a number from 0 to 1, or a fraction as text, like '1/3'; got {weights[name]!r}"
            raise JobError(f"Mix: {key}.{name}: {says}")
        shares.append(share)
    if (total := sum(shares)) != 1:
        exact = [f"{name}: {share / total}" for name, share in zip(names, shares, strict=True) if total]
        is_short = 0 < len(listed(exact)) < 100
        says = f"write fractions as text, exactly: {listed(exact)}" if is_short else "as fractions, exactly"
        raise JobError(f"Mix: {key}: must add up to 1, and add up to {float(total):.17g}; {says}")
    return tuple(shares)


def _stop(stop: Any) -> str | int:
    if isinstance(stop, str) and stop in STOPS:
        return stop
    rows = stop.get("rows") if isinstance(stop, Mapping) and set(stop) == {"rows"} else None
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise JobError(f"Mix: stop: must be first, all, or {{rows: N}} with N from 1 on; got {stop!r}")
    return rows


def _form_of(item: Any) -> str:
    """Return what must be the same in all sources, in words: the keys of a dict, the length of a tuple, or a type."""
    if isinstance(item, Mapping):
        return f"a dict of {listed(sorted(map(str, item)))}"
    kind = type(item).__qualname__
    return f"a {kind} of {len(item)}" if isinstance(item, tuple) else f"a {kind}"
