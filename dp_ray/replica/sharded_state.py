"""Load a state of whole tensors into a training of which each worker holds a part, row by row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.replica.buffers import make_room
from dp_ray.replica.world import World
from dp_ray.tensors.layout import laid_out
from dp_ray.tensors.shards import is_sharded, local
from dp_ray.tensors.stored import Stored
from dp_ray.text import listed


def load_rows(model: nn.Module, weights: Mapping[str, Stored], where: str, world: World) -> None:
    """Copy this worker's rows of the weights into a sharded model, one tensor after another.

    Raises ModelError, which names missing, unexpected and mis-sized tensors.
    """
    make_room(model, weights)
    state = model.state_dict()
    own = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    weights = {name: one for name, one in weights.items() if isinstance(one, Stored)}
    missing, unexpected = own.keys() - weights.keys(), weights.keys() - state.keys()
    sizes = [
        f"{name} {list(weights[name].shape)} in place of {list(one.shape)}"
        for name, one in own.items()
        if name in weights and tuple(weights[name].shape) != tuple(one.shape)
    ]
    kinds = {"missing": sorted(missing), "unexpected": sorted(unexpected), "of another size": sizes}
    if found := "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names):
        raise ModelError(f"the weights of {where} are not this model's: {found}")
    for name, one in own.items():
        weights[name].copy_to(one, world.world_size, world.rank)


def rows_of_optimizer(state: Any, parameters: list[nn.Parameter], world: World) -> Any:
    """An optimizer's state_dict in which each tensor is what this worker holds of it.

    A tensor of its parameter's size is sharded as the parameter; any other is whole.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    by_number = {
        number: {key: _of_parameter(one, parameters[number], world) for key, one in kept.items()}
        for number, kept in state["state"].items()
    }
    rest = {key: whole_tensors(one) for key, one in state.items() if key != "state"}
    return {**rest, "state": by_number}


def whole_tensors(value: Any) -> Any:
    """A state in which each stored tensor is read whole."""
    if isinstance(value, Stored):
        whole = value.whole()
        return whole if value.strides is None else laid_out(whole, value.strides)
    if isinstance(value, dict):
        return {key: whole_tensors(one) for key, one in value.items()}
    return type(value)(map(whole_tensors, value)) if isinstance(value, list | tuple) else value


def _of_parameter(value: Any, parameter: nn.Parameter, world: World) -> Any:
    if not isinstance(value, Stored) or not is_sharded(parameter) or tuple(value.shape) != tuple(parameter.shape):
        return whole_tensors(value)
    return sharded_as(parameter, value.like(parameter, world.world_size, world.rank).to(local(parameter).device))


def sharded_as(parameter: nn.Parameter, rows: torch.Tensor) -> Any:
    """A tensor that is sharded as a parameter is, of which this worker holds `rows`."""
    sharded: Any = parameter
    return type(sharded).from_local(
        rows,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
