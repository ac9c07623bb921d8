"""A table: scikit-learn's 442 patients with diabetes, and a network that tells how the disease goes on.

`python -m jobs.table` writes it as CSV files, `data/patients-train.csv` and `data/patients-test.csv`.
"""

import csv
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import nn

COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


class Net(nn.Module):
    """Columns, a dict of tensors [rows] around 0, to the disease's progression in a year, 25 to 346: [rows]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(len(COLUMNS), width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        values = torch.stack([columns[name] for name in COLUMNS], 1).float()
        told: torch.Tensor = 152 + 77 * self.layers(values)[:, 0]  # the mean and the spread of all patients
        return told


def error(told: torch.Tensor, progression: torch.Tensor) -> torch.Tensor:
    """How far each row is off: [rows]."""
    return (told - progression).abs()


def write(folder: Path) -> None:
    """Write the patients as two CSV files: every fifth is for tests."""
    folder.mkdir(exist_ok=True)
    values, progressions = load_diabetes(return_X_y=True)
    values = values * len(values) ** 0.5  # of scikit-learn, each column's squares sum to 1
    for split in ("train", "test"):
        with (folder / f"patients-{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow((*COLUMNS, "progression"))
            for number, (row, progression) in enumerate(zip(values, progressions, strict=True)):
                if (number % 5 == 0) == (split == "test"):
                    rows.writerow((*(f"{value:.4f}" for value in row), progression))


if __name__ == "__main__":
    write(Path("data"))
