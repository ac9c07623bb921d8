"""torch's settings of the whole process, as its own interfaces tell them: after a job they are as before."""

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from dp_ray.process.isolation import isolated
from dp_ray.process.settings import OF_TORCH, restoring

C: Any = torch._C
OVERRIDES: Any = torch.overrides
SPARSE: Any = torch.sparse.check_sparse_tensor_invariants
GETTERS = (
    *("get_default_dtype", "get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision"),
    *("is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled"),
    *("is_autocast_cache_enabled", "is_warn_always_enabled", "get_deterministic_debug_mode", "get_default_device"),
)


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
    for name in GETTERS:
        found[name] = getattr(torch, name)()
    found["precision of products"] = torch.backends.cuda.matmul.fp32_precision
    return found


def set_all_precisions() -> None:
    backends: Any = torch.backends
    backends.mkldnn.conv.fp32_precision = "bf16"
    backends.mkldnn.rnn.fp32_precision = "bf16"
    backends.cudnn.conv.fp32_precision = "ieee"


def other_engine() -> str:
    quantized: Any = torch.backends.quantized
    return str(next(engine for engine in quantized.supported_engines if engine not in (quantized.engine, "none")))


CHANGES: dict[str, Callable[[], Any]] = {
    "precisions of convolutions": set_all_precisions,
    "all precisions": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "older precision": lambda: torch.set_float32_matmul_precision("medium"),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "order of attention": lambda: C._set_sdp_priority_order([0, 1, 2, 3, 4]),
    "attention's sums": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "threads of backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "cache of autocast": lambda: torch.set_autocast_cache_enabled(False),
    "warnings": lambda: torch.set_warn_always(True),
    "checks of NaN": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "early stop": lambda: setattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", False),
    "quantized": lambda: setattr(torch.backends.quantized, "engine", other_engine()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_is_as_before(name: str) -> None:
    before, ours = read(), {setting.name: setting.read() for setting in OF_TORCH}
    with isolated() as remains:
        CHANGES[name]()
        assert {setting.name: setting.read() for setting in OF_TORCH} != ours
    assert read() == before
    assert remains == []
    value = torch.ones(1, requires_grad=True)
    torch.autograd.backward((value * value).sum())
    assert value.grad is not None and value.grad.item() == 2


def flips(setting: Any) -> bool:
    return isinstance(setting.read(), bool) and setting.set is not None


@pytest.mark.parametrize("name", [setting.name for setting in OF_TORCH if flips(setting)])
def test_each_that_is_on_or_off_is_as_before(name: str) -> None:
    (setting,) = (setting for setting in OF_TORCH if setting.name == name)
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
    assert remains == ["the setting inference_mode"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "by the job"])
def test_the_compilers_configs_are_as_before(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.config as config

    limit = config.recompile_limit
    with monkeypatch.context() as hidden:
        if when == "by the job":
            hidden.delitem(sys.modules, "torch._dynamo.config")
        restored = restoring([])
        restored.__enter__()
    config.recompile_limit = 3
    restored.__exit__(None, None, None)
    assert config.recompile_limit == limit != 3
