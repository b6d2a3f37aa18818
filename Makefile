# Set-up, build, tests, checks.  `make` alone lists the targets; those of long runs and watched builds are in ci/long.mk.
# PYTHON chooses the interpreter of a new environment: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Seconds for each target of `make fuzz`.
FUZZ_SECONDS ?= 20
# Processes that run tests side by side.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
PARALLEL := -n $(JOBS) --dist loadscope

# The build requirements of pyproject.toml; a test holds the two equal.
BUILD_REQUIREMENTS := "setuptools>=77" "Cython>=3.2"

CORE_SOURCES := setup.py $(shell find rmqstore -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
# Writes the description of this machine for asv.
ASV_MACHINE := $(BIN)/asv machine --yes --config asv_bench/asv.conf.json >/dev/null 2>&1
ASV_RUN := cd asv_bench && ../$(BIN)/asv run --python=same

.DEFAULT_GOAL := help
.PHONY: help venv build test-venv demo docs test test-rest test-interop check lint typecheck docstrings fuzz bench bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

$(VENV)/.stamp-venv: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'pip>=25.1' $(BUILD_REQUIREMENTS)
	@touch $@

# Editable: Python changes need no build.  Runs again only when the package's description changed; it compiles nothing.
$(VENV)/.stamp-install: $(VENV)/.stamp-venv pyproject.toml setup.py
	RMQSTORE_WITHOUT_CORE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[cli]'
	@touch $@

# Compiles the modules whose sources changed.
$(VENV)/.stamp-build: $(VENV)/.stamp-install $(CORE_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# The dependency groups of pyproject.toml: .stamp-test, .stamp-dev ...
GROUPS := bench browser dev spark test
$(GROUPS:%=$(VENV)/.stamp-%): $(VENV)/.stamp-%: $(VENV)/.stamp-install
	$(BIN)/python -m pip install --quiet --group $*
	@touch $@

build: $(VENV)/.stamp-build ## what the package itself needs, in .venv; rebuild the compiled core if a source changed

venv: build $(VENV)/.stamp-dev ## the environment in .venv with everything for development

test-venv: build $(VENV)/.stamp-test

demo: build ## the main job on a real broker's store, with rates
	$(BIN)/python -m rmqstore.demo

test: test-venv ## the tests for every change; at most three minutes on two idle processors
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long" $(PYTEST_ARGS)

test-rest: test-venv $(VENV)/.stamp-browser $(VENV)/.stamp-spark ## what `make test` leaves out: Spark, a browser, sweeps over damage and crashes
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not slow" --ignore=tests/interop $(PYTEST_ARGS)

test-interop: test-venv $(VENV)/.stamp-spark ## tests against the real RocketMQ and RabbitMQ
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/interop $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python ci/prose.py

typecheck: venv
	$(BIN)/mypy

docstrings: venv
	$(BIN)/interrogate -vv --omit-covered-files rmqstore

check: lint typecheck docstrings ## ruff, spelling, prose, mypy, docstrings, and the tests that hold sources, stub and documents together
	$(BIN)/python -m pytest tests/project/test_source.py tests/project/test_stub.py \
		$(wildcard tests/project/test_*docs*.py tests/project/test_*readme*.py)

docs: venv ## the documents as a site, in build/site
	$(BIN)/python ci/site.py

bench: venv ## every benchmark once: shows that they run, only roughly how fast
	$(ASV_MACHINE)
	export RMQSTORE_BENCH_QUICK=1; $(ASV_RUN) --quick --show-stderr $(ASV_ARGS)

bench-peers: venv $(VENV)/.stamp-bench ## next to the real RocketMQ store, LMDB, rocksdict, SQLite, C, a RabbitMQ node, alternately in one run
	bash ci/java.sh
	bash ci/rabbitmq.sh
	$(BIN)/python -m asv_bench.peers $(PEERS_ARGS)

fuzz: venv ## hostile bytes for the readers of files, guided by what they reach in compiled code: make fuzz FUZZ_SECONDS=600
	bash ci/fuzz.sh $(FUZZ_SECONDS)

clean: ## remove builds and caches (the environment stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis asv_bench/env asv_bench/html
	find rmqstore tests asv_bench -name __pycache__ -prune -exec rm -rf {} +
	find rmqstore \( -name '*.so' -o -name '*.c' \) -delete
	rm -f $(addprefix $(VENV)/.stamp-,install build $(GROUPS))

include ci/long.mk
