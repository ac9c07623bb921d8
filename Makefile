# `make demo` runs the main job on a fresh machine, `make test` passes the tests; each makes .venv itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick fuzz check bench docs clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/dp-ray run jobs/tutorial.yaml --workers 3 --shapes --name demo-tutorial --overwrite
	$(BIN)/dp-ray run jobs/digits_predict.yaml --workers 3 --name demo-digits --overwrite
	$(BIN)/dp-ray run jobs/digits.yaml --workers 2 --name demo-training --overwrite

test: .venv/installed
	$(BIN)/python -m pytest

quick: .venv/installed
	$(BIN)/python -m pytest -m 'not ray'

fuzz: .venv/installed
	$(BIN)/python -m pytest tests/test_fuzz.py --hypothesis-profile=fuzz

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m benchmarks

docs: .venv/installed
	$(BIN)/python docs/reference.py

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
