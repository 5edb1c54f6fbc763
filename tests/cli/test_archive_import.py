"""`quackmq archive import`: Parquet files into a topic of a running broker, each record once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from quackmq.cli import limits as cli_limits
from quackmq.cli import text
from quackmq.cli.inspect import archive_import
from quackmq.cli.main import main
from quackmq.model.partitioning import Partitioner, choose_partition
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Record
from quackmq.records.codec import decode
from tests.archive.support import NOON_MS, committed
from tests.cli.archives import add, make_store, numbered
from tests.interop.running import TESTER, RunningBroker
from tests.kit.server import SCRIPT
from tests.kit.waiting import wait_until
from tests.stores.local.directories import flip

NAME = "from the north"


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """350 records of two partitions."""
    topic_id = make_store(tmp_path / "data")
    add(tmp_path / "data", PartitionKey(topic_id, 0), [numbered(0, 200)])
    add(tmp_path / "data", PartitionKey(topic_id, 0), [numbered(200, 100)])
    add(tmp_path / "data", PartitionKey(topic_id, 1), [numbered(0, 50)])
    target = tmp_path / "export"
    assert main(["archive", "export", str(tmp_path / "data"), "ducks", str(target)]) == 0
    capsys.readouterr()
    return target


def run(source: Path, topic: str, broker: RunningBroker, *options: str) -> int:
    return main(["archive", "import", str(source), topic, "--broker", broker.address, *options])


def records(broker: RunningBroker, topic: str, partition: int = 0) -> list[tuple[Any, ...]]:
    """What a reader gets of them, but for their offsets."""
    found = [record for batch in broker.batches(topic, partition) for record in _data(batch)]
    return [(one.timestamp_ms, one.key, one.value, one.headers) for one in found]


def _data(batch: Any) -> list[Record]:
    return [] if batch.is_control else list(decode(batch))


def expected(first: int, count: int) -> list[tuple[Any, ...]]:
    return [
        (one.timestamp_ms, one.key, one.value, one.headers)
        for one in decode(numbered(first, count).batch)
    ]


def test_the_address_may_be_given_by_its_earlier_name(
    export: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["archive", "import", str(export), "named", "--to", broker.address]) == 0
    assert capsys.readouterr().out == "350 records imported into named, 0 were already there\n"


def test_an_export_comes_back_as_it_was(
    export: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(export, "swans", broker) == 0
    assert capsys.readouterr().out == "350 records imported into swans, 0 were already there\n"
    assert records(broker, "swans", 0) == expected(0, 300)
    assert records(broker, "swans", 1) == expected(0, 50)


def test_a_repeat_adds_nothing_unless_it_is_named(
    export: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(export, "swans", broker) == run(export, "swans", broker) == 0
    assert "0 records imported into swans, 350 were already there" in capsys.readouterr().out
    assert len(records(broker, "swans", 0)) == 300
    assert run(export, "swans", broker, "--name", "again") == 0
    assert len(records(broker, "swans", 0)) == 600


@pytest.mark.parametrize("step", ["before the records", "before the number", "before the end"])
def test_an_import_that_was_interrupted_goes_on_where_it_was(
    export: Path,
    broker: RunningBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: str,
) -> None:
    """Two transactions come through; the third breaks off within."""
    monkeypatch.setattr(cli_limits, "IMPORT_RECORDS", 60)
    monkeypatch.setattr(archive_import, "AIOKafkaProducer", breaking(step, after=2))
    assert run(export, "swans", broker) == 1
    said = capsys.readouterr().err
    assert "120 of 350 records are imported; run the command again to continue" in said
    monkeypatch.undo()
    assert run(export, "swans", broker) == 0
    assert "230 records imported into swans, 120 were already there" in capsys.readouterr().out
    assert committed_values(broker, "swans", 0) == [b"value %d" % n for n in range(300)]
    assert committed_values(broker, "swans", 1) == [b"value %d" % n for n in range(50)]


@pytest.mark.processes
def test_an_import_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a transaction, most likely: there are twelve of them, and it is killed after the
    first."""
    count = 12 * cli_limits.IMPORT_RECORDS
    pq.write_table(pa.table({"value": [b"%d" % number for number in range(count)]}), tmp_path / "a")
    command = [
        *SCRIPT,
        "archive",
        "import",
        str(tmp_path / "a"),
        "swans",
        "--broker",
        broker.address,
    ]
    command += ["--name", NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: held(broker, "swans") > 0 or process.poll() is not None)
        finally:
            process.kill()
    before = held(broker, "swans")
    assert 0 < before < count and before % cli_limits.IMPORT_RECORDS == 0
    assert run(tmp_path / "a", "swans", broker, "--name", NAME) == 0
    said = capsys.readouterr().out
    there = int(said.split(", ")[1].split()[0])
    assert before <= there, "what was on its way at the kill may have come through"
    assert said.startswith(f"{count - there} records imported into swans, ")
    assert committed_values(broker, "swans", 0) == [b"%d" % number for number in range(count)]


def held(broker: RunningBroker, topic: str) -> int:
    """How many records the broker has for good, by the number that it holds of their publisher."""
    if topic not in broker.broker.topics():
        return 0
    last = broker.call(broker.broker.messages.last_sequence(TESTER, topic, NAME))
    return 0 if last is None else last + 1


def breaking(step: str, after: int) -> type[Any]:
    """A producer whose process is as good as dead within a transaction."""

    class Breaking(AIOKafkaProducer):  # type: ignore[misc]  # its base has no types
        ended = 0

        async def send_batch(self, *arguments: Any, **more: Any) -> Any:
            self._maybe("before the records")
            return await super().send_batch(*arguments, **more)

        async def send_offsets_to_transaction(self, *arguments: Any) -> None:
            self._maybe("before the number")
            await super().send_offsets_to_transaction(*arguments)
            self._maybe("before the end")
            self.ended += 1

        def _maybe(self, now: str) -> None:
            if now == step and self.ended == after:
                raise ConnectionError("the line is dead")

    return Breaking


def committed_values(broker: RunningBroker, topic: str, partition: int) -> list[bytes]:
    """By a client that reads committed records only."""
    settings = {
        "bootstrap.servers": broker.address,
        "group.id": "reader",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
    found: list[bytes] = []
    with Consumer(settings) as consumer:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
        while True:
            message = consumer.poll(30)
            assert message is not None
            error = message.error()
            if error is None:
                found.append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                return found


def test_every_kind_of_record_comes_back(tmp_path: Path, broker: RunningBroker) -> None:
    """Null and empty keys and values, headers with and without a value, strange times, a record
    that is larger than a batch usually is."""
    all_kinds = [
        Record(0, 0, None, None, ()),
        Record(1, -1, b"", b"", (("", b""),)),
        Record(2, NOON_MS, b"\xff\x00", b"\x00" * 3, (("a", None), ("a", b"\xff"))),
        Record(3, 1, None, b"x" * (cli_limits.IMPORT_BATCH_BYTES + 1), ()),
        Record(4, 2, b"k", None, ()),
    ]
    topic_id = make_store(tmp_path / "data")
    add(tmp_path / "data", PartitionKey(topic_id, 0), [committed(all_kinds, 0)])
    assert main(["archive", "export", *map(str, (tmp_path / "data", "ducks", tmp_path / "x"))]) == 0
    assert run(tmp_path / "x", "swans", broker) == 0
    assert records(broker, "swans") == [
        (one.timestamp_ms, one.key, one.value, one.headers) for one in all_kinds
    ]


def test_anybodys_files_are_taken_with_a_column_of_values(
    tmp_path: Path, broker: RunningBroker
) -> None:
    day = datetime(2026, 11, 16, tzinfo=UTC)
    table = pa.table({"value": ["rain", None, "sun"], "key": ["a", "b", None], "more": [1, 2, 3]})
    pq.write_table(table.append_column("timestamp", [[day] * 3]), tmp_path / "b.parquet")
    pq.write_table(pa.table({"value": [b"first"]}), tmp_path / "a.parquet")
    (tmp_path / "_ignored.parquet").write_bytes(b"no Parquet at all")
    assert run(tmp_path, "weather", broker) == 0
    found = records(broker, "weather")
    assert [value for _, _, value, _ in found] == [b"first", b"rain", None, b"sun"]
    assert [key for _, key, _, _ in found] == [None, b"a", b"b", None]
    assert {time for time, *_ in found[1:]} == {int(day.timestamp() * 1000)}


def test_keys_choose_the_partition_if_asked(export: Path, broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "few", partitions=1))
    assert run(export, "few", broker) == 2
    assert run(export, "few", broker, "--by-key") == 0
    assert len(records(broker, "few")) == 350


@pytest.mark.parametrize("partitioner", Partitioner)
def test_a_key_goes_where_the_topics_partitioner_says(
    tmp_path: Path, broker: RunningBroker, partitioner: Partitioner
) -> None:
    policy = Policy(partitioner=partitioner)
    broker.call(broker.broker.create_topic(TESTER, "ducks", partitions=5, policy=policy))
    keys = [f"duck-{number}".encode() for number in range(30)]
    pq.write_table(pa.table({"value": keys, "key": keys}), tmp_path / "a.parquet")
    assert run(tmp_path, "ducks", broker) == 0
    found = {
        record.key: partition
        for partition in range(5)
        for batch in broker.batches("ducks", partition)
        for record in decode(batch)
        if record.key in keys  # markers of transactions have keys of their own
    }
    assert found == {key: choose_partition(partitioner, key, 5) for key in keys}


def test_a_damaged_export_is_named_before_anything_is_put(
    export: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(export / "0" / "00000000000000000200-00000002.parquet", 50)
    assert run(export, "swans", broker) == 1
    assert "00000000000000000200-00000002.parquet does not match the" in capsys.readouterr().err
    assert "swans" not in broker.broker.topics()


def test_an_export_of_a_newer_format_is_refused_with_its_number(
    export: Path, broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = export / "_manifest.json"
    told = orjson.loads(manifest.read_bytes())
    manifest.write_bytes(orjson.dumps({**told, "format": 2}))
    assert run(export, "geese", broker) == 1
    error = capsys.readouterr().err
    assert "is an export of format 2, this program knows 1: use a newer QuackMQ" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"text": ["a"]}, "has no column `value`: it has text"),
        ({"value": [1]}, "column `value` is int64; it must be bytes or text"),
        ({"value": ["a"], "key": [1.5]}, "column `key` is double; it must be bytes or text"),
        ({"value": ["a"], "timestamp": ["noon"]}, "column `timestamp` is string; it must be"),
        ({"value": ["a"], "partition": ["0"]}, "column `partition` is string; it must be"),
        ({"value": ["a"], "partition": [-1]}, "invalid partition -1"),
        ({"value": ["a"], "headers": ["h"]}, "column `headers` is string; it must be a list"),
    ],
)
def test_files_that_cannot_be_imported_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, Any], complaint: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert main(["archive", "import", str(tmp_path), "swans", "--to", "127.0.0.1:9"]) == 2
    assert complaint in capsys.readouterr().err


def test_it_tells_how_far_it_has_got(
    export: Path,
    broker: RunningBroker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(text, "PROGRESS_EVERY_S", 0.0)
    assert run(export, "swans", broker) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "350 of 350 records (100 %)"
