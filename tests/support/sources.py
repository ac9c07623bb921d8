"""The syntax trees of source files."""

import ast
from collections.abc import Iterator
from pathlib import Path


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text()))
