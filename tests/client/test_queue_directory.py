"""The directory of a queue's consumer: what is in it, who may use it, and what can go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq.client.queue import Consumer, ConsumerError, Producer


@pytest.fixture
def address(queue_address: str) -> str:
    return queue_address


def test_with_a_directory_the_next_process_is_the_same_consumer(
    address: str, producer: Producer, topic: str, tmp_path: Path
) -> None:
    me = producer.register_producer(topic)
    with Consumer(address, directory=tmp_path / "mine") as consumer:
        consumer_id = consumer.register_consumer(topic)
        for text in ("one", "two", "three"):
            producer.enqueue(me, topic, text)
        assert consumer.dequeue(topic) == "one"
    # As if it had died: the broker has not been told that "one" was received, but the file has.
    with Consumer(address, directory=tmp_path / "mine") as consumer:
        assert consumer.id == consumer_id
        assert consumer.register_consumer(topic) == consumer_id
        assert consumer.size(topic) == 2
        assert [consumer.dequeue(topic), consumer.dequeue(topic)] == ["two", "three"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"consumer_id": "c", "last_ids": 1}'])
def test_a_file_that_is_no_consumers_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "consumer.json").write_bytes(content)
    with pytest.raises(ConsumerError, match="consumer.json"):
        Consumer(directory=tmp_path)


def test_a_message_whose_id_cannot_be_kept_is_not_behind(
    address: str, producer: Producer, topic: str, tmp_path: Path
) -> None:
    me = producer.register_producer(topic)
    directory = tmp_path / "ids"
    with Consumer(address, directory=directory) as consumer:
        consumer.register_consumer(topic)
        producer.enqueue(me, topic, "one")
        (directory / "consumer.new").mkdir()
        with pytest.raises(ConsumerError, match="consumer") as raised:
            consumer.dequeue(topic)
        assert raised.value.reason == "unusable_directory"
        (directory / "consumer.new").rmdir()
        assert consumer.dequeue(topic) == "one"


def test_a_registration_that_could_not_be_kept_is_repeated(
    address: str, producer: Producer, topic: str, tmp_path: Path
) -> None:
    me = producer.register_producer(topic)
    with Consumer(address, directory=tmp_path) as consumer:
        (tmp_path / "consumer.new").mkdir()
        with pytest.raises(ConsumerError) as raised:
            consumer.register_consumer(topic)
        assert raised.value.reason == "unusable_directory"
        (tmp_path / "consumer.new").rmdir()
        consumer_id = consumer.register_consumer(topic)
        producer.enqueue(me, topic, "one")
        assert consumer.dequeue(topic) == "one"
    with Consumer(address, directory=tmp_path) as consumer:
        assert (consumer.id, consumer.topics) == (consumer_id, [topic])


def test_one_process_uses_a_consumers_directory(
    address: str, producer: Producer, topic: str, tmp_path: Path
) -> None:
    """Otherwise two would get the same messages."""
    me = producer.register_producer(topic)
    with Consumer(address, directory=tmp_path) as first:
        first.register_consumer(topic)
        for text in ("one", "two", "three"):
            producer.enqueue(me, topic, text)
        with pytest.raises(ConsumerError, match="only one process at a time") as raised:
            Consumer(address, directory=tmp_path)
        assert raised.value.reason == "store_locked"
        assert first.dequeue(topic) == "one"
        first.close()
        with Consumer(address, directory=tmp_path) as second:
            assert second.dequeue(topic) == "two"
            with pytest.raises(ConsumerError, match="only one process at a time"):
                first.dequeue(topic)
        assert first.dequeue(topic) == "three", "it goes on where the other one stopped"


def test_a_directory_that_cannot_be_used_is_a_consumer_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConsumerError, match="Not a directory|File exists") as raised:
        Consumer(directory=tmp_path / "file")
    assert raised.value.reason == "unusable_directory"
    (tmp_path / "consumer.json").mkdir()
    with pytest.raises(ConsumerError, match="Is a directory"):
        Consumer(directory=tmp_path)
    (tmp_path / "consumer.json").rmdir()
    Consumer(directory=tmp_path).close()
