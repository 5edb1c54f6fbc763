"""Settings of topics in the queue's libraries: for one topic, and for all topics of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quackmq.client.queue import Consumer, Producer, ProducerError
from tests.protocols.http.v1.serving import serving


@pytest.fixture
def address() -> Iterator[str]:
    with serving() as served:
        yield f"127.0.0.1:{served.port}"


def test_a_topic_is_created_with_settings_d3_d4(producer: Producer, address: str) -> None:
    producer.create_topic("ducks", needs_subscriber=True, keep_until_consumed=True)
    me = producer.register_producer("geese", needs_subscriber=True, keep_bytes=None)
    with pytest.raises(ProducerError) as refused:
        producer.enqueue(me, "geese", "honk")
    assert refused.value.reason == "no_subscriber"
    with Consumer(address) as consumer:
        consumer.register_consumer("geese")
        producer.enqueue(me, "geese", "honk")
        assert consumer.dequeue("geese") == "honk"
    with pytest.raises(ProducerError, match="exists with needs_subscriber = true") as refused:
        producer.register_producer("ducks", needs_subscriber=False)
    assert refused.value.reason == "topic_exists"


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(producer: Producer) -> None:
    for call in (producer.create_topic, producer.register_producer, producer.set_topic_defaults):
        with pytest.raises(ProducerError, match="did you mean needs_subscriber?") as refused:
            call("ducks", need_subscriber=True)
        assert refused.value.reason == "invalid_request"
    assert producer.list_topics() == []


def test_settings_for_all_topics_are_set_listed_and_removed_d3_d4(
    producer: Producer, address: str
) -> None:
    producer.set_topic_defaults(needs_subscriber=True, keep_until_consumed=True)
    producer.set_topic_defaults("log?.*", ephemeral=True)
    assert producer.topic_defaults() == {
        "*": {"needs_subscriber": True, "keep_until_consumed": True},
        "log?.*": {"ephemeral": True},
    }
    me = producer.register_producer("ducks")
    with pytest.raises(ProducerError) as refused:
        producer.enqueue(me, "ducks", "quack")
    assert refused.value.reason == "no_subscriber"
    with pytest.raises(ProducerError) as refused:
        producer.register_producer("logs.a")
    assert refused.value.reason == "unknown_topic"
    with Consumer(address) as consumer:
        consumer.register_consumer("logs.a")
        assert "logs.a" in producer.list_topics()
    producer.remove_topic_defaults("log?.*")
    with pytest.raises(ProducerError) as refused:
        producer.remove_topic_defaults("log?.*")
    assert refused.value.reason == "unknown_topic_default"
    producer.remove_topic_defaults()
    assert producer.topic_defaults() == {}
    producer.enqueue(producer.register_producer("geese"), "geese", "honk")
