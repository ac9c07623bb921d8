"""What a constructor sees while it is recorded: meta tensors that say they are on the CPU, and nothing of numbers.

torch answers some questions about a meta tensor without an error, and with another answer than about a real one.
Here such a question is answered as if the tensor were real, or ends the recording.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

META, CPU = torch.device("meta"), torch.device("cpu")
Tensor = torch.Tensor

# What does not raise an error for a meta tensor, and does something else than for a real one.
READS = {
    Tensor.__repr__: "the text",
    Tensor.__format__: "the text",
    Tensor.data_ptr: "the address",
    Tensor.storage: "the storage",
    Tensor.untyped_storage: "the storage",
    Tensor._typed_storage: "the storage",
    Tensor.apply_: "the numbers",
    Tensor.map_: "the numbers",
    Tensor.map2_: "the numbers",
    Tensor.new: "the type",
}
MOVES = (Tensor.to, Tensor.cpu, Tensor.type_as, torch.as_tensor, torch.asarray)


class CannotDefer(Exception):
    """A constructor does what cannot be recorded."""


@contextmanager
def plainly() -> Iterator[None]:
    """While the block runs, operations are those of torch alone: nothing is recorded."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        yield


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever `AsIfReal` says."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta))


class Failures:
    """The first error in a recording: the constructor, or torch, may catch it and go on another way.

    Without `exact`, a recording need only tell sizes and types, and not the numbers.
    """

    def __init__(self, exact: bool) -> None:
        self.first: Exception | None = None
        self.exact = exact

    def refuse(self, reason: str) -> None:
        """Raise CannotDefer, because of the numbers."""
        if self.exact:
            raise CannotDefer(reason)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the block raises."""
        try:
            yield
        except Exception as error:
            self.first = self.first or error
            raise


class RandomState:
    """Finds out whether others than the recorded operations draw from torch's random numbers, or set them.

    The recording draws a number for each operation that will. So a state that was kept before it is another.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._first = self._expected = torch.default_generator.get_state()

    def drawn(self) -> None:
        """Note a draw. Raises CannotDefer if the state is not that of the last draw."""
        with plainly():
            self.check()
            torch.rand(())
            self._expected = torch.default_generator.get_state()

    def check(self) -> None:
        """Raise CannotDefer if the state is not that of the last draw."""
        with plainly():
            if not torch.equal(torch.default_generator.get_state(), self._expected):
                self._failures.refuse("it seeds or sets torch's random numbers, or draws them in a thread")

    def restore(self) -> None:
        """Go back to the state before the recording."""
        torch.default_generator.set_state(self._first)


_ANSWERS = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: CPU,
}


class AsIfReal(TorchFunctionMode):
    """Says that a tensor is on the CPU: constructors of torch and of others leave meta tensors alone.

    Raises CannotDefer for a question that has no right answer, and notes all errors in `failures`.
    """

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self._failures = failures

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (answer := _ANSWERS.get(function)) is not None and is_meta(args[0]):
            return answer
        with self._failures.noting():
            return self._answer(function, args, kwargs or {})

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(_names_meta(one) for one in (*args, kwargs.get("device"))):
            self._failures.refuse("it makes tensors on the meta device itself")
        if torch.is_autocast_enabled("cpu"):
            self._failures.refuse("it computes under autocast")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if function in MOVES:
            return _move(function, args, kwargs)
        if first is None or not is_meta(first):
            with plainly() if function is Tensor.__deepcopy__ else nullcontext():
                return function(*args, **kwargs)
        if function in READS:
            self._failures.refuse(f"it reads {READS[function]} of a tensor that is made later")
        if function is Tensor.__deepcopy__:
            if type(first) is not Tensor or not first.is_leaf or first.grad is not None or vars(first):
                self._failures.refuse("it copies a tensor with a history or with attributes")
            return _deep_copy(first, *args[1:])
        if function is Tensor.new_tensor:  # torch leaves out the numbers
            return torch.tensor(*args[1:], **{"dtype": first.dtype, **kwargs})
        return function(*args, **kwargs)


def _names_meta(value: Any) -> bool:
    return (isinstance(value, torch.device) and value == META) or (isinstance(value, str) and value == "meta")


def _move(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A move to the CPU or to another's device: a real tensor is there, and stays the same memory."""
    first, *others = args
    if not isinstance(first, Tensor):
        return function(*args, **kwargs)
    if function is Tensor.type_as:
        return first.to(others[0].dtype)
    if not is_meta(first):
        return function(first, *[one.dtype if isinstance(one, Tensor) else one for one in others], **kwargs)
    if function is Tensor.cpu:
        function, kwargs = Tensor.to, {"device": CPU, **kwargs}
    if isinstance(other := kwargs.pop("other", None), Tensor):
        others.insert(0, other)
    return function(first, *map(_staying, others), **{name: _staying(one) for name, one in kwargs.items()})


def _staying(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    is_cpu = isinstance(value, str | torch.device) and torch.device(value).type == "cpu"
    return META if is_cpu else value


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """What torch does with a real tensor: tensors that share memory share it in the copy."""
    if id(tensor) in memo:
        found: torch.Tensor = memo[id(tensor)]
        return found
    copies = memo.setdefault("torch", {})
    with plainly():
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=META).set_(storage, 0, (storage.nbytes(),), (1,))
    if storage._cdata not in copies:
        copies[storage._cdata] = whole.clone()
    with plainly():
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        made = torch.empty(0, dtype=tensor.dtype, device=META).set_(
            copies[storage._cdata].untyped_storage(), *geometry
        )
        made.requires_grad = tensor.requires_grad
    memo[id(tensor)] = made
    return made
