"""`DataParallel`, the module that the user calls: one forward, one autograd node.

A call is cut as torch.chunk cuts it, run by the workers, and merged in order. For autograd it is one function of the
inputs and of the module's own parameters: its backward hands the outputs' gradients to the workers.
"""

import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from dp_ray.cluster.kinds import Workers, own_workers
from dp_ray.errors import DataError, JobError, ModelError
from dp_ray.job.errors import explain
from dp_ray.job.keys import ModuleKeys
from dp_ray.monitor.console import Console
from dp_ray.parallel.exchange import Call, Exchange, SharedWorkers, Ticket, to_caller
from dp_ray.parallel.weights import ModuleWatch
from dp_ray.plan.split import chunk_bounds, num_filled
from dp_ray.process.modes import modes_of
from dp_ray.serving.shipped import Wrapper, dumped_input
from dp_ray.serving.wire import ForwardResult, Packed, unpacked
from dp_ray.tensors.scatter import gather_leaves, num_rows, rows_dim
from dp_ray.tensors.tree import Keys, TreeSpec, flatten, leaf_keys, sizes, unflatten
from dp_ray.text import a_kind

PREFIX = "module."
MAX_WAITING = 64


class ShardShape(NamedTuple):
    """What became of a shard in the last call: sizes of inputs and outputs, where it ran, and for how long."""

    shard: int
    input: Any
    output: Any
    rank: int
    node: str
    device: str
    milliseconds: float


class DataParallel(Wrapper):
    """nn.DataParallel on workers of a Ray cluster: each call runs on all of them, with gradients.

    `module` is the bare module. A batch is cut along `dim` into `shards` pieces as torch.chunk cuts it, by default
    one for each worker. The outputs are merged in order, on the device of the module's parameters, else the inputs'.
    With `bitwise`, outputs and gradients are the same bits for any number of workers, at the same `shards`. Random
    numbers of a shard depend on (`seed`, call, shard) alone; `seed` is torch's initial one by default. At most
    `max_waiting` calls may wait for their backward. `keys` are `address` and `quiet`, and the keys of a job that
    concern workers: `gpus_per_worker`, `cpus_per_worker`, `placement`, `devices`, `env` and the like.

    All parallel modules of a process share its workers; those of a session have the session's. Raises JobError if a
    key is wrong or if more workers are asked for than run, and ClusterError if no Ray answers.

    >>> import dp_ray, torch
    >>> model = dp_ray.DataParallel(torch.nn.Linear(1, 1), workers=0, shards=2, quiet=True)
    >>> outputs = model(torch.ones(4, 1))
    >>> outputs.sum().backward()
    >>> outputs.shape, model.module.weight.grad
    (torch.Size([4, 1]), tensor([[4.]]))
    >>> [shape.input for shape in model.shapes]
    [torch.Size([2, 1]), torch.Size([2, 1])]
    """

    def __init__(
        self,
        module: nn.Module,
        workers: int = 1,
        *,
        dim: int = 0,
        shards: int | None = None,
        bitwise: bool = False,
        seed: int | None = None,
        **keys: Any,
    ) -> None:
        if not isinstance(module, nn.Module):
            got = f"the class {module.__qualname__}" if isinstance(module, type) else a_kind(module)
            raise JobError(f"module: must be a torch.nn.Module that is made, got {got}")
        # A notebook's cell that is run twice wraps what it has wrapped.
        super().__init__(module.module if isinstance(module, DataParallel) else module)
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise JobError(f"workers: must be a number of 0 or more, got {workers!r}")
        if of_torch := [key for key in ("device_ids", "output_device") if key in keys]:
            raise JobError(
                f"{of_torch[0]}: is nn.DataParallel's; here Ray gives each worker its device: say workers=N"
            )
        self.dim = dim
        self.shards = max(1, workers) if shards is None else shards
        self.bitwise = bitwise
        self.seed = torch.initial_seed() % 2**63 if seed is None else seed
        self.shapes: list[ShardShape] = []
        self._max_waiting: int = keys.pop("max_waiting", MAX_WAITING)
        self._address: str | None = keys.pop("address", None)
        self._quiet: bool = keys.pop("quiet", False)
        self._kind: Workers | None = keys.pop("_kind", None)  # of a session's `parallel`
        for key, value in (("shards", self.shards), ("max_waiting", self._max_waiting)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise JobError(f"{key}: must be a number of 1 or more, got {value!r}")
        self._keys = _worker_keys({"workers": workers, **keys})
        self._num_calls = 0
        self._begin()

    def _begin(self) -> None:
        """Take part in the process's workers; start them if there are none."""
        console = Console("parallel", self._quiet)
        kind = self._kind or own_workers(self._keys, self._address, verbose=False, console=console)
        workers = SharedWorkers.taken(kind, self._keys, console.say)
        self._exchange = Exchange(workers, self.bitwise, self._max_waiting, self._keys.max_workers)
        self._watch = ModuleWatch(self._exchange.pickler)
        try:
            self._watch.look(self.module)  # raises what is wrong with the module before its first call
        except BaseException:
            self._exchange.close()
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the workers, and return its outputs as the bare module would.

        Scalar outputs become a vector of one for each shard, unless `shards` is 1. Raises DataError if the inputs'
        tensors differ in rows, and ModelError, naming the shard and its sizes, if the module raises.
        """
        # torch.compile goes on after the call: it cannot look into what runs elsewhere. Its import takes seconds.
        dynamo = sys.modules.get("torch._dynamo")
        run = self._run if dynamo is None else dynamo.disable(self._run)
        return run(*args, **kwargs)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        batch = _Batch(args, kwargs, self.shards, self.dim, self._exchange.pickler)
        version = self._watch.look(self.module)
        modes = modes_of(self.module, self._watch.tensors, self._exchange.threads)
        wants = frozenset(
            index
            for index, leaf in enumerate(batch.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and modes.is_grad_enabled
        )
        trained = [tensor for tensor in self._watch.tensors if tensor.requires_grad]
        in_attributes = self._watch.of_graphs()
        call = Call(self._num_calls, version, modes, batch.pickled, self.shards, batch.shards, wants, self.seed)
        self._num_calls += 1
        ticket: Ticket | None = None
        if modes.is_grad_enabled and (wants or trained):
            self._exchange.check_waiting()
            ticket = Ticket(self._exchange, call)
        outputs, ranks = self._exchange.forward(call)
        results = [_Result.of(output) for output in outputs]
        self._take(call, outputs, results, batch, ranks)
        ends, spec, rows = self._merged(results, batch)
        has_graph = [any(flags) for flags in zip(*(output.requires_grad for output in outputs), strict=True)]
        if ticket is not None and any(has_graph):
            inputs = [batch.leaves[index] for index in sorted(wants)]
            lost = {at: tensor for at, tensor in enumerate(trained) if id(tensor) in in_attributes}
            path = functools.partial(self._watch.path, self.module)
            node = _Backward(ticket, batch, rows, has_graph, sorted(wants), self.dim, lost, path)
            trained = [tensor for at, tensor in enumerate(trained) if at not in lost]
            with_graph = [end for end, has in zip(ends, has_graph, strict=True) if has]
            made = iter(_Function.apply(node, with_graph, *inputs, *trained))  # type: ignore[no-untyped-call]
            ends = [next(made) if has else end for end, has in zip(ends, has_graph, strict=True)]
        return unflatten(spec, ends)

    def _take(
        self,
        call: Call,
        outputs: Sequence[ForwardResult],
        results: Sequence["_Result"],
        batch: "_Batch",
        ranks: Sequence[int],
    ) -> None:
        """Take in what comes beside the outputs: shapes, printed lines, and the buffers of shard 0."""
        shapes: list[ShardShape] = []
        for output, result, rank in zip(outputs, results, ranks, strict=True):
            place = call.owners[output.shard].place
            args, kwargs = sizes(unflatten(batch.spec, batch.shards[output.shard]))
            given = (args, kwargs) if kwargs else args[0] if len(args) == 1 else args
            made = sizes(unflatten(result.spec, result.leaves))
            shapes.append(
                ShardShape(output.shard, given, made, rank, place.node, place.device, output.seconds * 1000)
            )
            if output.text:
                sys.stdout.write(output.text)
        self.shapes = shapes
        if outputs and outputs[0].written:
            self._watch.take_written(self.module, outputs[0].written)

    def _merged(
        self, results: Sequence["_Result"], batch: "_Batch"
    ) -> tuple[list[Any], TreeSpec, list[list[int | None]]]:
        """Return the merged leaves on the caller's device, their tree, and each leaf's rows in each shard.

        The rows are None for a leaf that was a scalar in each shard.
        """
        device = self._device(batch)
        flat, rows = list[tuple[list[Any], TreeSpec]](), list[list[int | None]]()
        keys = leaf_keys(results[0].spec)
        for spec, leaves in results:
            by_key = dict(zip(leaf_keys(spec), leaves, strict=True))
            own = [by_key.get(key) for key in keys]
            if self.dim and self.shards > 1 and batch.bounds is not None:
                self._check_rows(len(flat), batch.bounds[len(flat)], dict(zip(keys, own, strict=True)))
            rows.append([v.shape[rows_dim(v, self.dim)] if v is not None and v.ndim else None for v in own])
            if self.shards > 1:
                leaves = [leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in leaves]
            flat.append((leaves, spec))
        if len(flat) == 1:
            merged = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy() for leaf in flat[0][0]]
        else:
            merged = gather_leaves(flat, [None] * len(flat), self.dim)
        ends = [to_caller(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in merged]
        return ends, flat[0][1], [list(column) for column in zip(*rows, strict=True)]

    def _check_rows(self, shard: int, bounds: tuple[int, int], leaves: Mapping[Keys, Any]) -> None:
        """Raise DataError if an output of a shard has its rows in another dimension than `dim`, unlike the inputs."""
        num = bounds[1] - bounds[0]
        for keys, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[rows_dim(leaf, self.dim)] != num:
                name = f"output {'.'.join(map(str, keys))!r}" if keys else "the output"
                raise DataError(
                    f"shard {shard}: {name} has size {list(leaf.shape)}, without the shard's {num} rows in dimension "
                    f"{self.dim}, where dim={self.dim} joins the shards; transpose it in the module"
                )

    def _device(self, batch: "_Batch") -> torch.device:
        """Return the caller's device: that of the module's parameters, else of the inputs."""
        for tensor in [*self._watch.tensors, *batch.leaves]:
            if isinstance(tensor, torch.Tensor):
                return tensor.device
        return torch.device("cpu")

    def close(self) -> None:
        """Leave the workers; they end with the last module that uses them. The bare module stays as it is."""
        self._exchange.close()

    def __enter__(self) -> "DataParallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the bare module's state: its keys have no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the bare module's state, also one with nn.DataParallel's prefix `module.`."""
        return self.module.load_state_dict(self._without_prefix(state_dict), *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Within another module: have the keys of this one carry the prefix that torch looks for."""
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        for key in own:
            del state_dict[key]
        bare = self._without_prefix({key.removeprefix(prefix): value for key, value in own.items()})
        state_dict.update({f"{prefix}{PREFIX}{key}": value for key, value in bare.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _without_prefix(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        has_prefix = bool(state) and all(key.startswith(PREFIX) for key in state)
        if not has_prefix or all(key.startswith(PREFIX) for key in self.module.state_dict()):
            return state
        return {key.removeprefix(PREFIX): value for key, value in state.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_exchange", "_watch")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


def _worker_keys(keys: dict[str, Any]) -> ModuleKeys:
    """Validate the keys. Raises JobError, which lists every wrong one."""
    try:
        checked = ModuleKeys.model_validate(keys)
    except ValidationError as error:
        raise JobError("\n".join(explain(error))) from None
    if checked.min_workers != checked.max_workers:
        raise JobError(f"workers: must be a number of 0 or more, got {keys['workers']!r}")
    if len(checked.devices or ()) > 1 or (checked.gpus_per_worker != "auto" and checked.gpus_per_worker > 1):
        raise JobError("gpus_per_worker and devices: a worker of a parallel module has one device")
    return checked


class _Batch:
    """A call's arguments, cut into shards: tensors along `dim`, all else goes whole to each shard.

    That are scalar tensors, numpy arrays, strings and objects. Without a tensor to cut, each shard gets the same;
    without any argument there is one shard. Raises DataError if the tensors differ in rows, or cannot be sent.
    """

    def __init__(self, args: Any, kwargs: Any, shards: int, dim: int, pickler: type[pickle.Pickler]) -> None:
        leaves, self.spec = flatten((args, kwargs))
        self.pickled = dumped_input(self.spec, leaves, pickler, torch.is_grad_enabled())
        self.leaves = [_usual(leaf) for leaf in leaves]
        self.is_cut = [isinstance(leaf, torch.Tensor) and leaf.ndim > 0 for leaf in self.leaves]
        names = [".".join(map(str, keys[1:])) for keys in leaf_keys(self.spec)]
        named = zip(names, self.leaves, self.is_cut, strict=True)
        self.rows = num_rows({name: leaf for name, leaf, is_cut in named if is_cut}, dim)
        if self.rows is None:
            num = shards if args or kwargs else 1
            self.bounds: list[tuple[int, int]] | None = None
        else:
            num = max(1, num_filled(self.rows, shards))
            self.bounds = [chunk_bounds(self.rows, shards, shard) for shard in range(num)]
        self.shards = [list(self._shard(shard, dim)) for shard in range(num)]

    def _shard(self, shard: int, dim: int) -> Iterator[Any]:
        for leaf, is_cut in zip(self.leaves, self.is_cut, strict=True):
            if is_cut and self.bounds is not None and isinstance(leaf, torch.Tensor):
                start, stop = self.bounds[shard]
                yield leaf.detach().narrow(rows_dim(leaf, dim), start, stop - start)
            else:
                yield leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class _Result(NamedTuple):
    """The output of a shard, taken apart."""

    spec: TreeSpec
    leaves: list[Any]

    @classmethod
    def of(cls, output: ForwardResult) -> "_Result":
        """Read what a worker has sent."""
        return cls(pickle.loads(output.tree), [unpacked(leaf) for leaf in output.leaves])


def _usual(leaf: Any) -> Any:
    """Return a leaf; of an inference tensor a copy that is none, which a graph may save."""
    is_inference = isinstance(leaf, torch.Tensor) and leaf.is_inference() and not torch.is_inference_mode_enabled()
    return leaf.clone() if is_inference else leaf


class _Backward(NamedTuple):
    """What the backward of a call needs."""

    ticket: Ticket
    batch: _Batch
    rows: list[list[int | None]]  # of each output leaf in each shard; None for a scalar
    has_graph: list[bool]  # of each output leaf
    inputs: list[int]  # the leaves that want a gradient
    dim: int
    lost: dict[int, torch.Tensor]  # what is trained, but would get no gradient, by its place among the trained
    path: Callable[[torch.Tensor], str]  # tells where in the module a tensor stands

    def of_shards(self, given: Sequence[torch.Tensor | None]) -> dict[int, list[torch.Tensor | None]]:
        """Cut the outputs' gradients into those of the shards' outputs."""
        rest = iter(given)
        columns: list[list[torch.Tensor | None]] = []
        for rows, has in zip(self.rows, self.has_graph, strict=True):
            end = next(rest) if has else None
            if end is None:
                columns.append([None] * len(rows))
            elif rows[0] is None:  # a vector of the shards' scalars, or the scalar of a single one
                columns.append(list(end.reshape(len(rows)).unbind()))
            else:
                columns.append(list(torch.split(end, [length or 0 for length in rows], rows_dim(end, self.dim))))
        return {shard: [column[shard] for column in columns] for shard in range(len(self.batch.shards))}

    def of_inputs(self, found: Mapping[int, Mapping[int, Packed | None]]) -> list[torch.Tensor | None]:
        """Merge the shards' gradients of the inputs; of one that each shard had whole, add them up."""
        merged: list[torch.Tensor | None] = []
        for index in self.inputs:
            whole = self.batch.leaves[index]
            assert isinstance(whole, torch.Tensor)
            pieces = [
                None if found[shard][index] is None else unpacked(found[shard][index])  # type: ignore[arg-type]
                for shard in range(len(self.batch.shards))
            ]
            if all(piece is None for piece in pieces):
                merged.append(None)
                continue
            own = [
                torch.zeros(shard[index].shape, dtype=whole.dtype) if piece is None else piece
                for shard, piece in zip(self.batch.shards, pieces, strict=True)
            ]
            is_cut = self.batch.is_cut[index]
            total = torch.cat(own, rows_dim(whole, self.dim)) if is_cut else torch.stack(own).sum(0)
            merged.append(to_caller(total, whole.device))
        return merged

    def of_trained(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of what is trained. Raises ModelError, with its path, if one would be lost."""
        for at, tensor in self.lost.items():
            if found[at] is not None:
                raise ModelError(
                    f"{self.path(tensor)} holds a tensor of a graph, to which no gradient comes: pass it as an "
                    "input, or as a parameter, by torch.func.functional_call"
                )
        return [gradient for at, gradient in enumerate(found) if at not in self.lost]


class _Function(torch.autograd.Function):
    """The workers' forward and backward as one function of the input leaves and of the module's parameters."""

    @staticmethod
    def forward(ctx: Any, node: _Backward, ends: list[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs that have a graph on the workers."""
        ctx.node = node
        ctx.set_materialize_grads(False)
        return tuple(ends)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input leaves and of the parameters."""
        node: _Backward = ctx.node
        if torch.is_grad_enabled():
            raise ModelError(
                "create_graph=True: the graph of a dp_ray.DataParallel is on its workers, and cannot be "
                "differentiated twice; compute what needs it, as a gradient penalty, within the module's forward"
            )
        if node.ticket.of is None:
            raise RuntimeError(
                "Trying to backward through the graph of a dp_ray.DataParallel a second time: the workers have freed "
                "it; specify retain_graph=True for the first backward"
            )
        keep_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        exchange, call = node.ticket.of
        inputs, trained = exchange.backward(call, node.of_shards(given), keep_graph)
        if not keep_graph:
            node.ticket.done()
        return None, None, *node.of_inputs(inputs), *node.of_trained(trained)
