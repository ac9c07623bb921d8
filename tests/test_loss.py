"""The loss contract: sums and weights out of what losses return, and a clear word about what breaks it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Target
from dp_ray.replica.loss import build_loss, weigh

CPU = torch.device("cpu")
OUTPUTS, TARGET = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 1, 0, 1])


@pytest.mark.parametrize(
    ("value", "total", "weight"),
    [
        (torch.arange(7.0), 21.0, 7),
        (torch.ones(7, 3), 21.0, 21),
        ((torch.tensor(5.0), torch.tensor(4)), 5.0, 4),
        ((5.0, 4), 5.0, 4),
        ((torch.tensor([5.0]), 2.5), 5.0, 2.5),
    ],
)
def test_rows_elements_and_sums_with_weights(value: Any, total: float, weight: float) -> None:
    weighed = weigh(value, 7, "the loss")
    assert (weighed.sum.item(), float(weighed.weight)) == (total, weight)
    assert weighed.sum.ndim == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(1.0), "returned one number for a shard of 7 rows.*reduction='none'"),
        (torch.ones(1), r"a tensor of size \[1\] for a shard of 7 rows"),
        (None, "returned a NoneType; it must return one number for each row"),
        (3.5, "returned a float"),
        ((torch.ones(7), torch.ones(7)), r"a pair of a tensor of size \[7\] and"),
        ((torch.ones(()), "many"), "and a str"),
    ],
)
def test_what_breaks_the_contract_is_told(value: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        weigh(value, 7, "the loss")


@given(
    weight=st.none() | st.lists(st.floats(0.1, 4), min_size=3, max_size=3),
    ignore=st.integers(-1, 2),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_cross_entropys_mean_is_torchs_whatever_the_split(weight: Any, ignore: int, smoothing: float) -> None:
    args = {"weight": weight, "ignore_index": ignore, "label_smoothing": smoothing}
    loss = build_loss(Target(target="torch.nn:CrossEntropyLoss", args=args), CPU)
    parts = [weigh(loss(OUTPUTS[cut], TARGET[cut]), len(TARGET[cut]), "") for cut in (slice(0, 3), slice(3, 7))]
    mean = sum(part.sum for part in parts) / sum(torch.as_tensor(part.weight) for part in parts)
    given = {**args, "weight": None if weight is None else torch.tensor(weight)}
    assert torch.allclose(torch.as_tensor(mean), nn.CrossEntropyLoss(**given)(OUTPUTS, TARGET), rtol=1e-5)


@pytest.mark.parametrize("given_loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss, nn.functional.cross_entropy])
def test_torchs_losses_from_python(given_loss: Any) -> None:
    loss = build_loss(given_loss, CPU)
    if given_loss is nn.functional.cross_entropy:
        with pytest.raises(ModelError, match="one number for a shard"):
            weigh(loss(OUTPUTS, TARGET), 7, "the loss")
        return
    weighed = weigh(loss(OUTPUTS, TARGET), 7, "the loss")
    assert weighed.sum / weighed.weight == pytest.approx(
        nn.functional.cross_entropy(OUTPUTS, TARGET).item(), rel=1e-6
    )


@pytest.mark.parametrize("name", ["torch.nn:MSELoss", "torch.nn.functional:mse_loss", "torch.nn:SmoothL1Loss"])
def test_named_losses_of_elements_are_built_unreduced(name: str) -> None:
    loss = build_loss(Target(target=name), CPU)
    assert loss(OUTPUTS, OUTPUTS + 1).shape == (7, 3)


def test_functions_named_as_targets_are_torchs_mean_too() -> None:
    loss = build_loss(Target(target="torch.nn.functional:cross_entropy", args={"ignore_index": 1}), CPU)
    total, weight = loss(OUTPUTS, TARGET)
    expected = nn.functional.cross_entropy(OUTPUTS, TARGET, ignore_index=1)
    assert torch.allclose(total / weight, expected)


def test_probabilities_as_targets() -> None:
    loss = build_loss(Target(target="torch.nn:CrossEntropyLoss"), CPU)
    wanted = torch.softmax(torch.randn(7, 3), 1)
    weighed = weigh(loss(OUTPUTS, wanted), 7, "the loss")
    assert torch.allclose(weighed.sum / weighed.weight, nn.functional.cross_entropy(OUTPUTS, wanted))


class Margin(nn.Module):
    """A loss that is trained itself."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Target(target="torch.nn:MSELoss", args={"reduction": "sum"}), "loss.args.reduction.*leave it out"),
        (nn.MSELoss(reduction="sum"), "made with reduction='sum'"),
        (Margin(), "make it a part of the model"),
        ([1, 2], r"must be a function of \(outputs, target\), got a list"),
    ],
)
def test_losses_that_cannot_be_are_told(wrong: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        build_loss(wrong, CPU)


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_losses_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """1,000 rows of 100: fp16 ends at 65,504, and bf16 has no 1 + 1/256."""
    losses = torch.full((1000,), 100.0, dtype=dtype, requires_grad=True)
    weighed = weigh(losses, 1000, "the loss")
    assert (weighed.sum.item(), weighed.sum.dtype) == (100_000.0, torch.float32)
    (weighed.sum / weighed.weight).backward()  # type: ignore[no-untyped-call]
    assert losses.grad is not None and losses.grad.dtype == dtype
    assert torch.equal(losses.grad, torch.full((1000,), 1 / 1000, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_sum_of_the_users_adds_up_in_fp32(dtype: torch.dtype) -> None:
    weighed = weigh((torch.tensor(60_000.0, dtype=dtype), 4), 4, "the loss")
    assert weighed.sum.dtype == torch.float32
    assert float(weighed.sum * 2) == 2 * float(torch.tensor(60_000.0, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_of_classes_in_half_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """The mean is that of torch in double precision over the same numbers."""
    outputs, target = torch.randn(4000, 3).to(dtype), torch.randint(3, (4000,))
    weight = torch.tensor([20.0, 40.0, 80.0], dtype=dtype)
    total, weights = weigh(build_loss(nn.CrossEntropyLoss(weight), CPU)(outputs, target), 4000, "the loss")
    assert (total.dtype, torch.as_tensor(weights).dtype) == (torch.float32, torch.float32)
    assert float(weights) == weight.double()[target].sum().item()
    expected = nn.functional.cross_entropy(outputs.double(), target, weight.double())
    assert (total / weights).item() == pytest.approx(expected.item(), rel=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_losses_are_summed_as_torch_does(dtype: torch.dtype) -> None:
    losses = torch.randn(1001, dtype=dtype)
    weighed = weigh(losses, 1001, "the loss")
    assert torch.equal(weighed.sum, losses.sum())
    assert weighed.sum.dtype == dtype
