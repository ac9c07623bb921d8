"""Run what must stay bit for bit at two commits, and compare: `python -m tools.proofs BASE [WORD...]`.

BASE is a commit, which runs in a work tree of its own and is kept in `build/proofs`, or a file that `keep` wrote. It
draws the cases from its own tests; this checkout runs the same ones, or those whose name has one of the words.
`keep FILE` runs this checkout alone, and `compare FILE FILE` compares two files. `--all` draws many more cases.
The exit status is 1 if bits differ. Texts that vanished or came are listed, and change no status.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "proofs"
CLOCKED = ("rows_per_second", "data_wait_seconds")  # columns of a history that no two runs share
SECONDS = 150  # of one case: what hangs has failed
SEED = 69
SAYS = {"say", "warn", "Note", "add_note", "note", "print", "echo"}  # calls whose texts a user reads
Case = dict[str, Any]


def main() -> int:
    """Be the command."""
    of = argparse.ArgumentParser(prog="python -m tools.proofs", description=__doc__.partition("\n")[0])
    of.add_argument("what", metavar="BASE | keep | compare | run")
    of.add_argument("words", nargs="*")
    of.add_argument("--all", action="store_true", help="draw many more cases, which take some 20 minutes")
    given = of.parse_args()
    what, words = given.what, given.words
    if what == "run":  # in a process whose PYTHONPATH is the checkout: see `proofs_of`
        return run_here(Path(words[0]), Path(words[1]), given.all, Path(words[2]) if words[2:] else None, words[3:])
    if what == "keep":
        Path(words[0]).write_text(json.dumps(proofs_of(ROOT, given.all)))
        return 0
    if what == "compare":
        return told(json.loads(Path(words[0]).read_text()), json.loads(Path(words[1]).read_text()))
    path = Path(what) if Path(what).is_file() else kept_base(what, given.all)
    base, here = json.loads(path.read_text()), proofs_of(ROOT, given.all, path, words)
    chosen = {name: proof for name, proof in base["proofs"].items() if is_chosen(name, words)}
    return told({**base, "proofs": chosen}, here)


def told(base: Case, here: Case) -> int:
    """Print how the proofs differ; return 1 if bits do."""
    bits, texts = compared(base, here)
    print(*bits, *texts, sep="\n", end="\n" if bits or texts else "")
    print(f"{len(base['proofs'])} cases: {f'{len(bits)} DIFFER' if bits else 'the same bits'}; {len(texts)} texts")
    return int(bool(bits))


def kept_base(commit: str, is_all: bool) -> Path:
    """Return the file with a commit's proofs, which are run if this script has not kept them before."""
    full = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    path = KEPT / f"{full[:12]}-{'all' if is_all else 'quick'}-{by}.json"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="dp-ray-proofs-") as made:
            tree = Path(made, "tree")
            git("worktree", "add", "--detach", str(tree), full)
            try:
                found = proofs_of(tree, is_all)
            finally:
                git("worktree", "remove", "--force", str(tree))
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.replace(path)
    return path


def git(*arguments: str) -> str:
    """Return what git prints of this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def proofs_of(root: Path, is_all: bool, base: Path | None = None, words: Iterable[str] = ()) -> Case:
    """Run a checkout's proofs, or those of a file that has its cases; this script runs them, with that one's code."""
    with tempfile.TemporaryDirectory(prefix="dp-ray-proofs-") as made:
        (scratch := Path(made, "scratch")).mkdir()
        out = Path(made, "proofs.json")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "run", str(root), str(out), *(["--all"] if is_all else [])]
        command += [str(base.resolve()), *words] if base else []
        subprocess.run(command, cwd=scratch, env=environment, check=True)
        found: Case = json.loads(out.read_text())
        return found


# The rest runs in that process. Its imports of `dp_ray` and `tests` are the checkout's.


def run_here(root: Path, out: Path, is_all: bool, base: Path | None, words: list[str]) -> int:
    """Run the cases in this folder, and write what they come to."""
    import torch

    import dp_ray
    from tests.support.group import end_idle

    assert Path(dp_ray.__file__).is_relative_to(root), f"this would prove {dp_ray.__file__}"
    torch.set_num_threads(1)
    cases = json.loads(base.read_text())["cases"] if base else json.loads(json.dumps(list(drawn(root, is_all))))
    chosen = [case for case in cases if is_chosen(case["name"], words)]
    prepared(root)
    proofs, began = {}, time.monotonic()
    for number, case in enumerate(chosen, 1):
        proofs[case["name"]] = proof = proved(root, case)
        failed = f": {proof['error']}" if "error" in proof else ""
        print(
            f"{time.monotonic() - began:4.0f} s {number}/{len(chosen)} {case['name']}{failed}"[:200], file=sys.stderr
        )
    end_idle()
    print(f"{cpu_seconds():.0f} s of CPU", file=sys.stderr)
    out.write_text(json.dumps({"cases": cases, "proofs": proofs, "texts": texts_of(root / "dp_ray")}))
    return 0


def cpu_seconds() -> float:
    """Return what this process and those that it has started have taken."""
    import psutil

    whole = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in [whole, *whole.children()])


def is_chosen(name: str, words: Iterable[str]) -> bool:
    """Return whether a name has one of the words, if there are any."""
    return not words or any(word in name for word in words)


def drawn(root: Path, is_all: bool) -> Iterator[Case]:
    """Yield the cases: each has a name, what it is of, and what is done with it."""
    yield from of_files(root / "jobs", is_all)
    yield from of_suites(is_all)
    yield from of_kills(is_all)
    yield from of_programs(is_all)


def ways(number: int, is_all: bool) -> list[list[list[Any]]]:
    """Return on what workers a case runs: each run has workers, and the step before which they are all ended.

    There are never more workers than shards. Those of one process are no run that a driver goes on with.
    """
    alone: list[list[list[Any]]] = [[[workers, None]] for workers in (0, 1, 2, 3)]
    resumed: list[list[list[Any]]] = [[[2, 3], [3, None]], [[3, 2], [1, 3], [2, None]], [[1, 1], [3, None]]]
    return [*alone, *resumed] if is_all else [alone[number % 4], resumed[number % 3]]


def of_files(jobs: Path, is_all: bool) -> Iterator[Case]:
    """Yield the job files with few steps; these two packages are not installed everywhere."""
    short: Case = {"max_steps": 4, "checkpoint.every_steps": 1}
    for number, path in enumerate(sorted([*jobs.glob("*.yaml"), *jobs.glob("loops/*.yaml")])):
        if path.stem in ("detection", "webdataset"):
            continue
        keys = short if "task: train" in path.read_text() else {}
        for runs in (
            ways(number, is_all) if keys else [[[n, None]] for n in ((0, 1, 2, 3) if is_all else (number % 4,))]
        ):
            name = path.relative_to(jobs).with_suffix("").as_posix()
            yield {"name": f"file {name} {on(runs)}", "kind": "file", "case": [f"{name}.yaml", keys], "runs": runs}


def on(runs: list[list[Any]]) -> str:
    """Return the words for the workers of a case."""
    return "on " + ", then ".join(f"{workers} until {stop}" if stop else f"{workers}" for workers, stop in runs)


def of_suites(is_all: bool) -> Iterator[Case]:
    """Yield what the drawn suites draw."""
    from tests.engine import test_fuzz, test_fuzz_around

    try:
        from tests.engine.sharded import test_fsdp_bitwise
    except ModuleNotFoundError:  # a base from before the engine had rooms
        from tests.engine import test_fsdp_bitwise  # type: ignore[no-redef,attr-defined]
    from tests.support.cases import USUAL
    from tests.tasks import test_loops_drawn

    fsdp = [{**USUAL, **case} for case in test_fsdp_bitwise.CASES.values()]
    trainings = examples(test_fuzz.trainings(), 60 if is_all else 9)
    around = examples(test_fuzz_around.cases(), 40 if is_all else 6)
    for number, case in enumerate(around):  # processes that read take ten seconds to start
        case["processes"] *= is_all and number % 8 == 0
    loops = examples(test_loops_drawn.cases(), 24 if is_all else 6)
    for kind, cases in (("fsdp", fsdp), ("training", trainings), ("around", around), ("loop", loops)):
        for number, case in enumerate(cases):
            more = ways(number, is_all) if kind in ("loop", "fsdp") else ways(number, False)
            for runs in more:
                yield {"name": f"{kind} {number} {on(runs)}", "kind": kind, "case": case, "runs": runs}
            if "strategies" in case and kind != "fsdp":  # as its suite runs it, which may shard
                runs = [
                    list(each)
                    for each in zip(case["workers"], (case["stops"], None), case["strategies"], strict=True)
                ]
                yield {"name": f"{kind} {number} as drawn", "kind": kind, "case": case, "runs": runs}


def of_kills(is_all: bool) -> Iterator[Case]:
    """Yield trainings, a loop and a prediction of three workers, of which each rank is killed once."""
    support = "tests.support"
    data = {name: {"target": f"{support}.training:{name}"} for name in ("Pairs", "Images")}
    made: Case = {"task": "train", "shuffle": True, "epochs": 2, "batch_size": 22, "shards": 6, "bitwise": True}
    made |= {"loss": "torch.nn:CrossEntropyLoss", "ema": {"decay": 0.8}}
    made |= {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}}}
    made |= {"checkpoint": {"every_steps": 5, "best": "eval_loss"}}
    of = {
        name: {
            **made,
            "model": f"{support}.training:{name}",
            "dataset": rows,
            "eval": {"dataset": rows, "every_steps": 4},
        }
        for name, rows in (("mlp", data["Pairs"]), ("conv", data["Images"]))
    }
    loop = {"task": "train", "model": f"{support}.loops:Gan", "dataset": f"{support}.loops:Points", "shards": 6}
    loop |= {"checkpoint": {"every_steps": 4}}
    loop |= {"loop": f"{support}.loops:gan", "batch_size": 10, "epochs": 4, "shuffle": False, "bitwise": True}
    predicts = {"task": "predict", "model": of["mlp"]["model"], "dataset": data["Pairs"], "batch_size": 6}
    predicts |= {"shards": 4, "bitwise": True, "strategy": "fsdp"}  # whose workers wait for each other in each step
    kinds: dict[str, tuple[Case, list[str]]] = {
        "mlp": (
            of["mlp"],
            ["forward", "exchange", "checkpoint", "backward", "update", "after", "evaluation", "weights"],
        ),
        "conv": (of["conv"], ["backward", "update", "after"]),
        "fsdp": ({**of["mlp"], "strategy": "fsdp"}, ["gather", "scatter", "update", "checkpoint"]),
        "loop": (loop, ["update", "backward", "exchange"]),
        "prediction": (predicts, ["forward", "gather"]),
    }
    for kind, (keys, parts) in kinds.items():
        for at, part in enumerate(parts):
            for slot in range(3):
                if is_all or at == slot % len(parts):
                    step = {"checkpoint": 4, "evaluation": 7, "weights": 9}.get(part, 4 + slot)
                    named = f"kill {kind}: rank {slot} of 3 in step {step}, {part}"
                    faults = [[slot, step, part]]
                    yield {"name": named, "kind": "keys", "case": keys, "runs": [[3, None]], "faults": faults}


def of_programs(is_all: bool) -> Iterator[Case]:
    """Yield programs of two modules, in this process and on two others, which may be killed."""
    from hypothesis import strategies as st

    from tests.parallel import test_programs as suite

    whole = st.tuples(
        st.lists(st.one_of(*[suite.Operation] * 4, suite.Kill), min_size=10, max_size=30),
        *[st.lists(st.integers(1, most), min_size=2, max_size=2) for most in (3, 2)],
        st.booleans(),
        st.integers(0, 1),
    )
    for number, program in enumerate(examples(whole, 40 if is_all else 8)):
        place = "here" if number % 2 == 0 else "gloo"
        if place == "here":
            program = ([each for each in program[0] if each[0] != "kill"], *program[1:])
        yield {"name": f"program {number} on {place}", "kind": "program", "case": program, "on": place}


def examples(strategy: Any, number: int) -> list[Any]:
    """Draw so many examples, always the same: each second one, for the first ones are small."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found: list[Any] = []
    limits = settings(
        max_examples=2 * number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(SEED)
    @limits
    @given(strategy)
    def draw(case: Any) -> None:
        found.append(case)

    draw()
    return found[1::2]


def prepared(root: Path) -> None:
    """Write what some job files read."""
    import dp_ray
    from jobs import table

    table.write(Path("data"))
    keys = {"max_steps": 4, "workers": 0, "storage": "runs", "name": "digits", "quiet": True}
    dp_ray.run(root / "jobs" / "digits.yaml", **keys)


def proved(root: Path, case: Case) -> Case:
    """Run a case; return what it comes to."""
    run = of_program if case["kind"] == "program" else of_job
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made, ends_in(SECONDS):
        try:
            return run(root, case, Path(made))
        except Exception as error:
            return {"error": plain(f"{type(error).__name__}: {error}".strip().splitlines()[-1], made)}


@contextmanager
def ends_in(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def job_of(root: Path, case: Case, **keys: Any) -> Any:
    """Make the job of a case."""
    from dp_ray.job.files import load_job
    from dp_ray.job.job import Job
    from tests.support import around, cases

    kind, what = case["kind"], case["case"]
    if kind == "file":
        return load_job(root / "jobs" / what[0], {**what[1], **keys})
    if kind in ("training", "fsdp"):
        return cases.job_for(what, keys["workers"], keys.get("strategy", "fsdp" if kind == "fsdp" else "ddp"))
    if kind == "around":
        return Job.make({**around.keys_of(what), **keys}, "job")
    if kind == "loop":
        return Job.make({**loop_keys(what), **keys}, "job")
    return Job.make({**what, **keys}, "job")


def loop_keys(case: Case) -> Case:
    """Return the keys of a drawn loop."""
    support, plan = "tests.support", [*case["plan"], {"do": "update", "of": "all", "clip": None}]
    keys: Case = {"task": "train", "model": f"{support}.drawn_loops:Parts", "dataset": f"{support}.loops:Points"}
    keys |= {"loop": {"target": f"{support}.drawn_loops:planned", "args": {"plan": plan, **case["of_loop"]}}}
    keys |= {"epochs": 2, "shuffle": False, "checkpoint": {"every_steps": 1}}
    keys |= {name: case[name] for name in ("shards", "batch_size", "bitwise")}
    if case["evaluates"]:
        evaluation = {"dataset": f"{support}.loops:Pairs", "every_steps": case["evaluates"], "batch_size": 4}
        keys |= {"eval": evaluation, "metrics": {"error": f"{support}.loops:error"}}
    return keys


def of_job(root: Path, case: Case, folder: Path) -> Case:
    """Run a job through its stops or its kills; return what its last run leaves."""
    import dp_ray
    from tests.support.group import StopsBefore, run_group
    from tests.support.survivors import Fault, run_surviving

    run, told = folder / "run", list[Any]()
    for workers, stops, *strategy in case["runs"]:
        shards = job_of(root, case, workers=1).shards or workers
        keys = {"strategy": strategy[0]} if strategy else {}
        job = job_of(root, case, workers=min(workers, shards), **keys)
        if "faults" in case:
            run_surviving(job, run, [Fault(*fault) for fault in case["faults"]])
        elif workers == 0:
            told = [dp_ray.run(job, storage=str(folder), name="run", quiet=True)]
        else:
            told = run_group(job, run, StopsBefore(stops) if stops else None)
    return left_in(run, told)


def left_in(run: Path, told: Iterable[Any]) -> Case:
    """Return the bits in a run's folder: of each weight, each row of the history and each file of outputs."""
    import pyarrow.parquet as pq
    from safetensors.torch import load_file

    found: Case = {}
    for path in sorted(run.glob("*.safetensors")):
        tensors = {name: digest(one) for name, one in load_file(path).items()}
        found |= {
            path.stem: {
                **tensors,
                "shape and dtype": digest(
                    [[name, list(one.shape), str(one.dtype)] for name, one in sorted(load_file(path).items())]
                ),
            }
        }
    pieces = sorted((run / "history").glob("*.parquet"), key=lambda path: int(path.stem.split("-")[1]))
    rows = [row for path in pieces or run.glob("metrics.parquet") for row in pq.read_table(path).to_pylist()]
    if rows:
        found["history"] = [{name: repr(row[name]) for name in sorted(row) if name not in CLOCKED} for row in rows]
    outputs = sorted(path for path in run.glob("outputs/**/*") if path.is_file())
    if outputs:
        found["outputs"] = {str(path.relative_to(run)): digest(path.read_bytes()) for path in outputs}
    if metrics := [one.metrics for one in told if getattr(one, "metrics", None)]:
        found["metrics"] = {name: repr(value) for one in metrics for name, value in one.items()}
    found["says"] = sorted(plain(one.text, str(run)) for one in told if type(one).__name__ == "Note")
    return found


def of_program(root: Path, case: Case, folder: Path) -> Case:
    """Run a program of modules; return the bits of all that it compares with plain torch."""
    from torch import nn

    import dp_ray
    from dp_ray.parallel import module as parallel
    from dp_ray.parallel.exchange import SharedWorkers
    from tests.parallel import test_programs as suite
    from tests.support.served import Gloo

    program, *given = case["case"]
    num, seen, check = 2 if case["on"] == "gloo" else 0, list[str](), suite.assert_close

    def noted(got: Any, wanted: Any) -> None:
        seen.append(digest(got))
        check(got, wanted)

    with ExitStack() as stack:
        stack.enter_context(patch.object(suite, "assert_close", noted))
        if num:
            stack.enter_context(patch.object(parallel, "own_workers", lambda *_, **__: Gloo()))
        stack.enter_context(dp_ray.DataParallel(nn.Identity(), num, quiet=True))
        try:
            suite.run(program, suite.Program(suite.Served(num, folder / "orders"), *given))
        finally:
            for one in list(SharedWorkers.by_owner.values()):
                one.close()
    return {"program": {f"comparison {number}": one for number, one in enumerate(seen)}}


def digest(value: Any) -> str:
    """Return a short hash of bytes, or of tensors in containers."""
    import torch

    of = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            of.update(f"{one.dtype}{tuple(one.shape)}".encode())
            one = one.detach().to_dense() if one.layout != torch.strided else one.detach()
            of.update(one.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            for key in sorted(one):
                of.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for each in one:
                add(each)
        else:
            of.update(one if isinstance(one, bytes) else repr(one).encode())

    add(value)
    return of.hexdigest()[:16]


def plain(text: str, folder: str) -> str:
    """Return a text without what no two runs share: folders, addresses, ids and times."""
    text = text.replace(folder, "...").replace(Path(folder).name, "...").replace(str(Path.cwd()), "...")
    return re.sub(r"0x[0-9a-f]+|\b\d+(\.\d+)? (m?s|seconds|[KMG]i?B)\b|\bpid \d+|127\.0\.0\.1:\d+", "...", text)


def compared(base: Case, here: Case) -> tuple[list[str], list[str]]:
    """Return a line for each case whose bits differ, and one for each text that does."""
    bits, texts = [], []
    for name in [*base["proofs"], *(name for name in here["proofs"] if name not in base["proofs"])]:
        one, other = (each["proofs"].get(name) for each in (base, here))
        if one is None or other is None:
            bits.append(f"DIFFERS {name}: it ran in {'the base' if other is None else 'this checkout'} alone")
            continue
        if "error" in one and "error" in other:
            if one["error"] != other["error"]:
                texts.append(f"error {name}: {one['error']} -> {other['error']}")
            continue
        if one.get("says") != other.get("says"):
            texts.append(f"says {name}: {one.get('says')} -> {other.get('says')}")
        wrong = [apart(key, one.get(key), other.get(key)) for key in sorted({*one, *other} - {"says"})]
        if any(wrong):
            bits.append(f"DIFFERS {name}: {'; '.join(each for each in wrong if each)}")
    for what, (first, second) in {"vanished": (base, here), "came": (here, base)}.items():
        gone = [text for text in first["texts"] if text not in second["texts"]]
        texts += [f"text {what}, {first['texts'][text]}: {text!r}" for text in gone]
    return bits, texts


def apart(what: str, one: Any, other: Any) -> str:
    """Return where a part of two proofs differs; empty where it does not."""
    if one == other:
        return ""
    if what == "error":
        return f"error {one} -> {other}"
    if one is None or other is None:
        return f"{what} came" if one is None else f"{what} vanished"
    if what == "history":
        steps = [{int(row["step"]): row for row in rows} for rows in (one, other)]
        first = next(step for step in sorted({*steps[0], *steps[1]}) if steps[0].get(step) != steps[1].get(step))
        what, (one, other) = f"history from step {first}", (rows.get(first, {}) for rows in steps)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    named = [name if what == "program" else f"{name} {one.get(name)} -> {other.get(name)}" for name in names[:3]]
    return f"{what}: {', '.join(named)}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def texts_of(package: Path) -> dict[str, str]:
    """Return the texts of a package that a user may read, each with the files that have it.

    They are those of `raise` and of what is said, and all others of three words and more but for docstrings: many a
    text is put together before it is raised. `{}` stands for what is filled in.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for text in texts_in(ast.parse(path.read_text())):
            found.setdefault(text, set()).add(path.relative_to(package).as_posix())
    return {text: ", ".join(sorted(files)) for text, files in found.items()}


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a module that a user may read."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, is_said = waiting.pop()
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_said = is_said or name in SAYS
        is_said = is_said or isinstance(node, ast.Raise)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        text = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            waiting += [(part, is_said) for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            waiting += [(child, is_said) for child in ast.iter_child_nodes(node)]
        if text is not None and len(text.split()) >= (1 if is_said else 3):
            yield text


if __name__ == "__main__":
    sys.exit(main())
