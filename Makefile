# Every target sets up what it needs: a virtual environment in .venv, once, and again when the pins change.
# `make test PYTHON=python3.12` takes another interpreter; 3.11 or newer.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

venv := .venv
bin := $(venv)/bin
ready := $(venv)/.ready
# 1,500 tests on two busy cores: two processes of one thread 67 s, one process of one thread 85 s, of two 133 s.
pytest := OMP_NUM_THREADS=1 $(bin)/python -m pytest

.PHONY: help demo test test-full test-gpu check bench soak mutants docs clean

help:
	@echo 'make demo       build, check and run an engine from a tiny random checkpoint, offline'
	@echo 'make test       run the tests'
	@echo 'make test-full  run them all, also those that take minutes'
	@echo 'make test-gpu   run those that need a GPU'
	@echo 'make check      lint and types'
	@echo 'make bench      measure every backend at full width and write docs/benchmarks.md; 45 minutes, twice that where torch is slow'
	@echo 'make soak       thousands of requests: memory flat, bad ones harm no others; many minutes'
	@echo 'make mutants    plant bugs and count those that parity catches; many minutes'
	@echo 'make docs       rewrite the generated parts of the documentation'
	@echo 'make clean      remove the virtual environment and build leftovers'

# torch first and by itself, so that pip settles on the pinned build before anything else asks for one.
$(ready): pyproject.toml setup.py tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make: $(PYTHON) is Python %d.%d; vlexport needs 3.11 or newer. Try: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet -c tests/constraints.txt torch setuptools
	$(bin)/python -m pip install --quiet -c tests/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: $(ready)
	$(bin)/vlexport demo

test: $(ready)
	$(pytest) -n 2

test-full: $(ready)
	$(pytest) -n 2 -m 'not gpu'

# On a machine with a GPU; elsewhere every test is listed as skipped, with what is missing.
test-gpu: $(ready)
	$(pytest) -m gpu

check: $(ready)
	$(bin)/ruff check .
	$(bin)/mypy

bench: $(ready)
	$(bin)/vlexport bench --page docs/benchmarks.md
	THP_MEM_ALLOC_ENABLE=1 $(bin)/python -m vlexport.bench.pruning --page docs/benchmarks.md --out benchmarks/pruning.json

# -rP: what passing tests say is what was measured.
soak: $(ready)
	$(pytest) tests/soak -m '' -rP

mutants: $(ready)
	$(bin)/python -m vlexport.parity.mutants --write docs/mutants.md

docs: $(ready)
	$(bin)/python -m vlexport.report.support_table README.md
	$(bin)/python -m vlexport.bench.exporters

clean:
	rm -rf $(venv) build dist vlexport.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
