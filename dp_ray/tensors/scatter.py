"""Cut any nesting of tensors into shards along the batch dimension, and put the shards together again.

>>> batch = {"x": torch.arange(5), "name": "odd"}
>>> cut(batch, 3, 5)
{'x': tensor([3, 4]), 'name': 'odd'}
>>> gather([cut(batch, 0, 3), cut(batch, 3, 5)], rows=[3, 2])
{'x': tensor([0, 1, 2, 3, 4]), 'name': 'odd'}
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dp_ray.errors import DataError, ModelError
from dp_ray.tensors.tree import (
    Leaf,
    Ragged,
    TreeSpec,
    all_nodes,
    first_difference,
    flatten,
    holds_objects,
    leaf_keys,
    quoted,
    unflatten,
)
from dp_ray.text import listed


def cut(tree: Any, start: int, stop: int, dim: int = 0) -> Any:
    """Return rows `start .. stop - 1` of a tree, as views; dimension `dim` holds the rows.

    All pieces of a tree share its constants. That its leaves have the same rows is for `num_rows` to check.
    """
    leaves, spec = flatten(tree)
    # Indexing works for tensors and arrays. Autograd allows in-place writes to its views, but not to torch.chunk's.
    return unflatten(spec, [leaf[(*(slice(None),) * rows_dim(leaf, dim), slice(start, stop))] for leaf in leaves])


def gather(trees: Sequence[Any], rows: Sequence[int] | None = None, dim: int = 0) -> Any:
    """Concatenate the shards' trees along their rows, in order: the inverse of `cut`.

    If `rows` is given, each shard must have that many. Scalars become a vector only if `rows` is 1 for every shard.
    A single tree keeps its own tensors. Raises ModelError if the shards differ in anything but rows.
    """
    if not trees:
        raise ModelError("no shard gave an output, so there is nothing to gather")
    flat = [flatten(tree) for tree in trees]
    return unflatten(flat[0][1], gather_leaves(flat, [None] * len(trees) if rows is None else rows, dim))


def gather_leaves(flat: Sequence[tuple[list[Any], TreeSpec]], rows: Sequence[int | None], dim: int = 0) -> list[Any]:
    """Concatenate the leaves of trees that `flatten` took apart; raises what `gather` raises."""
    spec = flat[0][1]
    for shard, (_, other) in enumerate(flat[1:], 1):
        if (problem := first_difference(spec, other)) is not None:
            advice = "all shards must give the same structure, keys and constants"
            raise ModelError(f"shard {shard}: {problem}: {advice}")
    # Leaves are matched by their keys: the mappings of two shards may have them in another order.
    leaves_of = [dict(zip(leaf_keys(other), leaves, strict=True)) for leaves, other in flat]
    columns = {keys: [leaves[keys] for leaves in leaves_of] for keys in leaves_of[0]}
    others = [".".join(map(str, keys)) for keys, pieces in columns.items() if pieces[0].ndim]
    return [_concatenate(quoted(keys), column, rows, dim, others) for keys, column in columns.items()]


def _concatenate(
    name: str, pieces: Sequence[Any], rows: Sequence[int | None], dim: int, others: Sequence[str]
) -> Any:
    """Concatenate one leaf of all shards; raises ModelError, naming the shard whose piece does not fit.

    `others` are the paths of the leaves that have rows.
    """
    if isinstance(pieces[0], Ragged) and len(pieces) == 1:
        return pieces[0]  # made with a row for each of the shard's
    if all(piece.ndim == 0 for piece in pieces):
        if any(count != 1 for count in rows):
            advice = "return one value per row (of a loss: reduction='none')"
            if others:
                advice += f", or keep the others alone: outputs.keep: [{listed(others)}]"
            raise ModelError(f"output{name} is a scalar per shard, not per row: {advice}")
        pieces = [piece.reshape(1) for piece in pieces]
    for shard, (piece, count) in enumerate(zip(pieces, rows, strict=True)):
        if (problem := _misfit(piece, pieces[0], count, dim)) is not None:
            raise ModelError(f"shard {shard}: output{name} {problem}")
    concatenate: Any = torch.cat if isinstance(pieces[0], torch.Tensor) else np.concatenate
    return pieces[0] if len(pieces) == 1 else concatenate(pieces, rows_dim(pieces[0], dim))


def _misfit(piece: Leaf, first: Leaf, rows: int | None, dim: int) -> str | None:
    """Return why a shard's piece cannot be concatenated with shard 0's; None if it can."""
    try:
        here, there = _form(piece, dim), _form(first, dim)
    except DataError as error:
        return f"of {error}"
    if here != there:
        return f"is {here}, that of shard 0 {there}"
    got = piece.shape[rows_dim(piece, dim)]
    advice = "return one row of output per row of input, and leave no sample out in the collate"
    return None if rows in (None, got) else f"has {got} rows (size {list(piece.shape)}), not {rows}: {advice}"


def _form(leaf: Leaf, dim: int) -> str:
    """Describe what all shards' pieces must have in common: type, dtype and all lengths but the rows."""
    size = [str(length) for length in leaf.shape]
    size[rows_dim(leaf, dim)] = "rows"
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype}, size [{', '.join(size)}]"
    # A string array is as wide as its longest string, so the width differs from shard to shard.
    return f"an array of {leaf.dtype.type if leaf.dtype.kind in 'SU' else leaf.dtype}, size [{', '.join(size)}]"


def num_rows(tree: Any, dim: int = 0) -> int | None:
    """Return the number of rows, the same for all leaves; None without leaves.

    Raises DataError, naming two leaves, if they differ.
    """
    if isinstance(tree, torch.Tensor) and -tree.ndim <= dim < tree.ndim:  # most batches: no tree to walk
        return tree.shape[rows_dim(tree, dim)]
    leaves, spec = flatten(tree)
    names = [quoted(keys) for keys in leaf_keys(spec)]
    rows: list[int] = []
    for name, leaf in zip(names, leaves, strict=True):
        try:
            rows.append(leaf.shape[rows_dim(leaf, dim)])
        except DataError as error:
            raise DataError(f"input{name}: {error}") from None
        if rows[-1] != rows[0]:
            raise DataError(
                f"all leaves of a batch need the same rows, but input{names[0]} has {rows[0]} "
                f"(size {list(leaves[0].shape)}) and input{name} has {rows[-1]} (size {list(leaf.shape)})"
            )
    return rows[0] if rows else None


def may_have_lists_of_rows(tree: Any, rows: int) -> bool:
    """Return whether a list in a tree may have an entry for each row, as a detector's boxes: then `cut` is wrong.

    A list of as many tensors that each hold all rows looks the same. A tuple counts only if it holds mappings.
    """
    return any(
        len(node.children) == rows
        and (node.kind == "list" or (node.kind == "tuple" and all(item.kind == "mapping" for item in node.children)))
        for _, node in all_nodes(flatten(tree)[1])
    )


def count_of(tree: Any, dim: int = 0) -> int | None:
    """Return the number of rows; None if the leaves differ in it, and without leaves."""
    try:
        return num_rows(tree, dim)
    except DataError:
        return None


def has_rows(tree: Any, rows: int, dim: int = 0) -> bool:
    """Return whether the rows of a tree can be told apart: no object holds any, and no list has an entry for each."""
    return count_of(tree, dim) == rows and not holds_objects(tree) and not may_have_lists_of_rows(tree, rows)


def rows_dim(leaf: Leaf, dim: int) -> int:
    """Return the dimension of a leaf that holds its rows: `dim`, or a vector's only one.

    Raises DataError if the leaf has no such dimension.
    """
    if leaf.ndim == 1:
        return 0  # an RNN's inputs are [time, batch, feature], dim=1, but its labels are [batch]
    if not -leaf.ndim <= dim < leaf.ndim:
        raise DataError(f"size {list(leaf.shape)} has no dimension {dim} that could hold rows")
    return dim % leaf.ndim
