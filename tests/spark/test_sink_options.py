"""Options of the sink: right, wrong and misspelt."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.errors import IllegalTopicName, InvalidRequest
from quackmq.spark import limits as spark_limits
from quackmq.spark.sink.options import parse_sink_options
from tests.kit.tables import each

GIVEN = {"kafka.bootstrap.servers": "broker:9092"}


def test_options_are_those_of_sparks_kafka_sink_and_a_few_of_ours() -> None:
    options = parse_sink_options(
        {
            **GIVEN,
            "topic": "ducks",
            "writeid": "nightly-7",
            "RetryTimeoutMs": "5000",
            "kafka.compression.type": "zstd",
            "kafka.client.id": "me",
            "checkpointLocation": "/checkpoints/7",
            "startingOffsets": "earliest",
        }
    )
    assert (options.bootstrap, options.http_address) == ("broker:9092", None)
    assert (options.topic, options.write_id) == ("ducks", "nightly-7")
    assert (options.retry_ms, options.compression) == (5_000, "zstd")
    assert options.kafka == {"client.id": "me"}


def test_what_is_not_said_has_a_default() -> None:
    options = parse_sink_options(GIVEN)
    assert (options.topic, options.write_id, options.compression) == (None, None, "none")
    assert options.retry_ms == spark_limits.SPARK_RETRY_MS


@each(
    ("name", "value"),
    [
        ("topic", "a/b"),
        ("writeId", ""),
        ("writeId", "x" * limits.NAME_BYTES),
        ("write_id", "nightly-7"),
        ("topics", "ducks"),
        ("retryTimeoutMs", "soon"),
        ("retryTimeoutMs", "0"),
        ("kafka.compression.type", "brotli"),
        ("kafka.bootstrap.servers", ""),
    ],
)
def test_what_is_wrong_is_quoted(name: str, value: str) -> None:
    with pytest.raises((InvalidRequest, IllegalTopicName), match=name):
        parse_sink_options({**GIVEN, name: value})


def test_settings_for_librdkafka_are_passed_on_with_their_spaces() -> None:
    options = parse_sink_options(
        {**GIVEN, "kafka.sasl.password": " two words ", "kafka.group.id": "me"}
    )
    assert options.kafka == {"sasl.password": " two words "}


def test_a_misspelt_option_of_the_sink_is_suggested_and_one_of_the_source_is_ignored() -> None:
    with pytest.raises(InvalidRequest, match="no option 'write_id'; is writeId meant"):
        parse_sink_options({**GIVEN, "write_id": "nightly-7"})
    assert parse_sink_options({**GIVEN, "startingOfsets": "earliest"}).topic is None
    # Only a little like writeId: an option of another kind.
    assert parse_sink_options({**GIVEN, "writeMode": "fast"}).write_id is None
