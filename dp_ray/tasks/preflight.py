"""Ask once what a run must know, the same on all workers: the one place that runs user code for it.

Each question is asked of the first shard with rows of a batch, by the worker that has it; all get the answer, a
`Facts`. A training and a prediction ask before their first step (`before_training`, `before_prediction`), a pass of a
loop of the user's at its first occurrence (`of_pass`), an evaluation in its first run (`evaluated`). `Answers` keeps
the facts with the run, so that a run that goes on asks nothing again. What contradicts them later is an error.

`rows.py` tells which outputs have rows, `measures.py` how losses and metrics read them.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from dp_ray.engine.clock import Flops, counting_flops
from dp_ray.engine.evaluation import Evaluated, EvaluatedShard, Evaluation
from dp_ray.engine.forward.model import autocast
from dp_ray.engine.forward.replica import Replica
from dp_ray.engine.forward.step import Metrics, OnShard, StepEnd, StepOutput
from dp_ray.engine.loads.items import split_passthrough
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep
from dp_ray.engine.prediction import Prediction
from dp_ray.engine.sums.whole_batch import LEAVE_OUT, OF_ROWS, output_at
from dp_ray.engine.trainer import Pass, Trainer
from dp_ray.engine.user_code import ShardSize, advised, locating, location
from dp_ray.engine.world import CPU, broadcast, gathered, has_peers, is_rank_0, own_rank, passes
from dp_ray.errors import Error, JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.messages import FlopsCounted, Note
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Shard
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import FACTS
from dp_ray.tasks.setup import Context
from dp_ray.tensors.files import moved_batch
from dp_ray.tensors.ragged import paths_of_texts, without_texts
from dp_ray.tensors.scatter import cut, gather, may_have_lists_of_rows, num_rows
from dp_ray.tensors.tree import (
    Ragged,
    copied,
    flatten,
    in_own_memory,
    map_leaves,
)
from dp_ray.text import counted
from dp_ray.trials.measures import check_numbers, of_neighbours, of_updates, read_whole
from dp_ray.trials.rows import check_lists, check_sizes, few_of, looks_like, other_rows, tried

ROWS = 64  # for the metrics of torchmetrics: of a few rows alone all numbers may be taken for probabilities
FACTS_JSON = Record[dict[str, Any]](dict[str, Any], FACTS, {}, damaged=IGNORE, unreachable=IGNORE)


class Facts(NamedTuple):
    """What a question has found, the same on all workers.

    `rows` says, by the path of an output, whether it has a row for each sample, as far as that is known. `flops` are
    those of a row. `says` are lines for the user. What cannot be asked of these workers others may ask later.
    """

    rows: Mapping[str, bool] = {}
    flops: Flops | None = None
    says: tuple[str, ...] = ()
    is_asked: bool = True


class Answers:
    """The facts of a run, by their questions; every rank makes them, and calls all of this.

    Unless it `keeps` them, as in a replay, nothing is written or said.
    """

    def __init__(self, context: Context, keeps: bool = True) -> None:
        self._context, self._keeps = context, keeps
        self._said: set[str] = set()  # a training and its evaluations may say the same
        known = None if context.held is None else context.held.facts
        if not known and is_rank_0():
            there = FACTS_JSON.read(context.run)
            known = {question: answer for question, answer in there.items() if answer.get("is_asked", True)}
        self._known: dict[str, Any] = json.loads(broadcast(json.dumps(known)))
        if context.held is not None:
            context.held.facts = self._known

    def _key(self, question: str) -> str:
        """Return a question with all that its answer depends on."""
        job, device = self._context.job, self._context.world.device
        on = [job.fingerprint(), job.flops, device.type, job.precision]
        return f"{question} {hashlib.sha256(json.dumps(on).encode()).hexdigest()[:16]}"

    def get(self, question: str) -> Facts | None:
        """Return the answer to a question, None if it was not asked."""
        known = self._known.get(self._key(question))
        if known is None:
            return None
        return Facts(known["rows"], None if known["flops"] is None else Flops(*known["flops"]))

    def add(self, question: str, facts: Facts) -> None:
        """Keep an answer, and tell the user its lines."""
        unasked = {} if facts.is_asked else {"is_asked": False}
        self._known[self._key(question)] = {"rows": dict(facts.rows), "flops": facts.flops, **unasked}
        if not self._keeps:
            return
        for text in dict.fromkeys(facts.says):
            if text not in self._said:
                self._context.say(text)
                self._said.add(text)
        if is_rank_0():
            FACTS_JSON.write(self._context.run, self._known)

    def ask(
        self, question: str, steps: Iterator[LoadedStep], ask: Callable[[LoadedShard], Facts]
    ) -> tuple[Facts, Iterator[LoadedStep]]:
        """Return the answer to a question, and the steps, of which some may be read by now.

        `ask` is called for the first shard with rows, on the worker that has it.
        """
        facts, read = self.get(question), list[LoadedStep]()
        while facts is None and (step := next(steps, None)) is not None:
            loaded = iter(step.loaded)
            first = next((part for part in loaded if part.shard.rows), None)
            read.append(step._replace(loaded=chain([] if first is None else [first], loaded)))
            facts = decided(first, ask)
            if facts is not None:
                self.add(question, facts)
        facts = facts or Facts()
        if facts.flops is not None and self._keeps and is_rank_0():
            self._context.send(FlopsCounted(facts.flops))
        return facts, chain(_popped(read), steps)


def _popped(read: list[LoadedStep]) -> Iterator[LoadedStep]:
    """Yield the steps that are read; none is held while the next one runs."""
    while read:
        yield read.pop(0)


def decided(first: LoadedShard | None, ask: Callable[[LoadedShard], Facts]) -> Facts | None:
    """Return what `ask` finds of the first shard of all workers; None if no worker has any. Every rank calls this.

    `first` is this worker's first shard with rows.
    """
    places = gathered(None if first is None else (first.shard.step, first.shard.shard))
    there = [place for place in places if place is not None]
    if not there:
        return None
    decides = places.index(min(there))
    found: Facts = gathered(ask(first) if first is not None and own_rank() == decides else None)[decides]
    return found


# Trainings.


def before_training(answers: Answers, trainer: Trainer, steps: Iterator[LoadedStep]) -> Iterator[LoadedStep]:
    """Return the same steps, of which the first one comes once it was asked what the training's pass must know."""
    gradient, placement = trainer.gradient, trainer.placement
    job, why_not = placement.job, placement.why_not_alone
    if job.flops and why_not and not placement.is_sharded:
        placement.say(f"flops: not counted: {why_not}")
    counts = job.flops and not why_not

    def ask(first: LoadedShard) -> Facts:
        shard, whole = first.shard, trainer.split.whole(first.shard.step)
        with advised(job, f"step {shard.step}", ShardSize(shard.rows, whole.planned_rows, job.num_shards)):
            facts = of_pass(gradient, first)
            if not counts:
                return facts
            with counting_flops(job) as counter, gradient.again(first) as loss:
                loss.backward()  # type: ignore[no-untyped-call]
            return facts._replace(flops=counter.of_row(shard.rows, job, placement.world.device))

    def asked() -> Iterator[Iterator[LoadedStep]]:
        facts, following = answers.ask("training", steps, ask)
        gradient.rows = facts.rows
        yield following

    # Chained, so that later steps pass through no function of this module.
    return chain.from_iterable(asked()) if counts or job.loss_over_batch else steps


def of_pass(a_pass: Pass, first: LoadedShard) -> Facts:
    """Return which outputs have rows, if the pass's loss is over the batch, by the pass's first shard."""
    placement = a_pass.placement
    if a_pass.loss.over_batch is None or "loss" not in a_pass.loss.over_batch:
        return Facts()
    return _of_batch(placement.job, placement.why_not_alone, a_pass.replica, first, a_pass.loss.run)


def with_checks(context: Context, measures: Metrics, on_shard: OnShard) -> OnShard:
    """Return the same function, which looks at the losses and metrics of shard 0 of a training's step 0.

    It warns of a loss that depends on the shards: a line, not an error, as contrastive losses are meant so. A `step`
    of the user's is not called again.
    """
    job, world = context.job, context.world

    def on_shard_with_checks(shard: Shard, batch: Any, step_output: StepOutput) -> None:
        on_shard(shard, batch, step_output)
        if (shard.step, shard.shard) != (0, 0):
            return
        with autocast(job.precision, world.device), locating(location(shard)):
            _check_measures(measures, step_output, shard.rows, job.batch_dim)
            if step_output.compare is None or (job.num_shards == 1 and not measures.is_sum):
                return
            seen, is_exact = (
                (step_output.outputs, step_output.target),
                job.precision == "fp32" and world.device == CPU,
            )
            rows = shard.rows, job.batch_dim, is_exact, measures.is_sum
            losses = of_neighbours(step_output.compare, step_output.loss, seen, *rows)
        if losses is not None:
            sums = (
                f"that of step 0, shard 0 sums up to {losses.together:.6g}, and with one of its {shard.rows} rows "
                f"apart to {losses.first + losses.others:.6g}; so each of the {job.num_shards} shards has its own, "
                "and their number counts."
            )
            says = (
                f"loss: it is no sum over rows, as reduction: sum says: {sums} Return a sum, not a mean"
                if measures.is_sum
                else f"loss: the loss of a row depends on the other rows of its shard: {sums} With over: batch it "
                "sees the whole batch, and returns one number: loss: {target: ..., over: batch}"
            )
            context.send(Note(says))

    return on_shard_with_checks


def _check_measures(measures: Metrics, step_output: StepOutput, rows: int, batch_dim: int) -> None:
    """Raise ModelError if a loss or metric gives numbers that are not of single rows."""
    seen = step_output.outputs, step_output.target
    if step_output.compare is not None and not measures.is_sum:
        check_numbers("the loss", step_output.compare, seen, rows, batch_dim, step_output.loss)
    for name, function in measures.functions.items() if step_output.outputs is not None else ():
        check_numbers(f"metrics.{name}", function, seen, rows, batch_dim)


# Evaluations.


def evaluated(
    answers: Answers, evaluation: Evaluation, replica: Replica, steps: Iterator[LoadedStep], mixture: Mixture | None
) -> Generator[EvaluatedShard | StepEnd | Evaluated, None, None]:
    """Run an evaluation; in its first run, ask which outputs have rows, and how its metrics read rows.

    Raises JobError if a metric of torchmetrics depends on how its rows are cut into updates.
    """
    job, of = evaluation.job, evaluation.of
    question = f"measures of the {of}"
    is_known = answers.get(question) is not None
    why_not = evaluation.placement.why_not_alone

    def ask(first: LoadedShard) -> Facts:
        with torch.no_grad():
            return _of_batch(job, why_not, replica, first, lambda batch: evaluation.output(replica.model, batch))

    rows: Mapping[str, bool] = {}
    if evaluation.over_batch:
        facts, steps = answers.ask(of, steps, ask)
        rows = facts.rows
    assert replica.work is not None
    split = replica.work.split
    # A single update sees all rows.
    metrics = {} if is_known or split.shards * split.total_steps == 1 else of_updates(evaluation.states)
    pieces, last = dict[int, Any](), min(-(-ROWS // split.batch_size), split.total_steps) - 1
    for done in evaluation.run(replica, steps, mixture, rows):
        if isinstance(done, EvaluatedShard) and not is_known:
            shard, step_output = done.shard, done.step_output
            if (shard.step, shard.shard) == (0, 0):
                with autocast(job.precision, evaluation.device), locating(of + location(shard)), torch.no_grad():
                    _check_measures(evaluation.measures, step_output, shard.rows, job.batch_dim)
            if metrics and shard.start < ROWS:
                pieces[shard.start] = _piece(step_output, shard, job.batch_dim)
            del step_output
        if metrics and isinstance(done, StepEnd) and done.step >= last:
            _check_updates(metrics, pieces, job.batch_dim)
            metrics, pieces = {}, {}
        if isinstance(done, Evaluated) and not is_known:
            answers.add(question, Facts())
        yield done
        del done  # its outputs: a name would keep their memory while the next shard runs


def _piece(step_output: StepOutput, shard: Shard, batch_dim: int) -> tuple[Any, int] | None:
    """Return what a metric sees of a shard's rows, of the first ROWS of all; None if no rows can be cut from it."""
    seen, kept = (step_output.outputs, step_output.target), min(shard.rows, ROWS - shard.start)
    try:
        if num_rows(seen, batch_dim) != shard.rows or may_have_lists_of_rows(seen, shard.rows):
            return None
        piece = copied(cut(seen, 0, kept, batch_dim))
        return (moved_batch(piece, CPU) if has_peers() else piece), kept
    except Exception:  # a user's step may return any form
        return None


def _check_updates(metrics: Mapping[str, Any], own: Mapping[int, Any], batch_dim: int) -> None:
    """Raise JobError for a metric that depends on which rows come together. Every rank calls this."""
    everybodys = {start: piece for theirs in gathered(own) for start, piece in theirs.items()}
    pieces = [everybodys[start] for start in sorted(everybodys)]
    if not all(pieces) or sum(rows for _, rows in pieces) < 2:
        return
    seen = gather([piece for piece, _ in pieces], [rows for _, rows in pieces], batch_dim)
    for name, metric in metrics.items():
        if (apart := read_whole(metric, seen, batch_dim)) is not None:
            raise JobError(
                f"metrics.{name}: {type(metric).__qualname__} reads each update as a whole: {apart}. So it would "
                "depend on shards and batch_size; give it probabilities (a sigmoid or softmax first), or a "
                "metric over the batch"
            )


# Predictions.


def before_prediction(
    answers: Answers, prediction: Prediction, replica: Replica, steps: Iterator[LoadedStep], why_not: str
) -> tuple[Facts, Iterator[LoadedStep]]:
    """Ask which outputs have rows, and what a row costs; return that, and the steps.

    Raises ModelError for an output whose size has the rows of the shard by chance.
    """
    job, counts = prediction.job, prediction.job.flops and not why_not

    def ask(first: LoadedShard) -> Facts:
        try:
            with torch.no_grad(), autocast(job.precision, prediction.device, keeps=False):
                inputs, _ = split_passthrough(first.batch, first.indices)
                first = first._replace(batch=inputs)
                few = few_of(job, first)
                sure = None if few is None else _if_sure(replica, partial(of_outputs, few, first.shard.rows))
                return sure or of_outputs(first)
        except (RuntimeError, ModelError) as error:
            replica.raise_advised(error, first.shard, job)

    def of_outputs(first: LoadedShard, whole: int = 0) -> Facts:
        shard, forward = first.shard, prediction.forward(replica.model)

        def less(inputs: Any) -> Any:
            return without_texts(prediction.select.picked(forward(inputs), inputs, shard, None))

        if why_not:
            return Facts(says=_only_sizes(job, why_not) if shard.rows > 1 else (), is_asked=False)
        counting = counting_flops(job) if counts else nullcontext()
        with counting as counter, replica.again(first, forward) as returned:
            outputs = prediction.select(returned, first.batch, shard)
            with suppress(Error):  # of a class that cannot be made again
                outputs = in_own_memory(outputs)
            del returned  # the shard runs once more
        flops = None if counter is None else counter.of_row(shard.rows, job, prediction.device)
        texts, where = paths_of_texts(outputs), location(shard)
        with suppress(Error):
            outputs = without_texts(outputs, lambda path, length: shard.rows > 1 or length == 1)
        if shard.rows == 1 and not any(isinstance(leaf, Ragged) and leaf.has_values for leaf in flatten(outputs)[0]):
            return Facts(flops=flops)
        found = tried(job, replica, first, less, outputs)
        if isinstance(found, str):
            return Facts({}, flops, _only_sizes(job, found) if shard.rows > 1 else ())
        if whole and looks_like(found, whole, job.batch_dim):
            raise ModelError(f"{where}: an output has {whole} rows with {shard.rows} samples")  # it is asked of all
        if shard.rows > 1:
            check_sizes(found, shard.rows, job.batch_dim, where, texts)
            check_lists(found, outputs, shard.rows, where)
        of_texts = {path: found[path] for path in texts if path in found}
        return Facts({path: each.less != each.size for path, each in of_texts.items()}, flops)

    return answers.ask("prediction", steps, ask)


def _if_sure(replica: Replica, ask: Callable[[], Facts]) -> Facts | None:
    """Return what is found of a few rows; None if they leave any doubt, as a model may that wants more."""
    try:
        facts = ask()
    except Exception as error:
        if passes(error):
            raise
        replica.restore()
        return None
    return None if facts.says else facts


def _only_sizes(job: Job, why: str) -> tuple[str, ...]:
    return (
        f"outputs: only sizes tell which have a row for each sample, since {why.rstrip('.')}; one whose dimension "
        f"{job.batch_dim} is by chance as long as a shard has rows counts as such",
    )


def _of_batch(
    job: Job, why_not: str, replica: Replica, first: LoadedShard, run: Callable[[Any], StepOutput]
) -> Facts:
    """Return which outputs and targets of a loss or metric over the batch have rows; `run` runs a shard's batch.

    Raises ModelError for one that has rows in another dimension, and for a constant that depends on the rows.
    """
    shard, rows = first.shard, first.shard.rows
    if job.num_shards == 1:  # it is the whole batch
        return Facts()
    if why_not:
        return Facts(says=_only_sizes(job, why_not), is_asked=False)

    def seen(batch: Any) -> Any:
        step_output = run(batch)
        return step_output.outputs, step_output.target

    with torch.no_grad():
        with replica.again(first, seen) as returned:
            outputs = map_leaves(in_own_memory, returned)
        found = tried(job, replica, first, seen, outputs)
    if isinstance(found, str):
        return Facts(says=_only_sizes(job, found))
    follows = {path: less.follows(rows, job.batch_dim) for path, less in found.items()}
    for path, less in found.items():
        if follows[path] is not False or less.is_same:
            continue
        if less.size == less.less:
            raise ModelError(
                f"step {shard.step}: {output_at(path)} has no row for each sample, and is another one with "
                f"{counted(rows, 'row')} of shard {shard.shard} than with {other_rows(rows)}: {OF_ROWS}"
            )
        raise ModelError(f"{location(shard)}: {output_at(path)} {less.misfit(rows, job.batch_dim, LEAVE_OUT)}")
    known = {path: follow for path, follow in follows.items() if follow is not None}
    return Facts({path: follow for path, follow in known.items() if found[path].size is not None})
