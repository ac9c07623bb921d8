"""Memory that begins at a multiple of 16 bytes; trainings in which it must are among the jobs of tests/sim."""

import torch
from torch import nn

from dp_ray.engine.alignment import align_gradients, aligned, is_aligned
from dp_ray.tensors.files import is_dense


def test_memory_of_its_own_has_the_same_numbers_and_strides() -> None:
    room = torch.arange(200.0)
    view = room[1:].as_strided((2, 3, 4), (12, 1, 3))
    made = aligned(view)
    assert not is_aligned(view)
    assert is_aligned(made)
    assert is_dense(made)
    assert made.stride() == view.stride()
    assert torch.equal(made, view)
    assert aligned(room) is room


def test_of_gradients_only_those_that_begin_elsewhere_are_copied() -> None:
    odd, even, sparse, unused = (nn.Parameter(torch.zeros(4)) for _ in range(4))
    odd.grad, even.grad = torch.arange(5.0)[1:], torch.arange(4.0)
    parameters, kept = [odd, even, unused], even.grad
    align_gradients(parameters)
    sparse.grad, other = torch.ones(4).to_sparse(), nn.Parameter(torch.zeros(4))
    other.grad = torch.arange(5.0)[1:]
    align_gradients([sparse, other])
    assert even.grad is kept
    for one in (odd, other):
        assert one.grad is not None
        assert is_aligned(one.grad)
        assert one.grad.tolist() == [1, 2, 3, 4]
