# Needs: Python 3.11 or newer and make.
# make demo    sets everything up and shows a stored prefix being reused (Ctrl-C ends it)
# make test    every check, real engine included

PYTHON      ?= $(shell command -v python3.11 || command -v python3)
VENV        := .venv
BIN         := $(VENV)/bin
# An extra package index that has the CPU build of torch, for machines whose pip does not find it.
TORCH_INDEX ?=
# EXIT=1 ends the demo after the conversation; its exit code says whether the reuse happened.
EXIT        ?=
PYTEST_ARGS ?=

# The environment is made again exactly when the requirements change.
REQUIREMENTS := $(shell cat pyproject.toml deploy/install.sh 2>/dev/null | cksum | cut -d' ' -f1)
STAMP        := $(VENV)/installed-$(REQUIREMENTS)

.PHONY: help venv demo test lint clean

help: ## what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/'

venv: $(STAMP) ## the environment in .venv, with the CPU engine

$(STAMP): pyproject.toml deploy/install.sh
	@TORCH_INDEX='$(TORCH_INDEX)' bash deploy/install.sh '$(PYTHON)' '$(VENV)'
	@rm -f $(VENV)/installed-*
	@touch $@

demo: $(STAMP) ## start everything, show the reuse, keep serving (EXIT=1: end by itself)
	@exec $(BIN)/headstart demo $(if $(filter-out 0,$(EXIT)),--exit)

lint: $(STAMP) ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Arguments may choose tests of one half only; of the other pytest then says 5.
pytest = $(BIN)/pytest $(1) $(PYTEST_ARGS)$(if $(PYTEST_ARGS), || [ $$? -eq 5 ])

test: lint ## everything: lint, then all tests, real engine included
	$(call pytest,-m "not engine" --numprocesses 2 --dist worksteal)
	$(call pytest,-m engine)

clean: ## remove the environment and what tools left (the model stays in your cache directory)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
