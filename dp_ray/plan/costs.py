"""The plan of a run, as one value: `dp-ray plan` shows it as text or JSON, and the driver executes it.

It also has the steps that `profile` traces, the steps of a scheduler, the numbers of shards that `shards: auto`
tries, and the memory of a run on each device of a worker.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dp_ray.plan.split import Split, chunk_sizes, num_filled, worker_shards
from dp_ray.text import counted, listed

if TYPE_CHECKING:
    from dp_ray.plan.mixture import Mixture  # with numpy, which a command that only looks at a job spares


@dataclass(frozen=True)
class Due:
    """After which steps of a training something is due: every so many steps or epochs, and after the last step."""

    every_steps: int | None = None
    every_epochs: int | None = None

    def after(self, split: Split, step: int) -> bool:
        """Return whether it is due after `step`, counted from 0."""
        return step + 1 == split.total_steps or self.recurs(split, step)

    def recurs(self, split: Split, step: int) -> bool:
        """Return whether it is due after `step` by its steps or epochs, even if the training goes on."""
        return any((step + 1) % period == 0 for period in self.periods(split))

    def times(self, split: Split) -> int:
        """Return how many times it is due in the whole training."""
        total, periods = split.total_steps, self.periods(split)
        both = total // math.lcm(*periods) if len(periods) == 2 else 0  # due for two reasons, and done once
        regular = sum(total // period for period in periods) - both
        return regular + (total > 0 and not self.recurs(split, total - 1))

    def to_json(self, split: Split) -> dict[str, int]:
        """Return the keys that are set, and `times`."""
        return {**_known(asdict(self)), "times": self.times(split)}

    def periods(self, split: Split) -> list[int]:
        """Return its periods in steps: at most two."""
        periods = (self.every_steps, self.every_epochs and self.every_epochs * split.steps)
        return [period for period in periods if period]


@dataclass(frozen=True)
class Evaluations:
    """The evaluations during a training: how their dataset is cut, and after which steps of the training they run.

    `name` is theirs if the job has several kinds of them.
    """

    split: Split
    due: Due
    name: str = ""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a training: after which steps, how many are kept, and which more there may be.

    `every_seconds` is the job's: more by the clock, unless it is None. `best` is the metric of an evaluation: one
    more, which is kept, whenever it is better than before.
    """

    due: Due
    keep: int
    every_seconds: float | Literal["auto"] | None = None
    best: str | None = None


@dataclass(frozen=True)
class PlacedBlock:
    """A block of a model over several devices: its name, its bytes (parameters and buffers), and its device."""

    name: str
    bytes: int
    device: str


@dataclass(frozen=True)
class PackedRows:
    """How a dataset's rows are packed: `empty` is the share of the windows' places without a token.

    `padding_before` is that of batches of the rows themselves, as many as the job has windows in a batch.
    """

    key: str
    rows: int
    tokens: int
    windows: int
    length: int
    empty: float
    padding_before: float

    def __str__(self) -> str:
        return (
            f"{self.key}: {self.rows:,} rows of {self.tokens:,} tokens are packed into {self.windows:,} windows of "
            f"{self.length:,}: {100 * self.empty:.1f} % of these are empty; batches of rows would be "
            f"{100 * self.padding_before:.1f} % padding"
        )


@dataclass(frozen=True)
class PlannedSource:
    """A source of a mixture: its name, how many rows it has, and how many a run takes of it, in all epochs."""

    name: str
    size: int
    rows: int


def planned_sources(mixture: "Mixture", split: Split) -> tuple[PlannedSource, ...]:
    """Return what a run takes of the sources of a mixture."""
    taken, (epochs, steps) = dict.fromkeys(mixture.names, 0), split.cursor(split.total_steps)
    for epoch in range(epochs + (steps > 0)):
        stop = split.rows_kept if epoch < epochs else steps * split.batch_size
        for name, rows in mixture.counts_between(epoch, 0, stop).items():
            taken[name] += rows
    named = zip(mixture.names, mixture.sizes, strict=True)
    return tuple(PlannedSource(name, size, taken[name]) for name, size in named)


@dataclass(frozen=True)
class Plan:
    """The course of a run: its steps, its workers, and what happens between the steps.

    `split` is that of the task's own dataset, over all epochs. `evaluations` and `checkpoints` are a training's.
    `blocks` are there if the job places the model's blocks on several devices, and only for `dp-ray plan`: to find
    them, the model is built, which in a run is left to the workers. So are the `sources` of a mixture. `packed` are
    datasets whose rows are packed. `remarks` are warnings, a line each.
    """

    split: Split
    min_workers: int
    max_workers: int
    evaluations: tuple[Evaluations, ...] = ()
    checkpoints: Checkpoints | None = None
    blocks: tuple[PlacedBlock, ...] = ()
    sources: tuple[PlannedSource, ...] = ()
    remarks: tuple[str, ...] = ()
    packed: tuple[PackedRows, ...] = ()

    @property
    def rows(self) -> dict[str, int]:
        """The lengths of the datasets, by their keys."""
        named = {f"eval.{each.name}.dataset" if each.name else "eval.dataset": each for each in self.evaluations}
        return {"dataset": self.split.rows, **{key: each.split.rows for key, each in named.items()}}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; equal batches are folded, so it is small for any number of rows.

        `steps` and `batches` are those of an epoch. Keys that do not apply are left out: `total_steps` unless
        `max_steps` cuts the last epoch short, `min_workers` unless the job is elastic, and keys of other tasks.
        """
        split, total = self.split, self.split.total_steps
        is_elastic = self.min_workers != self.max_workers
        return {
            "rows": split.rows,
            "batch_size": split.batch_size,
            "shards": split.shards,
            "workers": self.max_workers,
            **({"min_workers": self.min_workers} if is_elastic else {}),
            "epochs": split.epochs_begun,
            "steps": split.epoch_steps,
            **({} if total == split.epochs_begun * split.epoch_steps else {"total_steps": total}),
            "batches": batches(split, self.max_workers),
            "padded": 0,
            "dropped": split.dropped,
            **self._of_training(),
            **({"sources": [asdict(source) for source in self.sources]} if self.sources else {}),
            **({"blocks": [asdict(block) for block in self.blocks]} if self.blocks else {}),
            **({"packed": [asdict(packed) for packed in self.packed]} if self.packed else {}),
            **({"remarks": list(self.remarks)} if self.remarks else {}),
        }

    def _of_training(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        evaluated: dict[str, dict[str, Any]] = {}
        for each in self.evaluations:
            own, due = each.split, each.due.to_json(self.split)
            sizes = {"rows": own.rows, "batch_size": own.batch_size, "steps": own.steps}
            evaluated[each.name] = {**sizes, **due, "batches": batches(own, self.max_workers)}
        if evaluated:
            values["evaluate"] = evaluated.get("", evaluated)  # by name if there are several
        if self.checkpoints:
            more = {key: value for key, value in asdict(self.checkpoints).items() if key != "due"}
            values["checkpoints"] = {**self.checkpoints.due.to_json(self.split), **_known(more)}
        return values


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def batches(split: Split, workers: int) -> list[dict[str, Any]]:
    """Return each size of global batch in an epoch: its steps, its rows, those of its shards, the workers' shards."""
    workers = max(1, workers)
    dealt = [list(worker_shards(split.shards, workers, rank)) for rank in range(workers)]
    kinds, left = [], split.total_steps
    for steps, rows in split.batch_sizes():
        if left > 0:  # `max_steps` may end the run before the short last batch
            sizes = {"steps": min(steps, left), "rows": rows, "shard_rows": chunk_sizes(rows, split.shards)}
            kinds.append({**sizes, "worker_shards": dealt})
        left -= steps
    return kinds


def remarks(split: Split, workers: int) -> list[str]:
    """Return warnings about how a job is cut and assigned to workers, a line each."""
    lines = []
    largest = split.largest_batch
    if split.batch_size > split.rows:
        lines.append(f"batch_size {split.batch_size} is larger than the dataset: its {split.rows} rows are one batch")
    filled = num_filled(largest, split.shards)
    idle = sum(worker_shards(split.shards, workers, rank).start >= filled for rank in range(workers))
    if idle:
        never = "never has a row" if idle == 1 else "never have a row"
        lines.append(
            f"{idle} of {workers} workers {never}: the largest batch is {largest} rows in {filled} shards; "
            "use fewer workers or a larger batch_size"
        )
    return lines


def plan_table(plan: Plan) -> str:
    """Return the plan as text: one line for each size of global batch, then one for each group of equal workers."""
    split, workers = plan.split, plan.max_workers
    epochs, steps = split.epochs_begun, split.epoch_steps
    where = f"on {_number(workers, 'worker')}"
    if workers == 0:
        where = "in this process, without workers"
    elif plan.min_workers != workers:
        where = f"on {plan.min_workers:,} to {workers:,} workers, shown for {workers:,}"
    lines = [
        f"{split.rows:,} rows in global batches of {split.batch_size:,}: {_number(steps, 'step')}, "
        f"{_number(split.shards, 'shard')} {where}; padded 0, dropped {split.dropped:,}"
    ]
    if epochs > 1:
        rest = split.total_steps - (epochs - 1) * steps
        early = f", the last one ends after {rest:,}" if rest < steps else ""
        lines.append(f"{epochs:,} epochs, {split.total_steps:,} steps in all{early}")
    lines += [
        f"  source {source.name}: {_number(source.rows, 'row')}, {source.rows / source.size:.4g} times through its "
        f"{source.size:,}"
        for source in plan.sources
    ]
    lines += _batches(split, workers)
    lines += map(str, plan.packed)
    for each in plan.evaluations:
        own = each.split
        lines.append(f"evaluations {f'of {each.name} ' if each.name else ''}{_often(each.due, split)}")
        lines.append(f"  {own.rows:,} rows in global batches of {own.batch_size:,}: {_number(own.steps, 'step')}")
        lines += [f"  {line}" for line in _batches(own, workers)]
    if plan.checkpoints:
        lines.append(_checkpoints(plan.checkpoints, split))
    lines += [f"  block {block.name:<24}{block.bytes:>16,} bytes on {block.device}" for block in plan.blocks]
    return "\n".join([*lines, *plan.remarks])


def _checkpoints(checkpoints: Checkpoints, training: Split) -> str:
    every, best = checkpoints.every_seconds, checkpoints.best
    clock = "more by the clock" if every == "auto" else f"more every {every:g} s" if every is not None else ""
    better = f"one more for each better {best}" if best else ""
    kept = f"kept: the newest {checkpoints.keep:,}{' and the best' if best else ''}"
    parts = (f"checkpoints {_often(checkpoints.due, training)}", clock, better, kept)
    return "; ".join(part for part in parts if part)


def _often(due: Due, training: Split) -> str:
    """After which steps something is due: `every 4 steps, every epoch and after the last step: 13 times`."""
    named = [(due.every_steps, "step"), (due.every_epochs, "epoch")]
    parts = [f"every {noun}" if count == 1 else f"every {count:,} {noun}s" for count, noun in named if count]
    if not due.recurs(training, training.total_steps - 1):
        parts.append("after the last step")
    return f"{' and '.join(parts)}: {_number(due.times(training), 'time')}"


def _batches(split: Split, workers: int) -> Iterator[str]:
    """Yield a line for each size of global batch, and one for each group of neighbouring workers with equal rows."""
    for batch in batches(split, workers):
        yield f"{batch['steps']:,} x {_number(batch['rows'], 'row')}"
        texts = []
        for shards in batch["worker_shards"]:
            rows = [batch["shard_rows"][shard] for shard in shards]
            parts = " + ".join(map(str, rows)) if len(rows) <= 8 else f"{len(rows)} shards"
            texts.append(parts if len(rows) == 1 else f"{parts} = {sum(rows)}")
        for text, group in itertools.groupby(range(len(texts)), key=texts.__getitem__):
            first, *others = group
            who = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
            yield f"  {who:<14}{text} {'row' if text == '1' else 'rows'}{' each' if others else ''}"


def _number(number: int, noun: str) -> str:
    """Return what `counted` does, with thousands set apart."""
    return counted(number, noun).replace(str(number), f"{number:,}", 1)


SLOWEST = "slowest"
FIRST, NUM = 10, 5  # the steps of `profile: slowest`: from FIRST on, or the last NUM of a shorter job
_FORM = re.compile(rf"(?P<first>\d+)(?:-(?P<last>\d+))?(?::(?P<rank>\d+|{SLOWEST}))?")
_SAYS = "must be STEPS or STEPS:RANK, like 10-20 or 10-20:3, or a rank of 'slowest', or 'slowest' alone"


class Profiled(NamedTuple):
    """The steps from `first` to `last`, both included, of one rank; None: of the one that is slowest so far."""

    first: int
    last: int
    rank: int | None

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last


def profiled_of(text: str, total_steps: int | None = None) -> Profiled:
    """Parse a job's `profile`; raises ValueError if it is malformed, or not within `total_steps`."""
    if text == SLOWEST:
        first = FIRST if total_steps is None else max(0, min(FIRST, total_steps - NUM))
        last = first + NUM - 1 if total_steps is None else min(first + NUM, total_steps) - 1
        return Profiled(first, last, None)
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{_SAYS}; got {text!r}")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"the last step must not be before the first; got {text!r}")
    if total_steps is not None and last >= total_steps:
        raise ValueError(f"the job has {total_steps} steps, numbered from 0 to {total_steps - 1}; got {text!r}")
    return Profiled(first, last, None if match["rank"] == SLOWEST else int(match["rank"] or 0))


def num_scheduled(split: Split, per: str, done: int = 0) -> int:
    """Return how often a scheduler is stepped, each `step` or `epoch`, in a training with `done` steps done."""
    each = 1 if per == "step" else split.steps
    return split.total_steps // each - done // each


def too_short(most: int, needed: int, per: str) -> str:
    """Return the error of a OneCycleLR that can be stepped `most` times more, where the training needs more."""
    return (
        f"this OneCycleLR lasts for {counted(most, 'step')} from here, and the training steps it {needed} "
        f"times, once each {per}; set total_steps: auto for the whole training, or train no longer than it lasts"
    )


# What torch's schedulers do after the length in their arg, if the training is longer; "" if they do nothing.
_AFTER = {
    ("CosineAnnealingLR", "T_max"): "the learning rate goes up again after that",
    ("PolynomialLR", "total_iters"): "the learning rate is 0 after that",
    ("LinearLR", "total_iters"): "",
    ("ConstantLR", "total_iters"): "",
    ("OneCycleLR", "total_steps"): "",
    ("MultiStepLR", "milestones"): "",
}


def ends_elsewhere(name: str, args: Mapping[str, Any], num: int, per: str, epochs: int) -> str:
    """Return a line on a scheduler that states another length than the `num` times that it is stepped; or nothing.

    `name` is its class, if it is torch's own; `num_training_steps` states a length in any. A length of one less is no
    mistake: then the last update has the last value of the schedule.
    """
    for key, value in args.items():
        if key == "num_training_steps":
            after = "the schedule has ended by then"
        elif (name, key) in _AFTER:
            after = _AFTER[name, key]
        else:
            continue
        states = max(value, default=None) if isinstance(value, list) else value
        if not isinstance(states, int) or isinstance(states, bool):
            continue
        if states < num - 1 and after:
            what = after
        elif states > num + (key == "total_steps"):
            what = "the training ends before that"
        else:
            continue
        advice = "" if key == "milestones" else f"; {key}: auto is the whole training"
        advice += ", and per: epoch counts epochs" if per == "step" and states == epochs else ""
        stated = f"{name} has {key} {value}" if name else f"its {key} is {value}"
        return f"{stated}, and the training steps it {num} times, once each {per}: {what}{advice}"
    return ""


def shard_counts(rows: int, workers: int) -> list[int]:
    """Return the numbers to try for batches of at most `rows` rows: the workers', and twice the last one each time.

    The last one gives shards of a single row.

    >>> shard_counts(30, 4), shard_counts(3, 0), shard_counts(2, 4)
    ([4, 8, 16, 30], [1, 2, 3], [4])
    """
    counts, most = [max(1, workers)], max(rows, workers)
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def what_auto_does(rows: int, workers: int) -> str:
    """Return a line for the plan of a run whose number of shards is still to be found."""
    who, all_of_them = ("the workers try", " on all of them") if workers else ("this process tries", "")
    counts = shard_counts(rows, workers)
    tried = listed([f"{count} ({chunk_sizes(rows, count)[0]})" for count in counts])
    return (
        f"shards: auto: before the first step {who} so many shards (of at most so many rows): {tried}; the run keeps "
        f"the first number that fits{all_of_them}; shown for {counts[0]}"
    )


GIB = 2**30
UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
USABLE = 0.9  # of a GPU: the rest is for CUDA's context, its libraries' workspaces, and gaps between tensors


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes on one device of a worker: each kind at its own most, and `total` at the peak of a step.

    `activations` holds all that comes and goes in a step, also the blocks that FSDP gathers.
    """

    device: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    total: int


@dataclass(frozen=True)
class WorkerMemory:
    """The memory of the worker that takes most, if a job runs by this strategy on this number of workers."""

    strategy: str
    workers: int
    shards: int  # of a batch, one after another
    devices: tuple[DeviceMemory, ...]

    @property
    def total(self) -> int:
        """The bytes of the fullest device."""
        return max(device.total for device in self.devices)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a job's workers; `rows` are those of its largest shard, `gpu_bytes` what a GPU has, if known."""

    rows: int
    workers: tuple[WorkerMemory, ...]
    gpu_bytes: int | None = None
    remarks: tuple[str, ...] = ()

    def fits(self, memory: WorkerMemory) -> bool | None:
        """Return whether a worker's devices hold it; None if their size is not known."""
        return None if self.gpu_bytes is None else memory.total <= USABLE * self.gpu_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, in bytes."""
        workers = [
            {**asdict(own), "devices": [asdict(device) for device in own.devices], **_known({"fits": self.fits(own)})}
            for own in self.workers
        ]
        remarks = {"remarks": list(self.remarks)} if self.remarks else {}
        return {"rows": self.rows, **_known({"gpu_bytes": self.gpu_bytes}), "workers": workers, **remarks}

    def lines(self) -> Iterator[str]:
        """Yield the plan as text: a line for each device of a worker, in a unit that shows the largest."""
        most = max((memory.total for memory in self.workers), default=0)
        unit = next((unit for unit, size in UNITS.items() if most >= size / 10), "KiB")
        yield f"memory of a worker in {unit}, with shards of {counted(self.rows, 'row')}:"
        names = ("parameters", "gradients", "optimizer", "buffers", "activations", "total")
        yield f"  {'':<30}{''.join(f'{name:>12}' for name in names)}"
        for memory in self.workers:
            verdict = ""
            if self.gpu_bytes is not None:
                verdict = f"  {'fits' if self.fits(memory) else 'does not fit'} {self.gpu_bytes / GIB:g} GiB"
            for device in memory.devices:
                where = f", {device.device}" if len(memory.devices) > 1 else ""
                who = f"{memory.strategy} on {counted(memory.workers, 'worker')}{where}"
                numbers = "".join(f"{getattr(device, name) / UNITS[unit]:>12.3f}" for name in names)
                yield f"  {who:<30}{numbers}{verdict}"
        yield from self.remarks


def worker_counts(most: int) -> list[int]:
    """Return the numbers of workers to plan for: all up to 8, then the powers of two, and the most."""
    most = max(1, most)
    return sorted({*range(1, min(most, 8) + 1), *(2**power for power in range(3, most.bit_length())), most})


def shards_of_worker(rows: int, shards: int, workers: int) -> int:
    """Return how many shards with rows the worker that has most of them runs."""
    return max(1, min(num_filled(rows, shards), -(-shards // workers)))
