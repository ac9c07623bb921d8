"""Losses and metrics that see the whole batch (`over: batch`): the outputs of all shards, merged in order.

Each worker runs its shards forward and keeps their outputs. `merged_batch` gathers those of all workers: every worker
has the whole batch, computes the same loss, and so the gradient of its own shards' outputs. Then each shard runs
again, and its backward begins with that gradient: memory is that of all outputs and of one shard's graph. A worker
with a single shard keeps the graph of its forward, and runs it once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.alignment import aligned, must_align
from dp_ray.engine.beside import modules_beside
from dp_ray.engine.clock import Part
from dp_ray.engine.loading import LoadedShard, LoadedStep
from dp_ray.engine.model import autocast
from dp_ray.engine.random import seed_all
from dp_ray.engine.reduce import Seed, ShardLoss
from dp_ray.engine.replica import Replica
from dp_ray.engine.rows import RowTrial, Tried, constants_of, is_same_constant, row_dim
from dp_ray.engine.step import Compare, Metrics, Step, StepOutput, Weighted, build_loss, row_of, run_step
from dp_ray.engine.user_code import describe_compared, reraise_as
from dp_ray.engine.world import all_gather, everyone, gathered, has_peers
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, is_over_batch
from dp_ray.job.targets import bound, build, keeps_state, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard
from dp_ray.system.threads import waiting
from dp_ray.tensors.flat import Form, as_bytes, flat, room, views
from dp_ray.tensors.scatter import gather
from dp_ray.tensors.tree import (
    TreeSpec,
    all_nodes,
    copied,
    flatten,
    in_own_memory,
    is_plain,
    map_leaves,
    unflatten,
    why_no_rows,
)
from dp_ray.text import listed

OUTPUTS = "0"  # the path of the outputs in (outputs, target)
LEAVE_OUT = "leave it out of what the model returns, or step"
OF_ROWS = (
    "with over: batch, what has no rows must be the same in all shards; return it for each row (expand it), compute "
    f"it in the loss from outputs that have rows, or {LEAVE_OUT}"
)

OutputGradients = Mapping[str, torch.Tensor]  # of a shard's outputs, by their paths


def build_over_batch(job: Job, device: torch.device) -> dict[str, Compare]:
    """Return the job's functions of (outputs, target) that see the whole batch, by name; the loss is the first.

    Raises JobError if one cannot be built or called, has parameters to train, or is a metric with a state.
    """
    functions = {"loss": build_loss(job.loss, device, job.batch_dim)} if job.loss_over_batch else {}
    for name, metric in job.metrics.items():
        if not isinstance(metric, Target) or not is_over_batch(metric):
            continue
        where = f"metrics.{name}"
        made = build(where, metric) if isinstance(resolve(where, metric), type) else bound(where, metric)
        if keeps_state(made):
            raise JobError(f"{where}.over: a metric with a state is measured over the whole dataset; leave over out")
        if not callable(made):
            raise JobError(f"{where}: must be a function of (outputs, target), got a {type(made).__qualname__}")
        functions[name] = made
    return functions


def seed_of_batch(seed: int, whole: Shard, device: torch.device, number: int = 0) -> None:
    """Seed the random numbers of a loss of the whole batch, the same on all workers."""
    seed_all(derive_seed(seed, "loss", whole.epoch, whole.step, number), device)


class ShardOutput(NamedTuple):
    """The outputs and the target of a shard with rows, and the result of a trial with one row less."""

    shard: Shard
    outputs: Any
    target: Any
    tried: Tried | None = None


class _Leaf(NamedTuple):
    """The form of a leaf of a shard's outputs or target, as it is sent to every worker."""

    path: str
    form: Form
    has_gradient: bool


class _Form(NamedTuple):
    """The form of a shard's outputs and target."""

    shard: int
    rows: int
    leaves: list[_Leaf]
    constants: dict[str, Any]  # by path: numbers, texts and None; of an object its class
    lists: list[str]  # the paths of lists of these that have one for each row, like names
    tried: Tried | None


_Piece = tuple[_Form, dict[str, torch.Tensor]]  # a shard's form, and its leaves by path


class WholeBatches:
    """How a run merges the shards of its batches: which leaves have rows, as `trial` has shown on some worker.

    A list with a number or text for each row is joined if it is another one in some shard, or if this `joins_lists`.
    All workers know the same, since they merge the same shards.
    """

    def __init__(self, job: Job, trial: RowTrial | None = None, joins_lists: bool = False) -> None:
        self.batch_dim = job.batch_dim
        self.joins_lists = joins_lists
        self.has_rows: dict[str, bool] = {}  # by path, as far as the trial shows it
        self._trial = trial if job.num_shards > 1 else None  # one shard is the whole batch

    def is_due(self, rows: int) -> bool:
        """Return whether to try a shard of so many rows."""
        return self._trial is not None and self._trial.is_due(rows)

    def one_less(self, batch: Any, rows: int) -> Any | None:
        """Return a copy of a shard's batch for `tried`; None if it cannot be tried."""
        return None if self._trial is None else self._trial.other(batch, rows)

    def tried(self, run: Callable[[Any], StepOutput], less: Any | None, output: ShardOutput) -> ShardOutput:
        """Return the output of a shard with the result of a trial, for which `run` runs on one row `less`."""

        def outputs_of(batch: Any) -> Any:
            step_output = run(batch)
            return step_output.outputs, step_output.target

        if self._trial is None:
            return output
        tried = self._trial.run(outputs_of, less, (output.outputs, output.target), output.shard.rows)
        return output._replace(tried=tried)

    def take(self, forms: Sequence[_Form]) -> None:
        """Take in the trials of all workers; the first one that has shown something counts.

        Raises ModelError for a leaf that has rows in another dimension, and for a constant that depends on the rows.
        """
        tried = [form for form in forms if form.tried is not None]
        form = next((shown for shown in tried if isinstance(shown.tried, Mapping)), tried[0] if tried else None)
        if self._trial is None or form is None or form.tried is None or not self._trial.is_due(form.rows):
            return
        self._trial.end(form.tried)
        for path, less in form.tried.items() if isinstance(form.tried, Mapping) else ():
            has_rows = less.follows(form.rows, self.batch_dim)
            if has_rows is None:
                continue
            self.has_rows[path] = has_rows
            if has_rows or less.is_same:
                continue
            if less.size == less.less:
                raise ModelError(
                    f"{_named(path)} has no row for each sample, and is another one with {form.rows} rows of shard "
                    f"{form.shard} than with {form.rows - 1}: {OF_ROWS}"
                )
            raise ModelError(
                f"shard {form.shard}: {_named(path)} {less.misfit(form.rows, self.batch_dim, LEAVE_OUT)}"
            )


def _named(path: str) -> str:
    root, _, rest = path.partition(".")
    return ("output" if root == OUTPUTS else "target") + (f" {rest!r}" if rest else "")


@dataclass(frozen=True)
class MergedBatch:
    """The outputs and targets of a whole batch, the same on all workers.

    `starts` has the first row of each shard, `first` the number of the first one. `asking` has a leaf for each output
    with a graph: the loss gives it the output's gradient. `dims` has the dimension of the rows of each leaf, None for
    a leaf without rows.
    """

    outputs: Any
    target: Any
    rows: int
    starts: Mapping[int, int]
    first: int
    asking: Mapping[str, torch.Tensor]
    dims: Mapping[str, int | None]

    def measure(self, what: str, function: Compare, is_last: bool = True) -> torch.Tensor:
        """Return a function's value of the whole batch: one number, a scalar tensor.

        Unless it `is_last`, it gets copies: it may write its arguments, and the next function gets the model's own.
        Raises ModelError if it raises, or returns anything else.
        """
        seen = (self.outputs, self.target)
        with reraise_as(what, lambda _: describe_compared(self.outputs, self.target)):
            value = function(*(seen if is_last else copied(seen)))
        if isinstance(value, int | float):
            return torch.tensor(float(value), dtype=torch.float64)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = f"a tensor of size {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ModelError(
                f"{what} returned {got} for the whole batch of {self.rows} rows; with over: batch it returns one "
                "number, like a mean over them"
            )
        return value.reshape(())

    def gradients(
        self, loss: torch.Tensor, seed: torch.Tensor, shards: Sequence[Shard]
    ) -> dict[int, OutputGradients]:
        """Return the gradients of the shards' outputs, of a backward of `loss` that begins with `seed`.

        Outputs that the loss does not use have none. For an output without rows, the first shard gets the gradient,
        and the others zeros. Raises ModelError if the loss depends on no output that has a graph.
        """
        if not loss.requires_grad:
            raise ModelError("the loss does not depend on any parameter that is trained")
        with reraise_as("the loss: backward"):
            found = torch.autograd.grad(loss, list(self.asking.values()), seed, allow_unused=True)
        whole = {path: gradient for path, gradient in zip(self.asking, found, strict=True) if gradient is not None}
        return {
            shard.shard: {path: self._of_shard(grad, path, shard) for path, grad in whole.items()} for shard in shards
        }

    def _of_shard(self, gradient: torch.Tensor, path: str, shard: Shard) -> torch.Tensor:
        dim = self.dims[path]
        if dim is not None:
            return gradient.narrow(dim, self.starts[shard.shard], shard.rows)
        return gradient if shard.shard == self.first else torch.zeros_like(gradient)


@torch.no_grad()
def merged_batch(own: Sequence[ShardOutput], device: torch.device, batches: WholeBatches) -> MergedBatch | None:
    """Merge the shards of all workers, in order; None if no shard has rows. Every rank calls this.

    `device` is the worker's. Raises ModelError, naming the shard, if the outputs of the shards do not fit together.
    """
    trees = [flatten((output.outputs, output.target)) for output in own]
    here: list[torch.Tensor] = []
    forms = []
    for output, (leaves, form) in zip(own, trees, strict=True):
        tensors = {path: _as_tensor(path, leaf) for path, leaf in zip(form.paths, leaves, strict=True)}
        described = [_Leaf(path, Form(leaf.shape, leaf.dtype), leaf.requires_grad) for path, leaf in tensors.items()]
        constants = {key: value if _is_plain(value) else _object(value) for key, value in constants_of(form).items()}
        _check_objects(output.shard.shard, form, own[0].shard.shard, trees[0][1])
        lists = [".".join(map(str, keys)) for keys, node in all_nodes(form) if _is_list(node, output.shard.rows)]
        forms.append(_Form(output.shard.shard, output.shard.rows, described, constants, lists, output.tried))
        here += tensors.values()
    everybodys: list[list[_Form]] = gathered(forms)
    filled = [rank for rank, theirs in enumerate(everybodys) if theirs]
    if not filled:
        return None
    spec: TreeSpec | None = trees[0][1] if trees else None
    if len(filled) < len(everybodys):  # one without rows computes the loss too, which may keep a state
        spec = gathered(spec)[filled[0]]
    assert spec is not None
    place = here[0].device if here else device
    batches.take(sorted([form for theirs in everybodys for form in theirs], key=lambda form: form.shard))
    pieces: dict[int, _Piece] = {}
    for theirs, raw in zip(everybodys, _exchanged(here, everybodys, device), strict=True):
        each = views(raw, (leaf.form for piece in theirs for leaf in piece.leaves))
        for piece in theirs:
            # Through `.data`: a loss may write one, and views of the same bytes would all count as written.
            pieces[piece.shard] = piece, {leaf.path: next(each).data.to(place) for leaf in piece.leaves}
    return _joined([pieces[shard] for shard in sorted(pieces)], spec, batches)


def _is_plain(constant: Any) -> bool:
    return is_plain(constant) or isinstance(constant, np.generic)


def _is_list(node: TreeSpec, rows: int) -> bool:
    """Return whether a node is a list or tuple of numbers or texts, one for each row."""
    are_plain = all(child.kind == "constant" and _is_plain(child.value) for child in node.children)
    return node.kind in ("list", "tuple") and len(node.children) == rows and are_plain


def _object(constant: Any) -> str:
    return f"a {type(constant).__qualname__}"


def _check_objects(shard: int, spec: TreeSpec, first: int, first_spec: TreeSpec) -> None:
    """Raise ModelError for an object that differs from this worker's first shard's: objects are not sent."""
    if spec is first_spec:
        return
    others = constants_of(first_spec)
    for path, value in constants_of(spec).items():
        if not is_plain(value) and path in others and not is_same_constant(others[path], value):
            raise ModelError(
                f"{_named(path)} is {_object(value)}, and not the same in the shards {first} and {shard}: {OF_ROWS}"
            )


def _as_tensor(path: str, leaf: Any) -> torch.Tensor:
    if (why := why_no_rows(leaf)) is not None:
        raise ModelError(f"{_named(path)} is {why}; over: batch needs tensors with a row for each sample")
    try:
        tensor: torch.Tensor = torch.as_tensor(leaf)
    except TypeError:
        raise ModelError(f"output {path!r} is an array of {leaf.dtype}; over: batch needs tensors") from None
    return tensor


def _exchanged(here: list[torch.Tensor], forms: list[list[_Form]], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the bytes of each rank's leaves; every rank calls this."""
    sent = flat(here, device)
    if not has_peers():
        yield sent
        return
    sizes = [sum(room(leaf.form) for form in theirs for leaf in form.leaves) for theirs in forms]
    row = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    row[: len(sent)] = sent
    received = torch.empty(len(forms), max(sizes), dtype=torch.uint8, device=device)
    with waiting("the other workers' outputs"):
        all_gather(received.view(-1), row, group=everyone())
    yield from received


def _joined(pieces: list[_Piece], spec: TreeSpec, batches: WholeBatches) -> MergedBatch:
    batch_dim, rows = batches.batch_dim, [form.rows for form, _ in pieces]
    (first, names), *others = ((form, [leaf.path for leaf in form.leaves]) for form, _ in pieces)
    for form, theirs in others:
        if sorted(theirs) != sorted(names):
            raise ModelError(
                f"shard {form.shard}: gives {theirs}, and shard {first.shard} {names}: all shards must give the same "
                "outputs and targets, if the loss or a metric is over: batch"
            )
    dims = {path: _dim_of_rows(path, [(form, tensors[path]) for form, tensors in pieces], batches) for path in names}
    lists = _joined_lists([form for form, _ in pieces], batches.joins_lists)
    _check_constants(pieces, [path for path, dim in dims.items() if dim is None], lists)
    cut = [{path: tensor for path, tensor in tensors.items() if dims[path] is not None} for _, tensors in pieces]
    whole = {**pieces[0][1], **(gather(cut, rows, batch_dim) if cut[0] else {})}
    if not cut[0]:
        raise ModelError("no output or target has a row for each sample, so there is no whole batch to see")
    asking: dict[str, torch.Tensor] = {}
    for form, _ in pieces:
        for leaf in form.leaves:
            if leaf.has_gradient and leaf.path not in asking and leaf.path.split(".")[0] == OUTPUTS:
                whole[leaf.path], asking[leaf.path] = _asking(whole[leaf.path])
    starts = dict(zip((form.shard for form, _ in pieces), [sum(rows[:at]) for at in range(len(rows))], strict=True))
    outputs, target = unflatten(_with_lists(spec, "", lists), [whole[path] for path in spec.paths])
    return MergedBatch(outputs, target, sum(rows), starts, first.shard, asking, dims)


def _dim_of_rows(path: str, pieces: Sequence[tuple[_Form, torch.Tensor]], batches: WholeBatches) -> int | None:
    """Return the dimension of a leaf that holds its rows; None if it has none, and so one size in all shards."""
    has_rows = batches.has_rows.get(path)
    dims = {row_dim(piece.shape, batches.batch_dim) for _, piece in pieces}
    dim = dims.pop() if len(dims) == 1 and has_rows is not False else None
    if dim is not None and all(piece.shape[dim] == form.rows for form, piece in pieces):
        return dim
    (form, piece), *others = pieces
    for other, theirs in others:
        if theirs.shape != piece.shape:
            raise ModelError(
                f"{_named(path)} has the size {list(piece.shape)} in shard {form.shard}, of {form.rows} rows, and "
                f"{list(theirs.shape)} in shard {other.shard}, of {other.rows}: it must have one row for each "
                "sample, or one size in all shards"
            )
    return None


def _joined_lists(forms: Sequence[_Form], joins_same: bool) -> dict[str, list[Any]]:
    """Return by path the lists with a constant for each row, joined in order; what all share only if `joins_same`."""
    joined = {}
    for path in forms[0].lists:
        if all(path in form.lists for form in forms):
            pieces = [[form.constants[f"{path}.{at}"] for at in range(form.rows)] for form in forms]
            if joins_same or len({repr(piece) for piece in pieces}) > 1:
                joined[path] = [tensor for piece in pieces for tensor in piece]
    return joined


def _with_lists(spec: TreeSpec, above: str, lists: Mapping[str, list[Any]]) -> TreeSpec:
    """Return the tree with these lists in place of its own."""
    if not lists:
        return spec
    if above in lists:
        values = tuple(TreeSpec("constant", value=item) for item in lists[above])
        return replace(spec, keys=tuple(range(len(values))), children=values)
    pairs = zip(spec.keys, spec.children, strict=True)
    return replace(
        spec, children=tuple(_with_lists(part, f"{above}.{key}" if above else f"{key}", lists) for key, part in pairs)
    )


def _check_constants(pieces: Sequence[_Piece], paths: Sequence[str], lists: Mapping[str, list[Any]]) -> None:
    """Raise ModelError unless values without rows are the same in all shards, to the bit; `lists` have rows."""
    (first, leaves), *others = pieces
    for form, _ in others:
        for path in sorted(first.constants.keys() | form.constants.keys()):
            mine, other = (
                repr(each.constants[path]) if path in each.constants else "not there" for each in (first, form)
            )
            if mine != other and path.rpartition(".")[0] not in lists:
                what = f"{mine:.40} in shard {first.shard}, and {other:.40} in shard {form.shard}"
                raise ModelError(f"{_named(path)} is {what}: {OF_ROWS}")
    if not others or not paths:
        return
    for path in paths:
        dtypes = {leaves[path].dtype for _, leaves in pieces}
        if len(dtypes) > 1:
            raise ModelError(f"{_named(path)} has several dtypes, {listed(dtypes)}, in the shards: {OF_ROWS}")
    # A GPU is waited for once, however many they are.
    same = [torch.stack([as_bytes(leaves[path]) for _, leaves in pieces]) for path in paths]
    if not bool(torch.stack([(stack == stack[0]).all() for stack in same]).all()):
        path, form = next(
            (path, form)
            for path in paths
            for form, tensors in others
            if not torch.equal(as_bytes(tensors[path]), as_bytes(leaves[path]))
        )
        raise ModelError(
            f"{_named(path)} has no row for each sample, and is not the same in the shards {first.shard} and "
            f"{form.shard}: {OF_ROWS}"
        )


def _asking(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor as one that a loss may write in place, and the leaf that gets its gradient.

    The leaf has its size, and no memory. A leaf itself may not be written, nor a view of one.
    """
    leaf = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape).requires_grad_()
    with torch.enable_grad():
        given: torch.Tensor = _Given.apply(leaf, [tensor.detach()])  # type: ignore[no-untyped-call]
    return given, leaf


class _Given(torch.autograd.Function):
    """The tensor that is given in a list, with the gradient of a leaf of its size."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor."""
        return given[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient."""
        return gradients[0], None


class BatchLoss(ShardLoss):
    """The module that DDP wraps if the loss is over the batch; a shard's backward begins with its outputs' gradients.

    A pass first calls `prepare`, which runs all shards, and then the module for each shard, with its number. Without
    a number, as for a dummy batch, the loss is the sum of all outputs.
    """

    is_of_rows = False

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        measures: Metrics,
        job: Job,
        device: torch.device,
        batches: WholeBatches,
        over_batch: Mapping[str, Compare] | None = None,
    ) -> None:
        super().__init__(model, step, measures, job, device)
        self.over_batch = functions = over_batch or build_over_batch(job, self._device)
        self._of_batch = functions["loss"]
        self.beside = modules_beside(job, step, {**measures.functions, **functions})
        self.batches = batches
        self._seed = job.seed
        self._aligns = must_align(job, device)
        self._gradients: dict[int, OutputGradients] = {}
        self._dims: Mapping[str, int | None] = {}
        self.value: torch.Tensor | None = None  # the loss of the step's batch
        self._kept: StepOutput | None = None

    def run(self, batch: Any) -> StepOutput:
        """Return the outputs of a shard."""
        with self._cast():
            return run_step(self._step, self.model, batch)

    def _cast(self) -> Any:
        return nullcontext() if self._autocast is None else autocast(*self._autocast)

    def prepare(
        self, replica: Replica, loaded: LoadedStep, seed: Seed, number: int, may_keep: bool
    ) -> tuple[LoadedStep, bool]:
        """Run the shards forward, and compute the loss of the whole batch, so that each has its outputs' gradients.

        A worker with a single shard keeps its graph, and runs it only here; returns whether it does. It does not in
        the first step, which tries the shard again, in the step of the trial for rows, and if shard 0 has no rows, so
        that the state stays.
        """
        loaded = loaded._replace(loaded=list(loaded.loaded))
        filled = [part for part in loaded.loaded if part.shard.rows]
        dummies, run = replica.dummies(loaded.step, len(filled)), replica.forwards.gathering(self.run)
        tried = next((at for at, part in enumerate(filled) if self.batches.is_due(part.shard.rows)), None)
        may_keep = may_keep and tried is None and not loaded.lacks_shard_0
        is_kept = may_keep and len(filled) + len(dummies) == 1
        replica.clock.enter(Part.FORWARD)
        replica.begin(len(filled) if is_kept else 2)
        own: list[ShardOutput] = []
        for turn in replica.rounds(loaded, dummies):
            if turn.shard is not None:
                replica.running_batch = turn.batch, turn.rows
            output = replica.run(turn.shard, run, turn.batch if is_kept else copied(turn.batch), number=number)
            if turn.shard is not None:
                own.append(detached(output, turn.shard, not is_kept))
            if is_kept:
                self._kept = output
            del output  # and its graph
        replica.running_batch = None
        if tried is not None:
            own[tried] = self._tried(replica, filled[tried], own[tried], number)
        if is_kept:
            replica.leave_state()
        else:
            replica.restore()
        replica.run_batch(loaded.step, self.take, loaded.whole, own, seed, number)
        return loaded, is_kept

    def _tried(self, replica: Replica, loaded: LoadedShard, output: ShardOutput, number: int) -> ShardOutput:
        """Run a shard with one row less; return its output with what that shows."""
        before = replica.clock.enter(Part.OTHER)
        replica.restore()  # its errors are no trial's
        run = partial(replica.run, loaded.shard, self.run, number=number)
        output = self.batches.tried(run, self.batches.one_less(loaded.batch, loaded.shard.rows), output)
        replica.clock.enter(before)
        return output

    def take(self, whole: Shard, own: Sequence[ShardOutput], seed: Seed, number: int = 0) -> None:
        """Compute the loss of the whole batch; `own` are this worker's shards. Every rank calls this.

        `seed` makes the gradient with which the loss's backward begins. `number` is that of the step's pass.
        """
        self._gradients, self.value = {}, None
        merged = merged_batch(own, self._device, self.batches)
        if merged is None:
            return
        seed_of_batch(self._seed, whole, self._device, number)
        with self._cast():
            loss = merged.measure("the loss", self._of_batch)
        self._gradients = merged.gradients(loss, seed(loss, 1), [output.shard for output in own])
        if self._aligns:  # they are rows of the whole batch's, which begin anywhere
            self._gradients = {
                shard: {path: aligned(gradient) for path, gradient in gradients.items()}
                for shard, gradients in self._gradients.items()
            }
        self._dims = merged.dims
        self.value = loss.detach().double()

    def row_norms(self, shard: Shard) -> list[float]:
        """Return, for each row of a shard, the norm of the gradient that the loss gives its outputs."""
        squares = torch.zeros(shard.rows, dtype=torch.float64, device=self._device)
        for path, gradient in self._gradients[shard.shard].items():
            dim = self._dims[path]
            if dim is not None:
                by_row = gradient.abs().double().movedim(dim, 0).reshape(shard.rows, -1)
                squares += by_row.square().sum(1).to(self._device)
        norms: list[float] = squares.sqrt().tolist()
        return norms

    def forward(self, batch: Any, rows: int, shard: int | None = None) -> torch.Tensor:
        """Return a scalar whose backward gives the shard's outputs their gradients, and set `result`.

        Raises ModelError if the outputs have another form than in the first forward.
        """
        if rows == 0:
            return super().forward(batch, rows)
        kept, self._kept = self._kept, None
        step_output = self.run(batch) if kept is None else kept
        outputs = step_output.outputs
        loss = _sum_of(outputs) if shard is None else _giving(outputs, self._gradients[shard])
        measured = [Weighted(torch.zeros(()) if self.value is None else self.value * rows, rows)]
        if self._measures.functions:
            with torch.no_grad(), self._cast():
                measured += self._measures(step_output, rows)
        self.result.row = row_of(measured, self._device)
        self.result.step_output = step_output
        return loss


def _with_graph(outputs: Any) -> dict[str, torch.Tensor]:
    leaves, spec = flatten((outputs,))
    pairs = zip(spec.paths, leaves, strict=True)
    return {path: leaf for path, leaf in pairs if isinstance(leaf, torch.Tensor) and leaf.requires_grad}


def _sum_of(outputs: Any) -> torch.Tensor:
    sums = [
        leaf.abs().sum().float() if leaf.is_complex() else leaf.sum().float()
        for leaf in _with_graph(outputs).values()
    ]
    if not sums:
        raise ModelError("the loss does not depend on any parameter that is trained")
    return torch.stack([tensor.to(sums[0].device) for tensor in sums]).sum()


def _giving(outputs: Any, given: OutputGradients) -> torch.Tensor:
    """Return a zero whose backward gives the outputs the gradients."""
    pairs = [(leaf, given[path]) for path, leaf in _with_graph(outputs).items() if path in given]
    if not pairs:
        raise ModelError("the loss does not depend on any parameter that is trained")
    for leaf, gradient in pairs:
        if leaf.shape != gradient.shape:
            raise ModelError(
                f"the model's second forward of a shard gave an output of size {list(leaf.shape)}, and the first one "
                f"{list(gradient.shape)}: with over: batch both must give the same"
            )
    zero: torch.Tensor = _Giving.apply([tensor for _, tensor in pairs], *(leaf for leaf, _ in pairs))  # type: ignore[no-untyped-call]
    return zero


class _Giving(torch.autograd.Function):
    """Zero, with the given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        """Return zero, a scalar on the device of the first output."""
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients."""
        return None, *ctx.gradients


def detached(output: StepOutput, shard: Shard, runs_again: bool = True) -> ShardOutput:
    """Return a shard's outputs without their graph; those that have one are marked by `requires_grad`.

    If the model `runs_again` before they are used, outputs without a graph are copied: the model may return a buffer,
    which it writes again or which is put back.
    """

    def kept(leaf: Any) -> Any:
        has_graph = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        own = in_own_memory(leaf) if runs_again and not has_graph else leaf
        return own.detach() if isinstance(own, torch.Tensor) else own

    def marked(leaf: Any) -> Any:
        return kept(leaf).requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else kept(leaf)

    return ShardOutput(shard, map_leaves(marked, output.outputs), map_leaves(kept, output.target))


def shard_loss(
    model: nn.Module,
    step: Step,
    measures: Metrics,
    job: Job,
    device: torch.device,
    trial: RowTrial | None = None,
    over_batch: Mapping[str, Compare] | None = None,
) -> ShardLoss:
    """Return the module that runs a shard of the job forward.

    A loss over the batch has a `trial` of its outputs. `over_batch` are functions that are built already.
    """
    if job.loss_over_batch:
        return BatchLoss(model, step, measures, job, device, WholeBatches(job, trial), over_batch)
    return ShardLoss(model, step, measures, job, device)
