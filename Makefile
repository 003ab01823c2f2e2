# `make` lists the targets. Everything is installed into .venv, pinned by constraints.txt; nothing else is touched.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# CUDA=12: for drivers of releases 525 to 579. Its packages lie apart, because CuPy for both is one package; what the
# tests need is the same for both, and they compile by both.
OF_TESTS := lint test collected test-long test-faults coverage bench-small-jobs bench-doors vendor-libraries test-wheel wheel
ifeq ($(CUDA),12)
ifeq ($(filter $(OF_TESTS),$(MAKECMDGOALS)),)
export CUKILN_CUDA := 12
FOR_CUDA := -cuda12
endif
endif
VENV := .venv$(FOR_CUDA)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --quiet --constraint constraints.txt

# The first Python on the PATH that is new enough: a machine's python3 may be older than a python3.12 beside it.
FOUND_PYTHON = $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
PYTHON ?= $(FOUND_PYTHON)

# `make offline-wheels PYTHON=3.12` names another machine's Python, not the one that works here.
WHEELS_FOR := $(or $(filter 3.1%,$(PYTHON)),3.12)
ifneq ($(filter 3.1%,$(PYTHON)),)
override PYTHON := $(FOUND_PYTHON)
endif
# Every name of a Linux whose C library is 2.28 or newer: pip does not derive which contain each other.
WHEEL_PLATFORMS := manylinux1 manylinux2010 manylinux2014 manylinux_2_5 manylinux_2_12 manylinux_2_17 manylinux_2_24 \
	manylinux_2_26 manylinux_2_27 manylinux_2_28
OFFLINE := build/offline-wheels
# Of `make carry`.
REQUEST := examples/quickstart.json
TARGET := sm_90a
PART_BYTES := 16M
OUT := build/elsewhere

# The driver's device file is there in containers that have no nvidia-smi, and the other way round.
GPU := $(shell { test -e /dev/nvidiactl || nvidia-smi -L >/dev/null 2>&1; } && echo gpu)
SERVER_GROUPS := --group postgres --group toolchain$(FOR_CUDA) $(if $(GPU),--group gpu$(FOR_CUDA))

# The stamps' names say what is installed, so that a GPU that appears later is noticed.
RUN_STAMP := $(VENV)/.installed$(if $(GPU),-gpu)
DEV_STAMP := $(VENV)/.installed-dev
# A second reference for the tests, without the gigabytes of its GPU build. Not every index has it: they skip without it.
TORCH := torch==2.13.0+cpu
# A model of tensor cores, on PyTorch; without its dependencies, which would bring PyTorch's build for GPUs.
MMASIM := mmasim==2.1.1
TORCH_STAMP := $(VENV)/.tried-torch

# What tests of the vendor's libraries load, which takes no GPU: 1.5 GB. Where the index is slow, they skip without it.
VENDOR := nvidia-cuda-nvrtc nvidia-cublas nvidia-cudnn-cu13 nvidia-cudnn-frontend
VENDOR_STAMP := $(VENV)/.tried-vendor
VENDOR_WHEELS := build/vendor-wheels
VENDOR_SECONDS := 180

# Five processes for two cores, because each waits at times, with whole files: their fixtures compile.
# `make test PYTEST_ARGS="-n 0"` takes one after the other.
PYTEST_ARGS ?=
TEST_PROCESSES := $(shell echo $$(( $$(nproc) * 5 / 2 )))
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --maxprocesses 8 --durations=25 --dist loadfile --no-loadscope-reorder

.PHONY: help run test test-long test-faults test-gpu coverage lint serve bench-overhead bench-compile bench-fairness bench-lookup bench-client bench-small-jobs bench-doors bench-accuracy bench-prediction bench-verify bench-tune bench-model bench-kernels vendor-libraries carry offline-wheels wheel test-wheel clean host collected

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: host $(RUN_STAMP) ## start the service, tune examples/quickstart.json, show the winners, stop everything
	@$(BIN)/cukiln quickstart

# Tests start GPU workers only where they ask for one: what passes does not depend on the machine.
test test-long coverage: export CUKILN_GPUS := none
# Half of collecting is to compile the tests and rewrite their assertions: what one run made of them the next one reads.
test test-long coverage collected: export PYTHONDONTWRITEBYTECODE :=

# Beside mypy, which has one core: one process makes what all of the tests' would. They say what is wrong with them.
collected: $(TORCH_STAMP)
	@$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS) -n 0 --collect-only >/dev/null || true

# A test that is run again alone has the random cases that it failed with.
ifndef CUKILN_TEST_SEED
export CUKILN_TEST_SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif

test: host $(RUN_STAMP) $(TORCH_STAMP) ## lint, then every test but the long ones
	@$(MAKE) --no-print-directory -j2 lint collected
	@rm -f .pytest_cache/v/cache/lastfailed
	@$(PYTEST) -m "not long" $(PYTEST_ARGS) || { test $$? = 1 && $(BIN)/python -m tests.support.run.again_alone; }

test-long: export CUKILN_TEST_ROWS := none
test-long: host $(RUN_STAMP) $(DEV_STAMP) $(TORCH_STAMP) $(VENDOR_STAMP) ## the tests that take minutes, and those of the vendor's libraries
	@$(PYTEST) -m long $(PYTEST_ARGS)
	@$(PYTEST) -m "not long" tests/of_workers/vendor $(PYTEST_ARGS)

test-faults: host $(RUN_STAMP) $(DEV_STAMP) ## kill the processes of a real service at random: 300 of them over 20 jobs; the last line is JSON
	@$(BIN)/python -m tests.faults

test-gpu: host $(RUN_STAMP) ## on this machine's GPU: each primitive beside its CPU emulation (writes codegen/device/confirmed.json), measuring, workspaces, promised outputs
	@status=0; for script in confirm_primitives check_measuring check_workspaces check_promises; do \
		$(BIN)/python -m tests.gpu.$$script || status=$$?; done; exit $$status

coverage: host $(RUN_STAMP) $(DEV_STAMP) $(TORCH_STAMP) ## branch coverage of the packages, at least 85 %
	@$(PYTEST) -m "not long" --cov --cov-report=term --cov-fail-under=85 $(PYTEST_ARGS)
	@rm -f .coverage .coverage.*

lint: host $(RUN_STAMP) $(DEV_STAMP) ## ruff, mypy --strict, the allowed imports
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > $(VENV)/.imports.log || { cat $(VENV)/.imports.log; exit 1; }
	@echo "lint: ruff, mypy and import rules are clean"

serve: host $(RUN_STAMP) ## the service on its embedded defaults, until Ctrl-C
	@$(BIN)/cukiln serve

bench-overhead: host $(RUN_STAMP) ## what the service adds to the compilers' own time; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_overhead

bench-compile: host $(RUN_STAMP) ## grouped device-only compilation against one .so per kernel, and against the floor; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_compile

bench-fairness: host $(RUN_STAMP) ## whether large jobs hold up small ones; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_fairness

bench-lookup: host $(RUN_STAMP) ## how fast winners are looked up beside 100,000, alone and while compilers run; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_lookup

bench-client: host $(RUN_STAMP) ## what the client costs its caller: hits, from the disk too, a dead service, the import; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_client

bench-small-jobs: host $(DEV_STAMP) ## what many small jobs cost that arrive at once; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_small_jobs

bench-doors: host $(DEV_STAMP) ## whether the API answers beside 2,000 slow connections and bodies of 8 MB; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_doors

bench-accuracy: host $(RUN_STAMP) ## how far kernels are from float64, by dtype and length of the sum; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_accuracy

bench-prediction: host $(RUN_STAMP) ## the prediction beside published runs of others' kernels; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_prediction

bench-verify: host $(RUN_STAMP) ## CPU seconds that proving a candidate takes; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_verify_cpu

bench-tune: host $(RUN_STAMP) ## wall time to tune all public matmul shapes; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_tune

bench-model: host $(RUN_STAMP) ## BERT-base and Llama-3-8B tuned with kernels in groups and with a file for each; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_tune --models --level 2

bench-kernels: host $(RUN_STAMP) ## our kernels for the public shapes against the vendor's on this GPU; the last line is JSON
	@$(BIN)/python -m benchmarks.bench_kernels

vendor-libraries: $(VENDOR_STAMP) ## install cuBLAS and cuDNN (1.5 GB), which their tests call without a GPU

carry: host $(RUN_STAMP) offline-wheels ## pack what measures REQUEST on a machine with a GPU (TARGET) and no network, in parts of PART_BYTES; PYTHON=3.12: that machine's
	@$(BIN)/cukiln export-bundle $(REQUEST) --compile-only --target $(TARGET) --part-bytes $(PART_BYTES) --wheels $(OFFLINE) --out $(OUT)

offline-wheels: $(VENV)/.made ## of `carry`: the packages that such a machine lacks
	@rm -rf $(OFFLINE)
	@$(BIN)/python -m pip --disable-pip-version-check --no-input download --quiet --quiet --constraint constraints.txt \
		--group elsewhere --no-deps --only-binary :all: --python-version $(WHEELS_FOR) \
		$(WHEEL_PLATFORMS:%=--platform %_x86_64) --dest $(OFFLINE)
	@echo "$(OFFLINE): $$(ls $(OFFLINE) | wc -l) wheels for Python $(WHEELS_FOR), $$(du -sh $(OFFLINE) | cut -f1)"

wheel: $(VENV)/.made pyproject.toml ## the client as a wheel and an sdist, in dist/
	@$(PIP) build
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . >$(VENV)/.wheel.log 2>&1 || { cat $(VENV)/.wheel.log; exit 1; }
	@ls dist

test-wheel: $(DEV_STAMP) ## the client's tests over the wheel alone, and with each extra, in new environments of every Python that is here
	@$(BIN)/python -m tests.wheel "$(TORCH)"

clean: ## remove what make made: .venv, .cukiln (the data folder), test artifacts, caches
	rm -rf .venv .venv-cuda12 .cukiln .test-artifacts build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find client codegen docker storage workers service tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

host:
	@command -v g++ >/dev/null || { \
		echo "cukiln needs g++, the compiler of the kernels' host side. Debian, Ubuntu: apt install g++" >&2; exit 1; }

$(VENV)/.made: constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "cukiln needs Python 3.11 or later. Debian, Ubuntu: apt install python3 python3-venv; else make PYTHON=/path" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@# One of another Python may be there, which would not be made anew.
	@$(PYTHON) -m venv --clear $(VENV)
	@# An older pip has no dependency groups; hatchling and editables are what the editable install builds with.
	@$(PIP) pip hatchling editables
	@touch $@

$(RUN_STAMP): $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing the service and $(if $(FOR_CUDA),NVRTC 12,nvcc)$(if $(GPU), and the GPU packages) (first time only)"
	@$(PIP) --no-build-isolation --editable ".[server]" $(SERVER_GROUPS)
	@touch $@

$(DEV_STAMP): $(RUN_STAMP) pyproject.toml constraints.txt
	@echo "installing the tests' tools (first time only)"
	@$(PIP) --group dev
	@touch $@

$(TORCH_STAMP): $(DEV_STAMP)
	@echo "installing PyTorch for CPUs, which tests compare with (first time only)"
	@$(PIP) "$(TORCH)" 2>/dev/null || echo "this package index has no $(TORCH): tests that compare with PyTorch are skipped"
	@$(PIP) --no-deps "$(MMASIM)" 2>/dev/null || echo "this package index has no $(MMASIM): tests that compare with it are skipped"
	@touch $@

$(VENDOR_STAMP): $(DEV_STAMP)
	@echo "installing cuBLAS and cuDNN, which tests call (first time only)"
	@rm -rf $(VENDOR_WHEELS)
	@timeout $(VENDOR_SECONDS) $(BIN)/python -m pip --disable-pip-version-check --no-input download --quiet --quiet \
		--constraint constraints.txt --no-deps --dest $(VENDOR_WHEELS) $(VENDOR) \
		&& $(PIP) --no-deps --no-index $(VENDOR_WHEELS)/*.whl && touch $@ \
		|| echo "they were not installed: tests that call them are skipped"
	@rm -rf $(VENDOR_WHEELS)
