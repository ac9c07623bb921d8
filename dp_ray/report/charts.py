"""The charts of a run over its steps: loss, metrics, learning rate, gradient norm, speed, workers.

Thins out long series for drawing: each bucket keeps its least and its largest value, so no extreme is hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.rundir.history import is_inner
from dp_ray.rundir.incidents import IncidentLog
from dp_ray.tables import known_numbers, numbers

BUCKETS = 1500
WHOLE = 20_000  # points of a series that the page holds as it is, for zooming in
LISTED = 100  # stretches of values that are not finite

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Thinned:
    """Points of a series: `x`, `y` are of the series itself.

    `mean_x`, `mean_y` are the means of the buckets, and `count` is the number of points in each; they are empty if no
    point was left out. `odd` holds the first and last `x` of each stretch of values that are not finite.
    """

    x: Array
    y: Array
    mean_x: Array
    mean_y: Array
    count: int
    odd: list[tuple[int, int]]
    num_odd: int


def thinned(x: Array, y: Array, buckets: int = BUCKETS, whole: int = WHOLE) -> Thinned:
    """Keep all of at most `whole` points.

    Of more, keep at most `2 * buckets + 2`: the ends, and the extremes of each bucket of consecutive points.
    """
    is_finite = np.isfinite(y)
    odd = x[~is_finite]
    x, y = x[is_finite], y[is_finite]
    none = np.empty(0)
    if len(y) <= max(whole, 2 * buckets):
        return Thinned(x, y, none, none, 1, _stretches(odd), len(odd))
    width = -(-len(y) // buckets)
    starts = np.arange(0, len(y), width)
    counts = np.diff(np.append(starts, len(y)))
    kept = _extremes(y, starts, width)
    mean_x, mean_y = (np.add.reduceat(one.astype(float), starts) / counts for one in (x, y))
    return Thinned(x[kept], y[kept], mean_x, mean_y, width, _stretches(odd), len(odd))


def _extremes(y: Array, starts: Array, width: int) -> Array:
    """The places of the first and last value, and of each bucket's least and largest, in order."""
    grid = np.pad(y, (0, len(starts) * width - len(y)), mode="edge").reshape(len(starts), width)
    places = [starts + grid.argmin(1), starts + grid.argmax(1), [0, len(y) - 1]]
    return np.unique(np.minimum(np.concatenate(places), len(y) - 1))


def _stretches(x: Array) -> list[tuple[int, int]]:
    """The first and last of consecutive whole numbers; after LISTED stretches, the last one holds the rest."""
    if not len(x):
        return []
    cuts = np.flatnonzero(np.diff(x) > 1) + 1
    return [(int(one[0]), int(one[-1])) for one in np.split(x, cuts[: LISTED - 1])]


TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "rows_per_second": "Rows per second",
    "data_wait_seconds": "Waiting for data (s per step)",
}
LAST = ("learning_rate", "gradient_norm", "rows_per_second", "data_wait_seconds")
NOT_DRAWN = ("step", "epoch", "rows")
FEW = 30  # points of a series that are drawn one by one
EXACT = {"learning_rate"}  # values without noise, which are not smoothed


@dataclass(frozen=True)
class Chart:
    """A chart: its series as JSON values for the page's script, and as rows of figures for its table."""

    key: str
    title: str
    series: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"key": self.key, "title": self.title, "series": self.series}

    @property
    def bucket(self) -> int:
        """Of how many steps the page has only the least and the largest value; 1 if it has all."""
        return max(int(one["width"]) for one in self.series)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The first, last, least and largest value of each series."""
        return [figures_of(one) for one in self.series]


def charts_of(history: pa.Table | None, whole: int = WHOLE) -> list[Chart]:
    """A chart for each measured value and its evaluation, in the order of interest; `whole` as of `thinned`."""
    if history is None or not len(history):
        return []
    found = []
    for number, (name, columns) in enumerate(_groups(history.column_names).items()):
        series = [series_of(one, history, one, whole) for one in columns]
        series = [{**one, "color": at, "dash": at} for at, one in enumerate(series) if one["x"] or one["odd"]]
        if series:
            found.append(Chart(f"chart-{number}", TITLES.get(name, name), series))
    return found


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """The columns that share a chart: a value, with what an evaluation measured of it."""
    drawn = [name for name in names if name not in NOT_DRAWN and not is_inner(name)]
    bare = dict.fromkeys(name.removeprefix("eval_").replace("epoch_loss", "loss") for name in drawn)
    order = [*(name for name in bare if name not in LAST), *(name for name in LAST if name in bare)]
    groups = {name: [one for one in (name, f"eval_{name}") if one in drawn] for name in order}
    if "epoch_loss" in drawn:
        groups["loss"].insert(1, "epoch_loss")
    return groups


def series_of(name: str, history: pa.Table, source: str, whole: int = WHOLE) -> dict[str, Any]:
    """A column of the history, thinned out, as JSON values; `source` is its name there."""
    steps, values = known_numbers(history, source)
    points = thinned(steps, values, whole=whole)
    return {
        "name": name,
        "source": source,
        "x": points.x.tolist(),
        "y": points.y.tolist(),
        "meanX": points.mean_x.tolist(),
        "meanY": points.mean_y.tolist(),
        "width": points.count,
        "odd": points.odd,
        "numOdd": points.num_odd,
        "points": len(values),
        "isSparse": len(values) <= FEW,
        "isStep": source in EXACT,
    }


def figures_of(series: Mapping[str, Any]) -> dict[str, Any]:
    """A series in figures: its first, last, least and largest value, with the step of each."""
    x, y = series["x"], series["y"]
    found = {"name": series["name"], "points": series["points"], "num_odd": series["numOdd"], "odd": series["odd"]}
    if not y:
        return found
    places = {"first": 0, "last": len(y) - 1, "least": int(np.argmin(y)), "largest": int(np.argmax(y))}
    return {**found, **{name: {"step": x[at], "value": y[at]} for name, at in places.items()}}


def epochs_of(history: pa.Table | None) -> list[dict[str, int]]:
    """The first step of each epoch that the history holds; at most a hundred, evenly."""
    if history is None or not len(history):
        return []
    epochs, steps = (numbers(history.column(name)) for name in ("epoch", "step"))
    starts = np.flatnonzero(np.diff(epochs)) + 1
    starts = starts[:: -(-len(starts) // 100) or 1]
    return [{"epoch": int(epochs[at]), "step": int(steps[at])} for at in starts]


def workers_chart(incidents: IncidentLog, last_step: int) -> list[Chart]:
    """The number of workers over the steps, of a run of several attempts."""
    if len(incidents.world_sizes) < 2:
        return []
    points = list(_sizes(incidents, last_step))
    x, y = [one[0] for one in points], [one[1] for one in points]
    series = {"name": "workers", "source": "workers", "x": x, "y": y, "meanX": [], "meanY": [], "width": 1}
    series |= {"color": 0, "dash": 0, "odd": [], "numOdd": 0, "points": len(x), "isSparse": False, "isStep": True}
    return [Chart("chart-workers", "Workers", [series])]


def _sizes(incidents: IncidentLog, last_step: int) -> Iterator[tuple[int, int]]:
    """Points of the line: each attempt from its first step to its last, with its number of workers."""
    start = 0
    ends = [*incidents.interruptions, None]
    for size, end in zip(incidents.world_sizes, ends, strict=False):
        yield start, size
        yield max(start, end.step if end else last_step), size
        if end is not None:
            start = end.step if end.resumed_step is None else end.resumed_step
