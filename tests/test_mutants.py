"""`make mutants` can break what it says: its table fits the code."""

import ast

from tools.mutants import MUTANTS, PACKAGES, ROOT, SEED, broken, drawn


def test_each_mutant_of_the_table_replaces_one_place_and_is_python() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "dp_ray" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.what
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
        for test in mutant.shows.split():
            path, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), test
    assert len({mutant.what for mutant in MUTANTS}) == 30


def test_what_is_drawn_is_a_comparison_turned_round_or_a_call_left_out() -> None:
    text = "def f(a):\n    g(a)\n    return 1 - (a <\n 2)\n"
    assert [(where, " ".join(old.split()), new) for where, old, new in broken(text)] == [
        ("f", "a < 2", "(a > 2)"),
        ("f", "g(a)", "pass"),
    ]
    for package in PACKAGES:
        files = sorted((ROOT / "dp_ray" / package).rglob("*.py"))
        mutant = next(drawn(SEED, files))
        changed = (ROOT / "dp_ray" / mutant.file).read_text().replace(mutant.old, mutant.new)
        assert ast.parse(changed)
