"""A step of a training that was run again: its loss beside the history's, its rows, and what was not finite."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from dp_ray.plan.packing import RowPart
from dp_ray.results.text import in_columns
from dp_ray.text import counted, listed, relative

ROUNDING = 3e-7  # relative: a few units in the last place of fp32
SHOWN_ROWS = 20
SHOWN_OF_PASS = 5  # shards, and rows
EQUAL = "bitwise equal"


class ReplayedRow(NamedTuple):
    """A row of a step: its loss, None if not known, the sample's index, its shard, its position in the epoch.

    In a batch that a loop has given, there is no sample, and the position is that in the batch. If the loss is over
    the batch, it is that of the batch, and `gradient` the norm of its gradient by the row's outputs. A window of
    packed rows has `parts`: each row of the dataset, and which of its tokens.
    """

    loss: float | None
    sample: int | None
    shard: int
    position: int
    gradient: float | None = None
    source: tuple[str, int, int] | None = None  # of a mixture: the row's source, its epoch, and its index there
    parts: tuple[RowPart, ...] = ()

    @property
    def number(self) -> float | None:
        """That by which rows are ordered."""
        return self.loss if self.gradient is None else self.gradient

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; without `gradient`, a source and `parts` if there are none."""
        values = {key: value for key, value in self._asdict().items() if key not in ("source", "parts")}
        values |= {"parts": [list(part) for part in self.parts]} if self.parts else {}
        if self.source is not None:
            values |= dict(zip(("source", "source_epoch", "source_index"), self.source, strict=True))
        return {key: value for key, value in values.items() if key != "gradient" or value is not None}

    @property
    def name(self) -> str:
        """The sample, for people: its index, or of a mixture the row of its source."""
        if self.source is None:
            return str(self.sample)
        name, epoch, index = self.source
        return f"{name} {index}, epoch {epoch}"


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was run again from the state after `start` steps.

    `loss` is None if only a shard ran, `history_loss` if the history does not have the step.
    """

    run_dir: str
    step: int
    epoch: int
    shard: int | None
    shards: int
    start: int
    bitwise: bool
    device: str
    loss: float | None
    history_loss: float | None

    @property
    def compared(self) -> str:
        """How the step's loss compares with the history's."""
        return compared(self.loss, self.history_loss)

    @property
    def relative_difference(self) -> float | None:
        """The losses' difference, relative to the history's; None where there are not two finite ones."""
        return relative_difference(self.loss, self.history_loss)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; numbers that JSON does not have are text: "nan", "inf", "-inf"."""
        values = {**asdict(self), "compared": self.compared, "difference": self.relative_difference}
        return {key: _plain(value) for key, value in values.items()}

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        earlier = f", steps {self.start} to {self.step - 1} run again" if self.start < self.step else ""
        began = f"from the state after {counted(self.start, 'step')}{earlier},"
        yield f"step {self.step} (epoch {self.epoch}) of {relative(self.run_dir)}, {began} on {self.device}"
        if self.loss is None:
            yield f"shard {self.shard} of {self.shards} alone: its loss is not compared with the history's"
        else:
            yield comparison("loss", self.loss, self.history_loss)
        if self.bitwise and self.loss is not None and self.history_loss is not None and self.compared != EQUAL:
            yield "the run is bitwise: code, data, versions or hardware are not those of the run"


@dataclass(frozen=True)
class Looked:
    """What was seen in the shards of a pass: the losses of their rows, and the first places that are not finite.

    The rows are ordered by their losses, the largest first; `row_losses` says in words what these are.
    """

    row_losses: str
    rows: tuple[ReplayedRow, ...]
    weights: str | None
    batch: str | None
    output: dict[str, Any] | None
    gradient: dict[str, Any] | None

    def places(self, before: str) -> dict[str, str]:
        """Return the places that are not finite, by their kind; the weights are those `before` something."""
        found = {
            f"weights before the {before}": self.weights,
            "batch": self.batch,
            "output": None if self.output is None else str(self.output["text"]),
            "gradient": None if self.gradient is None else str(self.gradient["text"]),
        }
        return {kind: place for kind, place in found.items() if place is not None}

    def lines_of_rows(self, before: str, shown: int) -> Iterator[str]:
        """Yield, for people, what is not finite, and so many of the rows."""
        places = self.places(before)
        for kind, place in places.items():
            yield f"not finite, first {kind}: {place}"
        if not places:
            yield f"finite: the weights before the {before}, its batch, all outputs and gradients"
        if not self.rows:
            yield "no rows: all were skipped or set aside"
            return
        is_gradient = self.rows[0].gradient is not None
        what = "gradient" if is_gradient else "loss"
        yield f"{counted(len(self.rows), 'row')}, the largest {what} first: {self.row_losses}"
        has_samples = any(row.sample is not None for row in self.rows)
        table = [(what, *(["sample"] if has_samples else []), "shard", "position")]
        for row in self.rows[:shown]:
            sample = [row.name] if has_samples else []
            table.append((_number(row.number), *sample, str(row.shard), str(row.position)))
        yield in_columns(table)
        yield from _more(len(self.rows) - shown)
        for row in self.rows[:shown]:
            if row.parts:
                packed = listed([f"{number}[{start}:{stop}]" for number, start, stop in row.parts])
                name = row.name if row.source else f"sample {row.name}"
                yield f"{name} is packed of {counted(len(row.parts), 'row')}: {packed}"


@dataclass(frozen=True)
class Replayed(Looked, ReplayedStep):
    """A step of a declared training: it is one pass."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**super().to_json(), "rows": [_plain(row.to_json()) for row in self.rows]}

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        yield from super().lines()
        yield from self.lines_of_rows("step", SHOWN_ROWS)


class ReplayedShard(NamedTuple):
    """A shard of a pass, its rows and its loss; None if the loss is over the batch."""

    shard: int
    rows: int
    loss: float | None


@dataclass(frozen=True)
class ReplayedPass(Looked):
    """A pass of a loop, at its `place` in the step: the function that was called, and the parts that it trained.

    `number` is that of its random numbers: all calls of a closure have the same. A `gather` trains nothing, has
    neither shards nor rows, and `batch` names a place in what it returned. Else `loss` is the mean of the whole
    batch, of `size` rows. If it `has_own_batch`, which the loop has given, no row has a sample, and its position is
    that in the batch.
    """

    place: int
    number: int
    call: str
    function: str
    of: tuple[str, ...]
    size: int
    has_own_batch: bool
    loss: float | None
    shards: tuple[ReplayedShard, ...]

    @property
    def title(self) -> str:
        """The pass in words."""
        of = f", {listed(self.of)}" if self.of else ""
        return (
            f"pass {self.place}: step.{self.call}({self.function}{of}{', batch=...' if self.has_own_batch else ''})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = {field.name: getattr(self, field.name) for field in PASS_FIELDS}
        shards, rows = [shard._asdict() for shard in self.shards], [row.to_json() for row in self.rows]
        return {**values, "shards": shards, "rows": rows}

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        yield from self.lines_of_pass()
        if self.call == "gather":
            return
        known = [shard for shard in self.shards if shard.loss is not None]
        if known:
            cells = [(_number(loss), str(at), str(rows)) for at, rows, loss in known]
            yield in_columns([("loss", "shard", "rows"), *cells[:SHOWN_OF_PASS]])
            yield from _more(len(known) - SHOWN_OF_PASS)
        yield from self.lines_of_rows("pass", SHOWN_OF_PASS)

    def lines_of_pass(self) -> Iterator[str]:
        """Yield the call, and what it returned."""
        yield self.title
        if self.call == "gather":
            yield f"not finite, first in what it returned: {self.batch}" if self.batch else "finite: what it returned"
        else:
            yield f"loss {self.loss!r}, of {counted(self.size, 'row')}"


PASS_FIELDS = (*fields(ReplayedPass)[len(fields(Looked)) :], *fields(Looked))  # the pass before what was seen in it


class ReplayedNumber(NamedTuple):
    """A number that the loop has logged, here and in the history."""

    here: float
    history: float | None


@dataclass(frozen=True)
class ReplayedLoop(ReplayedStep):
    """A step of a loop: its passes in their order, and the numbers that it logged, by name.

    `loss` is that of the first pass. If a `shard` was named, the others have run all the same, and are not shown.
    """

    logged: dict[str, ReplayedNumber]
    passes: tuple[ReplayedPass, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        logged = {name: number._asdict() for name, number in self.logged.items()}
        return {
            **super().to_json(),
            "logged": _plain(logged),
            "passes": _plain([replayed_pass.to_json() for replayed_pass in self.passes]),
        }

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        yield from super().lines()
        if self.logged:
            cells = [
                (name, repr(here), repr(there), compared(here, there)) for name, (here, there) in self.logged.items()
            ]
            yield in_columns([("logged", "here", "in the history", ""), *cells])
        spoilt = next((replayed_pass for replayed_pass in self.passes if replayed_pass.places("pass")), None)
        if spoilt is not None:
            yield f"not finite, first in pass {spoilt.place}"
        seen = set()
        for replayed_pass in self.passes:
            yield ""
            # Of a closure that is called again, most lines would be the same again.
            is_again = replayed_pass.number in seen and not replayed_pass.places("pass")
            yield from replayed_pass.lines_of_pass() if is_again else replayed_pass.lines()
            seen.add(replayed_pass.number)


def relative_difference(here: float | None, there: float | None) -> float | None:
    """Return the difference of two numbers, relative to the second; None where there are not two finite ones."""
    if here is None or there is None or not math.isfinite(here) or not math.isfinite(there):
        return None
    return abs(here - there) / abs(there) if there else abs(here)


def comparison(name: str, here: float, there: float | None) -> str:
    """Say in a line how a number compares with the history's."""
    known = f"{there!r} in the history" if there is not None else "the history does not have it"
    difference = relative_difference(here, there)
    apart = f" ({difference:.2g} relative)" if difference else ""
    return f"{name} {here!r} here, {known}: {compared(here, there)}{apart}"


def compared(here: float | None, there: float | None) -> str:
    """Say how a loss compares with the history's: `bitwise equal`, `within rounding`, `differs`, `not compared`."""
    if here is None or there is None:
        return "not compared"
    if here == there or (math.isnan(here) and math.isnan(there)):
        return EQUAL
    if math.isfinite(there) and abs(here - there) <= ROUNDING * abs(there):
        return f"within rounding, {ROUNDING:g} relative"
    return "differs"


def _number(number: float | None) -> str:
    return "unknown" if number is None else f"{number:.9g}"


def _more(number: int) -> Iterator[str]:
    if number > 0:
        yield f"and {number:,} more, which --json has"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
