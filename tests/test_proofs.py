"""`tools.proofs` sees what differs, and nothing else."""

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tools.proofs import ROOT, compared, examples, kept_base, proved, texts_in

ROW = {"step": "0", "loss": "1.5"}
CASE: dict[str, Any] = {
    "name": "one",
    "kind": "keys",
    "case": {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": "tests.support.training:Pairs",
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "batch_size": 40,
        "shards": 2,
        "checkpoint": {"every_steps": 1},
    },
    "runs": [[2, 2], [1, None]],
}


def test_the_same_case_comes_to_the_same_and_another_seed_to_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = proved(ROOT, CASE), proved(ROOT, CASE)
    assert len(first["history"]) == 3 and {"0.weight", "3.bias"} <= first["weights"].keys()
    other = proved(ROOT, {**CASE, "case": {**CASE["case"], "seed": 1}})
    texts: dict[str, Any] = {"texts": {}}
    assert compared({"proofs": {"one": first}, **texts}, {"proofs": {"one": second}, **texts}) == ([], [])
    (bits,), _ = compared({"proofs": {"one": first}, **texts}, {"proofs": {"one": other}, **texts})
    assert "history from step 0: gradient_norm" in bits and "weights: 0.weight" in bits


def test_a_row_that_differs_a_case_that_fails_and_a_text_are_told() -> None:
    base: dict[str, Any] = {
        "proofs": {"a": {"history": [ROW]}, "b": {"weights": {"w": "1"}}, "c": {"error": "x"}, "d": {}},
        "texts": {"it has {} rows": "plan/split.py"},
    }
    here: dict[str, Any] = {
        "proofs": {"a": {"history": [{**ROW, "loss": "2.5"}]}, "b": {"error": "no"}, "c": {"error": "y"}},
        "texts": {"it has no rows": "plan/split.py"},
    }
    bits, texts = compared(base, here)
    assert bits == [
        "DIFFERS a: history from step 0: loss 1.5 -> 2.5",
        "DIFFERS b: error None -> no; weights vanished",
        "DIFFERS d: it ran in the base alone",
    ]
    assert texts == [
        "error c: x -> y",
        "text vanished, plan/split.py: 'it has {} rows'",
        "text came, plan/split.py: 'it has no rows'",
    ]


def test_texts_are_those_that_a_user_reads() -> None:
    source = '''
"""A docstring of a module."""
def f(rows, say):
    """A docstring of a function."""
    if rows < 0:
        raise ValueError(f"rows: {rows!r} "
                         "is negative" + (f"; at {rows} too" if rows else ""))
    say("stops")
    told = f"a text that is put together of {rows}"
    return {"key": "two words"}, told
'''
    assert set(texts_in(ast.parse(source))) == {
        "rows: {} is negative",
        "; at {} too",
        "stops",
        "a text that is put together of {}",
    }


def test_what_is_drawn_is_always_the_same() -> None:
    drawn = examples(st.integers(), 5)
    assert len(set(drawn)) > 1
    assert drawn == examples(st.integers(), 5)


def test_a_base_that_is_no_commit_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        kept_base("no-such-commit", False)
