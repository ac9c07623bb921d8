"""A search: optuna draws the values of the next trial from those that have ended."""

import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from dp_ray.plan.order import derive_seed
from dp_ray.rundir.files import SweepTrial
from dp_ray.sweeps.define import Axis, Choices, Definition, Picked, ValueRange


def suggested(definition: Definition, seed: int, number: int, before: Sequence[SweepTrial]) -> Picked:
    """Return what trial `number` picks: a function of the seed, of its number, and of the trials `before` it.

    optuna's study is made anew from these trials, so that a sweep goes on as if it had never stopped.
    """
    space = {axis.key: _distribution(axis) for axis in definition.axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=derive_seed(seed, "sweep", number) % 2**32, constant_liar=True)
    known = []
    for trial in before:  # a trial that failed, or measured no number, counts as failed
        ended = TrialState.FAIL if trial.metric is None else TrialState.COMPLETE
        state = ended if trial.state in ("done", "failed") else TrialState.RUNNING
        known.append(create_trial(state=state, value=trial.metric, params=trial.picked, distributions=space))
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        direction = StudyDirection.MINIMIZE if definition.mode == "min" else StudyDirection.MAXIMIZE
        study = optuna.create_study(direction=direction, sampler=sampler)
        study.add_trials(known)
        return dict(study.ask(space).params)
    finally:
        optuna.logging.set_verbosity(level)


def _distribution(axis: Axis) -> BaseDistribution:
    match axis:
        case Choices():
            return CategoricalDistribution(axis.picks)
        case ValueRange(low=int(), high=int()):
            return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log, step=int(axis.step or 1))
        case _:
            return FloatDistribution(axis.low, axis.high, log=axis.is_log, step=axis.step)
