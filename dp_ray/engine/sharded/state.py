"""A sharded model as a training uses it: its forward, its collectives, its gradient's norm, and its state.

`build.py` builds it. This module does not import torch's FSDP, which takes seconds. Begin at `Sharded`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from dp_ray.engine.optimizer import load_optimizer, norms_of, parameters_of, total_norm
from dp_ray.engine.sums.tree_sum import TreeSums, exchanged
from dp_ray.engine.world import World, all_gather, everyone
from dp_ray.errors import JobError, ModelError
from dp_ray.plan.tree import Node
from dp_ray.system.threads import waiting
from dp_ray.tensors.changed import VERSION, digests
from dp_ray.tensors.files import Stored, in_memory, is_sharded, laid_out, local, rows_of_rank
from dp_ray.text import listed


@dataclass
class FsdpRound:
    """The round that the workers run: in each, every worker runs one shard, or a dummy batch.

    `shards` are those of the ranks, None for one with a dummy batch. `used` are the ids of the parameters that this
    worker's backward gave gradients. If it `is_alone`, no worker waits for another: its own numbers take the place of
    the others', in the same memory.
    """

    number: int = 0  # counts all rounds
    is_last: bool = True
    shards: Sequence[int | None] = ()
    used: set[int] = field(default_factory=set)
    group: dist.ProcessGroup | None = None  # of the CPUs
    is_alone: bool = False
    _path: int = 0
    _asked: tuple[Any, torch.Tensor] | None = None

    def runs(self, block: int) -> None:
        """Note that this worker runs a block."""
        self._path = (self._path * 1_000_003 + block + 1) % 2**61

    def ask(self) -> None:
        """Start to ask whether all workers have run the same blocks; every rank calls this after a forward."""
        if self.is_alone:
            return
        largest = torch.tensor([self._path, -self._path])
        self._asked = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True), largest
        self._path = 0

    def check(self) -> None:
        """Raise ModelError if they have not: a gradient of one block must not be added to another block's."""
        if self._asked is None:
            return
        (work, largest), self._asked = self._asked, None
        with waiting("the other workers' forward"):
            work.wait()
        if int(largest.sum()):
            raise ModelError(
                "the workers did not run the same blocks in the same order, but with strategy: fsdp each holds a "
                "part of every block; set fsdp.blocks to the classes of larger modules, which all rows run"
            )


class FsdpCollective:
    """A collective of FSDP's; it names what this worker waits for."""

    def __init__(self, current: FsdpRound, block: str) -> None:
        self._round = current
        self._block = block or "the parameters outside the blocks"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(FsdpCollective):
    """The all-gather of a block: if a worker does not run the block, the others wait here."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the workers' parts of the block."""
        if self._round.is_alone:  # its own part, which may lie in the output itself, takes the place of the others'
            for rank, theirs in enumerate(output_tensor.view(group.size(), -1)):
                if rank != group.rank():
                    theirs.copy_(input_tensor.view(-1))
            return None
        with waiting(f"the other workers to gather {self._block}, which all must run (strategy: fsdp)"):
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class SumScatter(FsdpCollective):
    """The reduce-scatter, which sums: losses are divided by the rows of the whole batch already."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the workers' inputs; each gets its slice of the sums."""
        self._round.check()
        with waiting("the other workers' gradients"):
            return self._sum(output_tensor, input_tensor, group, async_op)

    def _sum(
        self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if self._round.is_alone:
            output.copy_(gradients[: output.numel()])
            return None
        work: dist.Work | None = dist.reduce_scatter_single(
            output, gradients, op=dist.ReduceOp.SUM, group=group, async_op=async_op
        )
        return work


class TreeScatter(SumScatter):
    """The reduce-scatter of one block, which adds the shards' gradients by the fixed tree.

    In each round every worker gets its slice of all workers' gradients. It adds those that are siblings in the tree,
    and keeps the other sums. The last round gives the sum of all; what earlier rounds give means nothing.
    """

    def __init__(self, current: FsdpRound, block: str, units: Sequence[Any], shards: int) -> None:
        super().__init__(current, block)
        self._units = units
        self._sums = TreeSums((0, shards))
        self._ran = 0

    def _sum(self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        self._add(output, gradients.view(group.size(), -1), group)

    def alone(self, gradient: torch.Tensor) -> None:
        """Serve as FSDP's all-reduce hook on a worker that is alone, where FSDP calls no reduce-scatter."""
        self._add(gradient, gradient.view(1, -1), None)

    def _add(self, output: torch.Tensor, slices: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Exchange slices, and add them; the output is this worker's slice of the whole batch's gradient."""
        self._prepare(slices)
        leaves: list[list[Node]]  # the shard that each rank runs in this round, if any
        leaves = [[] if shard is None else [(shard, shard + 1)] for shard in self._round.shards]
        if group is None or self._round.is_alone:
            received = {leaf: part for theirs, part in zip(leaves, slices, strict=True) for leaf in theirs}
        else:
            mine = slices[None] if leaves[group.rank()] else slices.new_empty(0, *slices.shape)
            received = exchanged(mine, leaves, group)
        for leaf, tensor in received.items():
            self._sums.take(leaf, [tensor.clone()])  # so that the whole of what was received is freed
        if self._round.is_last:
            (whole,) = self._sums.finish() or [None]
            output.zero_() if whole is None else output.copy_(whole)

    def _prepare(self, slices: torch.Tensor) -> None:
        """Replace zeros that stand for no gradient by such that add nothing: FSDP fills in +0, and -0 + 0 is 0."""
        if self._ran == self._round.number:
            raise ModelError(
                f"bitwise: {self._block} runs twice in a forward, so with strategy: fsdp its "
                "gradients cannot be added in a fixed order; name other fsdp.blocks, or leave bitwise or strategy out"
            )
        self._ran = self._round.number
        start = 0
        for unit in self._units:
            stop = start + unit.padded_sharded_param_size.numel()
            if id(unit.sharded_param) not in self._round.used:
                slices[:, start:stop].neg_()
            start = stop


@dataclass(eq=False)
class Sharded:
    """A sharded model. `root` is torch's FSDPModule, and `round` is what its gradients' sums go by.

    `replicated` are the parameters that each worker holds whole, by name. With `recasts`, a training under autocast
    casts its weights again for each operation and for its backward.
    """

    model: nn.Module
    root: Any
    round: FsdpRound
    world: World
    recasts: bool
    replicated: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        named = self.model.named_parameters()
        self.replicated = {name: parameter for name, parameter in named if not is_sharded(parameter)}

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model, with the parameters outside its blocks gathered."""
        with casting_anew() if self.recasts or not torch.is_grad_enabled() else nullcontext():
            return self.root(function, *args)

    @property
    def blocks(self) -> Iterator[tuple[nn.Module, list[Any]]]:
        """Yield the root and each block, with torch's own records of the parameters that are gathered for it."""
        for module in self.root.modules():
            if hasattr(module, "_get_fsdp_state"):
                group = module._get_fsdp_state()._fsdp_param_group
                yield module, [] if group is None else group.fsdp_params

    @property
    def units(self) -> Iterator[Any]:
        """Yield torch's own record of each sharded parameter."""
        for _, units in self.blocks:
            yield from units


@contextmanager
def casting_anew() -> Iterator[None]:
    """Free autocast's copies of the gathered weights with their operations, while a sharded model runs.

    Else torch keeps a copy of each weight until the forward's end, in case it is cast again, and one until the
    backward, which may need it: in the end, the whole model. The numbers are the same, except for a weight that is
    used twice: its gradients are added after their cast to its own dtype, no longer before.
    """
    before = torch.is_autocast_cache_enabled()
    saving = torch.autograd.graph.saved_tensors_hooks(_without_cast, _cast_again)
    torch.set_autocast_cache_enabled(False)
    try:
        with saving if torch.is_grad_enabled() else nullcontext():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _without_cast(saved: torch.Tensor) -> Any:
    """Return what to keep of a tensor for the backward: of a parameter's cast, only how to make it."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or cast._version:
        return saved
    param = getattr(node.next_functions[0][0], "variable", None)  # a leaf's
    if not isinstance(param, nn.Parameter) or (param.device, param.stride()) != (cast.device, cast.stride()):
        return saved
    return param, param._version, cast.dtype, (saved.size(), saved.stride(), int(saved.storage_offset()))


def _cast_again(kept: Any) -> torch.Tensor:
    """Return what was saved for the backward; in it, FSDP has gathered the parameter again."""
    if isinstance(kept, torch.Tensor):
        return kept
    param, version, dtype, view = kept
    if param._version != version:
        raise RuntimeError(f"a parameter of shape {list(param.shape)} was changed in place after the forward used it")
    cast: torch.Tensor = param.detach().to(dtype).as_strided(*view)
    return cast


def rows_like(tensor: Any, value: Any, world: World) -> Any:
    """Return a value that is stored or in memory, as a state holds it for a model's `tensor`.

    If it has the size of a sharded tensor, it is sharded alike, and this worker reads its rows alone. Any other is
    whole.
    """
    stored = in_memory(value) if isinstance(value, torch.Tensor) else value
    is_like = isinstance(stored, Stored) and is_sharded(tensor) and tuple(stored.shape) == tuple(tensor.shape)
    if not is_like:
        return whole_tensors(value)
    rows = stored.like(tensor, world.world_size, world.rank)
    return sharded_as(tensor, rows.to(local(tensor).device))


def whole_tensors(value: Any) -> Any:
    """Return a state in which each stored tensor is read whole."""
    if isinstance(value, Stored):
        whole = value.whole()
        return whole if value.strides is None else laid_out(whole, value.strides)
    if isinstance(value, dict):
        return {key: whole_tensors(inner) for key, inner in value.items()}
    return type(value)(map(whole_tensors, value)) if isinstance(value, list | tuple) else value


def sharded_as(parameter: nn.Parameter, rows: torch.Tensor) -> Any:
    """Return a tensor sharded as a parameter is; this worker holds its `rows`."""
    sharded: Any = parameter
    return type(sharded).from_local(
        rows,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


VECTOR = 64  # numbers: a multiple of what torch's CPU kernels take at once, for each dtype and instruction set
# These use of a parameter, its gradient and its state nothing but the number that they update.
ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
)


def span_of(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return where the first vector begins and the last one ends that hold the numbers `start` to `stop` of `size`.

    >>> span_of(100, 130, 1000), span_of(960, 1000, 1000), span_of(70, 70, 1000)
    ((64, 192), (960, 1000), (70, 70))
    """
    if start == stop:
        return start, stop
    return start - start % VECTOR, min(size, -(-stop // VECTOR) * VECTOR)


class ParameterPart:
    """A worker's part of a sharded parameter; the optimizer gets `flat` in its place."""

    def __init__(self, parameter: nn.Parameter, world: World) -> None:
        self.parameter = parameter
        mine = local(parameter.detach())
        width = parameter.numel() // parameter.shape[0]
        start, stop = (row * width for row in rows_of_rank(parameter.shape[0], world.world_size, world.rank))
        first, end = span_of(start, stop, parameter.numel())
        self._inner = slice(start - first, stop - first)
        self._is_whole = (first, end) == (start, stop)
        self.flat = nn.Parameter(self._filled_up(mine, end - first))

    def take(self) -> None:
        """Take the part's numbers and gradient; where nothing is to be filled up, they are shared."""
        gradient = self.parameter.grad
        mine, size = local(self.parameter.detach()), self.flat.numel()
        if self._is_whole:
            self.flat.data = mine.view(-1)
        else:
            self.inner(self.flat.detach()).copy_(mine.view(-1))
        self.flat.grad = None if gradient is None else self._filled_up(local(gradient.detach()), size)

    def give(self) -> None:
        """Give the updated numbers to the part, and drop its gradient."""
        if not self._is_whole:
            local(self.parameter.detach()).view(-1).copy_(self.inner(self.flat.detach()))
        self.parameter.grad = None

    def inner(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part's own numbers in a flat tensor."""
        return flat[self._inner]

    def sharded(self, value: Any) -> Any:
        """Return a tensor of the optimizer's state, sharded as the parameter is; any other value as it is."""
        if not isinstance(value, torch.Tensor) or value.shape != self.flat.shape:
            return value
        return sharded_as(self.parameter, self.inner(value).view(local(self.parameter).shape))

    def flattened(self, value: Any) -> Any:
        """Return the inverse of `sharded`."""
        return self._filled_up(local(value), self.flat.numel()) if is_sharded(value) else value

    def _filled_up(self, mine: torch.Tensor, size: int) -> torch.Tensor:
        # FSDP's gradients are views that may begin anywhere (`engine/alignment.py`). Only ELEMENTWISE optimizers read
        # these parts; a norm gets whole gradients in memory of their own (`norms_of_slices`).
        if self._is_whole:
            return mine.reshape(-1)
        made = mine.new_zeros(size)
        self.inner(made).copy_(mine.reshape(-1))
        return made


class ShardedParts:
    """A worker's parts of a sharded model's parameters, and of their gradients, as an update takes them.

    If it `is_exact`, an update has the bits that an update of the whole gives. On a CPU that runs over whole vectors
    of numbers, and over the last numbers one by one. The two round differently. So the optimizer gets each part as a
    flat tensor that begins and ends where vectors do, filled up with zeros: these are the `parts`.
    """

    def __init__(self, sharded: Sharded, is_exact: bool) -> None:
        self.sharded, self.is_exact = sharded, is_exact
        self.parts = [
            ParameterPart(parameter, sharded.world)
            for parameter in sharded.model.parameters()
            if is_exact and parameter.requires_grad and is_sharded(parameter)
        ]
        self.by_flat = {id(part.flat): part for part in self.parts}
        self.flats = {id(part.parameter): part.flat for part in self.parts}  # what optimizers get in their place

    @torch.no_grad()
    def take(self) -> None:
        """Take all gradients, before an update."""
        for part in self.parts:
            part.take()

    @torch.no_grad()
    def give(self) -> None:
        """Give back what the update has changed."""
        for part in self.parts:
            part.give()

    def total_norm(self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the norm of the whole gradient; `gradients` are this worker's parts. Every rank calls this."""
        device = gradients[0].device
        if self.is_exact:
            parts = [self.by_flat.get(id(parameter)) for parameter in parameters]
            pairs = list(zip(parts, gradients, strict=True))
            slices = [(part.inner(gradient), part.parameter.shape) for part, gradient in pairs if part is not None]
            of_slices = iter(norms_of_slices(slices, self.sharded.world, device) if slices else ())
            of_whole = iter(norms_of([gradient for part, gradient in pairs if part is None]))
            return total_norm(gradients, [next(of_whole if part is None else of_slices) for part in parts])
        whole = {id(parameter) for parameter in self.sharded.replicated.values()}
        is_first = self.sharded.world.rank == 0
        mine = [
            gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient.numel() and (is_first or id(parameter) not in whole)
        ]
        # In double precision: the workers' norms are squared and added.
        norms = [norm.to(device, torch.float64) for norm in norms_of(mine)]
        total = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)]).square().sum()
        with waiting("the other workers' norms"):
            dist.all_reduce(total, group=everyone())
        return total.sqrt().float()

    def to_unscale(self, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return stand-ins for the fp16 scaler, whose gradients are the numbers of this worker's, and one more.

        The scaler itself takes no sharded gradients beside whole ones, and would ask the other workers on the device
        of the gradients, where an offloaded model has no collectives. The one more is infinite on all workers if any
        of them has a gradient that is not finite: so all skip the same updates. Every rank calls this.
        """
        parts = [gradient for gradient in gradients if gradient.numel()]
        device = self.sharded.world.device
        largest = [norm.to(device, torch.float32) for norm in torch._foreach_norm(parts, torch.inf)] if parts else []
        is_any = torch.stack([torch.zeros((), device=device), *largest]).isfinite().all().logical_not().float()
        with waiting("the other workers' gradients"):
            dist.all_reduce(is_any, dist.ReduceOp.MAX, group=everyone())
        holders = []
        for gradient in [*parts, torch.where(is_any > 0, torch.inf, 0.0)]:
            holder = gradient.detach()  # in the same memory
            holder.grad = gradient
            holders.append(holder)
        return holders


@dataclass(frozen=True)
class StateOfParts:
    """The state of an optimizer of `parts`, as a checkpoint keeps that of whole parameters."""

    parts: ShardedParts
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with sharded tensors for the parts."""
        state: dict[str, Any] = self.optimizer.state_dict()
        held = self._held()
        by_number = {
            number: {key: part.sharded(kept[key]) for key in kept} if (part := held[number][1]) is not None else kept
            for number, kept in state["state"].items()
            if number in held
        }
        return {**state, "state": {**state["state"], **by_number}}  # an optimizer may keep others, under texts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this worker's rows of a state whose tensors are stored.

        A tensor of its parameter's size is sharded as the parameter; any other is whole.
        """
        held, by_number = self._held(), {}
        for number, kept in state["state"].items():
            if number not in held:
                by_number[number] = whole_tensors(kept)
                continue
            param, part = held[number]
            original = param if part is None else part.parameter
            rows = {key: rows_like(original, value, self.parts.sharded.world) for key, value in kept.items()}
            by_number[number] = rows if part is None else {key: part.flattened(rows[key]) for key in rows}
        rest = {key: whole_tensors(value) for key, value in state.items() if key != "state"}
        load_optimizer(self.optimizer, {**rest, "state": by_number})

    def _held(self) -> dict[Any, tuple[nn.Parameter, ParameterPart | None]]:
        """Return what the optimizer updates, by its number, with the part of which it is the flat tensor."""
        return dict(
            enumerate((param, self.parts.by_flat.get(id(param))) for param in parameters_of([self.optimizer]))
        )


def check_updates_parts(key: str, kind: Any, is_exact: bool) -> None:
    """Raise JobError for a class of optimizers, that of the job's `key`, that cannot update a part of a parameter.

    If it must be `is_exact`, also for one whose update of a part may not be the part of the whole update. What is no
    class is not known yet.
    """
    if not inspect.isclass(kind):
        return
    if is_exact and kind not in ELEMENTWISE:
        raise JobError(
            f"{key}: {kind.__qualname__} may use all of a parameter to update a part of it, "
            "so with strategy: fsdp it cannot be bitwise; "
            f"take one of torch.optim's {listed([each.__name__ for each in ELEMENTWISE])}, or leave bitwise out"
        )
    # torch computes in shards neither the first one's state, which has another size, nor the second one's writes by
    # signs. The third's products in bf16 round otherwise there: its updates were 2 to 5 % off, and 24 % for a matrix
    # whose gradient lacks rank.
    if not is_exact and issubclass(kind, optim.Adafactor | optim.Rprop | optim.Muon):
        raise JobError(
            f"{key}: {kind.__name__} cannot update the parts of parameters that strategy: fsdp gives workers; "
            "take another one, like torch.optim:AdamW, or strategy: ddp"
        )


@contextmanager
def one_thread(_: object = None) -> Iterator[None]:
    """Update in one thread: on a CPU, where several threads cut a tensor is where its vectors end, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def updating_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the block, have an optimizer update sharded parameters and others apart if a group has both.

    An operation on a list of tensors takes sharded ones or others, but not both. So one of torch's own optimizers
    takes such a group for two, with the same values. Any other may keep values of its own in a group.
    """
    groups = optimizer.param_groups
    if type(optimizer).__module__.startswith("torch.optim"):
        optimizer.param_groups = [
            {**group, "params": params}
            for group in groups
            for kind in (True, False)
            if (params := [param for param in group["params"] if is_sharded(param) is kind])
        ]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def norms_of_slices(
    slices: Sequence[tuple[torch.Tensor, torch.Size]], world: World, device: torch.device
) -> Sequence[torch.Tensor]:
    """Return the norm of each whole gradient; every rank calls this.

    `slices` are this worker's, flat, each with the size of the whole. The norms have the bits that one worker with
    the whole gradients computes. They depend on the order of the additions, so for each parameter one worker gets the
    whole gradient, and computes its norm: the first goes to rank 0, the next to rank 1, and so on.
    """
    size = world.world_size
    of_rank = [slices[rank::size] for rank in range(size)]
    sent = torch.cat([numbers for theirs in of_rank for numbers, _ in theirs]).to(device)
    counts = [sum(numbers.numel() for numbers, _ in theirs) for theirs in of_rank]
    mine = [shape for _, shape in of_rank[world.rank]]
    rows = [[rows_of_rank(shape[0], size, sender) for shape in mine] for sender in range(size)]
    lengths = [
        [(end - first) * shape[1:].numel() for (first, end), shape in zip(theirs, mine, strict=True)]
        for theirs in rows
    ]
    received = sent.new_empty(sum(map(sum, lengths)))
    with waiting("the other workers' gradients"):
        dist.all_to_all_single(received, sent, [*map(sum, lengths)], counts, group=everyone())
    pieces = torch.split(received, [length for theirs in lengths for length in theirs])
    whole = [torch.cat(pieces[at :: len(mine)]).view(shape) for at, shape in enumerate(mine)]
    norms = torch.zeros(len(slices), dtype=norms_of([sent[:0]])[0].dtype, device=device)
    if whole:
        norms[world.rank :: size] = torch.stack(norms_of(whole))
    with waiting("the other workers' norms"):
        dist.all_reduce(norms, group=everyone())
    return norms.unbind()


SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class BlockParameters:
    """Parameters of which each worker holds a part: no forward may write them, since what it writes is lost."""

    def __init__(self, sharded: Sharded, is_compiled: bool) -> None:
        named = list(sharded.model.named_parameters())
        self._names = {id(parameter): name for name, parameter in named}
        self._parts = {name: parameter for name, parameter in named if is_sharded(parameter)}
        self._blocks, self._units = dict(sharded.blocks), list(sharded.units)
        self._is_compiled = is_compiled
        self._versions: list[int] = []

    def note(self) -> None:
        """Look from here on."""
        self._versions = self._now()

    def _now(self) -> list[int]:
        whole = [getattr(unit, "_unsharded_param", None) for unit in self._units]
        return [*map(VERSION, self._parts.values()), *(0 if tensor is None else tensor._version for tensor in whole)]

    def _name_of(self, unit: Any) -> str:
        return self._names.get(id(unit.sharded_param), "of a block")  # which torch sets anew in the first forward

    def check(self) -> None:
        """Raise ModelError if a version shows a write."""
        now = self._now()
        if now != self._versions:
            names = [*self._parts, *map(self._name_of, self._units)]
            pairs = zip(names, now, self._versions, strict=True)
            raise ModelError(_of_parts([name for name, version, other in pairs if version != other]))

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Raise ModelError in the forward of a block that has changed the parameters gathered for it, in any way."""
        before: dict[nn.Module, dict[str, int]] = {}

        def begin(block: nn.Module, *_: Any) -> None:
            before[block] = self._digests(block)

        def end(block: nn.Module, *_: Any) -> None:
            earlier = before.pop(block)
            if written := [name for name, digest in self._digests(block).items() if earlier.get(name) != digest]:
                raise ModelError(_of_parts(written))

        hooks = []
        for block in self._blocks:  # after torch's own hook that gathers, and before the one that frees
            hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end, prepend=True)]
        try:
            with _SeesReplaced() if self._blocks and not self._is_compiled else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _digests(self, block: nn.Module) -> dict[str, int]:
        whole = {self._name_of(unit): getattr(unit, "_unsharded_param", None) for unit in self._blocks[block]}
        return digests({name: tensor.detach() for name, tensor in whole.items() if tensor is not None})


class _SeesReplaced(TorchFunctionMode):
    """Raises ModelError if a forward replaces the data of a sharded parameter, which nothing else shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and is_sharded(args[0]):
            raise ModelError(_of_parts([f"the data of a parameter of size {list(args[0].shape)}"]))
        return func(*args, **(kwargs or {}))


def _of_parts(names: list[str]) -> str:
    return (
        f"the forward wrote {listed(names)}, of which each worker holds a part, so that what is written would be "
        "lost (nn.Embedding with max_norm writes its weight): leave it out, or take strategy: ddp"
    )
