"""Build a model of which each worker holds a part: torch's `fully_shard` (FSDP2), shard by shard.

Begin at `build_sharded`. A model that would train otherwise once shards replace its parameters is refused, by name.
"""

import functools
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dp_ray.engine.model import as_module, build_model, follow_shards
from dp_ray.engine.random import seed_all
from dp_ray.engine.recompute import choose_blocks, recompute_blocks
from dp_ray.engine.reduce import make_gradients_dense
from dp_ray.engine.sharded.deferred import CannotDefer, Recording, Ref, perform, record
from dp_ray.engine.sharded.state import FsdpRound, Gather, Sharded, SumScatter, TreeScatter
from dp_ray.engine.weights import check_has_shape
from dp_ray.engine.world import CPU, World, everyone, is_gpu, new_group
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import build, resolve
from dp_ray.system.process import patched
from dp_ray.tensors.files import local, rows_of_rank
from dp_ray.text import listed

DDP = "take strategy: ddp, or change the model"
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MetaTensors = Iterator[tuple[int, torch.Tensor]]  # of tensors on the meta device, by their ids there
Places = dict[int, list[tuple[dict[str, Any], str]]]


def build_sharded(job: Job, world: World, say: Callable[[str], None]) -> Sharded:
    """Build the job's model with the initial weights of `build_model`, holding this worker's shards alone.

    Every rank calls this. `say` gets lines for the user. Raises what `build_model` raises, and JobError for a model
    that cannot be sharded.
    """
    model, values, replaced = _on_meta(job, say)
    places = _places(model)
    # Attributes that the model's code set on its parameters: an optimizer may read them.
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    root, current, replicated = shard_in_place(job, world, model)
    if replicated:
        sizes = [f"{name} ({parameter.nbytes} bytes)" for name, parameter in replicated.items()]
        say(f"fsdp: each worker holds whole what cannot be sharded: {listed(sizes)}")
    names = list(replicated)
    del replicated  # else `replaced.check` would find that this name keeps an old tensor
    tensors = _materialise(places, world.device, job.fsdp.offload)
    for module in model.modules():
        if type(module).__setattr__ is not nn.Module.__setattr__:  # it notes its parameters, as an LSTM does
            for name, parameter in list(module._parameters.items()):
                setattr(module, name, parameter)
    replaced.check(model)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])
    for number, whole in values:
        _copy_rows(tensors[number], whole, world)
        del whole  # before the next one is made: so one whole tensor is in memory at a time
    kept_whole = {name: model.get_parameter(name) for name in names}
    return Sharded(model, root, kept_whole, current, world, recasts(job))


def shard_in_place(job: Job, world: World, model: nn.Module) -> tuple[FSDPModule, FsdpRound, dict[str, nn.Parameter]]:
    """Shard a model over the workers; return its root, its rounds, and what stays whole, by name."""
    make_gradients_dense(model)
    replicated = _kept_whole(model)
    recompute_blocks(job, model, [world.device])
    return *_shard(job, world, model, set(replicated.values())), replicated


def recasts(job: Job) -> bool:
    """Return whether a training casts its weights again for each operation, and for its backward.

    With `bitwise` it does not: torch adds the gradients of a weight that is used twice before their cast if it keeps
    the copy, as one process does, and after it else.
    """
    return job.precision != "fp32" and not job.bitwise


class Replaced:
    """A model's tensors before they are replaced, to find out who else keeps them."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: weakref.ref(tensor) for name, tensor in _named(model)}

    def check(self, model: nn.Module) -> None:
        """Raise JobError if a list, a function or the like keeps a tensor that is no longer the model's."""
        if not self._stale(model):
            return
        gc.collect()
        stale = self._stale(model)
        # One without a Python object that refers to it is only part of autograd's graph, from the constructor.
        keepers = [referrer for referrer in gc.get_referrers(*stale.values()) if not isinstance(referrer, FrameType)]
        kept = {id(held) for keeper in keepers if keeper is not stale for held in gc.get_referents(keeper)}
        if names := [name for name, reference in stale.items() if id(reference) in kept]:
            raise JobError(
                "strategy: fsdp puts shards in the place of the model's tensors, but something else keeps these: "
                f"{listed(names)}; {DDP}: a list, dict or function must take them from the module when it runs"
            )

    def _stale(self, model: nn.Module) -> dict[str, torch.Tensor]:
        now = {id(tensor) for _, tensor in _named(model)}
        alive = {name: tensor for name, ref in self._before.items() if (tensor := ref()) is not None}
        return {name: tensor for name, tensor in alive.items() if id(tensor) not in now}


def _on_meta(job: Job, say: Callable[[str], None]) -> tuple[nn.Module, MetaTensors, Replaced]:
    """Build the model on the meta device; return it, the values of its tensors, and its tensors before."""
    if isinstance(job.model, Target):
        resolve("model", job.model)
        seed_all(job.seed)
        try:
            made, recording = record(lambda: build("model", job.model))
            model = as_module(made)
            follow_shards(model)
            _check_no_others(model, recording)
            replaced = _checked(model)
            refs: dict[int, list[tuple[int, Ref]]] = defaultdict(list)  # now: its tensors are about to be replaced
            for _, tensor in _named(model):
                if tensor.is_meta:
                    ref = recording.ref(tensor)
                    refs[ref.memory].append((id(tensor), ref))
            return model, _replayed(recording, refs), replaced
        except CannotDefer as error:
            reason = str(error).splitlines()[0]
    else:
        reason = "it is an object that is made already"
    model = build_model(job, [CPU])
    replaced = _checked(model)
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    what = job.model.label if isinstance(job.model, Target) else type(model).__qualname__
    say(f"fsdp: {what} cannot be built shard by shard, so each worker builds it whole, in {size} bytes: {reason}")
    return model, _emptied(model), replaced


def _checked(model: nn.Module) -> Replaced:
    """Return the model's tensors, after a check that all can be replaced."""
    for name, parameter in model.named_parameters():
        check_has_shape(name, parameter)
    check_shardable(model)
    return Replaced(model)


def check_shardable(model: nn.Module) -> None:
    """Raise JobError for TorchScript, for hooks of parameters, and for tensors that share memory.

    A shard has memory and hooks of its own, and a TorchScript module keeps its parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(f"strategy: fsdp cannot shard {name or 'the model'}, a TorchScript module; {DDP}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise JobError(
                f"strategy: fsdp: the parameter {name} has a hook, which its shards would not have; {DDP}, like with "
                "a hook of the module"
            )
    for first, second in _sharing(model):
        raise JobError(
            f"strategy: fsdp: {first} and {second} are two tensors in the same memory, and would become two of their "
            f"own; {DDP}: assign the same Parameter twice"
        )


def _sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of two tensors that have elements in common."""
    beside: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _named(model):
        if tensor.layout is torch.strided and tensor.numel() and not torch.nn.parameter.is_lazy(tensor):
            beside[tensor.untyped_storage()._cdata].append((name, tensor))
    for group in beside.values():
        for (name, first), (other, second) in itertools.combinations(group, 2):
            if _overlap([first, second]):
                yield name, other


def _overlap(pair: Sequence[torch.Tensor]) -> bool:
    spans = []
    for tensor in pair:
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        begin = int(tensor.storage_offset())
        spans.append((begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize))
    (begin, end), (start, stop) = spans
    if end <= start or stop <= begin:
        return False
    if pair[0].itemsize != pair[1].itemsize:
        return True
    used = torch.zeros(max(end, stop) // pair[0].itemsize, dtype=torch.bool)  # they may be columns of a matrix
    first, second = (used.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()) for tensor in pair)
    first.copy_(torch.tensor(True).expand(first.shape))
    return bool(second.any())


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _check_no_others(model: nn.Module, recording: Recording) -> None:
    """Raise CannotDefer if anything keeps a recorded tensor that is neither parameter nor buffer."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise CannotDefer(f"{name}.{key} is a tensor that is neither a parameter nor a buffer")
    mine = {id(memory) for _, tensor in _named(model) for memory in (tensor, tensor._base)}
    if any(id(tensor) not in mine for tensor in recording.alive()):
        gc.collect()
    for tensor in recording.alive():
        if id(tensor) not in mine:
            raise CannotDefer(
                f"something keeps a tensor of shape {list(tensor.shape)} that is no parameter and no buffer"
            )


def _replayed(recording: Recording, refs: dict[int, list[tuple[int, Ref]]]) -> MetaTensors:
    """Yield the tensors of a recorded model, each when it is made; `refs` are those of each memory."""
    for memory, storage in perform(recording, list(refs)):
        for number, ref in refs[memory]:
            yield number, ref.of(storage)
        del storage


def _emptied(model: nn.Module) -> MetaTensors:
    """Move a model's parameters to the meta device; return their values, each of which is freed once it is read."""
    values: list[tuple[int, torch.Tensor]] = []
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
                values.append((id(made[id(parameter)]), parameter.detach()))
            module._parameters[name] = made[id(parameter)]
    return (values.pop() for _ in range(len(values)))


def _places(model: nn.Module) -> Places:
    """Return where each parameter and buffer stands, by the id of the tensor."""
    places: Places = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    return places


def _kept_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that FSDP cannot shard: scalars, other layouts, complex ones, a second dtype's."""
    bytes_of: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_complex():
            bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + parameter.nbytes
    main = max(bytes_of, key=lambda dtype: bytes_of[dtype], default=torch.float32)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 0
        or not parameter.numel()
        or parameter.is_complex()
        or not parameter.is_contiguous()
        or (parameter.requires_grad and parameter.dtype != main)
    }


def _shard(job: Job, world: World, model: nn.Module, whole: set[nn.Parameter]) -> tuple[FSDPModule, FsdpRound]:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise JobError(f"strategy: fsdp needs torch 2.13 or later, got {torch.__version__}")
    group = everyone()
    assert group is not None, "fsdp runs in a process group"
    with patched(device_mesh, get_rank=group.rank):  # torch asks its default group, of this worker alone
        mesh = DeviceMesh.from_group(group, world.device.type)
    mixed = job.fsdp.mixed_precision
    dtypes = (None, None) if mixed is None else (DTYPES[mixed.param], DTYPES[mixed.reduce])
    reshard = None if job.fsdp.reshard_after_forward == "auto" else job.fsdp.reshard_after_forward
    offload = CPUOffloadPolicy() if job.fsdp.offload and world.device.type != "cpu" else OffloadPolicy()
    keys: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": whole}
    for block in choose_blocks(job, model):
        if job.compile:  # what FSDP does before and after the forward stays outside
            block.forward = torch.compile(block.forward)
        fully_shard(block, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(*dtypes), **keys)
    policy = MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)  # the root's inputs hold targets too
    root = fully_shard(Root(model), mp_policy=policy, **keys)
    if dtypes[0] is not None:
        # The model's own inputs: its parameters are gathered in this dtype.
        model.register_forward_pre_hook(functools.partial(_cast_floats, dtypes[0]), with_kwargs=True)
    # A group on the CPUs: to ask over GPUs would wait for the whole forward.
    current = FsdpRound(group=new_group("gloo") if is_gpu(world.device) else group)
    for number, (name, module) in enumerate(root.named_modules()):  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            _set_collectives(module, job, current, name.removeprefix("model."))
            module.register_forward_pre_hook(functools.partial(_note_block, current, number))  # type: ignore[attr-defined]
    root.set_reduce_scatter_unused_params(True)  # a worker without a gradient takes part with zeros
    return root, current


class Root(nn.Module):
    """The root of a sharded model: it gathers the parameters outside the blocks, then calls a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return what `run` returns for `args`."""
        return run(*args)


def _set_collectives(module: FSDPModule, job: Job, current: FsdpRound, name: str) -> None:
    """Set how a block is gathered, and how its gradients are summed."""
    group: Any = module._get_fsdp_state()._fsdp_param_group
    module.set_gradient_divide_factor(1.0)
    module.set_custom_all_gather(Gather(current, name))  # type: ignore[arg-type]
    if not job.bitwise or group is None:
        module.set_custom_reduce_scatter(SumScatter(current, name))  # type: ignore[arg-type]
        return
    trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
    scatter = TreeScatter(current, name, trained, job.num_shards)
    module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    if current.group is not None and current.group.size() == 1:
        module.set_all_reduce_hook(scatter.alone)


def _note_block(current: FsdpRound, number: int, *_: Any) -> None:
    current.runs(number)


def _cast_floats(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value,
        (args, kwargs),
    )


def _materialise(places: Places, device: torch.device, is_offloaded: bool) -> dict[int, torch.Tensor]:
    """Give each tensor of the model memory, a shard of a sharded one; by the id of the tensor on the meta device."""
    made: dict[int, torch.Tensor] = {}
    for number, where in places.items():
        held, name = where[0]
        tensor = held[name]
        at = CPU if is_offloaded and hasattr(tensor, "to_local") else device
        fresh = torch.empty_like(tensor, device=at) if tensor.is_meta else tensor.to(at)
        made[number] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
        for held, name in where:
            held[name] = made[number]
    return made


@torch.no_grad()
def _copy_rows(tensor: torch.Tensor, whole: torch.Tensor, world: World) -> None:
    """Copy this worker's rows of a whole tensor."""
    mine = local(tensor)
    if mine is tensor:
        tensor.copy_(whole)
    elif mine.numel():
        first, end = rows_of_rank(whole.shape[0], world.world_size, world.rank)
        mine.copy_(whole[first:end])
