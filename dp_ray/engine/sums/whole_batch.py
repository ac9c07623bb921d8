"""Losses and metrics that see the whole batch (`over: batch`): the outputs of all shards, merged in order.

Each worker runs its shards forward and keeps their outputs. `merged_batch` gathers those of all workers: every worker
has the whole batch, computes the same loss, and so the gradient of its own shards' outputs. Then each shard runs
again, and its backward begins with that gradient: memory is that of all outputs and of one shard's graph. A worker
with a single shard keeps the graph of its forward, and runs it once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dp_ray.engine.alignment import aligned, must_align
from dp_ray.engine.clock import Part
from dp_ray.engine.forward.buffers import modules_beside
from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.forward.step import Compare, Metrics, Step, StepOutput, Weighted, build_loss, row_of, what_it_is
from dp_ray.engine.loads.loading import LoadedStep
from dp_ray.engine.random import seed_all
from dp_ray.engine.sums.reduce import OfLoss, ShardLoss
from dp_ray.engine.user_code import describe_compared, dtypes_and_sizes, reraise_as
from dp_ray.engine.world import all_gather, everyone, gathered, has_peers
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, is_over_batch
from dp_ray.job.targets import built, keeps_state
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
from dp_ray.text import a_kind

OUTPUTS = "0"  # the path of the outputs in (outputs, target)
LEAVE_OUT = "leave it out of what the model returns, or step"
OF_ROWS = (
    "with over: batch, what has no rows must be the same in all shards; return it for each row (expand it), compute "
    f"it in the loss from outputs that have rows, or {LEAVE_OUT}"
)

NO_ROWS: Mapping[str, bool] = {}
OutputGradients = Mapping[str, torch.Tensor]  # of a shard's outputs, by their paths


def build_over_batch(job: Job, device: torch.device) -> dict[str, Compare]:
    """Return the job's functions of (outputs, target) that see the whole batch, by name; the loss is the first.

    Raises JobError if one cannot be built or called, has parameters to train, or is a metric with a state.
    """
    functions = {"loss": build_loss(job.loss, device, job.batch_dim)} if job.loss_over_batch else {}
    for name, metric in job.metrics.items():
        if is_over_batch(metric):
            functions[name] = built_metric(name, metric)
            if keeps_state(functions[name]):
                raise JobError(
                    f"metrics.{name}.over: a metric with a state is measured over the whole dataset; leave over out"
                )
    return functions


def built_metric(name: str, metric: Any) -> Any:
    """Return one of the job's metrics: a function of (outputs, target), or an object with a state.

    Raises JobError if it cannot be built or called.
    """
    found = built(f"metrics.{name}", metric)
    if isinstance(metric, Target) and not callable(found) and not keeps_state(found):
        raise JobError(f"metrics.{name}: must be a function of (outputs, target), got {a_kind(found)}")
    return found


def row_dim(size: Sequence[int], batch_dim: int) -> int | None:
    """Return the dimension that holds the rows of a tensor with rows; None if there is none."""
    if len(size) < 2:
        return 0 if size else None
    return batch_dim if batch_dim < len(size) else None


def constants_of(spec: TreeSpec) -> dict[str, Any]:
    """Return the values in outputs that are no tensors, by path: numbers, texts, None and objects."""
    return {".".join(map(str, keys)): node.value for keys, node in all_nodes(spec) if node.kind == "constant"}


def seed_of_batch(seed: int, whole: Shard, device: torch.device, number: int = 0) -> None:
    """Seed the random numbers of a loss of the whole batch, the same on all workers."""
    seed_all(derive_seed(seed, "loss", whole.epoch, whole.step, number), device)


class ShardOutput(NamedTuple):
    """The outputs and the target of a shard with rows."""

    shard: Shard
    outputs: Any
    target: Any


class _Form(NamedTuple):
    """The form of a shard's outputs and target."""

    shard: int
    rows: int
    leaves: dict[str, Form]  # by path
    with_graph: list[str]  # the paths of those that have one
    constants: dict[str, Any]  # by path: numbers, texts and None
    lists: list[str]  # the paths of lists of these that have one for each row, like names


_Piece = tuple[_Form, dict[str, torch.Tensor]]  # a shard's form, and its leaves by path


class WholeBatches(NamedTuple):
    """How the shards of a batch are merged: `rows` says by path which leaves have rows, where sizes do not tell.

    A list with a number or text for each row is joined if it is another one in some shard, or if this `joins_lists`.
    """

    batch_dim: int
    rows: Mapping[str, bool] = {}
    joins_lists: bool = False


def output_at(path: str) -> str:
    """Return what stands at a path of (outputs, target), in words."""
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
            raise ModelError(
                f"{what} returned {what_it_is(value)} for the whole batch of {self.rows} rows; with over: batch it "
                "returns one number, like a mean over them"
            )
        return value.reshape(())

    def gradients(
        self, loss: torch.Tensor, gradient: torch.Tensor, shards: Sequence[Shard]
    ) -> dict[int, OutputGradients]:
        """Return the gradients of the shards' outputs, of a backward of `loss` that begins with `gradient`.

        Outputs that the loss does not use have none. For an output without rows, the first shard gets the gradient,
        and the others zeros. Raises ModelError if the loss depends on no output that has a graph.
        """
        if not loss.requires_grad:
            raise ModelError("the loss does not depend on any parameter that is trained")
        with reraise_as("the loss: backward"):
            found = torch.autograd.grad(loss, list(self.asking.values()), gradient, allow_unused=True)
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
        described = {path: Form(leaf.shape, leaf.dtype) for path, leaf in tensors.items()}
        with_graph = [path for path, leaf in tensors.items() if leaf.requires_grad]
        number = output.shard.shard  # makes objects, which are not sent, others in each shard
        constants = {
            key: value if _is_plain(value) else f"{a_kind(value)} of shard {number}"
            for key, value in constants_of(form).items()
        }
        lists = [".".join(map(str, keys)) for keys, node in all_nodes(form) if _is_list(node, output.shard.rows)]
        forms.append(_Form(number, output.shard.rows, described, with_graph, constants, lists))
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
    pieces: dict[int, _Piece] = {}
    for theirs, raw in zip(everybodys, _exchanged(here, everybodys, device), strict=True):
        each = iter(views(raw, (form for piece in theirs for form in piece.leaves.values())))
        for piece in theirs:
            # Through `.data`: a loss may write one, and views of the same bytes would all count as written.
            pieces[piece.shard] = piece, {path: next(each).data.to(place) for path in piece.leaves}
    return _joined([pieces[shard] for shard in sorted(pieces)], spec, batches)


def _is_plain(constant: Any) -> bool:
    return is_plain(constant) or isinstance(constant, np.generic)


def _is_list(node: TreeSpec, rows: int) -> bool:
    """Return whether a node is a list or tuple of numbers or texts, one for each row."""
    are_plain = all(child.kind == "constant" and _is_plain(child.value) for child in node.children)
    return node.kind in ("list", "tuple") and len(node.children) == rows and are_plain


def _as_tensor(path: str, leaf: Any) -> torch.Tensor:
    if (why := why_no_rows(leaf)) is not None:
        raise ModelError(f"{output_at(path)} is {why}; over: batch needs tensors with a row for each sample")
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
    sizes = [sum(room(leaf) for form in theirs for leaf in form.leaves.values()) for theirs in forms]
    row = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    row[: len(sent)] = sent
    received = torch.empty(len(forms), max(sizes), dtype=torch.uint8, device=device)
    with waiting("the other workers' outputs"):
        all_gather(received.view(-1), row, group=everyone())
    yield from received


def _joined(pieces: list[_Piece], spec: TreeSpec, batches: WholeBatches) -> MergedBatch:
    batch_dim, rows = batches.batch_dim, [form.rows for form, _ in pieces]
    (first, names), *others = ((form, list(form.leaves)) for form, _ in pieces)
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
    for path in dict.fromkeys(path for form, _ in pieces for path in form.with_graph):
        if path.split(".")[0] == OUTPUTS:
            whole[path] = asking[path] = whole[path].detach().requires_grad_()
    starts = dict(zip((form.shard for form, _ in pieces), [sum(rows[:at]) for at in range(len(rows))], strict=True))
    outputs, target = unflatten(_with_lists(spec, "", lists), [whole[path] for path in spec.paths])
    return MergedBatch(outputs, target, sum(rows), starts, first.shard, asking, dims)


def _dim_of_rows(path: str, pieces: Sequence[tuple[_Form, torch.Tensor]], batches: WholeBatches) -> int | None:
    """Return the dimension of a leaf that holds its rows; None if it has none, and so one form in all shards."""
    has_rows = batches.rows.get(path)
    dims = {row_dim(piece.shape, batches.batch_dim) for _, piece in pieces}
    dim = dims.pop() if len(dims) == 1 and has_rows is not False else None
    if dim is not None and all(piece.shape[dim] == form.rows for form, piece in pieces):
        return dim
    (form, piece), *others = pieces
    for other, theirs in others:
        if (theirs.shape, theirs.dtype) != (piece.shape, piece.dtype):
            raise ModelError(
                f"{output_at(path)} is {dtypes_and_sizes(piece)} in shard {form.shard}, of {form.rows} rows, and "
                f"{dtypes_and_sizes(theirs)} in shard {other.shard}, of {other.rows}: it must have one row for each "
                "sample, or one size and dtype in all shards"
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
                raise ModelError(f"{output_at(path)} is {what}: {OF_ROWS}")
    pairs = [(path, form.shard, tensors[path], leaves[path]) for path in paths for form, tensors in others]
    if not pairs:
        return
    # A GPU is waited for once, however many they are.
    same = torch.stack([(as_bytes(theirs) == as_bytes(mine)).all() for *_, theirs, mine in pairs]).tolist()
    if not all(same):
        path, shard, *_ = pairs[same.index(False)]
        raise ModelError(
            f"{output_at(path)} has no row for each sample, and is not the same in the shards {first.shard} and "
            f"{shard}: {OF_ROWS}"
        )


class BatchLoss(ShardLoss):
    """The module that DDP wraps if the loss is over the batch; a shard's backward begins with its outputs' gradients.

    A pass first calls `prepare`, which runs all shards, and then the module for each shard, with its number. Without
    a number, as for a dummy batch, the loss is the sum of all outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        measures: Metrics,
        job: Job,
        device: torch.device,
        over_batch: Mapping[str, Compare] | None = None,
    ) -> None:
        super().__init__(model, step, measures, job, device)
        self.is_of_rows = False
        self.over_batch = functions = over_batch or build_over_batch(job, self._device)
        self._of_batch = functions["loss"]
        self.beside = modules_beside(job, step, {**measures.functions, **functions})
        self._batch_dim = job.batch_dim
        self._seed = job.seed
        self._aligns = must_align(job, device)
        self._gradients: dict[int, OutputGradients] = {}
        self._dims: Mapping[str, int | None] = {}
        self.value: torch.Tensor | None = None  # the loss of the step's batch
        self._kept: StepOutput | None = None

    def run(self, batch: Any) -> StepOutput:
        """Return what the step gives of a shard: outputs, and maybe a target."""
        step_output = super().run(batch)
        if step_output.loss is not None or step_output.outputs is None:
            raise ModelError(
                "with a loss over the batch, step (in a loop, the loss function) returns a mapping with 'outputs', "
                "and maybe 'target', which the loss gets once those of all shards are there"
            )
        return step_output

    def prepare(
        self,
        replica: Replica,
        loaded: LoadedStep,
        of_loss: OfLoss,
        number: int,
        rows: Mapping[str, bool] = NO_ROWS,
        may_keep: bool = True,
    ) -> tuple[LoadedStep, bool]:
        """Run the shards forward, and compute the loss of the whole batch, so that each has its outputs' gradients.

        A worker with a single shard keeps its graph, and runs it only here; returns whether it does. It does not if
        shard 0 has no rows, so that the state stays. `of_loss` makes the gradient with which the backward begins.
        `number` is that of the step's pass. `rows` says by path which outputs have rows, as far as that is known.
        Every rank calls this.
        """
        loaded = loaded._replace(loaded=list(loaded.loaded))
        filled = [part for part in loaded.loaded if part.shard.rows]
        dummies, run = replica.dummies(loaded.step, len(filled)), replica.forwards.gathering(self.run)
        is_kept = may_keep and not loaded.lacks_shard_0 and len(filled) + len(dummies) == 1
        replica.clock.enter(Part.FORWARD)
        replica.begin(len(filled) if is_kept else 2)
        own: list[ShardOutput] = []
        for turn in replica.rounds(loaded, dummies):
            output = replica.run(turn.shard, run, turn.batch if is_kept else copied(turn.batch), number=number)
            if turn.shard is not None:
                own.append(detached(output, turn.shard, not is_kept))
            if is_kept:
                self._kept = output
            del output  # and its graph
        if is_kept:
            replica.leave_state()
        else:
            replica.restore()
        batches = WholeBatches(self._batch_dim, rows)
        replica.run_batch(loaded.step, self._take, loaded.whole, own, batches, of_loss, number)
        return loaded, is_kept

    def _take(
        self, whole: Shard, own: Sequence[ShardOutput], batches: WholeBatches, of_loss: OfLoss, number: int
    ) -> None:
        """Compute the loss of the whole batch; `own` are this worker's shards. Every rank calls this.

        `of_loss` makes the gradient with which the loss's backward begins. `number` is that of the step's pass.
        """
        self._gradients, self.value = {}, None
        merged = merged_batch(own, self._device, batches)
        if merged is None:
            return
        seed_of_batch(self._seed, whole, self._device, number)
        with self._cast():
            loss = merged.measure("the loss", self._of_batch)
        self._gradients = merged.gradients(loss, of_loss(loss, 1), [output.shard for output in own])
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

        Before they are known, it gives those of the sum of all outputs.

        Raises ModelError if the outputs have another form than in the first forward.
        """
        if rows == 0:
            return super().forward(batch, rows)
        kept, self._kept = self._kept, None
        step_output = self.run(batch) if kept is None else kept
        outputs = step_output.outputs
        given = None if shard is None else self._gradients.get(shard)
        loss = _sum_of(outputs) if given is None else _giving(outputs, given)
        measured = [Weighted(torch.zeros(()) if self.value is None else self.value * rows, rows)]
        if self.measures.functions:
            with torch.no_grad(), self._cast():
                measured += self.measures(step_output, rows)
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


def shard_loss(model: nn.Module, step: Step, measures: Metrics, job: Job, device: torch.device) -> ShardLoss:
    """Return the module that runs a shard of the job forward."""
    return (BatchLoss if job.loss_over_batch else ShardLoss)(model, step, measures, job, device)
