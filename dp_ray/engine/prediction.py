"""The prediction loop of one worker: shard in, outputs out. It uses neither Ray nor files.

Begin at `predict`. `outputs.after` computes from a shard's outputs, `keep` picks from them, `dtype` converts them:
all on the device, so that outputs that are not kept are never copied.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.clock import Part, SilentClock, StepClock
from dp_ray.engine.devices import mixed_devices
from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.items import Plain, split_passthrough
from dp_ray.engine.loading import LoadedStep
from dp_ray.engine.model import autocast, call_model, evaluating
from dp_ray.engine.random import seed_all
from dp_ray.engine.replica import Forwards, Replica
from dp_ray.engine.step import StepEnd, keywords_hint
from dp_ray.engine.user_code import (
    describe_input,
    gradients_hint,
    locating,
    location,
    raise_as,
    reraise_as,
)
from dp_ray.engine.whole_batch import NO_ROWS
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import Indices
from dp_ray.job.targets import bound, build, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Work
from dp_ray.system.threads import waiting
from dp_ray.tensors.ragged import without_lists, without_texts
from dp_ray.tensors.tree import (
    Keys,
    Leaf,
    Ragged,
    bare_tensors,
    ends,
    flatten,
    leaf_keys,
    quoted,
    subtree,
    unflatten,
    why_no_rows,
)
from dp_ray.text import did_you_mean

AFTER = "outputs.after"
WHOLE = "output"  # the path of outputs that are one tensor, as its column is named


class OverflowNotes:
    """Lines for the user of outputs that `outputs.dtype` makes infinite, one a path.

    It waits for no GPU: what is found stays on the device until the lines are taken.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], torch.Tensor] = {}  # by path and dtype

    def look(self, path: str, leaf: Leaf, converted: Leaf) -> None:
        """Look for numbers of a leaf that became infinite."""
        if leaf is converted:
            return
        here, there = torch.as_tensor(converted), torch.as_tensor(leaf)
        if torch.finfo(here.dtype).max >= torch.finfo(there.dtype).max:
            return
        if not here.is_cuda and not bool(here.isinf().any()):  # mostly one look is enough
            return
        found, of = (here - there).isinf().any(), (path, _name(here.dtype))  # inf - inf is no number
        self._found[of] = found | self._found[of] if of in self._found else found

    def take(self) -> list[str]:
        """Return the lines on all shards so far, each once."""
        with waiting(ON_GPU):
            there = [of for of, found in self._found.items() if bool(found)]
        self._found.clear()
        return [
            f"outputs.dtype: {path} has numbers too large for {dtype}, which are kept as inf" for path, dtype in there
        ]


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
            self._notes.look(path or WHOLE, numbers, made)
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
    """A shard that has run: its outputs that are kept, and the carried values of its samples, by key."""

    shard: Shard
    indices: Indices
    outputs: Any
    carried: dict[str, list[Plain]]


@dataclass(frozen=True)
class Prediction:
    """How a worker predicts its `work`: the clock splits the steps' time, `forwards` run a model that is sharded.

    `notes` has lines for the user.
    """

    job: Job
    device: torch.device
    work: Work
    clock: StepClock = field(default_factory=SilentClock)
    forwards: Forwards = field(default_factory=Forwards)
    notes: OverflowNotes = field(default_factory=OverflowNotes)

    @functools.cached_property
    def select(self) -> OutputSelector:
        """The function of a shard's outputs that picks those to keep."""
        return OutputSelector(self.job, self.device, self.notes)

    @contextmanager
    def replica(self, model: nn.Module) -> Iterator[Replica]:
        """Give what runs the shards; in the block the model is in eval mode, and stays so."""
        # The autocast around all shards is off: it keeps converted parameters from one shard to the next.
        with evaluating(model) as state, autocast(self.job.precision, self.device, enabled=False):
            place = self.job.seed, model, self.device, state, self.work
            yield Replica(*place, self.forwards, self.clock, after=self.select.after)

    def forward(self, model: nn.Module) -> Callable[[Any], Any]:
        """Return a function of inputs that returns the model's outputs; an error says that the model raised it."""
        call, called = self.job.call, self.forwards.gathering(call_model)

        def forward(inputs: Any) -> Any:
            try:
                return called(model, inputs, call)
            except (Exception, SystemExit) as error:

                def hint(error: BaseException) -> str:
                    what = mixed_devices(model, error) or describe_input(inputs)
                    return gradients_hint(error) + keywords_hint(inputs, call, error) + what

                raise_as(error, "model", hint)

        return forward


def predict(
    prediction: Prediction, replica: Replica, steps: Iterator[LoadedStep], rows_of: Mapping[str, bool] = NO_ROWS
) -> Generator[PredictedShard | StepEnd, None, None]:
    """Run the model over each shard of the steps; yield the shards that have rows, and the end of each step.

    `rows_of` says by path which lists of texts have a row for each sample; of others their length tells.
    `torch.no_grad` and autocast are on while a shard runs, not while its outputs are taken. Let go of a shard before
    the next one is asked for: it holds the outputs. Raises ModelError, naming step and shard, if the model raises.
    """
    runner = _Runner(prediction, replica, rows_of)
    forwards, clock = prediction.forwards, prediction.clock
    dummies = None if forwards.are_collective else ()  # which need not be asked for in each step
    for loaded in map(forwards.begin, steps):
        for shard, indices, batch, _ in replica.rounds(loaded, dummies):
            if shard is None:  # the other workers need this one to gather parameters
                clock.enter(Part.OTHER)
                replica.restore()
                with runner.no_grad, runner.precision:
                    replica.run(None, runner.forward, batch)
            else:
                # No name holds the outputs: those that are not kept are freed before the next shard.
                yield runner.run(shard, indices, batch)
        clock.enter(Part.OTHER)
        replica.restore()
        yield StepEnd(loaded.step)
    with runner.no_grad, runner.precision:
        forwards.end()


@dataclass(eq=False)
class _Runner:
    """Runs shards with a replica, and picks from their outputs what is kept.

    A shard runs without gradients, and in the job's precision: in `no_grad` and `precision`. It is no inference mode:
    there a model that turns gradients on, as for forces, raises an error or gets zeros. Converted weights are not
    kept: all of them would take half of the model's memory once more.
    """

    prediction: Prediction
    replica: Replica
    rows_of: Mapping[str, bool]

    def __post_init__(self) -> None:
        self.no_grad = torch.no_grad()  # both contexts can be entered again
        self.precision = autocast(self.prediction.job.precision, self.prediction.device, keeps=False)
        self.forward, self._select = self.prediction.forward(self.replica.model), self.prediction.select

    def run(self, shard: Shard, indices: Indices, batch: Any) -> PredictedShard:
        """Run a shard, and pick from its outputs."""
        try:
            inputs, carried = split_passthrough(batch, indices)
            with self.no_grad, self.precision:
                return PredictedShard(shard, indices, self._run(inputs, shard), carried)
        except (RuntimeError, ModelError) as error:
            self.replica.raise_advised(error, shard, self.prediction.job)

    def _run(self, inputs: Any, shard: Shard) -> Any:
        clock = self.prediction.clock
        clock.enter(Part.FORWARD)
        outputs = self.replica.run(shard, self.forward, inputs)
        clock.enter(Part.OUTPUTS)
        selected = self._select(outputs, inputs, shard)
        if type(selected) is torch.Tensor:  # the usual case, without texts
            return selected

        def is_column(path: str, length: int) -> bool:
            has_rows = self.rows_of.get(path, length == shard.rows)
            if has_rows and length != shard.rows:
                name = f"output {path!r}" if path else "the output"
                raise ModelError(
                    f"{name} is a list of {length} texts for {shard.rows} rows: give one text for each row"
                )
            return has_rows

        with locating(location(shard)):
            return without_texts(selected, is_column)
