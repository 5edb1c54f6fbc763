"""Parse the options of `format("quackmq")` as a sink: those of Spark's Kafka sink, and `writeId`.

Spark passes texts, with names in any case, and adds options of its own. A table also passes the
options of the source. So an unknown name is ignored, unless it resembles one of the sink's names: a
misspelt `write_id` must not write twice. The functions are pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from quackmq import limits as shared_limits
from quackmq.errors import IllegalTopicName, InvalidRequest
from quackmq.model.topic import check_topic_name
from quackmq.records.batch import COMPRESSIONS
from quackmq.spark import limits
from quackmq.spark.source.options import source_address

TOPIC_OPTION: Final = "topic"
WRITE_ID_OPTION: Final = "writeId"
RETRY_OPTION: Final = "retryTimeoutMs"
COMPRESSION_OPTION: Final = "kafka.compression.type"
#: A name that is more similar than this to an option of the sink counts as misspelt.
_MIN_SIMILARITY: Final = 0.8
_LONGEST_RETRY_MS: Final = 24 * 3_600_000
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


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse and check the options. Raise InvalidRequest or IllegalTopicName, which quotes the
    option."""
    texts = {name.lower(): value.strip() for name, value in options.items()}
    _check_names(texts)
    bootstrap, http_address, kafka = source_address(options)
    # The sink compresses batches itself. The other settings configure the connection.
    setting = COMPRESSION_OPTION.removeprefix("kafka.")
    return SinkOptions(
        bootstrap,
        http_address,
        {name: value for name, value in kafka.items() if name != setting},
        _retry_ms(texts.get(RETRY_OPTION.lower())),
        _topic(texts.get(TOPIC_OPTION)),
        _compression(texts.get(COMPRESSION_OPTION)),
        _write_id(texts.get(WRITE_ID_OPTION.lower())),
    )


def _check_names(options: Mapping[str, str]) -> None:
    names = {name.lower(): name for name in (TOPIC_OPTION, WRITE_ID_OPTION, RETRY_OPTION)}
    for name in options:
        if name in names or name.startswith("kafka."):
            continue
        similar = difflib.get_close_matches(name, names, n=1, cutoff=_MIN_SIMILARITY)
        if similar:
            raise InvalidRequest(f"there is no option {name!r}; is {names[similar[0]]} meant?")


def _retry_ms(text: str | None) -> int:
    if text is None:
        return limits.SPARK_RETRY_MS
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:10]) <= _LONGEST_RETRY_MS:
        raise InvalidRequest(
            f"{RETRY_OPTION} cannot be {text[:100]!r}: it is a whole number from 1 to "
            f"{_LONGEST_RETRY_MS}"
        )
    return int(text[:10])


def _topic(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        check_topic_name(text)
    except IllegalTopicName as error:
        raise IllegalTopicName(f"{TOPIC_OPTION}: {error}") from None
    return text


def _compression(text: str | None) -> str:
    name = "none" if text is None else text.lower()
    if name not in COMPRESSIONS:
        raise InvalidRequest(
            f"{COMPRESSION_OPTION} cannot be {text!r}: it is one of {', '.join(COMPRESSIONS)}"
        )
    return name


def _write_id(text: str | None) -> str | None:
    if text is not None and not 0 < len(text.encode()) <= _LONGEST_ID_BYTES:
        raise InvalidRequest(
            f"{WRITE_ID_OPTION} takes 1 to {_LONGEST_ID_BYTES} bytes, not {len(text.encode())}"
        )
    return text
