"""The suite of benchmarks/counts: its judge, its oracles, its smallest inputs, and dp_ray's column below Ray."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.counts import programs, table
from benchmarks.counts.ours import keys_of
from benchmarks.counts.programs import PROGRAMS, Program, oracle
from benchmarks.counts.side import NO_WAY, Told
from benchmarks.counts.smallest import SMALLEST
from dp_ray.job.job import Job
from tests.support.cluster import ROOT
from tests.support.group import run_group, weights_of

FOLDER = ROOT / "benchmarks" / "counts"
NAMED = {program.name: program for program in PROGRAMS}
SMALL = {program.name: program for program in SMALLEST}
PAGE = "https://example.org"
BY_DESIGN = Told("by design", "it says so", PAGE)


@pytest.mark.parametrize(
    ("found", "told", "expected"),
    [
        ([0.0, 0.0, 0.0], None, "same bits"),
        ([0.0, 0.0, 1e-7], None, "rounding (1e-07)"),
        ([0.0, 0.0, 1e-7], BY_DESIGN, f"[rounding (1e-07)]({PAGE})"),
        ([0.0, 0.0, 0.1], None, f"[differs (1e-01)]({table.README}#clipping)"),
        ([0.0, 0.1, 0.0], BY_DESIGN, f"[by design (1e-01)]({table.README}#clipping)"),
        ([0.0, 0.1, 0.0], Told("rounding", "", PAGE), f"[differs (1e-01)]({table.README}#clipping)"),
        ([0.25, 0.25, 0.25], None, "same bits, 2e-01 from plain torch"),
        ([0.0, None, 0.0], None, "failed"),
        ([0.0, 0.0, [0.0]], None, f"[differs (other rows)]({table.README}#clipping)"),
        ([None, None, None], Told(NO_WAY, "", PAGE), f"[no way]({PAGE})"),
    ],
)
def test_a_cell_says_what_was_found(found: list[Any], told: Told | None, expected: str) -> None:
    """By what 2, 1 and 3 processes end with: plain torch's weights, a part of the largest added to the first."""
    plain = oracle(NAMED["clipping"])["weights"]

    def ended(by: Any) -> dict[str, Tensor]:
        if isinstance(by, list):
            return {"weights": plain[1:]}
        other = plain.clone()
        other[0] += by * plain.abs().max()
        return {"weights": other}

    results = {count: ended(by) for count, by in zip(table.COUNTS, found, strict=True) if by is not None}
    cell = table.judged(NAMED["clipping"], results, told, [])
    assert table.shown("clipping", cell) == expected


def test_what_did_not_end_hangs() -> None:
    cell = table.judged(NAMED["clipping"], {}, None, [1, 2, 3])
    assert table.shown("clipping", cell) == "hangs"


def test_each_program_is_judged_by_an_oracle_that_does_not_draw() -> None:
    assert {program.name for program in PROGRAMS if program.draws} == {"dropout", "augmentation"}
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) == 12


def adam_and_sgd(program: Program) -> Tensor:
    """A training in float64, with optimizers written out."""
    model, rows = program.model().double(), program.rows()
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    step = 0
    for _ in range(2):
        for begin in range(0, len(rows), 12):  # type: ignore[arg-type]
            step += 1
            items = [rows[i] for i in range(begin, min(begin + 12, len(rows)))]  # type: ignore[arg-type]
            inputs, target = (torch.stack(column) for column in zip(*items, strict=True))
            outputs = model(inputs.double() if inputs.is_floating_point() else inputs)
            gradients = torch.autograd.grad(
                LOSSES.get(program.name, entropy)(outputs, target), list(model.parameters())
            )
            norm = torch.sqrt(sum((of**2).sum() for of in gradients))  # type: ignore[arg-type]
            scale = min(1.0, program.clip / (float(norm) + 1e-6)) if program.clip else 1.0
            with torch.no_grad():
                for (name, value), of in zip(model.named_parameters(), gradients, strict=True):
                    first, second = moments.get(name, (torch.zeros_like(of), torch.zeros_like(of)))
                    if program.name == "optimizers" and name.startswith("0."):
                        first = 0.9 * first + of * scale
                        value.sub_(0.1 * first)
                    else:
                        first, second = 0.9 * first + 0.1 * of * scale, 0.999 * second + 0.001 * (of * scale) ** 2
                        value.sub_(0.01 * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8))
                    moments[name] = first, second
    return programs.flat(model)


def entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of what has a label, label by label."""
    found = [
        torch.logsumexp(scores, 0) - scores[label]
        for scores, label in zip(outputs.movedim(1, -1).reshape(-1, 4), target.reshape(-1), strict=True)
        if label != -100
    ]
    return torch.stack(found).mean()


def pair_by_pair(outputs: Tensor, target: Tensor) -> Tensor:
    """The contrastive loss, pair by pair."""
    rows = [row / row.norm() for row in outputs]
    total, pairs = torch.zeros((), dtype=outputs.dtype), 0
    for i, row in enumerate(rows):
        likeness = torch.stack([row @ other / 0.5 for j, other in enumerate(rows) if j != i])
        for j in range(len(rows)):
            if j != i and target[i] == target[j]:
                total, pairs = total + torch.logsumexp(likeness, 0) - row @ rows[j] / 0.5, pairs + 1
    return total / max(pairs, 1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"contrastive": pair_by_pair}


@pytest.mark.parametrize("name", ["BatchNorm", "clipping", "uneven", "tokens", "contrastive", "optimizers"])
def test_an_oracle_ends_as_a_loop_with_written_out_sums(name: str) -> None:
    torch.testing.assert_close(oracle(NAMED[name])["weights"], adam_and_sgd(NAMED[name]), rtol=1e-3, atol=1e-4)


def test_the_oracle_of_the_metric_and_of_the_outputs() -> None:
    model, rows = programs.Mlp(), programs.Uneven()
    first, second = ({k: v.detach().numpy() for k, v in model[at].named_parameters()} for at in (0, 2))
    hidden = np.maximum(rows.inputs.numpy() @ first["weight"].T + first["bias"], 0)
    outputs = hidden @ second["weight"].T + second["bias"]
    np.testing.assert_allclose(oracle(NAMED["predictions"])["outputs"], outputs, rtol=1e-4, atol=1e-5)
    said, is_ = outputs.argmax(1), rows.target.numpy()
    by_class = [2 * np.sum((said == c) & (is_ == c)) / (np.sum(said == c) + np.sum(is_ == c)) for c in range(4)]
    assert float(oracle(NAMED["metric"])["metric"]) == pytest.approx(np.mean(by_class))


# What 1 process ends with, and 2 of which each has the rows of a part and the gradient is the mean of theirs.
BY_HAND: dict[str, tuple[float, float]] = {
    "BatchNorm": (0.1 * (0 + 2 + 2 + 4) / 4, 0.1 * (0 + 2) / 2),
    "uneven": ((1 + 2) / 2 + 6, (1 + 2) / 2 + (6 + 1) / 2),
    "momentum": (2.0, 8.0),
    "tokens": ((8 + 0 + 0 + 4) / 4, (8 / 1 + (0 + 0 + 4) / 3) / 2),
    "contrastive": (1 + 2 * (1 * 3), 1 + 0),
    "metric": ((2 * 1 / (3 + 1) + 0) / 2, (2 * 2 / (4 + 2) + 0) / 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_smallest_inputs_are_summed_by_hand_in_the_readme(name: str) -> None:
    one, two = BY_HAND[name]
    assert float(next(iter(oracle(SMALL[name]).values()))) == pytest.approx(one)
    (row,) = re.findall(rf"^\| \[{name}\].*$", (FOLDER / "README.md").read_text(), re.M)
    assert [float(cell) for cell in row.split("|")[3:5]] == pytest.approx([one, two], abs=1e-3), row


def test_a_process_that_has_joined_takes_no_step() -> None:
    """The momentum of the one without a fifth row falls behind, and so does its weight in the second epoch."""
    weights, momenta = [64.0, 64.0], [0.0, 0.0]
    for _ in range(2):
        for _ in range(2):
            gradient = sum(weights) / 2
            momenta = [0.5 * momentum + gradient for momentum in momenta]
            weights = [weight - momentum for weight, momentum in zip(weights, momenta, strict=True)]
        momenta[0] = 0.5 * momenta[0] + weights[0]  # the fifth row
        weights = [weights[0] - momenta[0]] * 2  # which the last one with rows hands to all
    assert weights == [BY_HAND["momentum"][1]] * 2


def test_two_processes_with_one_seed_drop_the_same_columns() -> None:
    assert set(oracle(SMALL["dropout"])["weights"].tolist()) == {0.0, 0.25, 0.5}
    rows = []
    for _ in range(2):
        torch.manual_seed(0)
        rows.append(nn.functional.dropout(torch.ones(4)))
    assert set((sum(rows) / 8).tolist()) == {0.0, 0.5}  # type: ignore[union-attr]


def test_each_program_that_may_differ_has_its_section() -> None:
    headings = re.findall(r"^#+ (.*)$", (FOLDER / "README.md").read_text(), re.M)
    assert {program.name for program in SMALLEST} <= set(headings)


@pytest.mark.parametrize("library", ["ddp", "accelerated", "ray_train", "hugging_face"])
def test_each_page_of_a_verdict_stands_in_its_section(library: str) -> None:
    told = __import__(f"benchmarks.counts.{library}", fromlist=["TOLD"]).TOLD
    text = (FOLDER / "README.md").read_text()
    for name, (verdict, _, page) in told.items():
        assert name in SMALL or verdict in (NO_WAY, ""), name
        if verdict not in (NO_WAY, "", "rounding"):
            section = text.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
            assert page in section, f"{library}, {name}: {page}"


def test_the_folder_can_be_taken_out() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [of.name for of in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith("benchmarks") or name.startswith("benchmarks.counts"), path.name
                assert not name.startswith("dp_ray") or path.name == "ours.py", path.name


@pytest.mark.parametrize(
    "program", [of for of in PROGRAMS if of.does == "train" and of.left_after is None], ids=lambda of: str(of.name)
)
def test_dp_ray_ends_with_the_same_bits(tmp_path: Path, program: Program) -> None:
    ends = []
    for count in (1, 3):
        folder = tmp_path / str(count)
        run_group(Job.make({**keys_of(program), "workers": count}, "job"), folder)
        ends.append(weights_of(folder))
    alone, three = ends
    assert alone.keys() == three.keys()
    assert all(torch.equal(value, three[name]) for name, value in alone.items())
