"""A sharded model as a training uses it: its forward, its collectives, its gradient's norm, and its state.

`build.py` builds it. This module does not import torch's FSDP, which takes seconds. Begin at `Sharded`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn, optim

from dp_ray.engine.optimizer import build_optimizer, load_optimizer, norm_of_norms, norms_of
from dp_ray.engine.tree_sum import add_to, exchanged
from dp_ray.engine.weights import advice_on, loaded_of, make_room, misfits, other_sizes
from dp_ray.engine.world import CPU, World, all_gather, everyone
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.plan.tree import Node, climb, fold, parents
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import Stored, in_memory, is_sharded, laid_out, local, rows_of_rank

# torch 2.13 renames it, and deprecates the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class FsdpRound:
    """The round that the workers run: in each, every worker runs one shard, or a dummy batch.

    `shards` are those of the ranks, None for one with a dummy batch. `used` are the ids of the parameters that this
    worker's backward gave gradients. While `is_silent`, this worker adds nothing to a sum. If it `is_alone`, no
    worker waits for another: its own numbers take the place of the others', in the same memory.
    """

    is_silent: bool = False
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
        if self._round.is_silent:
            gradients.zero_()
        work: dist.Work | None = _reduce_scatter(
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
        self._root: Node = (0, shards)
        self._above = parents(self._root)
        self._held: dict[Node, torch.Tensor] = {}
        self._ran = 0

    def _sum(self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        """Exchange slices, and add them; the output is this worker's slice of the whole batch's gradient."""
        slices = gradients.view(group.size(), -1)
        self._prepare(slices)
        leaves = self._leaves()
        if self._round.is_alone:
            own = slices.clone()
            self._take({leaf: part for theirs, part in zip(leaves, own, strict=True) for leaf in theirs}, output)
        else:
            mine = slices[None] if leaves[group.rank()] else slices.new_empty(0, *slices.shape)
            self._take(exchanged(mine, leaves, group), output)

    def alone(self, gradient: torch.Tensor) -> None:
        """Serve as FSDP's all-reduce hook on a worker that is alone, where FSDP calls no reduce-scatter."""
        self._prepare(gradient.view(1, -1))
        self._take({leaf: gradient.clone() for theirs in self._leaves() for leaf in theirs}, gradient)

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

    def _leaves(self) -> list[list[Node]]:
        """Return the shard, as a leaf, that each rank runs in this round, if any."""
        return [[] if shard is None else [(shard, shard + 1)] for shard in self._round.shards]

    def _take(self, slices: Mapping[Node, torch.Tensor], output: torch.Tensor) -> None:
        for leaf, tensor in slices.items():
            climb(self._held, leaf, tensor, self._above, add_to)
        if self._round.is_last:
            held, self._held = self._held, {}
            whole = fold(held, self._root, add_to)
            output.zero_() if whole is None else output.copy_(whole)
            return
        received = {tensor.untyped_storage().data_ptr() for tensor in slices.values()}
        for node, tensor in self._held.items():
            # Keep a copy of what is held of a received tensor, so that the whole of it is freed.
            if tensor.untyped_storage().data_ptr() in received:
                self._held[node] = tensor.clone()


def load_rows(
    model: nn.Module, weights: Mapping[str, Any], where: str, world: World, is_strict: bool = True, advice: str = ""
) -> str:
    """Copy this worker's rows of the weights, stored or in memory, into a sharded model, one after another.

    If not `is_strict`, return what was loaded and what not, in words. Raise ModelError, which names missing,
    unexpected and mis-sized tensors and ends with the advice, or if nothing fits.
    """
    make_room(model, weights)
    state = model.state_dict()
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    stored = {
        name: in_memory(value) if isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
        if isinstance(value, torch.Tensor | Stored)
    }
    missing, unexpected = sorted(own.keys() - stored.keys()), sorted(weights.keys() - state.keys())
    sizes = other_sizes(own, stored)
    if is_strict and (mistakes := misfits(missing, unexpected, sizes)):
        raise ModelError(f"the weights of {where} are not this model's{mistakes}{advice_on(own, weights, advice)}")
    for name, tensor in own.items():
        if name in stored and name not in sizes:
            stored[name].copy_to(tensor, world.world_size, world.rank)
    return "" if is_strict else loaded_of(where, own.keys(), weights, missing, unexpected, sizes)


@dataclass(frozen=True)
class Sharded:
    """A sharded model. `root` is torch's FSDPModule, and `round` is what its gradients' sums go by.

    `replicated` are the parameters that each worker holds whole, by name. With `recasts`, a training under autocast
    casts its weights again for each operation and for its backward.
    """

    model: nn.Module
    root: Any
    replicated: dict[str, nn.Parameter]
    round: FsdpRound
    world: World
    recasts: bool

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

    def total_norm(self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return the norm of the whole gradient; `gradients` are this worker's parts. Every rank calls this."""
        whole = {id(parameter) for parameter in self.replicated.values()}
        is_first = self.world.rank == 0
        mine = [
            gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient.numel() and (is_first or id(parameter) not in whole)
        ]
        device = gradients[0].device if gradients else CPU
        total = _stacked(norms_of(mine), device).square().sum()
        with waiting("the other workers' norms"):
            dist.all_reduce(total, group=everyone())
        return total.sqrt().float()

    def infinite_if_any(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return infinity if any worker's `gradients` are not all finite, else 0: a scalar; every rank calls this."""
        largest = norms_of([gradient for gradient in gradients if gradient.numel()], torch.inf)
        is_any = _stacked(largest, self.world.device).isfinite().logical_not().any().float()
        with waiting("the other workers' gradients"):
            dist.all_reduce(is_any, dist.ReduceOp.MAX, group=everyone())
        return torch.where(is_any > 0, torch.inf, 0.0)


def _stacked(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return norms as one tensor on the device, float64 [norms]."""
    if not norms:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float64) for norm in norms]
    return torch.stack(list(norms)).to(device, torch.float64)


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


class _Cast(NamedTuple):
    """A tensor that a backward needs, as a view of a parameter's cast; and the parameter's version at the forward."""

    parameter: nn.Parameter
    version: int
    dtype: torch.dtype
    view: tuple[Sequence[int], Sequence[int], int]


def _without_cast(saved: torch.Tensor) -> Any:
    """Return what to keep of a tensor for the backward: of a parameter's cast, only how to make it."""
    cast = saved if saved._base is None else saved._base
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or cast._version:
        return saved
    param = getattr(node.next_functions[0][0], "variable", None)  # a leaf's
    if not isinstance(param, nn.Parameter) or param.dtype == cast.dtype:
        return saved
    if param.device != cast.device or param.stride() != cast.stride():
        return saved
    return _Cast(param, param._version, cast.dtype, (saved.size(), saved.stride(), int(saved.storage_offset())))


def _cast_again(kept: Any) -> torch.Tensor:
    """Return what was saved for the backward; in it, FSDP has gathered the parameter again."""
    if not isinstance(kept, _Cast):
        saved: torch.Tensor = kept
        return saved
    if kept.parameter._version != kept.version:
        raise RuntimeError(
            f"a parameter of shape {list(kept.parameter.shape)} was changed in place after the forward has used it"
        )
    return kept.parameter.detach().to(kept.dtype).as_strided(*kept.view)


def rows_of_optimizer(state: Any, parameters: list[nn.Parameter], world: World) -> Any:
    """Return an optimizer's state_dict with this worker's rows of each tensor.

    A tensor of its parameter's size is sharded as the parameter; any other is whole.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    by_number = {
        number: {key: _of_parameter(value, parameters[number], world) for key, value in kept.items()}
        for number, kept in state["state"].items()
    }
    rest = {key: whole_tensors(value) for key, value in state.items() if key != "state"}
    return {**rest, "state": by_number}


def _of_parameter(value: Any, parameter: nn.Parameter, world: World) -> Any:
    if not isinstance(value, Stored) or not is_sharded(parameter) or tuple(value.shape) != tuple(parameter.shape):
        return whole_tensors(value)
    return sharded_as(parameter, value.like(parameter, world.world_size, world.rank).to(local(parameter).device))


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
        # these parts; a norm gets whole gradients in memory of their own (`_exchanged`).
        if self._is_whole:
            return mine.reshape(-1)
        made = mine.new_zeros(size)
        self.inner(made).copy_(mine.reshape(-1))
        return made


class AlignedParts:
    """A worker's parts of all sharded parameters, updated with the bits that an update of the whole gives.

    On a CPU an update runs over whole vectors of numbers, and over the last numbers one by one. The two round
    differently. So the optimizer gets each part as a flat tensor that begins and ends where vectors do, filled up
    with zeros.
    """

    def __init__(self, job: Job, sharded: Sharded) -> None:
        model, self._world = sharded.model, sharded.world
        self.parts = [
            ParameterPart(parameter, self._world)
            for parameter in model.parameters()
            if parameter.requires_grad and is_sharded(parameter)
        ]
        self._by_flat = {id(part.flat): part for part in self.parts}
        # What the optimizer gets for each parameter, by the parameter's id.
        self.flats = {id(part.parameter): part.flat for part in self.parts}
        self.optimizer: Any = build_optimizer(job.optimizer, model, self.flats)

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

    def total_norm(
        self, gradients: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter], device: torch.device
    ) -> torch.Tensor:
        """Return the norm of the whole gradient, to the bit that of one worker; every rank calls this.

        `device` is that of collectives.
        """
        parts = [self._by_flat.get(id(parameter)) for parameter in parameters]
        slices = [
            Slice(part.inner(gradient), part.parameter.shape)
            for part, gradient in zip(parts, gradients, strict=True)
            if part is not None
        ]
        whole = [gradient for part, gradient in zip(parts, gradients, strict=True) if part is None]
        of_slices = iter(norms_of_slices(slices, self._world, device))
        of_whole = iter(norms_of(whole) if whole else [])
        return norm_of_norms([next(of_whole if part is None else of_slices) for part in parts], gradients)

    def originals(self) -> list[nn.Parameter]:
        """Return the model's parameters, in the order of the optimizer's groups."""
        parameters = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [self._by_flat[id(param)].parameter if id(param) in self._by_flat else param for param in parameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with sharded tensors for the parts."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return {**state, "state": self._of_parts(state["state"], ParameterPart.sharded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of whole tensors that are stored, or of plain values."""
        rows = rows_of_optimizer(state, self.originals(), self._world)
        load_optimizer(self.optimizer, {**rows, "state": self._of_parts(rows["state"], ParameterPart.flattened)})

    def _of_parts(self, state: dict[int, Any], convert: Any) -> dict[int, Any]:
        parameters = [param for group in self.optimizer.param_groups for param in group["params"]]
        converted = {}
        for number, kept in state.items():
            part = self._by_flat.get(id(parameters[number]))
            converted[number] = kept if part is None else {key: convert(part, value) for key, value in kept.items()}
        return converted


@contextmanager
def one_thread(parameter: torch.Tensor) -> Iterator[None]:
    """Update in one thread on a CPU: where several threads cut a tensor is where its vectors end, too."""
    threads = torch.get_num_threads()
    is_many = parameter.device.type == "cpu" and threads > 1
    try:
        if is_many:
            torch.set_num_threads(1)
        yield
    finally:
        if is_many:
            torch.set_num_threads(threads)


CHUNK_BYTES = 1 << 25  # of a worker's slices, sent at once


@dataclass(frozen=True)
class Slice:
    """A worker's slice of a gradient, flat, and the gradient's shape."""

    numbers: torch.Tensor
    shape: tuple[int, ...]

    def count(self, world_size: int, rank: int) -> int:
        """Return how many numbers a rank's slice has."""
        first, end = rows_of_rank(self.shape[0], world_size, rank)
        return (end - first) * torch.Size(self.shape[1:]).numel()


def norms_of_slices(slices: Sequence[Slice], world: World, device: torch.device) -> list[torch.Tensor]:
    """Return the norm of each whole gradient from this worker's `slices`; every rank calls this.

    They have the bits that one worker with the whole gradients computes. A norm's bits depend on the order of its
    additions. So for each parameter one worker gets the whole gradient, and computes its norm: the first goes to rank
    0, the next to rank 1, and so on.
    """
    if not slices:
        return []
    own: dict[int, torch.Tensor] = {}
    for start, stop in _chunks(slices):
        mine = range(start + (world.rank - start) % world.world_size, stop, world.world_size)
        whole = _exchanged(slices, start, stop, world, device)
        own |= dict(zip(mine, norms_of(whole) if whole else [], strict=True))
    empty = norms_of([slices[0].numbers[:0].to(device)])[0]  # for the dtype
    norms = empty.new_zeros(len(slices))
    for number, norm in own.items():
        norms[number] = norm
    with waiting("the other workers' norms"):
        dist.all_reduce(norms, group=everyone())
    return list(norms.unbind())


def _chunks(slices: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """Yield ranges of gradients to exchange at once, the same on all workers."""
    cuts, size = [0], 0
    for number, piece in enumerate(slices):
        size += torch.Size(piece.shape).numel() * piece.numbers.itemsize
        if size >= CHUNK_BYTES:
            cuts.append(number + 1)
            size = 0
    yield from pairwise(dict.fromkeys([*cuts, len(slices)]))


def _exchanged(
    slices: Sequence[Slice], start: int, stop: int, world: World, device: torch.device
) -> list[torch.Tensor]:
    """Return the whole gradients that this worker gets, of those from `start` to `stop`."""
    size, rank = world.world_size, world.rank
    by_owner = [
        [piece for at, piece in enumerate(slices[start:stop], start) if at % size == owner] for owner in range(size)
    ]
    sent = torch.cat([piece.numbers for theirs in by_owner for piece in theirs]).to(device)
    counts = [sum(piece.numbers.numel() for piece in theirs) for theirs in by_owner]
    mine = by_owner[rank]
    from_each = [sum(piece.count(size, sender) for piece in mine) for sender in range(size)]
    received = sent.new_empty(sum(from_each))
    with waiting("the other workers' gradients"):
        dist.all_to_all_single(received, sent, from_each, counts, group=everyone())
    parts = [
        torch.split(chunk, [each.count(size, at) for each in mine])
        for at, chunk in enumerate(torch.split(received, from_each))
    ]
    return [torch.cat([theirs[at] for theirs in parts]).view(piece.shape) for at, piece in enumerate(mine)]
