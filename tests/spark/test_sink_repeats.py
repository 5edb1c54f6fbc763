"""Writes that come again: a repeat adds nothing, and something else under its name is an error."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import StageConflict, TurnOutdated
from quackmq.spark.broker.staging import write_target
from tests.protocols.http.v1.serving import Client
from tests.spark.serving import Broker
from tests.spark.sinking import batch_of, batch_sink, rows, stream_sink, values

pytestmark = pytest.mark.usefixtures("task")


@pytest.fixture
def api(broker: Broker, topic: str) -> Any:
    broker.create(topic, 3)
    client = broker.client()
    yield client
    client.close()


def write(broker: Broker, topic: str, write_id: str, *tasks: list[bytes]) -> None:
    writer = batch_sink(broker, topic, writeId=write_id)
    told = [writer.write(iter([rows(value=task)] if task else [])) for task in tasks]
    writer.commit(told)


def run_batch(broker: Broker, topic: str, number: int, *tasks: list[bytes]) -> None:
    told = [
        stream_sink(broker, topic).write(iter([rows(value=task)] if task else [])) for task in tasks
    ]
    stream_sink(broker, topic).commit(told, number)


def repeats(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (each.levelname, each.getMessage())
        for each in caplog.records
        if each.name == "quackmq.spark.broker.staging"
    ]


# --- batch writes --------------------------------------------------------------------------------


def test_the_same_rows_in_other_tasks_and_another_order_are_a_repeat(
    broker: Broker, api: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(broker, topic, "nightly", [b"a", b"b"], [b"c"])
    assert repeats(caplog) == []
    write(broker, topic, "nightly", [b"c"], [], [b"b"], [b"a"])
    ((level, text),) = repeats(caplog)
    assert level == "INFO" and "nightly was repeated, with 3 rows" in text
    assert values(api, topic) == ["a", "b", "c"]


@pytest.mark.parametrize("tasks", [[[b"a"], [b"x"]], [[b"a"]], [[b"a", b"b", b"b"]], [[]], []])
def test_other_rows_under_a_write_id_are_an_error(
    broker: Broker, api: Client, topic: str, tasks: list[list[bytes]]
) -> None:
    write(broker, topic, "nightly", [b"a", b"b"])
    count = sum(map(len, tasks))
    with pytest.raises(StageConflict, match=f"'nightly'.* with 2 rows, and this write has {count}"):
        write(broker, topic, "nightly", *tasks)
    assert values(api, topic) == ["a", "b"]


def test_of_two_runs_at_once_with_other_rows_the_later_commit_is_an_error(
    broker: Broker, api: Client, topic: str
) -> None:
    both = [batch_sink(broker, topic, writeId="at once") for _ in range(2)]
    staged = [
        [writer.write(iter([rows(value=[value])]))]
        for writer, value in zip(both, (b"first", b"second"), strict=True)
    ]
    both[0].commit(staged[0])
    with pytest.raises(StageConflict, match="for other rows"):
        both[1].commit(staged[1])
    assert values(api, topic) == ["first"]


def test_a_write_id_belongs_to_its_topic(broker: Broker, api: Client, topic: str) -> None:
    other = f"{topic}.other"
    broker.create(other, 3)
    write(broker, topic, "nightly", [b"a"])
    write(broker, other, "nightly", [b"b"])
    assert (values(api, topic), values(api, other)) == (["a"], ["b"])


def test_rows_that_name_their_topics_are_a_repeat_only_with_the_same_topics(
    broker: Broker, api: Client, topic: str
) -> None:
    other = f"{topic}.other"
    broker.create(other, 3)

    def write_to(*topics: str) -> None:
        writer = batch_sink(broker, None, "value", "topic", writeId=f"of {topic}")
        batch = rows(value=[b"a", b"b"], topic=list(topics))
        writer.commit([writer.write(iter([batch]))])

    for _ in range(2):
        write_to(topic, other)
    with pytest.raises(StageConflict, match="for other rows"):
        write_to(other, topic)
    assert (values(api, topic), values(api, other)) == (["a"], ["b"])


def test_a_write_of_no_rows_is_not_remembered(broker: Broker, api: Client, topic: str) -> None:
    write(broker, topic, "nightly", [])
    write(broker, topic, "nightly", [b"a"])
    assert values(api, topic) == ["a"]


def test_a_failed_run_under_a_write_id_leaves_the_stage_of_another_run_alone(
    broker: Broker, api: Client, topic: str
) -> None:
    """Both stage under one key: what the other one has staged must not go."""
    running = batch_sink(broker, topic, writeId="nightly")
    told = [running.write(iter([rows(value=[b"a"])]))]
    failing = batch_sink(broker, topic, writeId="nightly")
    failing.abort([failing.write(iter([rows(value=[b"a"])])), None])
    running.commit(told)
    assert values(api, topic) == ["a"]


def test_keys_of_writes_are_told_apart_and_fit_whatever_their_topic_and_id() -> None:
    longest = "x" * 243
    targets = [
        write_target("a", "b/c"),
        write_target("a", "b"),
        write_target(None, "b"),
        write_target("t" * 249, longest),
        write_target("t" * 248, longest),
        write_target("t" * 249, longest[:-1]),
        write_target(None, None),
        write_target(None, None),
    ]
    keys = [each.key for each in targets] + [each.older_key for each in targets[:2]]
    assert len(set(keys)) == len(keys)
    assert all(key is not None and len(key.encode()) <= limits.NAME_BYTES for key in keys)
    assert write_target("t" * 249, longest) == write_target("t" * 249, longest)


def commit_as_older_version(api: Client, topic: str, key: str, *values: str) -> None:
    """Under a key without a topic, whose contents are the key itself."""
    messages = {"messages": [{"value": value} for value in values]}
    path = f"/v1/stages/spark-write%2F{key}"
    staged = api.put(f"{path}/parts/a/0?topic={topic}&partition=0&timestamp_ms=17", messages)
    assert staged.status == 200
    commit = {"receipts": [staged.json], "contents": f"spark-write/{key}"}
    assert api.post(f"{path}/commit", commit).status == 200


def test_a_write_that_an_older_version_committed_is_a_repeat_if_it_has_as_many_rows(
    broker: Broker, api: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit_as_older_version(api, topic, f"old-{topic}", "a", "b")
    write(broker, topic, f"old-{topic}", [b"a", b"b"])
    ((level, text),) = repeats(caplog)
    assert level == "WARNING" and "older version" in text
    stages = api.get("/v1/stages?limit=1000").json["stages"]
    assert [each for each in stages if topic in each["key"]] == []
    with pytest.raises(StageConflict, match="with 2 rows, and this write has 1"):
        write(broker, topic, f"old-{topic}", [b"a"])
    assert values(api, topic) == ["a", "b"]


# --- streams -------------------------------------------------------------------------------------


def test_the_last_batch_again_is_a_repeat_and_another_number_of_rows_a_warning(
    broker: Broker,
    api: Client,
    topic: str,
    task: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    batch_of(task, topic, 0)
    run_batch(broker, topic, 0, [b"a", b"b"])
    assert repeats(caplog) == []
    batch_of(task, topic, 0, "restarted")
    batches: list[list[list[bytes]]] = [[[b"c"], [b"d"]], [[b"a"]], [[]]]
    for tasks in batches:
        run_batch(broker, topic, 0, *tasks)
    levels = [level for level, _ in repeats(caplog)]
    assert levels == ["INFO", "WARNING", "WARNING"]
    assert "batch 0 of the streaming query" in repeats(caplog)[1][1]
    assert "with 1 rows; it was committed with 2" in repeats(caplog)[1][1]
    assert values(api, topic) == ["a", "b"]


def test_an_earlier_batch_is_an_error_that_names_the_checkpoint_and_the_way_out(
    broker: Broker, api: Client, topic: str, task: dict[str, str]
) -> None:
    for number in range(3):
        batch_of(task, topic, number)
        run_batch(broker, topic, number, [b"%d" % number])
    batch_of(task, topic, 1, "restored")
    told = f"batch 1 of the streaming query {topic} .* batch 2 was already committed.*checkpoint"
    with pytest.raises(TurnOutdated, match=told) as refused:
        run_batch(broker, topic, 1, [b"other"])
    with pytest.raises(TurnOutdated, match=told):
        run_batch(broker, topic, 1, [])
    assert values(api, topic) == ["0", "1", "2"]
    way_out = str(refused.value).partition("curl -X DELETE ")[2]
    path = way_out.removeprefix(f"http://{broker.host}:{broker.port}")
    assert api.delete(path).status == 204
    run_batch(broker, topic, 1, [b"other"])
    assert values(api, topic) == ["0", "1", "2", "other"]


def test_a_driver_that_was_overtaken_by_another_cannot_commit(
    broker: Broker, api: Client, topic: str, task: dict[str, str]
) -> None:
    batch_of(task, topic, 5, "slow")
    told = [stream_sink(broker, topic).write(iter([rows(value=[b"slow"])]))]
    for number in (5, 6):
        batch_of(task, topic, number, "fast")
        run_batch(broker, topic, number, [b"fast"])
    with pytest.raises(TurnOutdated, match="restored or copied checkpoint"):
        stream_sink(broker, topic).commit(told, 5)
    assert values(api, topic) == ["fast", "fast"]


def test_the_last_batch_again_for_another_topic_is_an_error_and_the_next_one_is_not(
    broker: Broker, api: Client, topic: str, task: dict[str, str]
) -> None:
    other = f"{topic}.other"
    broker.create(other, 3)
    batch_of(task, topic, 0)
    run_batch(broker, topic, 0, [b"a"])
    with pytest.raises(StageConflict, match=f"committed to {topic}, and comes again for {other}"):
        run_batch(broker, other, 0, [b"a"])
    batch_of(task, topic, 1)
    run_batch(broker, other, 1, [b"b"])
    assert (values(api, topic), values(api, other)) == (["a"], ["b"])


def test_a_batch_whose_commit_is_forgotten_while_it_is_repeated_is_not_half_written(
    broker: Broker, api: Client, topic: str, task: dict[str, str]
) -> None:
    batch_of(task, topic, 0)
    run_batch(broker, topic, 0, [b"a"])
    told = [stream_sink(broker, topic).write(iter([rows(value=[b"a"])]))]
    assert api.delete(f"/v1/series/spark%2F{topic}").status == 204
    told.append(stream_sink(broker, topic).write(iter([rows(value=[b"b"])])))
    with pytest.raises(StageConflict, match="forgotten it since: run it again"):
        stream_sink(broker, topic).commit(told, 0)
    assert values(api, topic) == ["a"]


def test_batches_without_rows_are_not_committed_and_leave_nothing(
    broker: Broker, api: Client, topic: str, task: dict[str, str]
) -> None:
    batch_of(task, topic, 0)
    run_batch(broker, topic, 0, [])
    assert api.get(f"/v1/series/spark%2F{topic}").status == 404
    run_batch(broker, topic, 0, [b"a"])
    assert values(api, topic) == ["a"]
