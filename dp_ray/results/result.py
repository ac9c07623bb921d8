"""The result of a run; outputs, shape reports and history are read from its run directory on demand.

`Result` is what `dp_ray.run` returns and `load` reads. The rest formats one as text, for `dp-ray report`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from dp_ray.errors import StorageError
from dp_ray.outputs.files import names_so_far
from dp_ray.outputs.read import Merged
from dp_ray.records import damage_told
from dp_ray.results.text import Table, measured
from dp_ray.rundir.content import check_fetched
from dp_ray.rundir.files import RESULT, RESULT_JSON, RUN, SHAPES, or_elsewhere, runs_there
from dp_ray.rundir.history import read_history
from dp_ray.rundir.incidents import INCIDENTS_JSON
from dp_ray.rundir.ledger import OUTPUTS
from dp_ray.rundir.quarantine import merged_positions
from dp_ray.rundir.unfinished import unfinished
from dp_ray.rundir.weights import BEST, EMA, read_weights, weights_path
from dp_ray.storage import Storage
from dp_ray.tables import reading
from dp_ray.telemetry.reports import read_reports
from dp_ray.telemetry.shapes import ShardReport, shape_lines
from dp_ray.telemetry.times import split_line
from dp_ray.tensors.files import read_tensors
from dp_ray.text import command_for, relative

PATHS = ("run_dir", "outputs", "weights")
WIDTH = 16
SUMMARY = (  # the values that a reader wants first
    *("name", "task", "status", "stopped_early", "error", "rows", "steps", "total_steps", "quarantined", "metrics"),
    *("best", "interruptions", "seconds", "verdict", "outputs", "weights", "run_dir"),
)


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run: the values of `result.json`; outputs and shape reports are read on demand.

    - `status`: "done", or why it is not. `error` says what ended it, and `failure` where: `rank`, `node`, `step`,
      `sample` as far as known, and `frames`, those of the user's code.
    - `rows`, `batch_size`, `shards`, `batch_dim`: those of the dataset and the job.
    - `steps`, `epochs`, `total_steps`: the steps of one epoch, the epochs, and the steps of all of them.
    - `metrics`: those at the end of a training, or those of an evaluation.
    - `best`: the best checkpoint, if the job asks for one: `metric`, `value`, `step`, and `weights`, the file of its
      weights. `ema`: the average of the weights, if the job keeps one: `decay`, `sha256`, and `weights`, its file.
    - `stopped_early`: why a training ended before its last step: `step`, `metric`, `best`, `times`, `text`.
    - `quarantined`: the number of samples that were set aside, which `quarantine.parquet` lists.
    - `world_sizes`: the number of workers of each attempt, in order. `interruptions`: what ended the attempts;
      `restarts` is their number.
    - `workers`: where each worker of the last attempt ran, and where the time of its loop went. `data_wait_share` is
      the share of these times in which they waited for data, `time_split` has the shares of a step's parts, and
      `verdict` says in words what limits the run.
    - `seconds`: the wall time from the call to the merged outputs, with `seconds_before_steps` and
      `seconds_after_steps`, those outside of the steps.
    - `flops_per_row`, with the key `flops`: the operations of a row. `mfu`: their share of the devices' peak, if
      that is known.
    - `outputs_path`, `weights_path`: the folder of the outputs' Parquet files, the file of the weights. The hashes of
      both are `outputs_sha256` and `weights_sha256`.
    - `run_dir`: the run directory, without the secret of a URL. `location` includes it, serves to read the files, and
      is never written.

    >>> import dp_ray, torch
    >>> rows = [torch.full((3,), float(number)) for number in range(6)]
    >>> result = dp_ray.run(model=torch.nn.Linear(3, 2), dataset=rows, batch_size=4, workers=0, quiet=True)
    >>> result.outputs.shape, [tuple(batch.shape) for batch in result.batches()], result.sample_index.tolist()
    (torch.Size([6, 2]), [(4, 2), (2, 2)], [0, 1, 2, 3, 4, 5])
    """

    run_dir: str
    name: str
    task: str
    status: str
    rows: int = 0
    steps: int = 0
    epochs: int = 1
    total_steps: int = 0
    batch_size: int = 0
    shards: int = 0
    batch_dim: int = 0
    world_sizes: list[int] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    interruptions: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    quarantined: int = 0
    seconds: float = 0.0
    seconds_before_steps: float | None = None
    seconds_after_steps: float | None = None
    data_wait_share: float | None = None
    time_split: dict[str, Any] | None = None
    verdict: str | None = None
    flops_per_row: float | None = None
    mfu: float | None = None
    outputs_path: str | None = None
    outputs_sha256: str | None = None
    weights_path: str | None = None
    weights_sha256: str | None = None
    best: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    stopped_early: dict[str, Any] | None = None
    error: str | None = None
    failure: dict[str, Any] | None = None
    location: str = field(default="", repr=False, compare=False)

    @cached_property
    def outputs(self) -> Any:
        """The merged outputs, in order, in the model's own nesting.

        Each tensor holds all rows along the job's `batch_dim`. If rows differ in shape, there is a list with one
        tensor a row. All rows are read into memory; for outputs that do not fit, use `batches`.
        """
        return self._merged().read()

    @property
    def outputs_so_far(self) -> Any:
        """The outputs in the files that are whole so far, from the first on; the run may go on.

        They are nested as `outputs`; None if there is no such file yet.
        """
        names = names_so_far(self.storage())
        return Merged(self.storage(), tuple(names)).read() if names else None

    @cached_property
    def sample_index(self) -> torch.Tensor:
        """The sample index of each row of the outputs: int64 [rows]; 0, 1, 2, ... unless shuffled."""
        return self._merged().sample_index()

    @cached_property
    def carried(self) -> dict[str, list[Any]]:
        """The values of each key of `outputs.carry`: a list of one value for each row of the outputs."""
        return self._merged().carried()

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights, as the bare module's `load_state_dict` takes them."""
        if self.weights_path is None:
            raise StorageError(f"{self.run_dir}: the run has no weights (task {self.task}, status {self.status})")
        check_fetched(self.storage(), "weights")
        return read_weights(self.storage())

    @cached_property
    def ema_weights(self) -> dict[str, torch.Tensor]:
        """The moving average of the weights, as the bare module's `load_state_dict` takes them."""
        if self.ema is None:
            raise StorageError(
                f"{self.run_dir}: the run has no average of its weights; set ema, like {{decay: 0.999}}"
            )
        return read_tensors(self.storage(), EMA)[0]

    @property
    def history(self) -> Table[dict[str, Any]]:
        """A row for each step of a training: step, epoch, loss, metrics, learning rate, gradient norm, speed.

        A list of dicts, with `to_pandas()`. If the training is not done, it has the steps so far. Raises StorageError
        for another task.
        """
        if self.task != "train":
            raise StorageError(f"{self.run_dir}: the run has no history (task {self.task})")
        return Table(read_history(self.storage()))

    def batches(self) -> Iterator[Any]:
        """Yield the merged outputs of each global batch, in order, read one batch at a time.

        A batch lacks its rows that were set aside; it is empty if all were.
        """
        return self._merged().batches(self.batch_size, merged_positions(self.storage()))

    @property
    def shapes(self) -> Table[ShardReport]:
        """The shape reports of all shards, ordered by step and shard: a list of ShardReports, with `to_pandas()`."""
        return Table(self.iter_shapes())

    def iter_shapes(self) -> Iterator[ShardReport]:
        """Yield the reports of `shapes` one by one, for runs whose reports do not fit in memory."""
        with reading(self.storage(), SHAPES) as file:
            yield from read_reports(file)

    def shape_lines(self) -> Iterator[str]:
        """Yield the lines of `--shapes`, as the run printed them."""
        for _, reports in groupby(self.iter_shapes(), key=lambda report: report.step):
            yield from shape_lines([(report.input_size, report.output_size) for report in reports], self.batch_dim)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of `result.json`."""
        values = asdict(self)
        del values["location"]
        values["outputs"] = values.pop("outputs_path")
        values["weights"] = values.pop("weights_path")
        # Python's writer would write NaN, which is not JSON.
        values["metrics"] = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return values

    def __repr__(self) -> str:
        return key_lines(self._summary())

    def _repr_html_(self) -> str:
        values = {key: escape(value).replace("\n", "<br>") for key, value in self._summary().items()}
        rows = [f"<tr><th>{escape(key)}</th><td>{value}</td></tr>" for key, value in values.items()]
        return f"<table>{''.join(rows)}</table>"

    def _summary(self) -> dict[str, str]:
        """Return the values that a reader wants first, without the empty ones."""
        text = as_text({**self.to_json(), "metrics": self.metrics})
        return {key: text[key] for key in SUMMARY if text[key] != "-"}

    def save(self, run: Storage) -> None:
        """Write `result.json` to a run directory."""
        RESULT_JSON.write(run, self.to_json())

    def storage(self) -> Storage:
        """Return the run directory."""
        return Storage(self.location or self.run_dir)

    def _merged(self) -> Merged:
        if self.outputs_path is None:
            says = f"the run has no merged outputs (task {self.task}, status {self.status})"
            if self.task == "train":
                says += f"; to predict with its weights: {command_for('predict', self.run_dir)}"
            raise StorageError(f"{self.run_dir}: {says}")
        check_fetched(self.storage(), "outputs")
        return Merged.of(self.storage())


def load(run_dir: str | Path) -> Result:
    """Load the result from a run directory, a folder or a URL; if a prediction goes on, what is known so far.

    Raises StorageError if it holds no `result.json`, or a damaged one.

    >>> import dp_ray, torch
    >>> dataset = [torch.zeros(3)] * 6
    >>> run = dp_ray.run(model=torch.nn.ReLU(), dataset=dataset, batch_size=4, workers=0, name="relu", quiet=True)
    >>> dp_ray.load("runs/relu").outputs.shape
    torch.Size([6, 3])
    """
    storage = Storage(str(run_dir))
    if not storage.exists(RESULT):
        going = unfinished(storage.location)
        if going is not None and going.task == "predict":  # its outputs so far can be read
            where, steps = storage.location, going.steps
            return Result(str(storage), going.name, going.task, going.status, steps=steps, location=where)
        why = f"not a run directory{or_elsewhere(storage)}{runs_there(storage)}"
        if storage.exists(RUN):
            why = f"the run has not finished ({command_for('report', run_dir)} says how far it is)"
        raise StorageError(f"{run_dir}: holds no {RESULT}: {why}")
    with damage_told(f"{run_dir}/{RESULT}"):
        values = RESULT_JSON.read(storage)
        values["outputs_path"] = str(storage.child(OUTPUTS)) if values.pop("outputs") else None
        values["weights_path"] = weights_path(storage) if values.pop("weights", None) else None
        values["best"] = with_best_weights(values.get("best"), storage)
        if values.get("ema"):
            values["ema"] = {**values["ema"], "weights": str(storage.child(EMA))}
        metrics = values.get("metrics", {})
        values["metrics"] = {name: math.nan if number is None else number for name, number in metrics.items()}
        names = {known.name for known in fields(Result)}  # a later version may have written more
        known = {key: value for key, value in values.items() if key in names}
        return Result(**{**known, "run_dir": str(storage), "location": storage.location})


def with_best_weights(best: dict[str, Any] | None, run: Storage) -> dict[str, Any] | None:
    """Add the file of the best weights, None if it does not exist, to the values of `best`."""
    return best and {**best, "weights": str(run.child(BEST)) if run.exists(BEST) else None}


def lines(result: Result) -> list[str]:
    """Format a result as lines: one for each value that it has, and for each metric."""
    text = as_text({**result.to_json(), "metrics": result.metrics})
    return key_lines({key: value for key, value in text.items() if value != "-"}).splitlines()


def as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Format the values of a `result.json`; `metrics` has a line for each metric, and `-` means no value."""
    text = {key: _as_text(value) for key, value in values.items()}
    text |= {key: relative(values[key]) for key in PATHS if values[key]}
    steps, total = values["steps"], values["total_steps"] or values["steps"] * values["epochs"]
    text |= {"steps": f"{steps} in an epoch", "total_steps": str(total)}
    if early := values.get("stopped_early"):
        text["total_steps"] = f"{early['step']} of {total}"
    elif total == steps:
        text |= {"steps": str(steps), "total_steps": "-"}
    if not values["quarantined"]:
        text["quarantined"] = "-"
    if values["best"]:
        best = values["best"]
        text["best"] = f"{best['metric']} {best['value']:.6g} after step {best['step'] - 1}"
    if values.get("ema"):
        text["ema"] = f"decay {values['ema']['decay']:g}: {relative(values['ema']['weights'])}"
    if values.get("stopped_early"):
        text["stopped_early"] = values["stopped_early"]["text"]
    if values.get("failure"):
        failure = {key: value for key, value in values["failure"].items() if value is not None}
        frames = failure.pop("frames", "")
        where = ", ".join(f"{key} {value}" for key, value in failure.items())
        text["failure"] = f"{where}\n{frames}".rstrip()
    if values["time_split"]:
        text["time_split"] = split_line(values["time_split"])
        text["data_wait_share"] = "-"  # nearly the same share, of all steps: a second number for one thing
    metrics = measured(values["metrics"])
    width = max(map(len, metrics), default=0)
    text["metrics"] = "\n".join(f"{name:{width}} {value}" for name, value in metrics.items()) or "-"
    return text


def _as_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "kind" in value[0]:
        return "; ".join(map(str, INCIDENTS_JSON.parse(json.dumps({"interruptions": value})).interruptions))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "; ".join(f"rank {worker['rank']} {worker['node']} {worker.get('device', '-')}" for worker in value)
    return "-" if value in (None, [], {}) else str(value)


def key_lines(values: Mapping[str, str]) -> str:
    """Format one line for each key and value; a value's further lines are indented below its first."""
    width = max([WIDTH, *(len(key) + 1 for key in values)])
    return "\n".join(f"{key:{width}}{value}".replace("\n", "\n" + " " * width) for key, value in values.items())
