"""The names that docs/versions.md promises: a change here is one that users see, and belongs into the CHANGELOG."""

import dataclasses
import inspect
import subprocess
import sys

import pytest

import dp_ray
import dp_ray.data
from dp_ray import errors
from dp_ray.cli.main import cli
from tests.support.cluster import ROOT

RESULT = (
    *("run_dir", "name", "task", "status", "rows", "steps", "epochs", "total_steps", "batch_size", "shards"),
    *("batch_dim", "world_sizes", "workers", "restarts", "interruptions", "metrics", "quarantined", "seconds"),
    *("seconds_before_steps", "seconds_after_steps", "data_wait_share", "time_split", "verdict", "flops_per_row"),
    *("mfu", "outputs_path", "outputs_sha256", "weights_path", "weights_sha256", "best", "ema", "stopped_early"),
    *("error", "failure", "location"),
)
# Beside the fields: what reads the files of the run.
READS = (
    *("batches", "carried", "ema_weights", "history", "iter_shapes", "outputs", "outputs_so_far", "sample_index"),
    *("save", "shape_lines", "shapes", "storage", "to_json", "weights"),
)
OF_DATA = {
    "Arrow": ["paths", "columns", "decode", "cache_bytes"],
    "Csv": ["paths", "columns", "types", "decode", "delimiter", "names", "cache_bytes"],
    "Images": ["paths", "classes", "height", "width", "class_names"],
    "JsonLines": ["paths", "columns", "types", "decode", "cache_bytes"],
    "Mix": ["sources", "weights", "stop", "fields"],
    "Parquet": ["paths", "columns", "decode", "cache_bytes"],
    "Stream": ["iterable", "rows", "decode", "files", "batch_size", "shards"],
    "Tokens": ["paths", "length", "column", "dtype", "cache_bytes"],
    "WebDataset": ["paths", "columns", "decode", "cache_bytes"],
    "cu_seqlens": ["document_ids"],
    "document_mask": ["document_ids"],
    "float_image": ["value"],
    "image": ["value", "size"],
}
# Each error's base, and the exit status of the program that ends by it.
ERRORS = {
    "Error": ("Exception", 1),
    "JobError": ("Error", 2),
    "ClusterError": ("Error", 1),
    "ClusterLost": ("ClusterError", 75),
    "DataError": ("Error", 1),
    "ModelError": ("Error", 1),
    "StorageError": ("Error", 1),
    "WorkerError": ("Error", 1),
    "RunInterrupted": ("KeyboardInterrupt", 130),
}
COMMANDS = (
    *(
        "run",
        "plan",
        "verify",
        "sweep",
        "evaluate",
        "predict",
        "retry",
        "report",
        "list",
        "compare",
        "watch",
        "track",
    ),
    *("replay", "schema", "submit", "status", "logs", "stop"),
    *("init", "fetch", "node", "slurm", "kuberay", "completion"),
)


def test_the_functions_of_dp_ray() -> None:
    taken = {name: str(inspect.signature(getattr(dp_ray, name))) for name in ("run", "load", "session", "devices")}
    assert taken["run"].startswith("(job: ") and "/, **keys: Any)" in taken["run"]
    assert taken["load"].startswith("(run_dir: ")
    options = [parameter for parameter in inspect.signature(dp_ray.session).parameters if parameter != "keys"]
    assert options == ["address", "idle_seconds", "quiet", "verbose"]
    assert taken["devices"] == "() -> list[torch.device]"


def test_a_result_has_its_fields_and_what_reads_the_files() -> None:
    assert tuple(field.name for field in dataclasses.fields(dp_ray.Result)) == RESULT
    assert {name for name in vars(dp_ray.Result) if not name.startswith("_")} - set(RESULT) == set(READS)


def test_a_session_runs_jobs() -> None:
    assert all(callable(getattr(dp_ray.Session, name)) for name in ("run", "close", "__enter__", "__exit__"))


def test_the_datasets() -> None:
    assert sorted(dp_ray.data.__all__) == sorted(OF_DATA)
    assert {name: list(inspect.signature(getattr(dp_ray.data, name)).parameters) for name in OF_DATA} == OF_DATA


def test_import_dp_ray_is_enough_for_the_datasets_and_the_errors() -> None:
    named = ["dp_ray.data.Stream", "dp_ray.data.image", "dp_ray.errors.JobError"]
    code = f"import dp_ray; print(*(one.__name__ for one in ({', '.join(named)})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [one.rpartition(".")[2] for one in named]


def test_the_errors() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    found = {
        name: (value.__mro__[1].__name__, getattr(value, "exit_status", None)) for name, value in classes.items()
    }
    assert found == ERRORS
    assert dp_ray.Error is errors.Error


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands(command: str) -> None:
    assert command in cli.commands


def test_the_page_of_versions_names_them() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"`{name}`" in page for name in (*dp_ray.__all__, *dp_ray.data.__all__, *ERRORS, *COMMANDS))
