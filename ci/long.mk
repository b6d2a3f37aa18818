# Targets of long runs, watched builds and measurements: `make soak` and so on, for nights and releases.  Part of the Makefile.

# The least steps of `make simulate`; minutes of `make simulate-long`, and its first seed.
SIMULATE_STEPS ?= 250000
SIMULATE_MINUTES ?= 1440
SIMULATE_SEED ?= $(shell date +%s)
# Minutes of `make fuzz-long`; without it goes on until it is stopped.
FUZZ_MINUTES ?=

.PHONY: soak test-outages debug-test test-portable sanitize sanitize-rest sanitize-threads instructions bench-full bench-growth fuzz-long simulate simulate-long simulate-rabbitmq

# Every bit flip, every crash state, long random runs: an hour or more.
soak: test-venv $(VENV)/.stamp-browser $(VENV)/.stamp-spark
	$(BIN)/python -m pytest --slow --timeout=7200 $(PYTEST_ARGS)

# Full and read-only disks, which only root can mount: root of a user namespace.
test-outages: test-venv
	RMQSTORE_MOUNTS=required unshare --user --map-root-user --mount $(BIN)/python -m pytest -q \
		tests/store/test_faults.py tests/store/test_populating.py \
		-k "full_disk or read_only_file_system or end_the_process" $(PYTEST_ARGS)

# ------------------------------------------------------------------------------------------------------------ other builds

# Other builds of the package, in build/NAME/lib, each with variables of its own: bounds checks and asserts; without the features of
# Linux or of one processor, by macOS's compiler where it is installed; watched by sanitizers (the names are those of ci/sanitize.sh).
PORTABLE_CC ?= $(shell command -v clang || echo cc)
BUILDS := debug portable sanitize/address sanitize/thread
BUILD_debug := RMQSTORE_DEBUG=1
BUILD_portable := RMQSTORE_PORTABLE=1 CC=$(PORTABLE_CC) LDSHARED="$(PORTABLE_CC) -shared"
BUILD_sanitize/address := RMQSTORE_SANITIZE=address,undefined
BUILD_sanitize/thread := RMQSTORE_SANITIZE=thread

$(BUILDS:%=build/%/.stamp): build/%/.stamp: $(VENV)/.stamp-venv pyproject.toml $(CORE_SOURCES)
	rm -rf build/$*
	$(BUILD_$*) $(BIN)/python setup.py --quiet build_ext --build-lib build/$*/lib --build-temp build/$*/temp
	@touch $@

# The Python modules are copied each time, so that none that was removed or changed is left from before.
.PHONY: $(BUILDS:%=built/%)
$(BUILDS:%=built/%): built/%: test-venv build/%/.stamp
	find build/$*/lib -name '*.py' -delete
	$(BUILD_$*) $(BIN)/python setup.py --quiet build_py --build-lib build/$*/lib

# The suite on another build, without tests of pages, documents and packages, which reach the compiled modules by ways that other
# tests use too.  By bin/pytest and with a safe path, so that the working directory is not the first to be searched.
NO_CORE_TESTS := tests/console tests/project/test_docs_run.py tests/project/test_examples.py \
	tests/project/test_packaging.py tests/cli/test_cli_examples.py
ON_BUILD = PYTHONPATH=$(CURDIR)/build/$(1)/lib$(2) RMQSTORE_EXPECTED_BUILD=$(CURDIR)/build/$(1)/lib PYTHONSAFEPATH=1 $(3) \
	$(BIN)/pytest $(PARALLEL) -m "not slow and not long and not java and not rabbitmq" $(NO_CORE_TESTS:%=--ignore=%) $(PYTEST_ARGS)

debug-test: built/debug
	$(call ON_BUILD,debug,,PYTHONMALLOC=debug)

# ci/portable removes from Python what macOS lacks.
test-portable: built/portable
	$(call ON_BUILD,portable,:$(CURDIR)/ci/portable,RMQSTORE_PORTABLE=1)

# Code that reads and writes bytes in place, and hostile bytes; the rest is the suite of debug-test.
SANITIZED_TESTS := tests/core $(addprefix tests/store/test_,columns.py concurrency.py corruption.py put.py table.py) tests/rabbitmq
SANITIZED_MARKS := not slow and not java and not rabbitmq
SANITIZE := PYTHON=$(BIN)/python bash ci/sanitize.sh

sanitize: built/sanitize/address
	$(SANITIZE) address $(PARALLEL) -m "$(SANITIZED_MARKS) and not long" $(SANITIZED_TESTS) $(PYTEST_ARGS)

# The suite of debug-test, and the long tests of the compiled modules.
sanitize-rest: built/sanitize/address
	$(SANITIZE) address $(PARALLEL) -m "$(SANITIZED_MARKS) and not long" $(NO_CORE_TESTS:%=--ignore=%) \
		$(SANITIZED_TESTS:%=--ignore=%) tests $(PYTEST_ARGS)
	$(SANITIZE) address $(PARALLEL) -m "$(SANITIZED_MARKS) and long" $(SANITIZED_TESTS) $(PYTEST_ARGS)

# Twelve threads on one store and index file; one test after the other.
sanitize-threads: built/sanitize/thread
	$(SANITIZE) thread -m "$(SANITIZED_MARKS)" tests/core/test_sanitizers.py tests/store/test_twelve_threads.py $(PYTEST_ARGS)

# ------------------------------------------------------------------------------------------------------------ measurements

# Machine instructions of the pinned kernels; fails on 10 % more than committed.  Needs valgrind with its header files.
instructions: venv
	$(BIN)/python -m asv_bench.instructions $(INSTRUCTIONS_ARGS)

# All benchmarks, measured; results under asv_bench/results.
bench-full: venv
	$(ASV_MACHINE)
	$(ASV_RUN) --show-stderr --set-commit-hash $$(git rev-parse HEAD) $(ASV_ARGS)

# Growth of cost with keys, chains, queues, segments; plots with GROWTH_ARGS=--document; one axis with --axis NAME.
bench-growth: venv $(VENV)/.stamp-bench
	$(BIN)/python -m asv_bench.growth $(GROWTH_ARGS)

# ------------------------------------------------------------------------------------------------- fuzzing and simulation

# Until it is stopped; the corpus stays in build/fuzz/corpus.
fuzz-long: venv
	MINUTES=$(FUZZ_MINUTES) bash ci/fuzz.sh long

# Simulated runs of stores from fixed seeds, with kills, lost power, errors and damage.
simulate: test-venv
	bash ci/java.sh
	$(BIN)/python -m tests.simulator --jobs $(JOBS) --steps $(SIMULATE_STEPS) $(SIMULATE_ARGS)

# The same from new seeds.
simulate-long: test-venv
	bash ci/java.sh
	$(BIN)/python -m tests.simulator --jobs $(JOBS) --seed $(SIMULATE_SEED) --minutes $(SIMULATE_MINUTES) \
		--keep-going $(SIMULATE_ARGS)

# Simulated runs of a RabbitMQ vhost.
simulate-rabbitmq: test-venv
	$(BIN)/python -m tests.rabbitmq.vhost_life --seed $(SIMULATE_SEED) --minutes $(SIMULATE_MINUTES) --keep-going
