"""What an interruption has cost is told by its level, and why it was not the one before."""

import json
from dataclasses import replace

from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, IncidentLog, Interruption, Level


def lost(step: int, rank: int, level: Level = Level.MEMORY) -> Interruption:
    return Interruption(IncidentKind.WORKER, "killed", step, (rank,), ("10.0.0.1",), level=level)


def test_survivors_that_read_a_checkpoint_say_so_and_why() -> None:
    log = IncidentLog().interrupted(lost(7, 1)).resumed(5, 0.4, "strategy: fsdp")
    (told,) = log.interruptions
    assert (told.level, told.why, told.resumed_step) == (Level.CHECKPOINT, "strategy: fsdp", 5)
    assert told.resumption == (
        "the others go on from step 5 after 0.4 s, from the newest checkpoint (strategy: fsdp), 2 steps again"
    )
    assert told.to_json()["level"] == "checkpoint" and told.to_json()["why"] == "strategy: fsdp"
    assert INCIDENTS_JSON.parse(json.dumps({"interruptions": [told.to_json()]})).interruptions == (told,)


def test_from_memory_nothing_is_to_be_explained() -> None:
    (told,) = IncidentLog().interrupted(lost(7, 1)).resumed(7, 0.4).interruptions
    assert (told.level, told.why) == (Level.MEMORY, "") and "why" not in told.to_json()
    assert told.resumption == "the others go on from step 7 after 0.4 s, from memory"


def test_several_losses_in_a_row_end_together_but_a_restart_before_them_does_not() -> None:
    log = IncidentLog().interrupted(lost(3, 0, Level.RESTART)).interrupted(lost(7, 1)).interrupted(lost(7, 2))
    restart, *both = log.resumed(5, 1.0, "loop").interruptions
    assert (restart.resumed_step, restart.level) == (None, Level.RESTART)
    assert [(one.resumed_step, one.level, one.why) for one in both] == [(5, Level.CHECKPOINT, "loop")] * 2


def test_workers_that_were_all_started_again_stay_told_as_such() -> None:
    (told,) = IncidentLog().interrupted(lost(7, 1, Level.RESTART)).resumed(5, 4.0, "loop").interruptions
    assert (told.level, told.why) == (Level.RESTART, "") and "level" not in told.to_json()


def test_survivors_who_were_lost_before_they_went_on_have_cost_a_restart() -> None:
    log = IncidentLog().interrupted(lost(7, 1)).interrupted(lost(7, 0, Level.RESTART))
    first, last = log.resumed(5, 4.0, "no worker that is left has the state").interruptions
    assert first.level == last.level == Level.RESTART
    assert first.resumption == last.resumption == "resumed from step 5 after 4.0 s, 2 steps again"


def test_where_the_lost_one_was_is_told_if_it_is_known() -> None:
    assert str(lost(7, 1)) == "worker: killed (rank 1 on 10.0.0.1), in step 7"
    assert str(replace(lost(7, 1), nodes=())) == "worker: killed (rank 1), in step 7"
