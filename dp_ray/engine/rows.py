"""Which tensors of a model's outputs have a row for each sample: tried once in a run, with one row less.

A size is no proof: in a shard of two rows, the hidden state of two layers, `[layers, rows, size]`, looks as if its
first dimension held the rows, and so do four prototypes in a shard of four. So the first shard with two rows or more
runs once more without its last row, on a copy of its batch. A tensor with rows is then one shorter.

A worker may have no such shard. Then a list of one text is tried: its first shard of one row runs with the row twice.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from dp_ray.engine.random import preserved
from dp_ray.engine.user_code import error_text
from dp_ray.engine.world import passes
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.system.process import patched
from dp_ray.tensors.flat import as_bytes
from dp_ray.tensors.scatter import count_of, cut, gather, has_rows
from dp_ray.tensors.tree import Ragged, TreeSpec, all_nodes, copied, flatten, is_plain, is_texts, unflatten

NO_BATCH = "the batch of a shard cannot be cut: not all that is in it are tensors with a row for each sample"

Size = tuple[int, ...]


class Less(NamedTuple):
    """A part of a shard's outputs: its size, that with one row less, and whether it is the same to the bit then.

    A number or an object has no size.
    """

    size: Size | None
    less: Size | None
    is_same: bool

    def follows(self, rows: int, batch_dim: int) -> bool | None:
        """Return whether it has its `rows` rows in the dimension for them; None if the sizes do not show it."""
        if self.size is None or self.less is None:
            return False
        dim = row_dim(self.size, batch_dim)
        if dim is None or self.size[dim] != rows:
            return False
        if len(self.less) != len(self.size):
            return None  # models squeeze: of a single row they leave out each dimension that has become 1
        return self.less[dim] == rows - 1

    def misfit(self, rows: int, batch_dim: int, leave_out: str) -> str:
        """Describe an output that does not follow the rows, and how to change it; `leave_out` is one way."""
        assert self.size is not None and self.less is not None
        dim = row_dim(self.size, batch_dim)
        there = [
            at
            for at, (full, less) in enumerate(zip(self.size, self.less, strict=False))
            if (full, less) == (rows, rows - 1)
        ]
        says = f"has the size {list(self.size)} with {rows} rows, and {list(self.less)} with {rows - 1}"
        if not there:
            return f"{says}: so it does not have a row for each sample; {leave_out}"
        return (
            f"{says}: its rows are in dimension {there[0]}, not in {dim}; transpose it so that they are, or set "
            f"batch_dim: {there[0]} if they are there in all inputs and outputs, or {leave_out}"
        )


Tried = Mapping[str, Less] | str  # by path; or why a shard could not be tried


class RowTrial:
    """The trial of a run, on one worker.

    `cannot` says why this worker may not run a shard by itself; "" if it may. `say` gets a line for the user if
    there is no trial, so that sizes alone decide.
    """

    running = False  # whether a trial runs in this process: what measures forwards leaves it out

    def __init__(self, job: Job, device: torch.device, cannot: str, say: Callable[[str], None]) -> None:
        self._job = job
        self._device = device
        self._cannot = cannot
        self._say = say
        self.is_open = self._is_single_due = True  # `is_open` until a shard of more rows has been tried
        self._tried: Tried = ""

    def is_due(self, rows: int) -> bool:
        """Return whether to try a shard of so many rows."""
        return self.is_open and rows > 1

    def is_single_due(self, rows: int) -> bool:
        """Return whether to try a shard of one row, for the lists of one text in its outputs."""
        return self.is_open and self._is_single_due and rows == 1

    def other(self, batch: Any, rows: int) -> Any | None:
        """Return a copy of a batch without its last row, or with an only one twice; None if it cannot be tried."""
        if self._cannot or not _can_be_cut(self._job, batch, rows):
            return None
        if rows == 1:
            return gather([_with_texts(batch, 1, lambda texts: [*texts, *texts])] * 2, dim=self._job.batch_dim)
        return copied(cut(_with_texts(batch, rows, lambda texts: texts[:-1]), 0, rows - 1, self._job.batch_dim))

    def run(self, forward: Callable[[Any], Any], less: Any | None, outputs: Any, rows: int) -> Tried:
        """Run `forward` on a batch of one row `less`, and compare what it returns with the `outputs` of all `rows`.

        It leaves no graph, and no random number drawn. If it raises, the error is the reason why there is no trial.
        """
        if less is None:
            return self._cannot or NO_BATCH
        # A compiled model would be compiled once more; setting the stance imports the compiler, which takes seconds.
        eager = torch.compiler.set_stance("force_eager") if self._job.compile else nullcontext()
        try:
            with patched(RowTrial, running=True), preserved(self._device), eager, torch.no_grad():
                return _compared(outputs, forward(less))
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            what = f"one row less, {rows - 1}" if rows > 1 else "its row twice"
            return error_text(f"with {what}, the model", _first_cause(error)).splitlines()[0]

    def end(self, tried: Tried) -> None:
        """Keep the result of a trial; no other one runs."""
        self.is_open = False
        self._tried = tried
        if isinstance(tried, str):
            self._say(
                f"outputs: only sizes tell which have a row for each sample, since {tried.rstrip('.')}; one whose "
                f"dimension {self._job.batch_dim} is by chance as long as a shard has rows counts as such"
            )

    def end_single(self, tried: Tried) -> None:
        """Keep the result of a shard of one row: no other one is tried, but a shard of more rows is."""
        self._is_single_due = False
        self._tried = tried

    def is_column(self, path: str, length: int, rows: int) -> bool:
        """Return whether a list of texts has one for each row of a shard: by the trial, or else by its length.

        Raises ModelError if it had one for each in the shard of the trial, and has not here.
        """
        tried = None if isinstance(self._tried, str) else self._tried.get(path)
        if tried is None or tried.size is None or tried.less is None:
            return length == rows
        has_rows = tried.less[0] != tried.size[0]  # one less, or of a single row one more
        if has_rows and length != rows:
            name = f"output {path!r}" if path else "the output"
            raise ModelError(f"{name} is a list of {length} texts for {rows} rows: give one text for each row")
        return has_rows


def row_dim(size: Sequence[int], batch_dim: int) -> int | None:
    """Return the dimension that holds the rows of a tensor with rows; None if there is none."""
    if len(size) < 2:
        return 0 if size else None
    return batch_dim if batch_dim < len(size) else None


def _can_be_cut(job: Job, batch: Any, rows: int) -> bool:
    """Return whether a batch without its last row is the same as a shard of one row less.

    It is not if the batch holds an object, or a number equal to that of the rows: they would not change.
    """
    found = [node for _, node in all_nodes(flatten(batch)[1])]
    if not all(is_plain(node.value) and node.value != rows for node in found if node.kind == "constant"):
        return False
    if job.collate is None:  # torch's collate makes tensors of all but texts, which are lists with one for each row
        texts = [part for part in flatten(batch, is_whole=is_texts)[0] if is_texts(part)]
        are_cut = all(len(text) == rows for text in texts)
        return are_cut and (count_of(batch, job.batch_dim) == rows or (bool(texts) and not flatten(batch)[0]))
    is_pair = not job.takes_batches and isinstance(batch, tuple | list) and len(batch) == 2 and job.task != "predict"
    return all(has_rows(part, rows, job.batch_dim) for part in (batch if is_pair else [batch]))


def _with_texts(batch: Any, rows: int, change: Callable[[Any], Any]) -> Any:
    """Return a batch in which lists with a text for each row, of torch's collate, are changed."""
    parts, spec = flatten(batch, is_whole=is_texts)
    return unflatten(spec, [change(part) if is_texts(part) and len(part) == rows else part for part in parts])


def _compared(outputs: Any, less: Any) -> dict[str, Less]:
    (leaves, spec), (others, other_spec) = flatten(outputs), flatten(less)
    here, there = dict(zip(spec.paths, leaves, strict=True)), dict(zip(other_spec.paths, others, strict=True))
    found = {
        path: Less(_size_of(part), _size_of(there[path]), _is_same(part, there[path]))
        for path, part in here.items()
        if path in there
    }
    constants = constants_of(other_spec)
    for path, value in constants_of(spec).items():
        if path in constants:
            found[path] = Less(None, None, is_same_constant(value, constants[path]))
    return found


def _size_of(leaf: Any) -> Size:
    return (len(leaf.shapes),) if isinstance(leaf, Ragged) else tuple(leaf.shape)


def _is_same(here: Any, there: Any) -> bool:
    if isinstance(here, Ragged) or isinstance(there, Ragged) or _size_of(here) != _size_of(there):
        return False
    if isinstance(here, np.ndarray) or isinstance(there, np.ndarray):
        return type(here) is type(there) and here.dtype == there.dtype and bool(here.tobytes() == there.tobytes())
    if here.dtype is not there.dtype:
        return False
    is_dense = all(each.layout is torch.strided and not each.is_quantized for each in (here, there))
    return is_dense and torch.equal(as_bytes(here), as_bytes(there))


def constants_of(spec: TreeSpec) -> dict[str, Any]:
    """Return the values in outputs that are no tensors, by path: numbers, texts, None and objects."""
    return {".".join(map(str, keys)): node.value for keys, node in all_nodes(spec) if node.kind == "constant"}


def is_same_constant(here: Any, there: Any) -> bool:
    """Return whether two constants are the same to the bit; of objects, whether they are equal."""
    if here is there:
        return True
    if is_plain(here) and is_plain(there):
        return repr(here) == repr(there)
    try:
        return bool(here == there)
    except Exception:  # the == of a user's object may raise anything
        return False


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
