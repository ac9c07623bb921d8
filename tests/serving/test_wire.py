"""Tensors as the bytes of messages: they come as they were sent, of any dtype and size."""

import pickle

import numpy as np
import pytest
import torch

from dp_ray.engine.ship import IN_LINE_BYTES
from dp_ray.serving.wire import owned, packed, unpacked

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int8]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [(), (0, 3), (3,), (2, 3), (200, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_as_it_was_sent(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    tensor = (torch.arange(int(np.prod(size))).reshape(size) % 7 - 3).to(dtype)
    given = packed(tensor)
    for sent in (given, pickle.loads(pickle.dumps(given, 5))):
        assert torch.equal(unpacked(sent), tensor)
        assert unpacked(sent).dtype == dtype
        assert torch.equal(owned(sent, torch.device("cpu")), tensor)


@pytest.mark.parametrize("numbers", [IN_LINE_BYTES // 4 - 1, IN_LINE_BYTES // 4])
def test_only_a_small_tensor_is_copied(numbers: int) -> None:
    tensor = torch.zeros(numbers)
    given = packed(tensor)
    tensor.fill_(1.0)
    assert unpacked(given).sum() == (0 if tensor.nbytes < IN_LINE_BYTES else numbers)


def test_a_copy_of_ones_own_is_not_that_of_the_message() -> None:
    given = packed(torch.zeros(3))
    owned(given, torch.device("cpu")).fill_(1.0)
    assert unpacked(given).sum() == 0
