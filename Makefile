# make [install] | demo | demo-localization | test | bench | lint. Each makes .venv when it is missing and installs the package
# again when sources changed.
#
# TORCH is what pip installs: `make test TORCH=torch==2.13.0`, or the path of a wheel.
# PYTHON is the interpreter that .venv is made from.

TORCH ?= torch>=2.10
PYTHON ?= python3

python := .venv/bin/python
pip := $(python) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore
sources := CMakeLists.txt $(shell find csrc kernels ops python -type f -not -path '*/__pycache__/*')
c_files = $(wildcard csrc/*.[ch] csrc/*.cpp kernels/*.[ch] kernels/*.cu kernels/*.cuh tests/*.cpp tests/emulation/*.*)

.PHONY: install demo demo-localization test bench lint
.DELETE_ON_ERROR:

install: .venv/installed

demo: .venv/installed
	$(python) training/bearings_only.py demo

demo-localization: .venv/installed
	$(python) training/localization.py demo

test: .venv/installed
	$(python) -m pytest -m "not slow"

bench: .venv/installed
	$(python) tests/bench

lint: .venv/installed .venv/lint
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(c_files)
	$(python) -m mypy -p mdps

# The build runs in .venv, without isolation: build/ is kept, so that only what changed is compiled again. Where nvcc is found it
# has the CUDA kernels, for which pip's nvidia-curand has the headers.
.venv/installed: .venv/ready $(sources)
	@echo "mdps: installing the package into .venv"
	@$(pip) --no-build-isolation --no-deps --force-reinstall .
	@touch $@

.venv/ready: pyproject.toml
	@command -v $${CC:-cc} > /dev/null && command -v $${CXX:-c++} > /dev/null || { \
	    echo "mdps: no C compiler: apt-get install build-essential python3-dev python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	    echo "mdps: no Python with venv: apt-get install python3-dev python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { \
	    echo "mdps: no Python headers: apt-get install python3-dev" >&2; exit 1; }
	@echo "mdps: making .venv with $(TORCH) and what pyproject.toml asks for"
	@$(PYTHON) -m venv .venv
	@$(pip) "$(TORCH)" "scikit-build-core>=0.11" "pybind11>=2.13" cmake ninja nvidia-curand
	@$(pip) --no-build-isolation ".[train,localization,test]"
	@touch $@

.venv/lint: .venv/ready
	@$(pip) --no-build-isolation ".[lint]"
	@touch $@
