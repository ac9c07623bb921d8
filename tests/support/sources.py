"""The syntax trees of source files."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all tests."""
    return ast.parse(path.read_text())


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file's syntax tree."""
    return ast.walk(tree_of(path))
