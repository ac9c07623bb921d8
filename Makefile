# `make demo` runs the main job on a fresh machine, `make test` passes the tests; each makes .venv itself.
# Any target with another Ray, in an environment of its own: `make ray RAY=2.61.0` (CONTRIBUTING.md).
PYTHON ?= python3
VENV := .venv$(if $(RAY),-ray-$(RAY))
BIN := $(VENV)/bin
# Two processes, each with whole files.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
# Tests on Ray that take a cluster apart, or start several hosts; the others share a cluster.
FAULTS := tests/test_faults.py tests/test_hosts.py
ANOTHER_RAY = ray[default,train]==$(RAY)
ifneq ($(RAY),)
export DP_RAY_TRY_RAY := $(RAY)
endif

# Else each of a thousand processes compiles dp_ray's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test below-ray on-ray with-faults quick gpu ray fuzz check bench docs clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(if $(RAY),$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(ANOTHER_RAY)')
	touch $@

demo: $(VENV)/installed
	$(BIN)/dp-ray run jobs/tutorial.yaml --workers 3 --shapes --name demo-tutorial --overwrite
	$(BIN)/dp-ray run jobs/digits_predict.yaml --workers 3 --name demo-digits --overwrite
	$(BIN)/dp-ray run jobs/digits.yaml --workers 2 --name demo-training --overwrite

# Three parts at once, since a test on Ray waits for half of its time. Each part prints when it has ended.
test: $(VENV)/installed
	@echo "tests below Ray, on Ray, and with faults run at once, for some ten minutes; each part prints at its end"
	+@$(MAKE) --no-print-directory --jobs=3 $(if $(filter output-sync,$(.FEATURES)),--output-sync) below-ray on-ray with-faults

below-ray on-ray with-faults: $(VENV)/installed

below-ray:
	$(BIN)/python -m pytest -m 'not ray'

on-ray:
	$(BIN)/python -m pytest -m ray $(addprefix --ignore=,$(FAULTS))

with-faults:
	$(BIN)/python -m pytest -m ray $(FAULTS)

quick: $(VENV)/installed
	$(BIN)/python -m pytest -m 'not ray and not slow' $(TWO)

gpu: $(VENV)/installed
	$(BIN)/python -m pytest tests/gpu

ray: $(VENV)/installed
	$(BIN)/python -m pytest tests/test_ray_internals.py

fuzz: $(VENV)/installed
	$(BIN)/python -m pytest tests/test_fuzz.py --hypothesis-profile=fuzz

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/installed
	$(BIN)/python docs/reference.py

clean:
	rm -rf .venv .venv-ray-* runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
