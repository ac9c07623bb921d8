"""Sum the shards' gradients to the whole batch's gradient, with the same bits on any number of workers.

`Reduction` is what a pass over a step's shards calls; `DdpReduction` is the one of several workers. DDP passes each
bucket to a communication hook, a `Reducer`, as soon as its gradients are ready. What a worker's last backward has
left out gets a gradient that adds nothing after it, so that DDP reduces every bucket in every step.

With `bitwise`, the hook goes on with the fixed tree of `engine.tree_sum` over the workers (`TreeReducer`).

The step's statistics go with the gradients, in a `StatsBucket`, without a collective of their own. So does which
parameters each worker used: one that no worker used has no gradient, as in one process.
"""

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from dp_ray.engine.alignment import align_gradients
from dp_ray.engine.beside import modules_beside
from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward_state import ForwardState
from dp_ray.engine.gradient_hooks import InEachBackward
from dp_ray.engine.host_copy import side_stream
from dp_ray.engine.loading import LoadedStep, OverlappedRead
from dp_ray.engine.model import autocast
from dp_ray.engine.replica import Replica
from dp_ray.engine.step import Compare, Metrics, Row, Step, StepOutput, UsersPair, Weighted, row_of, run_step
from dp_ray.engine.tree_sum import Gradients, ShardSums, add, sparse_modules, tree_sum, zeros_that_add_nothing
from dp_ray.engine.world import World, begin_sum, everyone, is_gpu, new_group, without_frames
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.tree import Node, fold, nodes_by_rank
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_dense, local
from dp_ray.text import listed

Sums = torch.futures.Future[torch.Tensor]
Begun = dist.Work | Sums  # a bucket's sum, which can be waited for
Work = dist.Work | None
Seed = Callable[[torch.Tensor, int], torch.Tensor]
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

    is_of_rows = True  # whether the pass divides its gradients by rows; else they are the whole batch's

    def __init__(self, model: nn.Module, step: Step, measures: Metrics, job: Job, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_step"] = step  # no submodule: DDP would sum the gradients of a step that is a module
        self.beside = modules_beside(job, step, measures.functions)
        self._measures = measures
        self._autocast = None if job.precision == "fp32" else (job.precision, device)
        self._device = device
        self.bucket_cap_mb = job.bucket_cap_mb
        self.stats_parameter: nn.Parameter | None = None  # of a StatsBucket, where DDP finds it
        self.result = ShardResult()
        self.over_batch: Mapping[str, Compare] | None = None  # the functions that see the whole batch

    def prepare(
        self, replica: Replica, loaded: LoadedStep, seed: Seed, number: int, may_keep: bool
    ) -> tuple[LoadedStep, bool]:
        """Prepare a pass before its first shard; return the step, and whether its only forward has run.

        `seed` makes the gradient with which a backward begins. `number` is that of the step's pass. A graph may be
        kept for the pass if it `may_keep` one. Every rank calls this.
        """
        return loaded, False

    def forward(self, batch: Any, rows: int, shard: int | None = None) -> torch.Tensor:
        """Return the sum of the shard's losses, and set `result`; of 0 rows, a zero without a graph.

        `shard` is its number. Raises ModelError if the loss depends on no trained parameter.
        """
        if rows == 0:
            return torch.zeros((), device=self._device)
        with NOTHING if self._autocast is None else autocast(*self._autocast):
            step_output = run_step(self._step, self.model, batch)
            loss = self._measures.loss(step_output, rows)
        is_nothing = type(loss) is UsersPair and loss.is_nothing()
        measured = [Weighted(torch.zeros_like(loss.sum.detach()), 0.0) if is_nothing else loss]
        if self._measures.functions:
            with torch.no_grad():
                measured += self._measures(step_output, rows)
        self.result.is_nothing = is_nothing
        self.result.row = row_of(measured, self._device)
        self.result.step_output = step_output
        if not loss.sum.requires_grad:
            raise ModelError("the loss does not depend on any parameter that is trained")
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
    state: ForwardState
    clock: StepClock
    ahead: OverlappedRead | None = None
    aligns: bool = False


class Reduction:
    """The reduction on a single worker: autograd adds the shards' gradients, or the fixed tree does.

    A pass calls `begin`; for each shard it runs forward and backward within `shard`, the last of them by
    `last_backward`, which a worker without rows calls too; then it reads `summed` to its end.
    """

    def __init__(self, trained: Trained) -> None:
        self.called: Callable[..., torch.Tensor] = trained.loss  # with a shard's batch, rows and number
        self.trained = trained
        self.sums = trained.sums
        self._leaves: Sequence[Node] = ()

    def begin(self, step: int, shards: Sequence[int], filled: int) -> None:
        """Begin step `step`, in which the first `filled` shards have rows and this worker runs `shards`."""
        if self.sums is not None:
            self._leaves = self.sums.leaves(shards)

    def shard(self, shard: int | None, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of a shard's forward and backward; None for the shard of a round without rows.

        After it, the shard's gradients are taken, unless autograd is to add the next shard's to them.
        """
        return NOTHING if self.sums is None or shard is None else self._taking(shard)

    @contextmanager
    def _taking(self, shard: int) -> Iterator[None]:
        yield
        self._take(shard)

    def _take(self, shard: int) -> None:
        assert self.sums is not None
        for node in self._leaves:
            if node[1] == shard + 1:
                self.sums.take(node)

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

    def last_backward(self, loss: torch.Tensor, seed: torch.Tensor, stats: torch.Tensor) -> None:
        """Run the pass's last backward, which begins with the loss's gradient `seed`.

        In it the sum over the workers of the gradients and of `stats` begins.
        """
        loss.backward(seed)  # type: ignore[no-untyped-call]

    def summed(self, stats: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Wait for the sums over the workers; yield parameters as theirs are there, then set all gradients."""
        if self.trained.sparse:
            sum_over_workers(self.trained.sparse)
        if self.sums is not None:
            self.sums.finish()
        if self.trained.aligns:
            align_gradients(self.trained.parameters.values())
        return iter(())

    def close(self) -> None:
        """Stop the threads."""


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
        left_out = set(map(id, trained.sparse))
        self._reduced = {name: param for name, param in trained.parameters.items() if id(param) not in left_out}
        self._stats = StatsBucket(num_stats if self._sends_stats_along else 0, len(self._reduced), world.device)
        self._ddp = wrapped(trained, self._stats)
        self.called = self._ddp
        self._reducer = (
            Reducer(trained.clock, self._waits_later)
            if trained.sums is None
            else TreeReducer(trained, world.world_size, world.rank, self._waits_later)
        )
        self._ddp.register_comm_hook(None, self._reducer.hook)
        self._finds_unused, self._say = finds_unused, say
        self._unused: list[str] = []  # by this worker in this pass
        self._known: set[str] | None = None  # what no worker used in the first pass; None before it
        self._walked: dict[tuple[str, ...], list[str]] = {}
        self._step, self._adds, self._has_rows = 0, False, True
        self._work: Work = None
        for parameter in self._reduced.values():
            if 1 in parameter.size():
                hook = InEachBackward(_set_strides, *_layout(parameter))
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, step: int, shards: Sequence[int], filled: int) -> None:
        """Begin a step, in the hook too."""
        super().begin(step, shards, filled)
        self._step, self._adds = step, len(shards) > 1
        self._reducer.begin(filled, self._leaves[-1] if self._leaves else None)

    def shard(self, shard: int | None, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of a shard: DDP reduces in the last one's backward only, and takes its gradients."""
        return NOTHING if is_last else self._apart(shard)

    @contextmanager
    def _apart(self, shard: int | None) -> Iterator[None]:
        with self._ddp.no_sync():
            yield
        if self.sums is not None and shard is not None:
            self._take(shard)

    def last_backward(self, loss: torch.Tensor, seed: torch.Tensor, stats: torch.Tensor) -> None:
        """Run the last backward, in which DDP reduces; `stats` and buffers go with it, beside it, or after it."""
        if not self._waits_later:
            self._send(stats)
        with waiting(GRADIENTS):
            if loss.requires_grad:  # else this worker has no rows
                loss.backward(seed)  # type: ignore[no-untyped-call]
            self._complete(loss, stats)
        assert self._reducer.saw_last
        if self._waits_later:
            self._send(stats)
            if self.trained.ahead is not None:
                self.trained.ahead.read()

    def _complete(self, loss: torch.Tensor, stats: torch.Tensor) -> None:
        """Give DDP what the backward of `loss` has left out: gradients that add nothing, and the stats' bucket.

        Raises ModelError, naming the unused parameters, if the job says that there are none.
        """
        # DDP moves each gradient that it gets into a view of a bucket.
        left = [
            name
            for name, parameter in self._reduced.items()
            if parameter.grad is None or (self._adds and not parameter.grad._is_view())
        ]
        self._unused = [name for name in left if self._reduced[name].grad is None and not self._is_held(name)]
        self._has_rows = loss.requires_grad
        if self._unused and self._finds_unused is False and loss.requires_grad:
            raise ModelError(
                f"step {self._step}: parameters were not used: {listed(self._unused)}; set "
                "find_unused_parameters: true, or leave it out"
            )
        missing = [self._reduced[name] for name in self._not_reached(loss, left)] if left else []
        frozen = [parameter for parameter in missing if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        gradients = [zeros_that_add_nothing(parameter.detach()) for parameter in missing]
        used = [name not in self._unused for name in self._reduced] if self._unused else None
        torch.autograd.backward([self._stats.parameter, *missing], [self._stats.gradient(stats, used), *gradients])
        for parameter in frozen:
            parameter.requires_grad_(False)

    def _is_held(self, name: str) -> bool:
        """Return whether an earlier shard of this worker, whose gradients the tree holds, used a parameter."""
        if self.sums is None:
            return False
        number = list(self._reduced).index(name)  # with the tree all are dense, so all are here
        return any(sums[number] is not None for sums in self.sums.held.values())

    def _not_reached(self, loss: torch.Tensor, left: list[str]) -> list[str]:
        """Return those of the parameters `left` without a gradient that the backward has not reached.

        A function of the model's may return None as a parameter's gradient. DDP takes that for a zero.
        """
        if not loss.requires_grad:
            return left
        key = tuple(left)
        if key not in self._walked:  # to walk through a graph takes a microsecond for each of its functions
            reached = leaves_of([loss])
            self._walked[key] = [name for name in left if id(self._reduced[name]) not in reached]
        return self._walked[key]

    def _send(self, stats: torch.Tensor) -> None:
        """Start to sum the stats over the workers, unless they go with the gradients, and to share the buffers."""
        self._work = None if self._sends_stats_along else begin_sum(stats)
        self.trained.state.share()

    def summed(self, stats: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters of each bucket in turn; then unload the stats' bucket, and sum sparse gradients."""
        with waiting(GRADIENTS):
            for parameters in self._reducer.summed():
                mine = [parameter for parameter in parameters if parameter is not self._stats.parameter]
                if self.trained.aligns:
                    align_gradients(mine)
                yield mine
            # DDP puts its parameter into any of the buckets, so it is there for certain only after all of them.
            used = self._stats.unload(stats, bool(self._unused))
            if self._work is not None:
                self._work.wait()
        self._drop_unused(used)
        if self.trained.sparse:
            with waiting("the other workers' sparse gradients"):
                sum_over_workers(self.trained.sparse)
        if self.sums is not None:
            self.sums.held = {}
        if self.trained.aligns:  # of most a bucket's view; on a GPU the loop above had none
            align_gradients(self.trained.parameters.values())

    def _drop_unused(self, used: Sequence[bool]) -> None:
        """Drop the gradient of each parameter that no worker used; `used` is of all workers.

        Only a worker that has left a parameter unused asks: if no worker used it, that are all.
        """
        by_name = dict(zip(self._reduced, used, strict=False))
        nowhere = [name for name in self._unused if not by_name[name]]
        for name in self._unused:
            if name in nowhere:
                self._reduced[name].grad = None
            elif not self._reduced[name].requires_grad:
                if self._has_rows:
                    raise ModelError(frozen_apart(self._step, name))
                self._reduced[name].requires_grad_()  # the forward that lets it thaw has not run here
        if self._known is None:
            self._known = set(nowhere)
        elif self._finds_unused == "auto" and (new := [name for name in nowhere if name not in self._known]):
            self._finds_unused = True
            self._say(
                f"step {self._step}: no shard used {listed(new)}, unlike in an earlier step; what is unused has no "
                "gradient in a step, and is not updated, as in one process"
            )

    def close(self) -> None:
        """Stop the thread."""
        self._reducer.close()


def frozen_apart(step: int, name: str) -> str:
    """Return the text of an error: this worker has frozen a parameter, and another one trains it."""
    return (
        f"step {step}: {name} is frozen on this worker (requires_grad is False), and another one has given it a "
        "gradient; freeze it on all workers before the same step"
    )


def leaves_of(tensors: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Return, by their ids, the leaves that the graphs of these tensors reach."""
    leaves: dict[int, torch.Tensor] = {}
    nodes = [leaf.grad_fn for leaf in tensors if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    return leaves


def wrapped(trained: Trained, stats: "StatsBucket") -> DistributedDataParallel:
    """Return DDP around a shard's loss; sparse gradients are left to `sum_over_workers`."""
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
    _begun: list[tuple[Begun, list[torch.Tensor]]] = field(default_factory=list)

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
        self._begun.append((begun, bucket.parameters()))
        # DDP waits at the backward's end for what its hooks return: nothing here, so the worker can read meanwhile.
        at_once: Sums = torch.futures.Future()
        at_once.set_result(bucket.buffer())
        return at_once

    def _begin(self, bucket: GradBucket) -> Begun:
        return begin_sum(bucket.buffer())

    def summed(self) -> Iterator[list[torch.Tensor]]:
        """Wait for the buckets that the backward did not wait for; yield each one's parameters once it is summed."""
        for begun, parameters in self._begun:
            begun.wait()
            yield parameters

    def close(self) -> None:
        """Stop the threads."""


class TreeReducer(Reducer):
    """Sums buckets in the order of the tree."""

    def __init__(self, trained: Trained, world_size: int, rank: int, waits_later: bool) -> None:
        super().__init__(trained.clock, waits_later)
        assert trained.sums is not None
        self._sums = sums = trained.sums
        self._root = sums.root
        self._world_size = world_size
        self._rank = rank
        self._number = {id(parameter): number for number, parameter in enumerate(sums.parameters)}
        self._layouts = {id(parameter): _layout(parameter) for parameter in sums.parameters}
        self._nodes: list[list[Node]] = []
        self._plans: dict[int, list[list[Node]]] = {}
        self._last: Node | None = None
        # The sum of two is the same in any order; but below fp32 NCCL may round otherwise, as NVLink SHARP does.
        self._is_pair = world_size == 2 and all(parameter.dtype.itemsize >= 4 for parameter in sums.parameters)
        # A thread issues these collectives. All ranks must issue the collectives of a group in one order: hence a
        # group of its own.
        self._group = None if self._is_pair else new_group()
        self._thread = ThreadPoolExecutor(1, "reduce")

    def begin(self, filled: int, last: Node | None) -> None:
        """Begin a step; the workers' nodes depend on how many shards have rows."""
        super().begin(filled, last)
        self._last = last
        if filled not in self._plans:  # computed on every worker alike
            self._plans[filled] = nodes_by_rank(self._root[1], self._world_size, filled)
        self._nodes = self._plans[filled]

    def close(self) -> None:
        """Stop the thread."""
        # The group ends only with the process's others: a peer may still be reading the last exchange.
        self._thread.shutdown()

    def _begin(self, bucket: GradBucket) -> Begun:
        flat, parameters = bucket.buffer(), bucket.parameters()
        views = self._views(flat, parameters)
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is None:  # not used: DDP leaves +0 there, but only -0 adds nothing
                view.zero_().neg_()
        numbers = [self._number.get(id(parameter)) for parameter in parameters]
        held: dict[Node, Gradients] = {
            node: [None if number is None else sums[number] for number in numbers]
            for node, sums in self._sums.held.items()
        }
        if self._last is not None:
            held[self._last] = list(views)  # the last node's gradients are in the bucket itself
        mine = [fold(held, node, add) for node in self._nodes[self._rank]]
        if self._is_pair:
            return begin_sum(flat)
        return self._begin_exchange(flat, views, mine)

    def _begin_exchange(
        self, flat: torch.Tensor, views: list[torch.Tensor], mine: Sequence[Gradients | None]
    ) -> Sums:
        """Start to add this worker's sums of a bucket to the others', in the thread."""
        # The sum that holds the last shard is in the bucket already. Each other sum gets a buffer of its own.
        flats = [
            flat if sums and sums[0] is views[0] else _laid_out(flat, views, sums or [None] * len(views))
            for sums in mine
        ]
        is_on_gpu = flat.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[flat.device] if is_on_gpu else None
        )
        ready = torch.cuda.current_stream(flat.device).record_event() if is_on_gpu else None
        self._thread.submit(self._complete, future, flat, flats, ready)
        return future

    def _views(self, flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a bucket's gradients in DDP's layout: with the parameter's strides, if these leave no gaps.

        `bucket.gradients()` ignores strides and complex dtypes: it gives contiguous, real views. They begin anywhere,
        which matters to no sum of two: only `summed` gives them to what reduces.
        """
        numbers = _in_own_dtype(flat, parameters[0])
        views, offset = [], numbers.storage_offset()
        for parameter in parameters:
            size, strides = self._layouts.get(id(parameter)) or _layout(parameter)
            views.append(numbers.as_strided(size, strides, offset))
            offset += parameter.numel()
        return views

    def _complete(self, future: Any, flat: torch.Tensor, flats: list[torch.Tensor], ready: Any) -> None:
        try:
            if ready is None:
                future.set_result(tree_sum(flat, flats, self._nodes, self._root, self._group))
                return
            stream = side_stream(flat.device, "sums")  # one a GPU: a model may be on several
            # A new thread's current GPU is cuda:0: to come back to it would make a context there, half a gigabyte.
            with torch.cuda.device(flat.device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                for sent in flats:
                    sent.record_stream(stream)  # so that backward does not reuse their memory before they are sent
                future.set_result(tree_sum(flat, flats, self._nodes, self._root, self._group))
        except Exception as error:  # DDP raises it again where it waits for the bucket
            # Its frames hold the future, and a cycle through C++ is never collected: the group would stay, while its
            # peers wait to see it gone.
            without_frames(error)
            future.set_exception(error)


def _laid_out(flat: torch.Tensor, views: list[torch.Tensor], gradients: Gradients) -> torch.Tensor:
    """Return gradients in a new buffer with the bucket's layout; it adds nothing where a gradient is None.

    As in the bucket, they begin anywhere: they are added to others, and never reduced.
    """
    buffer = zeros_that_add_nothing(flat)
    numbers, start = _in_own_dtype(buffer, views[0]), views[0].storage_offset()
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is not None:
            numbers.as_strided(view.size(), view.stride(), view.storage_offset() - start).copy_(gradient)
    return buffer


def _layout(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return size and strides of a parameter's gradient in its bucket."""
    like = parameter.detach() if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    return like.size(), like.stride()


def _in_own_dtype(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View a bucket's memory in the dtype of its parameters: DDP views complex numbers as pairs of real ones."""
    return torch.view_as_complex(flat.view(-1, 2)) if like.is_complex() else flat


def _nothing(gradient: torch.Tensor) -> torch.Tensor:
    """Return what stands for a gradient that adds nothing; of a sparse one, without any row."""
    return torch.zeros_like(gradient) if gradient.is_sparse else zeros_that_add_nothing(gradient)


def _set_strides(size: torch.Size, strides: tuple[int, ...], parameter: torch.Tensor) -> None:
    """Give the gradient the strides of its bucket where these differ for dimensions of size 1 alone.

    Strides of such dimensions reach no element, so they may have any value: oneDNN and cuDNN give the gradient of a
    depthwise or 1x1 convolution other ones than its weight has. DDP compares all strides, and warns of a cost that
    does not exist. Strides that do differ stay, so that DDP warns of them.
    """
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return
    now = gradient.stride()
    if now != strides and all(
        stride == other for stride, other, length in zip(now, strides, size, strict=True) if length != 1
    ):
        gradient.as_strided_(size, strides)


ALIGNED = 16  # elements, so that the gradients after it in a bucket stay aligned
PIECE = torch.int16  # of a number; float32 holds each exactly


class StatsBucket:
    """A parameter that DDP treats as one of the model's: its gradient are numbers, and what is used.

    `count` numbers, float64, go in pieces of 16 bits. They are summed to the bit if each of them is 0 on all workers
    but one: sums of zeros and a piece are exact. Then come as many numbers as the model has parameters: 1 for one
    that the worker used, else 0.
    """

    def __init__(self, count: int, num_parameters: int, device: torch.device) -> None:
        self._pieces = count * torch.float64.itemsize // PIECE.itemsize
        self._end = self._pieces + num_parameters
        size = -(-self._end // ALIGNED) * ALIGNED
        self.parameter = nn.Parameter(torch.zeros(size, device=device, dtype=torch.float32))

    def gradient(self, numbers: torch.Tensor, used: Sequence[bool] | None) -> torch.Tensor:
        """Return what to sum: `numbers`, float64 and contiguous, and what is `used`; None if all parameters are."""
        gradient = torch.ones_like(self.parameter)
        if self._pieces:
            gradient[: self._pieces].copy_(numbers.view(PIECE).view(-1))
        if used is not None:
            gradient[self._pieces : self._end].copy_(torch.tensor(used))
        return gradient

    def unload(self, numbers: torch.Tensor, reads_used: bool) -> list[bool]:
        """Set the numbers to their sums, once the gradients are summed; return which parameters any worker used.

        Unless it `reads_used`, for which the host waits for a GPU, the list is empty.
        """
        sums, self.parameter.grad = self.parameter.grad, None  # else the next backward would add to it
        assert sums is not None
        if self._pieces:
            numbers.view(PIECE).view(-1).copy_(sums[: self._pieces])
        used: list[bool] = sums[self._pieces : self._end].bool().tolist() if reads_used else []
        return used


_UNUSED, _DENSE = -1, -2


def make_gradients_dense(model: nn.Module) -> None:
    """Set every embedding of the model to make dense gradients."""
    for module in sparse_modules(model):
        module.sparse = False


def sum_over_workers(parameters: Sequence[nn.Parameter]) -> None:
    """Set each sparse parameter's gradient to its sum over all workers; every rank calls this.

    The sum is sparse and coalesced; dense if it is dense on any worker; None if no worker used the parameter.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    group = everyone()
    if not parameters or group is None or group.size() == 1:
        return
    device = parameters[0].device
    # For a sparse gradient, the number of its rows.
    gradients = [parameter.grad for parameter in parameters]
    own = [_UNUSED if grad is None else grad.values().shape[0] if grad.is_sparse else _DENSE for grad in gradients]
    # All workers learn what each of them has: dense and sparse gradients take different collectives, and a worker
    # that went the other way would hang the rest.
    counts = torch.tensor(own, device=device)
    everybodys = [torch.empty_like(counts) for _ in range(group.size())]
    dist.all_gather(everybodys, counts, group=group)
    for parameter, theirs in zip(parameters, torch.stack(everybodys, 1).tolist(), strict=True):
        if _DENSE in theirs:
            dense = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dense = dense.to_dense() if dense.is_sparse else dense
            dist.all_reduce(dense, group=group)
            parameter.grad = dense
        else:
            parameter.grad = _gathered(parameter, theirs)


def numbers_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient that this worker holds, as a dense tensor that can be changed in place."""
    return local(gradient.values() if gradient.is_sparse else gradient)


def _gathered(parameter: nn.Parameter, counts: Sequence[int]) -> torch.Tensor | None:
    """Return one sparse gradient of all workers' rows; worker r has `counts[r]` of them."""
    most = max(counts)
    if most <= 0:
        return None
    width = parameter.shape[1:]
    # An all-gather takes tensors of one size: each worker pads its rows to the number of the worker with most.
    rows = torch.zeros(most, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(most, *width)
    if parameter.grad is not None:
        count = parameter.grad.values().shape[0]
        rows[:count] = parameter.grad.indices()[0]
        values[:count] = parameter.grad.values()
    all_rows, all_values = ([torch.empty_like(tensor) for _ in counts] for tensor in (rows, values))
    dist.all_gather(all_rows, rows, group=everyone())
    dist.all_gather(all_values, values.detach(), group=everyone())
    kept = [max(0, count) for count in counts]
    indices = torch.cat([tensor[:count] for tensor, count in zip(all_rows, kept, strict=True)])
    numbers = torch.cat([tensor[:count] for tensor, count in zip(all_values, kept, strict=True)])
    return torch.sparse_coo_tensor(indices[None], numbers, parameter.shape, check_invariants=False).coalesce()
