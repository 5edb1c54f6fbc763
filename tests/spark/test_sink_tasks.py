"""What tasks and the driver do at a broker, without Spark around them: S3, and bad input."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from aiokafka.partitioner import murmur2
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from quackmq import limits
from quackmq.broker import BrokerSettings
from quackmq.errors import (
    IllegalTopicName,
    InvalidRequest,
    QuackError,
    QuackTimeout,
    RecordTooLarge,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.spark import limits as spark_limits
from quackmq.spark.broker.http import Http
from quackmq.spark.sink.sink import BatchSink, StreamSink
from tests.protocols.http.v1.serving import Client, Serving, serving
from tests.spark.sinking import (
    batch_of,
    batch_sink,
    messages,
    options,
    rows,
    schema_of,
    stream_sink,
    values,
)

pytestmark = pytest.mark.usefixtures("task")

_numbers = count()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def api(served: Serving) -> Iterator[Client]:
    client = served.client()
    yield client
    client.close()


@pytest.fixture
def topic(api: Client) -> str:
    name = f"topic-{next(_numbers)}"
    assert api.post("/v1/topics", {"name": name, "partitions": 3}).status == 201
    return name


# --- batch writes --------------------------------------------------------------------------------


def test_rows_are_written_with_all_their_columns(served: Serving, api: Client, topic: str) -> None:
    names = ("value", "key", "headers", "partition", "timestamp", "other")
    writer = batch_sink(served, topic, *names)
    batch = rows(
        other=[1.5, 2.5],
        value=[b"with everything", b"with nothing"],
        key=["duck", None],
        headers=[[("colour", b"green"), ("empty", None)], None],
        partition=[2, 2],
        timestamp=[1_700_000_000_123_456, None],
    )
    before_ms = time.time_ns() // 1_000_000
    writer.commit([writer.write(iter([batch]))])
    first, second = messages(api, topic, 2)
    assert (first["key"], first["value"], first["timestamp_ms"]) == (
        "duck",
        "with everything",
        1_700_000_000_123,
    )
    assert [(each["name"], each["value"]) for each in first["headers"]] == [
        ("colour", "green"),
        ("empty", None),
    ]
    assert (second["key"], second["value"]) == (None, "with nothing")
    assert second["timestamp_ms"] >= before_ms
    assert not second.get("headers")


def test_nothing_is_seen_before_the_commit_and_attempts_that_are_not_named_never(
    served: Serving, api: Client, topic: str
) -> None:
    writer = batch_sink(served, topic)
    writer.write(iter([rows(value=[b"of an attempt that died"])]))
    winners = [writer.write(iter([rows(value=[value])])) for value in (b"a", b"b")]
    assert values(api, topic) == []
    writer.commit(pickle.loads(pickle.dumps(winners)))
    assert values(api, topic) == ["a", "b"]
    assert api.get("/v1/stages").json["stages"] == []


def test_an_aborted_write_leaves_nothing(served: Serving, api: Client, topic: str) -> None:
    writer = batch_sink(served, topic)
    writer.abort([writer.write(iter([rows(value=[b"gone"])])), None])
    assert api.get("/v1/stages").json["stages"] == []
    writer.abort([writer.write(iter([])), None])
    assert values(api, topic) == []


def test_a_job_that_is_run_again_with_its_write_id_adds_nothing(
    served: Serving, api: Client, topic: str
) -> None:
    for _ in range(2):
        writer = batch_sink(served, topic, writeId=f"nightly {topic}")
        writer.commit([writer.write(iter([rows(value=[b"once"])])) for _ in range(2)])
    assert values(api, topic) == ["once"] * 2
    both = [batch_sink(served, topic, writeId=f"at once {topic}") for _ in range(2)]
    staged = [[each.write(iter([rows(value=[b"either"])]))] for each in both]
    for writer, told in zip(both, staged, strict=True):
        writer.commit(told)
    assert values(api, topic).count("either") == 1


def test_keys_land_where_kafkas_clients_put_them_and_rows_without_are_spread(
    served: Serving, api: Client, topic: str
) -> None:
    names = [f"duck-{number}" for number in range(200)]
    writer = batch_sink(served, topic, "value", "key")
    writer.commit([writer.write(iter([rows(value=[b"x"] * 200, key=names)]))])
    for message in messages(api, topic):
        expected = (murmur2(message["key"].encode()) & 0x7FFFFFFF) % 3
        assert message["partition"] == expected
    many = 3 * spark_limits.SPARK_SPREAD_ROWS
    writer = batch_sink(served, topic)
    before = [len(messages(api, topic, number)) for number in range(3)]
    writer.commit([writer.write(iter([rows(value=[b"y"] * many)]))])
    described = api.get(f"/v1/topics/{topic}").json["partitions"]
    # A marker of each commit is in each partition, too.
    grown = [each["next_offset"] - 2 - there for each, there in zip(described, before, strict=True)]
    assert grown == [spark_limits.SPARK_SPREAD_ROWS] * 3


def test_rows_may_name_their_topics(served: Serving, api: Client, topic: str) -> None:
    other = f"{topic}.other"
    assert api.post("/v1/topics", {"name": other, "partitions": 3}).status == 201
    writer = batch_sink(served, None, "value", "topic")
    batch = rows(value=[b"1", b"2", b"3"], topic=[topic, other, topic])
    writer.commit([writer.write(iter([batch]))])
    assert (values(api, topic), values(api, other)) == (["1", "3"], ["2"])
    writer = batch_sink(served, topic, "value", "topic")
    writer.commit([writer.write(iter([rows(value=[b"4"], topic=[other])]))])
    assert values(api, topic) == ["1", "3", "4"], "the option goes before the column, as in Spark"


def test_null_values_and_no_rows_at_all_are_fine(served: Serving, api: Client, topic: str) -> None:
    writer = batch_sink(served, topic, "value", "key")
    nothing = pa.array([None], pa.binary())
    told = [writer.write(iter([rows(value=nothing, key=["k"])])), writer.write(iter([]))]
    writer.commit([*told, None])
    (message,) = messages(api, topic)
    assert (message["key"], message["value"]) == ("k", None)
    writer = batch_sink(served, topic)
    writer.commit([writer.write(iter([]))])
    writer.commit([])


def test_large_writes_go_in_many_calls_in_the_order_of_the_rows(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_limits, "SPARK_CHUNK_BYTES", 10_000)
    writer = batch_sink(served, topic, "value", "partition")
    texts = [b"%06d%s" % (number, b"x" * 100) for number in range(900)]
    batches = [
        rows(value=texts[start : start + 300], partition=[1] * 300) for start in (0, 300, 600)
    ]
    told = writer.write(iter(batches))
    assert told.staged.summary is not None
    assert told.staged.summary["calls"] > 5
    writer.commit([told])
    assert [each["value"].encode() for each in messages(api, topic, 1)] == texts


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_batches_may_be_compressed(
    served: Serving, api: Client, topic: str, compression: str
) -> None:
    settings: dict[str, Any] = {"kafka.compression.type": compression}
    writer = batch_sink(served, topic, **settings)
    writer.commit([writer.write(iter([rows(value=[b"x" * 1000] * 10)]))])
    assert values(api, topic) == ["x" * 1000] * 10


# --- streams -------------------------------------------------------------------------------------


def test_a_batch_of_a_query_counts_once_through_restarts_and_replays(
    served: Serving, api: Client, topic: str, task: dict[str, str]
) -> None:
    query = f"query of {topic}"
    for number in range(3):
        batch_of(task, query, number)
        told = [stream_sink(served, topic).write(iter([rows(value=[b"%d" % number])]))]
        for _ in range(2):  # an answer that was lost
            stream_sink(served, topic).commit(told, number)
    batch_of(task, query, 2, "restarted")
    told = [stream_sink(served, topic).write(iter([rows(value=[b"again"])])) for _ in range(3)]
    stream_sink(served, topic).commit(told, 2)
    assert values(api, topic) == ["0", "1", "2"]
    assert api.get("/v1/stages").json["stages"] == []


def test_what_a_run_that_died_staged_does_not_come_with_the_next_one(
    served: Serving, api: Client, topic: str, task: dict[str, str]
) -> None:
    query = f"query of {topic}"
    batch_of(task, query, 0, "died")
    stream_sink(served, topic).write(iter([rows(value=[b"staged by a dead run"])]))
    batch_of(task, query, 0, "lives")
    told = stream_sink(served, topic).write(iter([rows(value=[b"counts"])]))
    stream_sink(served, topic).commit([told], 0)
    assert values(api, topic) == ["counts"]
    assert api.get("/v1/stages").json["stages"] == []


def test_without_a_query_and_a_batch_a_stream_writes_nothing(
    served: Serving, topic: str, task: dict[str, str]
) -> None:
    with pytest.raises(InvalidRequest, match="exactly once"):
        stream_sink(served, topic).write(iter([rows(value=[b"x"])]))
    batch_of(task, f"query of {topic}", 7)
    told = stream_sink(served, topic).write(iter([rows(value=[b"x"])]))
    with pytest.raises(InvalidRequest, match="batch 7"):
        stream_sink(served, topic).commit([told], 8)
    with pytest.raises(InvalidRequest, match="writeId"):
        StreamSink(options(served, topic, writeId="x"), schema_of("value"), False)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ([("key", StringType())], "no column `value`; they have key"),
        ([("value", IntegerType())], "`value` is int, and must be string or binary"),
        ([("value", StringType()), ("key", ArrayType(StringType()))], "column `key`"),
        ([("value", StringType()), ("partition", LongType())], "is bigint, and must be int"),
        ([("value", StringType()), ("timestamp", LongType())], "column `timestamp`"),
        ([("value", StringType()), ("headers", ArrayType(StringType()))], "column `headers`"),
        ([("value", StringType()), ("topic", BinaryType())], "column `topic`"),
        ([("value", StringType()), ("value", StringType())], "2 columns `value`"),
    ],
)
def test_columns_that_cannot_be_written_are_named(
    served: Serving, topic: str, columns: list[tuple[str, DataType]], what: str
) -> None:
    schema = StructType([StructField(*column) for column in columns])
    with pytest.raises(InvalidRequest, match=what):
        BatchSink(options(served, topic), schema, False)


def test_a_topic_that_is_not_there_is_created_as_by_every_other_listener(
    served: Serving, api: Client, topic: str, task: dict[str, str]
) -> None:
    writer = batch_sink(served, f"{topic}.new")
    writer.commit([writer.write(iter([rows(value=[b"a"])]))])
    assert values(api, f"{topic}.new", partitions=1) == ["a"]
    batch_of(task, topic, 0)
    told = stream_sink(served, f"{topic}.stream").write(iter([rows(value=[b"b"])]))
    stream_sink(served, f"{topic}.stream").commit([told], 0)
    assert values(api, f"{topic}.stream", partitions=1) == ["b"]
    writer = batch_sink(served, None, "value", "topic")
    batch = rows(value=[b"c"], topic=[f"{topic}.column"])
    writer.commit([writer.write(iter([batch])), writer.write(iter([batch]))])
    assert values(api, f"{topic}.column", partitions=1) == ["c", "c"]
    with pytest.raises(IllegalTopicName):
        writer.write(iter([rows(value=[b"d"], topic=["not/a topic"])]))


def test_a_broker_that_creates_no_topics_refuses_a_missing_one_before_anything_runs() -> None:
    with serving(settings=BrokerSettings(auto_create_topics=False)) as closed:
        with pytest.raises(UnknownTopic, match="there is no topic 'nowhere': create it first"):
            batch_sink(closed, "nowhere")


def test_no_topic_and_overwriting_are_refused_before_anything_runs(
    served: Serving, topic: str
) -> None:
    with pytest.raises(InvalidRequest, match="option topic"):
        batch_sink(served, None)
    with pytest.raises(InvalidRequest, match="append"):
        batch_sink(served, topic, overwrite=True)


@pytest.mark.parametrize(
    ("batch", "error", "what"),
    [
        ({"topic": [None]}, InvalidRequest, "`topic` is null"),
        ({"partition": [3]}, UnknownPartition, "has 3; topic .* 0 to 2"),
        ({"partition": [-1]}, UnknownPartition, "has -1"),
        ({"timestamp": [-1_000]}, InvalidRequest, "before 1970"),
        ({"headers": [[(None, b"x")]]}, InvalidRequest, "no key"),
    ],
)
def test_a_row_that_cannot_be_written_fails_its_task(
    served: Serving,
    api: Client,
    topic: str,
    batch: dict[str, Any],
    error: type[QuackError],
    what: str,
) -> None:
    name = None if "topic" in batch else topic
    kinds = {"topic": pa.string()}
    columns = {
        column: pa.array(value, kinds[column]) if column in kinds else value
        for column, value in batch.items()
    }
    writer = batch_sink(served, name, "value", *batch)
    with pytest.raises(error, match=what):
        writer.write(iter([rows(value=[b"x"], **columns)]))
    assert values(api, topic) == []


def test_values_over_the_topics_limit_are_refused_by_the_broker(
    served: Serving, api: Client
) -> None:
    name = f"small-{next(_numbers)}"
    policy = {"batch_bytes": 1_000}
    assert api.post("/v1/topics", {"name": name, "policy": policy}).status == 201
    writer = batch_sink(served, name)
    writer.commit([writer.write(iter([rows(value=[b"x" * 100] * 50)]))])
    with pytest.raises(RecordTooLarge, match="accepts at most 1000"):
        writer.write(iter([rows(value=[b"x" * 2_000])]))
    with pytest.raises(RecordTooLarge, match="the most that a batch holds"):
        writer.write(iter([rows(value=[b"x" * limits.BATCH_BYTES])]))


def test_a_broker_that_stays_away_is_told_of_when_the_time_is_over(served: Serving) -> None:
    given = {
        **options(served, "ducks", retryTimeoutMs="300"),
        "quackmq.http.address": "127.0.0.1:1",
    }
    with pytest.raises(QuackTimeout, match=r"topics/ducks of the broker at 127\.0\.0\.1:1"):
        BatchSink(given, schema_of("value"), False)


def test_a_broker_that_comes_back_in_time_is_not_noticed(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = batch_sink(served, topic)
    tries = _failing(monkeypatch, fails=3)
    writer.commit([writer.write(iter([rows(value=[b"x"])]))])
    assert values(api, topic) == ["x"]
    assert next(tries) > 3


def _failing(monkeypatch: pytest.MonkeyPatch, fails: int) -> Iterator[int]:
    """The first answers are lost, whatever was asked: the broker did it all the same."""
    asked = count(1)
    ask: Callable[..., Any] = Http._send

    def lossy(self: Any, *arguments: Any) -> Any:
        answer = ask(self, *arguments)
        if arguments[0] != "GET" and next(asked) <= fails:
            raise ConnectionResetError("the answer is lost")
        return answer

    monkeypatch.setattr(Http, "_send", lossy)
    return asked
