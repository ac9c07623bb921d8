"""Audits are dealt to all workers alike, and a verdict follows from what they found."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.plan.audits import Audit, Audits, AuditVerdict, judged, odd_ones
from dp_ray.plan.split import Split

SHARES = st.fractions(Fraction(1, 50), 1, max_denominator=60)


def audits_of(share: Fraction, workers: int, seed: int = 0, shards: int = 8, audits: int = 60) -> list[Audit]:
    steps = int(audits / share) + 1
    dealt = Audits(Split(steps * 24, 24, shards), share, seed, workers)
    return [audit for audit in map(dealt.of_step, range(steps)) if audit is not None]


@given(SHARES, st.integers(1, 6), st.integers(0, 5))
def test_one_of_so_many_steps_is_audited(share: Fraction, workers: int, seed: int) -> None:
    for number, audit in enumerate(audits_of(share, workers, seed)):
        assert number / share <= audit.step < (number + 1) / share + 1
        assert audit.runner == number % workers


@given(SHARES, st.integers(2, 6), st.integers(0, 5))
def test_each_pair_has_its_turn(share: Fraction, workers: int, seed: int) -> None:
    turn = workers * (workers - 1)
    found = Counter(
        (audit.runner, audit.auditor) for audit in audits_of(share, workers, seed, audits=turn + 1)[:turn]
    )
    assert found == dict.fromkeys([(a, b) for a in range(workers) for b in range(workers) if a != b], 1)


@given(SHARES, st.integers(1, 6), st.integers(0, 5), st.integers(6, 13))
def test_the_leaf_is_the_runners(share: Fraction, workers: int, seed: int, shards: int) -> None:
    dealt = Audits(Split(4000, 24, shards), share, seed, workers)
    for step in range(160):
        audit = dealt.of_step(step)
        again = {rank: dealt.shards(step, rank) for rank in range(workers)}
        if audit is None:
            assert not any(again.values())
            continue
        assert [rank for rank, ran in again.items() if ran] == [audit.auditor]
        own = dealt.split.worker(workers, audit.runner, step)
        assert set(again[audit.auditor]) <= set(own)
        assert audit.third is None if workers < 3 else audit.third not in (audit.runner, audit.auditor)


ROWS = {
    "all agree": ({0: "aa", 1: "aa", 2: "a"}, AuditVerdict()),
    "the runner once": ({0: "xa", 1: "aa", 2: "a"}, AuditVerdict(transient=(0,))),
    "the auditor once": ({0: "aa", 1: "xa", 2: "a"}, AuditVerdict(transient=(1,))),
    "the runner steadily": ({0: "xx", 1: "aa", 2: "a"}, AuditVerdict((0,))),
    "the auditor, otherwise each time": ({0: "aa", 1: "xy", 2: "a"}, AuditVerdict((1,))),
    "the runner steadily, and the auditor once": ({0: "xx", 1: "ya", 2: "a"}, AuditVerdict((0,), (1,))),
    "the runner once, and the third": ({0: "xa", 1: "aa", 2: "y"}, AuditVerdict(transient=(0, 2))),
    "all differ": ({0: "xx", 1: "yy", 2: "z"}, AuditVerdict(unclear=(0, 1, 2))),
    "one of two once": ({0: "xa", 1: "aa"}, AuditVerdict(transient=(0,))),
    "one of two, otherwise each time": ({0: "xy", 1: "aa"}, AuditVerdict((0,))),
    "both of two repeat": ({0: "xx", 1: "aa"}, AuditVerdict(unclear=(0, 1))),
    "neither of two repeats": ({0: "xy", 1: "zw"}, AuditVerdict(unclear=(0, 1))),
    "one alone once": ({0: "axa"}, AuditVerdict(transient=(0,))),
    "one alone each time": ({0: "xyz"}, AuditVerdict((0,))),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_verdict(name: str) -> None:
    ran, expected = ROWS[name]
    assert judged(ran) == expected


@given(st.integers(3, 6), st.data())
def test_a_single_faulty_worker_is_the_one_that_is_named(workers: int, data: st.DataObject) -> None:
    faulty = data.draw(st.integers(0, 2))
    values = st.sampled_from("axyz")
    ran = {rank: "aa" if rank < 2 else "a" for rank in range(3)}
    ran[faulty] = "".join(data.draw(st.lists(values, min_size=len(ran[faulty]), max_size=len(ran[faulty]))))
    verdict = judged(ran)
    assert verdict.unclear == () and set(verdict.convicted + verdict.transient) <= {faulty}
    assert bool(verdict) == (set(ran[faulty]) != {"a"})


def test_states_that_differ() -> None:
    assert odd_ones("aaba") == AuditVerdict(transient=(2,))
    assert odd_ones("a") == odd_ones("aaa") == AuditVerdict()
    assert odd_ones("aabb") == AuditVerdict(unclear=(0, 1, 2, 3))
