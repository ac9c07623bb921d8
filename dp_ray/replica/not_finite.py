"""Finds the first module whose output, or whose gradient, is not finite, by hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.tensors.nested import flatten


class Place(NamedTuple):
    """A module by its name in the model, empty for the model itself, with its class; what of it; and the shard."""

    module: str
    kind: str
    what: str
    shard: int

    def __str__(self) -> str:
        return f"{self.what} of {self.module or 'the model'} ({self.kind}), in shard {self.shard}"


class NotFiniteFinder:
    """Looks at what the modules of a model give, in the order in which they end, then at their gradients.

    It changes no number. `output` and `gradient` are the first places found, None if there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.output: Place | None = None
        self.gradient: Place | None = None
        self._model = model
        self._shard = -1
        self._is_forward = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Look while the block runs."""
        made = [one.register_forward_hook(self._on_output(name)) for name, one in self._model.named_modules()]
        for name, one in self._model.named_modules():
            made += [
                parameter.register_hook(self._on_gradient(name, type(one).__name__, f"gradient of parameter {own}"))
                for own, parameter in one.named_parameters(recurse=False)
                if parameter.requires_grad
            ]
        try:
            yield
        finally:
            for handle in made:
                handle.remove()

    @contextmanager
    def forward(self, shard: int) -> Iterator[None]:
        """The forward of a shard; outside of it, as in a backward that runs a forward again, no outputs are seen."""
        self._shard, self._is_forward = shard, True
        try:
            yield
        finally:
            self._is_forward = False

    def _on_output(self, name: str) -> Any:
        def look(module: nn.Module, _: Any, outputs: Any) -> None:
            if not self._is_forward:
                return
            kind = type(module).__name__
            for tensor in _tensors(outputs):
                if self.output is None and not is_finite(tensor):
                    self.output = Place(name, kind, "output", self._shard)
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient(name, kind, "gradient of the output"))  # type: ignore[no-untyped-call]

        return look

    def _on_gradient(self, name: str, kind: str, what: str) -> Any:
        def look(gradient: torch.Tensor) -> None:
            if self.gradient is None and not is_finite(gradient):
                self.gradient = Place(name, kind, what, self._shard)

        return look


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer that is not finite."""
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, one in named if not is_finite(one)), None)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite; those of integers are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    numbers = tensor.detach()
    return bool(torch.isfinite(numbers if numbers.layout is torch.strided else numbers.coalesce().values()).all())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
