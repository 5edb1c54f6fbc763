"""The source without Spark around it: what a driver plans and what its tasks read (S1, S2)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan
from pyspark.sql.types import BinaryType, LongType, StringType, StructType

from quackmq import limits
from quackmq.errors import (
    DamagedData,
    InvalidRequest,
    OffsetOutOfRange,
    QuackTimeout,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Batch
from quackmq.spark import limits as spark_limits
from quackmq.spark.source import task as reading
from quackmq.spark.source.rows import decode_group
from quackmq.spark.source.source import PushingSource, QuackSource
from tests.broker.transacting import Transactor
from tests.kit.batches import sealed
from tests.protocols.http.v1.serving import CALLER
from tests.spark.serving import Broker, Query, batch_reader, read, rows_of


def numbers(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in rows]


def test_a_batch_has_the_records_of_all_partitions_with_the_columns_of_kafkas_source(
    broker: Broker, topic: str
) -> None:
    broker.create(topic, partitions=2)
    broker.publish(topic, ["a", None, ""], partition=0)
    broker.publish(topic, ["b"], partition=1)
    rows = read(broker.options(topic))
    assert [(row["partition"], row["offset"], row["value"]) for row in rows] == [
        (0, 0, b"a"),
        (0, 1, None),
        (0, 2, b""),
        (1, 0, b"b"),
    ]
    assert list(rows[0])[:7] == [
        *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType"),
    ]
    assert all(row["topic"] == topic and row["key"] is None for row in rows)
    assert all(abs((row["append_time"] - row["timestamp"]).total_seconds()) < 60 for row in rows)


def test_headers_are_a_column_where_they_are_asked_for(broker: Broker, topic: str) -> None:
    import confluent_kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": broker.address})
    producer.produce(topic, key="k", value="v", headers=[("h", b"1"), ("h", None)])
    producer.produce(topic, value="w")
    producer.flush(30)
    with_headers = read(broker.options(topic, includeHeaders="true"))
    assert [row["headers"] for row in with_headers] == [
        [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
        None,
    ]
    assert list(with_headers[0])[7] == "headers"
    assert "headers" not in read(broker.options(topic))[0]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_come_back_whatever_they_were_compressed_with(
    broker: Broker, topic: str, compression: str
) -> None:
    values = [f"{number:05d}" * 20 for number in range(2_000)]
    broker.publish(topic, values, settings={"compression.type": compression, "batch.size": 20_000})
    rows = read(broker.options(topic))
    assert [row["value"].decode() for row in rows] == values
    assert numbers(rows) == [(0, offset) for offset in range(2_000)]


def test_a_schema_picks_columns_and_no_others_are_read(broker: Broker, topic: str) -> None:
    broker.publish(topic, ["a", "b"])
    wanted = StructType().add("offset", LongType()).add("value", BinaryType())
    assert read(broker.options(topic), wanted) == [
        {"offset": 0, "value": b"a"},
        {"offset": 1, "value": b"b"},
    ]
    with pytest.raises(InvalidRequest, match="no column 'ofset'"):
        batch_reader(broker.options(topic), StructType().add("ofset", LongType()))
    with pytest.raises(InvalidRequest, match="value is binary, not string: cast it"):
        batch_reader(broker.options(topic), StructType().add("value", StringType()))


def test_offsets_and_times_say_where_a_batch_begins_and_ends(broker: Broker, topic: str) -> None:
    broker.create(topic, partitions=2)
    for partition in (0, 1):
        broker.publish(topic, [str(number) for number in range(10)], partition)

    def offsets(**options: object) -> list[tuple[int, int]]:
        return numbers(read(broker.options(topic, **options)))

    def places(zero: int, one: int) -> str:
        return json.dumps({topic: {"0": zero, "1": one}})

    assert offsets(startingOffsets=places(8, -2), endingOffsets=places(-1, 2)) == [
        *((0, 8), (0, 9)),
        *((1, 0), (1, 1)),
    ]
    assert offsets(startingOffsets=places(10, 10)) == []
    everything = read(broker.options(topic))
    middle_ms = int(everything[5]["timestamp"].timestamp() * 1000)
    found = read(broker.options(topic, startingTimestamp=middle_ms))
    assert found == [
        row
        for row in everything
        if int(row["timestamp"].timestamp() * 1000) >= middle_ms or row["partition"] == 1
    ]
    assert offsets(startingTimestamp=0, endingTimestamp=2**50) == numbers(everything)
    with pytest.raises(InvalidRequest, match="startingTimestamp: partition 0 .* has nothing at"):
        offsets(startingTimestamp=2**50)
    late = {"startingTimestamp": 2**50, "startingOffsetsByTimestampStrategy": "latest"}
    assert offsets(**late) == []
    by_partition = json.dumps({topic: {"0": 2**50, "1": 0}})
    assert offsets(endingOffsetsByTimestamp=by_partition) == [(0, n) for n in range(10)]


def test_topics_are_chosen_by_pattern_or_partitions_by_number(broker: Broker, topic: str) -> None:
    for name, partitions in ((f"{topic}.a", 1), (f"{topic}.b", 3), (f"{topic}x", 1)):
        broker.create(name, partitions)
        for partition in range(partitions):
            broker.publish(name, ["v"], partition)
    found = read(broker.options(subscribePattern=rf"{topic}\..*"))
    assert sorted((row["topic"], row["partition"]) for row in found) == [
        (f"{topic}.a", 0),
        *((f"{topic}.b", partition) for partition in range(3)),
    ]
    found = read(broker.options(assign=json.dumps({f"{topic}.b": [0, 2]})))
    assert numbers(found) == [(0, 0), (2, 0)]
    with pytest.raises(UnknownPartition, match="assign: topic .* has 3 partitions, and no 3"):
        read(broker.options(assign=json.dumps({f"{topic}.b": [3]})))


def test_what_is_not_there_is_named_with_its_option(broker: Broker, topic: str) -> None:
    with pytest.raises(UnknownTopic, match=f"subscribe: there is no topic {topic}"):
        read(broker.options(topic))
    broker.publish(topic, ["a"])
    with pytest.raises(OffsetOutOfRange, match="startingOffsets: partition 0 .* 0 to 1, not 7"):
        read(broker.options(topic, startingOffsets=json.dumps({topic: {"0": 7}})))
    clamped = {"startingOffsets": json.dumps({topic: {"0": 7}}), "failOnDataLoss": "false"}
    assert read(broker.options(topic, **clamped)) == []
    with pytest.raises(InvalidRequest, match="startingOffsets: .* 0 are read, and 0, 1 have"):
        read(broker.options(topic, startingOffsets=json.dumps({topic: {"0": 0, "1": 0}})))


def test_a_broker_that_is_away_is_told_in_one_sentence() -> None:
    options = {
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "subscribe": "ducks",
        "retryTimeoutMs": "300",
    }
    with pytest.raises(QuackTimeout, match="kafka.bootstrap.servers=127.0.0.1:1"):
        read(options)
    options["quackmq.http.address"] = "127.0.0.1:1"
    with pytest.raises(QuackTimeout, match="POST /v1/offsets of the broker at 127.0.0.1:1"):
        read(options)
    options["quackmq.http.address"] = "somewhere"
    with pytest.raises(InvalidRequest, match="quackmq.http.address cannot be 'somewhere'"):
        read(options)


def test_only_what_is_committed_is_read_and_publishers_have_their_names(
    broker: Broker, topic: str
) -> None:
    broker.create(topic)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    broker.run(transactor.send(b"aborted", topic=topic))
    broker.run(transactor.abort())
    broker.run(transactor.send(b"committed", topic=topic))
    broker.run(transactor.commit())
    broker.publish(topic, ["plain"])
    broker.run(transactor.send(b"open", topic=topic))
    rows = read(broker.options(topic))
    assert [(row["value"], row["publisher"]) for row in rows] == [
        (b"committed", f"till of {topic}"),
        (b"plain", None),
    ]
    assert rows[0]["producer_id"] == transactor.producer.producer_id
    assert rows[0]["sequence"] is not None
    broker.run(transactor.abort())


def test_tasks_share_a_topic_and_lose_nothing_between_them(broker: Broker, topic: str) -> None:
    broker.create(topic, partitions=3)
    for partition, count in ((0, 1_000), (1, 10), (2, 300)):
        broker.publish(topic, ["x" * 50] * count, partition, {"batch.size": 2_000})
    reader: Any = batch_reader(broker.options(topic, minPartitions=7))
    tasks = reader.partitions()
    assert len(tasks) >= 7
    travelled = pickle.loads(pickle.dumps(reader))
    rows = [row for task in pickle.loads(pickle.dumps(tasks)) for row in rows_of(travelled, [task])]
    assert numbers(rows) == [
        *((0, offset) for offset in range(1_000)),
        *((1, offset) for offset in range(10)),
        *((2, offset) for offset in range(300)),
    ]


def test_filters_leave_out_partitions_offsets_and_what_is_too_early(
    broker: Broker, topic: str
) -> None:
    broker.create(topic, partitions=2)
    for partition in (0, 1):
        broker.publish(topic, [str(number) for number in range(10)], partition)
    source = PushingSource(broker.options(topic))

    def read_with(*filters: Any) -> list[dict[str, Any]]:
        reader: Any = source.reader(source.schema())
        assert list(reader.pushFilters(list(filters))) == list(filters)
        return rows_of(reader, reader.partitions())

    everything = read_with()
    narrow = (
        EqualTo(("partition",), 1),
        GreaterThanOrEqual(("offset",), 3),
        LessThan(("offset",), 5),
    )
    assert numbers(read_with(*narrow)) == [(1, 3), (1, 4)]
    time = everything[5]["timestamp"]
    found = read_with(GreaterThanOrEqual(("timestamp",), time))
    assert set(numbers(found)) >= {
        (row["partition"], row["offset"]) for row in everything if row["timestamp"] >= time
    }
    assert read_with(EqualTo(("topic",), "another")) == []
    plain: Any = QuackSource(broker.options(topic)).reader(source.schema())
    assert "pushFilters" not in type(plain).__dict__


# --- streams -------------------------------------------------------------------------------------


Stream = Callable[..., Query]


@pytest.fixture
def stream(broker: Broker, topic: str) -> Iterator[Stream]:
    """Makes queries on the test's topic, and stops them."""
    made: list[Query] = []

    def make(log: Any = None, **options: object) -> Query:
        name = None if "subscribePattern" in options else topic
        made.append(Query(broker.options(name, **options), log))
        return made[-1]

    yield make
    for query in made:
        query.close()


def test_a_stream_reads_what_comes_once_and_goes_on_after_a_restart_s2(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["before"])
    query = stream()
    assert query.step() is None
    broker.publish(topic, ["a", "b"])
    assert query.step() == 2
    broker.publish(topic, ["c"])
    again = stream(query.log)
    again.drain()
    assert [row["value"] for row in query.rows + again.rows] == [b"a", b"b", b"c"]


def test_latest_stays_where_it_was_until_the_first_batch_and_when_that_is_repeated(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["before"])
    query = stream()
    first = query.reader.initialOffset()
    broker.publish(topic, ["a"])
    assert query.reader.initialOffset() == first
    assert query.step() == 1
    broker.publish(topic, ["b"])
    restarted = stream(query.log)
    assert restarted.repeat() == 1
    restarted.drain()
    assert [row["value"] for row in restarted.rows] == [b"a", b"b"]


def test_a_named_query_that_died_before_its_first_batch_begins_where_it_began(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["before"])
    query = stream(groupId=f"flock-{topic}")
    assert query.step() is None
    broker.publish(topic, ["a"])
    restarted = stream(groupId=f"flock-{topic}")
    restarted.drain()
    assert [row["value"] for row in restarted.rows] == [b"a"]
    restarted.close()
    fresh = stream(groupId=f"flock-{topic}")
    fresh.drain()
    assert fresh.rows == [], "it has got on since: latest is latest again"


def test_offsets_and_bytes_a_trigger_bound_a_batch(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.create(topic, partitions=2)
    for partition in (0, 1):
        broker.publish(topic, ["x" * 100] * 50, partition)
    query = stream(startingOffsets="earliest", maxOffsetsPerTrigger=30)
    sizes = []
    while (size := query.step()) is not None:
        sizes.append(size)
    assert sizes == [30, 30, 30, 10]
    assert sorted(numbers(query.rows)) == [(p, n) for p in (0, 1) for n in range(50)]
    by_bytes = stream(startingOffsets="earliest", maxBytesPerTrigger=4_000)
    first = by_bytes.step()
    assert first is not None and 5 <= first <= 40


def test_a_batch_waits_for_enough_offsets_but_not_for_ever(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["a"])
    settings = {"startingOffsets": "earliest", "minOffsetsPerTrigger": 3}
    query = stream(**settings)
    assert query.step() is None
    broker.publish(topic, ["b", "c"])
    assert query.step() == 3
    hasty = stream(**settings, maxTriggerDelay="0s", maxOffsetsPerTrigger=2)
    assert (hasty.step(), hasty.step()) == (2, 1)
    ending = stream(**{**settings, "minOffsetsPerTrigger": 100})
    ending.reader.prepareForTriggerAvailableNow()
    assert ending.step() == 3


def test_a_stream_that_is_to_end_ends_with_what_was_there(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["a", "b", "c"])
    query = stream(startingOffsets="earliest", maxOffsetsPerTrigger=2)
    query.reader.prepareForTriggerAvailableNow()
    assert query.step() == 2
    broker.publish(topic, ["later"])
    assert query.step() == 1
    assert query.step() is None


def test_more_topics_than_one_question_may_name_are_asked_for_in_several(
    broker: Broker, topic: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_OFFSETS_TOPICS", 2)
    query = stream(subscribePattern=rf"{topic}\..*", startingOffsets="earliest")
    assert query.step() is None, "there is no such topic yet"
    for number in range(5):
        broker.publish(f"{topic}.{number}", [f"{number}"])
    query.drain()
    assert sorted(row["value"] for row in query.rows) == [b"%d" % number for number in range(5)]


def test_more_partitions_than_one_answer_may_have_are_asked_for_in_several(
    broker: Broker, topic: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        broker.create(f"{topic}.{number}", partitions=2)
        broker.publish(f"{topic}.{number}", [f"{number}"], partition=1)
    monkeypatch.setattr(limits, "HTTP_OFFSETS_PARTITIONS", 4)
    query = stream(subscribePattern=rf"{topic}\..*", startingOffsets="earliest")
    query.drain()
    assert sorted(row["value"] for row in query.rows) == [b"%d" % number for number in range(5)]


def test_a_topic_and_partitions_that_come_later_are_read_from_their_beginning(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(f"{topic}.a", ["a"])
    query = stream(subscribePattern=rf"{topic}\..*")
    assert query.step() is None
    broker.publish(f"{topic}.b", ["b"])
    broker.run(broker.broker.alter_topic(CALLER, f"{topic}.a", partitions=2))
    broker.publish(f"{topic}.a", ["c"], partition=1)
    query.drain()
    assert sorted(row["value"] for row in query.rows) == [b"b", b"c"]


def key_of(broker: Broker, topic: str) -> PartitionKey:
    return PartitionKey(broker.broker.topic(topic).id, 0)


def test_what_is_gone_before_it_was_read_fails_the_query_or_is_gone_over(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["a", "b", "c", "d"])
    query = stream(startingOffsets="earliest", maxOffsetsPerTrigger=1)
    assert query.step() == 1
    broker.run(broker.broker.trim(CALLER, key_of(broker, topic), 3))
    with pytest.raises(OffsetOutOfRange, match="offsets 1 to 2 .* gone: .* failOnDataLoss"):
        query.step()
    going_on = stream(query.log, failOnDataLoss="false")
    going_on.drain()
    assert [row["value"] for row in going_on.rows] == [b"d"]


def test_what_is_trimmed_between_plan_and_task_is_noticed_by_the_task(
    broker: Broker, topic: str
) -> None:
    broker.publish(topic, ["a", "b", "c"])
    for fails in ("true", "false"):
        reader: Any = batch_reader(broker.options(topic, failOnDataLoss=fails))
        tasks = reader.partitions()
        broker.run(broker.broker.trim(CALLER, key_of(broker, topic), 1 if fails == "true" else 2))
        if fails == "true":
            with pytest.raises(
                DamagedData, match="offsets 0 to 0 .* were deleted.* failOnDataLoss"
            ):
                rows_of(reader, tasks)
        else:
            assert [row["value"] for row in rows_of(reader, tasks)] == [b"c"]


def test_a_batch_that_cannot_be_opened_is_named_or_gone_over(broker: Broker, topic: str) -> None:
    broker.publish(topic, ["a"])
    append = Append(key_of(broker, topic), Batch.peek(sealed(b"\xff" * 20)))
    broker.run(broker_append(broker, topic, append))
    broker.publish(topic, ["b"])
    with pytest.raises(DamagedData, match="offsets 1 to 1 .* cannot be opened"):
        read(broker.options(topic))
    left = read(broker.options(topic, failOnDataLoss="false"))
    assert [(row["offset"], row["value"]) for row in left] == [(0, b"a"), (2, b"b")]


def test_batches_that_come_to_too_much_together_are_opened_as_they_are_wanted(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        broker.publish(topic, [str(number) * 10_000], settings={"compression.type": "zstd"})
    monkeypatch.setattr(spark_limits, "SPARK_DECODED_BYTES", 20_000)
    sizes: list[int] = []

    def noted(group: Any) -> Any:
        sizes.append(len(group))
        return decode_group(group)

    monkeypatch.setattr(reading, "decode_group", noted)
    reader: Any = batch_reader(broker.options(topic))
    (task,) = reader.partitions()
    rows = reader.read(task)
    assert next(rows).num_rows == 1
    assert sizes == [3, 1]
    assert sum(batch.num_rows for batch in rows) == 2


async def broker_append(broker: Broker, topic: str, append: Append) -> None:
    await broker.broker.publish_together(CALLER, broker.broker.topic(topic), [append])


def test_a_topic_made_anew_is_not_taken_for_the_one_of_the_checkpoint(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["old"] * 3)
    query = stream(startingOffsets="earliest", maxOffsetsPerTrigger=1)
    assert query.step() == 1
    planned: Any = batch_reader(broker.options(topic))
    tasks = planned.partitions()
    broker.run(broker.broker.delete_topic(CALLER, topic))
    with pytest.raises(UnknownTopic, match=f"there is no topic {topic}"):
        query.step()
    broker.publish(topic, ["new"] * 2)
    with pytest.raises(UnknownTopic, match=f"topic {topic} was made anew.*failOnDataLoss"):
        query.step()
    with pytest.raises(UnknownTopic, match="created again"):
        rows_of(planned, tasks)
    going_on = stream(query.log, failOnDataLoss="false")
    going_on.drain()
    assert [row["value"] for row in going_on.rows] == [b"new", b"new"]


def test_the_checkpoint_of_another_broker_is_refused(
    broker: Broker, topic: str, stream: Stream
) -> None:
    broker.publish(topic, ["a"])
    query = stream(startingOffsets="earliest")
    assert query.step() == 1
    elsewhere = {**query.log[-1], "cluster": "another"}
    broker.publish(topic, ["b"])
    going_on = stream([elsewhere], failOnDataLoss="false")
    assert going_on.step() == 1
    assert going_on.log[-1]["cluster"] == query.log[-1]["cluster"]
    with pytest.raises(InvalidRequest, match="the checkpoint is of broker another"):
        stream([elsewhere]).step()
    ahead = json.loads(json.dumps(query.log[-1]))
    ahead["topics"][topic]["offsets"]["0"] = 99
    with pytest.raises(OffsetOutOfRange, match="ends at 2, before offset 99"):
        stream([ahead]).step()
    ending = stream([ahead])
    ending.reader.prepareForTriggerAvailableNow()
    with pytest.raises(OffsetOutOfRange, match="ends at 2, before offset 99"):
        ending.step()


def test_a_query_that_is_ahead_of_its_broker_goes_on_with_what_comes(
    broker: Broker, topic: str, stream: Stream
) -> None:
    """As after a broker was put back from a copy: nothing that it takes then is left out."""
    broker.publish(topic, ["a"])
    query = stream(startingOffsets="earliest")
    assert query.step() == 1
    ahead = json.loads(json.dumps(query.log[-1]))
    ahead["topics"][topic]["offsets"]["0"] = 3
    repeated = stream([*query.log, ahead])
    with pytest.raises(OffsetOutOfRange, match="ends at 1: offsets up to 2 .* are gone"):
        repeated.repeat()
    going_on = stream([*query.log, ahead], failOnDataLoss="false")
    assert going_on.repeat() == 0
    assert (going_on.step(), going_on.step()) == (0, None), "it is written down where it is"
    broker.publish(topic, ["b", "c", "d"])
    going_on.drain()
    assert [row["value"] for row in going_on.rows] == [b"b", b"c", b"d"]


def test_a_topic_that_goes_between_plan_and_task_fails_the_task_or_is_gone_over(
    broker: Broker, topic: str
) -> None:
    broker.publish(topic, ["a"])
    readers: list[Any] = [
        batch_reader(broker.options(topic, failOnDataLoss=fails)) for fails in ("true", "false")
    ]
    plans = [reader.partitions() for reader in readers]
    broker.run(broker.broker.delete_topic(CALLER, topic))
    with pytest.raises(UnknownTopic, match=topic):
        rows_of(readers[0], plans[0])
    assert rows_of(readers[1], plans[1]) == []
