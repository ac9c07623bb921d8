"""The weights of a model: loaded into it, or the same as rank 0's on every worker; errors say how they differ."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dp_ray.engine.forward.buffers import places_of, tensor_at
from dp_ray.engine.world import everyone, from_rank, gathered, is_rank_0
from dp_ray.errors import ModelError
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import Stored, is_sharded, overlaps
from dp_ray.text import listed


def synchronise(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers; every rank calls this.

    Raises ModelError, on every rank, if their names, sizes, dtypes or order differ between ranks.
    """
    if everyone() is None:
        return
    state = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in state:
        check_has_shape(name, tensor)
    mine = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in state]
    if len(set(gathered(hashlib.sha256("\n".join(mine).encode()).hexdigest()))) > 1:
        _raise_first_difference(gathered(mine))
    for _, tensor in state:
        if tensor.layout is not torch.strided or tensor.is_quantized or is_sharded(tensor) or overlaps(tensor):
            continue  # built from the same seed or file on every worker
        data = tensor.detach()
        with waiting("rank 0's model"):
            values = from_rank(data)
        if values.data_ptr() != data.data_ptr() and not is_rank_0():
            data.copy_(values)


def _raise_first_difference(models: Sequence[Sequence[str]]) -> None:
    """Raise ModelError for the first tensor in which a rank's model is not rank 0's."""
    for rank, model in enumerate(models):
        for there, here in itertools.zip_longest(models[0], model, fillvalue="nothing"):
            if there != here:
                raise ModelError(
                    f"the models of the workers differ: where rank 0 has {there}, rank {rank} has {here}; build the "
                    "same modules in the same order everywhere (a set of names has another order in each process)"
                )


def check_has_shape(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelError if a lazy module has not given its tensor a shape yet."""
    if is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet: run a batch through the model where it is made")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the module's state_dict, without its other values."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def other_sizes(own: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of a model of which some weights have another size, each with both sizes in words."""
    return {
        name: f"{name} {list(weights[name].shape)} in place of {list(tensor.shape)}"
        for name, tensor in own.items()
        if hasattr(weights.get(name), "shape")
        and not is_lazy(tensor)
        and tuple(weights[name].shape) != tuple(tensor.shape)
    }


WRAPPERS = ("module.", "_orig_mod.")  # before names in what nn.DataParallel, DDP or torch.compile has wrapped


def unwrapped(own: Set[str], weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return weights without the WRAPPERS before all their names, and what was stripped.

    `own` are the names of the model, which may begin so too: as little is stripped as fits most of them.
    """
    best, stripped, named, before = weights, "", weights, ""
    while named:
        wrapper = next((prefix for prefix in WRAPPERS if all(str(name).startswith(prefix) for name in named)), None)
        if wrapper is None:
            break
        named, before = {name.removeprefix(wrapper): weight for name, weight in named.items()}, before + wrapper
        if len(own & named.keys()) > len(own & best.keys()):
            best, stripped = named, before
    return best, stripped


def misfits(missing: Sequence[str], unexpected: Sequence[str], sizes: Mapping[str, str]) -> str:
    """Say how some weights and a model differ: by the names that one of them lacks, and by sizes."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another size": list(sizes.values())}
    return "".join(f"; {kind}: {listed(names)}" for kind, names in kinds.items() if names)


def advice_on(own: Mapping[str, torch.Tensor], weights: Mapping[str, Any], advice: str) -> str:
    """Return what to do about weights that are not those of a model with the tensors `own`.

    That is the advice, to load what fits, if a tensor fits by name and size. Of a checkpoint of the user's own it is
    to save a value alone.
    """
    weights, _ = unwrapped(own.keys(), weights)
    fitting = own.keys() & weights.keys() - other_sizes(own, weights).keys()
    return _nested(weights) or (advice if fitting else "")


def _nested(weights: Mapping[str, Any]) -> str:
    for key, value in weights.items():
        if isinstance(value, Mapping) and value and all(isinstance(inner, torch.Tensor) for inner in value.values()):
            return f"; it holds weights in {key!r}: save that alone, torch.save(found[{key!r}], file)"
    return ""


def make_room(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give memory to the buffers that are None, and of which there are weights: a first forward had made them."""
    device = next((parameter.device for parameter in model.parameters()), None)
    for name, (held, key) in places_of({"": model}).items():
        weight = weights.get(name)
        if tensor_at(held, key) is None and weight is not None:
            whole = weight.whole() if isinstance(weight, Stored) else weight
            held[key] = torch.empty_like(whole, device=device)


def load_weights(
    model: nn.Module, weights: Mapping[str, Any], where: str, is_strict: bool = True, advice: str = ""
) -> str:
    """Load weights into the bare module; returns what was loaded and what not, in words, if not `is_strict`.

    Raises ModelError, which names missing, unexpected and mis-sized tensors and ends with the advice, or if nothing
    fits.
    """
    own = tensors_of(model)
    sizes = {} if is_strict else other_sizes(own, weights)
    try:
        keys = model.load_state_dict({key: weight for key, weight in weights.items() if key not in sizes}, is_strict)
    except (RuntimeError, TypeError, AttributeError) as error:
        advice = advice_on(own, weights, advice if is_strict else "")
        raise ModelError(f"the weights of {where} are not this model's: {str(error).rstrip('.')}{advice}") from None
    if is_strict or keys is None:
        return ""
    missing = [key for key in keys.missing_keys if key not in sizes]
    differences, loaded = misfits(missing, keys.unexpected_keys, sizes), own.keys() - {*missing, *sizes}
    if own and not loaded:
        says = f"the weights of {where} have no tensor that fits this model by name and size"
        raise ModelError(says + differences + _nested(weights))
    return f"; loads {len(loaded)} of {len(own)} tensors of the model{differences}"


def check_all_tensors(model: nn.Module) -> None:
    """Raise ModelError if the module's state_dict has other values than tensors: no weights file could hold them.

    A model is loaded with all values of its state_dict, so such a file could never be loaded.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"model.{name} is of type {type(value).__qualname__}: a weights file holds tensors only, and could "
                "not be loaded without it; have get_extra_state give a tensor, or keep the value in a buffer"
            )
