"""`dp_ray.DataParallel` on the suite's device, against plain torch there: shard by shard, in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from benchmarks.nets import resnet
from dp_ray.parallel.module import DataParallel

SHARDS = 3
ROWS = 10


def net() -> nn.Module:
    torch.manual_seed(0)
    return resnet(width=4, blocks=(1, 1), classes=5)


def in_process(module: nn.Module, device: torch.device, **keys: Any) -> DataParallel:
    return dp_ray.DataParallel(module, 0, shards=SHARDS, devices=[str(device)], quiet=True, **keys)


def by_shards(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The oracle: the bare module, one shard after another; its buffers are those of shard 0 afterwards."""
    outputs, first = [], dict[str, torch.Tensor]()
    for rows in batch.chunk(SHARDS):
        buffers = {name: one.clone() for name, one in module.named_buffers()}
        outputs.append(torch.func.functional_call(module, buffers, (rows,)))
        first = first or buffers
    for name, one in module.named_buffers():
        one.data = first[name]  # a graph may need the one of before
    return torch.cat(outputs)


def test_outputs_gradients_and_buffers_are_plain_torchs(device: torch.device) -> None:
    bare, plain = net(), net().to(device)
    batch = torch.randn(ROWS, 3, 32, 32)
    with in_process(bare, device, bitwise=True) as model:
        for _ in range(3):
            found, expected = model(batch), by_shards(plain, batch.to(device))
            torch.testing.assert_close(found, expected.cpu(), rtol=1e-4, atol=1e-5)
            for output in (found, expected):
                torch.autograd.backward(output.square().mean())
        assert {one.device for one in model.shapes} == {str(device)}
    for name, one in plain.named_parameters():
        assert one.grad is not None
        torch.testing.assert_close(bare.get_parameter(name).grad, one.grad.cpu(), rtol=1e-3, atol=1e-4)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(bare.get_buffer(name), buffer.cpu(), rtol=1e-4, atol=1e-5)


def test_a_callers_module_on_the_device_gets_its_gradients_there(device: torch.device) -> None:
    bare = net().to(device)
    plain = copy.deepcopy(bare)
    batch = torch.randn(ROWS, 3, 32, 32, device=device, requires_grad=True)
    alike = batch.detach().clone().requires_grad_()
    with in_process(bare, device) as model:
        output = model(batch)
        assert output.device == device
        output.square().mean().backward()
    torch.autograd.backward(by_shards(plain, alike).square().mean())
    torch.testing.assert_close(batch.grad, alike.grad, rtol=1e-3, atol=1e-5)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(bare.get_parameter(name).grad, one.grad, rtol=1e-3, atol=1e-4)


def test_a_graph_that_waits_keeps_its_weights_and_its_mode(device: torch.device) -> None:
    bare, plain = net().eval(), net().eval().to(device)
    batch = torch.randn(ROWS, 3, 32, 32)
    with in_process(bare, device) as model:
        waiting, expected = model(batch), by_shards(plain, batch.to(device))
        gradients = torch.autograd.grad(expected.square().mean(), list(plain.parameters()))
        with torch.no_grad():
            for one in bare.parameters():
                one.mul_(2)
        bare.requires_grad_(False)
        model(batch)
        bare.requires_grad_(True)  # else torch gives no gradient to the caller's own parameters
        waiting.square().mean().backward()
    for one, gradient in zip(bare.parameters(), gradients, strict=True):
        torch.testing.assert_close(one.grad, gradient.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_a_caller_whose_module_is_on_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    bare, plain = nn.Linear(8, 4), nn.Linear(8, 4)
    plain.load_state_dict(bare.state_dict())
    plain.to(device)
    batch = torch.randn(ROWS, 8)
    with in_process(bare, device) as model, torch.autocast(device.type, dtype):
        found, expected = model(batch), plain(batch.to(device))
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected.cpu(), rtol=1e-2, atol=1e-2)
