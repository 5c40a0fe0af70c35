# `make train` and `make test` do everything from a fresh clone; `make help` lists the targets.
#
#   make train RECIPE=tiny_adam ARGS="--seed 3"     another recipe, more arguments for `muonrl train`
#   make test  ARGS="-k muon -x"                    more arguments for pytest
#   make setup PYTHON=python3.12                    another interpreter

VENV   ?= .venv
RECIPE ?= tiny
ARGS   ?=
BIN    := $(VENV)/bin

export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup train test mutation lint format clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## prepare .venv (a second call does nothing)
	@sh scripts/setup.sh

train: setup ## train a small model on this machine: sampling, sandboxes, grading and Muon, all real
	@$(BIN)/muonrl train --recipe $(RECIPE) $(ARGS)

# Tracing coverage through Triton's interpreter takes minutes and sees nothing of the kernels, so those tests come second,
# without it. Status 5: ARGS selected no test of that half.
test: lint ## lint, then the whole test suite with coverage
	@$(BIN)/python -m pytest -q --cov --cov-report=term --durations=10 -m "not interpreted and not mutation" $(ARGS) || [ $$? = 5 ]
	@$(BIN)/python -m pytest -q --durations=5 -m "interpreted and not mutation" $(ARGS) || [ $$? = 5 ]

mutation: setup ## break the loss kernels on purpose and see that their tests notice
	@$(BIN)/python -m pytest -q -m mutation

lint: setup ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "make format lays these files out"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## lay the code out and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment and every cache, never a run
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
