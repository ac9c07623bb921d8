"""An optimizer of some of the parameters: norm and clip are over what it updates; the rest gathers nothing."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_ray.engine.optimizer import build_optimizers, norms_of
from dp_ray.engine.sharded.state import updating_apart
from dp_ray.engine.update import OptimizerStep, load_part
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.messages import Note
from tests.support import training
from tests.support.builders import update_of
from tests.support.chance import examples
from tests.support.group import history_of, run_group
from tests.support.trainings import assert_close, initial, job_of, mean_loss

CLIP = 0.3


def of_some(parameters: Iterable[nn.Parameter], picked: list[int], lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD of the parameters with these numbers."""
    given = list(parameters)
    return torch.optim.SGD([given[number] for number in picked], lr, 0.9)


def with_a_stranger(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], 0.1)


def partial_job(picked: list[int], **keys: Any) -> Job:
    optimizer = {"target": "tests.engine.test_partial_optimizers:of_some", "args": {"picked": picked}}
    return job_of("mlp", optimizer=optimizer, grad_clip=CLIP, epochs=1, **keys)


def assert_as_in_plain_torch(job: Job, picked: list[int], folder: Path) -> list[Any]:
    """The oracle drops all gradients before a step, and clips those of the optimizer's parameters."""
    told = run_group(job, folder)
    model = initial(training.mlp)
    parameters = list(model.parameters())
    mine, norms = [parameters[number] for number in picked], []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(mine, CLIP).item())
        for parameter in parameters:
            if not any(parameter is other for other in mine):
                parameter.grad = None

    losses = training.plain_loop(
        model, training.Pairs(), 7, 1, mean_loss, torch.optim.SGD(mine, 0.1, 0.9), after_backward=clip
    )
    assert_close(folder, model, losses)
    assert [row["gradient_norm"] for row in history_of(folder)] == pytest.approx(norms, rel=1e-4)
    return told


@pytest.mark.parametrize(
    "keys",
    [
        {"workers": 1},
        {"workers": 2, "shards": 3},
        {"workers": 2, "shards": 3, "bitwise": True},
        {"workers": 2, "strategy": "fsdp", "fsdp": {"blocks": ["Linear"]}},
        {"workers": 2, "strategy": "fsdp", "fsdp": {"blocks": ["Linear"]}, "shards": 3, "bitwise": True},
    ],
)
def test_norm_and_clip_are_over_what_the_optimizer_updates(tmp_path: Path, keys: dict[str, Any]) -> None:
    told = assert_as_in_plain_torch(partial_job([2, 3], **keys), [2, 3], tmp_path)
    lines = [message.text for message in told if isinstance(message, Note)]
    assert [line for line in lines if "optimizer" in line] == [
        "optimizer: 2 of the 4 parameters that require a gradient are not given to it, so they are not trained: "
        "0.weight, 0.bias"
    ]


@settings(max_examples=examples(5), deadline=None)
@given(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 4), st.booleans())
def test_any_parameters_of_any_optimizer_train_as_in_plain_torch(
    picked: set[int], shards: int, bitwise: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chosen = sorted(picked)
        assert_as_in_plain_torch(partial_job(chosen, workers=1, shards=shards, bitwise=bitwise), chosen, Path(folder))


def step_of_two(model: nn.Module, **given: Any) -> OptimizerStep:
    """The update of weights by SGD and of biases by Adam, each with a StepLR."""
    named = dict(model.named_parameters())
    optimizers = [
        torch.optim.SGD([named["0.weight"], named["3.weight"]], 0.1, 0.9),
        torch.optim.Adam([named["0.bias"], named["3.bias"]], 0.01),
    ]
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    return update_of(model, optimizers, halving, **given)


def gradients_of(model: nn.Module, step: int, scale: float = 1.0) -> None:
    made = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=made) * scale


def test_optimizers_have_one_norm_and_clip_and_a_schedule_each() -> None:
    ours, plain = training.mlp(), training.mlp()
    plain.load_state_dict(ours.state_dict())
    step, apart = step_of_two(ours, clip=CLIP), step_of_two(plain)
    for number in range(5):
        gradients_of(ours, number)
        gradients_of(plain, number, 7 / 4)
        norm = step.apply(4, 7, number)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        for optimizer, scheduler in zip(apart.optimizers, apart.schedule.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        torch.testing.assert_close(norm, expected)
        assert step.rates[0] == 0.1 * 0.5 ** (number // 2)
        assert all(parameter.grad is None for parameter in ours.parameters())
    assert [optimizer.param_groups[0]["lr"] for optimizer in step.optimizers] == [0.025, 0.0025]
    for parameter, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


def test_where_one_of_the_optimizers_overflows_in_fp16_all_skip() -> None:
    model: Any = training.mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = step_of_two(model, scaler=scaler)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step.gradients.of_loss(torch.ones(()), 1)
    gradients_of(model, 0)
    model[3].bias.grad[0] = torch.inf
    step.apply(1, 1, 0)
    assert step.has_skipped and scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, model.parameters()))
    gradients_of(model, 0)
    norm = step.apply(1, 1, 1)
    made = torch.Generator().manual_seed(0)
    squares = [torch.randn(parameter.shape, generator=made).square().sum() for parameter in before]
    torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt() / 2)
    assert not step.has_skipped
    assert not any(map(torch.equal, before, model.parameters()))


def test_the_state_of_each_optimizer_is_kept_under_its_number() -> None:
    model = training.mlp()
    step = step_of_two(model)
    gradients_of(model, 0)
    step.apply(1, 1, 0)
    assert list(step.stateful) == ["optimizer", "scheduler", "optimizer 1", "scheduler 1", "scaler"]
    assert step.names == ["0.weight", "3.weight", "0.bias", "3.bias"]
    other = step_of_two(training.mlp())
    for name, part in step.stateful.items():
        load_part(name, other.stateful[name], None if part is None else part.state_dict())
    assert other.schedule.schedulers[1].last_epoch == 1
    moments = [next(iter(each.optimizers[1].state.values()))["exp_avg"] for each in (step, other)]
    assert torch.equal(*moments)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(JobError, match=r"optimizer: .* \[3\] that is none of the parameters it was given"):
        build_optimizers([("optimizer", with_a_stranger)], training.mlp())


class Rows(nn.Parameter):
    """A parameter that says it is sharded."""

    def to_local(self) -> torch.Tensor:
        return self.data


def test_a_scalar_beside_sharded_parameters_has_a_group_of_its_own() -> None:
    matrix, scalar, bias = Rows(torch.ones(3, 2)), nn.Parameter(torch.ones(())), Rows(torch.ones(2))
    given: list[dict[str, Any]] = [{"params": [scalar, matrix], "lr": 0.5}, {"params": [bias]}]
    optimizer = torch.optim.AdamW(given, foreach=True)
    groups = optimizer.param_groups
    with updating_apart(optimizer):
        seen = [([id(param) for param in group["params"]], group["lr"]) for group in optimizer.param_groups]
    assert seen == [([id(matrix)], 0.5), ([id(scalar)], 0.5), ([id(bias)], 1e-3)]
    assert optimizer.param_groups is groups


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of its block."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_norms_of_all_gradients_of_a_dtype_take_one_operation() -> None:
    made = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    gradients = [torch.randn(number % 7 + 1, 3, generator=made).to(dtypes[number % 3]) for number in range(300)]
    with Operations() as operations:  # type: ignore[no-untyped-call]
        norms = norms_of(gradients)
    assert operations.count <= 3 + len(gradients), "an empty tensor for each, and a norm for each dtype"
    for gradient, norm in zip(gradients, norms, strict=True):
        wide = torch.promote_types(gradient.dtype, torch.float32)
        assert torch.equal(norm, torch.linalg.vector_norm(gradient, dtype=wide))
    with Operations() as operations:  # type: ignore[no-untyped-call]
        norms_of(gradients[::3])
    assert operations.count == 1
