# `make demo` runs the main job on a fresh machine, `make test` passes the tests; each makes .venv itself.
# Any target with another Ray, in an environment of its own: `make ray RAY=2.61.0` (docs/contributing/ray.md).
PYTHON ?= python3
VENV := .venv$(if $(RAY),-ray-$(RAY))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Three processes, each with whole files: some tests wait.
FILES := -n 3 --dist loadfile --no-loadscope-reorder
FUZZED := $(addprefix tests/engine/,test_fuzz.py test_fuzz_around.py sharded/test_constructors.py)
FUZZED += $(addprefix tests/data/test_,damaged_data.py files.py bad_records.py)
FUZZED += tests/data/test_on_s3.py::test_files_of_a_store_are_named_by_the_same_rule
# The kernels that any x86 processor has: those of torch, of oneDNN (convolutions) and of MKL (products of
# matrices; MKL_ENABLE_INSTRUCTIONS does nothing on processors of AMD).
LOWEST := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
# torch.compile would take code for a newer processor from its usual folder, and fail.
LOWEST += TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/compiled-lowest
TIER := full or not full
COMMIT := $(shell git rev-parse HEAD 2>/dev/null)
BEGUN := $(shell date +%s)
ANOTHER_RAY = ray[default,train]==$(RAY)
ifneq ($(RAY),)
export DP_RAY_TRY_RAY := $(RAY)
endif

# Else each of a thousand processes compiles dp_ray's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test full eighth release below on-ray lowest quick places gpu sim ray fuzz check bench docs site lock dist matrix mutants proofs clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt 'pip>=25.1'
	$(PIP) -c constraints.txt -e . --group dev
	$(if $(RAY),$(PIP) '$(ANOTHER_RAY)')
	touch $@

demo: $(VENV)/installed
	$(BIN)/dp-ray run jobs/tutorial.yaml --workers 3 --shapes --name demo-tutorial --overwrite
	$(BIN)/dp-ray run jobs/digits_predict.yaml --workers 3 --name demo-digits --overwrite
	$(BIN)/dp-ray run jobs/digits.yaml --workers 2 --name demo-training --overwrite

# What a change needs. One part after the other: at the same time they take as long on two cores, and some on Ray time out.
test: $(VENV)/installed
	rm -f build/durations.txt
	$(MAKE) --no-print-directory below on-ray TIER='not full'

# All tests but `places`, with other drawn examples each time.
full: $(VENV)/installed
	rm -f build/durations.txt
	$(MAKE) --no-print-directory below on-ray DRAWN=--hypothesis-profile=full
	$(BIN)/python -m tools.full_passed keep $(COMMIT) $(BEGUN)

# What `test` leaves out, in eight parts: CI runs one beside `test`, in turns.
eighth: $(VENV)/installed
	$(MAKE) --no-print-directory below on-ray TIER=full DRAWN=--eighth=$(PART)

release: $(VENV)/installed
	$(MAKE) --no-print-directory full
	$(MAKE) --no-print-directory places
	$(MAKE) --no-print-directory lowest
	$(MAKE) --no-print-directory fuzz
	$(MAKE) --no-print-directory matrix

below: $(VENV)/installed
	$(BIN)/python -m pytest -m '($(TIER)) and not ray and not places' $(FILES) $(DRAWN)

# Only files with such tests are imported.
on-ray: $(VENV)/installed
	$(BIN)/python -m pytest -m '($(TIER)) and ray and not places' -n 2 --dist loadgroup $(DRAWN) $$(grep -rl --include='test_*.py' --exclude-dir=gpu mark.ray tests)

# As `full`: what needs the bits of a newer processor fails here.
lowest: $(VENV)/installed
	$(LOWEST) $(BIN)/python -c 'from torch.backends import cpu; assert cpu.get_cpu_capability() == "DEFAULT"'
	$(LOWEST) $(MAKE) --no-print-directory below on-ray

quick: $(VENV)/installed
	$(BIN)/python -m pytest -m 'not ray and not slow and not full and not places' $(FILES)

# One after the other: each has Rays of its own.
places: $(VENV)/installed
	$(BIN)/python -m pytest tests/places --durations=10

gpu: $(VENV)/installed
	$(BIN)/python -m pytest tests/gpu --durations=20

sim: $(VENV)/installed
	$(BIN)/python -m pytest tests/sim

ray: $(VENV)/installed
	$(BIN)/python -m pytest $(addprefix tests/cluster/test_,ray_internals.py failed_collectives.py) tests/driver/test_survivors.py

fuzz: $(VENV)/installed
	$(BIN)/python -m pytest $(FUZZED) --hypothesis-profile=fuzz

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.full_passed

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/installed
	$(BIN)/python docs/reference.py

# Into build/site; a warning is an error. The pages' snippets are run by `make test`, which needs none of this.
site: $(VENV)/installed
	$(PIP) -c constraints.txt -e '.[site]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/site

# UPGRADE="NAME..." or UPGRADE=all takes newer versions.
lock: $(VENV)/installed
	$(BIN)/python tools/lock.py $(UPGRADE)

# The same bytes each time: all files in them have the last commit's time.
dist: $(VENV)/installed
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build

# Minutes and gigabytes: the quick start from the wheel, in a fresh environment for each Python and torch.
matrix: dist
	$(BIN)/python -m tools.matrix $(ONLY)

# Ten minutes and more: forty things broken, one at a time, for each of which a test must fail. ONLY="lease drawn" runs some.
mutants: $(VENV)/installed
	$(BIN)/python -m tools.mutants $(ONLY)

# Minutes: whether this checkout gives the bits of BASE, a commit or a kept file. ONLY="kill fsdp" runs some cases.
proofs: $(VENV)/installed
	$(BIN)/python -m tools.proofs $(BASE) $(ONLY)

clean:
	rm -rf .venv .venv-ray-* dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
