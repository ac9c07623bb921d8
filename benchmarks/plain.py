"""A dataset of plain Python: what a job needs for its plan, without torch."""

from typing import Any


class Plain:
    """`length` numbers in a list."""

    def __init__(self, length: int) -> None:
        self.numbers = list(range(length))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.numbers[index]
