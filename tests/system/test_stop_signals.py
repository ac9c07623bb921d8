"""Ctrl-C and SIGTERM: the first is a planned stop that keeps the step, the second leaves at once."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import dp_ray
import tests.support.training
from dp_ray.errors import RunInterrupted
from dp_ray.system.threads import planned_stops, signals_put_off
from tests.support import forked
from tests.support.signalled import predicting, training

pytestmark = pytest.mark.usefixtures("in_project", "foreground")


@pytest.mark.full(but=["SIGTERM-75"])
@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR2", 75)])
def test_the_first_keeps_the_step_and_the_same_call_goes_on(tmp_path: Path, name: str, status: int) -> None:
    keys = training(tmp_path, 15 * 6 + 2, name)
    with pytest.raises(RunInterrupted) as stopped:
        dp_ray.run(**keys)
    assert str(stopped.value) == "interrupted after 16 of 48 steps; run the same command to resume"
    assert (stopped.value.by, stopped.value.exit_status) == ((name,), status)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-16.safetensors"]
    assert dp_ray.load(tmp_path / "run").status == "interrupted"
    result = dp_ray.run(**keys)
    undisturbed = dp_ray.run(**{**keys, "name": "undisturbed"})
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert [row["loss"] for row in result.history] == [row["loss"] for row in undisturbed.history]


def test_the_second_leaves_at_once(tmp_path: Path) -> None:
    keys = training(tmp_path, 15 * 6 + 2, "SIGINT", "SIGINT", checkpoint={"every_steps": 4, "every_seconds": None})
    with pytest.raises(RunInterrupted, match=r"^interrupted after 12 of 48 steps; run the same command to resume$"):
        dp_ray.run(**keys)
    assert dp_ray.load(tmp_path / "run").status == "interrupted"


def test_a_step_that_is_the_last_ends_the_run_as_ever(tmp_path: Path) -> None:
    result = dp_ray.run(**training(tmp_path, 47 * 6 + 2, "SIGINT"))
    assert (result.status, len(result.history)) == ("done", 48)


def test_a_prediction_commits_what_it_has(tmp_path: Path) -> None:
    keys = predicting(tmp_path, 5 * 6 + 2, "SIGTERM")
    with pytest.raises(RunInterrupted, match=r"^interrupted after 6 of 16 steps; run the same command to resume$"):
        dp_ray.run(**keys)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    assert part.name.startswith("steps-0-6-shards-0-2-")
    assert dp_ray.run(**keys).outputs_sha256 == dp_ray.run(**{**keys, "name": "undisturbed"}).outputs_sha256


def test_an_evaluation_has_nothing_to_keep_and_leaves_at_once(tmp_path: Path) -> None:
    keys = training(tmp_path, 5 * 6 + 2, "SIGINT", task="evaluate")
    with pytest.raises(RunInterrupted, match=r"^interrupted; an evaluation keeps nothing: it begins anew$"):
        dp_ray.run(**keys)


def test_what_would_destroy_what_is_kept_is_not_how_to_resume(tmp_path: Path) -> None:
    keys = training(tmp_path, 2, "SIGINT")
    with pytest.raises(RunInterrupted, match=r"after 1 of 48 steps; run it again without --overwrite to resume$"):
        dp_ray.run(**keys, overwrite=True)
    keys = training(tmp_path, 2, "SIGINT", name="objects", model=tests.support.training.mlp())
    with pytest.raises(RunInterrupted, match=r"of 48 steps; run it again with resume=True to resume$"):
        dp_ray.run(**keys)
    keys = training(tmp_path, 2, "SIGINT", name=None)
    with pytest.raises(
        RunInterrupted, match=r"of 48 steps; run it again with name='run-\d{8}-\d{6}-\d{6}' to resume$"
    ):
        dp_ray.run(**keys)


def test_off_the_main_thread_a_run_is_as_ever(tmp_path: Path) -> None:
    results: list[dp_ray.Result] = []
    thread = threading.Thread(target=lambda: results.append(dp_ray.run(**training(tmp_path))))
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["done"]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    ask = Mock(return_value=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with planned_stops(ask):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ask.assert_not_called()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_put_off_is_handled_once_at_the_end_and_a_second_one_at_once(number: signal.Signals) -> None:
    ask = Mock(return_value=True)
    with planned_stops(ask):
        before = signal.getsignal(number)
        with signals_put_off():
            signal.raise_signal(number)
            ask.assert_not_called()
        ask.assert_called_once_with(number.name)
        assert signal.getsignal(number) is before
        with pytest.raises(KeyboardInterrupt):
            interrupted_twice(number)
        assert signal.getsignal(number) is before


def interrupted_twice(number: signal.Signals) -> None:
    with signals_put_off():
        signal.raise_signal(number)
        signal.raise_signal(number)


def test_a_forked_process_ends_by_sigterm_and_leaves_ctrl_c_to_its_parent() -> None:
    """A terminal's Ctrl-C reaches the processes of a loader too, which the step that is being ended still needs."""
    ask = Mock(return_value=True)
    with planned_stops(ask):
        pid = os.fork()
        if not pid:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    ask.assert_not_called()


class Interrupts(nn.Module):
    """An MLP whose 20th forward does what Ctrl-C in a terminal does: all processes of the group get a signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = tests.support.training.mlp()
        self.forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 20:
            # By another process: torch's loaders end without a word by what their own parent sends.
            group = f"-{os.getpgid(0)}"
            subprocess.run(["kill", f"-{self.number}", "--", group], check=True, start_new_session=True)
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


@pytest.mark.full(but=["fork-2-15"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "processes", "number"),
    [
        ("fork", 2, signal.SIGINT),
        ("spawn", 1, signal.SIGINT),
        ("fork", 2, signal.SIGTERM),
        ("fork", 1, signal.SIGUSR2),
    ],
)
def test_a_signal_to_the_group_stops_the_run_and_not_the_processes_of_its_loader(
    tmp_path: Path, context: str, processes: int, number: int
) -> None:
    """As a terminal's Ctrl-C, and the SIGTERM of `timeout`."""
    keys = training(
        tmp_path, model={"target": "tests.system.test_stop_signals:Interrupts", "args": {"number": int(number)}}
    )
    keys["dataset"] = {"target": "tests.support.training:Started", "args": {"loader_context": context, "length": 96}}
    keys["loader"] = {"processes": processes}
    del keys["quiet"]
    (tmp_path / "job.yaml").write_text(json.dumps(keys))  # JSON is YAML
    program = forked.ended(forked.dp_ray_program, "run", str(tmp_path / "job.yaml"), own_session=True)
    errors = program.stderr
    assert program.returncode == (130 if number == signal.SIGINT else 75), errors
    assert "stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once" in errors
    assert errors.splitlines()[-1] == "interrupted after 20 of 48 steps; run the same command to resume"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-20.safetensors"]
