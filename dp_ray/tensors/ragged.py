"""Turn lists with an entry for each row, like the boxes found in each image, into leaves, and into lists again.

A list of texts becomes a leaf too, even without `outputs.ragged`.

>>> outputs = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(0, 4)}]
>>> leaves = without_lists(outputs, rows=2)
>>> leaves["boxes"].shapes
((2, 4), (0, 4))
>>> restored = with_lists(flatten(leaves)[1], [leaves["boxes"].rows()], [leaves["boxes"].depth])
>>> [one["boxes"].shape for one in restored]
[torch.Size([2, 4]), torch.Size([0, 4])]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dp_ray.errors import ModelError
from dp_ray.tensors.tree import (
    Keys,
    Ragged,
    TreeSpec,
    bare_tensors,
    first_difference,
    flatten,
    is_plain,
    is_texts,
    leaf_keys,
    quoted,
    unflatten,
    why_no_rows,
)


def without_lists(tree: Any, rows: int | None) -> Any:
    """Replace each outermost list by a tree like its entries, whose leaves are Ragged and hold all rows.

    `with_lists` is the inverse. With `rows` None, a list may have any number of entries. Raises ModelError, which
    names the path and the entry, unless each list has an entry for each row. All entries must be nested alike, with
    tensors or arrays of one dtype in each place, or with texts, numbers or truth values.
    """
    parts, spec = flatten(tree, is_whole=lambda node: isinstance(node, list))
    pairs = zip(leaf_keys(spec), parts, strict=True)
    return unflatten(spec, [_joined(keys, part, rows) if isinstance(part, list) else part for keys, part in pairs])


def without_texts(tree: Any, is_column: Callable[[str, int], bool] = lambda path, length: True) -> Any:
    """Put a Ragged leaf in place of each list of texts that is a column, by its path and length."""
    if bare_tensors(tree) is not None:
        return tree
    parts, spec = flatten(tree, is_whole=is_texts)
    if not any(map(is_texts, parts)):
        return tree
    pairs = zip(leaf_keys(spec), parts, strict=True)
    return unflatten(
        spec,
        [
            Ragged.of_values(list(map(str, value)), len(keys))
            if is_texts(value) and is_column(".".join(map(str, keys)), len(value))
            else value
            for keys, value in pairs
        ],
    )


def paths_of_texts(tree: Any) -> list[str]:
    """Return the paths of the lists of texts."""
    parts, spec = flatten(tree, is_whole=is_texts)
    return [path for path, part in zip(spec.paths, parts, strict=True) if is_texts(part)]


def _joined(keys: Keys, entries: list[Any], rows: int | None) -> Any:
    where = f"output{quoted(keys)}"
    if rows is not None and len(entries) != rows:
        says = "with outputs.ragged a list has an entry for each row; a tuple is taken as it is"
        raise ModelError(f"{where} is a list of {len(entries)} for a shard of {rows} rows: {says}")
    flat = [flatten(entry, is_whole=_is_value) for entry in entries]
    spec = flat[0][1]
    if not leaf_keys(spec):
        raise ModelError(
            f"{where} is a list without tensors, texts and numbers, but {entries!r:.60}: with outputs.ragged each "
            "entry has some"
        )
    for row, (_, other) in enumerate(flat):
        if (problem := first_difference(spec, other, "entry 0")) is not None:
            raise ModelError(
                f"{where}: entry {row}: {problem}: all entries must be nested alike; of lists of several lengths "
                "make one text each, say by json.dumps"
            )
    # As in `gather`, the mappings of two entries may have their keys in another order.
    by_keys = [dict(zip(leaf_keys(other), leaves, strict=True)) for leaves, other in flat]
    return unflatten(
        spec,
        [_one_leaf((*keys, *inner), [leaves[inner] for leaves in by_keys], len(keys)) for inner in leaf_keys(spec)],
    )


def _is_value(node: Any) -> bool:
    """Return whether a node is a text, a number or a truth value, of Python or of numpy."""
    return node is not None and is_plain(node.item() if isinstance(node, np.generic) else node)


def _one_leaf(keys: Keys, pieces: Sequence[Any], depth: int) -> Ragged:
    pieces = [item.item() if isinstance(item, np.generic) else item for item in pieces]
    for row, piece in enumerate(pieces):
        if _type_of(piece) != _type_of(pieces[0]):
            advice = "give all rows the same type and dtype, also those without any numbers"
            says = f"{_type_of(piece)} in entry {row}, {_type_of(pieces[0])} in 0"
            raise ModelError(f"output{quoted(keys)} is {says}: {advice}")
        if (why := why_no_rows(piece)) is not None:
            raise ModelError(f"output{quoted(keys)} is {why}")
    if _is_value(pieces[0]):
        return Ragged.of_values(list(pieces), depth)
    flat = [piece.reshape(-1) for piece in pieces]
    data = np.concatenate(flat) if isinstance(pieces[0], np.ndarray) else torch.cat(flat)
    return Ragged(data, tuple(tuple(piece.shape) for piece in pieces), depth)


def _type_of(piece: Any) -> str:
    if _is_value(piece):
        return next(kind.__name__ for kind in (str, bool, int, float) if isinstance(piece, kind))
    return f"an array of {piece.dtype}" if isinstance(piece, np.ndarray) else str(piece.dtype)


def with_lists(spec: TreeSpec, leaves: Sequence[Any], depths: Sequence[int | None]) -> Any:
    """Rebuild a tree with its lists: the inverse of `without_lists`.

    A leaf in a list is the sequence of its rows, and its depth says how many of its keys lead to the list; the depth
    of any other leaf is None.
    """
    lists = {keys[:depth] for keys, depth in zip(leaf_keys(spec), depths, strict=True) if depth is not None}
    rebuilt: list[Any] = []
    return unflatten(_with_leaves(spec, (), lists, iter(leaves), rebuilt), rebuilt)


def _with_leaves(
    spec: TreeSpec, above: Keys, lists: set[Keys], leaves: Iterator[Any], rebuilt: list[Any]
) -> TreeSpec:
    """Add the lists and the other leaves to `rebuilt`; return the spec in which each list is a leaf."""
    if above in lists:
        inner = [next(leaves) for _ in leaf_keys(spec)]
        rebuilt.append([unflatten(spec, list(row)) for row in zip(*inner, strict=True)])
        return TreeSpec("leaf")
    if spec.kind == "leaf":
        rebuilt.append(next(leaves))
    below = zip(spec.keys, spec.children, strict=True)
    return replace(
        spec, children=tuple(_with_leaves(child, (*above, key), lists, leaves, rebuilt) for key, child in below)
    )
