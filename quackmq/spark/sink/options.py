"""Parse the options of `format("quackmq")` as a sink: those of Spark's Kafka sink, and `writeId`.

Spark passes texts, with names in any case, and adds options of its own. A table also passes the
options of the source. So an unknown name is ignored, unless it resembles one of the sink's names: a
misspelt `write_id` must not write twice. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest
from quackmq.records.batch import COMPRESSIONS
from quackmq.spark.raw_options import (
    RETRY_OPTION,
    RawOptions,
    check_topic_option,
    invalid_option,
)

TOPIC_OPTION: Final = "topic"
WRITE_ID_OPTION: Final = "writeId"
COMPRESSION_OPTION: Final = "kafka.compression.type"
#: Leave room for the key's prefix.
_LONGEST_ID_BYTES: Final = shared_limits.NAME_BYTES - len("spark-write/")


@dataclass(frozen=True)
class SinkOptions:
    bootstrap: str
    http_address: str | None
    kafka: Mapping[str, str]
    retry_ms: int
    topic: str | None
    compression: str
    write_id: str | None


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse and check the options. Raise InvalidRequest or IllegalTopicName; the message names the
    option."""
    raw = RawOptions(options)
    raw.check_names((TOPIC_OPTION, WRITE_ID_OPTION, RETRY_OPTION), allow_unknown=True)
    topic = raw.text(TOPIC_OPTION)
    if topic is not None:
        check_topic_option(TOPIC_OPTION, topic)
    return SinkOptions(
        raw.bootstrap(),
        raw.http_address(),
        raw.librdkafka_settings(without=[COMPRESSION_OPTION]),  # the sink compresses itself
        raw.retry_ms(),
        topic,
        _parse_compression(raw.text(COMPRESSION_OPTION)),
        _parse_write_id(raw.text(WRITE_ID_OPTION)),
    )


def _parse_compression(text: str | None) -> str:
    name = "none" if text is None else text.lower()
    if name not in COMPRESSIONS:
        raise invalid_option(COMPRESSION_OPTION, name, f"it is one of {', '.join(COMPRESSIONS)}")
    return name


def _parse_write_id(text: str | None) -> str | None:
    """Return the `writeId`. Raise InvalidRequest if it is empty or too long."""
    if text is not None and not 0 < len(text.encode()) <= _LONGEST_ID_BYTES:
        raise InvalidRequest(
            f"{WRITE_ID_OPTION} takes 1 to {_LONGEST_ID_BYTES} bytes, not {len(text.encode())}"
        )
    return text
