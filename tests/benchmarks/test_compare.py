"""The comparison's arithmetic: what is better, what the table says, what a server costs."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from benchmarks.processes import Command, Server, free_ports, running, tree
from benchmarks.table import BEGIN, END, Column, Comparison, goals, render, write
from benchmarks.work import FIGURES, Measured
from tests.kit.waiting import wait_until

WAIT_SECONDS = 30

#: A child that works and ends, then one that stays, until somebody kills it.
PARENT = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.2: pass"
subprocess.run([sys.executable, "-c", burn])
subprocess.run([sys.executable, "-c", "import time; print('stays', flush=True); time.sleep(600)"])
"""


def test_the_better_round_stays_with_its_mark() -> None:
    measured = Measured()
    measured.take("produce-100", 10, client_bound=True)
    measured.take("produce-100", 9)
    assert measured.figures == {"produce-100": 10}
    assert measured.client_bound == {"produce-100"}
    measured.take("produce-100", 11)
    assert measured.figures == {"produce-100": 11}
    assert measured.client_bound == set()


def test_the_lower_cost_is_the_better_round() -> None:
    measured = Measured()
    measured.take("start", 2.0)
    measured.take("start", 3.0)
    assert measured.figures == {"start": 2.0}


def test_times_better_is_above_one_for_ours_whichever_way_is_better() -> None:
    assert FIGURES["produce-100"].times_better(20, 10) == 2
    assert FIGURES["latency-p50"].times_better(10, 20) == 2


def test_the_table_shows_where_we_are_behind() -> None:
    text = render(comparison(quackmq={"produce-100": 500}, redis={"produce-100": 1000}))
    assert "| produce 100 B | msg/s | 500 | 1,000 **(0.5×)** |" in text
    assert "| rows ahead of redis | 0 of 1; behind: produce 100 B (0.5×) | all | MISSED |" in text


def test_a_figure_that_one_side_does_not_have_is_left_open() -> None:
    text = render(comparison(quackmq={"start": 1.0}, redis={}))
    assert "| start to first produce | s | 1 | – |" in text


def test_latency_may_be_that_of_kafka_and_one_sync() -> None:
    reached = verdicts(quackmq={"latency-p50": 150}, kafka={"latency-p50": 50})
    missed = verdicts(quackmq={"latency-p50": 151}, kafka={"latency-p50": 50})
    assert reached == {"un-batched produce, p50": True}
    assert missed == {"un-batched produce, p50": False}


def test_memory_may_be_a_fifth_of_kafkas_and_the_start_a_tenth() -> None:
    found = verdicts(
        quackmq={"memory-most": 100, "start": 1.1}, kafka={"memory-most": 500, "start": 10}
    )
    assert found == {"resident memory, most in all of it": True, "start to first produce": False}


def test_only_what_is_between_the_marks_is_written(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write("new", readme)
    assert readme.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_readme_without_marks_is_not_touched(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\n")
    with pytest.raises(ValueError, match="lost its marks"):
        write("new", readme)
    assert readme.read_text() == f"before\n{BEGIN}\n"


@pytest.mark.processes
def test_a_server_is_charged_for_its_children_also_when_they_have_ended(tmp_path: Path) -> None:
    with running_parent(tmp_path) as server:
        wait_until(lambda: "stays" in server.last_words)
        assert server.cpu_seconds >= 0.2
        assert len(server.pids) == 2
        assert server.resident_bytes > own_resident_bytes(server.pids[0])
        assert server.most_resident_bytes >= server.resident_bytes


@pytest.mark.processes
def test_nothing_of_a_server_is_left_when_its_block_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_parent(tmp_path) as server:
        wait_until(lambda: "stays" in server.last_words)
        pids = server.pids
        raise KeyboardInterrupt
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_tree_begins_with_its_roots() -> None:
    assert tree([os.getpid()])[0] == os.getpid()


# --- helpers ---------------------------------------------------------------------------------


def comparison(**figures: dict[str, float]) -> Comparison:
    columns = {
        name: Column(name, "1", "a client", "its defaults", True, Measured(dict(found)))
        for name, found in figures.items()
    }
    return Comparison(columns, {"p50_us": 100, "p99_us": 1000}, "a machine", rounds=3)


def verdicts(**figures: dict[str, float]) -> dict[str, bool]:
    return {goal.what: goal.reached for goal in goals(comparison(**figures))}


def running_parent(directory: Path) -> AbstractContextManager[Server]:
    (port,) = free_ports(1)
    return running([Command((sys.executable, "-c", PARENT))], port, directory)


def own_resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_alive(pid: int) -> bool:
    """A process that has ended may stay in the table until its new parent looks at it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
