"""Who hangs: the one that does not step, not those that wait for it; found once, after the time that is stated."""

import time

import pytest

from dp_ray.engine.clock import DevicePlace, Part
from dp_ray.engine.world import World
from dp_ray.errors import ModelError
from dp_ray.messages import Beat, Collective, WorkerReady
from dp_ray.monitor.watchdog import (
    SILENT_BEATS,
    Hang,
    Watchdog,
    collectives_behind,
    describe_collectives,
    describe_devices,
    devices_behind,
)

READS = '  File "data.py", line 3, in __getitem__\n    time.sleep(1e9)\n'
WAITS = '  File "train.py", line 9, in _backward\n  File "torch/autograd/graph.py", line 8, in _engine_run\n'
LIMIT = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def watchdog(limit: float | None = LIMIT, num_workers: int = 3) -> Watchdog:
    workers = [
        WorkerReady("a", World(rank, num_workers, node=f"10.0.0.{rank}"), 100 + rank, ())
        for rank in range(num_workers)
    ]
    return Watchdog(limit, workers)


def beat(rank: int, step: int | None, seconds: float, stack: str) -> Beat:
    """A worker's beat: where it stands is told once it is late."""
    is_late = seconds > LIMIT
    return Beat("a", rank, step, seconds, stack * is_late, "the others' gradients" * (is_late and stack == WAITS))


def beats(dog: Watchdog, seconds: float, stacks: list[str], steps: list[int | None] | None = None) -> None:
    for rank, stack in enumerate(stacks):
        step = steps[rank] if steps else 7
        dog.take(beat(rank, step, seconds, stack))


def test_loops_that_make_other_calls_end_the_job_at_once() -> None:
    """The workers' GPUs wait for each other, so that none of them may find it."""
    dog = watchdog(None)
    for rank, call in enumerate([(3, "step 1, pass 0: step.backward(a, critic)"), (2, "b"), (0, "")]):
        dog.take(Beat("a", rank, 1, 0.0, "", call=call))
    dog.check_calls()  # rank 1 is a call behind
    dog.take(Beat("a", 1, 1, 0.5, "", call=(3, "step 1, pass 0: step.backward(b, generator)")))
    says = r"rank 0: step 1, pass 0: step.backward\(a, critic\); rank 1: step 1, pass 0: step.backward\(b, generator"
    with pytest.raises(ModelError, match=f"the workers make other calls: {says}"):
        dog.check_calls()


def hang_without_rank_1(dog: Watchdog, clock: list[float]) -> Hang:
    """The hang that is found when the workers but rank 1 go on answering: it is rank 1's."""
    for seconds in range(10, 120, 10):
        clock[0] = 1000.0 + seconds
        for rank in (0, 2):
            dog.take(beat(rank, 7, float(seconds), WAITS))
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)
    return hang


def test_the_one_that_does_not_wait_is_blamed_once_with_its_stack(clock: list[float]) -> None:
    dog = watchdog()
    for seconds in (50.0, 99.0, 101.0):
        clock[0] = 1000.0 + seconds
        beats(dog, seconds, [WAITS, READS, WAITS])
        assert dog.hang() is None, "those that are late by a beat are waited for"
    clock[0] = 1103.0
    beats(dog, 103.0, [WAITS, READS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert (hang.ranks, hang.step) == ((1,), 7)
    assert str(hang) == f"rank 1 on 10.0.0.1 has been in step 7 for 103 s; its stack is\n{READS.rstrip()}"
    assert dog.hang() is None, "it is told once"


def test_a_worker_that_does_not_answer_is_blamed_first(clock: list[float]) -> None:
    dog = watchdog()
    beats(dog, 0.0, [WAITS, READS, WAITS])
    hang = hang_without_rank_1(dog, clock)
    assert "it does not answer" in str(hang)
    assert SILENT_BEATS * 0.5 < 110


def test_the_one_behind_is_blamed_where_workers_need_not_meet(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1110.0
    beats(dog, 110.0, [READS, READS, WAITS], [9, 4, 4])
    hang = dog.hang()
    assert hang is not None
    assert (hang.ranks, hang.step) == ((1,), 4)


def test_where_all_wait_all_are_named(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1110.0
    beats(dog, 110.0, [WAITS, WAITS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (0, 1, 2)
    assert "have been in step 7" in str(hang)


def test_who_has_not_begun_or_is_through_hangs_never_and_no_limit_is_for_ever(clock: list[float]) -> None:
    idle, limitless = watchdog(), watchdog(None)
    clock[0] = 1e6
    beats(idle, 1e5, ["", "", ""], [None, None, None])
    beats(limitless, 1e5, [READS, READS, READS])
    assert idle.hang() is None
    assert limitless.hang() is None


def test_those_who_wait_for_slow_ones_do_not_hang(clock: list[float]) -> None:
    dog = watchdog()
    clock[0] = 1200.0
    for rank, (seconds, stack) in enumerate([(150.0, WAITS), (5.0, ""), (150.0, WAITS)]):
        dog.take(beat(rank, 7, seconds, stack))
    assert dog.hang() is None
    clock[0] = 1320.0
    beats(dog, 120.0, [WAITS, READS, WAITS])
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)


def test_a_beat_of_workers_that_are_over_is_passed_over() -> None:
    dog = watchdog(None, 0)
    dog.take(Beat("a", 3, 7, 1.0, ""))
    assert dog.hang() is None


def test_a_worker_that_is_stopped_right_after_its_start_is_found(clock: list[float]) -> None:
    dog = watchdog()
    for rank in range(3):
        dog.start(rank, 7)
    hang_without_rank_1(dog, clock)


FORWARD, EXCHANGE, UPDATE = Part.FORWARD, Part.EXCHANGE, Part.UPDATE
ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ([], ()),
        ([(6, FORWARD)], ()),  # alone
        ([(6, EXCHANGE), (6, FORWARD), (6, EXCHANGE)], (1,)),
        ([(6, EXCHANGE), (6, FORWARD), (6, UPDATE)], (1, 2)),  # both hold up rank 0
        ([(6, EXCHANGE), (6, EXCHANGE), (6, EXCHANGE)], ()),  # the collective itself
        ([(6, FORWARD), (6, FORWARD)], ()),  # such as of sharded weights, gathered in the forward
        ([(7, EXCHANGE), (6, UPDATE), (7, EXCHANGE)], (1,)),  # after its exchange: its peers are a step further
        ([(7, FORWARD), (6, EXCHANGE), (7, EXCHANGE)], (1,)),  # the others have left that exchange
        ([(7, EXCHANGE), (None, FORWARD)], (1,)),  # its first step
        ([(None, EXCHANGE), (None, FORWARD), (None, FORWARD)], (1, 2)),
        ([(6, EXCHANGE), (9, FORWARD, ASSERT)], (1,)),
        ([(6, FORWARD, ASSERT), (6, FORWARD, ASSERT)], ()),
    ],
)
def test_the_gpus_that_are_behind(places: list[tuple[int | None, Part, str]], behind: tuple[int, ...]) -> None:
    assert devices_behind({rank: DevicePlace(*place) for rank, place in enumerate(places)}) == behind


def test_what_is_said_of_gpus() -> None:
    def said(*places: DevicePlace) -> str:
        return describe_devices(dict(enumerate(places)))

    waits = DevicePlace(6, EXCHANGE)
    assert said() == ""
    assert said(waits) == "; rank 0: the GPU has passed step 6 and is in exchange"
    assert said(waits, DevicePlace(None, FORWARD), waits) == (
        "; the GPU of rank 1 is behind: ranks 0, 2: the GPU has passed step 6 and is in exchange, "
        "rank 1: the GPU has passed no step and is in forward"
    )
    assert said(waits, waits) == (
        "; no GPU is behind, the collective itself hangs: ranks 0, 1: the GPU has passed step 6 and is in exchange"
    )
    assert said(DevicePlace(6, FORWARD), DevicePlace(6, FORWARD)).startswith("; no GPU is behind: ranks 0, 1: ")
    assert said(waits, DevicePlace(9, FORWARD, ASSERT)).endswith(f"rank 1: the GPU raises {ASSERT}")


def sums(number: int, state: str, group: str = "nccl dp_ray-1 all") -> Collective:
    return Collective(group, number, "all_reduce", "[1024]", state)


@pytest.mark.parametrize(
    ("stands", "behind"),
    [
        ([], ()),
        ([(41, "started"), (41, "started")], ()),
        ([(41, "started"), (41, "scheduled"), (41, "started")], (1,)),  # its GPU has not come to it
        ([(41, "scheduled"), (40, "over"), (41, "scheduled")], (1,)),  # its Python has not, as gloo tells it
        ([(41, "over"), (41, "started"), (40, "over")], (1, 2)),
    ],
)
def test_the_ranks_that_are_behind_in_their_collectives(
    stands: list[tuple[int, str]], behind: tuple[int, ...]
) -> None:
    assert collectives_behind({rank: sums(*stand) for rank, stand in enumerate(stands)}) == behind


def test_what_is_said_of_collectives() -> None:
    waits, over = sums(41, "started"), sums(40, "over")
    assert describe_collectives({0: (), 1: ()}) == ""
    assert describe_collectives({0: (over,), 1: (over,)}) == "", "all groups are idle"
    assert describe_collectives({0: (waits,), 1: (over,), 2: (waits,)}) == (
        "; in the collectives of nccl dp_ray-1 all rank 1 is behind: ranks 0, 2: all_reduce 41 of [1024], started, "
        "rank 1: all_reduce 40 of [1024], over (more in flight_recorder/)"
    )
    idle, own = sums(3, "over", "gloo 1"), sums(7, "scheduled", "gloo 2")
    assert describe_collectives({0: (waits, idle, own), 1: (waits, idle, own)}) == (
        "; in the collectives of nccl dp_ray-1 all no rank is behind: ranks 0, 1: all_reduce 41 of [1024], started"
        "; in the collectives of gloo 2 no rank is behind: ranks 0, 1: all_reduce 7 of [1024], scheduled"
        " (more in flight_recorder/)"
    )
    assert describe_collectives({0: (waits,), 1: ()}) == (
        "; in the collectives of nccl dp_ray-1 all: rank 0: all_reduce 41 of [1024], started"
        " (more in flight_recorder/)"
    ), "nothing is known of rank 1"


def late(rank: int, place: DevicePlace | None, stack: str = WAITS, *stands: Collective, step: int = 23) -> Beat:
    waits_for = "the GPU, which may be in a collective" if stack == WAITS else ""
    return Beat("a", rank, step, 110.0, stack, waits_for, place, stands)


def hang_of(clock: list[float], *told: Beat) -> tuple[tuple[int, ...], str]:
    """Who hangs by the beats, and the first line that is said."""
    dog = watchdog(num_workers=len(told))
    clock[0] = 1110.0
    for beat in told:
        dog.take(beat)
    hang = dog.hang()
    assert hang is not None
    return hang.ranks, str(hang).splitlines()[0]


def test_of_workers_whose_loops_all_wait_the_one_with_the_stuck_gpu_is_blamed(clock: list[float]) -> None:
    waits, stuck = DevicePlace(6, EXCHANGE), DevicePlace(6, FORWARD)
    stands = sums(41, "started"), sums(41, "scheduled"), sums(41, "started")
    told = [late(rank, place, WAITS, stands[rank]) for rank, place in enumerate([waits, stuck, waits])]
    ranks, said = hang_of(clock, *told)
    assert ranks == (1,)
    assert said.startswith(
        "rank 1 on 10.0.0.1 has been in step 23 for 110 s; the GPU of rank 1 is behind: ranks 0, 2"
    )
    assert "; in the collectives of nccl dp_ray-1 all rank 1 is behind: " in said
    assert said.endswith("(more in flight_recorder/); its stack is")


def test_a_loop_that_reads_from_its_gpu_does_not_look_like_the_cause(clock: list[float]) -> None:
    """User code of rank 0 reads a loss, and marks no wait."""
    ranks, _ = hang_of(clock, late(0, DevicePlace(6, EXCHANGE), READS), late(1, DevicePlace(6, FORWARD)))
    assert ranks == (1,)


def test_a_loop_that_hangs_itself_leaves_its_gpu_where_it_is(clock: list[float]) -> None:
    """Its GPU has nothing to do: it has passed all that it was given."""
    told = late(0, DevicePlace(6, EXCHANGE)), late(1, DevicePlace(6, Part.DATA_WAIT), READS, step=7)
    assert hang_of(clock, *told)[0] == (1,)


def test_where_no_gpu_is_behind_all_are_named(clock: list[float]) -> None:
    waits = DevicePlace(6, EXCHANGE)
    ranks, said = hang_of(clock, *(late(rank, waits) for rank in range(3)))
    assert ranks == (0, 1, 2)
    assert "; no GPU is behind, the collective itself hangs: ranks 0, 1, 2: " in said


def test_what_a_silent_workers_gpu_told_before_counts_no_more(clock: list[float]) -> None:
    dog = watchdog(num_workers=2)
    clock[0] = 1110.0
    for rank in range(2):
        dog.take(late(rank, DevicePlace(6, EXCHANGE)))
    clock[0] = 1130.0
    dog.take(Beat("a", 0, 23, 130.0, WAITS, "the others' gradients", DevicePlace(6, EXCHANGE)))
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.found == "; rank 0: the GPU has passed step 6 and is in exchange"
