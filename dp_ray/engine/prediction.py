"""The prediction loop of one worker: shard in, outputs out. It uses neither Ray nor files.

Begin at `predict`. `outputs.after` computes from a shard's outputs, `keep` picks from them, `dtype` converts them:
all on the device, so that outputs that are not kept are never copied.
"""

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.clock import Flops, Part, SilentClock, StepClock, counted_flops
from dp_ray.engine.devices import mixed_devices
from dp_ray.engine.eval_state import evaluating
from dp_ray.engine.host_copy import ON_GPU, HostCopy
from dp_ray.engine.items import Plain, split_passthrough
from dp_ray.engine.loading import LoadedStep
from dp_ray.engine.model import autocast, call_model
from dp_ray.engine.random import seed_all
from dp_ray.engine.replica import Forwards, Replica
from dp_ray.engine.rows import Less, RowTrial, Tried, row_dim
from dp_ray.engine.step import StepEnd, keywords_hint
from dp_ray.engine.user_code import (
    describe_input,
    gradients_hint,
    locating,
    location,
    raise_as,
    raise_located,
    reraise_as,
)
from dp_ray.errors import Error, JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import Indices
from dp_ray.job.targets import bound, build, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Work
from dp_ray.system.threads import waiting
from dp_ray.tensors.ragged import paths_of_texts, without_lists, without_texts
from dp_ray.tensors.tree import (
    Keys,
    Leaf,
    Ragged,
    all_nodes,
    bare_tensors,
    copied,
    ends,
    flatten,
    in_own_memory,
    leaf_keys,
    quoted,
    subtree,
    unflatten,
    why_no_rows,
)
from dp_ray.text import did_you_mean, listed

AFTER = "outputs.after"
WHOLE = "output"  # the path of outputs that are one tensor, as its column is named


class OverflowNotes:
    """Lines for the user of outputs that `outputs.dtype` makes infinite: one a path, of its first shard.

    It waits for no GPU: the findings come to the host while the GPU runs the next shards.
    """

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._notes: list[str] = []
        self._coming: deque[tuple[Shard, str, str, HostCopy]] = deque()

    def look(self, shard: Shard, path: str, leaf: Leaf, converted: Leaf) -> None:
        """Look for numbers of a leaf that became infinite."""
        if leaf is converted or path in self._reported:
            return
        here, there = torch.as_tensor(converted), torch.as_tensor(leaf)
        if torch.finfo(here.dtype).max >= torch.finfo(there.dtype).max:
            return
        if here.is_cuda:
            found = (here - there).isinf().any()  # inf - inf is no number
            self._coming.append((shard, path, _name(here.dtype), HostCopy(found, beside=True)))
        elif bool(here.isinf().any()) and bool((here.isinf() & ~there.isinf()).any()):  # mostly one look is enough
            self._add(shard, path, _name(here.dtype))

    def take(self, wait: bool = False) -> list[str]:
        """Return the lines that are known, each once; with `wait`, the lines of all shards so far."""
        while self._coming and (wait or self._coming[0][-1].is_here()):
            shard, path, dtype, found = self._coming.popleft()
            with waiting(ON_GPU):
                is_found = bool(found.wait())
            if is_found:
                self._add(shard, path, dtype)
        notes, self._notes = self._notes, []
        return notes

    def _add(self, shard: Shard, path: str, dtype: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            what = f"{path} has numbers too large for {dtype}, which are kept as inf"
            self._notes.append(f"outputs.dtype: {what} (first in {location(shard)})")


class OutputSelector:
    """A function of a shard's outputs, which reduces them to those that the job keeps.

    `after` is the user's function, or None. `notes` takes what `outputs.dtype` makes infinite.
    """

    def __init__(self, job: Job, device: torch.device, notes: OverflowNotes) -> None:
        self.after = None if job.outputs.after is None else _built(job, device)
        self._takes_inputs = self.after is not None and takes_inputs(self.after)
        self._is_ragged = job.outputs.ragged
        self._keep = job.outputs.keep
        self._dtype: torch.dtype | None = job.outputs.dtype and getattr(torch, job.outputs.dtype)
        self._notes = notes

    def __call__(self, outputs: Any, inputs: Any, shard: Shard) -> Any:
        """Return what is kept of a shard's outputs; an error names step and shard.

        With `outputs.ragged`, lists with an entry for each row have become leaves.
        """
        outputs = self.picked(outputs, inputs, shard, shard.rows)
        if self._dtype is None:
            return outputs
        leaves, spec = flatten(outputs)
        converted: list[Any] = []
        for path, leaf in zip(spec.paths, leaves, strict=True):
            if isinstance(leaf, Ragged) and leaf.has_values:
                converted.append(leaf)
                continue
            numbers = leaf.data if isinstance(leaf, Ragged) else leaf
            made = _as_dtype(path or WHOLE, numbers, self._dtype)
            converted.append(replace(leaf, data=made) if isinstance(leaf, Ragged) else made)
            self._notes.look(shard, path or WHOLE, numbers, made)
        return unflatten(spec, converted)

    def picked(self, outputs: Any, inputs: Any, shard: Shard, rows: int | None) -> Any:
        """Return what is kept of the outputs of so many rows, in its own dtypes; with None, lists have any length."""
        if self.after is not None:
            where, got = location(shard), describe_input(outputs)
            with reraise_as(f"{where}: {AFTER}", lambda error: gradients_hint(error) + got):
                outputs = self.after(outputs, inputs=inputs) if self._takes_inputs else self.after(outputs)
            if not self._is_ragged and not flatten(without_texts(outputs))[0]:
                raise ModelError(f"{where}: {AFTER} must return tensors, arrays or texts, got {outputs!r:.60}")
        if self._is_ragged:
            with locating(location(shard)):
                outputs = without_lists(outputs, rows)
        if self._keep is not None:
            outputs = subtree(outputs, chosen(ends(flatten(outputs)[1]), self._keep, location(shard)))
        if (tensors := bare_tensors(outputs)) and not any(map(why_no_rows, tensors)):
            return outputs
        leaves, spec = flatten(outputs)
        for number, leaf in enumerate(leaves):
            if (why := why_no_rows(leaf)) is not None:
                path = quoted(leaf_keys(spec)[number])
                raise ModelError(f"{location(shard)}: output{path} is {why}; or leave it out: see outputs.keep")
        return outputs


def chosen(there: Sequence[Keys], patterns: Sequence[str], where: str) -> set[Keys]:
    """Return the keys whose path, or whose container's path, fits one of the patterns.

    Raises JobError, which lists all paths, if a pattern fits none.
    """
    by_pattern = {pattern: {keys for keys in there if _fits(keys, pattern)} for pattern in patterns}
    for pattern, matches in by_pattern.items():
        if not matches:
            paths = [_path(keys) for keys in there]
            lacks = f"the outputs of {where} have no {pattern!r}{did_you_mean(pattern, paths)}"
            raise JobError(f"outputs.keep: {lacks}; they have {', '.join(paths)}")
    return set[Keys]().union(*by_pattern.values())


def _fits(keys: Keys, pattern: str) -> bool:
    paths = [_path(keys[:length]) for length in range(1, len(keys) + 1)] or [WHOLE]
    return any(path == pattern or fnmatchcase(path, pattern) for path in paths)


def _path(keys: Keys) -> str:
    return ".".join(map(str, keys)) or WHOLE


def check_after(target: Any) -> None:
    """Raise JobError if what `outputs.after` names cannot be imported, called, or called with its args."""
    after = resolve(AFTER, target) if isinstance(target, Target) else target
    if not callable(after):
        raise JobError(f"{AFTER}: must be a function of the outputs, got a {type(after).__qualname__}")
    args = target.args if isinstance(target, Target) else {}
    leading = [] if isinstance(after, type) else [None]  # a class gets its args alone, and its object the outputs
    more = {"inputs": None} if takes_inputs(after) and leading else {}
    try:
        inspect.signature(after).bind(*leading, **{**more, **args})
    except TypeError as error:
        label = target.label if isinstance(target, Target) else type(target).__qualname__
        raise JobError(f"{AFTER}: {label} {error}") from None
    except ValueError:
        pass  # some built-in callables have no signature


def takes_inputs(after: Any) -> bool:
    """Return whether a function has a parameter `inputs` beside its first one, which is for the outputs."""
    try:
        parameters = inspect.signature(after.forward if isinstance(after, nn.Module) else after).parameters
    except (TypeError, ValueError):  # a C function may have no signature
        return False
    return "inputs" in list(parameters)[1:]


def _built(job: Job, device: torch.device) -> Any:
    """Build the function, or the object of the class, that `after` names; a module is copied to the device."""
    target = job.outputs.after
    seed_all(derive_seed(job.seed, "after"))  # the weights of a module are the same on all workers
    is_class = isinstance(target, Target) and isinstance(resolve(AFTER, target), type)
    made = build(AFTER, target) if is_class else bound(AFTER, target)
    if not callable(made):
        raise JobError(f"{AFTER}: must be a function of the outputs, got a {type(made).__qualname__}")
    return copy.deepcopy(made).to(device).eval() if isinstance(made, nn.Module) else made


def _as_dtype(path: str, leaf: Leaf, dtype: torch.dtype) -> Leaf:
    """Convert a floating leaf to the dtype, where it is; return any other leaf unchanged."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if leaf.dtype.kind != "f":
        return leaf
    if dtype == torch.bfloat16:
        raise JobError(f"outputs.dtype: {path} is a numpy array, which cannot be bfloat16; return a tensor")
    with np.errstate(over="ignore"):
        return leaf.astype(_name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PredictedShard(NamedTuple):
    """A shard that has run: its outputs that are kept, and the carried values of its samples, by key.

    `flops` are a row's operations, in the first one, if they are counted.
    """

    shard: Shard
    indices: Indices
    outputs: Any
    carried: dict[str, list[Plain]]
    flops: Flops | None


@dataclass(frozen=True)
class Prediction:
    """How a worker predicts its `work`: the clock splits the steps' time, `forwards` run a model that is sharded.

    `notes` has lines for the user. To count a row's operations, the first shard runs twice; so does one for the
    `trial`, which finds the outputs with rows.
    """

    job: Job
    device: torch.device
    work: Work
    clock: StepClock = field(default_factory=SilentClock)
    forwards: Forwards = field(default_factory=Forwards)
    counts_flops: bool = False
    notes: OverflowNotes = field(default_factory=OverflowNotes)
    trial: RowTrial | None = None


def predict(
    prediction: Prediction, model: nn.Module, steps: Iterator[LoadedStep]
) -> Generator[PredictedShard | StepEnd, None, None]:
    """Run the model over each shard of the steps; yield the shards that have rows, and the end of each step.

    The model stays in eval mode. `torch.no_grad` and autocast are on while a shard
    runs, not while its outputs are taken. Let go of a shard before the next one is asked for: it holds the outputs.
    Raises ModelError, naming step and shard, if the model raises.
    """
    job, work, forwards, counts_flops = prediction.job, prediction.work, prediction.forwards, prediction.counts_flops
    select = OutputSelector(job, prediction.device, prediction.notes)
    # The autocast around all shards is off: it keeps converted parameters from one shard to the next.
    with evaluating(model) as state, autocast(job.precision, prediction.device, enabled=False):
        replica = Replica(
            job.seed, model, prediction.device, state, work, forwards, prediction.clock, after=select.after
        )
        runner = _Runner(prediction, model, replica, select)
        dummies = None if forwards.are_collective else ()  # which need not be asked for in each step
        for loaded in map(forwards.begin, steps):
            for shard, indices, batch, _ in replica.rounds(loaded, dummies):
                if shard is None:  # the other workers need this one to gather parameters
                    runner.run_dummy(batch)
                else:
                    # No name holds the outputs: those that are not kept are freed before the next shard.
                    yield runner.run(shard, indices, batch, counts_flops)
                    counts_flops = False
            prediction.clock.enter(Part.OTHER)
            replica.restore()
            yield StepEnd(loaded.step)
        with runner.no_grad, runner.precision:
            forwards.end()


def check_sizes(tried: Mapping[str, Less], rows: int, batch_dim: int, where: str, texts: Sequence[str] = ()) -> None:
    """Raise ModelError for the first output whose size has the rows of a shard by chance; lists of `texts` may."""
    follows = {path: less.follows(rows, batch_dim) for path, less in tried.items() if less.size is not None}
    fitting = [path for path, has_rows in follows.items() if has_rows]
    for path, has_rows in follows.items():
        size, less = tried[path].size, tried[path].less
        assert size is not None and less is not None
        dim = row_dim(size, batch_dim)
        name = f"output {path!r}" if path else "the output"
        if path in texts:
            if not has_rows and size != less:
                says = f"is a list of {size[0]} texts with {rows} rows, and of {less[0]} with {rows - 1}"
                raise ModelError(f"{where}: {name} {says}: return a list of texts, one for each row")
        elif has_rows is False and dim is not None and size[dim] == rows:
            keep = f"keep the others alone: outputs.keep: [{listed(fitting)}]" if fitting else "leave it out"
            raise ModelError(f"{where}: {name} {tried[path].misfit(rows, batch_dim, keep)}")


def check_lists(tried: Mapping[str, Less], outputs: Any, rows: int, where: str) -> None:
    """Raise ModelError for the first list that has an entry for each row, and one less with one row less."""
    for keys, node in all_nodes(flatten(outputs)[1]):
        if node.kind not in ("list", "tuple") or len(node.children) != rows:
            continue
        last, before = (
            [".".join(map(str, (*keys, at, *inner))) for inner in ends(node.children[at])]
            for at in (rows - 1, rows - 2)
        )
        if any(path in tried for path in before) and not any(path in tried for path in last):
            raise ModelError(
                f"{where}: output{quoted(keys)} is a {node.kind} with an entry for each row: return a tensor, a list "
                "of texts, or a list, with outputs.ragged: true"
            )


@dataclass(eq=False)
class _Runner:
    """A replica that predicts shards, and picks from their outputs what is kept.

    A shard runs without gradients, and in the job's precision: in `no_grad` and `precision`. It is no inference mode:
    there a model that turns gradients on, as for forces, raises an error or gets zeros. Converted weights are not
    kept: all of them would take half of the model's memory once more.
    """

    prediction: Prediction
    model: nn.Module
    replica: Replica
    select: OutputSelector

    def __post_init__(self) -> None:
        self.no_grad = torch.no_grad()  # both contexts can be entered again
        self.precision = autocast(self.prediction.job.precision, self.prediction.device, keeps=False)

    def run_dummy(self, inputs: Any) -> None:
        """Run the model beside other workers that need this one, from the same state as their shards."""
        self.prediction.clock.enter(Part.OTHER)
        self.replica.restore()
        with self.no_grad, self.precision, reraise_as("model", gradients_hint):
            call = self.replica.forwards.gathering(call_model)
            self.replica.run(None, call, self.model, inputs, self.prediction.job.call)

    def run(self, shard: Shard, indices: Indices, batch: Any, counts_flops: bool) -> PredictedShard:
        """Run a shard, and pick from its outputs."""
        try:
            inputs, carried = split_passthrough(batch, indices)
            with self.no_grad, self.precision:
                selected, flops = self._run(inputs, shard, counts_flops)
            return PredictedShard(shard, indices, selected, carried, flops)
        except (RuntimeError, ModelError) as error:
            self.replica.raise_advised(error, shard, self.prediction.job)

    def _run(self, inputs: Any, shard: Shard, counts_flops: bool) -> tuple[Any, Flops | None]:
        clock, trial, rows = self.prediction.clock, self.prediction.trial, shard.rows
        flops = None
        if counts_flops:  # of a row, by another forward, on a copy of the inputs: the model may change them
            run = functools.partial(self.replica.run, shard, self._forward, copied(inputs))
            flops = counted_flops(run, rows, self.prediction.job, self.prediction.device)
        is_tried = trial is not None and trial.is_open and (trial.is_due(rows) or trial.is_single_due(rows))
        # Before the model may change its inputs.
        other = trial.other(inputs, rows) if trial is not None and is_tried else None
        clock.enter(Part.FORWARD)
        outputs = self.replica.run(shard, self._forward, inputs)
        clock.enter(Part.OUTPUTS)
        selected = self.select(outputs, inputs, shard)
        if trial is not None and is_tried:
            del outputs  # the trial may need the memory of outputs that are not kept
            if rows == 1:
                self._try_texts(trial, other, selected, shard)
            else:
                with suppress(Error):  # of a class that cannot be made again
                    selected = in_own_memory(selected)
                self._try_rows(trial, other, selected, shard)
        if type(selected) is torch.Tensor:  # the usual case, without texts
            return selected, flops

        def is_column(path: str, length: int) -> bool:
            return length == shard.rows if trial is None else trial.is_column(path, length, shard.rows)

        try:
            return without_texts(selected, is_column), flops
        except ModelError as error:
            raise_located(error, location(shard))

    def _try_rows(self, trial: RowTrial, less: Any, selected: Any, shard: Shard) -> None:
        """Run a shard with one row `less`; raise ModelError for an output whose size has rows by chance."""
        texts = paths_of_texts(selected)
        with suppress(Error):  # of a class that cannot be made again
            selected = without_texts(selected)
        tried = self._tried(trial, less, selected, shard)
        trial.end(tried)
        if isinstance(tried, Mapping):
            where = location(shard)
            check_sizes(tried, shard.rows, self.prediction.job.batch_dim, where, texts)
            check_lists(tried, selected, shard.rows, where)

    def _try_texts(self, trial: RowTrial, twice: Any, selected: Any, shard: Shard) -> None:
        """Run a shard of one row with its row `twice`, if one of its outputs is a list of one text."""
        tried: Tried = {}
        with suppress(Error):  # of a class that cannot be made again
            selected = without_texts(selected, lambda path, length: length == 1)
            if any(isinstance(leaf, Ragged) and leaf.has_values for leaf in flatten(selected)[0]):
                tried = self._tried(trial, twice, in_own_memory(selected), shard)
        trial.end_single(tried)

    def _tried(self, trial: RowTrial, other: Any, selected: Any, shard: Shard) -> Tried:
        """Run the `other` batch, of one row less or more than a shard; return how the outputs differ."""
        before = self.prediction.clock.enter(Part.OTHER)
        job = self.prediction.job

        def run(inputs: Any) -> Any:
            outputs = self.replica.run(shard, call_model, self.model, inputs, job.call)
            return without_texts(self.select.picked(outputs, inputs, shard, None))

        self.replica.restore()  # its errors are no trial's
        tried = trial.run(run, other, selected, shard.rows)
        self.prediction.clock.enter(before)
        return tried

    @functools.cached_property
    def _forward(self) -> Callable[[Any], Any]:
        """A function of inputs that returns the model's outputs; an error says that the model raised it."""
        model, call = self.model, self.prediction.job.call
        called = self.replica.forwards.gathering(call_model)

        def forward(inputs: Any) -> Any:
            try:
                return called(model, inputs, call)
            except (Exception, SystemExit) as error:

                def hint(error: BaseException) -> str:
                    what = mixed_devices(model, error) or describe_input(inputs)
                    return gradients_hint(error) + keywords_hint(model, inputs, call, error) + what

                raise_as(error, "model", hint)

        return forward
