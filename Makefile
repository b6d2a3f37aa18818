# Set-up, build, tests, checks, benchmarks.  `make` alone lists the targets.
# PYTHON chooses the interpreter of a new environment: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# How long `make fuzz` goes on with each target, and `make fuzz-long` in all (until it is stopped).
FUZZ_SECONDS ?= 20
FUZZ_MINUTES ?=
# What `make simulate` does at least; how long `make simulate-long` goes on, and from which seed on.
SIMULATE_STEPS ?= 250000
SIMULATE_MINUTES ?= 1440
SIMULATE_SEED ?= $(shell date +%s)
# Processes that run tests side by side.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
PARALLEL := -n $(JOBS) --dist loadscope

# The build requirements of pyproject.toml; a test holds the two equal.
BUILD_REQUIREMENTS := "setuptools>=77" "Cython>=3.2"

CORE_SOURCES := setup.py $(shell find rmqstore -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
DEBUG_LIB := build/debug/lib
PORTABLE_LIB := build/portable/lib
# Builds that sanitizers watch, below build/sanitize; the names are those of ci/sanitize.sh.
SANITIZERS_address := address,undefined
SANITIZERS_thread := thread
# macOS's compiler, where it is there.
PORTABLE_CC ?= $(shell command -v clang || echo cc)
# What these take besides is in their heads: make test-pythons PYTHONS=3.12, make test-arm64 PYTEST_ARGS=-x
PYTHONS ?=
# Writes what asv wants to know about this machine without asking; it is chatty about it.
ASV_MACHINE := $(BIN)/asv machine --yes --config asv_bench/asv.conf.json >/dev/null 2>&1
ASV_RUN := cd asv_bench && ../$(BIN)/asv run --python=same

.DEFAULT_GOAL := help
.PHONY: help venv build test-venv demo docs test test-rest test-interop test-outages test-all soak debug-test sanitize sanitize-rest sanitize-threads sanitized-address sanitized-thread test-portable test-pythons test-arm64 check lint typecheck docstrings fuzz fuzz-address fuzz-long simulate simulate-long simulate-rabbitmq instructions bench bench-full bench-peers bench-growth clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

$(VENV)/.stamp-venv: Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(BUILD_REQUIREMENTS)
	@touch $@

# Editable: Python changes need no build.  Comes here again only when the package's description changed; it compiles nothing.
$(VENV)/.stamp-install: $(VENV)/.stamp-venv pyproject.toml setup.py
	RMQSTORE_WITHOUT_CORE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[cli]'
	@touch $@

# Compiles the modules whose sources changed, and only those.
$(VENV)/.stamp-build: $(VENV)/.stamp-install $(CORE_SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# What an extra of the package needs besides, into the environment that has the package: .stamp-test, .stamp-dev ...
EXTRAS := bench browser dev spark test
$(EXTRAS:%=$(VENV)/.stamp-%): $(VENV)/.stamp-%: $(VENV)/.stamp-install
	$(BIN)/python -m pip install --quiet 'rmqstore[$*]'
	@touch $@

build: $(VENV)/.stamp-build ## what the package itself needs, in .venv; rebuild the compiled core if a source changed

venv: build $(VENV)/.stamp-dev ## the environment in .venv with everything for development

# What `make test` uses; Spark, Java, a node or a browser are only for the rest.
test-venv: build $(VENV)/.stamp-test

demo: build ## the main job on a real broker's store, with rates
	$(BIN)/python -m rmqstore.demo

test: test-venv ## the tests for every change; at most three minutes on two idle processors
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long" $(PYTEST_ARGS)

test-rest: test-venv $(VENV)/.stamp-browser $(VENV)/.stamp-spark ## what `make test` leaves out: Spark, a browser, sweeps over damage and crashes
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not slow" --ignore=tests/interop $(PYTEST_ARGS)

test-interop: test-venv $(VENV)/.stamp-spark ## tests against the real RocketMQ and RabbitMQ
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/interop $(PYTEST_ARGS)

test-all: test test-rest test-interop ## all three

# Full and read-only disks, which only root can mount: root of a user namespace.
test-outages: test-venv ## tests on full and read-only disks
	RMQSTORE_MOUNTS=required unshare --user --map-root-user --mount $(BIN)/python -m pytest -q \
		tests/store/test_faults.py tests/store/test_populating.py \
		-k "full_disk or read_only_file_system or end_the_process" $(PYTEST_ARGS)

soak: test-venv $(VENV)/.stamp-browser $(VENV)/.stamp-spark ## every bit flip, every crash state, long random runs: takes an hour or more
	$(BIN)/python -m pytest --slow --timeout=7200 $(PYTEST_ARGS)

build/debug/.stamp: $(VENV)/.stamp-venv pyproject.toml $(CORE_SOURCES)
	rm -rf $(DEBUG_LIB)
	RMQSTORE_DEBUG=1 $(BIN)/python setup.py --quiet build_ext --build-lib $(DEBUG_LIB) --build-temp build/debug/temp
	@touch $@

# Tests of pages, documents and packages, which reach the compiled modules by ways that other tests go too.
NO_CORE_TESTS := tests/console tests/project/test_docs_run.py tests/project/test_examples.py \
	tests/project/test_packaging.py tests/cli/test_cli_examples.py

# The Python modules are copied again each time, so that none that was removed or changed is left from before.  The tests
# run through bin/pytest and with a safe path, so that the working directory (the other build) is not the first to be searched.
debug-test: test-venv build/debug/.stamp ## the suite without slow tests on a debug build: bounds checks, asserts, checked malloc
	find $(DEBUG_LIB) -name '*.py' -delete
	RMQSTORE_DEBUG=1 $(BIN)/python setup.py --quiet build_py --build-lib $(DEBUG_LIB)
	PYTHONPATH=$(CURDIR)/$(DEBUG_LIB) RMQSTORE_EXPECTED_BUILD=$(CURDIR)/$(DEBUG_LIB) PYTHONSAFEPATH=1 PYTHONMALLOC=debug \
		$(BIN)/pytest $(PARALLEL) -m "not slow and not long and not java and not rabbitmq" $(NO_CORE_TESTS:%=--ignore=%) $(PYTEST_ARGS)

build/sanitize/address/.stamp build/sanitize/thread/.stamp: build/sanitize/%/.stamp: $(VENV)/.stamp-venv pyproject.toml $(CORE_SOURCES)
	rm -rf build/sanitize/$*
	RMQSTORE_SANITIZE=$(SANITIZERS_$*) $(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize/$*/lib --build-temp build/sanitize/$*/temp
	@touch $@

# The Python modules are copied every time, as for debug-test.
sanitized-address sanitized-thread: sanitized-%: test-venv build/sanitize/%/.stamp
	find build/sanitize/$*/lib -name '*.py' -delete
	RMQSTORE_SANITIZE=$(SANITIZERS_$*) $(BIN)/python setup.py --quiet build_py --build-lib build/sanitize/$*/lib

# What reads and writes bytes in place, and hostile bytes; the rest is the suite of debug-test.
SANITIZED_TESTS := tests/core $(addprefix tests/store/test_,columns.py concurrency.py corruption.py put.py table.py) tests/rabbitmq
SANITIZED_MARKS := not slow and not java and not rabbitmq

sanitize: sanitized-address ## the tests of the compiled modules on a build that AddressSanitizer and UBSan watch
	PYTHON=$(BIN)/python bash ci/sanitize.sh address $(PARALLEL) -m "$(SANITIZED_MARKS) and not long" $(SANITIZED_TESTS) $(PYTEST_ARGS)

sanitize-rest: sanitized-address ## the suite of debug-test, and the long tests of the compiled modules, on that build
	PYTHON=$(BIN)/python bash ci/sanitize.sh address $(PARALLEL) -m "$(SANITIZED_MARKS) and not long" $(NO_CORE_TESTS:%=--ignore=%) \
		$(SANITIZED_TESTS:%=--ignore=%) tests $(PYTEST_ARGS)
	PYTHON=$(BIN)/python bash ci/sanitize.sh address $(PARALLEL) -m "$(SANITIZED_MARKS) and long" $(SANITIZED_TESTS) $(PYTEST_ARGS)

# One after the other: what a thread of another test does would be in its way.
sanitize-threads: sanitized-thread ## twelve threads on one store and index file, on a build that ThreadSanitizer watches
	PYTHON=$(BIN)/python bash ci/sanitize.sh thread -m "$(SANITIZED_MARKS)" tests/core/test_sanitizers.py \
		tests/store/test_twelve_threads.py $(PYTEST_ARGS)

build/portable/.stamp: $(VENV)/.stamp-venv pyproject.toml $(CORE_SOURCES)
	rm -rf $(PORTABLE_LIB)
	$(PORTABLE_CC) --version | head -n 1
	CC=$(PORTABLE_CC) LDSHARED="$(PORTABLE_CC) -shared" RMQSTORE_PORTABLE=1 \
		$(BIN)/python setup.py --quiet build_ext --build-lib $(PORTABLE_LIB) --build-temp build/portable/temp
	@touch $@

# As debug-test.  ci/portable takes away from Python what macOS has not.
test-portable: test-venv build/portable/.stamp ## the same on a build without what only Linux or one processor has, by clang where it is there
	find $(PORTABLE_LIB) -name '*.py' -delete
	RMQSTORE_PORTABLE=1 $(BIN)/python setup.py --quiet build_py --build-lib $(PORTABLE_LIB)
	PYTHONPATH=$(CURDIR)/$(PORTABLE_LIB):$(CURDIR)/ci/portable RMQSTORE_EXPECTED_BUILD=$(CURDIR)/$(PORTABLE_LIB) \
		RMQSTORE_PORTABLE=1 PYTHONSAFEPATH=1 \
		$(BIN)/pytest $(PARALLEL) -m "not slow and not long and not java and not rabbitmq" $(NO_CORE_TESTS:%=--ignore=%) $(PYTEST_ARGS)

test-pythons: ## the suite without Spark and browser on 3.10, 3.12 to 3.15, or PYTHONS="3.12 3.15"
	JOBS=$(JOBS) PYTEST_ARGS="$(PYTEST_ARGS)" bash ci/pythons.sh $(PYTHONS)

test-arm64: build ## the tests of the core on aarch64, under qemu; fetching its Debian needs root
	JOBS=$(JOBS) PYTEST_ARGS="$(PYTEST_ARGS)" PYTHON=$(BIN)/python bash ci/arm64.sh

lint: venv ## ruff
	$(BIN)/ruff check .

typecheck: venv ## mypy over the package
	$(BIN)/mypy

docstrings: venv ## what is public and has no docstring is named
	$(BIN)/interrogate -vv --omit-covered-files rmqstore

check: lint typecheck docstrings ## ruff, mypy, and the tests that hold sources, stub and documents together
	$(BIN)/python -m pytest tests/project/test_source.py tests/project/test_stub.py \
		$(wildcard tests/project/test_*docs*.py tests/project/test_*readme*.py)

docs: venv ## the documents as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

instructions: venv ## machine instructions of the pinned kernels, compared with those committed; fails on 10 % more
	bash ci/valgrind.sh
	$(BIN)/python -m asv_bench.instructions $(INSTRUCTIONS_ARGS)

bench-full: venv ## all benchmarks, measured; results under asv_bench/results
	$(ASV_MACHINE)
	$(ASV_RUN) --show-stderr --set-commit-hash $$(git rev-parse HEAD) $(ASV_ARGS)

bench: venv ## every benchmark once: shows that they run, only roughly how fast
	$(ASV_MACHINE)
	export RMQSTORE_BENCH_QUICK=1; $(ASV_RUN) --quick --show-stderr $(ASV_ARGS)

bench-peers: venv $(VENV)/.stamp-bench ## beside the real RocketMQ store, LMDB, rocksdict, SQLite, C, a RabbitMQ node, alternately in one run
	bash ci/java.sh
	bash ci/rabbitmq.sh
	$(BIN)/python -m asv_bench.peers $(PEERS_ARGS)

bench-growth: venv $(VENV)/.stamp-bench ## how cost grows with keys, chains, queues, segments; plots with GROWTH_ARGS=--document
	$(BIN)/python -m asv_bench.growth $(GROWTH_ARGS)

fuzz: venv ## hostile bytes for the readers of files, guided by what they reach in compiled code: make fuzz FUZZ_SECONDS=600
	bash ci/fuzz.sh $(FUZZ_SECONDS)

fuzz-address: venv ## the same, and AddressSanitizer watches
	SANITIZE=address bash ci/fuzz.sh $(FUZZ_SECONDS)

fuzz-long: venv ## the same until it is stopped, or FUZZ_MINUTES; what it learns stays in build/fuzz/corpus
	MINUTES=$(FUZZ_MINUTES) bash ci/fuzz.sh long

simulate: test-venv ## lives of stores from fixed seeds, with kills, lost power, errors and damage: make simulate SIMULATE_STEPS=100000
	bash ci/java.sh
	$(BIN)/python -m tests.simulator --jobs $(JOBS) --steps $(SIMULATE_STEPS) $(SIMULATE_ARGS)

simulate-long: test-venv ## the same from seeds that nobody tried yet, for a day: make simulate-long SIMULATE_MINUTES=60
	bash ci/java.sh
	$(BIN)/python -m tests.simulator --jobs $(JOBS) --seed $(SIMULATE_SEED) --minutes $(SIMULATE_MINUTES) \
		--keep-going $(SIMULATE_ARGS)

simulate-rabbitmq: test-venv ## lives of a RabbitMQ vhost from seeds: make simulate-rabbitmq SIMULATE_SEED=1 SIMULATE_MINUTES=5
	$(BIN)/python -m tests.rabbitmq.vhost_life --seed $(SIMULATE_SEED) --minutes $(SIMULATE_MINUTES) --keep-going

clean: ## remove builds and caches (the environment stays)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis asv_bench/env asv_bench/html
	find rmqstore tests asv_bench -name __pycache__ -prune -exec rm -rf {} +
	find rmqstore \( -name '*.so' -o -name '*.c' \) -delete
	rm -f $(addprefix $(VENV)/.stamp-,install build $(EXTRAS))

distclean: clean ## remove the environment and benchmark results too
	rm -rf $(VENV) asv_bench/results
