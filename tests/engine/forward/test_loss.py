"""The loss contract: sums and weights out of what losses return, and a clear word about what breaks it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.forward.step import Metrics, StepOutput, Weighted, build_loss, weighted_sum
from dp_ray.errors import JobError, ModelError
from dp_ray.job.keys import Target
from dp_ray.trials.measures import check_numbers

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
    weighed = weighted_sum(value, 7, "the loss")
    assert (weighed.sum.item(), float(weighed.weight)) == (total, weight)
    assert weighed.sum.ndim == 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(1.0), "returned one number for a shard of 7 rows.*reduction='none'"),
        (torch.ones(1), r"a tensor of size \[1\] for a shard of 7 rows"),
        (None, "returned a NoneType; it must return one number for each row"),
        (3.5, "returned a float"),
        (3, "returned an int"),
        ((torch.ones(7), torch.ones(7)), r"a pair of a tensor of size \[7\] and"),
        ((torch.ones(()), "many"), "and a str"),
    ],
)
def test_what_breaks_the_contract_is_told(value: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        weighted_sum(value, 7, "the loss")


@given(
    weight=st.none() | st.lists(st.floats(0.1, 4), min_size=3, max_size=3),
    ignore=st.integers(-1, 2),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_cross_entropys_mean_is_torchs_whatever_the_split(weight: Any, ignore: int, smoothing: float) -> None:
    args = {"weight": weight, "ignore_index": ignore, "label_smoothing": smoothing}
    loss = build_loss(Target(target="torch.nn:CrossEntropyLoss", args=args), CPU)
    parts = [
        weighted_sum(loss(OUTPUTS[cut], TARGET[cut]), len(TARGET[cut]), "") for cut in (slice(0, 3), slice(3, 7))
    ]
    mean = sum(part.sum for part in parts) / sum(torch.as_tensor(part.weight) for part in parts)
    given = {**args, "weight": None if weight is None else torch.tensor(weight)}
    assert torch.allclose(torch.as_tensor(mean), nn.CrossEntropyLoss(**given)(OUTPUTS, TARGET), rtol=1e-5)


@pytest.mark.parametrize("given_loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss, nn.functional.cross_entropy])
def test_torchs_losses_from_python(given_loss: Any) -> None:
    loss = build_loss(given_loss, CPU)
    if given_loss is nn.functional.cross_entropy:
        with pytest.raises(ModelError, match="one number for a shard"):
            weighted_sum(loss(OUTPUTS, TARGET), 7, "the loss")
        return
    weighed = weighted_sum(loss(OUTPUTS, TARGET), 7, "the loss")
    assert weighed.sum / weighed.weight == pytest.approx(
        nn.functional.cross_entropy(OUTPUTS, TARGET).item(), rel=1e-6
    )


class Smooth(nn.CrossEntropyLoss):
    """A class of a user's own."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)


class Halved(nn.CrossEntropyLoss):
    """Another one."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs / 2, target)


class MeanOfItsOwn(nn.CrossEntropyLoss):
    """One that asks no reduction."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, target)


@pytest.mark.parametrize("kind", [Smooth, Halved])
@pytest.mark.parametrize("how", ["class", "object", "named"])
def test_classes_derived_from_torchs_give_the_mean_that_they_give_alone(kind: Any, how: str) -> None:
    given = {
        "class": kind,
        "object": kind(),
        "named": Target(target=f"tests.engine.forward.test_loss:{kind.__name__}"),
    }[how]
    loss = build_loss(given, CPU)
    parts = [
        weighted_sum(loss(OUTPUTS[cut], TARGET[cut]), rows, "") for cut, rows in ((slice(3), 3), (slice(3, 7), 4))
    ]
    mean = sum(part.sum for part in parts) / sum(torch.as_tensor(part.weight) for part in parts)
    assert torch.allclose(torch.as_tensor(mean), kind()(OUTPUTS, TARGET), rtol=1e-6)
    assert kind().reduction == "mean"


@pytest.mark.parametrize(
    "given_loss", [MeanOfItsOwn, MeanOfItsOwn(), Target(target="tests.engine.forward.test_loss:MeanOfItsOwn")]
)
def test_a_derived_class_that_gives_a_mean_all_the_same_is_refused(given_loss: Any) -> None:
    with pytest.raises(ModelError, match="one number for a shard"):
        weighted_sum(build_loss(given_loss, CPU)(OUTPUTS, TARGET), 7, "the loss")


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
    weighed = weighted_sum(loss(OUTPUTS, wanted), 7, "the loss")
    assert torch.allclose(weighed.sum / weighed.weight, nn.functional.cross_entropy(OUTPUTS, wanted))


class Margin(nn.Module):
    """A loss that is trained itself."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Target(target="torch.nn:MSELoss", args={"reduction": "max"}), "made with reduction='max'.*leave it out"),
        (
            Target(target="torch.nn.functional:mse_loss", args={"reduction": "max"}),
            "loss.args.reduction.*leave it out",
        ),
        (Margin(), "make them the model's, and use step"),
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
    weighed = weighted_sum(losses, 1000, "the loss")
    assert (weighed.sum.item(), weighed.sum.dtype) == (100_000.0, torch.float32)
    (weighed.sum / weighed.weight).backward()  # type: ignore[no-untyped-call]
    assert losses.grad is not None and losses.grad.dtype == dtype
    assert torch.equal(losses.grad, torch.full((1000,), 1 / 1000, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_sum_of_the_users_adds_up_in_fp32(dtype: torch.dtype) -> None:
    weighed = weighted_sum((torch.tensor(60_000.0, dtype=dtype), 4), 4, "the loss")
    assert weighed.sum.dtype == torch.float32
    assert float(weighed.sum * 2) == 2 * float(torch.tensor(60_000.0, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_of_classes_in_half_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """The mean is that of torch in double precision over the same numbers."""
    outputs, target = torch.randn(4000, 3).to(dtype), torch.randint(3, (4000,))
    weight = torch.tensor([20.0, 40.0, 80.0], dtype=dtype)
    total, weights = weighted_sum(build_loss(nn.CrossEntropyLoss(weight), CPU)(outputs, target), 4000, "the loss")
    assert (total.dtype, torch.as_tensor(weights).dtype) == (torch.float32, torch.float32)
    assert float(weights) == weight.double()[target].sum().item()
    expected = nn.functional.cross_entropy(outputs.double(), target, weight.double())
    assert (total / weights).item() == pytest.approx(expected.item(), rel=2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_losses_are_summed_as_torch_does(dtype: torch.dtype) -> None:
    losses = torch.randn(1001, dtype=dtype)
    weighed = weighted_sum(losses, 1001, "the loss")
    assert torch.equal(weighed.sum, losses.sum())
    assert weighed.sum.dtype == dtype


@pytest.mark.parametrize("size", [(10,), (8, 3), (3,), (0,)])
def test_numbers_that_are_not_of_rows_are_refused(size: tuple[int, ...]) -> None:
    """One number for each of 10 classes is at least as many as 7 rows, and 7 does not divide it."""
    with pytest.raises(ModelError, match=r"for a shard of 7 rows.*\(sum, weight\)"):
        weighted_sum(torch.ones(size), 7, "the loss")


@pytest.mark.parametrize("size", [(7,), (7, 2, 3), (21,), (14, 3), (2, 7)])
def test_numbers_of_rows_and_of_elements_count_each(size: tuple[int, ...]) -> None:
    weighed = weighted_sum(torch.ones(size), 7, "the loss")
    assert weighed.sum.item() == weighed.weight == torch.ones(size).numel()


def per_class(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One number for each class: how often it was right."""
    hit = (outputs.argmax(1) == target).float()
    return torch.stack([hit[target == label].sum() for label in range(outputs.shape[1])])


def per_row(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, target, reduction="none")


def per_token(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.reshape(-1), outputs.reshape(-1) + 1, reduction="none")


class Counts(nn.Module):
    """A loss that counts its calls, draws, writes over its inputs, and is one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        torch.rand(3)
        return per_row(outputs.mul_(1.0), target)


def measured(function: Any, rows: int, classes: int, is_loss: bool) -> Weighted:
    """What Metrics makes of a shard's loss, or metric."""
    outputs, target = torch.randn(rows, classes), torch.randint(classes, (rows,))
    value = function(outputs.clone(), target)
    check_numbers("m", function, (outputs, target), rows, 0, value if is_loss else None)
    if is_loss:
        return Metrics({}).loss(StepOutput(value, outputs, target, function), rows)
    (found,) = Metrics({"m": function})(StepOutput(None, outputs, target), rows)
    return found


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize(("rows", "classes"), [(10, 10), (5, 10), (1, 10)])
def test_one_number_per_class_is_found_out_where_it_could_be_one_per_row(
    rows: int, classes: int, is_loss: bool
) -> None:
    with pytest.raises(
        ModelError, match=rf"size \[{classes}\] for a shard of {rows} rows.*as many numbers for one row as for two"
    ):
        measured(per_class, rows, classes, is_loss)


def difference(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).abs()


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 10])
@pytest.mark.parametrize(
    "function", [difference, lambda *given: difference(*given).flatten(), nn.MSELoss(reduction="none")]
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_that_are_broadcast_against_targets_are_found_out(function: Any, rows: int, is_loss: bool) -> None:
    """Outputs of size [rows, 1] and targets of size [rows] give numbers of size [rows, rows]."""
    outputs, target = torch.randn(rows, 1), torch.randn(rows)

    def weight(target: torch.Tensor) -> Any:
        step_output = StepOutput(function(outputs, target), outputs, target, function)
        check_numbers("m", function, (outputs, target), rows, 0, step_output.loss if is_loss else None)
        metrics = Metrics({"m": function})
        return (metrics.loss(step_output, rows) if is_loss else metrics(step_output, rows)[0]).weight

    with pytest.raises(ModelError, match=r"each output has been compared with each target.*\[\d+, 1\]"):
        weight(target)
    assert weight(target[:, None]) == rows


@pytest.mark.parametrize("is_loss", [True, False])
@pytest.mark.parametrize(("function", "numbers"), [(per_row, 10), (per_token, 100), (Counts(), 10)])
def test_as_many_rows_as_classes_are_no_mistake(function: Any, numbers: int, is_loss: bool) -> None:
    assert measured(function, 10, 10, is_loss).weight == numbers


def test_asking_a_function_leaves_no_trace() -> None:
    function = Counts()
    outputs, target = torch.randn(10, 10), torch.randint(10, (10,))
    torch.manual_seed(1)
    check_numbers("m", function, (outputs, target), 10, 0)
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(()))
    assert (function.calls, outputs._version) == (0, 0)


KL = nn.functional.kl_div


@pytest.mark.parametrize(
    "given_loss",
    [
        Target(target="torch.nn:KLDivLoss", args={"reduction": "batchmean"}),
        Target(target="torch.nn.functional:kl_div", args={"reduction": "batchmean"}),
        nn.KLDivLoss(reduction="batchmean"),
    ],
)
def test_batchmean_is_torchs_over_the_whole_batch(given_loss: Any) -> None:
    loss = build_loss(given_loss, CPU)
    outputs, wanted = torch.log_softmax(OUTPUTS, 1), torch.softmax(torch.randn(7, 3), 1)
    parts = [
        weighted_sum(loss(outputs[cut], wanted[cut]), len(wanted[cut]), "") for cut in (slice(0, 3), slice(3, 7))
    ]
    assert sum(float(part.weight) for part in parts) == 7
    mean = sum(part.sum.item() for part in parts) / 7
    assert mean == pytest.approx(KL(outputs, wanted, reduction="batchmean").item(), rel=1e-5)


def test_class_weights_of_a_module_from_python_are_torchs_mean() -> None:
    for given_loss in (
        nn.CrossEntropyLoss(torch.tensor([0.1, 1, 5.0])),
        nn.MultiMarginLoss(weight=torch.ones(3) * 2),
    ):
        parts = [
            weighted_sum(build_loss(given_loss, CPU)(OUTPUTS[cut], TARGET[cut]), len(TARGET[cut]), "")
            for cut in (slice(0, 3), slice(3, 7))
        ]
        mean = sum(part.sum.item() for part in parts) / sum(float(part.weight) for part in parts)
        assert mean == pytest.approx(given_loss(OUTPUTS, TARGET).item(), rel=1e-5)
        assert given_loss.reduction == "mean"


def test_a_reduction_of_the_users_own_is_refused() -> None:
    odd = nn.MSELoss()
    odd.reduction = "rootmean"
    with pytest.raises(JobError, match=r"reduction='rootmean'.*\(sum, rows\)"):
        build_loss(odd, CPU)


def test_a_scalar_of_kl_div_is_told_what_batchmean_is() -> None:
    with pytest.raises(ModelError, match=r"'batchmean'.*\(sum, rows\)"):
        weighted_sum(KL(OUTPUTS, OUTPUTS, reduction="batchmean", log_target=True), 7, "the loss")
