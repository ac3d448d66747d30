# `make demo` and `make test` are all that a newcomer needs; `make help` lists the rest.
SHELL := bash
BIN := .venv/bin
EXTRA ?=
# Four streams on two cores: the tests on Slurm mostly wait. Groups of tests: conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadscope --no-loadscope-reorder
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# A shell that forbids compiled files would have each of some thousand short processes compile the
# package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install system demo test test-all check lint format bench snakemake-tests scoreboard preflight-scoreboard agent-scoreboard consistency-scoreboard slurm-demo lock licences clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

install: ## .venv with the packages of locks/*.txt (EXTRA=cpu|cuda|sglang)
	@scripts/install_python.sh $(EXTRA)

system: ## Slurm, munge, MariaDB and Chromium, where it may install them
	@scripts/install_system.sh slurm chromium

demo: install ## the demo run on this machine; prints the report's path
	@$(BIN)/snakemake
	@echo "report: $(CURDIR)/results/demo/report/index.html"

test: install system ## the tests; faults that were recorded are replayed, four of them run live
	@$(PYTEST) -m "not exhaustive"

test-all: install system ## every test, every fault live
	@$(PYTEST)

check: lint ## the linters and the tests that take seconds, for the daily loop
	@$(PYTEST) -q -m "not slow and not slurm and not vllm and not chromium"

lint: install ## ruff, mypy, snakefmt, snakemake --lint, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/snakefmt --check workflow
	@$(BIN)/snakemake --lint
	@$(BIN)/python -m pytest -q tests/unit/test_import_layers.py

format: install ## rewrite the code as the linters want it
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/snakefmt workflow

bench: install system ## every benchmark, ours and the peer side by side
	@for script in $(filter-out benchmarks/snakemake_tests.py,$(wildcard benchmarks/[!_]*.py)); do \
		$(BIN)/python $$script || exit 1; done

snakemake-tests: install system ## Snakemake's own tests, ours and the official executor (an hour)
	@$(BIN)/python benchmarks/snakemake_tests.py

scoreboard: install ## every fault into real stages, the diagnoses scored: docs/scoreboard.md
	@$(BIN)/python scripts/scoreboard.py

preflight-scoreboard: install system ## trouble on private clusters, preflight scored: docs/preflight-scoreboard.md
	@$(BIN)/python scripts/preflight_scoreboard.py

agent-scoreboard: install ## faulty agents and wires before vLLM, what `agent run` names scored: docs/agent-scoreboard.md
	@$(BIN)/python scripts/agent_scoreboard.py

consistency-scoreboard: install ## differences planted between vLLM and transformers, compare scored: docs/consistency-scoreboard.md
	@$(BIN)/python scripts/consistency_scoreboard.py

slurm-demo: install system ## the demo on a private Slurm cluster that starts and stops with it
	@folder=$$(mktemp -d -t shakedown-slurm.XXXX) && $(BIN)/python scripts/slurm_cluster.py \
		run $$folder -- $(BIN)/snakemake --profile profiles/slurm && rm -rf $$folder
	@echo "report: $(CURDIR)/results/demo/report/index.html"

lock: install ## locks/*.txt anew, after a change of constraints.txt (needs uv)
	@$(BIN)/python scripts/lock.py

licences: install ## what .venv holds, and under which licence
	@$(BIN)/python scripts/licences.py

clean: ## results and caches, never .venv
	@rm -rf results .snakemake report.zip .mypy_cache .ruff_cache .pytest_cache
