# `make test` is the whole check on a machine without a GPU: it makes its own environments and
# keeps them, up to date, for the next time. `make test-gpu` is the rest, on a machine with one.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu

# The oldest and the newest Triton that fagen speaks: environments without torch, named by release.
TRITON_36 := 3.6.0
TRITON_39 := 3.9.0
MATRIX := 36 39

# Test processes at a time: one for each core. JOBS=0 runs them all in one, for a debugger.
JOBS ?= auto
PYTEST := -m pytest -n $(JOBS) --dist worksteal

# Where `make test-gpu` writes its junit file and timing table.
OUT ?= build/gpu

.PHONY: help setup lint types test test-cpu test-interpret test-matrix test-gpu docs golden clean

help:
	@echo 'make test            everything that needs no GPU: lint types test-matrix test-interpret test-cpu'
	@echo 'make test-gpu        tests/gpu with the torch that is installed; results in OUT=$(OUT)'
	@echo 'make setup           only the environment ($(VENV))'
	@echo 'make docs            write the generated pages of docs/ again'
	@echo 'make golden          write tests/golden again; read the difference before you commit it'
	@echo 'make clean           remove environments and caches'

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements-cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fagen needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements-cpu.txt -e '.[dev]'
	@touch $@

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# The CPU tests come last, so that their closing line is what is read last.
test: lint types test-matrix test-interpret test-cpu

test-cpu: $(VENV)/.ready
	$(BIN)/python $(PYTEST) tests

# Triton decides at import whether it interprets, so these tests are a process of their own.
test-interpret: $(VENV)/.ready
	TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) tests/interpret

test-matrix: $(MATRIX:%=.venv-triton%/.ready)
	@for release in $(MATRIX); do \
	  TRITON_CACHE_DIR=.venv-triton$$release/cache PYTHONPATH=. \
	    .venv-triton$$release/bin/python -W error tests/compile_matrix/compile_all.py; \
	done

.venv-triton%/.ready: tests/compile_matrix/requirements.txt Makefile
	$(PYTHON) -m venv --clear .venv-triton$*
	.venv-triton$*/bin/python -m pip install --quiet triton==$(TRITON_$*) -r $<
	@touch $@

# Keeps the torch and Triton of the machine; PIP_NO_INDEX=1 PIP_FIND_LINKS=folder works offline.
$(GPU_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear --system-site-packages $(GPU_VENV)
	$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["test"], sep="\n")' > $(GPU_VENV)/requirements.txt
	$(GPU_VENV)/bin/python -m pip install --quiet -r $(GPU_VENV)/requirements.txt
	@touch $@

test-gpu: $(GPU_VENV)/.ready
	@mkdir -p $(OUT)
	FAGEN_REQUIRE_GPU=1 PYTHONPATH=. $(GPU_VENV)/bin/python -m pytest tests/gpu --durations=0 \
	  --junitxml=$(OUT)/junit.xml | tee $(OUT)/tests.txt

docs: $(VENV)/.ready
	$(BIN)/python docs/generate.py

golden: $(VENV)/.ready
	$(BIN)/python -m pytest tests --update-golden -k golden

clean:
	rm -rf $(VENV) $(GPU_VENV) $(MATRIX:%=.venv-triton%) build dist
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
