"""A dataset with a `set_epoch` is told each epoch before it is read, wherever and by whomever it is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import dp_ray
from dp_ray.data import Stream
from dp_ray.driver.replay import replay
from dp_ray.engine.loads.bad_samples import Quarantine
from dp_ray.engine.loads.loading import find_reference
from dp_ray.errors import DataError
from dp_ray.job.plan import split_of
from dp_ray.plan.order import Order
from dp_ray.plan.split import Work
from dp_ray.replay.replay import StepChoice
from tests.support import training
from tests.support.builders import loader_of, run_dir_of
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.trainings import initial, job_of, keys_of, mean_loss

pytestmark = pytest.mark.usefixtures("in_project")

HERE = "tests.engine.test_epochs"
ROWS, EPOCHS, STEPS = 20, 3, 9


class Curriculum(training.Pairs):
    """Items that depend on the epoch, and on what `set_epoch` draws; not to be read before an epoch is told."""

    def __init__(self, length: int = ROWS, draws: bool = False, fails: int = -1, bad: int = -1) -> None:
        super().__init__(length)
        self.draws, self.fails, self.bad = draws, fails, bad
        self.told: list[int] = []
        self.added = torch.zeros(6)

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.fails:
            raise ValueError("no such epoch")
        self.told.append(epoch)
        self.added = torch.full((6,), 0.3 * epoch)
        if self.draws:
            self.generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
            self.added = torch.randn(6) + torch.randn(6, generator=self.generator)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise RuntimeError("a bad record")
        inputs, target = super().__getitem__(index)
        assert self.told, "an epoch is told before the first read"
        return inputs + self.added, target


class Shortening(Curriculum):
    """Fewer items in each epoch."""

    def __len__(self) -> int:
        return super().__len__() - len(self.told)


def data(name: str = "Curriculum", **args: Any) -> dict[str, Any]:
    return {"target": f"{HERE}:{name}", "args": args}


def job(dataset: Any = None, **keys: Any) -> Any:
    given = {"epochs": EPOCHS, "shards": 3, "workers": 1, "checkpoint": {"every_steps": 2}}
    return job_of("mlp", dataset or data(), **{**given, **keys})


def plainly() -> dict[str, torch.Tensor]:
    """What a plain loop trains that tells its dataset each epoch."""
    net, dataset = initial(training.mlp), Curriculum()

    def order_of(epoch: int) -> Order:
        dataset.set_epoch(epoch)
        return Order(ROWS, 0, epoch, shuffle=True)

    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    training.plain_loop(net, dataset, 7, EPOCHS, mean_loss, sgd, order_of=order_of)
    return net.state_dict()


def close(weights: Any) -> None:
    torch.testing.assert_close(dict(weights), plainly(), rtol=1e-4, atol=1e-5)


@pytest.mark.full(but=["3-2", "2-0"])
@pytest.mark.slow
@pytest.mark.parametrize(("workers", "processes"), [(1, 0), (1, 2), (2, 0), (3, 2)])
def test_any_workers_and_loaders_train_what_a_plain_loop_does(tmp_path: Path, workers: int, processes: int) -> None:
    run_group(job(workers=workers, loader={"processes": processes}), tmp_path)
    close(weights_of(tmp_path))


def test_in_the_drivers_own_process_with_evaluations_of_the_same_object(tmp_path: Path) -> None:
    dataset = Curriculum()
    evaluated = {"dataset": dataset, "every_steps": 2}
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}}
    given = {"dataset": dataset, "eval": evaluated, "shuffle": True, "batch_size": 7, "epochs": EPOCHS, "shards": 3}
    result = dp_ray.run(**keys_of(**given, optimizer=sgd, storage=str(tmp_path), name="run"))
    close(result.weights)
    net = initial(training.mlp)
    net.load_state_dict(dict(result.weights))
    loss = nn.functional.cross_entropy(net(dataset.inputs), dataset.targets)  # an evaluation reads epoch 0
    assert result.metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    # Evaluations follow the steps 1, 3, 5, 7 and 8; the epochs begin with the steps 0, 3 and 6.
    assert dataset.told == [0, 1, 0, 1, 0, 2, 0, 2, 0]


@pytest.mark.slow
def test_a_training_that_dies_in_the_midst_of_an_epoch_goes_on_in_it_and_a_step_is_replayed_in_its_own(
    tmp_path: Path,
) -> None:
    of = job(bitwise=True, loader={"processes": 1})
    run = Path(run_dir_of(tmp_path, of, rows={"dataset": ROWS}).storage.location)
    run_group(of.model_copy(update={"workers": 2}), run, StopsBefore(5))  # the second epoch has the steps 3 to 5
    run_group(of, run)
    close(weights_of(run))
    losses = [row["loss"] for row in history_of(run)]
    assert len(losses) == STEPS
    for step in (4, 8):
        (replayed,) = replay(str(run), StepChoice(step, None), lambda line: None)
        assert replayed.loss == losses[step]


def test_each_epoch_is_told_once_before_its_first_batch() -> None:
    of = job(loader={"processes": 0})
    dataset, read = Curriculum(), []
    for _ in loader_of(of, dataset):
        read.append(dataset.told[-1])
    assert dataset.told == [0, 1, 2] and read == sorted(read)
    dataset = Curriculum()
    work = Work(split_of(of, ROWS), start=4)
    next(loader_of(of, dataset, work))
    assert dataset.told == [1], "resumed in the midst of epoch 1"
    blocks = job(shuffle={"block_rows": 5, "window_blocks": 2})
    list(loader_of(blocks, dataset := Curriculum()))
    assert dataset.told == [0, 1, 2]


@pytest.mark.full
@pytest.mark.slow
def test_what_it_draws_is_the_same_in_every_process(tmp_path: Path) -> None:
    weights = []
    for workers, processes in ((1, 0), (2, 2)):
        folder = tmp_path / f"{workers}"
        run_group(job(data(draws=True), workers=workers, bitwise=True, loader={"processes": processes}), folder)
        weights.append(weights_of(folder))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_bad_records_are_read_in_their_epoch() -> None:
    class Noting(Curriculum):
        def __getitem__(self, index: int) -> Any:
            inputs, _ = super().__getitem__(index)
            return inputs, self.told[-1]

    of, dataset = job(on_error={"quarantine": 9}, loader={"processes": 0}), Noting(bad=4)
    quarantine = Quarantine(find_reference(of, dataset, "dataset"), lambda *_: None)
    epochs = [int(one) for _, (_, of_batch) in loader_of(of, dataset, quarantine=quarantine) for one in of_batch]
    assert epochs == [0] * 19 + [1] * 19 + [2] * 19


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_of_it_is_told_as_the_users(tmp_path: Path, processes: int) -> None:
    says = r"DataError: step 3, shard 0: set_epoch\(1\) of the dataset raised ValueError: no such epoch"
    with pytest.raises(ProcessExit, match=says):
        run_group(job(data(fails=1), loader={"processes": processes}, on_error={"quarantine": 9}), tmp_path)


def test_it_must_not_change_the_length() -> None:
    with pytest.raises(DataError, match=r"set_epoch\(0\) of the dataset made it 19 samples long, and it had 20"):
        next(loader_of(job(), Shortening()))


class Shuffled(IterableDataset[Any]):
    """An iterable dataset with another order in each epoch, as those of Hugging Face: pairs of (item, epoch)."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order: list[int] = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from ((item, self.epoch) for item in order)


def shuffled_file(name: str) -> Shuffled:
    return Shuffled()


@pytest.mark.parametrize(
    "args", [{"iterable": Shuffled()}, {"iterable": Shuffled}, "files"], ids=["object", "class", "files"]
)
def test_the_iterable_of_a_stream_is_told(args: Any) -> None:
    if args == "files":
        args = {"iterable": shuffled_file, "files": ["one"]}
    stream = Stream(rows=[ROWS] if "files" in args else ROWS, **args)
    of = job(shuffle=False, shards=1, drop_last=True, loader={"processes": 0})
    read = [pair for _, batch in loader_of(of, stream) for pair in zip(*map(torch.Tensor.tolist, batch), strict=True)]
    expected = Shuffled()
    for epoch in range(EPOCHS):
        expected.set_epoch(epoch)
        assert read[14 * epoch : 14 * epoch + 14] == list(expected)[:14]
    # A process whose next item comes after its last one of the epoch before must not read on.
    stream.set_epoch(4)
    expected.set_epoch(4)
    assert stream[3] == list(expected)[3]
    stream.set_epoch(5)
    expected.set_epoch(5)
    assert stream[7] == list(expected)[7]
