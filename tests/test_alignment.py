"""`bitwise` where the bits of a reduction depend on the address of what it reads, as on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.alignment import align_gradients, aligned, is_aligned
from dp_ray.tensors.files import is_dense
from tests.support.group import history_of, run_group, weights_of
from tests.support.misaligned import BYTES, AsOnCuda
from tests.support.trainings import job_of

HERE = "tests.test_alignment"
CLASSES = 10


class Odd(torch.utils.data.Dataset[Any]):
    """Samples of 7 numbers and a class of 10: the rows of a batch begin anywhere."""

    def __init__(self, length: int = 80) -> None:
        draws = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 7, generator=draws)
        self.targets = torch.randint(CLASSES, (length,), generator=draws)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    """Layers of odd sizes, whose gradients DDP has at odd places of a bucket.

    It reduces its inputs; what it is given, and its outputs' gradients, must begin at multiples of 16 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 9), nn.Linear(9, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        check(inputs)
        outputs: torch.Tensor = self.head(torch.tanh(self.body(inputs - inputs.mean(1, keepdim=True))))
        if outputs.requires_grad:
            outputs.register_hook(check)  # type: ignore[no-untyped-call]
        return outputs


def check(tensor: torch.Tensor) -> None:
    assert tensor.data_ptr() % BYTES == 0, "misaligned"


class Joined(Net):
    """A weight is a piece of a longer vector: its gradient is a view of that one's, on one worker too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7 * CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(inputs) + inputs @ torch.cat([torch.ones(3), self.weight])[3:].view(7, CLASSES)


class Queue(Net):
    """It keeps the means of its last batches in a buffer, which becomes a view of a longer tensor."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(22)[1:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        check(self.kept)
        outputs = super().forward(inputs) * (1 + self.kept.mean())
        self.kept = torch.cat([self.kept, inputs.mean().reshape(1)])[1:]
        return outputs


def odd_job(workers: int, model: str = "Net", **keys: Any) -> Any:
    given = {"bitwise": True, "shards": 3, "batch_size": 22, "epochs": 2, "grad_clip": 0.1}
    data = {"target": f"{HERE}:Odd"}
    return job_of({"target": f"{HERE}:{model}"}, data, **{**given, "workers": workers, **keys})


def bits(folder: Path) -> tuple[dict[str, bytes], str]:
    """The bits at which a training ended, and its history."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder))


OVER_BATCH = {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}
KINDS: dict[str, dict[str, Any]] = {
    "more shards": {"shards": 5},
    "sharded": {"strategy": "fsdp"},
    "a gradient that is a view": {"model": "Joined"},
    "a buffer that is a view": {"model": "Queue"},
    "over the batch": {"loss": OVER_BATCH, "scatter": "batch"},
}
EARLY = {"more shards"}  # where norms are computed while other sums are waited for, as on CPUs


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_where_a_tensor_begins(tmp_path: Path, kind: str) -> None:
    for workers in (1, 2, 3):
        run_group(odd_job(workers, **KINDS[kind]), tmp_path / str(workers), AsOnCuda(early=kind in EARLY))
        assert bits(tmp_path / str(workers)) == bits(tmp_path / "1"), workers


def test_a_run_that_others_go_on_with_has_the_same_bits(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model": "Queue", "checkpoint": {"every_steps": 1}}
    run_group(odd_job(1, **keys), tmp_path / "whole", AsOnCuda())
    run_group(odd_job(1, **keys), tmp_path / "resumed", AsOnCuda(stop=3))
    run_group(odd_job(3, **keys), tmp_path / "resumed", AsOnCuda(stop=5))
    run_group(odd_job(2, **keys), tmp_path / "resumed", AsOnCuda())
    assert bits(tmp_path / "resumed") == bits(tmp_path / "whole")


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
