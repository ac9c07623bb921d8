"""Between Arrow and numpy without pandas, held against pyarrow's own functions."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.tables import array_of, array_of_some, array_of_texts, numbers, table_of_rows
from tests.support.drivers import job_file

DTYPES = [bool, np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64]
INTS, FLOATS = st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_a_vector_is_the_array_that_pyarrow_makes(dtype: Any, length: int) -> None:
    values = (np.random.default_rng(0).standard_normal(2 * length) * 50).astype(dtype)[::2]
    made = array_of(values)
    made.validate(full=True)
    assert made.equals(pa.array(values))


@given(st.lists(st.text(max_size=5), max_size=20))
def test_texts_are_the_array_that_pyarrow_makes(texts: list[str]) -> None:
    made = array_of_texts(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


@given(st.one_of(st.lists(st.none() | INTS, max_size=20), st.lists(st.none() | FLOATS, max_size=20)), st.booleans())
def test_numbers_of_which_some_are_missing_are_the_array_that_pyarrow_makes(values: list[Any], whole: bool) -> None:
    is_int = all(isinstance(value, int) for value in values if value is not None)
    kind = pa.int64() if is_int else pa.float64()
    values = [value for value in values if value is not None or not whole]
    made = array_of_some(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))


def test_a_fraction_is_not_cut_to_a_whole_number() -> None:
    with pytest.raises(TypeError, match=r"float64.*int64"):
        array_of_some([1, 2.5], pa.int64())


def test_rows_are_the_table_that_pyarrow_makes() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "loss": 0.5},
        {"step": 1, "loss": float("nan"), "eval_loss": 2},
        {"step": 2, "loss": None},
    ]
    schema = pa.schema([("step", pa.int64()), ("loss", pa.float64()), ("eval_loss", pa.float64())])
    made, rays = table_of_rows(rows, schema), pa.Table.from_pylist(rows, schema)
    assert made.schema == rays.schema
    assert repr(made.to_pylist()) == repr(rays.to_pylist())  # a NaN does not equal itself
    assert numbers(made["step"]).tolist() == [0, 1, 2]


@pytest.mark.full
@pytest.mark.slow
def test_runs_import_no_pandas(tmp_path: Path, in_project: Path) -> None:
    """A training and a prediction in this process: what workers and drivers do."""
    keys = {"workers": 0, "storage": str(tmp_path), "quiet": True}
    code = f"""
import sys, dp_ray
trained = dp_ray.run("{job_file(tmp_path)}", name="trained", **{keys})
done = dp_ray.run("jobs/tutorial.yaml", name="done", **{keys})
assert done.rows == 100 and trained.history
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
