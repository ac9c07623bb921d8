"""Modules that are imported only when they are used, and what a worker's process does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fresh import loaded_by

PACKAGE = {
    "heavy/__init__.py": "print('imported heavy')\nvalue = 7\n",
    "heavy/part.py": "value = 8\n",
    "heavy/deep/__init__.py": "print('imported deep')\n",
    "heavy/deep/part.py": "class Kind:\n    name = 'kind'\ndef make(): return Kind()\n",
    "user.py": "import heavy\ndef use(): return heavy.value\n",
    "namer.py": (
        "from typing import Optional, Union\n"
        "from heavy.deep.part import Kind, make\n"
        "def take(one: Kind | None, other: Union[int, Kind]) -> Optional[Kind]: return one\n"
        "def use(): return make(), Kind.name, isinstance(make(), Kind), isinstance(3, Kind)\n"
    ),
}


def said_by(folder: Path, code: str) -> list[str]:
    for name, source in PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(source)
    code = "from dp_ray.system.imports import postponed\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.splitlines()


def test_a_postponed_module_is_imported_when_it_is_first_used(tmp_path: Path) -> None:
    code = "with postponed('heavy'): import user\nprint('before'); print(user.use(), user.use())"
    assert said_by(tmp_path, code) == ["before", "imported heavy", "7 7"]


def test_after_the_block_an_import_is_as_ever(tmp_path: Path) -> None:
    code = "with postponed('heavy'): import user\nimport heavy; print(heavy.value, type(heavy).__name__)\n"
    code += "import sys; print(user.use(), sys.modules['heavy'] is heavy)"
    assert said_by(tmp_path, code) == ["imported heavy", "7 module", "7 True"]


def test_names_of_a_postponed_modules_submodules_are_imported_when_they_are_used(tmp_path: Path) -> None:
    code = "with postponed('heavy'): import namer\nprint('before'); print(*namer.use()[1:])\n"
    code += "import heavy, namer, sys; print(heavy.value, isinstance(heavy.deep.part.make(), namer.Kind))"
    assert said_by(tmp_path, code) == ["before", "imported heavy", "imported deep", "kind True False", "7 True"]


def test_nothing_of_a_postponed_module_is_left_where_it_was_not_used(tmp_path: Path) -> None:
    code = "import sys\nwith postponed('heavy.deep'): import heavy.deep.part, namer\n"
    code += "print([name for name in sys.modules if 'deep' in name], hasattr(heavy, 'deep'))\n"
    code += "import heavy.deep; print(type(heavy.deep).__name__)"
    assert said_by(tmp_path, code) == ["imported heavy", "[] False", "imported deep", "module"]


def test_what_is_imported_already_or_is_not_there_is_left_alone(tmp_path: Path) -> None:
    code = "import heavy, sys\nwith postponed('heavy', 'no_such_module'): print(sys.modules['heavy'] is heavy)\n"
    code += "print('no_such_module' in sys.modules)"
    assert said_by(tmp_path, code) == ["imported heavy", "True", "False"]


@pytest.mark.full
@pytest.mark.slow
def test_a_workers_process_imports_no_library_that_only_ray_data_uses() -> None:
    code = "import dp_ray.cluster.internals.train_worker, dp_ray.cluster.worker, sys\n"
    loaded = loaded_by(code + "assert 'ray.data' not in sys.modules")
    assert "torch" in loaded
    assert "pandas" not in loaded


@pytest.mark.full
@pytest.mark.slow
def test_code_of_the_user_in_a_worker_finds_the_libraries_themselves() -> None:
    code = "import dp_ray.cluster.internals.train_worker\nimport pandas, ray.data, ray.air.result\n"
    code += "assert pandas.DataFrame is ray.air.result.pd.DataFrame\n"
    code += "assert ray.data.Dataset is ray.data.dataset.Dataset"
    assert "pandas" in loaded_by(code)


@pytest.mark.full
@pytest.mark.slow
def test_a_driver_imports_tensorboard_only_for_a_training() -> None:
    assert "tensorboardX" not in loaded_by("import dp_ray.driver.run")
