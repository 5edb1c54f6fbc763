"""The growth benchmark computes, judges, keeps and draws its curves as it says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from benchmarks.growth import DRAWN, ROWS, Run, draw_all, load, names_of_rows, record
from benchmarks.growth_curves import (
    KAFKA,
    OURS,
    Curve,
    describe,
    factors,
    from_json,
    grows_at_most,
    grows_at_most_by_step,
    is_not_above_kafka,
    overview,
    stays_below,
    to_json,
    verdict,
)
from benchmarks.growth_systems import requests_for, round_robin
from benchmarks.growth_topics import Topics
from benchmarks.requests import kafka_put_errors


def curve(ours: dict[int, float], kafka: dict[int, float] | None = None) -> Curve:
    systems = {OURS: ours} | ({KAFKA: kafka} if kafka else {})
    return Curve("stop", "SIGTERM to exit", "topics", "s", systems)


def test_growth_factors_are_those_from_each_size_to_the_next() -> None:
    assert factors({1_000: 8.0, 10: 1.0, 100: 2.0}) == [(10.0, 2.0), (10.0, 4.0)]
    assert factors({10: 3.0}) == []
    assert factors({10: 0.0, 100: 1.0}) == [(10.0, float("inf"))]


def test_growth_between_two_sizes_is_judged_by_their_ratio() -> None:
    target = grows_at_most(3, 100, 10_000)
    assert verdict(target, curve({100: 2.0, 1_000: 50.0, 10_000: 6.0})) == "met"
    assert verdict(target, curve({100: 2.0, 10_000: 6.1})) == "MISSED"
    assert verdict(target, curve({100: 2.0, 1_000: 6.1})) == "not measured"


def test_growth_by_step_is_judged_at_every_step() -> None:
    target = grows_at_most_by_step(2)
    assert verdict(target, curve({1: 1.0, 10: 2.0, 100: 4.0})) == "met"
    assert verdict(target, curve({1: 1.0, 10: 2.1, 100: 1.0})) == "MISSED"
    assert verdict(target, curve({1: 1.0})) == "not measured"


def test_a_bound_holds_at_its_size_or_everywhere() -> None:
    values = curve({10: 30.0, 100: 10.0})
    assert verdict(stays_below(20, "ms", 100), values) == "met"
    assert verdict(stays_below(20, "ms", 10), values) == "MISSED"
    assert verdict(stays_below(20, "ms"), values) == "MISSED"
    assert verdict(stays_below(20, "ms", 1_000), values) == "not measured"


def test_kafka_is_the_bound_only_where_it_was_measured() -> None:
    target = is_not_above_kafka(100)
    assert verdict(target, curve({100: 1.0}, {100: 1.0})) == "met"
    assert verdict(target, curve({100: 1.1}, {100: 1.0})) == "MISSED"
    assert verdict(target, curve({100: 1.1}, {10: 1.0})) == "not measured"


def test_a_curve_is_described_with_its_growth_and_its_targets() -> None:
    measured = curve({10: 0.5, 100: 1.0}, {100: 4.0})
    measured.notes[100] = "exit code 0"
    lines = list(describe(measured, [stays_below(0.9, "s")]))
    assert "| topics | 10 | 100 | growth |" in lines
    assert "| QuackMQ | 0.5 | 1 | ×2 per ×10 |" in lines
    assert "| Kafka | – | 4 |  |" in lines
    assert "- at most 0.9 s everywhere: MISSED" in lines
    assert "- at 100: exit code 0" in lines


def test_an_overview_has_one_table_for_each_dimension() -> None:
    other = Curve("get", "A get", "subscriptions", "ms", {OURS: {7: 250.0}})
    assert list(overview([curve({10: 0.5, 100: 1.0}, {100: 4.0}), other])) == [
        "| topics | | 10 | 100 | unit |",
        "|---|---|---:|---:|---|",
        "| SIGTERM to exit | QuackMQ | 0.5 | 1 | s |",
        "| SIGTERM to exit | Kafka | – | 4 | s |",
        "",
        "| subscriptions | | 7 | unit |",
        "|---|---|---:|---|",
        "| A get | QuackMQ | 250 | ms |",
        "",
    ]


def test_curves_come_back_from_json_as_they_were() -> None:
    measured = curve({10: 0.5, 100: 1.0}, {100: 4.0})
    measured.notes[10] = "a note"
    assert from_json("stop", to_json(measured)) == measured


def test_later_runs_of_kafka_alone_join_the_curves_of_its_label(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    record(path, "before", "a machine", True, [curve({10: 1.0})])
    record(path, "after", "a machine", True, [curve({10: 5.0})])
    for size in (10, 100):
        only_kafka = Curve("stop", "SIGTERM to exit", "topics", "s", {KAFKA: {size: 2.0}})
        record(path, "before", "a machine", True, [only_kafka])
    kept = load(path)
    both = curve({10: 1.0}, {10: 2.0, 100: 2.0})
    assert from_json("stop", kept["before"]["rows"]["stop"]) == both
    assert from_json("stop", kept["after"]["rows"]["stop"]) == curve({10: 5.0})


@pytest.mark.sweep
def test_pictures_show_each_row_and_are_the_same_when_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    rows = [ROWS[name].curve() for names in DRAWN.values() for name in names]
    for each in rows:
        each.systems[OURS] = {10: 1.0, 100: 30.0}
    record(path, "before", "a machine", True, rows)
    drawn = []
    for directory in ("once", "again"):
        draw_all(path, tmp_path / directory)
        drawn.append({file: (tmp_path / directory / file).read_bytes() for file in DRAWN})
    assert drawn[0] == drawn[1]
    for file, names in DRAWN.items():
        text = drawn[0][file].decode()
        assert all(ROWS[name].title[:20] in text for name in names)


def test_a_picture_without_any_rows_is_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    record(path, "before", "a machine", True, [curve({10: 1.0, 100: 2.0})])
    draw_all(path, tmp_path)
    assert (tmp_path / "growth-topics.svg").exists()
    assert not (tmp_path / "growth-others.svg").exists()


def test_every_row_but_one_is_in_a_picture() -> None:
    assert {name for names in DRAWN.values() for name in names} == set(ROWS) - {"exit-code"}


def test_requests_write_once_to_each_topic_and_are_sent_once_at_least() -> None:
    topics = [f"topic-{number}" for number in range(250)]
    requests = requests_for(topics)
    assert len(requests) == 3
    for topic in topics:
        assert sum(request.count(b"%s\0" % topic.encode()) for request in requests) == 1
    assert list(round_robin(requests, 1)) == requests
    assert list(round_robin(requests, 4)) == [*requests, requests[0]]


def test_errors_are_read_from_the_answer_to_a_produce_of_many_topics() -> None:
    answer = struct.pack(">ii", 1, 2)
    for name, error in ((b"ada", 0), (b"grace", 6)):
        answer += struct.pack(">h", len(name)) + name + struct.pack(">iihqqq", 1, 0, error, 0, 0, 0)
    assert kafka_put_errors(answer) == [0, 6]


@pytest.mark.processes
def test_a_broker_goes_through_all_rows_of_its_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Topics, "quick_sizes", (3,))
    monkeypatch.setattr(Topics, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(Topics, "QUICK_FLOOD", 3)
    monkeypatch.setattr(Topics, "QUICK_LARGE_BATCHES", 2)
    rows = [row for row in ROWS.values() if row.stage is Topics]
    run = Run(tmp_path, rows, True, [OURS])
    assert len(list(run.measure())) == 1
    assert {name: set(curve.ours) for name, curve in run.curves.items()} == {
        row.name: {3} for row in rows
    }
    assert run.curves["exit-code"].ours == {3: 0}


def test_rows_are_measured_in_the_order_of_the_table_however_they_are_named() -> None:
    """The memory of idle topics is measured before a flood, which fills the broker's buffers."""
    assert names_of_rows("peak-memory,slowest-produce,topic-memory") == [
        "topic-memory",
        "peak-memory",
        "slowest-produce",
    ]
