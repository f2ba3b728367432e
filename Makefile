# Two commands set everything up on a fresh machine: `make demo` (the main job) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PAIR ?= qwen2.5-coder
DOC ?= data/samples/guide.md
ARGS ?=
DATA ?=
SETS ?= govreport qmsum multinews
LONG ?= $(SETS)
DOCS ?= 2
REPEATS ?= 2
JOBS ?= 2
OUT ?= runs/bench-paper
PEERS := hf,hf-assisted
BENCH = $(BIN)/masw bench --max-new-tokens 256
GRID = --docs $(DOCS) --repeats $(REPEATS) $(SETS:%=--data $(DATA)/%.jsonl)
STAMP := $(VENV)/.installed

.PHONY: report report-live browser demo app test test-slow lint bench bench-paper gpu-bench bench-core train gpu-train ablations eval-adaptor ship results install clean help
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## virtual environment with the package and all its extras

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "masw needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12 ..." % v)' || { rm -rf $(VENV); exit 2; }
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[notebooks,app,dev]'
	@touch $@

demo: $(STAMP) ## draft/verify on a long document: make demo [PAIR=smollm2] [DOC=report.txt] [ARGS="--method full"]
	@$(BIN)/masw run "$(DOC)" --pair $(PAIR) --compare $(ARGS)

app: $(STAMP) ## the dashboard in a browser: make app [PAIR=smollm2] [ARGS="--port 8600"]
	@$(BIN)/masw app $(if $(filter command line environment,$(origin PAIR)),--pair $(PAIR)) $(ARGS)

test: $(STAMP) ## the whole test-suite but what is marked slow, in two processes (JOBS=0: in one)
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## long checks: the 1.6 GB pair, the app on smollm2 (MASW_UPLOADS=DIR takes its documents)
	@$(BIN)/python -m pytest -m slow

report: $(STAMP) ## run all notebooks on recorded traces into out/report/report.html (no model)
	@$(BIN)/masw report all --mode trace --out out/report $(ARGS)

report-live: $(STAMP) ## the same, computed here with smollm2 (93 MB once; up to half an hour on 2 cores)
	@$(BIN)/masw report all --pair smollm2 --out out/report-live $(ARGS)

browser: ## Debian's chromium, for the tests of pages; without it those tests are skipped
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }

lint: $(STAMP) ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy && $(BIN)/mypy scripts
	@$(BIN)/lint-imports

bench: $(STAMP) ## methods and peers on the guide with smollm2, quick: make bench [ARGS="--contexts 2k --data FILE.jsonl"]
	@$(BIN)/masw bench --pair smollm2 --methods all,hf,hf-assisted --contexts 1k,2k --docs 1 --repeats 2 --max-new-tokens 64 --out runs/bench $(ARGS)

bench-paper: $(STAMP) ## the grids of the comparison, hours, resumable: make bench-paper DATA=DIR (docs/BENCH.md)
	@test -n "$(DATA)" || { echo "make bench-paper DATA=DIR: the folder of $(addsuffix .jsonl,$(SETS))" >&2; exit 2; }
	@$(BENCH) --pair smollm2 --methods all,$(PEERS) --contexts 1k,2k,4k,8k $(GRID) --out $(OUT)/smollm2 $(ARGS)
	@$(BENCH) --pair qwen2.5-coder --methods all,$(PEERS) --contexts 2k,4k,8k,16k $(GRID) --out $(OUT)/qwen2.5-coder $(ARGS)
	@$(BENCH) --pair qwen2.5-coder --methods none,full,window,masw --contexts 32k --docs 1 --repeats 1 $(LONG:%=--data $(DATA)/%.jsonl) --out $(OUT)/qwen2.5-coder-32k $(ARGS)

gpu-bench: $(STAMP) ## steps of Llama-3 shapes on a GPU beside their floors, and the CUDA tests, within 9 minutes
	@PYTHON="$(CURDIR)/$(BIN)/python" scripts/gpu_bench.sh $(ARGS)

bench-core: $(STAMP) ## ratios of the core's speed and memory on this machine, beside their floors
	@$(BIN)/python scripts/bench_core.py $(ARGS)

train: $(STAMP) ## train an adaptor, resumable: make train PAIR=smollm2 ARGS="--text FILE.jsonl.gz --answers FILE.jsonl.gz ..."
	@$(BIN)/masw train --pair $(PAIR) --out runs/$(PAIR) $(ARGS)

gpu-train: $(STAMP) ## one slice of at most 9 minutes of training on a GPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/gpu_train.sh $(ARGS)

eval-adaptor: $(STAMP) ## the measure: make eval-adaptor PAIR=smollm2 ARGS="--data FILE.jsonl --contexts 2k,4k"
	@$(BIN)/masw eval-adaptor --pair $(PAIR) $(ARGS)

ablations: $(STAMP) ## recipes at equal tokens, resumable, under an hour of one core: make ablations ARGS="--data DIR"
	@$(BIN)/python scripts/ablations.py $(ARGS)

ship: $(STAMP) ## put a trained adaptor into data/adaptors if it beats the one there
	@$(BIN)/python scripts/ship_adaptor.py $(ARGS)

results: $(STAMP) ## docs/RESULTS.md from the tables in data/results
	@$(BIN)/python scripts/results_page.py $(ARGS)

clean: ## remove the virtual environment and caches of the checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
