"""Look at each pass of a step of a loop, just before it runs: what `inspect_step` finds in its shards.

Begin at `InspectedPass.run`. The loop itself runs as ever: its updates, and what it decides by a pass, stay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dp_ray.engine.bad_samples import not_finite
from dp_ray.engine.inspect_step import Findings, StepInspection
from dp_ray.engine.loading import LoadedShard, LoadedStep
from dp_ray.engine.loop_model import LoopModel, LoopPass, OfRows
from dp_ray.engine.step import OnShard
from dp_ray.engine.whole_batch import MergedBatch


class StepIsThrough(BaseException):
    """A step that was run again is through; raised in the loop, which is not to go on."""


Debug = Callable[[StepInspection, Findings, "InspectedPass"], None]


@dataclass
class PassFindings:
    """A pass or a gather of a step: its `function`, the names of what it trains, and what was found in its shards.

    `number` is that of its random numbers: all calls of a closure have the same. `rows` are those of its batch that
    were not set aside; it is the loop's own if it `has_own_batch`. `loss` is the mean of the whole batch. A gather
    trains nothing, and its findings name a place in what it has returned.
    """

    function: Any
    of: list[str]
    number: int
    rows: int
    has_own_batch: bool
    findings: Findings
    loss: float | None = None


class InspectedModel(LoopModel):
    """The model of a loop; while it `looks`, each pass and gather is noted in `found`, in the order of the calls.

    `shard` is the one to look at; None for all. `debugs_in` is the place of a pass, and what is called before it
    runs.
    """

    looks = False
    shard: int | None = None
    debugs_in: tuple[int, Debug] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[PassFindings] = []
        self._cut: LoadedStep | None = None

    def new_pass(self, *args: Any) -> LoopPass:
        """Return a pass that is looked at."""
        return InspectedPass(self, *args)

    def cut(self, loaded: LoadedStep, batch: Any) -> LoadedStep:
        """Note that the batch is the loop's own."""
        self._cut = super().cut(loaded, batch)
        return self._cut

    def gather(self, function: OfRows, loaded: LoadedStep, number: int) -> MergedBatch | None:
        """Note the call, and where what it returns is not finite."""
        found = super().gather(function, loaded, number)
        if self.looks:
            place = None if found is None else not_finite(found.outputs) or None
            self.note(function, [], number, loaded, Findings([], None, place, None, None))
        return found

    def note(self, function: Any, of: list[str], number: int, loaded: LoadedStep, findings: Findings) -> None:
        """Note what was found in a pass or a gather."""
        own, rows = loaded is self._cut, sum(part.shard.rows for part in loaded.loaded)
        self.found.append(PassFindings(function, of, number, rows, own, findings))


class InspectedPass(LoopPass):
    """A pass of which each shard first runs alone, so that its losses and what is not finite are seen."""

    def __init__(self, model: InspectedModel, modules: Sequence[nn.Module], *args: Any) -> None:
        super().__init__(model, modules, *args)
        self._inspected, self._of = model, model.names_of(modules)

    def run(self, loaded: LoadedStep, on_shard: OnShard | None = None, number: int = 0) -> None:
        """Look at the shards, then run them."""
        model = self._inspected
        if model.looks and self.optimizer_step.trained:
            with gradients_apart(model.model):
                self._look(loaded, number)
        super().run(loaded, on_shard, number)

    def call_by(self, call: Callable[..., Any]) -> None:
        """Have the loop's function be called by another one, which gets it and a shard's batch."""
        self.function = partial(call, self.function)

    def _look(self, loaded: LoadedStep, number: int) -> None:
        model, placement = self._inspected, self._inspected.placement
        look = StepInspection(placement.job, model.model, placement.world.device, self.loss, number=number)
        filled: list[LoadedShard] = [part for part in loaded.loaded if part.shard.rows]
        findings = look.find(filled, loaded.whole, model.shard)
        if model.debugs_in is not None and model.debugs_in[0] == len(model.found):
            model.debugs_in[1](look, findings, self)
            raise StepIsThrough
        model.note(self.function, self._of, number, loaded, findings)

    def finish(self, weight: Any, loaded: LoadedStep, is_empty: bool) -> None:
        """Note the mean loss of the whole batch."""
        if self._inspected.looks and self._inspected.found:
            total, weights, *_ = self.stats.total().tolist()
            self._inspected.found[-1].loss = total / weights if weights else float("nan")
        super().finish(weight, loaded, is_empty)


@contextmanager
def gradients_apart(model: nn.Module) -> Iterator[None]:
    """Give the parameters their gradients of before after the block: the loop may hold some."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
