"""What is still to be run: done ranges against a plain set of (step, shard)."""

from hypothesis import given
from hypothesis import strategies as st

from dp_ray.plan.split import Done, Range, Shard, Split, Work

spans = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)
ranges = st.tuples(spans, spans).map(lambda pair: Range(*pair[0], *pair[1]))


@given(st.lists(ranges, max_size=8))
def test_done_is_the_union_of_its_ranges(done: list[Range]) -> None:
    held = {
        (step, shard)
        for cut in done
        for step in range(cut.first_step, cut.end_step)
        for shard in range(cut.first_shard, cut.end_shard)
    }
    asked = Done(done)
    assert {(s, v) for s in range(14) for v in range(14) if Shard(s, v, 0, 1) in asked} == held


@given(st.lists(ranges, max_size=8), st.sets(st.integers(0, 12)))
def test_steps_are_done_through_the_first_gap_of_any_shard(done: list[Range], shards: set[int]) -> None:
    asked = Done(done)
    gaps = [step for step in range(14) if any(Shard(step, shard, 0, 1) not in asked for shard in shards)]
    assert asked.through(shards) == (min(gaps) if shards else 0)


@given(st.lists(ranges, max_size=4), st.integers(1, 9), st.integers(0, 60), st.data())
def test_all_workers_together_run_what_is_not_done(
    done: list[Range], shards: int, rows: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, shards))
    split = Split(rows, 5, shards)
    asked = Done(done)
    walked = []
    for rank in range(world_size):
        work = Work(split, world_size, rank, asked)
        assert [step for step, _ in work] == list(range(split.steps))
        walked += [piece for _, pieces in work for piece in pieces]
    every = [split.shard(step, shard) for step in range(split.steps) for shard in range(shards)]
    expected = [piece for piece in every if piece.rows and piece not in asked]
    assert sorted(walked, key=lambda piece: (piece.step, piece.shard)) == expected
