"""Tensors in one flat buffer, against torch's own saving."""

import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.tensors.files import DTYPES
from dp_ray.tensors.flat import ALIGNED, Form, as_bytes, flat, from_bytes, room, views


@given(st.data())
def test_views_of_a_flat_buffer_are_the_tensors(data: st.DataObject) -> None:
    tensors = []
    for dtype in data.draw(st.lists(st.sampled_from(list(DTYPES.values())), max_size=4)):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        drawn = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        tensor = drawn.view(dtype).view(shape)
        tensors.append(tensor.transpose(0, -1) if data.draw(st.booleans()) and tensor.ndim else tensor)
    buffer = flat(tensors)
    assert len(buffer) == sum(map(room, tensors))
    for view, tensor in zip(
        views(buffer, [Form(tensor.shape, tensor.dtype) for tensor in tensors]), tensors, strict=True
    ):
        assert view.dtype == tensor.dtype and view.shape == tensor.shape
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert (view.data_ptr() - buffer.data_ptr()) % ALIGNED == 0 or not view.numel()
        assert _saved(view) == _saved(tensor)
        assert _saved(from_bytes(as_bytes(tensor), tensor)) == _saved(tensor)


def test_the_bytes_of_a_lazy_conjugate_or_negative_are_those_of_its_numbers() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    assert as_bytes(conjugate).numpy().tobytes() == conjugate.numpy(force=True).tobytes()
    assert as_bytes(negative).numpy().tobytes() == negative.numpy(force=True).tobytes()


def _saved(tensor: torch.Tensor) -> bytes:
    """What torch saves of its elements."""
    file = io.BytesIO()
    torch.save(tensor.contiguous().clone().untyped_storage(), file)
    return file.getvalue()
