"""`make mutants` can break what it says: its table fits the code."""

import ast

from tools.mutants import DRAWN, MUTANTS, ROOT, broken, every


def test_each_mutant_replaces_one_place_is_python_and_names_the_test_that_showed_it() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "dp_ray" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.what
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(text.replace(mutant.old, mutant.new))), mutant.what
        path, _, name = mutant.shows.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), mutant.what
    assert len({mutant.what for mutant in every()}) == 30 + DRAWN


def test_what_is_drawn_is_a_comparison_turned_round_or_a_call_left_out() -> None:
    text = "def f(a):\n    g(a)\n    return 1 - (a <\n 2)\n"
    assert {(where, " ".join(old.split()), new) for where, old, new in broken(text)} == {
        ("f", "a < 2", "(a > 2)"),
        ("f", "g(a)", "pass"),
    }
