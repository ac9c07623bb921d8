"""Build a model of which each worker holds a part: torch's `fully_shard` (FSDP2).

Begin at `build_sharded`. A model that would train otherwise once shards replace its parameters is refused, by name.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.overrides import TorchFunctionMode

from dp_ray.engine.forward.model import build_model
from dp_ray.engine.forward.recompute import choose_blocks, recompute_blocks
from dp_ray.engine.forward.weights import check_has_shape
from dp_ray.engine.sharded.state import FsdpRound, Gather, Sharded, SumScatter, TreeScatter
from dp_ray.engine.sums.tree_sum import make_gradients_dense
from dp_ray.engine.world import CPU, World, everyone, gathered, is_gpu, new_group
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.system.process import patched
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import in_memory, is_sharded, local
from dp_ray.tensors.flat import as_bytes, from_bytes
from dp_ray.text import listed

DDP = "take strategy: ddp, or change the model"
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
META = torch.device("meta")
RATES = (torch.linspace, torch.logspace)


def build_sharded(job: Job, world: World, say: Callable[[str], None]) -> Sharded:
    """Build the job's model with the initial weights of `build_model`, of which this worker keeps its shards.

    Rank 0 alone builds it whole, on its host. The others build it without memory, and take their rows of one tensor
    after another. Every rank calls this. `say` gets lines for the user. Raises what `build_model` raises, and
    JobError for a model that cannot be sharded.
    """
    model, is_sent = _built(job, world, say)
    check_shardable(model)
    before = {name: weakref.ref(tensor) for name, tensor in _named(model)}
    # Attributes that the model's code set on its parameters: an optimizer may read them.
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    values = {name: tensor.detach() for name, tensor in _named(model)}
    replace_tensors(model, lambda tensor: tensor.detach().to(META) if isinstance(tensor, nn.Parameter) else tensor)
    root, current = shard_in_place(job, world, model)
    device, of_shards = world.device, CPU if job.fsdp.offload else world.device

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:  # a buffer has its values already
        at = of_shards if is_sharded(tensor) else device
        return torch.empty_like(tensor, device=at) if tensor.is_meta else tensor.to(at)

    replace_tensors(model, with_memory)
    for module in model.modules():
        if type(module).__setattr__ is not nn.Module.__setattr__:  # it notes its parameters, as an LSTM does
            for name, parameter in list(module._parameters.items()):
                setattr(module, name, parameter)
    check_released(before, model)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])
    for name, tensor in _named(model):
        whole = values.pop(name)  # freed before the next one is received
        stored = in_memory(_from_rank_0(whole, world, current) if is_sent else whole)
        local(tensor.detach()).copy_(stored.like(tensor, world.world_size, world.rank))
    sharded = Sharded(model, root, current, world, recasts(job))
    if sharded.replicated:
        sizes = [f"{name} ({parameter.nbytes} bytes)" for name, parameter in sharded.replicated.items()]
        say(f"fsdp: each worker holds whole what cannot be sharded: {listed(sizes)}")
    return sharded


def recasts(job: Job) -> bool:
    """Return whether a training casts its weights again for each operation, and for its backward.

    With `bitwise` it does not: torch adds the gradients of a weight that is used twice before their cast if it keeps
    the copy, as one process does, and after it else.
    """
    return job.precision != "fp32" and not job.bitwise


def check_released(before: dict[str, "weakref.ref[torch.Tensor]"], model: nn.Module) -> None:
    """Raise JobError if a list, a function or the like keeps a tensor of `before` that is no longer the model's."""
    gc.collect()
    now = {id(tensor) for _, tensor in _named(model)}
    stale = {name: tensor for name, ref in before.items() if (tensor := ref()) is not None and id(tensor) not in now}
    # One without a Python object that refers to it is only part of autograd's graph, from the constructor.
    keepers = [referrer for referrer in gc.get_referrers(*stale.values()) if not isinstance(referrer, FrameType)]
    kept = {id(held) for keeper in keepers if keeper is not stale for held in gc.get_referents(keeper)}
    if names := [name for name, tensor in stale.items() if id(tensor) in kept]:
        raise JobError(
            "strategy: fsdp puts shards in the place of the model's tensors, but something else keeps these: "
            f"{listed(names)}; {DDP}: a list, dict or function must take them from the module when it runs"
        )


def _built(job: Job, world: World, say: Callable[[str], None]) -> tuple[nn.Module, bool]:
    """Build the model; return whether rank 0 alone has its values, and has to send them. Every rank calls this.

    If a worker cannot build it without memory, or builds another one so, all build it whole.
    """
    if world.world_size == 1 or not isinstance(job.model, Target):  # or all have the object
        return build_model(job, [CPU]), False
    model: nn.Module | None = None
    failed: JobError | None = None
    try:
        model = build_model(job, [CPU]) if world.rank == 0 else build_on_meta(job)
    except JobError as error:
        failed = error
    described = None if model is None else _description(model)
    seen = gathered((described, str(failed or ""), torch.get_rng_state()))
    if failed is not None and world.rank == 0:
        raise failed
    expected, _, state = seen[0]
    differ = "its tensors have other sizes, strides or types on torch's meta device"
    reasons = [why or differ for theirs, why, _ in seen if why or theirs != expected]
    if model is not None and not reasons:
        torch.set_rng_state(state)  # as if all had drawn the values
        return model, True
    model = model if model is not None and world.rank == 0 else build_model(job, [CPU])
    says = f"{job.model.label} cannot be built shard by shard, so each worker builds it whole"
    say(f"fsdp: {says}, in {sum(tensor.nbytes for _, tensor in _named(model))} bytes: {reasons[0]}")
    return model, False


def build_on_meta(job: Job) -> nn.Module:
    """Build the job's model, a target, on torch's meta device: its tensors have no memory, and no values.

    Raises JobError, with the reason alone, if its constructor needs values of its tensors, or if something else than
    a parameter or buffer keeps one.
    """
    others = _alive_on_meta()
    try:
        with META, OnMeta():
            model = build_model(job, [META])
    except JobError as error:
        cause = error.__cause__ or error
        raise JobError(f"{type(cause).__name__}: {cause}".splitlines()[0]) from error
    gc.collect()
    known = {id(kept) for _, tensor in _named(model) for kept in (tensor, tensor._base)} | set(map(id, others))
    if kept := [tensor for tensor in _alive_on_meta() if id(tensor) not in known]:
        shape = list(kept[0].shape)
        raise JobError(f"something keeps a tensor of shape {shape} that is no parameter and no buffer")
    return model


class OnMeta(TorchFunctionMode):
    """A mode in which constructors make all tensors on the meta device, also where they name another one.

    RATES have numbers: constructors read them, layer by layer.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keys = dict(kwargs or {})
        if function in RATES:
            keys.setdefault("device", CPU)
        elif keys.get("device") is not None:
            keys["device"] = META
        return function(*args, **keys)


def _alive_on_meta() -> list[torch.Tensor]:
    """Return the tensors on the meta device that anything in this process keeps."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_meta]


def _description(model: nn.Module) -> list[Any]:
    """Return what must be alike on all workers: names, ties, sizes, layouts and types of all tensors."""
    numbers: dict[int, int] = {}
    described = []
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            number = numbers.setdefault(id(tensor), len(numbers))
            strides = tensor.stride() if tensor.layout is torch.strided else str(tensor.layout)
            described.append((name, number, tuple(tensor.shape), strides, tensor.dtype, tensor.requires_grad))
    return described


def check_shardable(model: nn.Module) -> None:
    """Raise JobError for TorchScript, for hooks of parameters, and for tensors that share memory.

    A shard has memory and hooks of its own, and a TorchScript module keeps its parameters. Raises ModelError for a
    tensor that has no shape yet.
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
    spans = []  # of memory: if two overlap, two that follow each other do
    for name, tensor in _named(model):
        check_has_shape(name, tensor)
        if tensor.layout is torch.strided and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            begin = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((tensor.untyped_storage()._cdata, begin, begin + (last + 1) * tensor.itemsize, name))
    for (storage, _, end, first), (other, begin, _, second) in itertools.pairwise(
        sorted(spans, key=itemgetter(0, 1))
    ):
        if storage == other and begin < end:
            raise JobError(
                f"strategy: fsdp: {first} and {second} are two tensors in the same memory, and would become two of "
                f"their own; {DDP}: assign the same Parameter twice"
            )


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def replace_tensors(model: nn.Module, new: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> None:
    """Put what `new` gives in the place of each parameter and buffer of a model; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules() if recurse else [model]:
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with torch.no_grad():
                        fresh = new(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP cannot shard: scalars, other layouts, complex ones, a second dtype's."""
    bytes_of: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_complex():
            bytes_of[parameter.dtype] = bytes_of.get(parameter.dtype, 0) + parameter.nbytes
    main = max(bytes_of, key=lambda dtype: bytes_of[dtype], default=torch.float32)
    return {
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 0
        or not parameter.numel()
        or parameter.is_complex()
        or not parameter.is_contiguous()
        or (parameter.requires_grad and parameter.dtype != main)
    }


def shard_in_place(job: Job, world: World, model: nn.Module) -> tuple[FSDPModule, FsdpRound]:
    """Shard a model over the workers; return its root, and its rounds."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise JobError(f"strategy: fsdp needs torch 2.13 or later, got {torch.__version__}")
    make_gradients_dense(model)
    whole = _kept_whole(model)
    recompute_blocks(job, model, [world.device])
    group = everyone()
    assert group is not None, "fsdp runs in a process group"
    with patched(device_mesh, get_rank=group.rank):  # torch asks its default group, of this worker alone
        mesh = DeviceMesh.from_group(group, world.device.type)
    # It finds its group by name as well. What torch remembers of sharded tensors holds the mesh, and so the group.
    getattr(mesh, "_pg_registry", {}).clear()
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
        cast_inputs(model, dtypes[0])  # its parameters are gathered in this dtype
    # A group on the CPUs: to ask over GPUs would wait for the whole forward.
    current = FsdpRound(group=new_group("gloo") if is_gpu(world.device) else group)
    for number, (name, module) in enumerate(root.named_modules()):  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            _set_collectives(module, job, current, name.removeprefix("model."))
            module.register_forward_pre_hook(lambda *_, at=number: current.runs(at))  # type: ignore[attr-defined]
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


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model cast its own inputs."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    model.register_forward_pre_hook(
        lambda _, args, kwargs: torch.utils._pytree.tree_map(cast, (args, kwargs)), with_kwargs=True
    )


def _from_rank_0(tensor: torch.Tensor, world: World, current: FsdpRound) -> torch.Tensor:
    """Return rank 0's tensor, on the CPU, on every rank; the others give one of its form. Every rank calls this."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        sent: torch.Tensor = gathered(tensor if world.rank == 0 else None)[0]
        return sent
    whole = torch.empty_like(tensor, device=CPU) if world.rank else tensor
    raw = as_bytes(whole)  # gloo does not support every dtype
    with waiting("rank 0's model"):
        dist.broadcast(raw, src=0, group=current.group)
    return from_bytes(raw, whole)
