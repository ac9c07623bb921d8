"""Fixtures of all tests: one Ray for the session, and proof that a test leaves nothing behind."""

import contextlib
import gc
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.util import Finalize
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from execnet import XSpec
from xdist.scheduler import LoadScopeScheduling

import dp_ray
import dp_ray.driver.run
from dp_ray.system.threads import SIGNALS
from tests.support import forked_python
from tests.support.cluster import ROOT, SELDOM, SYSTEM_CONFIG, Cluster, Run, end, free_port, ours, wait_for_port
from tests.support.forked import start_server
from tests.support.group import end_idle
from tests.support.within import within

if TYPE_CHECKING:
    from tests.support.s3 import Server

# One thread for each process: there are more processes than cores, and threads that wait for others spin.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# No deadline, for the machine may be busy; the same examples each time, for a failure should be of the change.
hypothesis.settings.register_profile("dp_ray", deadline=None, derandomize=True, max_examples=33)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("dp_ray")


# With `--dist loadgroup` two processes run the tests, each with a cluster of its own: these files, which wait much or
# have no use for a session, and all others.
BESIDE = {
    "cluster/test_first_start.py",
    "cluster/test_hosts.py",
    "cluster/test_placement.py",
    "cluster/test_ray_internals.py",
    "cluster/test_submitted.py",
    "driver/test_shards_auto.py",
    "engine/test_fsdp.py",
    "places/test_node.py",
    "places/test_slurm.py",
    "sweeps/test_sweeps.py",
    "test_wheel.py",
}

MANY_MODULES = 50
DURATIONS = ROOT / "build" / "durations.txt"
MOST_FILES = 100  # that a module leaves open: torch, pyarrow, boto3 and what all tests share open some once
LAST = -1000  # below the priority of everything else that multiprocessing does when a process ends


class TwoGroups(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process a group of tests. (xdist's own way, a mark, does not reach pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        return "beside" if nodeid.partition("::")[0].removeprefix("tests/") in BESIDE else "rest"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take `--eighth=K`."""
    parser.addoption("--eighth", type=int, help="run each eighth test of those that -m chooses, from this one on")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Have groups be those of `TwoGroups`."""
    return TwoGroups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that tests on a cluster are marked, and have them pass over what Ray leaves to the garbage collector.

    Those that share a session come last: while it is open, it holds the one connection to Ray that a process has.
    Below Ray, where processes share the files, those with the most slow tests come first: none waits for them then.
    """
    keep_some_cases(items, are_all=not any("::" in given for given in config.args))
    items.sort(key=lambda item: "session" in getattr(item, "fixturenames", ()))
    if is_one_of_several(config) and "not ray" in config.option.markexpr:
        slow = Counter(item.path for item in items if item.get_closest_marker("slow") is not None)
        items.sort(key=lambda item: -slow[item.path])
    for item in items:
        is_on_ray = item.get_closest_marker("ray") is not None
        assert is_on_ray or "cluster" not in getattr(item, "fixturenames", ()), (
            f"{item.nodeid} uses a cluster, and is not marked ray"
        )
        if is_on_ray:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"))


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what is imported by now: a million objects, in each collection."""
    gc.freeze()
    gc.enable()


def keep_some_cases(items: list[pytest.Item], are_all: bool) -> None:
    """Take the mark `full` off the cases that it names: `full(but=["3-adam"])` leaves this one to `make test`.

    If these are all cases of their tests, a name that none of them has is an error.
    """
    names = set[tuple[str, str]]()
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "full" and "but" in mark.kwargs]:
            test, case = item.nodeid.partition("[")[0], item.callspec.id  # type: ignore[attr-defined]  # of parameters
            names |= {(test, name) for name in mark.kwargs["but"]}
            if case in mark.kwargs["but"]:
                item.own_markers.remove(mark)
    unknown = names - {(test, case.removesuffix("]")) for test, _, case in (it.nodeid.partition("[") for it in items)}
    assert not (are_all and unknown), f"no such cases to keep: {unknown}"


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_take_an_eighth(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave seven of eight tests out: neighbours, which take about as long, fall into different eighths.

    Those on simulated GPUs stay together, for they share the processes that run their jobs.
    """
    if (part := config.getoption("--eighth")) is None:
        return
    together = [list(group) for _, group in groupby(items, lambda item: "sim" in item.path.parts or item.nodeid)]
    eighths: list[list[pytest.Item]] = [[] for _ in range(8)]
    for tests in sorted(together, key=len, reverse=True):
        min(eighths, key=len).extend(tests)
    items[:] = [item for item in items if item in eighths[part % 8]]


@pytest.fixture(autouse=True)
def what_stays_left_alone() -> Iterator[None]:
    """The same for what a test imports, if that is much."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


def pytest_xdist_setupnodes(specs: list[XSpec]) -> None:
    """Have xdist's own processes forked too, with most of what the tests import imported."""
    start_server()
    python = shlex.join([sys.executable, forked_python.__file__, forked_python.address()])
    specs[:] = [XSpec(f"popen//python={python}") for _ in specs]


def pytest_configure_node(node: Any) -> None:
    """Give each process of xdist the server from which its groups' processes are forked."""
    node.workerinput["server"] = forked_python.address()


def pytest_configure(config: pytest.Config) -> None:
    """Have Ctrl-C reach programs that tests start: a shell's background jobs ignore it, and so would these.

    Have a process of xdist end at once after its tests: pytest waited 7 s while it took its objects apart.
    Nothing is collected until all tests are imported: a third of that time was spent on it.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_one_of_several(config):
        forked_python.use_server(config.workerinput["server"])  # type: ignore[attr-defined]  # xdist has no types
        Finalize(None, os._exit, args=(0,), exitpriority=LAST)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have the collector look at everything again, for libraries that count at exit what is left."""
    if not is_one_of_several(session.config):
        gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what each test took into `build/durations.txt`, slowest first, beside what other runs wrote there.

    What is not in it took no time, or was not run. A test's setup and teardown count.
    """
    seconds = defaultdict[str, float](float)
    for line in DURATIONS.read_text().splitlines() if DURATIONS.exists() else ():
        took, _, test = line.strip().partition(" s  ")
        seconds[test] = float(took)
    reports = [report for found in terminalreporter.stats.values() for report in found]
    told = [report for report in reports if isinstance(report, pytest.TestReport)]
    seconds.update(dict.fromkeys((report.nodeid for report in told), 0.0))
    for report in told:
        seconds[report.nodeid] += report.duration
    DURATIONS.parent.mkdir(exist_ok=True)
    longest = sorted(seconds.items(), key=itemgetter(1), reverse=True)
    DURATIONS.write_text("".join(f"{took:8.2f} s  {test}\n" for test, took in longest))


def is_one_of_several(config: pytest.Config) -> bool:
    """Whether this is one of the processes among which xdist shares out the tests."""
    return hasattr(config, "workerinput")


def environment() -> dict[str, str]:
    """os.environ, without what pytest, torch at its first DDP, and boto3 and Ray when imported write there."""
    theirs = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "CRC32C_", "RAY_CLIENT_MODE")
    return {key: value for key, value in os.environ.items() if not key.startswith(theirs)}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaves an environment variable, a handler of a signal or a process group behind fails."""
    before, handlers = environment(), list(map(signal.getsignal, SIGNALS))
    yield
    assert environment() == before, "the test changed the environment"
    assert list(map(signal.getsignal, SIGNALS)) == handlers, "the test left a handler of a signal"
    assert not torch.distributed.is_initialized(), "the test left a process group"


@pytest.fixture(scope="module", autouse=True)
def few_files_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module of tests that leaves many files open fails: in the end one process would have too many for all.

    Those on Ray do: a connection to it keeps some.
    """
    before = open_files()
    yield
    if (open_files() - before).total() > MOST_FILES:
        gc.collect()
        left = open_files() - before
        modules = {item.path for item in request.session.items if item.get_closest_marker("ray") is not None}
        assert left.total() <= MOST_FILES or request.path in modules, f"the module left files open: {dict(left)}"


def open_files() -> Counter[str]:
    """What this process has open: how many sockets, pipes and so on, and which files."""
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    return found


@pytest.fixture(autouse=True)
def no_worker_left_behind() -> Iterator[None]:
    """The processes in which the test's groups ran end with it."""
    yield
    end_idle()


@pytest.fixture
def in_project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in the project's root, where `jobs` imports from."""
    monkeypatch.chdir(ROOT)
    return ROOT


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A local Ray cluster of 8 logical CPUs with a dashboard, as `ray start --head` gives it."""
    from tests.support import ray_forks  # imports Ray, which the tests below Ray and tests/gpu do without

    port, dashboard = free_port(), free_port()
    # A folder of its own: in Ray's usual one stands the address of whichever Ray was started last on this machine.
    temporary = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    command = [sys.executable, ray_forks.__file__, temporary.name, "start", "--head", "--block", "--num-cpus=8"]
    command += [f"--port={port}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    command += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    command += ["--disable-usage-stats", f"--temp-dir={temporary.name}", f"--system-config={SYSTEM_CONFIG}"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]  # any: two clusters would take the same ones in turn
    # As from an activated environment: a job's `python` is this one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, ours(): "1", **SELDOM}
    with temporary as folder, (tmp_path_factory.mktemp("ray") / "ray.log").open("wb") as log:
        for is_last in (False, False, True):  # on a busy machine Ray gives its dashboard up, and ends
            with subprocess.Popen(command, stdout=log, stderr=log, cwd="/", env=environment) as process:
                try:
                    wait_for_port(dashboard, process)
                except AssertionError:
                    if is_last:
                        raise
                    continue
                else:
                    yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", Path(folder))
                    break
                finally:
                    end(process)


@pytest.fixture
def variables_kept() -> Iterator[None]:
    """A process that shows its token to a cluster's dashboard, and forgets it."""
    from dp_ray.cluster.internals.core import read_variables_anew  # imports Ray

    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    read_variables_anew()


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path, in_project: Path) -> Run:
    """dp_ray.run on the tests' cluster, with workers of its own, into a folder of the test's own."""

    def on_cluster(job: str | None = None, **keys: Any) -> dp_ray.Result:
        given = {"address": cluster.address, "storage": str(tmp_path), "name": "run", "quiet": True, **keys}
        return dp_ray.run(job, **given)

    return on_cluster


@pytest.fixture(scope="session")
def opened_session(cluster: Cluster) -> "Iterator[dp_ray.Session]":
    """A session of three workers, which all tests that ask for it share."""
    with contextlib.chdir(ROOT), dp_ray.session(address=cluster.address, workers=3) as opened:
        yield opened


@pytest.fixture
def session(opened_session: "dp_ray.Session") -> "dp_ray.Session":
    """The same, once others are in the places of those that an earlier test has killed."""
    await_all(opened_session)
    return opened_session


def await_all(session: "dp_ray.Session") -> None:
    """Wait for all workers of a session: a job begins without those that were killed before it.

    A fault may be for one of them.
    """
    import ray

    channel = session._workers.started.channel
    assert within(240, lambda: not ray.get(channel.lost.remote()))


@pytest.fixture
def run_in_session(session: "dp_ray.Session", tmp_path: Path, in_project: Path) -> Run:
    """The same as `run`, on the workers of the shared session: most of a run without them is their start."""

    def on_its_workers(job: str | None = None, **keys: Any) -> dp_ray.Result:
        if "inject" in keys:
            await_all(session)
        return session.run(job, **{"storage": str(tmp_path), "name": "run", "quiet": True, **keys})

    return on_its_workers


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """A server of the S3 protocol, which all tests that ask for it share: each has a folder of its own."""
    from tests.support.s3 import serving  # boto3 is slow to import, and few tests need it

    with serving(tmp_path_factory.mktemp("s3") / "requests.log") as started:
        yield started


@pytest.fixture
def many_files() -> Iterator[list[int]]:
    """Open files of this process, so many that the next ones have numbers that select() does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), limits[1]))
        yield [held.enter_context(open(os.devnull, "rb")).fileno() for _ in range(1024)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4m tmpfs {folder}"):
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    os.system(f"umount --lazy {folder}")


@pytest.fixture
def foreground() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell's background jobs ignore it."""
    wanted: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    left = {number: signal.getsignal(number) for number in wanted}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == wanted, "the run left a handler"
