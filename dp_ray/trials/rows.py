"""Which outputs of a shard have a row for each sample: it runs once more with other rows, and the sizes tell.

Begin at `tried`. The shard runs without its last row, and a tensor with rows is one shorter; one of a single row runs
with the row twice. A size alone is no proof: in a shard of two rows, the hidden state of two layers,
`[layers, rows, size]`, looks as if its first dimension held the rows, and so do four prototypes in a shard of four.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.loads.loading import LoadedShard
from dp_ray.engine.sums.whole_batch import constants_of, row_dim
from dp_ray.engine.user_code import error_text
from dp_ray.engine.world import passes
from dp_ray.errors import ModelError, cause_of
from dp_ray.job.job import Job
from dp_ray.tensors.scatter import count_of, cut, gather, has_rows
from dp_ray.tensors.tree import (
    Ragged,
    all_nodes,
    ends,
    flatten,
    is_plain,
    is_same_constant,
    is_same_leaf,
    is_texts,
    quoted,
    unflatten,
)
from dp_ray.text import counted, listed

NO_BATCH = "the batch of a shard cannot be cut: not all that is in it are tensors with a row for each sample"

FEW = 8  # rows of a prediction's shard that tell as much as all: the other workers wait for the answer

Size = tuple[int, ...]


def other_rows(rows: int) -> int:
    """Return with how many rows a shard is compared: with one row less, of one row with that twice."""
    return rows - 1 or 2


class Less(NamedTuple):
    """A part of a shard's outputs: its size, that with other rows, and whether it is the same to the bit then.

    A number or an object has no size.
    """

    size: Size | None
    less: Size | None
    is_same: bool

    def follows(self, rows: int, batch_dim: int) -> bool | None:
        """Return whether it has its `rows` rows in the dimension for them; None if the sizes do not show it."""
        if self.size is None or self.less is None:
            return False
        dim, is_squeezed = row_dim(self.size, batch_dim), len(self.less) != len(self.size)
        if (dim is None or self.size[dim] != rows) and not (is_squeezed and rows == 1):
            return False
        if dim is None or is_squeezed:
            return None  # models squeeze: of a single row they leave out each dimension that has become 1
        return self.less[dim] == other_rows(rows)

    def misfit(self, rows: int, batch_dim: int, leave_out: str) -> str:
        """Describe an output that does not follow the rows, and how to change it; `leave_out` is one way."""
        assert self.size is not None and self.less is not None
        pairs = enumerate(zip(self.size, self.less, strict=False))
        other = other_rows(rows)
        there = [at for at, pair in pairs if pair == (rows, other)]
        says = f"has the size {list(self.size)} with {counted(rows, 'row')}, and {list(self.less)} with {other}"
        if not there:
            return f"{says}: so it does not have a row for each sample; {leave_out}"
        return (
            f"{says}: its rows are in dimension {there[0]}, not in {row_dim(self.size, batch_dim)}; transpose it so "
            f"that they are, or set batch_dim: {there[0]} if they are there in all inputs and outputs, or {leave_out}"
        )


Tried = Mapping[str, Less]  # by path


def few_of(job: Job, first: LoadedShard) -> LoadedShard | None:
    """Return the first FEW rows of a shard as a shard; None if it has not many more, or cannot be cut."""
    shard, rows = first.shard, first.shard.rows
    batch = _first_rows(job, first.batch, rows, FEW) if rows > 2 * FEW else None
    if batch is None:
        return None
    return LoadedShard(replace(shard, stop=shard.start + FEW, missing=()), first.indices[:FEW], batch)


def looks_like(found: Tried, rows: int, batch_dim: int) -> bool:
    """Return whether an output of a few rows has the size that a shard of `rows` rows would give it."""
    sizes = [each.size for each in found.values() if each.size is not None]
    return any(dim is not None and size[dim] == rows for size in sizes for dim in [row_dim(size, batch_dim)])


def tried(job: Job, replica: Replica, first: LoadedShard, run: Callable[[Any], Any], outputs: Any) -> Tried | str:
    """Run a shard with one row less, or an only row twice, and compare what `run` returns with the `outputs`.

    Returns why not, if the batch cannot be cut, or if it raises.
    """
    rows = first.shard.rows
    other = _first_rows(job, first.batch, rows, other_rows(rows))
    if other is None:
        return NO_BATCH

    def compared(batch: Any) -> Tried | str:
        try:
            return _compared(outputs, run(batch))
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            what = f"one row less, {rows - 1}" if rows > 1 else "its row twice"
            return error_text(f"with {what}, the model", cause_of(error) or error).splitlines()[0]

    # A compiled model would be compiled once more; setting the stance imports the compiler, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if job.compile else nullcontext()
    with eager, replica.again(first._replace(batch=other), compared) as found:
        return found


def _first_rows(job: Job, batch: Any, rows: int, kept: int) -> Any | None:
    """Return the first `kept` rows of a batch, or an only one twice; None if that is not a shard of its rows.

    It is not if the batch holds an object, or a number equal to that of the rows: they would not change.
    """
    found = [node for _, node in all_nodes(flatten(batch)[1])]
    if not all(is_plain(node.value) and node.value != rows for node in found if node.kind == "constant"):
        return None
    parts, spec = flatten(batch, is_whole=is_texts)
    if job.collate is None:  # torch's collate makes tensors of all but texts, which are lists with one for each row
        texts = [part for part in parts if is_texts(part)]
        are_cut = all(len(text) == rows for text in texts)
        if not are_cut or not (count_of(batch, job.batch_dim) == rows or (texts and not flatten(batch)[0])):
            return None
    else:
        is_list = not job.takes_batches and isinstance(batch, tuple | list)
        is_pair = is_list and len(batch) == 2 and job.task != "predict"
        if not all(has_rows(part, rows, job.batch_dim) for part in (batch if is_pair else [batch])):
            return None

    def with_texts(change: Callable[[Any], Any]) -> Any:
        return unflatten(spec, [change(part) if is_texts(part) and len(part) == rows else part for part in parts])

    if rows == 1:
        return gather([with_texts(lambda texts: [*texts, *texts])] * 2, dim=job.batch_dim)
    return cut(with_texts(lambda texts: texts[:kept]), 0, kept, job.batch_dim)


def _compared(outputs: Any, less: Any) -> dict[str, Less]:
    (leaves, spec), (others, other_spec) = flatten(outputs), flatten(less)
    here, there = dict(zip(spec.paths, leaves, strict=True)), dict(zip(other_spec.paths, others, strict=True))
    found = {
        path: Less(_size_of(part), _size_of(there[path]), is_same_leaf(part, there[path]))
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


def check_sizes(found: Tried, rows: int, batch_dim: int, where: str, texts: Sequence[str]) -> None:
    """Raise ModelError for the first output whose size has the rows of a shard by chance; lists of `texts` may."""
    follows = {path: less.follows(rows, batch_dim) for path, less in found.items() if less.size is not None}
    fitting = [path for path, follow in follows.items() if follow]
    for path, follow in follows.items():
        size, less = found[path].size, found[path].less
        assert size is not None and less is not None
        dim, name = row_dim(size, batch_dim), f"output {path!r}" if path else "the output"
        if path in texts:
            if not follow and size != less:
                says = f"is a list of {size[0]} texts with {rows} rows, and of {less[0]} with {rows - 1}"
                raise ModelError(f"{where}: {name} {says}: return a list of texts, one for each row")
        elif follow is False and dim is not None and size[dim] == rows:
            keep = f"keep the others alone: outputs.keep: [{listed(fitting)}]" if fitting else "leave it out"
            raise ModelError(f"{where}: {name} {found[path].misfit(rows, batch_dim, keep)}")


def check_lists(found: Tried, outputs: Any, rows: int, where: str) -> None:
    """Raise ModelError for the first list that has an entry for each row, and one less with one row less."""
    for keys, node in all_nodes(flatten(outputs)[1]):
        if node.kind not in ("list", "tuple") or len(node.children) != rows:
            continue
        last, before = (
            [".".join(map(str, (*keys, at, *inner))) for inner in ends(node.children[at])]
            for at in (rows - 1, rows - 2)
        )
        if any(path in found for path in before) and not any(path in found for path in last):
            raise ModelError(
                f"{where}: output{quoted(keys)} is a {node.kind} with an entry for each row: return a tensor, a list "
                "of texts, or a list, with outputs.ragged: true"
            )
