"""Source files that were edited after their modules were imported."""

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dp_ray.system import imports
from dp_ray.system.imports import Sources, imported_files, replaced_in_modules


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of three modules, from which this process imports."""
    (tmp_path / "edited_one.py").write_text("VALUE = 1\n")
    (tmp_path / "edited_two.py").write_text("import edited_one\nVALUE = edited_one.VALUE\n")
    (tmp_path / "edited_three.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("edited_one", "edited_two", "edited_three"):
        sys.modules.pop(name, None)


def edit(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(1, 1))  # another time than before, however fast this runs


def test_only_files_that_changed_since_they_were_noted_are_edited(folder: Path) -> None:
    importlib.import_module("edited_two")
    sources = Sources(folder)
    assert sources.edited() == []
    sources.note()
    sources.note()
    assert sources.edited() == []
    edit(folder / "edited_one.py", "VALUE = 2\n")
    assert sources.edited() == ["edited_one.py"]
    (folder / "edited_two.py").unlink()
    assert sources.edited() == ["edited_one.py", "edited_two.py"]


def test_what_is_forgotten_is_imported_anew_with_all_that_uses_it(folder: Path) -> None:
    assert importlib.import_module("edited_three").VALUE == 3
    assert importlib.import_module("edited_two").VALUE == 1
    sources = Sources(folder)
    sources.note()
    edit(folder / "edited_one.py", "VALUE = 22\n")
    sources.forget()
    assert sources.edited() == []
    assert "edited_three" in sys.modules, "it has nothing to do with the edited one"
    assert importlib.import_module("edited_two").VALUE == 22


def test_files_that_other_processes_imported_are_watched_too(folder: Path) -> None:
    first, second = folder / "edited_one.py", folder / "edited_two.py"
    for path in (first, second):
        os.utime(path, ns=(5, 5))
    sources = Sources(folder)
    sources.note()
    sources.note_imported([str(first), str(second), "/elsewhere/three.py", f"{folder}-elsewhere/four.py"])
    assert sources.edited() == []
    (folder.parent / f"{folder.name}-elsewhere").mkdir()
    (folder.parent / f"{folder.name}-elsewhere" / "four.py").touch()
    assert sources.edited() == []
    edit(second, "VALUE = 2\n")
    assert sources.edited() == ["edited_two.py"]


def test_a_file_that_was_edited_while_another_process_imported_it_counts_as_edited(folder: Path) -> None:
    sources = Sources(folder)
    sources.note()
    later = time.time_ns() + 10**9
    os.utime(folder / "edited_one.py", ns=(later, later))
    sources.note_imported([str(folder / "edited_one.py")])
    assert sources.edited() == ["edited_one.py"]


def test_of_what_this_process_imported_only_user_code_is_told(folder: Path) -> None:
    importlib.import_module("edited_two")
    told = set(imported_files())
    assert told >= {str(folder / "edited_one.py"), str(folder / "edited_two.py"), __file__}
    assert not told & {str(folder / "edited_three.py"), os.__file__, imports.__file__, pytest.__file__}


def test_of_files_that_were_sent_each_edit_counts_and_each_new_file(folder: Path) -> None:
    (folder / ".hidden").mkdir()
    sources = Sources(folder)
    sources.note_sent()
    assert sources.edited() == []
    edit(folder / "edited_three.py", "VALUE = 33\n")
    (folder / "new.py").touch()
    (folder / ".hidden" / "new.py").touch()
    assert sources.edited() == ["edited_three.py", "new.py"]


def test_modules_from_elsewhere_and_our_own_stay(folder: Path) -> None:
    import dp_ray.job.job

    sources = Sources(Path(dp_ray.job.job.__file__).parent)
    sources.note()
    sources.forget()
    assert sys.modules["dp_ray.job.job"] is dp_ray.job.job
    assert "torch" in sys.modules


def test_functions_and_classes_of_the_script_in_other_modules_are_named(
    folder: Path,
) -> None:
    (folder / "edited_three.py").write_text("class Kind:\n    def run(self): pass\ndef use(): pass\n")
    module: Any = importlib.import_module("edited_three")
    assert replaced_in_modules() == []
    mine: Any = type("Mine", (), {"__module__": "__main__", "run": lambda self: None})
    mine.run.__module__ = "__main__"
    module.use, module.Kind.run = mine, mine.run
    assert replaced_in_modules() == ["edited_three.Kind.run", "edited_three.use"]
