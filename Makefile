# `make help` lists the commands.  To be set as in `make test PYTHON=python3.12`:
#   PYTHON  the interpreter of the virtual environment; the first here that is new enough, if not set
#   VENV    where the virtual environment is
#   LIGHTNING  a clone of Lightning's repository, for `make test-programs`
#   TORCH   what pip installs where torch is absent; tests and demo need no more than a CPU build
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
SEED ?= 0
FAULTS ?=
LIGHTNING ?=
PROGRAMS ?= chemprop,litgpt,darts,scvi-tools
JOBS ?= 1

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
# Apart from the others: torchmetrics imports transformers, if it is there, wherever Lightning is imported,
# which costs every process of the tests 1.5 seconds.
PEFT := $(VENV)/peft
PEFT_INSTALLED := $(PEFT)/.installed
TRACKERS := $(VENV)/trackers
TRACKERS_INSTALLED := $(TRACKERS)/.installed
RAY := $(VENV)/ray
RAY_INSTALLED := $(RAY)/.installed

.PHONY: help test test-all test-peft test-trackers test-slurm test-ray test-stops test-faults test-programs test-others test-versions lint demo docs clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make test      virtual environment, install, the test suite"
	@echo "               (what fails runs once more, alone; tests/unsteady.json counts what passes then)"
	@echo "make test-all  the test suite, then what takes long: the tests marked exhaustive"
	@echo "               (TIMES=20 make test-all tries what is random 20 times as often)"
	@echo "make test-peft  the LoRA example and Hugging Face's Trainer, in a virtual environment with PEFT and transformers"
	@echo "make test-trackers  MLflow and TensorBoard with real servers on this machine, in a virtual environment with both"
	@echo "make test-slurm  jobs of a real SLURM, on a cluster of three nodes on this machine (needs root, and Debian's packages)"
	@echo "make test-ray  ranks that Ray Train starts, on a real Ray cluster of this machine, in a virtual environment with Ray"
	@echo "make test-stops  the test suite, while random processes of it are stopped for up to a second"
	@echo "               (SEED=3 make test-stops stops others)"
	@echo "make test-faults  small faults, put into a copy of the package one at a time: which test notices?"
	@echo "               (FAULTS=\"mpi transport:3\" make test-faults tries a room and one fault; JOBS=4 so many at a time)"
	@echo "make test-programs LIGHTNING=CLONE  Lightning's own tests, with balanced, allreduce and wagma in ddp's place"
	@echo "make test-others  programs that nobody here wrote, with ddp and with ours: the same loss"
	@echo "               (PROGRAMS=chemprop make test-others tries one; each gets a virtual environment)"
	@echo "make test-versions  a smoke of all strategies with other versions of torch and Lightning"
	@echo "make lint      virtual environment, install, ruff and mypy"
	@echo "make demo      virtual environment, install, how much sooner balanced is at DDP's loss, on digits"
	@echo "make docs      virtual environment, install, the documents as a site: build/site/index.html"
	@echo "make clean     remove the virtual environment, caches and the demo's output"

test: $(INSTALLED)
	@echo "Tests marked exhaustive are left to make test-all."
	$(BIN)/python -m tests.suite --numprocesses 2 --dist loadgroup -m "not exhaustive"

test-all: test test-peft
	$(BIN)/python -m tests.suite --numprocesses 2 --dist loadgroup -m exhaustive

test-peft: $(PEFT_INSTALLED)
	$(PEFT)/bin/python -m tests.suite tests/test_examples.py tests/plain/test_hugging_face.py -k "lora or hugging_face"

test-trackers: $(TRACKERS_INSTALLED)
	$(TRACKERS)/bin/python -m pytest -W default tests/lab/servers.py

# Daemons and packages are in folders of their own: the machine never has SLURM.
test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest tests/slurm/jobs.py

test-ray: $(RAY_INSTALLED)
	$(RAY)/bin/python -m pytest -W default tests/ray_train/jobs.py

test-programs: $(INSTALLED)
	@test -n "$(LIGHTNING)" || { echo "make test-programs LIGHTNING=CLONE: a clone of Lightning's repository"; exit 2; }
	$(BIN)/python -m tests.programs.lightnings_own $(LIGHTNING)

test-others: $(INSTALLED)
	$(BIN)/python -m tests.programs.others $(VENV)/others --programs $(PROGRAMS)

test-stops: $(INSTALLED)
	$(BIN)/python tests/stops.py --seed $(SEED) -- $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m "not exhaustive"

test-faults: $(INSTALLED)
	$(BIN)/python -m tests.faults --jobs $(JOBS) $(FAULTS)

test-versions: | $(BIN)/python
	$(BIN)/python tests/versions.py --folder $(VENV)/versions --output docs/results/getting_started/versions.json

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

demo: $(DEMO_INSTALLED)
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

# Stamps: a second call installs nothing, unless the dependencies have changed.
$(INSTALLED): EXTRAS := dev,demo,docs,mpi
$(INSTALLED): STAMPS = $(INSTALLED) $(DEMO_INSTALLED) # which has all that the demo needs
$(DEMO_INSTALLED): EXTRAS := demo
$(DEMO_INSTALLED): STAMPS = $(DEMO_INSTALLED)
$(INSTALLED) $(DEMO_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV), this once and for some minutes: torch, then this package with [$(EXTRAS)]"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[$(EXTRAS)]'
	@touch $(STAMPS)

# On top of the other virtual environment, whose packages they find by their path.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(PEFT_INSTALLED): NEEDS := -e '.[examples]'
$(TRACKERS_INSTALLED): NEEDS := 'mlflow>=3,<4' 'tensorboard>=2.20,<3' wandb-workspaces
# Where MPI's library is, which mpi4py looks for below the prefix of the interpreter that runs.
$(RAY_INSTALLED): NEEDS := -e '.[ray]'
test-peft test-trackers test-ray: export MPI4PY_LIBMPI := $(abspath $(VENV))/lib
$(PEFT_INSTALLED) $(TRACKERS_INSTALLED) $(RAY_INSTALLED): pyproject.toml $(INSTALLED)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python $(SITE) > "$$($(@D)/bin/python $(SITE))/whole.pth"
	$(@D)/bin/python -m pip install $(NEEDS)
	@touch $@
