"""Have the input of a reduction begin at a multiple of 16 bytes: on a GPU, its bits depend on where a tensor begins.

CUDA's kernels read 16 bytes at once, if they may. A tensor that begins elsewhere they add in another order, so `sum`,
`mean` and norms of the same numbers round otherwise; elementwise kernels do not. Memory of its own begins right, a
view may begin anywhere: a gradient in a bucket of DDP, a shard of a batch that is on the GPU already. Which of them a
worker has depends on the number of workers. So with `bitwise` a view that begins wrong is copied.

The last two functions are about the strides that a gradient has in a bucket of DDP.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from dp_ray.engine.world import is_gpu
from dp_ray.tensors.files import is_dense, is_sharded
from dp_ray.tensors.tree import map_batch

if TYPE_CHECKING:
    from dp_ray.job.job import Job

BYTES = 16


def must_align(job: "Job", device: torch.device) -> bool:
    """Return whether the job's tensors on the device have to begin at multiples of 16 bytes."""
    return job.bitwise and is_gpu(device)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor begins at a multiple of 16 bytes; true of all that has no address."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_sharded(tensor):
        return True
    return tensor.data_ptr() % BYTES == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of one that does not begin at a multiple of 16 bytes."""
    return tensor if is_aligned(tensor) else tensor.clone()


def aligned_batch(batch: Any) -> Any:
    """Return a batch whose tensors begin at multiples of 16 bytes; an object with a method `to` stays as it is."""
    return map_batch(lambda leaf: aligned(leaf) if isinstance(leaf, torch.Tensor) else leaf, lambda leaf: leaf, batch)


@torch.no_grad()
def align_gradients(parameters: Collection[torch.Tensor]) -> None:
    """Give each gradient that does not begin at a multiple of 16 bytes memory of its own, with the same strides.

    The addresses are looked at in each step. The sizes do not tell whether a gradient is aligned: autograd may give a
    parameter that the model joins to others a view of their gradient, also on one worker.
    """
    try:
        odd = [param for param in parameters if (gradient := param.grad) is not None and gradient.data_ptr() % BYTES]
    except RuntimeError:  # a sparse one has no address
        odd = [param for param in parameters if param.grad is not None and not is_aligned(param.grad)]
    if not odd:
        return
    gradients: list[Any] = [param.grad for param in odd]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)  # one kernel for all of a dtype
    for parameter, copy in zip(odd, copies, strict=True):
        parameter.grad = copy  # DDP sets it to its view again, once the next backward has made a new one


def layout_of(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return size and strides of a parameter's gradient in its bucket of DDP."""
    like = parameter.detach() if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
    return like.size(), like.stride()


def set_strides(size: torch.Size, strides: tuple[int, ...], parameter: torch.Tensor) -> None:
    """Give the gradient the strides of its bucket where these differ for dimensions of size 1 alone.

    Strides of such dimensions reach no element, so they may have any value: oneDNN and cuDNN give the gradient of a
    depthwise or 1x1 convolution other ones than its weight has. DDP compares all strides, and warns of a cost that
    does not exist. Strides that do differ stay, so that DDP warns of them.
    """
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return
    now = gradient.stride()
    if now != strides and all(
        stride == other for stride, other, length in zip(now, strides, size, strict=True) if length != 1
    ):
        gradient.as_strided_(size, strides)
