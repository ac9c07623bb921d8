"""Targets: what cannot be imported, called or given its args is the job's error, told before anything runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from dp_ray.engine.loads.loader import Watch, started_loader
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, bound, build, build_dataset, resolve

USER_CODE = """
import collections
number = 5
class Thing:
    class Inner:
        pass
    def __init__(self, width=3):
        if width < 0:
            raise ValueError("width below 0")
        self.width = width
def sized(n):
    return list(range(n))
def iterable():
    return iter([1])
class Squares:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index ** 2
class Stacks:
    def __init__(self, times=1):
        self.times = times
    def __call__(self, items):
        return items * self.times
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "dp_ray_user.py").write_text(USER_CODE)
    (tmp_path / "dp_ray_broken.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "dp_ray_raises.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("dp_ray_user", "dp_ray_broken", "dp_ray_raises"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("target", "args", "says"),
    [
        ("dp_ray_nowhere:Thing", {}, "model: cannot import 'dp_ray_nowhere': there is no module 'dp_ray_nowhere'"),
        ("dp_ray_broken:Thing", {}, "model: cannot import 'dp_ray_broken': there is no module 'a_module_that_is"),
        ("dp_ray_raises:Thing", {}, "model: importing 'dp_ray_raises' raised ZeroDivisionError"),
        ("dp_ray_user:Thng", {}, "model: dp_ray_user has no attribute 'Thng'; did you mean 'Thing'?"),
        ("dp_ray_user:number", {}, "model: dp_ray_user:number is 5, not a class or function"),
        (
            "dp_ray_user:Thing",
            {"wdth": 1},
            "model.args: dp_ray_user:Thing takes no 'wdth', but width; did you mean 'width'?",
        ),
        (
            "dp_ray_user:sized",
            {},
            "model.args: dp_ray_user:sized rejects {}: missing a required argument: 'n'; it takes n",
        ),
        ("dp_ray_user:Thing", {"width": -1}, "model: dp_ray_user:Thing raised ValueError: width below 0"),
    ],
)
def test_a_wrong_target_is_told(target: str, args: dict[str, object], says: str) -> None:
    with pytest.raises(JobError) as caught:
        build("model", Target(target=target, args=args))
    assert says in str(caught.value)


@pytest.mark.usefixtures("user_code")
def test_a_target_is_called_with_its_args_only_when_built() -> None:
    make = bind("model", Target(target="dp_ray_user:Thing", args={"width": -1}))
    with pytest.raises(JobError, match="width below 0"):
        make()
    assert build("model", Target(target="dp_ray_user:Thing", args={"width": 7})).width == 7
    assert resolve("model", Target(target="dp_ray_user:Thing.Inner")).__name__ == "Inner"


@pytest.mark.usefixtures("user_code")
def test_importing_from_where_the_user_stands_leaves_the_path_alone() -> None:
    before = list(sys.path)
    build("model", Target(target="dp_ray_user:Thing"))
    assert sys.path == before


@pytest.mark.full(but=["spawn"])
@pytest.mark.slow
@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_loader_process_that_is_not_forked_finds_what_stands_where_the_user_stands(context: str) -> None:
    """As of the program `dp-ray`, whose own path begins with the folder that it is installed in."""
    dataset = build("dataset", Target(target="dp_ray_user:Squares"))
    before = list(sys.path)
    batches = started_loader(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context))
    watch = Watch(batches)  # type: ignore[arg-type]
    try:
        assert list(batches) == [0, 1, 4]
    finally:
        watch.end()
    assert sys.path == before


@pytest.mark.usefixtures("user_code")
def test_a_class_whose_objects_are_functions_is_built() -> None:
    """As of a collator; `list` is a function of the items itself."""
    assert bound("collate", Target(target="dp_ray_user:Stacks", args={"times": 2}))([1]) == [1, 1]
    stacks = resolve("collate", Target(target="dp_ray_user:Stacks"))
    assert bound("collate", stacks)([1]) == [1]
    assert bound("collate", Target(target="builtins:list"))((1, 2)) == [1, 2]
    assert bound("collate", list) is list


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("dp_ray_user:sized", "loss.args: dp_ray_user:sized takes no 'm', but n"),
        ("dp_ray_user:iterable", "loss.args: dp_ray_user:iterable takes no 'm', but nothing"),
        ("dp_ray_user:Stacks", "loss.args: dp_ray_user:Stacks takes no 'm', but times"),
    ],
)
def test_a_function_that_does_not_take_its_args_is_told_before_it_is_called(target: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        bound("loss", Target(target=target, args={"m": 1}))
    assert says in str(caught.value)
    assert bound("loss", Target(target="torch:stack", args={"dim": 1})), "it has no signature"


def test_an_object_is_what_it_is() -> None:
    thing = object()
    assert build("model", thing) is thing


def dataset_job(target: str, **args: object) -> Job:
    keys = {"model": "jobs.tutorial:Model", "dataset": {"target": target, "args": args}, "batch_size": 1}
    return Job.make(keys, "job")


@pytest.mark.usefixtures("user_code")
def test_a_dataset_must_be_map_style_and_not_empty() -> None:
    assert len(build_dataset(dataset_job("dp_ray_user:sized", n=4))) == 4
    with pytest.raises(DataError, match="list is empty"):
        build_dataset(dataset_job("dp_ray_user:sized", n=0))
    with pytest.raises(JobError, match="lacks __len__ and __getitem__"):
        build_dataset(dataset_job("dp_ray_user:iterable"))
