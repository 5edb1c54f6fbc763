"""Rules for all tests: what a test needs from outside, and whether it may start processes.

Tests that need something from outside Python say so: `@pytest.mark.needs("kcat")`.

`make test` fetches such programs and clients; where one cannot be had, the tests that need it are
left out and named at the end of the run. With CI=true, where nothing may go missing unnoticed, the
run fails.

Tests that start a process say so too: `@pytest.mark.processes`. `make check` leaves them out, and a
test without the mark that starts a process fails. Tests with `needs`, or with a fixture that starts
a process, have the mark already.

Tests have to stay quick: a run ends with the files whose tests took the most CPU time.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.kit.postgres import PostgresServer

# Helpers assert too. Rewritten, their asserts are executed under `python -O` as well, and say more.
pytest.register_assert_rewrite("tests.stores", "tests.simulation", "tests.kit")

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile(
    "calm", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("calm")
# For `make check`; see tests/kit/effort.py.
settings.register_profile("quick", settings.get_profile("calm"), max_examples=10)

#: Who is not root needs to be it in a user namespace first.
_NEW_MOUNTS = ("--mount",) if os.geteuid() == 0 else ("--mount", "--user", "--map-root-user")

_TESTS = Path(__file__).parent
#: Where tools/clients.sh makes clients of other languages ready.
_INTEROP = _TESTS / "interop"
_TARGET = _INTEROP / "java" / "target"
#: Where it puts Kafka's own broker, which the benchmarks use too.
_KAFKA = Path(__file__).parents[1] / "benchmarks" / "target" / "kafka"

#: And Spark's connector for Kafka.
_CONNECTOR = _TESTS / "spark" / "connector" / "target"

#: Where `make test` puts the classes that Spark's Java machines share.
_CLASSES = _TESTS / "spark" / "target" / "classes.jsa"

#: Debian has PostgreSQL's server outside of the PATH, in a directory for each version.
_FIND_POSTGRES = """
for each in /usr/lib/postgresql/*/bin; do PATH="$each:$PATH"; done
postgres --version && initdb --version && psql --version
"""

#: How to tell that a program is there and works: a container may have strace and forbid tracing.
PROBES = {
    "curl": ("curl", "--version"),
    "kcat": ("kcat", "-V"),
    "socat": ("socat", "-V"),
    "strace": ("strace", "-o", os.devnull, "true"),
    # These end with their input, which is empty here.
    "kafkajs": ("node", f"{_INTEROP}/javascript/kafkajs.mjs"),
    "@platformatic/kafka": ("node", f"{_INTEROP}/javascript/platformatic.mjs"),
    "kafka-clients": ("java", "-cp", f"{_TARGET}/classes:{_TARGET}/lib/*", "quackmq.Driver"),
    # The broker itself, which one test of the Python client runs against.
    "kafka": ("java", "-cp", f"{_KAFKA}/*", "kafka.Kafka", "--version"),
    # For Spark.
    "java": ("java", "-version"),
    "postgres": ("sh", "-c", _FIND_POSTGRES),
    # Spark's own Kafka connector: jars that `tests/spark/session.py` gives to Spark.
    "spark-sql-kafka": ("test", "-f", f"{_CONNECTOR}/.made-from"),
    "tmpfs": ("unshare", *_NEW_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
}

#: Java takes its time on a busy machine.
PROBE_S = 300
#: The answers of the probes that pytest's main process hands to its workers.
PROBED: dict[str, bool] = {}

#: Fixtures that start a broker, a PostgreSQL server, a Spark session, or a client in another
#: language.
PROCESS_FIXTURES = {
    "address",
    "postgres",
    "session",
    "spark",
    "java_driver",
    "kafkajs_driver",
    "platformatic_driver",
}
#: What Python's audit calls the ways to start a process.
PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

#: Files whose tests take longest, some of them a minute, and files whose tests share a cluster or
#: other work, so that one worker does it.
LONGEST = (
    "spark/test_torture.py",
    "spark/pipelines/test_declarative.py",
    "spark/test_cluster.py",
    "spark/pipelines/test_trending.py",
    "spark/pipelines/test_compact.py",
    "spark/test_connect.py",
    "test_architecture.py",
)

#: By the test's id, what it misses.
LEFT_OUT = pytest.StashKey[dict[str, str]]()

#: By the test's file, the CPU time of its tests in this process.
CPU_S = pytest.StashKey[defaultdict[str, float]]()
#: How many files the end of a run names.
CPU_FILES = 5
#: `--durations` leaves out what takes less.
SHOWN_S = 0.005


#: The test that runs now, if it may not start a process.
_bound_to_this_process: pytest.Item | None = None


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in PROCESS_EVENTS and (item := _bound_to_this_process) is not None:
        raise RuntimeError(f"{item.nodeid} starts a process: mark it with @pytest.mark.processes")


sys.addaudithook(_audit)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and say little about it if all is well.

    Only marked tests may start processes, their fixtures included.

    Of a test that passes, pytest reports the set-up and the tear-down too. Between the processes of
    xdist these reports take longer than a quick test does. Only those that --durations shows are
    passed on.
    """
    global _bound_to_this_process
    _bound_to_this_process = None if item.get_closest_marker("processes") else item
    started_s = time.process_time()
    hook = item.ihook
    is_worker = hasattr(item.config, "workerinput")
    try:
        if not is_worker:
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed or report.duration >= SHOWN_S:
                hook.pytest_runtest_logreport(report=report)
        if not is_worker:
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    finally:
        _bound_to_this_process = None
        item.config.stash[CPU_S][item.nodeid.partition("::")[0]] += time.process_time() - started_s
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    fixtures = getattr(item, "fixturenames", ())
    if "postgres" in fixtures:
        item.add_marker(pytest.mark.needs("postgres"))
    if item.get_closest_marker("needs") or PROCESS_FIXTURES.intersection(fixtures):
        item.add_marker("processes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sort_by_length(items)
    missing = {item.nodeid: missing_for(item) for item in items}
    left_out = {test: ", ".join(names) for test, names in missing.items() if names}
    config.stash[LEFT_OUT] = left_out
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Probe once for all workers of xdist, unless no test with processes runs at all."""
    if "not processes" not in node.config.option.markexpr:
        node.workerinput["probed"] = {program: works(program) for program in PROBES}


def pytest_configure(config: pytest.Config) -> None:
    if _CLASSES.exists():
        from tests.spark.classes import share

        share()
    PROBED.update(getattr(config, "workerinput", {}).get("probed", {}))
    config.stash[CPU_S] = defaultdict(float)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from the tests that were collected.

    There are so many of them that to look through them all takes longer than most tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist ended; what it left out, all left out."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = output.get("left_out", {})
    for file, cpu_s in output.get("cpu_s", {}).items():
        node.config.stash[CPU_S][file] += cpu_s


def pytest_sessionfinish(session: pytest.Session) -> None:
    left_out = session.config.stash.get(LEFT_OUT, {})
    if hasattr(session.config, "workeroutput"):
        cpu_s = session.config.stash[CPU_S]
        session.config.workeroutput["left_out"] = left_out
        session.config.workeroutput["cpu_s"] = dict(cpu_s)
    elif left_out and in_continuous_integration():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash.get(LEFT_OUT, {})
    for test, missing in left_out.items():
        terminalreporter.write_line(f"LEFT OUT {test}: no working {missing} here")
    cpu_s = terminalreporter.config.stash[CPU_S]
    if len(cpu_s) > CPU_FILES:
        terminalreporter.write_line(f"CPU time of the tests: {sum(cpu_s.values()):.0f} s, of which")
        for file, seconds in sorted(cpu_s.items(), key=itemgetter(1), reverse=True)[:CPU_FILES]:
            terminalreporter.write_line(f"{seconds:6.1f} s {file}")
    if left_out and in_continuous_integration():
        terminalreporter.write_line("FAILED, because CI=true and tests were left out", red=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process. A test that stops it starts it again."""
    from tests.kit.postgres import PostgresServer

    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty database, which no other test uses at the same time."""
    with postgres.database() as url:
        yield url


@pytest.fixture
def store_database(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a database for a store, without data."""
    with postgres.store() as url:
        yield url


def sort_by_length(items: list[pytest.Item]) -> None:
    """The longest files first, then those of Spark, then those with other processes.

    Each worker of xdist begins with a part of the list, and goes on with the end of somebody else's
    when it has done its own. So the last tests are short, and no worker is left waiting for another
    with a long one. And the tests of Spark are mostly one worker's, which starts one Java machine.
    """
    with_processes = {item.path for item in items if item.get_closest_marker("processes")}

    def turn(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(_TESTS).as_posix() if _TESTS in item.path.parents else ""
        if file in LONGEST:
            return 0, LONGEST.index(file)
        return (1 if file.startswith("spark/") else 2 if item.path in with_processes else 3), 0

    items.sort(key=turn)


def in_continuous_integration() -> bool:
    return os.environ.get("CI") == "true"


def missing_for(item: pytest.Item) -> list[str]:
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [name for name in needed if not works(name)]


@cache
def works(program: str) -> bool:
    if program in PROBED:
        return PROBED[program]
    probe = PROBES[program]
    if shutil.which(probe[0]) is None:
        return False
    tried = subprocess.run(
        probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False
    )
    return tried.returncode == 0
