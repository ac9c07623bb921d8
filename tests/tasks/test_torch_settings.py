"""torch's settings of the whole process: each that torch has is compared before and after a job, and restored."""

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dp_ray.tasks.isolation import isolated, settings_of_torch, torch_settings

C: Any = torch._C
OVERRIDES: Any = torch.overrides
SPARSE: Any = torch.sparse.check_sparse_tensor_invariants
# Setters of torch._C that are no setting of the process, or that are set by another one.
NO_SETTING = {
    *("conj", "neg", "tensor_metadata", "value_trace", "dispatch_mode", "skip_next_torch_function"),  # of one tensor
    *("thread_name", "worker_pids", "worker_signal_handlers", "generator_metaclass", "num_interop_threads"),
    *("autocast_cpu_dtype", "autocast_cpu_enabled", "autocast_gpu_dtype", "autocast_ipu_dtype"),  # older names
    *("autocast_ipu_enabled", "autocast_xla_dtype", "autocast_xla_enabled"),
    *("cublas_allow_tf32", "cudnn_allow_tf32", "onednn_allow_tf32", "default_tensor_type"),  # of fp32_precision
    *("tracing_state", "graph_exec_group", "torch_function_state", "meta_in_tls_dispatch_include"),  # of a call
}
# Setters for which torch has no getter, so that nobody can tell what they were.
NO_GETTER = {
    *("cached_tensors_enabled", "default_mobile_cpu_allocator", "only_lift_cpu_tensors"),
    *("override_stale_capture_stream", "print_stack_traces_on_fatal_signal", "throw_on_mutable_data_ptr"),
    *("should_use_format_with_string_table", "warn_deprecated_on_mutable_data_ptr"),
    "warn_on_accumulate_grad_stream_mismatch",
}
# Settings that have another name here.
NAMED = {
    "check_sparse_tensor_invariants": "sparse invariants",
    "deterministic_algorithms": "deterministic_algorithms",
    "deterministic_fill_uninitialized_memory": "fill_uninitialized_memory",
    "fp32_precision_setter": "fp32_precision of generic all",
    "grad_enabled": "grad",
    "anomaly_enabled": "anomaly",
    "autocast_cache_enabled": "autocast_cache",
    "autocast_dtype": "autocast dtype on cpu",
    "autocast_enabled": "autocast on cpu",
    **{
        f"sdp_use_{kind}": f"{kind}_sdp"
        for kind in ("cudnn", "fa3", "flash", "math", "mem_efficient", "overrideable")
    },
}
NAMES = [setting.name for setting in settings_of_torch()]


def of_torch() -> Iterator[str]:
    for name in dir(C):
        if match := re.fullmatch("_?set_(.+)", name):
            yield match[1]


def test_every_setter_of_torch_is_known() -> None:
    """A new version of torch that has another one fails here: give it a place in settings_of_torch, or a reason."""
    unknown = [one for one in of_torch() if NAMED.get(one, one) not in NAMES and one not in NO_SETTING | NO_GETTER]
    assert unknown == []


def read() -> dict[str, Any]:
    """What torch's own interfaces say: all properties of torch.backends, and all getters of torch and torch._C."""
    found: dict[str, Any] = {}
    for module in list(vars(torch.backends).values()):
        if not isinstance(module, ModuleType) or not module.__name__.startswith("torch.backends."):
            continue
        for name in {*dir(module), *dir(type(module))}:
            if isinstance(vars(type(module)).get(name), torch.backends.ContextProp):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
            elif isinstance(one := getattr(module, name, None), torch.backends._FP32Precision):
                found[f"{module.__name__}.{name}"] = one.fp32_precision
            elif re.fullmatch("(?!set_)(.+_enabled|.+_allowed)", name) and callable(one):
                found[f"{module.__name__}.{name}"] = one()
    for owner in (torch, C):
        for name in of_torch():
            for getter in (f"get_{name}", f"_get_{name}", f"_is_{name}", f"is_{name}"):
                if name not in NO_SETTING - {"num_interop_threads"} and callable(get := getattr(owner, getter, None)):
                    found[f"{owner.__name__}.{getter}"] = get("cpu") if "autocast_dtype" in name else get()
    found["precision of products"] = torch.backends.cuda.matmul.fp32_precision
    found["saved"] = C._autograd._top_saved_tensors_default_hooks(True)
    found["modes"] = [len(OVERRIDES._get_current_function_mode_stack()), C._len_torch_dispatch_stack()]
    found["hooks"] = [
        len(one) for one in (optimizers._global_optimizer_pre_hooks, nn.modules.module._global_forward_hooks)
    ]
    return found


def pack(saved: torch.Tensor) -> torch.Tensor:
    return saved * 2


class Function(TorchFunctionMode):
    """A mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def set_all_precisions() -> None:
    backends: Any = torch.backends
    backends.mkldnn.conv.fp32_precision = "bf16"
    backends.mkldnn.rnn.fp32_precision = "bf16"
    backends.cudnn.conv.fp32_precision = "ieee"


def entered(*contexts: Any) -> None:
    for context in contexts:
        KEPT.append(context)  # else it is left at once
        context.__enter__()


def other_engine() -> str:
    quantized: Any = torch.backends.quantized
    return str(next(engine for engine in quantized.supported_engines if engine not in (quantized.engine, "none")))


def enter_both() -> None:
    entered(Function())
    torch.set_default_device("meta")


KEPT: list[Any] = []
CHANGES: dict[str, Callable[[], Any]] = {
    "precisions of convolutions": set_all_precisions,
    "all precisions": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "older precision": lambda: torch.set_float32_matmul_precision("medium"),
    "saved tensors": lambda: entered(torch.autograd.graph.saved_tensors_hooks(pack, pack)),
    "two saved tensors": lambda: entered(torch.autograd.graph.save_on_cpu(), torch.autograd.graph.save_on_cpu()),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "attention by one": lambda: entered(nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)),
    "order of attention": lambda: C._set_sdp_priority_order([0, 1, 2, 3, 4]),
    "attention's sums": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "hooks of optimizers": lambda: optimizers.register_optimizer_step_pre_hook(lambda *_: None),
    "function mode": lambda: entered(Function()),
    "dispatch mode": lambda: entered(Dispatch()),  # type: ignore[no-untyped-call]
    "default device under a mode": enter_both,
    "threads of backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "cache of autocast": lambda: torch.set_autocast_cache_enabled(False),
    "warnings": lambda: torch.set_warn_always(True),
    "sparse": lambda: SPARSE.enable(),
    "checks of NaN": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "early stop": lambda: setattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", False),
    "conversion": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "quantized": lambda: setattr(torch.backends.quantized, "engine", other_engine()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_is_as_before(name: str) -> None:
    before, ours = read(), {setting.name: setting.read() for setting in settings_of_torch()}
    with isolated() as remains:
        CHANGES[name]()
        assert {
            setting.name: setting.read() for setting in settings_of_torch()
        } != ours or name == "hooks of optimizers"
    assert read() == before
    assert remains == []
    value = torch.ones(1, requires_grad=True)
    torch.autograd.backward((value * value).sum())
    assert value.grad is not None and value.grad.item() == 2


def flips(setting: Any) -> bool:
    return isinstance(setting.read(), bool) and setting.set is not None


@pytest.mark.parametrize("name", [setting.name for setting in settings_of_torch() if flips(setting)])
def test_each_that_is_on_or_off_is_as_before(name: str) -> None:
    (setting,) = (setting for setting in settings_of_torch() if setting.name == name)
    before = read()
    with isolated() as remains:
        try:
            setting.set(not setting.read())  # type: ignore[misc]
        except RuntimeError as error:
            pytest.skip(f"not on this machine: {error}")
    assert (read(), remains) == (before, [])


def test_what_has_no_way_back_is_named() -> None:
    mode = torch.inference_mode()
    with isolated() as remains:
        mode.__enter__()
    mode.__exit__(None, None, None)
    assert remains == ["torch's settings: inference_mode"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "by the job"])
def test_the_compilers_configs_are_as_before(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.config as config

    limit = config.recompile_limit
    with monkeypatch.context() as hidden:
        if when == "by the job":
            hidden.delitem(sys.modules, "torch._dynamo.config")
        restorer = torch_settings()
        next(restorer)
    config.recompile_limit = 3
    next(restorer, None)
    assert config.recompile_limit == limit != 3
