"""The state of a model in eval mode, as it stands after `eval()`: what its forwards write is undone."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

from torch import nn

from dp_ray.engine.buffers import (
    ADVICE,
    EARLY,
    LOST,
    NONE,
    SMALL,
    Before,
    Copies,
    Roots,
    Stamps,
    Writable,
    modules_of,
    shown,
)
from dp_ray.engine.own_modes import set_modes
from dp_ray.errors import ModelError
from dp_ray.text import listed

USUAL: AbstractContextManager[None] = nullcontext()
# How many forwards of a model in eval mode were compared, with what is beside it, and the parameters that they wrote.
_seen_in_eval: "WeakKeyDictionary[nn.Module, dict[tuple[str, ...], tuple[int, frozenset[str]]]]" = WeakKeyDictionary()


class EvalState(Writable):
    """The state that a forward may write in eval mode: every shard must start from the same values.

    Some modules change buffers in eval mode too, as the observers of quantization do, and `nn.Embedding` with
    `max_norm` its weight. Forwards run in `forward`, which compares all parameters after the EARLY ones of a model.
    A large buffer is put back once its stamps show a write; if none is trusted to, always.
    """

    def __init__(self, model: nn.Module, beside: Roots = NONE, trusts_stamps: bool = True) -> None:
        super().__init__(model, beside)
        self._num_runs, written = _seen_in_eval.get(model, {}).get(tuple(beside), (0, frozenset()))
        self._has_checked = False
        self._follow(written)
        self._held = [module._buffers for _, module in modules_of(self._roots)]
        self._keys = [frozenset(held.keys()) for held in self._held]
        self._lengths = list(map(len, self._held))
        taken = self._take(Copies(self, {}, {}))
        # To copy a large one takes time, so its stamps must show a write first.
        self._large = Stamps(
            {
                name: tensor
                for name, tensor in taken.tensors.items()
                if trusts_stamps and tensor is not None and tensor.nbytes > SMALL and name not in self._followed
            }
        )
        self._copies = Copies(self, taken.tensors, taken.values, self._large.tensors)
        self._before: Before | None = None  # in early runs
        self._lost: dict[str, None] = {}  # written so that it cannot be undone; of a trial, that is no error

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward; after early ones, the content of all parameters is compared.

        Raises ModelError for a write that cannot be undone.
        """
        return self._looking() if self._num_runs < EARLY else USUAL

    @contextmanager
    def _looking(self) -> Iterator[None]:
        if self._before is None:
            self._before = Before(self._watched.tensors, self._smallest())
        self._num_runs += 1
        try:
            yield
        finally:
            lost = self._see({*self._before.written(self._plain), *self._watched.written()}, self._before)
            self._lost.update(dict.fromkeys(lost))
        if lost:
            raise ModelError(f"the forward wrote {listed(map(shown, lost))} {LOST}")
        seen = _seen_in_eval.setdefault(self._model, {})
        seen[tuple(self.beside)] = self._num_runs, frozenset(self._followed)
        if self._num_runs == EARLY:
            self._before = None

    running = forward  # what sees a whole batch, on all workers alike

    def begin(self, num_shards: int) -> None:
        """Begin a step: each shard starts from the values with which this was made."""

    def keep(self) -> None:
        """Keep nothing: an evaluation leaves no change."""

    def _see(self, written: Iterable[str], before: Before) -> list[str]:
        """Follow what a forward has written; return the names of those whose value of before is lost."""
        values = {name: before.value(name) for name in written if name not in self._followed}
        found = {name: value for name, value in values.items() if value is not None}
        self._follow(found)
        tensors = {**self._copies.tensors, **{name: self._plain[name] for name in found}}
        self._copies = Copies(self, tensors, {**self._copies.values, **found}, self._large.tensors)
        return [name for name in values if name not in found]

    def restore(self) -> None:
        """Undo the changes of a forward; raises ModelError for a change that cannot be undone."""
        if not self._has_checked:
            self._check_parameters()
        self._has_checked = True
        if self._lost:
            raise ModelError(f"the forward wrote {listed(map(shown, self._lost))} {LOST}")
        if written := [name for name in self._watched.written() if name not in self._followed]:
            raise ModelError(
                f"the forward wrote {listed(map(shown, written))}, and not in its first {EARLY} runs, so it cannot "
                f"be put back; {ADVICE}"
            )
        self.put_back()

    def put_back(self) -> None:
        """Undo the changes of a forward to the state of which there is a copy."""
        if list(map(len, self._held)) != self._lengths:
            for held, keys in zip(self._held, self._keys, strict=True):
                for key in set(held) - keys:
                    del held[key]
        written = self._large.written()
        self._put(self._copies, written)
        if written:
            self._large.note()


@contextmanager
def evaluating(model: nn.Module, beside: Mapping[str, nn.Module] = NONE) -> Iterator[EvalState]:
    """Call the model's `eval()`, and undo what forwards write in the block, the modules `beside` the model too.

    That is undone after the block, and inside it by `restore` of the state that it gives. The model stays in eval
    mode: only what goes on to train returns, by `returning`.
    """
    set_modes(model, False)
    state = EvalState(model, beside)
    try:
        yield state
    finally:
        state.put_back()
