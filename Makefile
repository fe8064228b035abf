# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv e2e test test-slow lint

help:
	@echo "make e2e        prove a two-node PPO run on this machine"
	@echo "make test       lint, then the tests"
	@echo "make test-slow  the tests that take minutes"
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

e2e: $(INSTALLED)
	@$(BIN)/corral e2e run two-node-ppo

# Two files at a time, not one a core: a single test starts up to nine processes.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
