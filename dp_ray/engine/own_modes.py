"""A model's own `train()` and `eval()`, called as in plain torch: nothing sets a mode by itself.

They may change more than modes. An adapter merges a part into its weights in `eval()`, and takes it out in `train()`,
which rounds them; the usual override of `train()` keeps BatchNorm in eval mode.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dp_ray.engine.buffers import digests
from dp_ray.engine.user_code import reraise_as
from dp_ray.errors import ModelError
from dp_ray.tensors.files import is_sharded, local
from dp_ray.text import listed


@contextmanager
def returning(model: nn.Module) -> Iterator[None]:
    """Call `train()` and `eval()` after the block, so that all modules have the modes of before."""
    mode, parts = model.training, modes_of(model)
    try:
        yield
    finally:
        _call(inner(model), mode, parts)


def begin_to_train(model: nn.Module) -> None:
    """Call `train()`; a part that was built in eval mode stays so, but not a model that came so as a whole."""
    set_modes(model, True, modes_of(model) if model.training else {})


def set_modes(model: nn.Module, mode: bool, parts: Mapping[nn.Module, bool] | None = None) -> None:
    """Call the model's `train()` or `eval()`, then those of `parts` with another mode than the module around them.

    Raises ModelError if that writes a sharded parameter, of which each worker has a part.
    """
    model = inner(model)
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


def inner(model: nn.Module) -> nn.Module:
    """Return the model in a compiled one, whose `eval()` would call the model's `train(False)`."""
    return getattr(model, "_orig_mod", model)


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Return whether each module of a model is in train mode."""
    return {module: module.training for module in model.modules()}


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
