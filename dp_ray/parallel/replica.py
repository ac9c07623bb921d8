"""A worker's side of parallel modules: it holds their copies, runs shards and keeps graphs.

`Replicas` is what a worker's process holds. `forward` and `backward` are each told in one function. A worker takes
part in a collective in two places: where the modules' new elements come from rank 0, and where the workers sum their
gradients by the tree of `plan.tree`.
"""

import contextlib
import io
import os
import pickle
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.cluster.pool import pickled
from dp_ray.engine.determinism import deterministic, of_cublas
from dp_ray.engine.random import own_generators, seed_all, seed_own
from dp_ray.engine.reduce import sparse_parameters
from dp_ray.engine.user_code import dtypes_and_sizes
from dp_ray.engine.world import (
    World,
    everyone,
    failed_in_group,
    form_group,
    has_peers,
    is_gpu,
    leave_group,
    show_alone,
    text_of,
)
from dp_ray.errors import Error, ModelError, frames_of
from dp_ray.parallel.gradients import Sum, fold_of
from dp_ray.plan.tree import Node, climb, parents
from dp_ray.system.threads import waiting
from dp_ray.tasks.wire import (
    Backward,
    Forward,
    Gradients,
    Modes,
    NewBuffer,
    Packed,
    PeerLost,
    Raised,
    ShardInput,
    ShardOutput,
    Structure,
    Sync,
    TensorForm,
    owned,
    packed,
    unpacked,
)
from dp_ray.tensors.flat import as_bytes, room, views
from dp_ray.tensors.tree import TreeSpec, flatten, sizes, unflatten

FORM_TIMEOUT = timedelta(seconds=60)  # until the group is formed


class _Unpickler(pickle.Unpickler):
    """Unpickles a module whose tensors are apart: each stands there by its number."""

    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        """Return the tensor with a number."""
        return self._tensors[number]


@dataclass(eq=False)
class Replica:
    """A module's copy: its tensors in the caller's order, and where in the module each of them stands."""

    module: nn.Module
    forms: tuple[TensorForm, ...]
    tensors: list[torch.Tensor]
    places: list[list[tuple[nn.Module, str]]]
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # copies, as the call begins with them

    @classmethod
    def made(cls, structure: Structure, device: torch.device) -> "Replica":
        """Make the module; its tensors get their elements later."""
        tensors: list[torch.Tensor] = []
        for form in structure.forms:
            empty = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
            tensors.append(nn.Parameter(empty, requires_grad=False) if form.is_parameter else empty)
        module = _Unpickler(structure.pickled, tensors).load()
        number = {id(one): at for at, one in enumerate(tensors)}
        places: list[list[tuple[nn.Module, str]]] = [[] for _ in tensors]
        for one in module.modules():
            for name, tensor in [*one._parameters.items(), *one._buffers.items()]:
                if tensor is not None:
                    places[number[id(tensor)]].append((one, name))
        return cls(module, structure.forms, tensors, places)

    def load(self, changed: Sequence[int], pieces: Sequence[torch.Tensor], has_graphs: bool) -> None:
        """Take new elements for the tensors `changed`.

        Graphs that wait for their backward go on with the old ones: then new tensors take their place.
        """
        for number, piece in zip(changed, pieces, strict=True):
            old = self.tensors[number]
            if not has_graphs:
                with torch.no_grad():
                    old.copy_(piece)
                continue
            form = self.forms[number]
            fresh = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=old.device).copy_(piece)
            self._put(number, nn.Parameter(fresh, old.requires_grad) if form.is_parameter else fresh)
        for number in changed:
            if not self.forms[number].is_parameter:
                self.buffers[number] = self.tensors[number].detach().clone()

    def begin(self, modes: Modes) -> None:
        """Set what the caller may have set on its module: training or not, and what requires a gradient."""
        for one, training in zip(self.module.modules(), modes.training, strict=True):
            one.training = training
        for tensor, wants in zip(self.tensors, modes.requires_grad, strict=True):
            if tensor.requires_grad != wants:
                tensor.requires_grad_(wants)

    def changed_buffers(self) -> tuple[NewBuffer, ...]:
        """Return the buffers that a forward has changed; each shard's forward starts from the same.

        Of two that were one tensor, a forward may have set one anew, or each.
        """
        changed = []
        for number, before in self.buffers.items():
            now = self._current(number)
            for one in {id(one): one for one in now if one is not None}.values():
                if not _are_same(one, before):
                    places = tuple(at for at, other in enumerate(now) if other is one)
                    changed.append(NewBuffer(number, places, packed(one)))
        return tuple(changed)

    def restore_buffers(self) -> None:
        """Undo what a shard's forward has done to buffers, in tensors of their own: its graph may need those."""
        for number, before in self.buffers.items():
            old = self.tensors[number]
            if any(one is not old for one in self._current(number)) or not _are_same(old, before):
                wants = self.tensors[number].requires_grad
                self._put(number, before.clone().requires_grad_(wants))

    def _current(self, number: int) -> list[torch.Tensor | None]:
        return [owner._buffers.get(name) for owner, name in self.places[number]]

    def _put(self, number: int, tensor: torch.Tensor) -> None:
        self.tensors[number] = tensor
        for owner, name in self.places[number]:
            setattr(owner, name, tensor)  # as an RNN wants it, which holds its weights in a list too


def _are_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(as_bytes(one), as_bytes(two))


@dataclass(eq=False)
class Graph:
    """A shard's graph that waits for its backward: its ends."""

    inputs: dict[int, torch.Tensor]  # leaves that want a gradient, by number
    outputs: list[torch.Tensor | None]  # None where a leaf has no graph
    trained: list[torch.Tensor]
    sparse: frozenset[int]  # which of `trained` have sparse gradients
    got: str


class Replicas:
    """The copies of all parallel modules on a worker, and the graphs that wait for their backward."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        os.environ.update(of_cublas())
        self._rank = 0
        self._store: Any = None
        self._replicas: dict[int, Replica] = {}
        self._graphs: dict[tuple[int, int], dict[int, Graph]] = {}  # by module and call, by shard

    def open_store(self, host: str) -> int:
        """Open the store by which a group forms, and return its port; for rank 0."""
        self._store = TCPStore(host, 0, is_master=True, timeout=FORM_TIMEOUT, wait_for_workers=False)
        return int(self._store.port)

    def join(self, world: World, backend: str, port: int) -> PeerLost | None:
        """Leave the group of before, and form a new one with the workers that are there now."""
        self._leave()
        self._rank = world.rank
        if world.world_size == 1:
            show_alone(backend)
            return None
        try:
            store = self._store
            if world.rank:
                store = TCPStore(world.node, port, is_master=False, timeout=FORM_TIMEOUT, wait_for_workers=False)
            with waiting("the group to form"):
                form_group(backend, store, world, step_seconds=None)
        except RuntimeError as error:
            return PeerLost(text_of(error))
        return None

    def _leave(self) -> None:
        leave_group()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Leave the group if a collective of the block fails: peers that wait for this worker then hear of it."""
        try:
            with waiting("the other workers"):
                yield
        except RuntimeError as error:
            if failed_in_group(error) is None:
                raise
            self._leave()
            raise PeerIsLost(text_of(error)) from error

    def forward(self, asked: Forward) -> list[ShardOutput] | Raised | PeerLost:
        """Take in what is new, then run the shards in order, and keep their graphs."""
        at, got = None, ""
        try:
            what = "the module cannot be made on a worker:"
            self._sync(asked.sync)
            if asked.spec is None:
                return []
            replica = self._replicas[asked.sync.module]
            what, spec = "the model", pickle.loads(asked.spec)
            replica.begin(asked.modes)
            outputs, graphs = [], {}
            for given in asked.shards:
                at = given.shard
                arguments = [self._argument(leaf, asked.modes.is_grad_enabled) for leaf in given.leaves]
                got = _described(*unflatten(spec, arguments))
                output, graphs[at] = self._run(replica, asked, given, (arguments, spec), got)
                outputs.append(output)
            if asked.modes.is_grad_enabled and any(any(one.requires_grad) for one in outputs):
                self._graphs.setdefault((asked.sync.module, asked.call), {}).update(graphs)
            return outputs
        except PeerIsLost as lost:
            return PeerLost(str(lost))
        except (Exception, SystemExit) as error:
            return _raised(error, at, what, got)

    def _argument(self, leaf: Packed, may_stay: bool) -> Any:
        """Return a leaf of the inputs; a graph may keep it, and must not keep the room that it has in Ray's store.

        There it is for this call alone, so a model may write to it.
        """
        is_here = leaf.dtype is not None and not is_gpu(self._device)
        return unpacked(leaf) if is_here and not may_stay else owned(leaf, self._device)

    def _run(
        self, replica: Replica, asked: Forward, given: ShardInput, tree: tuple[list[Any], TreeSpec], got: str
    ) -> tuple[ShardOutput, Graph]:
        (leaves, spec), modes = tree, asked.modes
        replica.restore_buffers()
        seed_all(given.seed, self._device)
        seed_own(own_generators(replica.module), given.seed)
        inputs = {number: leaves[number].requires_grad_() for number in sorted(asked.requires_grad)}
        # A model may write into its inputs, but not into a leaf of a graph.
        args, kwargs = unflatten(spec, [one.clone() if at in inputs else one for at, one in enumerate(leaves)])
        text = io.StringIO()
        started = time.perf_counter()
        with _as_on_caller(modes), contextlib.redirect_stdout(text):
            result = replica.module(*args, **kwargs)
        ends, of_result = flatten(result)
        if is_gpu(self._device):
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        has_graph = [isinstance(one, torch.Tensor) and one.requires_grad for one in ends]
        output = ShardOutput(
            given.shard,
            pickled((of_result, sizes((args, kwargs)), sizes(result))),
            tuple(packed(one) for one in ends),
            tuple(has_graph),
            seconds,
            text.getvalue(),
            replica.changed_buffers() if given.shard == 0 else (),
        )
        trained = [one for one, wants in zip(replica.tensors, modes.requires_grad, strict=True) if wants]
        with_sparse = {id(one) for one in sparse_parameters(replica.module)}
        sparse = frozenset(at for at, one in enumerate(trained) if id(one) in with_sparse)
        kept = [one if isinstance(one, torch.Tensor) and one.requires_grad else None for one in ends]
        return output, Graph(inputs, kept, trained, sparse, got)

    def backward(self, asked: Backward) -> Gradients | Raised | PeerLost:
        """Run the shards' backwards, and sum the gradients over the workers."""
        at, got = None, ""
        try:
            graphs = self._graphs[asked.module, asked.call]
            held: dict[Node, Sum] = {}
            of_inputs: dict[int, dict[int, Packed | None]] = {}
            above = parents(asked.top)
            for shard, given in asked.gradients.items():
                graph = graphs[shard] if asked.keep_graph else graphs.pop(shard)
                at, got = shard, graph.got
                ends = [end for end, one in zip(graph.outputs, given, strict=True) if one is not None]
                seeds = [owned(one, self._device) for one in given if one is not None]
                with _bitwise(asked.threads):
                    found = self._gradients(graph, ends, seeds, asked.keep_graph)
                inputs, trained = found[: len(graph.inputs)], found[len(graph.inputs) :]
                of_inputs[shard] = {
                    number: None if one is None else packed(one)
                    for number, one in zip(graph.inputs, inputs, strict=True)
                }
                node, own = asked.nodes[shard], Sum(graph.trained, graph.sparse, trained)
                climb(held, node, held.pop(node).add(own) if node in held else own, above, Sum.add)
            if not asked.keep_graph:
                del self._graphs[asked.module, asked.call]
            with self._collective():
                for one in asked.transfers:
                    if one.sender == self._rank:
                        fold_of(held, one.right).send(one.receiver)
                    elif one.receiver == self._rank:
                        own = fold_of(held, one.left)
                        held[one.node] = own.add(own.receive(one.sender))
            is_root = asked.root == self._rank
            return Gradients(of_inputs, fold_of(held, asked.top).packed() if is_root else None)
        except PeerIsLost as lost:
            return PeerLost(str(lost))
        except (Exception, SystemExit) as error:
            if asked.transfers:
                self._leave()  # the others would wait for this worker's sum
            return _raised(error, at, "its backward", got)

    @staticmethod
    def _gradients(
        graph: Graph, ends: list[torch.Tensor | None], seeds: list[torch.Tensor], keep_graph: bool
    ) -> Sequence[torch.Tensor | None]:
        wanted = [*graph.inputs.values(), *graph.trained]
        pairs = [(end, seed) for end, seed in zip(ends, seeds, strict=True) if end is not None]
        if not pairs:
            return [None] * len(wanted)
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            [end for end, _ in pairs],
            wanted,
            [seed for _, seed in pairs],
            retain_graph=keep_graph,
            allow_unused=True,
        )
        return found

    def held_bytes(self, module: int) -> int:
        """Return how many bytes the graphs of a module hold, as far as they can be seen: each storage once."""
        roots = [
            end.grad_fn
            for (owner, _), graphs in self._graphs.items()
            if owner == module
            for graph in graphs.values()
            for end in graph.outputs
            if end is not None
        ]
        own = {one.untyped_storage().data_ptr() for one in self._replicas[module].tensors}
        seen, found = set(), dict[int, int]()
        while roots:
            node = roots.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            roots += [after for after, _ in node.next_functions]
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":
                    with contextlib.suppress(RuntimeError):  # freed, or written to since
                        saved = getattr(node, name)
                        for one in saved if isinstance(saved, tuple) else (saved,):
                            if isinstance(one, torch.Tensor):
                                storage = one.untyped_storage()
                                found[storage.data_ptr()] = storage.nbytes()
        return sum(size for at, size in found.items() if at not in own)

    def _sync(self, sync: Sync) -> None:
        """Drop what nobody waits for; take the module's structure, if it is new, and changed elements."""
        for call in sync.dropped:
            self._graphs.pop((sync.module, call), None)
        for module in sync.closed:
            self._replicas.pop(module, None)
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if key[0] not in sync.closed}
        broken: BaseException | None = None
        if sync.structure is not None:
            try:
                self._replicas[sync.module] = Replica.made(sync.structure, self._device)
            except Exception as error:  # of the user's code; the other workers wait for this one all the same
                broken = error
        if sync.changed:
            forms = sync.structure.forms if sync.structure else self._replicas[sync.module].forms
            pieces = self._received([forms[number] for number in sync.changed], sync.data)
            if broken is None:
                has_graphs = any(module == sync.module for module, _ in self._graphs)
                self._replicas[sync.module].load(sync.changed, pieces, has_graphs)
        if broken is not None:
            raise broken

    def _received(self, forms: Sequence[TensorForm], data: Any) -> list[torch.Tensor]:
        """Return new elements on this worker's device: rank 0 has them from the caller, the others from rank 0."""
        size = sum(map(room, forms))
        if data is not None:
            buffer = owned(Packed(torch.uint8, (size,), data), self._device)
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if has_peers():
            with self._collective():
                dist.broadcast(buffer, src=0, group=everyone())
        return list(views(buffer, forms))


class PeerIsLost(Exception):
    """A collective failed since a peer is gone."""


@contextmanager
def _as_on_caller(modes: Modes) -> Iterator[None]:
    """Run the block under the caller's settings of torch."""
    before = torch.get_default_dtype()
    with ExitStack() as within:
        within.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(modes.default_dtype)
        within.enter_context(torch.inference_mode(modes.is_inference))
        if not modes.is_inference:
            within.enter_context(torch.set_grad_enabled(modes.is_grad_enabled))
        for device, dtype in modes.autocast.items():
            within.enter_context(torch.autocast(device, dtype=dtype))
        within.enter_context(_bitwise(modes.threads))
        yield


def _bitwise(threads: int | None) -> AbstractContextManager[None]:
    return nullcontext() if threads is None else deterministic(threads)


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the dtypes and sizes of a forward's arguments, for messages."""
    told = [dtypes_and_sizes(one) for one in args] + [f"{key}={dtypes_and_sizes(kwargs[key])}" for key in kwargs]
    return ", ".join(told)


def _raised(error: BaseException, shard: int | None, what: str, got: str) -> Raised:
    try:
        exception = pickled(error)
        pickle.loads(exception)
    except Exception:  # an exception of the user's may refuse both
        exception = None
    told = ModelError("")
    told.__cause__ = error
    text = text_of(error) if not isinstance(error, Error) else str(error)
    frames = frames_of(told) or "".join(traceback.format_exception(error))
    return Raised(shard, what, f"{type(error).__name__}" + (f": {text}" if text else ""), got, frames, exception)
