"""Sum the shards' gradients to the whole batch's gradient, with the same bits on any number of workers.

`Reduction` is what a pass over a step's shards calls; `DdpReduction` is the one of several workers. DDP passes each
bucket to a communication hook, a `Reducer`, as soon as its gradients are ready. What a worker's last backward has
left out gets a gradient that adds nothing after it, so that DDP reduces every bucket in every step.

With `bitwise`, the hook goes on with the fixed tree of `engine.sums.tree_sum` over the workers (`TreeReducer`).

The step's statistics go with the gradients, in a `StatsBucket`, without a collective of their own. So does which
parameters each worker used: one that no worker used has no gradient, as in one process.
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from dp_ray.engine.alignment import align_gradients, layout_of, set_strides
from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.buffers import modules_beside
from dp_ray.engine.forward.model import autocast
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.forward.step import Compare, Metrics, Row, Step, StepOutput, UsersPair, Weighted, row_of, run_step
from dp_ray.engine.loads.loading import OverlappedRead
from dp_ray.engine.sums.gradient_hooks import InEachBackward
from dp_ray.engine.sums.tree_sum import ShardSums, Sums, TreeExchange, sum_sparse, zeros_that_add_nothing
from dp_ray.engine.sums.votes import StatsBucket
from dp_ray.engine.world import World, begin_sum, everyone, is_gpu
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.tree import Node, nodes_by_rank
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import local
from dp_ray.tensors.flat import FlatLayout
from dp_ray.text import listed

Begun = dist.Work | Sums  # a bucket's sum, which can be waited for
Work = dist.Work | None
OfLoss = Callable[[torch.Tensor, int], torch.Tensor]  # makes the gradient at a loss, with which its backward begins
NOTHING: AbstractContextManager[Any] = nullcontext()
GRADIENTS = "the other workers' gradients"
REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass
class ShardResult:
    """The results of the last shard; `row` has the sums and weights of all measures.

    If the weight of its loss is 0, it `is_nothing`: its gradient, which may be NaN, must not count. An object of its
    own, because setting an attribute of a module is slow.
    """

    step_output: StepOutput = field(default_factory=StepOutput)
    row: Row | None = None
    is_nothing: bool = False


class ShardLoss(nn.Module):
    """The module that DDP wraps: a shard's batch in, its loss out; a worker without rows passes None and 0 rows."""

    _step: Step

    def __init__(self, model: nn.Module, step: Step, measures: Metrics, job: Job, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_step"] = step  # no submodule: DDP would sum the gradients of a step that is a module
        self.beside = modules_beside(job, step, measures.functions)
        self.measures = measures
        self.is_of_rows = not measures.is_sum  # whether a pass divides its gradients by rows
        self._cast = nullcontext if job.precision == "fp32" else partial(autocast, job.precision, device)
        self._device = device
        self.bucket_cap_mb = job.bucket_cap_mb
        self.stats_parameter: nn.Parameter | None = None  # of a StatsBucket, where DDP finds it
        self.result = ShardResult()
        self.over_batch: Mapping[str, Compare] = {}  # the functions that see the whole batch

    def run(self, batch: Any) -> StepOutput:
        """Return what the step gives of a shard."""
        with self._cast():
            return run_step(self._step, self.model, batch)

    def forward(self, batch: Any, rows: int, shard: int | None = None) -> torch.Tensor:
        """Return the sum of the shard's losses, and set `result`; of 0 rows, a zero without a graph.

        `shard` is its number. Raises ModelError if the loss depends on no trained parameter.
        """
        if rows == 0:
            return torch.zeros((), device=self._device)
        with self._cast():
            step_output = run_step(self._step, self.model, batch)
            loss = self.measures.loss(step_output, rows)
        is_nothing = type(loss) is UsersPair and loss.is_nothing()
        measured = [Weighted(torch.zeros_like(loss.sum.detach()), 0.0) if is_nothing else loss]
        if self.measures.functions:
            with torch.no_grad():
                measured += self.measures(step_output, rows)
        self.result.is_nothing = is_nothing
        self.result.row = row_of(measured, self._device)
        self.result.step_output = step_output
        if not loss.sum.requires_grad:
            trained = [name for name, each in self.model.named_parameters() if each.requires_grad]
            raise ModelError(
                f"the loss does not depend on any parameter that is trained ({listed(trained)}): the forward does "
                "not use them, or detaches what it computes with them"
            )
        return loss.sum


@dataclass(frozen=True)
class Trained:
    """What a pass trains, and the numbers that are summed beside its gradients.

    `parameters` are those of the loss's model that require a gradient, by name; of these `sparse` have sparse ones.
    `sums` add the shards by the fixed tree; without them autograd does. `ahead` reads a batch while others are waited
    for. With `aligns`, each summed gradient begins at a multiple of 16 bytes (`engine/alignment.py`).
    """

    loss: ShardLoss
    parameters: dict[str, nn.Parameter]
    sparse: list[nn.Parameter]
    sums: ShardSums | None
    state: StepState
    clock: StepClock
    ahead: OverlappedRead | None = None
    aligns: bool = False


class Reduction:
    """The reduction on a single worker: autograd adds the shards' gradients, or the fixed tree does.

    A pass calls `begin`, in each of its rounds `called` and then `backward`, and at last `finish`.
    """

    exchange: TreeExchange | None = None  # to be closed after the last pass

    def __init__(self, trained: Trained) -> None:
        self.called: Callable[..., torch.Tensor] = trained.loss  # with a shard's batch, rows and number
        self.trained = trained
        self.sums = trained.sums
        self._leaves: Sequence[Node] = ()

    def begin(self, step: int, shards: Sequence[int], filled: int, rounds: int) -> None:
        """Begin step `step`, in which the first `filled` shards have rows.

        This worker runs `shards`, and so many `rounds`: some without rows, for which others wait.
        """
        if self.sums is not None:
            self._leaves = self.sums.leaves(shards)

    def backward(
        self, shard: int | None, loss: torch.Tensor, gradient: torch.Tensor, stats: torch.Tensor | None = None
    ) -> None:
        """Run the backward of a round, which begins with the loss's `gradient`; without rows it has no `shard`.

        The last round gives `stats`: in its backward the sum over the workers of the gradients and of `stats` begins.
        """
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        if self.sums is not None and shard is not None:
            for node in self._leaves:  # else autograd is to add the next shard's to these
                if node[1] == shard + 1:
                    self.sums.move(node)

    @contextmanager
    def adding_nothing(self) -> Iterator[None]:
        """Replace each gradient of a backward in the block by zeros, whatever it is.

        The backward runs all the same: other workers may wait for its collectives, and a parameter that it reaches
        has been used.
        """
        handles = [parameter.register_hook(_nothing) for parameter in self._reached()]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _reached(self) -> list[torch.Tensor]:
        """Return the tensors to which a backward gives the parameters' gradients."""
        return list(self.trained.parameters.values())

    def finish(self, stats: torch.Tensor) -> None:
        """Wait for the sums over the workers, and set all gradients."""
        if self.trained.sparse:
            sum_sparse(self.trained.sparse)
        if self.sums is not None:
            self.sums.give()
        if self.trained.aligns:
            align_gradients(self.trained.parameters.values())


class DdpReduction(Reduction):
    """The reduction over several workers: DDP reduces each bucket as soon as the step's last backward fills it.

    `num_stats` numbers are to be summed beside the gradients. If `finds_unused` is False, a parameter that a worker
    leaves unused is an error; if "auto", one that no worker uses in a step after the first is told once.
    """

    def __init__(
        self, trained: Trained, world: World, finds_unused: bool | str, num_stats: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(trained)
        # In the tree of three workers and more, one without rows sends nothing; but it may vote to stop.
        self._sends_stats_along = trained.sums is None or world.world_size == 2
        # On CPUs a worker uses the time until the sums arrive, and to start a collective takes 0.3 ms of it. On GPUs
        # the backward itself waits for the other workers, and a later send would wait for it.
        self._waits_later = not is_gpu(world.device)
        sparse = set(map(id, trained.sparse))
        reduced = {name: param for name, param in trained.parameters.items() if id(param) not in sparse}
        self._unused = UnusedParameters(reduced, finds_unused, say)
        self._stats = StatsBucket(num_stats if self._sends_stats_along else 0, len(reduced), world.device)
        self._ddp = wrapped(trained, self._stats)
        self.called = self._ddp
        if trained.sums is None:
            self._reducer = Reducer(trained.clock, self._waits_later)
        else:
            self._reducer = tree = TreeReducer(trained, world.world_size, world.rank, self._waits_later)
            self.exchange = tree.exchange
        self._ddp.register_comm_hook(None, self._reducer.hook)
        self._step, self._left = 0, 1  # rounds whose backward is to come
        self._adds = False  # whether several shards' gradients are added here
        self._work: Work = None
        for parameter in reduced.values():
            if 1 in parameter.size():
                hook = InEachBackward(set_strides, *layout_of(parameter))
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, step: int, shards: Sequence[int], filled: int, rounds: int) -> None:
        """Begin a step, in the hook too."""
        super().begin(step, shards, filled, rounds)
        self._step, self._left, self._adds = step, rounds, len(shards) > 1
        self._ddp.require_backward_grad_sync = rounds == 1  # a forward prepares for it
        self._reducer.begin(filled, self._leaves[-1] if self._leaves else None)

    def backward(
        self, shard: int | None, loss: torch.Tensor, gradient: torch.Tensor, stats: torch.Tensor | None = None
    ) -> None:
        """Run a round's backward; in the last one's DDP reduces, and `stats` and buffers go with it or after it."""
        if stats is None:
            super().backward(shard, loss, gradient)
            self._left -= 1
            self._ddp.require_backward_grad_sync = self._left == 1
            return
        if not self._waits_later:
            self._send(stats)
        with waiting(GRADIENTS):
            if loss.requires_grad:  # else this worker has no rows
                loss.backward(gradient)  # type: ignore[no-untyped-call]
            missing, used = self._unused.find(self._step, loss, self._adds, self.sums)
            frozen = [parameter for parameter in missing if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            zeros = [zeros_that_add_nothing(parameter.detach()) for parameter in missing]
            torch.autograd.backward([self._stats.parameter, *missing], [self._stats.gradient(stats, used), *zeros])
            for parameter in frozen:
                parameter.requires_grad_(False)
        assert self._reducer.saw_last
        if self._waits_later:
            self._send(stats)
            if self.trained.ahead is not None:
                self.trained.ahead.read()

    def _send(self, stats: torch.Tensor) -> None:
        """Start to sum the stats over the workers, unless they go with the gradients, and to share the buffers."""
        self._work = None if self._sends_stats_along else begin_sum(stats)
        self.trained.state.share()

    def finish(self, stats: torch.Tensor) -> None:
        """Wait for the buckets; then unload the stats' bucket, and sum sparse gradients."""
        with waiting(GRADIENTS):
            self._reducer.finish()
            # DDP puts its parameter into any of the buckets, so it is there for certain only after all of them.
            used = self._stats.unload(stats, bool(self._unused.names))
            if self._work is not None:
                self._work.wait()
        self._unused.drop(self._step, used)
        if self.trained.sparse:
            with waiting("the other workers' sparse gradients"):
                sum_sparse(self.trained.sparse)
        if self.sums is not None:
            self.sums.held = {}
        if self.trained.aligns:  # of most a bucket's view
            align_gradients(self.trained.parameters.values())


class UnusedParameters:
    """The parameters for whose gradients DDP waits, and which of them this worker has not used in a pass.

    `find` gives after the last backward what DDP lacks; `drop` goes by what the other workers have used. If
    `finds` is False, an unused one is an error; if "auto", one that no worker uses after the first pass is told once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], finds: bool | str, say: Callable[[str], None]) -> None:
        self._parameters, self._finds, self._say = parameters, finds, say
        self.names: list[str] = []  # of those that this worker has not used in this pass
        self._has_rows = True  # this worker, in this pass
        self._known: set[str] | None = None  # what no worker used in the first pass; None before it
        self._walked: dict[tuple[str, ...], list[str]] = {}  # of what lacks a gradient, what the graph did not reach

    def find(
        self, step: int, loss: torch.Tensor, adds: bool, sums: ShardSums | None
    ) -> tuple[list[nn.Parameter], list[bool] | None]:
        """Return what the backward of `loss` has not reached, and which parameters are used; None if all are.

        With `adds` the worker has run several shards; `sums` hold the gradients of earlier ones. Raises ModelError,
        naming the unused parameters, if the job says that there are none.
        """
        # DDP moves each gradient that it gets into a view of a bucket.
        left = [
            name
            for name, parameter in self._parameters.items()
            if parameter.grad is None or (adds and not parameter.grad._is_view())
        ]
        self._has_rows = loss.requires_grad
        # An earlier shard of this worker, whose gradients the tree holds, may have used one.
        held = set() if sums is None or not left else sums.used()
        self.names = [
            name for name in left if (param := self._parameters[name]).grad is None and id(param) not in held
        ]
        if self.names and self._finds is False and self._has_rows:
            raise ModelError(
                f"step {step}: parameters were not used: {listed(self.names)}; set "
                "find_unused_parameters: true, or leave it out"
            )
        if not left:
            return [], None
        missing, key = left, tuple(left)
        if self._has_rows:
            # A function of the model's may return None as a parameter's gradient. DDP takes that for a zero.
            if key not in self._walked:  # to walk through a graph takes a microsecond for each of its functions
                reached = leaves_of(loss)
                self._walked[key] = [name for name in left if id(self._parameters[name]) not in reached]
            missing = self._walked[key]
        used = [name not in self.names for name in self._parameters] if self.names else None
        return [self._parameters[name] for name in missing], used

    def drop(self, step: int, used: Sequence[bool]) -> None:
        """Drop the gradient of each parameter that no worker used; `used` is of all workers.

        Only a worker that has left a parameter unused asks: if no worker used it, that are all.
        """
        by_name = dict(zip(self._parameters, used, strict=False))
        nowhere = [name for name in self.names if not by_name[name]]
        for name in self.names:
            parameter = self._parameters[name]
            if name in nowhere:
                parameter.grad = None
            elif not parameter.requires_grad:
                if self._has_rows:
                    raise ModelError(
                        f"step {step}: {name} is frozen on this worker (requires_grad is False), and another "
                        "one has given it a gradient; freeze it on all workers before the same step"
                    )
                parameter.requires_grad_()  # the forward that lets it thaw has not run here
        if self._known is None:
            self._known = set(nowhere)
            if self._finds == "auto" and nowhere:
                self._say(
                    f"step {step}: no shard used {listed(nowhere)}, so the training does not change that; if it is "
                    "meant, find_unused_parameters: true leaves this line out"
                )
        elif self._finds == "auto" and (new := [name for name in nowhere if name not in self._known]):
            self._finds = True
            self._say(
                f"step {step}: no shard used {listed(new)}, unlike in an earlier step; what is unused has no "
                "gradient in a step, and is not updated, as in one process"
            )


def leaves_of(tensor: torch.Tensor) -> set[int]:
    """Return the ids of the leaves that the graph of a tensor reaches."""
    leaves: set[int] = set()
    nodes: list[Any] = [tensor.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return leaves


def wrapped(trained: Trained, stats: "StatsBucket") -> DistributedDataParallel:
    """Return DDP around a shard's loss; sparse gradients are left to `sum_sparse`."""
    loss = trained.loss
    # DDP reduces the parameters of what it wraps. This one comes last: its gradient does.
    loss.stats_parameter = stats.parameter
    # NCCL cannot sum sparse tensors, and with DDP no worker may lack a gradient.
    sparse = set(map(id, trained.sparse))
    ignored = [name for name, parameter in loss.named_parameters(remove_duplicate=False) if id(parameter) in sparse]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, ignored)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), waiting("the other workers to make their DDP"):
        # torch 2.13 deprecates `broadcast_buffers` for a parameter that older versions do not have.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            loss,
            process_group=everyone(),
            broadcast_buffers=False,
            init_sync=False,
            bucket_cap_mb=loss.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )


@dataclass(eq=False)
class Reducer:
    """DDP's communication hook: it sums each bucket by all-reduce, in its memory, which is the gradients'.

    DDP's own hook averages over the workers. Here each loss is already divided by the rows of the whole batch.

    DDP's backward waits for the sums; or with `waits_later` the worker does after it, and can do something else
    before. The step's exchange begins on `clock` once all of its gradients are there.
    """

    clock: StepClock
    waits_later: bool
    saw_last: bool = False
    _begun: list[Begun] = field(default_factory=list)

    def begin(self, filled: int, last: Node | None) -> None:
        """Begin a step in which the first `filled` shards have rows.

        `last` is this worker's last node, whose gradients DDP puts into the buckets; None if it has no rows.
        """
        self.saw_last = False
        self._begun = []

    def hook(self, _: object, bucket: GradBucket) -> Sums:
        """Start to sum a bucket."""
        begun = self._begin(bucket)
        if bucket.is_last():
            self.saw_last = True
            self.clock.enter(Part.EXCHANGE)
        if not self.waits_later:
            if isinstance(begun, torch.futures.Future):
                return begun
            first: Sums = begun.get_future().then(lambda tensors: tensors.value()[0])
            return first
        self._begun.append(begun)
        # DDP waits at the backward's end for what its hooks return: nothing here, so the worker can read meanwhile.
        at_once: Sums = torch.futures.Future()
        at_once.set_result(bucket.buffer())
        return at_once

    def _begin(self, bucket: GradBucket) -> Begun:
        return begin_sum(bucket.buffer())

    def finish(self) -> None:
        """Wait for the buckets that the backward did not wait for."""
        for begun in self._begun:
            begun.wait()


class TreeReducer(Reducer):
    """Sums buckets in the order of the tree."""

    def __init__(self, trained: Trained, world_size: int, rank: int, waits_later: bool) -> None:
        super().__init__(trained.clock, waits_later)
        assert trained.sums is not None
        self._sums = sums = trained.sums
        self._world_size = world_size
        self._rank = rank
        self._layouts: dict[tuple[int, ...], FlatLayout] = {}  # of buckets, by their parameters
        self._nodes: list[list[Node]] = []
        self._plans: dict[int, list[list[Node]]] = {}
        self._last: Node | None = None
        # The sum of two is the same in any order; but below fp32 NCCL may round otherwise, as NVLink SHARP does.
        is_pair = world_size == 2 and all(parameter.dtype.itemsize >= 4 for parameter in sums.parameters)
        self.exchange = None if is_pair else TreeExchange()

    def begin(self, filled: int, last: Node | None) -> None:
        """Begin a step; the workers' nodes depend on how many shards have rows."""
        super().begin(filled, last)
        self._last = last
        if filled not in self._plans:  # computed on every worker alike
            self._plans[filled] = nodes_by_rank(self._sums.root[1], self._world_size, filled)
        self._nodes = self._plans[filled]

    def _begin(self, bucket: GradBucket) -> Begun:
        flat, parameters = bucket.buffer(), bucket.parameters()
        layout = self._layout(parameters)
        views = layout.views(flat)
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is None:  # not used: DDP leaves +0 there, but only -0 adds nothing
                view.zero_().neg_()
        mine = self._sums.of_bucket(parameters, self._last, list(views), self._nodes[self._rank])
        if self.exchange is None:
            return begin_sum(flat)
        # The sum that holds the last shard is in the bucket already. Each other sum gets a buffer of its own.
        rows = [
            flat
            if sums and sums[0] is views[0]
            else layout.put(zeros_that_add_nothing(flat), sums or [None] * len(views))
            for sums in mine
        ]
        return self.exchange.begin(flat, rows, self._nodes, self._sums.root)

    def _layout(self, parameters: Sequence[torch.Tensor]) -> FlatLayout:
        """Return where DDP puts the gradients of a bucket: with their own strides, if these leave no gaps.

        `bucket.gradients()` ignores strides and complex dtypes: it gives contiguous, real views. They begin anywhere,
        which matters to no sum of two: only after `finish` are they reduced further.
        """
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            strides = [layout_of(parameter)[1] for parameter in parameters]
            self._layouts[key] = FlatLayout(parameters, aligned=1, strides=strides)
        return self._layouts[key]


def _nothing(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return what stands for a gradient that adds nothing; of a sparse one, without any row."""
    if gradient is None:  # as FSDP gives of a parameter that the forward has not used
        return None
    return torch.zeros_like(gradient) if gradient.is_sparse else zeros_that_add_nothing(gradient)


def numbers_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient that this worker holds, as a dense tensor that can be changed in place."""
    return local(gradient.values() if gradient.is_sparse else gradient)
