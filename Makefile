# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv-vllm/bin
INSTALLED_VLLM := .venv-vllm/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm e2e test test-slow test-vllm lint

help:
	@echo "make e2e        prove a two-node PPO run on this machine"
	@echo "make test       lint, then the tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-vllm  the tests that generate with vllm, in a venv of their own"
	@echo "make lint       ruff and mypy"
	@echo "make venv       only install, into .venv"

venv: $(INSTALLED)

# The stamp is written last, so an interrupted install starts over. torch comes first and exactly pinned: a range would
# let pip prefer a newer, larger build. setuptools is pinned by installing it and building without isolation.
$(INSTALLED): pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) torch==2.13.0
	$(PIP) --no-build-isolation -e '.[train,cluster,smollm2,serve,postgres,dev]'
	touch $@

venv-vllm: $(INSTALLED_VLLM)

# vllm wants other versions of what Corral uses too. torch comes with what it asks for, which a CPU build does not.
$(INSTALLED_VLLM): pyproject.toml requirements-vllm.txt
	rm -rf .venv-vllm
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	$(VLLM)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements-vllm.txt
	$(VLLM)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(VLLM)/python -c 'from vllm import LLM' 2>/dev/null
	touch $@

e2e: $(INSTALLED)
	@$(BIN)/corral e2e run two-node-ppo

# Two files at a time, not one a core: a single test starts up to nine processes.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-vllm: $(INSTALLED_VLLM)
	$(VLLM)/python -m pytest -n 2 --dist loadfile tests/rollout/test_vllm*.py tests/trainer/test_vllm.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
