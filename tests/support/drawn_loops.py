"""A loop that runs a drawn plan, on a run of `dp_ray` or on `PlainRun`, which is plain torch on whole batches."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.loops import BATCH, EPOCHS, LR, Points, error
from tests.support.own_modes import Adapted

Plan = list[dict[str, Any]]


class Parts(nn.Module):
    """Parts that share parameters: both heads have a layer in common, and a trunk before it.

    Each row has an expert of its own. The adapter is merged in `eval()`. One layer is frozen until a loop thaws it.
    """

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(4, 4)
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.left = nn.Sequential(common, nn.Tanh(), nn.Linear(4, 2))
        self.right = nn.Sequential(common, nn.Tanh(), nn.Linear(4, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.table = nn.Embedding(5, 2, sparse=True)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.adapter = Adapted(4, 4)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points."""
        made: torch.Tensor = self.left(self.adapter(self.trunk(noise)).tanh())
        return made

    def routed(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points by way of the rows' experts."""
        hidden, routes = self.trunk(noise), (noise[:, 1] + 1.5).long().clamp(0, 2)
        mixed = torch.zeros_like(hidden)
        for number in routes.unique().tolist():  # type: ignore[no-untyped-call]
            mixed[routes == number] = self.experts[number](hidden[routes == number])
        made: torch.Tensor = self.frozen(self.right(mixed.tanh()))
        return made


LOSSES: dict[str, Callable[..., Any]] = {
    "left": lambda model, real, noise: (model(noise) - real).square().sum(1),
    "right": lambda model, real, noise: model.frozen(model.right(model.trunk(noise))).sin().sum(1),
    "both": lambda model, real, noise: (model.left(model.trunk(noise)) * model.right(model.trunk(noise))).sum(1),
    "experts": lambda model, real, noise: (model.routed(noise) - real).square().sum(1),
    "table": lambda model, real, noise: (
        (model.table((noise[:, 0] * 7).long().abs() % 5) - model.left(model.trunk(noise))).square().mean(1)
    ),
}
REACHED = {
    "left": ["trunk", "adapter", "left"],
    "right": ["trunk", "right", "frozen"],
    "both": ["trunk", "left", "right"],
    "experts": ["trunk", "experts", "right", "frozen"],
    "table": ["trunk", "adapter", "left", "table"],
}


def of_pairs(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of all pairs of rows."""
    found: torch.Tensor = (outputs @ outputs.T - target @ target.T).square().mean()
    return found


def planned(run: Any, plan: Plan, momentum: float = 0.5, decay: float = 0.0, adam: bool = False) -> None:
    """Do in each step what the plan says, and drop what gradients are left; some only in every few steps."""
    model = run.model
    parts = {
        "all": [model.trunk, model.left, model.right, model.table, model.experts, model.adapter, model.frozen],
        "trunk": [model.trunk],
        "heads": [model.left, model.right],
    }
    updates = {}
    for name, modules in parts.items():
        own = list(dict.fromkeys(itertools.chain.from_iterable(module.parameters() for module in modules)))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(own, LR, momentum, weight_decay=decay)
        if adam:  # which has no sparse gradients
            own = [each for each in own if each is not model.table.weight]
            optimizer = torch.optim.AdamW(own, LR / 10, eps=0.01, weight_decay=decay)
        updates[name] = run.optimizer(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for step in run.steps():
        held: list[Any] = []
        factor: Any = 1.0
        numbers = []
        for do in plan:
            kind, (every, at) = do["do"], do.get("when", (1, 0))
            if step.number % every != at:
                continue
            if kind == "requires":  # a layer thaws, or freezes
                getattr(model, do["of"]).requires_grad_(do["gradient"])
            elif kind == "pass":
                modules = [getattr(model, name) for name in do["of"]]
                loss = _loss(model, do, factor)
                batch = None if do.get("rows") is None else _own(do["rows"], step.number)
                numbers.append(step.backward(loss, modules, over=of_pairs if do.get("over") else None, batch=batch))
            elif kind == "gather":
                batch = None if do.get("rows") is None else _own(do["rows"], step.number)
                found = step.gather(
                    lambda batch: {"made": model(batch[1]), "one": (model(batch[1]).sum(1) > 0)}, batch
                )
                factor = 1 + found["made"].square().mean() + found["one"].double().mean().float()
            elif kind == "update":
                updates[do["of"]].step(clip=do.get("clip"))
            elif kind == "hold":  # take gradients away, without a copy
                held = [one.grad for one in model.parameters()]
                model.zero_grad()
            elif kind == "add":  # what was taken away
                for one, gradient in zip(model.parameters(), held or itertools.repeat(None), strict=False):
                    if gradient is not None:
                        one.grad = gradient if one.grad is None else one.grad + gradient
                held = []
            elif kind == "zero":
                model.zero_grad(set_to_none=False)
        model.zero_grad()
        step.log(sum=sum(numbers, torch.zeros(())))


def _own(rows: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.linspace(-1, 1 + number, rows * 5).reshape(rows, 5).sin()
    return made[:, :2].contiguous(), made[:, 2:].contiguous()


def _loss(model: Any, do: Mapping[str, Any], factor: Any) -> Callable[[Any], Any]:
    function = LOSSES[do["loss"]]
    if do.get("over"):
        return lambda batch: {"outputs": model(batch[1]) * factor, "target": batch[0]}
    if do.get("weighted"):

        def weighted(batch: Any) -> Any:
            weight = (batch[1][:, 0] > 0).float() + 0.25
            return (function(model, *batch) * weight * factor).sum(), weight.sum()

        return weighted
    return lambda batch: function(model, *batch) * factor


class PlainRun:
    """What a loop sees of a run, in plain torch on whole batches."""

    def __init__(self, model: nn.Module, given: Sequence[Any], evaluates: int | None = None) -> None:
        self.model, self._given, self.num_steps = model, given, len(given)
        self.device = torch.device("cpu")
        self.logged: list[dict[str, float]] = []
        self.errors: list[float] = []
        self._evaluates = evaluates

    def optimizer(self, optimizer: Any, scheduler: Any = None) -> Any:
        """Return the update of an optimizer."""
        return PlainUpdate(optimizer, scheduler)

    def state(self, name: str, value: Any) -> Any:
        """Return the value."""
        return value

    def steps(self) -> Iterator[Any]:
        """Yield the steps."""
        for number, batch in enumerate(self._given):
            yield PlainStep(self, number, batch)
            if self._evaluates and ((number + 1) % self._evaluates == 0 or number + 1 == len(self._given)):
                self.model.eval()
                with torch.no_grad():
                    points = Points()
                    self.errors.append(error(self.model(points.noise), points.real).mean().item())
                self.model.train()


class PlainUpdate:
    """An optimizer, and its scheduler."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler

    def step(self, clip: float | None = None, closure: Any = None) -> None:
        """Clip, update, step the scheduler, and drop the gradients."""
        if clip is not None:
            held = [one for group in self._optimizer.param_groups for one in group["params"]]
            sparse = [one for one in held if one.grad is not None and one.grad.is_sparse]
            for one in sparse:
                one.grad = one.grad.to_dense()
            nn.utils.clip_grad_norm_(held, clip)
        self._optimizer.step(closure)
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()


class PlainStep:
    """A step on a whole batch."""

    def __init__(self, run: PlainRun, number: int, batch: Any) -> None:
        self._run, self.number, self._batch, self.rows = run, number, batch, len(batch[0])

    def log(self, **numbers: Any) -> None:
        """Keep the numbers."""
        self._run.logged.append({name: float(value) for name, value in numbers.items()})

    def gather(self, function: Any, batch: Any = None) -> Any:
        """Call the function on the whole batch."""
        with torch.no_grad():
            return function(self._batch if batch is None else batch)

    def backward(self, loss: Any, of: Any, over: Any = None, batch: Any = None, keep: Any = None) -> torch.Tensor:
        """Take the mean loss's gradient in some parts."""
        modules = [of] if isinstance(of, nn.Module) else of
        trained = {id(one) for module in modules for one in module.parameters()}
        off = [one for one in self._run.model.parameters() if one.requires_grad and id(one) not in trained]
        for one in off:
            one.requires_grad_(False)
        value = loss(self._batch if batch is None else batch)
        if keep is not None:
            keep.update({name: made.detach() for name, made in value["outputs"].items()})
            value = value["loss"]
        if over is not None:
            mean = over(value["outputs"], value["target"])
        else:
            mean = value[0] / value[1] if isinstance(value, tuple) else value.mean()
        mean.backward()
        for one in off:
            one.requires_grad_(True)
        return mean.detach()  # type: ignore[no-any-return]


def plainly(
    loop: Callable[..., Any],
    kind: type[nn.Module] = Parts,
    batch_size: int = BATCH,
    without: Sequence[int] = (),
    epochs: int = EPOCHS,
    evaluates: int | None = None,
    **args: Any,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[float]]:
    """Run a loop in plain torch; return the weights, what it has logged, and the errors after every few steps."""
    torch.manual_seed(0)
    model = kind()
    given = [
        (points.real[rows], points.noise[rows])
        for points in [Points()]
        for _ in range(epochs)
        for start in range(0, len(points), batch_size)
        for rows in [[row for row in range(start, min(len(points), start + batch_size)) if row not in without]]
    ]
    run = PlainRun(model, given, evaluates)
    loop(run, **args)
    return dict(model.state_dict()), run.logged, run.errors
