# One command each; CI runs the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
# Tests start hundreds of interpreters. Container images that forbid .pyc files would make each compile 200 modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: exact gpu demo test quick coverage others lint size bench matrix versions cluster docs docs-serve dist clean

demo: $(DEMO)  ## train a small CNN on handwritten digits with two DDP processes
	$(BIN)/legato fit configs/digits.yaml

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile

quick: $(STAMP)  ## run the tests that take less than half a second each
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile -m "not slow"

coverage: $(STAMP)  ## run all tests, and print the share of lines that they cover, by room
	$(BIN)/python -m pip install --quiet --constraint constraints.txt coverage
	$(BIN)/python .ci/coverage

others: $(VENV)/.others  ## install models, loaders and optimizers of other packages, and run the tests on them
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/with_others

lint: $(STAMP)  ## check formatting, imports, layers, types and changelog entries
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	.ci/types $(BIN)/python
	$(BIN)/python .ci/changes

size:  ## count lines of code by room, comments, and imports of a module
	$(PYTHON) .ci/size --rooms

bench: $(STAMP)  ## run the benchmarks in their quick form
	$(BIN)/python -m benchmarks

exact: $(STAMP)  ## compare each strategy, precision, model, option and break with one process, and write docs/exactness.md
	$(BIN)/python -m benchmarks.exact

gpu:  ## on a machine with torch and a GPU (no network needed): run the tests marked gpu, then benchmarks/gpu.py
	PYTHON=$(PYTHON) .ci/gpu $(GPU)

TORCH ?= 2.10 2.12 2.13 2.15
TESTS ?= tests
matrix:  ## run the tests on each torch version: make matrix, make matrix TORCH=2.15 TESTS=tests/strategies/test_mesh.py
	PYTHON=$(PYTHON) .ci/matrix $(TORCH) -- --numprocesses 2 --dist loadfile $(TESTS)

VERSIONS ?= lowest newest
versions:  ## run the quick tests with the lowest and the newest dependencies: make versions VERSIONS="lowest@python3.10 newest@python3.13"
	PYTHON=$(PYTHON) .ci/matrix $(VERSIONS) -- --numprocesses 2 --dist loadfile -m "not slow" $(TESTS)

docs: $(VENV)/.docs  ## build the documentation site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs  ## serve the site at http://127.0.0.1:8000 and rebuild it at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

cluster: $(STAMP)  ## install SLURM (Debian's, as root) and Ray on this machine, and run the launchers' tests on them
	PYTHON=$(BIN)/python .ci/cluster

TAG ?=
dist: $(STAMP)  ## build the source distribution and the wheel; TAG=v0.1.0 checks the version and the changelog first
	.ci/distributions $(BIN)/python $(TAG)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# constraints.txt pins the tested versions. On Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu selects
# the CPU build of torch, 754 MB instead of about 5 GB.
$(DEMO): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	touch $(DEMO)

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(STAMP)

$(VENV)/.others: $(STAMP) .ci/others
	.ci/others $(BIN)/python
	touch $(VENV)/.others

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	touch $(VENV)/.docs
