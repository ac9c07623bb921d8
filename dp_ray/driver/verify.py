"""Run the same job on several numbers of workers, compare the results, and find where they first differ."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dp_ray.driver.run import Options
from dp_ray.driver.several import running
from dp_ray.errors import ClusterError, ClusterLost, JobError, ModelError, RunInterrupted
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.plan.history import CLOCKED, DIGEST, is_inner
from dp_ray.results.result import Result
from dp_ray.results.text import in_columns
from dp_ray.rundir.checkpoint import checkpoint_name, load_checkpoint
from dp_ray.rundir.files import ABOUT_JSON, CHECKPOINTS
from dp_ray.rundir.numerics import difference, places_of_kinds
from dp_ray.tensors.tree import flatten
from dp_ray.text import json_text

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
NOT_COMPARED = set(CLOCKED)


@dataclass(frozen=True)
class VerifiedRun:
    """The run on one number of workers: first and last loss, hashes, and the comparison with the first run.

    One that `is_resumed` was stopped halfway, and has gone on.
    """

    workers: int
    first_loss: float | None
    last_loss: float | None
    weights: str | None
    outputs: str | None
    seconds: float
    difference: float
    same: bool
    is_resumed: bool = False


@dataclass(frozen=True)
class Verification:
    """The result of `dp-ray verify`; `first` says where a bitwise job's runs first differ.

    `numerics` says in what their workers compute differently, None if in nothing.

    All runs have the same number of `shards`. A run of the job alone has `shards_alone`, which may be another if the
    job sets none.
    """

    rows: list[VerifiedRun]
    bitwise: bool
    tolerance: float
    shards: int
    shards_alone: int
    first: str | None = None
    kept: list[str] = field(default_factory=list)
    numerics: str | None = None

    @property
    def same(self) -> bool:
        """Whether all runs are the same as the first."""
        return all(row.same for row in self.rows)

    def to_json(self) -> str:
        """Return the verdict as JSON text."""
        return json_text({**asdict(self), "same": self.same})

    def __str__(self) -> str:
        head = ("workers", "first loss", "last loss", "weights", "outputs", "seconds", "difference", "same")
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            losses = ["-" if loss is None else f"{loss:.9g}" for loss in (row.first_loss, row.last_loss)]
            hashes = ["-" if value is None else value[:12] for value in (row.weights, row.outputs)]
            change = "0" if row.difference == 0 else f"{row.difference:.3g}"
            same = "yes" if row.same else "NO"
            workers = f"{row.workers}, resumed" if row.is_resumed else str(row.workers)
            lines.append((workers, *losses, *hashes, f"{row.seconds:.1f}", change, same))
        text = [in_columns(lines)]
        if self.shards != self.shards_alone:
            text.append(
                f"compared with shards: {self.shards} on each number of workers; the job sets none, so a run of it "
                f"alone takes {self.shards_alone}, and may give another result; set shards: {self.shards} for what "
                "was compared"
            )
        if self.numerics:
            text.append(f"the workers were not of one kind, so the bits may differ: {self.numerics}")
        if not self.bitwise:
            largest = max(row.difference for row in self.rows)
            result = "the same up to rounding" if self.same else "NOT the same"
            text.append(
                f"{result}: the largest relative difference is {largest:.3g}, the tolerance {self.tolerance:g}"
            )
        elif self.same:
            text.append("the same, bit for bit")
        else:
            text.append(f"NOT the same: {self.first}; kept: {', '.join(self.kept)}")
        return "\n".join(text)


RunJob = Callable[..., Result]


def verify(
    job: Job, counts: Sequence[int], options: Options, tolerance: float | None = None, resumed: bool = False
) -> Verification:
    """Run the job on each number of workers, all in one session, and compare every run with the first.

    With `resumed`, a training is also stopped halfway, on the first number, and goes on: what its loop keeps nowhere
    is lost then, and shows.

    Bitwise jobs and predictions must give the same bits. Other jobs are compared by the largest relative difference,
    of a training's weights or an evaluation's metrics, against `tolerance`. Raises JobError for an impossible count,
    and the Errors of the runs.
    """
    _check(job, counts, resumed)
    if resumed and job.task != "train":
        raise JobError(f"--resumed: a training is stopped and goes on; got task {job.task}")
    alone = job.num_shards
    metrics = dict(job.metrics)
    if job.task != "predict" and not job.takes_batches:
        metrics[DIGEST] = Target(target="dp_ray.tensors.files:outputs_digest")
    job = job.model_copy(
        update={"shards": job.shards or max(1, *counts), "metrics": metrics, "eval": _with_digest(job)}
    )
    tolerance = TOLERANCE[job.precision] if tolerance is None else tolerance

    def on(count: int) -> Job:
        return job.model_copy(update={"name": f"{job.run_name}-verify-{count}", "workers": count})

    with running([on(count) for count in counts], options) as execute:

        def run(count: int, **changes: Any) -> Result:
            try:
                return execute(on(count).model_copy(update=changes), options)
            except RunInterrupted:
                raise RunInterrupted("interrupted; run verify again, it begins anew") from None
            except ClusterLost as lost:  # nothing is kept that a launcher could go on with
                raise ClusterError(str(lost)) from lost

        runs = [run(count) for count in counts]
        bitwise = job.bitwise or job.task == "predict"
        rows = [_row(count, runs[0], run, bitwise, tolerance) for count, run in zip(counts, runs, strict=True)]
        if resumed:
            name = f"{job.run_name}-verify-resumed"
            runs.append(
                _resumed(on(counts[0]).model_copy(update={"name": name}), runs[0].total_steps, execute, options)
            )
            rows.append(replace(_row(counts[0], runs[0], runs[-1], bitwise, tolerance), is_resumed=True))
        different = [at for at, row in enumerate(rows) if not row.same]
        first = None
        if different and bitwise:  # runs the job again, in the same session
            first = _first_difference(run, (counts[0], runs[0]), (rows[different[0]], runs[different[0]]))
        kept = [run.run_dir for run in (runs if different else [])]
        verdict = Verification(rows, bitwise, tolerance, job.num_shards, alone, first, kept, _numerics(runs))
    if verdict.same:
        for result in runs:
            result.storage().remove()
    return verdict


def _with_digest(job: Job) -> Any:
    """Return the job's `eval`, in which evaluations that choose their metrics have what verify compares too."""
    evals: dict[str, Any] = dict(job.evaluations)
    chosen = {name: [*keys.metrics, DIGEST] for name, keys in evals.items() if keys.metrics is not None}
    evals |= {name: evals[name].model_copy(update={"metrics": metrics}) for name, metrics in chosen.items()}
    return evals.get("", evals or None)


class _Halfway(Exception):
    """What stops a training halfway; it names itself in the error of the run."""


def _resumed(job: Job, steps: int, execute: Callable[[Job, Options], Result], options: Options) -> Result:
    """Run a training that is stopped by an error once half of its steps are kept, and goes on by the same command."""
    half = steps // 2
    if not half:
        raise JobError("--resumed: a training of one step cannot be stopped halfway; set epochs or max_steps")

    def stop(view: Any) -> None:
        if view.step == half:
            raise _Halfway

    kept = job.checkpoint.model_copy(update={"every_steps": half})
    stops = job.model_copy(update={"hooks": job.hooks.model_copy(update={"on_step": stop}), "checkpoint": kept})
    try:
        execute(stops, options)
    except ModelError as error:
        if _Halfway.__name__ not in str(error):
            raise
    return execute(job, replace(options, overwrite=False))


def _check(job: Job, counts: Sequence[int], resumed: bool) -> None:
    if len(counts) < 2 - resumed or len(set(counts)) != len(counts):
        raise JobError(
            f"--workers: verify compares at least two different numbers of workers, got {list(counts)}; one number "
            "is enough with --resumed"
        )
    if DIGEST in job.metrics:
        raise JobError(f"metrics.{DIGEST}: is what verify compares the outputs by; rename yours")
    if job.finds_shards:
        raise JobError("shards: auto: verify compares runs with one number of shards; set it, like --set shards=8")
    if job.shards and max(counts) > job.num_shards:
        raise JobError(f"--workers: {max(counts)} workers cannot share {job.num_shards} shards")


def _numerics(runs: Sequence[Result]) -> str | None:
    """Return in what the workers of the runs compute differently; None if in nothing."""
    attempts = [attempt for run in runs for attempt in ABOUT_JSON.read(run.storage()).attempts]
    return difference(place for attempt in attempts for place in places_of_kinds(attempt.kinds)) or None


def _row(count: int, first: Result, result: Result, bitwise: bool, tolerance: float) -> VerifiedRun:
    history = _history(result)
    difference = _difference(first, result)
    same = _hashes(first) == _hashes(result) if bitwise else difference <= tolerance
    losses = [row["loss"] for row in history]
    outputs = result.outputs_sha256
    digests = [row.get(DIGEST) for row in history] or [result.metrics.get(DIGEST)]
    if outputs is None and not any(value is None for value in digests):
        outputs = hashlib.sha256(repr(digests).encode()).hexdigest()
    return VerifiedRun(
        workers=count,
        first_loss=losses[0] if losses else result.metrics.get("loss"),
        last_loss=losses[-1] if losses else None,
        weights=result.weights_sha256,
        outputs=outputs,
        seconds=result.seconds,
        difference=difference,
        same=same,
    )


def _history(result: Result) -> list[dict[str, Any]]:
    """Return the rows of a training's history, without its speed."""
    if result.task != "train":
        return []
    return [{name: value for name, value in row.items() if name not in NOT_COMPARED} for row in result.history]


def _hashes(result: Result) -> tuple[Any, ...]:
    """Return all values that must be the same, as text where they may be NaN: NaN is the same as NaN."""
    average = result.ema and result.ema["sha256"]
    return result.weights_sha256, average, result.outputs_sha256, repr(result.metrics), repr(_history(result))


def _difference(first: Result, other: Result) -> float:
    """Return the largest relative difference of a tensor: of the weights, the metrics, or the outputs, by task."""
    if first.task == "train":
        return max((apart(first.weights[name], other.weights[name])[0] for name in first.weights), default=0.0)
    if first.task == "evaluate":
        names = [name for name in first.metrics if name != DIGEST]
        return max(apart(torch.tensor(first.metrics[name]), torch.tensor(other.metrics[name]))[0] for name in names)
    batches = zip(first.batches(), other.batches(), strict=True)
    return max(
        apart(mine, others)[0] for a, b in batches for mine, others in zip(_leaves(a), _leaves(b), strict=True)
    )


def _leaves(batch: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(leaf) for leaf in flatten(batch)[0]]


def apart(first: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors: relative to the first one's largest magnitude, and absolute.

    Both are infinite if the shapes differ.
    """
    if first.shape != other.shape:
        return float("inf"), float("inf")
    a, b = first.double(), other.double()
    if torch.equal(a, b) or not a.numel():
        return 0.0, 0.0
    largest = float((a - b).abs().nan_to_num(0.0 if torch.equal(a.isnan(), b.isnan()) else float("inf")).max())
    return largest / max(float(a.abs().nan_to_num().max()), 1e-30), largest


def _first_difference(run: RunJob, first: tuple[int, Result], other: tuple[VerifiedRun, Result]) -> str:
    """Say where the runs on two numbers of workers first differ: the step, and the first parameter after it."""
    row = other[0]
    who = "resumed" if row.is_resumed else f"on {row.workers} workers against {first[0]}"
    if first[1].task != "train":
        return f"{who}, the outputs differ by up to {_difference(first[1], other[1]):.3g} of the largest"
    ours, theirs = _history(first[1]), _history(other[1])
    rows = [step for step, (a, b) in enumerate(zip(ours, theirs, strict=False)) if repr(a) != repr(b)]
    step = rows[0] if rows else len(ours) - 1
    columns = [name for name in ours[step] if repr(ours[step][name]) != repr(theirs[step][name])]
    names = dict.fromkeys("the outputs" if is_inner(name) else name for name in columns)
    # A step's values are computed before its update, so the weights may differ since the step before.
    for until in (step, step + 1):
        if until and not row.is_resumed and (difference := _first_parameter(run, first[0], row.workers, until)):
            return f"{who}, first after step {until - 1}: {difference}"
    values = ", ".join(names) or "no value that is kept"
    also = "; a loop keeps what its next steps need by run.state" if row.is_resumed else ", and no parameter does"
    return f"{who}, first in step {step}: {values} differs{also}"


def _first_parameter(run: RunJob, first: int, other: int, steps: int) -> str | None:
    """Name the first tensor of the state that differs after `steps` steps, and by how much; None if none differs."""
    ends = [run(count, max_steps=steps, name=f"verify-{count}-until-{steps}") for count in (first, other)]
    states = [
        load_checkpoint(end.storage().child(CHECKPOINTS), checkpoint_name(steps)).state["model"] for end in ends
    ]
    for end in ends:
        end.storage().remove()
    for name, tensor in states[0].items():
        if isinstance(tensor, torch.Tensor) and not torch.equal(tensor, states[1][name]):
            relative, absolute = apart(tensor, states[1][name])
            return f"{name} differs by up to {absolute:.3g} ({relative:.3g} of its largest)"
    return None
