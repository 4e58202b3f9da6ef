# `make help` lists the commands.  To be set as in `make test PYTHON=python3.12`:
#   PYTHON  the interpreter of the virtual environment; the first here that is new enough, if not set
#   VENV    where the virtual environment is
#   TORCH   what pip installs where torch is absent; tests and demo need no more than a CPU build
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help test lint demo docs clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make test    virtual environment, install, the test suite"
	@echo "make lint    virtual environment, install, ruff and mypy"
	@echo "make demo    virtual environment, install, digits with wagma beside DDP"
	@echo "make docs    virtual environment, install, the documents as a site: build/site/index.html"
	@echo "make clean   remove the virtual environment, caches and the demo's output"

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist demo_output .mypy_cache .pytest_cache .ruff_cache
	find lightning_dsgd tests examples -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and not found (python3: $$(python3 --version 2>&1));" \
		"name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp: a second call installs nothing, unless the dependencies have changed.
$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev,demo,docs,mpi]'
	@touch $@
