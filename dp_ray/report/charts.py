"""The charts of a run over its steps: loss, metrics, learning rate, gradient norm, speed, workers.

Long series are thinned out: each bucket keeps its least and its largest value, so no extreme is hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.job.keys import NamedEval, measured_by, named_evals
from dp_ray.plan.history import CLOCKED, COUNTS, LOSS_OF, NORM, RATE, ROWS_OF, is_inner, is_of_further
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

    If there are more, keep at most `2 * buckets + 2`: the ends, and the extremes of each bucket of consecutive
    points.
    """
    is_finite = np.isfinite(y)
    odd = x[~is_finite]
    # After LISTED stretches, the last one holds the rest.
    cuts = np.flatnonzero(np.diff(odd) > 1) + 1
    stretches = [(int(group[0]), int(group[-1])) for group in np.split(odd, cuts[: LISTED - 1]) if len(group)]
    x, y = x[is_finite], y[is_finite]
    none = np.empty(0)
    if len(y) <= max(whole, 2 * buckets):
        return Thinned(x, y, none, none, 1, stretches, len(odd))
    width = -(-len(y) // buckets)
    starts = np.arange(0, len(y), width)
    counts = np.diff(np.append(starts, len(y)))
    # The last bucket is filled up with the last value, at the place of the last point.
    grid = np.pad(y, (0, len(starts) * width - len(y)), mode="edge").reshape(len(starts), width)
    places = [starts + grid.argmin(1), starts + grid.argmax(1), [0, len(y) - 1]]
    kept = np.unique(np.minimum(np.concatenate(places), len(y) - 1))
    mean_x, mean_y = (np.add.reduceat(axis.astype(float), starts) / counts for axis in (x, y))
    return Thinned(x[kept], y[kept], mean_x, mean_y, width, stretches, len(odd))


TITLES = {
    "loss": "Loss",
    "epoch_loss": "Loss by rows",  # where a batch's is a sum
    RATE: "Learning rate",
    NORM: "Gradient norm",
    "rows_per_second": "Rows per second",
    "data_wait_seconds": "Waiting for data (s per step)",
    LOSS_OF: "Loss by source",
    ROWS_OF: "Rows by source",
}
LAST = (ROWS_OF, RATE, NORM, *CLOCKED)
FEW = 30  # points of a series that are drawn one by one
EXACT = {RATE}  # values without noise, which are not smoothed


@dataclass(frozen=True)
class Chart:
    """A chart, as the page's script draws it: its series are JSON values; `figures` are the rows of its table."""

    key: str
    title: str
    series: list[dict[str, Any]]

    @property
    def bucket(self) -> int:
        """The number of steps of which the page has only the least and the largest value; 1 if it has all."""
        return max(int(line["width"]) for line in self.series)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The first, last, least and largest value of each series, with the step of each."""
        rows = []
        for line in self.series:
            x, y = line["x"], line["y"]
            figures = {"name": line["name"], "points": line["points"], "num_odd": line["numOdd"], "odd": line["odd"]}
            if y:
                places = {"first": 0, "last": len(y) - 1, "least": int(np.argmin(y)), "largest": int(np.argmax(y))}
                figures |= {name: {"step": x[at], "value": y[at]} for name, at in places.items()}
            rows.append(figures)
        return rows


def charts_of(history: pa.Table | None, job: Mapping[str, Any], whole: int = WHOLE) -> list[Chart]:
    """Return a chart for each measured value and its evaluations, in the order of interest.

    `job` is the run's, as a file describes it; `whole`: see `thinned`.
    """
    evals = named_evals(job.get("eval"))
    described = [job.get(key) for key in ("loss", "step")]
    is_sum = any(isinstance(each, Mapping) and each.get("reduction") == "sum" for each in described)
    if history is None or not len(history):
        return []
    charts = []
    for number, (name, columns) in enumerate(_groups(history.column_names, evals, is_sum).items()):
        series = [series_of(column, history, whole) for column in columns]
        series = [{**line, "color": at, "dash": at} for at, line in enumerate(series) if line["x"] or line["odd"]]
        if series:
            charts.append(Chart(f"chart-{number}", TITLES.get(name, name), series))
    return charts


def _groups(names: Sequence[str], evals: Sequence[NamedEval], is_sum: bool) -> dict[str, list[str]]:
    """Return the columns that share each chart: a value, with what evaluations measured of it.

    If the loss of a batch `is_sum`, an epoch's and an evaluation's, which are by rows, have another one.
    """
    drawn = [name for name in names if name not in COUNTS and not is_inner(name)]
    by = {name: measured_by(evals, name) for name in drawn}
    values = {name: name.removeprefix("eval_" if each is None else each.prefix) for name, each in by.items()}
    # The sources of a mixture share a chart.
    values |= {name: kind for kind in (LOSS_OF, ROWS_OF) for name in drawn if values[name].startswith(kind)}
    # So do the rates of several optimizers, and the norms of a loop's.
    values |= {name: name.rpartition("_")[0] for name in drawn if is_of_further(name)}
    if is_sum:
        values |= {name: "epoch_loss" for name in drawn if values[name] == "loss" and name != "loss"}
    bare = dict.fromkeys(values.values())
    if not is_sum:
        bare.pop("epoch_loss", None)
    order = [*(name for name in bare if name not in LAST), *(name for name in LAST if name in bare)]
    # The value itself comes first, and then the evaluations in their order.
    of_each = sorted(drawn, key=lambda name: -1 if (each := by[name]) is None else evals.index(each))
    of_each.sort(key=is_of_further)
    groups = {name: [title for title in of_each if values[title] == name] for name in order}
    if "epoch_loss" in drawn and not is_sum:
        groups["loss"].insert(1, "epoch_loss")
    return groups


def series_of(name: str, history: pa.Table, whole: int) -> dict[str, Any]:
    """Return a column of the history, thinned out, as JSON values."""
    steps, values = known_numbers(history, name)
    points = thinned(steps, values, whole=whole)
    return {
        "name": name,
        "source": name,
        "x": points.x.tolist(),
        "y": points.y.tolist(),
        "meanX": points.mean_x.tolist(),
        "meanY": points.mean_y.tolist(),
        "width": points.count,
        "odd": points.odd,
        "numOdd": points.num_odd,
        "points": len(values),
        "isSparse": len(values) <= FEW,
        "isStep": name in EXACT or (is_of_further(name) and name.startswith(RATE)),
    }


def epochs_of(history: pa.Table | None) -> list[dict[str, int]]:
    """Return the first step of each epoch that the history holds; at most a hundred, evenly."""
    if history is None or not len(history):
        return []
    epochs, steps = (numbers(history.column(name)) for name in ("epoch", "step"))
    starts = np.flatnonzero(np.diff(epochs)) + 1
    starts = starts[:: -(-len(starts) // 100) or 1]
    return [{"epoch": int(epochs[at]), "step": int(steps[at])} for at in starts]


def workers_chart(incidents: IncidentLog, last_step: int) -> list[Chart]:
    """Chart the number of workers over the steps, of a run of several attempts."""
    if len(incidents.world_sizes) < 2:
        return []
    x: list[int] = []
    y: list[int] = []
    start = 0
    for size, end in zip(incidents.world_sizes, [*incidents.interruptions, None], strict=False):
        # An attempt is a line from its first step to its last.
        x += [start, max(start, end.step if end else last_step)]
        y += [size, size]
        if end is not None:
            start = end.step if end.resumed_step is None else end.resumed_step
    series = {"name": "workers", "source": "workers", "x": x, "y": y, "meanX": [], "meanY": [], "width": 1}
    series |= {"color": 0, "dash": 0, "odd": [], "numOdd": 0, "points": len(x), "isSparse": False, "isStep": True}
    return [Chart("chart-workers", "Workers", [series])]
