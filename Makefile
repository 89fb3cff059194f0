# Every target does its own set-up in .venv; nothing has to be installed first but Python 3.11–3.13 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
E2E_STAMP := $(VENV)/.installed-e2e
BENCH_STAMP := $(VENV)/.installed-bench
SOURCE ?= docs
HOME_OF_RUNS := $(or $(DAGSTER_HOME),$(CURDIR)/.dagster_home)
# the history of runs belongs to the user's targets; tests make their own
demo dev: export DAGSTER_HOME = $(HOME_OF_RUNS)
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo dev test test-slow lint bench bench-selection bench-shards bench-scoring bench-dagster bench-gpu bench-influence bench-corpus-solver bench-compute bench-scale study-influence figures chaos audit lock e2e e2e-smoke clean

help:
	@echo "make demo            the main job on real text, in a few minutes; SOURCE=hf takes a piece of FineWeb"
	@echo "make dev             the Dagster UI on http://127.0.0.1:3000"
	@echo "make test            the tests; test-slow and e2e are the long ones"
	@echo "make lint            style and types"
	@echo "make bench           ratios to peers and bounds; bench-selection and bench-shards are its halves"
	@echo "make bench-selection ARGS=--full for all sizes, ARGS='--only NAME' for a subject"
	@echo "make bench-scoring   embedding and scoring beside the plain libraries; ARGS=--full for all pages"
	@echo "make bench-dagster   what the orchestration costs: memory, loading, a tick, a light run, a page"
	@echo "make bench-gpu       a million documents on a CUDA device"
	@echo "make bench-influence rollouts and group selection by influence, beside plain loops and bounds"
	@echo "make study-influence the claims of Group-MATES at small scale, and docs/influence-study.md: 20 minutes"
	@echo "make bench-corpus-solver  the certified solver over a million documents in shards"
	@echo "make bench-compute   processes and Ray beside each other on the same work"
	@echo "make bench-scale     every stage at 10,000, 100,000 and a million documents; ARGS=--help"
	@echo "make chaos           a hundred faults and kills injected into real runs, and their re-runs compared"
	@echo "make audit           known advisories about the locked dependencies; make lock renews the lock"
	@echo "make figures         the pictures of docs/selection.md, drawn again"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(E2E_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,e2e]'
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { echo "installing Chromium for the browser tests"; apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "Chromium could not be installed; the browser tests will say that they were left out"
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
	  || { echo "installing PostgreSQL for the tests of its storage"; apt-get install -y -qq postgresql >/dev/null; } \
	  || echo "PostgreSQL could not be installed; its tests will say that they were left out"
	@touch $@

# without the peers their rows say so, and the rest is measured all the same
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,bench]' \
	  || echo "the peers of the extra 'bench' could not be installed"
	@touch $@

$(HOME_OF_RUNS)/dagster.yaml: dagster_datamask/dagster.yaml
	@mkdir -p $(HOME_OF_RUNS)
	@cp $< $@

demo: $(STAMP) $(HOME_OF_RUNS)/dagster.yaml
	$(BIN)/datamask demo --source $(SOURCE)

dev: $(STAMP) $(HOME_OF_RUNS)/dagster.yaml
	@grep -q '^url *= *"\.demo/source"' datamask.toml && $(BIN)/datamask demo --export-only || true
	$(BIN)/dagster dev -w workspace.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# a partition and a backfill by hand, in two minutes
e2e-smoke: $(E2E_STAMP)
	$(BIN)/python -m pytest -m e2e tests/e2e/test_ui.py -k "TestServer and not AtWork or TestByHand"

e2e: export DATAMASK_E2E_SHOTS = $(CURDIR)/.e2e
e2e: $(E2E_STAMP)
	$(BIN)/python -m pytest -m e2e $(ARGS)
	@echo "screenshots: $(DATAMASK_E2E_SHOTS)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-selection bench-shards

bench-selection: $(BENCH_STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.selection --out .benchmarks/selection.json $(ARGS)

bench-shards: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.shards --out .benchmarks/shards.json

bench-scoring: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.scoring --out .benchmarks/scoring.json $(ARGS)

bench-dagster: $(E2E_STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.dagster --out .benchmarks/dagster.json $(ARGS)

bench-gpu: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.gpu --out .benchmarks/gpu.json

bench-influence: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.rollouts --out .benchmarks/influence.json
	$(BIN)/python -m benchmarks.group_selection --out .benchmarks/influence.json

bench-corpus-solver: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.corpus_solver --out .benchmarks/corpus_solver.json $(ARGS)

bench-compute: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.compute --out .benchmarks/compute.json $(ARGS)

bench-scale: $(STAMP)
	@mkdir -p .benchmarks
	$(BIN)/python -m benchmarks.scale --out .benchmarks/scale.json $(ARGS)

study-influence: $(STAMP)
	$(BIN)/python -m benchmarks.influence_study $(ARGS)

figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures

# faults injected on purpose into real runs; one again: ARGS='--seed N'
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

# the dependencies' lock, against advisories where these can be had
audit: $(STAMP)
	$(BIN)/python -m tests.audit

lock: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --extra s3 --extra ray --extra k8s --extra postgres -c constraints.txt \
	  --generate-hashes --universal --python-version 3.11 --no-annotate --no-header --quiet --output-file requirements.lock

clean:
	rm -rf .demo .dagster_home .benchmarks .e2e .chaos
