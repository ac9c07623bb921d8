"""The program `dp-ray`, as a function of the test's own process."""

import sys

import pytest

from dp_ray.cli import main


def status_of(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The exit status of the program, run in this process."""
    monkeypatch.setattr(sys, "argv", ["dp-ray", *args])
    try:
        main.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0
