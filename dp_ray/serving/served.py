"""A worker's side of parallel modules: it holds their copies, runs shards and keeps graphs. Begin at `Served.answer`.

A worker takes part in a collective in two places: where the modules' new elements come from rank 0, and where all
sum their gradients by the tree of `engine.sums.tree_sum`.
"""

import contextlib
import io
import os
import pickle
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dp_ray.engine.forward.call_state import CallState
from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.sums.tree_sum import (
    Gradients,
    TreeSums,
    coalesced,
    slice_sum,
    sparse_modules,
    sparse_sums,
)
from dp_ray.engine.user_code import dtypes_and_sizes, error_text
from dp_ray.engine.world import (
    everyone,
    failed_in_group,
    from_rank,
    has_peers,
    is_gpu,
    leave_group,
    own_rank,
    text_of,
)
from dp_ray.errors import Error, JobError, ModelError, frames_of
from dp_ray.plan.split import Shard
from dp_ray.plan.tree import Node, climb, parents
from dp_ray.process.determinism import of_cublas
from dp_ray.process.modes import Modes, as_on_caller, with_settings
from dp_ray.serving import shipped, wire
from dp_ray.serving.shipped import Structure, TensorForm
from dp_ray.system.threads import waiting
from dp_ray.tensors.flat import room, views
from dp_ray.tensors.tree import flatten, unflatten


class Copy:
    """A module's copy on this worker; its `state` has the tensors, in the caller's order."""

    def __init__(self, structure: Structure, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.structure = structure
        made = shipped.made(structure.pickled, tensors)
        self.module, self.elsewhere = made.module, made.elsewhere
        with_sparse = {id(module.weight) for module in sparse_modules(self.module)}
        self.sparse = {index for index, tensor in enumerate(tensors) if id(tensor) in with_sparse}
        self._modules = list(self.module.modules())  # without those that a forward makes
        self.state = CallState(self.module, tensors, self.elsewhere)
        self.replica = Replica(0, self.module, device, self.state)

    def set_modes(self, modes: Modes, graphs: "Sequence[Graph]") -> None:
        """Set what the caller may have set on its module: training or not, and what requires a gradient."""
        for module, training in zip(self._modules, modes.training, strict=True):
            if module.training is not training:
                module.training = training
        pairs = list(zip(self.state.tensors, modes.requires_grad, strict=True))
        if any(tensor.requires_grad != wants for tensor, wants in pairs):
            for graph in graphs:
                graph.keep_edges()
            for tensor, wants in pairs:
                tensor.requires_grad_(wants)


@dataclass(eq=False)
class Graph:
    """A shard's graph that waits for its backward: its ends, and how its call runs."""

    inputs: dict[int, torch.Tensor]  # leaves that want a gradient, by index
    outputs: list[torch.Tensor | None]  # None where a leaf has no graph
    trained: "list[torch.Tensor | GradientEdge]"
    forms: list[TensorForm]  # of `trained`
    sparse: frozenset[int]  # which of `trained` have sparse gradients
    got: str
    modes: Modes
    copy: Copy

    def keep_edges(self) -> None:
        """Have the backward reach the parameters of the call, also if these require no gradient any more."""
        self.trained = [get_gradient_edge(end) if isinstance(end, torch.Tensor) else end for end in self.trained]

    def backward(self, given: Sequence[torch.Tensor | None], keep_graph: bool) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs, then of the trained parameters, from those of the outputs."""
        wanted: Any = [*self.inputs.values(), *self.trained]
        pairs = [
            (end, seed) for end, seed in zip(self.outputs, given, strict=True) if end is not None and seed is not None
        ]
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


def nodes_of(asked: wire.Backward, ranks: int) -> tuple[list[list[Node]], Node]:
    """Return the nodes of the tree whose sums each rank holds once its backwards have run, and the root.

    With `bitwise` each shard is a leaf; else all shards of a worker are.
    """
    if asked.threads is None:
        used = sorted(set(asked.owners.values()))
        leaves = {rank: (at, at + 1) for at, rank in enumerate(used)}
        return [[leaves[rank]] if rank in leaves else [] for rank in range(ranks)], (0, len(used))
    root = (0, asked.shards)
    held: list[dict[Node, int]] = [{} for _ in range(ranks)]
    for shard in sorted(asked.owners):
        climb(held[asked.owners[shard]], (shard, shard + 1), 0, parents(root), lambda *_: 0)
    return [list(nodes) for nodes in held], root


class Served:
    """The copies of all parallel modules on a worker, and the graphs that wait for their backward.

    Its answers hold what the class `base` pickles. What is no worker is in the caller's process, and has no peers.
    """

    def __init__(self, device: str, base: type[pickle.Pickler], is_worker: bool = True) -> None:
        self._device = torch.device(device)
        self._pickler = base
        self._is_worker = is_worker
        self._copies: dict[int, Copy] = {}  # by the module's number
        self._graphs: dict[tuple[int, int], dict[int, Graph]] = {}  # by the numbers of module and call, by shard
        if is_worker:
            os.environ.update(of_cublas())

    def answer(self, message: Any) -> Any:
        """Do what a message asks for, and return the answer that its class names."""
        match message:
            case wire.Forward():
                return self._forward(message)
            case wire.Backward():
                return self._backward(message)
            case wire.HeldBytes():
                return self._held_bytes(message.module_number)
        raise TypeError(f"a worker of parallel modules knows no {type(message).__name__}")

    def _forward(self, asked: wire.Forward) -> list[wire.ForwardResult] | wire.Raised | wire.PeerLost:
        """Take in what is new, then run the shards in order, and keep their graphs."""
        module_number, at, got, what = asked.sync.module_number, None, "", "the module cannot be made on a worker:"
        outputs: list[wire.ForwardResult] = []
        text = io.StringIO()
        try:
            # Without shards too: new elements come by a broadcast, in which all workers take part.
            self._sync(asked.sync, asked.modes)
            if asked.spec is None:
                return []
            copy, what = self._copies[module_number], "the model"
            if any(graph.modes.training != asked.modes.training for graph in self._graphs_of(module_number)):
                copy.state.renew()
            copy.replica.begin(len(asked.shards))
            graphs: dict[int, Graph] = {}
            for given in asked.shards:
                at, text = given.shard, io.StringIO()
                copy.set_modes(asked.modes, [*self._graphs_of(module_number), *graphs.values()])
                leaves = [self._argument(leaf, asked.modes.is_grad_enabled) for leaf in given.leaves]
                inputs = {index: leaves[index].requires_grad_() for index in sorted(asked.requires_grad)}
                # A model may write into its inputs, but not into a leaf of a graph.
                own = [leaf.clone() if index in inputs else leaf for index, leaf in enumerate(leaves)]
                args, kwargs = unflatten(pickle.loads(asked.spec), own)
                got = _described(args, kwargs)
                output, graphs[at] = self._run(copy, asked, given, (inputs, args, kwargs), got, text)
                outputs.append(output)
            leads_back = asked.modes.is_grad_enabled and (asked.requires_grad or any(asked.modes.requires_grad))
            if leads_back and any(any(output.requires_grad) for output in outputs):
                # After all shards: of a call that raises, no graph stays.
                self._graphs.setdefault((module_number, asked.call_number), {}).update(graphs)
            return outputs
        except PeerIsLost as lost:
            return wire.PeerLost(str(lost))
        except (Exception, SystemExit) as error:
            if at is None or self._copies[module_number].state.lost:
                # What the copy holds is not known any more: the answer says so, and the next call brings it anew.
                self._copies.pop(module_number, None)
            printed = "".join(output.text for output in outputs) + text.getvalue()
            return self._raised(error, at, what, got, module_number in self._copies, printed)

    def _graphs_of(self, module_number: int) -> list[Graph]:
        of_module = [graphs for (number, _), graphs in self._graphs.items() if number == module_number]
        return [graph for graphs in of_module for graph in graphs.values()]

    def _argument(self, leaf: wire.Packed, may_stay: bool) -> Any:
        """Return a leaf of the inputs; a graph may keep it, and must not keep the room that it has in Ray's store.

        There it is for this call alone, so a model may write to it; in the caller's process it is the caller's.
        """
        is_own = leaf.dtype is not None and not is_gpu(self._device) and self._is_worker
        return wire.unpacked(leaf) if is_own and not may_stay else wire.owned(leaf, self._device)

    def _run(
        self,
        copy: Copy,
        asked: wire.Forward,
        given: wire.ShardInput,
        arguments: tuple[dict[int, torch.Tensor], Any, Any],
        got: str,
        text: io.StringIO,
    ) -> tuple[wire.ForwardResult, Graph]:
        modes, (inputs, args, kwargs) = asked.modes, arguments

        def run() -> tuple[Any, float]:
            started = time.perf_counter()
            with as_on_caller(modes), contextlib.redirect_stdout(text):
                result = copy.module(*args, **kwargs)
            if is_gpu(self._device):
                torch.cuda.synchronize(self._device)
            return result, time.perf_counter() - started

        result, seconds = copy.replica.run(Shard(asked.call_number, given.shard, 0, 0), run, seed=given.seed)
        ends, of_result = flatten(result)
        tree = shipped.dumped_output(of_result, ends, self._pickler, modes.is_grad_enabled)
        has_graph = [isinstance(end, torch.Tensor) and end.requires_grad for end in ends]
        indices = [index for index, wants in enumerate(modes.requires_grad) if wants]
        trained = [copy.state.tensors[index] for index in indices]
        sparse = frozenset(at for at, index in enumerate(indices) if index in copy.sparse)
        kept = [end if has else None for end, has in zip(ends, has_graph, strict=True)]
        forms = [copy.structure.forms[index] for index in indices]
        graph = Graph(inputs, kept, list(trained), forms, sparse, got, modes, copy)
        output = wire.ForwardResult(
            given.shard,
            tree,
            tuple(wire.packed(tensor) for tensor in ends),
            tuple(has_graph),
            seconds,
            text.getvalue(),
            sparse,
            ()
            if given.shard
            else tuple(
                written if written.value is None else written._replace(value=wire.packed(written.value))
                for written in copy.state.written()
            ),
        )
        return output, graph

    def _sync(self, sync: wire.Sync, modes: Modes) -> None:
        """Drop what nobody waits for; take the module, if it is new, and changed elements."""
        for call_number in sync.dropped:
            self._graphs.pop((sync.module_number, call_number), None)
        for module_number in sync.closed:
            self._copies.pop(module_number, None)
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if key[0] not in sync.closed}
        copy = self._copies.get(sync.module_number)
        structure = sync.whole.structure if sync.whole is not None else copy.structure if copy is not None else None
        assert structure is not None, "the caller knows what a worker has"
        forms, pieces = structure.forms, list[torch.Tensor]()
        if sync.changed:  # before anything that may fail: the other workers wait for this one all the same
            pieces = self._received([forms[index] for index in sync.changed], sync.data)
        if sync.whole is not None or copy is None:
            own = dict(zip(sync.changed, pieces, strict=True))
            if sync.whole is not None and sync.whole.data is not None:
                there = views(self._elements(forms, sync.whole.data), forms)
                own = {**dict(enumerate(there)), **own}
            pairs = zip(forms, (own[index] for index in range(len(forms))), modes.requires_grad, strict=True)
            self._copies[sync.module_number] = Copy(structure, [_made(*args) for args in pairs], self._device)
            return
        has_graphs = bool(self._graphs_of(sync.module_number))
        copy.state.load(sync.changed, pieces, has_graphs)
        copy.replica.restore()
        if has_graphs and not copy.elsewhere.isdisjoint(sync.changed):
            # What stands elsewhere than in modules too, as in a list, cannot be set there: the module is made anew.
            self._copies[sync.module_number] = Copy(structure, copy.state.tensors, self._device)

    def _received(self, forms: Sequence[TensorForm], data: Any) -> list[torch.Tensor]:
        """Return new elements on this worker's device: rank 0 has them from the caller, the others from rank 0."""
        buffer = self._elements(forms, data)
        if self._is_worker and has_peers():
            with _collective():
                from_rank(buffer)
        return views(buffer, forms)

    def _elements(self, forms: Sequence[TensorForm], data: Any) -> torch.Tensor:
        """Return the elements that have come, or room for them if data is None, on this worker's device."""
        size = sum(map(room, forms))
        if data is not None:
            return wire.owned(wire.Packed(torch.uint8, (size,), data), self._device)  # type: ignore[no-any-return]
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _backward(self, asked: wire.Backward) -> wire.BackwardResult | wire.Raised | wire.PeerLost:
        """Run the shards' backwards, and sum the gradients over the workers, of which each returns its slice."""
        has_group = self._is_worker and has_peers()
        group = everyone() if has_group else None
        rank, ranks = (own_rank(), group.size()) if group is not None else (0, 1)
        nodes, root = nodes_of(asked, ranks)
        sums = TreeSums(root)
        of_inputs: dict[int, dict[int, wire.Packed | None]] = {}
        raised: wire.Raised | None = None
        layout: wire.VectorLayout | None = None
        at, got, text = None, "", io.StringIO()
        try:
            graphs = self._graphs.get((asked.module_number, asked.call_number), {})
            for shard, given in asked.gradients.items():
                at, graph = shard, graphs[shard] if asked.keep_graph else graphs.pop(shard)
                got = graph.got
                seeds = [None if gradient is None else wire.owned(gradient, self._device) for gradient in given]
                # A backward may run forwards again, as of a checkpoint.
                graph.copy.set_modes(graph.modes, self._graphs_of(asked.module_number))
                with with_settings(graph.modes), contextlib.redirect_stdout(text):
                    found = graph.backward(seeds, asked.keep_graph)
                inputs, trained = found[: len(graph.inputs)], found[len(graph.inputs) :]
                of_inputs[shard] = {
                    index: None if gradient is None else wire.packed(gradient)
                    for index, gradient in zip(graph.inputs, inputs, strict=True)
                }
                layout = layout or wire.VectorLayout(graph.forms, graph.sparse, ranks)  # which all shards share
                # Without `bitwise` a worker adds its own shards as they come.
                node = nodes[rank][0] if asked.threads is None else (shard, shard + 1)
                sums.take(node, self._laid_out(asked, layout, trained))
        except (Exception, SystemExit) as error:
            raised = self._raised(error, at, "its backward", got, True, text.getvalue())
        if raised is not None:  # it takes part all the same: the others wait for its sums
            sums.held = {}
        if not asked.keep_graph:
            self._graphs.pop((asked.module_number, asked.call_number), None)
        try:
            slices, sparse = self._summed(asked, sums, nodes, group)
        except PeerIsLost as lost:
            return raised or wire.PeerLost(str(lost))
        if raised is not None:
            return raised
        return wire.BackwardResult(of_inputs, tuple(map(wire.packed, slices)), sparse, text.getvalue())

    def _laid_out(
        self, asked: wire.Backward, layout: wire.VectorLayout, gradients: Sequence[torch.Tensor | None]
    ) -> Gradients:
        """Return a shard's gradients as vectors, and after them the sparse ones, in memory of their own."""
        vectors = self._adding_nothing(asked)
        layout.put(vectors, gradients)
        sparse = coalesced([gradients[index] for index in asked.sparse])  # some may be dense, and another's too
        return [*vectors, *(None if one is None else one if one.is_sparse else one.clone() for one in sparse)]

    def _adding_nothing(self, asked: wire.Backward) -> list[torch.Tensor]:
        return [
            torch.full((length,), wire.ADDS_NOTHING, dtype=dtype, device=self._device)
            for dtype, length in asked.lengths.items()
        ]

    def _summed(
        self, asked: wire.Backward, sums: TreeSums, nodes: Sequence[Sequence[Node]], group: dist.ProcessGroup | None
    ) -> tuple[Sequence[Any], dict[int, Any]]:
        """Return this worker's slice of each vector's sum; on rank 0 also the sparse ones, packed."""
        count, total = len(asked.lengths), Gradients()
        if group is None:
            total = sums.finish() or [*self._adding_nothing(asked)]
        else:
            nothing = [None] * len(asked.sparse)
            rows = [sums.of(node) or [*self._adding_nothing(asked), *nothing] for node in nodes[group.rank()]]
            with _collective():
                # In the order of the message, which is the same to all: one collective for each dtype.
                for at, (dtype, length) in enumerate(asked.lengths.items()):
                    sent = torch.empty(len(rows), length, dtype=dtype, device=self._device)
                    for mine, row in zip(sent, rows, strict=True):
                        mine.copy_(row[at])
                    total.append(slice_sum(sent, nodes, sums.root, group) if length else sent.new_empty(0))
                forms = list(asked.sparse.values())
                of_nodes = [row[count:] for row in rows]
                total += sparse_sums(forms, of_nodes, nodes, sums.root, group, self._device)
        if group is not None and group.rank():
            return total[:count], {}
        own = zip(asked.sparse, total[count:], strict=False)
        return total[:count], {index: wire.parts_of(one) for index, one in own if one is not None}

    def _raised(
        self, error: BaseException, shard: int | None, what: str, got: str, has_module: bool, text: str
    ) -> wire.Raised:
        if isinstance(error, Error) and not isinstance(error, JobError):
            error = error.__cause__ or error  # the replica has put its words before the text
        try:
            exception = shipped.dumped(error, self._pickler)
            pickle.loads(exception)
        except Exception:  # an exception of the user's may refuse both
            exception = None
        told = ModelError(error_text(what, error, f"; it got {got}" if got else ""))
        told.__cause__ = error
        frames = frames_of(told) or "".join(traceback.format_exception(error))
        return wire.Raised(shard, str(told), frames, exception, has_module, text)

    def _held_bytes(self, module_number: int) -> int:
        """Return how many bytes the graphs of a module hold, as far as they can be seen: each storage once."""
        roots = [end.grad_fn for graph in self._graphs_of(module_number) for end in graph.outputs if end is not None]
        copy = self._copies.get(module_number)
        own = set() if copy is None else {tensor.untyped_storage().data_ptr() for tensor in copy.state.tensors}
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
                        for tensor in saved if isinstance(saved, tuple) else (saved,):
                            if isinstance(tensor, torch.Tensor):
                                storage = tensor.untyped_storage()
                                found[storage.data_ptr()] = storage.nbytes()
        return sum(size for at, size in found.items() if at not in own)


def _made(form: TensorForm, elements: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of a module in memory of its own."""
    made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=elements.device).copy_(elements)
    return nn.Parameter(made, requires_grad) if form.is_parameter else made.requires_grad_(requires_grad)


class PeerIsLost(Exception):
    """A collective failed since a peer is gone."""


@contextmanager
def _collective() -> Iterator[None]:
    """Leave the group if a collective of the block fails: peers that wait for this worker then hear of it."""
    try:
        with waiting("the other workers"):
            yield
    except RuntimeError as error:
        is_groups = failed_in_group(error) is not None
        leave_group()
        if not is_groups:
            raise
        raise PeerIsLost(text_of(error)) from error


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the dtypes and sizes of a forward's arguments, for messages."""
    told = [dtypes_and_sizes(arg) for arg in args] + [f"{key}={dtypes_and_sizes(kwargs[key])}" for key in kwargs]
    return ", ".join(told)
