"""Parse and check the options of `format("quackmq")`: those of Spark's Kafka source, and a few
more.

Spark passes texts, with names in any case. They become one frozen value, or an InvalidRequest that
quotes the option. An unknown option is an error: a misspelt `startingOfsets` must not start at the
default offset. Options of Spark's Kafka source that have no meaning here are accepted and ignored,
so that a program only needs to change the name of the format. Pure: topics are not looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest
from quackmq.spark import limits
from quackmq.spark.raw_options import (
    BOOTSTRAP_OPTION,
    GROUP_OPTION,
    HTTP_ADDRESS_OPTION,
    RETRY_OPTION,
    RawOptions,
    check_topic_option,
    invalid_option,
)

#: Special numbers in the JSON of offsets, as in Spark's Kafka source.
EARLIEST: Final = -2
LATEST: Final = -1

#: A number for each partition of each topic: an offset, or a timestamp in milliseconds.
ByPartition = Mapping[str, Mapping[int, int]]


class Subscribe(NamedTuple):
    """Topics by name, which must exist."""

    topics: tuple[str, ...]


class Pattern(NamedTuple):
    """Every topic whose whole name matches, including later ones."""

    pattern: re.Pattern[str]


class Assign(NamedTuple):
    """Some partitions of topics."""

    partitions: Mapping[str, tuple[int, ...]]


class Offsets(NamedTuple):
    """An offset for each partition, or EARLIEST or LATEST."""

    option: str
    offsets: ByPartition


class Times(NamedTuple):
    """The first record at or after a time: one time for all partitions, or one for each. For a
    partition without such a record, it is the end if `or_latest`, otherwise an error."""

    option: str
    all_ms: int | None
    by_partition: ByPartition
    or_latest: bool = False


Selection = Subscribe | Pattern | Assign
Boundary = Literal["earliest", "latest"] | Offsets | Times


@dataclass(frozen=True, slots=True)
class Options:
    bootstrap: str
    selection: Selection
    starting: Boundary
    ending: Boundary = "latest"
    http_address: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
    max_offsets: int | None = None
    max_bytes: int | None = None
    #: A batch waits until it has this many offsets, or for this long.
    min_offsets: int | None = None
    max_delay_ms: int = limits.SPARK_DELAY_MS
    min_partitions: int = 1
    max_records: int | None = None
    split_bytes: int = limits.SPARK_SPLIT_BYTES
    fail_on_data_loss: bool = True
    group: str | None = None
    hold_retention: bool = True
    #: How long the query holds retention after its last report.
    hold_for_ms: int = limits.SPARK_HOLD_MS
    include_headers: bool = False
    #: For batch reads: the plan of another reader, whose files are read.
    plan: str | None = None
    retry_ms: int = limits.SPARK_RETRY_MS


def batch_options(options: Mapping[str, str]) -> Options:
    """Parse the options of a batch read, by default of the whole topic. Raises InvalidRequest."""
    raw = RawOptions(options)
    return _parse_options(raw, _parse_start(raw, "earliest", ("earliest",)), _parse_end(raw))


def stream_options(options: Mapping[str, str]) -> Options:
    """Parse the options of a stream, by default of new records. Raises InvalidRequest."""
    raw = RawOptions(options)
    for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"):
        if raw.text(name) is not None:
            raise InvalidRequest(f"{name} is for batch reads: a stream has no end")
    return _parse_options(raw, _parse_start(raw, "latest", ("earliest", "latest")), "latest")


def includes_headers(options: Mapping[str, str]) -> bool:
    """Return the option `includeHeaders`, on which the schema depends."""
    return RawOptions(options).flag("includeHeaders", False)


def pushes_filters(options: Mapping[str, str], default: bool) -> bool:
    return RawOptions(options).flag("filterPushdown", default)


# --- names ---------------------------------------------------------------------------------------

_SOURCE_OPTIONS: Final = (
    BOOTSTRAP_OPTION,
    HTTP_ADDRESS_OPTION,
    RETRY_OPTION,
    GROUP_OPTION,
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "splitBytes",
    "failOnDataLoss",
    "groupId",
    "holdRetention",
    "holdRetentionFor",
    "includeHeaders",
    "filterPushdown",
    "archivePlan",
)
#: Accepted and ignored: options of Spark's Kafka source, of a table's definition, and of our sink,
#: which shares a table's options with the source.
_IGNORED_OPTIONS: Final = (
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    "path",
    "serialization.format",
    "topic",
    "writeId",
    "compression",
)


# --- values --------------------------------------------------------------------------------------

_GREATEST_NUMBER: Final = 2**63 - 1


def _parse_options(raw: RawOptions, starting: Boundary, ending: Boundary) -> Options:
    """Parse all options but the start and the end. Raise InvalidRequest for an invalid value, an
    unknown name, or a start or end for other topics than those that are read."""
    raw.check_names((*_SOURCE_OPTIONS, *_IGNORED_OPTIONS))
    selection = _parse_selection(raw)
    for boundary in (starting, ending):
        _check_same_topics(boundary, selection)
    group = raw.text("groupId") or raw.text(GROUP_OPTION)
    if group is not None and not 0 < len(group.encode()) <= shared_limits.NAME_BYTES:
        raise invalid_option("groupId", group, f"a name has 1 to {shared_limits.NAME_BYTES} bytes")
    holds_retention = raw.flag("holdRetention", True)
    if group is not None and holds_retention and not (group.isprintable() and " " not in group):
        # The first batch creates a subscription, whose name has no spaces. Fail now, not then.
        raise invalid_option(
            "groupId", group, "a query that holds retention has a name without spaces"
        )
    return Options(
        bootstrap=raw.bootstrap(),
        selection=selection,
        starting=starting,
        ending=ending,
        http_address=raw.http_address(),
        kafka=raw.librdkafka_settings(),
        max_offsets=raw.number("maxOffsetsPerTrigger", 1, _GREATEST_NUMBER),
        max_bytes=raw.number("maxBytesPerTrigger", 1, _GREATEST_NUMBER),
        min_offsets=raw.number("minOffsetsPerTrigger", 1, _GREATEST_NUMBER),
        max_delay_ms=raw.duration_ms("maxTriggerDelay", limits.SPARK_DELAY_MS),
        min_partitions=raw.number("minPartitions", 1, limits.SPARK_SPLITS) or 1,
        max_records=raw.number("maxRecordsPerPartition", 1, _GREATEST_NUMBER),
        # An option that is not set is None, so the default applies.
        split_bytes=raw.number("splitBytes", shared_limits.KIB, _GREATEST_NUMBER)
        or limits.SPARK_SPLIT_BYTES,
        fail_on_data_loss=raw.flag("failOnDataLoss", True),
        group=group,
        hold_retention=holds_retention,
        hold_for_ms=raw.duration_ms("holdRetentionFor", limits.SPARK_HOLD_MS),
        include_headers=raw.flag("includeHeaders", False),
        plan=raw.text("archivePlan"),
        retry_ms=raw.retry_ms(),
    )


def _parse_selection(raw: RawOptions) -> Selection:
    """Return the topics to read. Raise InvalidRequest unless exactly one of three options is
    set."""
    parsers: Mapping[str, Callable[[str], Selection]] = {
        "subscribe": _parse_subscribe,
        "subscribePattern": _parse_pattern,
        "assign": _parse_assign,
    }
    chosen = [name for name in parsers if raw.text(name) is not None]
    if len(chosen) != 1:
        raise InvalidRequest(
            "set exactly one of the options subscribe, subscribePattern and assign; you set "
            + (" and ".join(chosen) if chosen else "none of them")
        )
    return parsers[chosen[0]](raw.text(chosen[0]) or "")


def _parse_subscribe(text: str) -> Subscribe:
    """Parse topic names with commas between them. Raise InvalidRequest or IllegalTopicName."""
    names = tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))
    if not names:
        raise invalid_option("subscribe", text, "name a topic, or several with commas between them")
    for name in names:
        check_topic_option("subscribe", name)
    return Subscribe(names)


def _parse_pattern(text: str) -> Pattern:
    """Parse a regular expression of Python. Raise InvalidRequest."""
    try:
        return Pattern(re.compile(text))
    except re.error as error:
        raise invalid_option(
            "subscribePattern", text, f"it is no regular expression: {error}"
        ) from None


def _parse_assign(text: str) -> Assign:
    """Parse partition numbers by topic. Raise InvalidRequest or IllegalTopicName."""
    expected = 'it is JSON like {"ducks":[0,1]}'
    numbers_by_topic = _parse_json("assign", text, expected)
    partitions: dict[str, tuple[int, ...]] = {}
    for topic, numbers in sorted(numbers_by_topic.items()):
        check_topic_option("assign", topic)
        if not isinstance(numbers, list) or not numbers or not all(map(_is_partition, numbers)):
            raise invalid_option("assign", text, expected)
        partitions[topic] = tuple(sorted(set(numbers)))
    if not partitions:
        raise invalid_option("assign", text, expected)
    return Assign(partitions)


# --- start and end -------------------------------------------------------------------


def _parse_start(
    raw: RawOptions, default: Literal["earliest", "latest"], words: tuple[str, ...]
) -> Boundary:
    """Parse the start. `words` are the words that `startingOffsets` allows. Raise
    InvalidRequest."""
    strategy = raw.text("startingOffsetsByTimestampStrategy") or "error"
    if strategy.lower() not in ("error", "latest"):
        raise invalid_option(
            "startingOffsetsByTimestampStrategy", strategy, "it is error or latest"
        )
    return _parse_boundary(raw, "starting", default, words, or_latest=strategy.lower() == "latest")


def _parse_end(raw: RawOptions) -> Boundary:
    return _parse_boundary(raw, "ending", "latest", ("latest",), or_latest=True)


def _parse_boundary(
    raw: RawOptions,
    side: str,
    default: Literal["earliest", "latest"],
    allowed_words: tuple[str, ...],
    or_latest: bool,
) -> Boundary:
    """Parse a start or end. A time for all partitions takes precedence over a time for each
    partition, and both over offsets, as in Spark's Kafka source."""
    time_ms = raw.number(f"{side}Timestamp", 0, _GREATEST_NUMBER)
    if time_ms is not None:
        return Times(f"{side}Timestamp", time_ms, {}, or_latest)
    name = f"{side}OffsetsByTimestamp"
    text = raw.text(name)
    if text is not None:
        return Times(name, None, _parse_numbers(name, text, least=0), or_latest)
    name = f"{side}Offsets"
    text = raw.text(name)
    if text is None:
        return default
    if text.lower() in allowed_words:
        return "earliest" if text.lower() == "earliest" else "latest"
    if not text.startswith("{"):
        choices = " or ".join(allowed_words)
        raise invalid_option(
            name, text, f'it is {choices}, or JSON like {{"ducks":{{"0":17,"1":-2}}}}'
        )
    offsets = _parse_numbers(name, text, least=EARLIEST)
    for word, number in (("earliest", EARLIEST), ("latest", LATEST)):
        if word not in allowed_words and any(number in each.values() for each in offsets.values()):
            raise invalid_option(name, text, f"{number} ({word}) is not allowed in it")
    return Offsets(name, offsets)


def _parse_numbers(name: str, text: str, least: int) -> ByPartition:
    """Parse a number for each partition, by topic; each is `least` or more. Raise InvalidRequest or
    IllegalTopicName."""
    expected = 'it is JSON like {"ducks":{"0":17,"1":23}}: a number for each partition, by topic'
    partitions_by_topic = _parse_json(name, text, expected)
    numbers: dict[str, dict[int, int]] = {}
    for topic, partitions in sorted(partitions_by_topic.items()):
        check_topic_option(name, topic)
        if not isinstance(partitions, dict) or not partitions:
            raise invalid_option(name, text, expected)
        for partition, number in partitions.items():
            # More than 9 digits are no partition.
            if not partition.isascii() or not partition.isdigit() or len(partition) > 9:
                raise invalid_option(name, text, expected)
            # JSON's true is an `int` in Python, so compare the type itself.
            if type(number) is not int or not least <= number <= _GREATEST_NUMBER:
                raise invalid_option(name, text, expected)
            numbers.setdefault(topic, {})[int(partition)] = number
    if not numbers:
        raise invalid_option(name, text, expected)
    return numbers


def _check_same_topics(boundary: Boundary, selection: Selection) -> None:
    """Raise InvalidRequest if a start or end by partition does not name exactly the topics that
    are read. A pattern is not checked: its topics are not known here."""
    if isinstance(boundary, Offsets):
        option, topics = boundary.option, set(boundary.offsets)
    elif isinstance(boundary, Times) and boundary.all_ms is None:
        option, topics = boundary.option, set(boundary.by_partition)
    else:
        return
    if isinstance(selection, Pattern):
        return
    named = selection.topics if isinstance(selection, Subscribe) else selection.partitions
    if topics != set(named):
        raise InvalidRequest(
            f"{option} names the topics {', '.join(sorted(topics))}, but the query reads "
            f"{', '.join(sorted(named))}: give each partition of these a number"
        )


# --- helpers -------------------------------------------------------------------------------------


def _parse_json(name: str, text: str, expected: str) -> dict[str, Any]:
    """Parse a JSON object. Raise InvalidRequest with `expected`, which describes the right form."""
    try:
        value = json.loads(text)
    except ValueError:
        raise invalid_option(name, text, expected) from None
    if not isinstance(value, dict):
        raise invalid_option(name, text, expected)
    return value


def _is_partition(value: object) -> bool:
    return type(value) is int and 0 <= value < shared_limits.PARTITIONS_PER_TOPIC
