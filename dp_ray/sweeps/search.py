"""optuna as the search of a sweep: it draws the values of the next trial from those that have ended."""

import warnings
from collections.abc import Iterable, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from dp_ray.plan.seeds import derive_seed
from dp_ray.sweeps.axes import Axis, Choices, Range
from dp_ray.sweeps.definition import Definition, Picked
from dp_ray.sweeps.record import Trial


def suggested(definition: Definition, seed: int, number: int, before: Sequence[Trial]) -> Picked:
    """What trial `number` picks: a function of the seed, of its number, and of the trials `before` it.

    optuna's study is made anew from these trials, so that a sweep goes on as if it had never stopped.
    """
    space = {axis.key: _distribution(axis) for axis in definition.axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=derive_seed(seed, "sweep", number) % 2**32, constant_liar=True)
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        direction = StudyDirection.MINIMIZE if definition.mode == "min" else StudyDirection.MAXIMIZE
        study = optuna.create_study(direction=direction, sampler=sampler)
        study.add_trials(_as_known(before, definition.metric, space))
        return dict(study.ask(space).params)
    finally:
        optuna.logging.set_verbosity(level)


def _as_known(trials: Iterable[Trial], metric: str | None, space: dict[str, BaseDistribution]) -> list[FrozenTrial]:
    """The trials as optuna's own; one that failed, or that measured no number, says nothing."""
    known = []
    for trial in trials:
        value = trial.value(metric)
        state = (
            TrialState.RUNNING if not trial.has_ended else TrialState.FAIL if value is None else TrialState.COMPLETE
        )
        known.append(create_trial(state=state, value=value, params=dict(trial.picked), distributions=space))
    return known


def _distribution(axis: Axis) -> BaseDistribution:
    match axis:
        case Choices():
            return CategoricalDistribution(list(range(len(axis.values))))
        case Range(is_whole=True):
            return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log, step=int(axis.step or 1))
        case _:
            return FloatDistribution(axis.low, axis.high, log=axis.is_log, step=axis.step)
