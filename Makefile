# Two commands set everything up on a fresh machine: `make demo` (the main job) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PAIR ?= qwen2.5-coder
DOC ?= data/samples/guide.md
ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint bench-core install clean help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## virtual environment with the package and all its extras

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "masw needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v)' || { rm -rf $(VENV); exit 2; }
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebooks,app,dev]'
	@touch $@

demo: $(STAMP) ## draft/verify on a long document: make demo [PAIR=smollm2] [DOC=report.txt] [ARGS="--method full"]
	@$(BIN)/masw run "$(DOC)" --pair $(PAIR) --compare $(ARGS)

test: $(STAMP) ## the whole test-suite but what is marked slow
	@$(BIN)/python -m pytest

test-slow: $(STAMP) ## long checks, with the 1.6 GB pair
	@$(BIN)/python -m pytest -m slow

lint: $(STAMP) ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench-core: $(STAMP) ## ratios of the core's speed and memory on this machine, beside their floors
	@$(BIN)/python scripts/bench_core.py $(ARGS)

clean: ## remove the virtual environment and caches of the checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
