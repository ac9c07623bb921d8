"""The model of one worker: built from its target on its devices, compiled, and called in the job's precision.

Its own `train()` and `eval()` are called as in plain torch: nothing sets a mode by itself. They may change more than
modes. An adapter merges a part into its weights in `eval()`, and takes it out in `train()`, which rounds them; the
usual override of `train()` keeps BatchNorm in eval mode.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from dp_ray.engine.devices import blocks_of, building_on, spread
from dp_ray.engine.forward.buffers import NONE, Roots
from dp_ray.engine.forward.state import EvalState
from dp_ray.engine.random import seed_all
from dp_ray.engine.user_code import advice, is_out_of_memory, reraise_as
from dp_ray.engine.world import CPU, text_of
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, build, check_gives, resolve
from dp_ray.plan.costs import PlacedBlock
from dp_ray.tensors.changed import digests
from dp_ray.tensors.files import is_sharded, local, overlaps
from dp_ray.text import a_kind, listed


def build_model(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """Build the job's module on `devices`, initialised from the job's seed alone: the same on every worker.

    With several devices, the model places its parts itself, or `device_map` places them. Raises JobError if the
    model cannot be built, is not a torch.nn.Module or cannot be moved to the devices.
    """
    if isinstance(job.model, Target):
        resolve("model", job.model)  # before seeding: a module may draw random numbers, but on its first import only
    seed_all(job.seed, next((gpu for gpu in devices if gpu.type == "cuda"), devices[0]))
    # On torch's meta device (`sharded/build.py`) a constructor is told of the CPU, as on rank 0: it may keep that.
    model = constructed(job, [CPU] if devices[0].type == "meta" else devices)
    if len(devices) > 1 and job.device_map is None and not isinstance(job.model, Target):
        raise JobError(
            f"model: an object that is made already cannot place its parts on {len(devices)} devices; "
            "give a target, or set device_map: auto"
        )
    _give_each_element_memory(model)
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = BatchNormOfShard  # type: ignore[assignment]
    try:
        if len(devices) == 1:
            return model.to(devices[0])
        return model if job.device_map is None else spread(job, model, devices)
    except (RuntimeError, AssertionError) as error:
        names = ", ".join(map(str, devices))
        hint = f"; {advice(job, None)}" if is_out_of_memory(error) else ""
        raise JobError(f"devices: the model cannot be moved to {names}: {text_of(error)}{hint}") from error


def constructed(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """Call the model's target, which may place its parts on `devices`, in the random state of now."""
    with building_on(devices):
        return as_module(build("model", target_with_devices(job.model, devices)))


def target_with_devices(model: Any, own: Sequence[torch.device]) -> Any:
    """Add to the model's target an argument `devices`, if its constructor takes one and the job sets none."""
    if not isinstance(model, Target) or "devices" in model.args:
        return model
    try:
        takes = inspect.signature(resolve("model", model)).parameters
    except (TypeError, ValueError):
        return model
    return model.model_copy(update={"args": {**model.args, "devices": list(own)}}) if "devices" in takes else model


class BatchNormOfShard(_BatchNorm):
    """A SyncBatchNorm of the user's: its statistics are those of a shard, as a BatchNorm's, on CPUs too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Take inputs of any number of dimensions, as SyncBatchNorm does."""


def check_model(spec: Any) -> None:
    """Check the key `model` as far as is known without building it: a torch.nn.Module. Raises JobError."""
    if isinstance(spec, Target):
        named = resolve("model", spec)
        if isinstance(named, nn.Module):
            kind = type(named).__qualname__
            raise JobError(
                f"model: {spec.target} is a {kind} that is made already; name its class, or a function that makes it"
            )
        check_gives("model", named, nn.Module, "torch.nn.Module")
        bind("model", target_with_devices(spec, ()))
    elif not isinstance(spec, nn.Module):
        raise JobError(f"model: must be a torch.nn.Module, got {a_kind(spec)}")


def as_module(model: object) -> nn.Module:
    """Return the object that the key `model` gives; raises JobError unless it is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise JobError(f"model: must give a torch.nn.Module, got {type(model).__qualname__}")
    return model


def _give_each_element_memory(model: nn.Module) -> None:
    """Copy expanded buffers and frozen parameters: rank 0's values could not be written to them."""
    frozen = (each for each in model.parameters() if not is_lazy(each) and not each.requires_grad)
    for tensor in [*frozen, *model.buffers()]:
        if tensor.layout is torch.strided and overlaps(tensor):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def compiled(model: nn.Module, job: Job) -> nn.Module:
    """Return the module to call: the model, its compiled version, or `Scripted`; the parameters stay the model's.

    In a sharded model, each block is compiled already. Raises JobError for `compile` with a TorchScript module.
    """
    if isinstance(model, torch.jit.ScriptModule):
        if job.compile:
            raise JobError(
                "compile: the model is a TorchScript module, which torch.compile does not take; leave it out"
            )
        return Scripted(model, is_exact=job.bitwise or job.task != "train")
    if not job.compile or any(is_sharded(parameter) for parameter in model.parameters()):
        return model
    # A kernel for dynamic shapes depends on the shapes that a worker saw before. One kernel a shape does not.
    called: nn.Module = torch.compile(model, dynamic=False if job.bitwise else None)  # type: ignore[assignment]
    return called


class Scripted(nn.Module):
    """A TorchScript module inside a Python module, since a TorchScript module takes no hooks.

    With `is_exact` it runs op by op. TorchScript rewrites a graph after its first runs, so otherwise its outputs
    would depend on how often this worker has called it.
    """

    def __init__(self, scripted: nn.Module, is_exact: bool) -> None:
        super().__init__()
        self.scripted = scripted
        self._is_exact = is_exact

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the TorchScript module, without its optimizations if it must be exact."""
        with torch.jit.optimized_execution(not self._is_exact):  # type: ignore[attr-defined]
            return self.scripted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("scripted"), name)


AS_IT_IS: AbstractContextManager[Any] = nullcontext()


def autocast(
    precision: str, device: torch.device, enabled: bool = True, keeps: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which a model runs in the job's precision; its parameters keep their dtype.

    Converted parameters are kept until the outermost such context ends, which may be one that is not `enabled`; not
    those of one that keeps none.
    """
    if precision == "fp32":
        return AS_IT_IS
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype, enabled, None if keeps else False)  # None: as it is now


def call_model(model: nn.Module, inputs: Any, call: str) -> Any:
    """Call the model as the job's `call` says; `auto` unpacks a tuple or list, but not of texts, and nothing else."""
    if type(inputs) is torch.Tensor and call == "auto":
        return model(inputs)
    if call == "kwargs":
        return model(**inputs)
    is_unpacked = call == "args" or (isinstance(inputs, tuple | list) and not are_texts(inputs))
    return model(*inputs) if is_unpacked else model(inputs)


def are_texts(inputs: Any) -> bool:
    """Return whether these are the texts of a shard, as torch's collate makes them: one for each row."""
    is_list = isinstance(inputs, tuple | list) and len(inputs) > 0
    return is_list and all(isinstance(text, str) for text in inputs)


def plan_blocks(job: Job) -> tuple[PlacedBlock, ...]:
    """Return which block of the job's model goes to which device of a worker.

    The model is built on torch's meta device, which takes no memory, or on the CPU if that fails. Raises JobError.
    """
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    meta, cpu = torch.device("meta"), torch.device("cpu")
    try:
        with meta:
            model = constructed(job, [meta] * len(names))
    except JobError:  # a constructor that reads its weights from a file, or computes with them, needs real memory
        with cpu:
            model = constructed(job, [cpu] * len(names))
    return tuple(blocks_of(job, model, names))


@contextmanager
def returning(model: nn.Module) -> Iterator[None]:
    """Call `train()` and `eval()` after the block, so that all modules have the modes of before."""
    mode, parts = model.training, {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        _call(_inner(model), mode, parts)


def begin_to_train(model: nn.Module) -> None:
    """Call `train()`; a part that was built in eval mode stays so, but not a model that came so as a whole."""
    set_modes(model, True, {module: module.training for module in model.modules()} if model.training else {})


@contextmanager
def evaluating(model: nn.Module, beside: Roots = NONE) -> Iterator[EvalState]:
    """Call the model's `eval()`, and undo what forwards write in the block, the modules `beside` the model too.

    That is undone after the block, and inside it by `restore` of the state that it gives. The model stays in eval
    mode: only what goes on to train returns, by `returning`.
    """
    set_modes(model, False)
    state = EvalState(model, beside)
    try:
        yield state
        state.check()
    finally:
        state.put_back()


def set_modes(model: nn.Module, mode: bool, parts: Mapping[nn.Module, bool] | None = None) -> None:
    """Call the model's `train()` or `eval()`, then those of `parts` with another mode than the module around them.

    Raises ModelError if that writes a sharded parameter, of which each worker has a part.
    """
    model = _inner(model)
    before = _digests_of_shards(model)
    _call(model, mode, parts or {})
    if written := [name for name, digest in _digests_of_shards(model).items() if before.get(name) != digest]:
        raise ModelError(
            f"the model's own {'train' if mode else 'eval'}() wrote {listed(written)}, of which each worker holds a "
            "part; have it leave weights as they are, or take strategy: ddp"
        )


def _call(module: nn.Module, mode: bool, parts: Mapping[nn.Module, bool], around: bool | None = None) -> None:
    """Call down the tree. What the model's own `train()` puts in eval mode stays so."""
    if mode is not around:
        name = "train" if mode else "eval"
        with reraise_as(f"the model's own {name}()"):
            getattr(module, name)()
    for child in module.children():
        _call(child, parts.get(child, mode), parts, mode)


def _inner(model: nn.Module) -> nn.Module:
    """Return the model in a compiled one, whose `eval()` would call the model's `train(False)`."""
    return getattr(model, "_orig_mod", model)


def has_own_modes(model: nn.Module) -> bool:
    """Return whether a module has a `train()` or `eval()` of its own, which may write weights, and so round them."""
    usual = [nn.Module.train, nn.Module.eval]
    return any(
        [getattr(method, "__func__", None) for method in (module.train, module.eval)] != usual
        for module in model.modules()
    )


def _digests_of_shards(model: nn.Module) -> dict[str, int]:
    """Return digests of this worker's parts of sharded parameters, by name, if the model has modes of its own."""
    parts = {name: local(each.detach()) for name, each in model.named_parameters() if is_sharded(each)}
    if not parts or not has_own_modes(model):
        return {}
    return digests({name: part for name, part in parts.items() if not isinstance(part, FakeTensor)})
