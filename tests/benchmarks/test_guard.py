"""The guard compares counted work as it says, and counts what a broker really does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.guard import (
    BYTECODE,
    INSTRUCTIONS,
    SYSTEM_CALLS,
    TURNS,
    BytecodeCounter,
    Verdict,
    compare,
    count,
    count_trace,
    load,
    record,
    table,
    undisturbed,
)


def verdict(counted: str, now: float, recorded: float | None) -> Verdict:
    return Verdict("an operation", counted, now, recorded)


def test_a_figure_within_its_tolerance_is_neither_worse_nor_better() -> None:
    for now in (95.3, 100.0, 104.9):
        assert not verdict(INSTRUCTIONS, now, 100.0).is_worse
        assert not verdict(INSTRUCTIONS, now, 100.0).is_better


def test_a_figure_beyond_its_tolerance_is_worse() -> None:
    assert verdict(INSTRUCTIONS, 105.1, 100.0).is_worse
    assert verdict(BYTECODE, 103.1, 100.0).is_worse
    assert not verdict(BYTECODE, 102.9, 100.0).is_worse


def test_a_figure_that_sank_by_more_than_its_tolerance_is_better() -> None:
    assert verdict(INSTRUCTIONS, 90.0, 100.0).is_better
    assert not verdict(INSTRUCTIONS, 90.0, 100.0).is_worse


@pytest.mark.parametrize("counted", [SYSTEM_CALLS, TURNS])
def test_one_more_call_or_turn_is_worse_where_there_are_few(counted: str) -> None:
    assert verdict(counted, 2.0, 1.0).is_worse
    assert verdict(counted, 7.0, 6.0).is_worse
    assert not verdict(counted, 6.0, 6.0).is_worse


def test_a_figure_that_was_never_recorded_is_not_worse_and_says_so() -> None:
    (only,) = compare({"put": {TURNS: 4.0}}, {})
    assert only == Verdict("put", TURNS, 4.0, None)
    assert not only.is_worse
    assert not only.is_better
    assert "not recorded" in table([only])


def test_the_table_shows_the_change_and_marks_what_is_worse() -> None:
    verdicts = compare(
        {"put": {BYTECODE: 1_100.0, TURNS: 1.0}}, {"put": {BYTECODE: 1_000.0, TURNS: 1.0}}
    )
    lines = table(verdicts).splitlines()[2:]
    assert lines == [
        "| put | bytecodes | 1,100 | 1,000 | +10.0% | WORSE |",
        "| put | loop turns | 1 | 1 | +0.0% |  |",
    ]


def test_recording_some_figures_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    assert load(path) == {}
    record(path, {"put": {BYTECODE: 1.0, TURNS: 2.0}, "fetch": {TURNS: 3.0}})
    record(path, {"put": {BYTECODE: 5.0}})
    assert load(path) == {"put": {BYTECODE: 5.0, TURNS: 2.0}, "fetch": {TURNS: 3.0}}


def test_figures_of_another_version_of_python_are_kept_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "guard.json"
    record(path, {"put": {TURNS: 1.0}})
    with monkeypatch.context() as patched:
        patched.setattr(guard, "environment", lambda: "Python 2.7, an abacus")
        assert load(path) == {}
        record(path, {"put": {TURNS: 9.0}})
    assert load(path) == {"put": {TURNS: 1.0}}


def test_repetitions_that_were_disturbed_do_not_count() -> None:
    assert undisturbed([9.0, 8.0, 8.0, 9.0, 17.0, 9.0, 8.0, 9.0]) == 8.0
    assert undisturbed([5.0]) == 5.0


def test_a_trace_is_counted_by_calls_that_ended() -> None:
    text = """\
101 epoll_wait(4, [{events=EPOLLIN}], 1024, -1) = 1
101 recvfrom(9, ""..., 65536, 0, NULL, NULL) = 190
102 futex(0x1, FUTEX_WAIT, 2, NULL) = 0
101 fdatasync(7 <unfinished ...>
102 pwrite64(8, ""..., 512, 0)       = 512
101 <... fdatasync resumed>)          = 0
101 sendto(9, ""..., 60, 0, NULL, 0) = 60
101 read(5, 0x1, 8)                   = -1 EAGAIN (Resource temporarily unavailable)
101 epoll_wait(4, [], 1024, 50)       = 0
101 --- SIGUSR1 {si_signo=SIGUSR1} ---
101 epoll_pwait(4 <unfinished ...>
101 <... epoll_pwait resumed>, [{events=EPOLLIN}], 1024, -1, NULL, 8) = 2
"""
    assert count_trace(text) == (7, 2)


@pytest.mark.processes
def test_the_same_operation_is_counted_twice_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BytecodeCounter, "takes", 5)
    taken = []
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        counts = directory / "counts"
        (figures,) = count(BytecodeCounter(counts), directory, counts, "HTTP put").values()
        taken.append(figures)
    assert taken[0][BYTECODE] > 1_000
    assert not [each for each in compare({"": taken[0]}, {"": taken[1]}) if each.is_worse]
