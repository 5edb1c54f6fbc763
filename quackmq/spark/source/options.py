"""Parse and check the options of `format("quackmq")`: those of Spark's Kafka source, and a few
more.

Spark passes texts, with names in any case. They become one frozen value, or an InvalidRequest that
quotes the option. An unknown option is an error: a misspelt `startingOfsets` must not read from
somewhere else. Options of Spark's Kafka source that have no meaning here are accepted and ignored,
so that a program only needs to change the name of the format. Pure: topics are not looked up.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from quackmq import limits as shared_limits
from quackmq.errors import IllegalTopicName, InvalidRequest
from quackmq.model.topic import check_topic_name
from quackmq.spark import limits

#: In the JSON of offsets, as in Spark's Kafka source.
EARLIEST: Final = -2
LATEST: Final = -1

T = TypeVar("T")
#: A number a partition, by topic: offsets, or timestamps in milliseconds.
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
    """The first record at or after a time: one time for all partitions, or one for each. If
    there is none, that is an error or means the end."""

    option: str
    all_ms: int | None
    by_partition: ByPartition
    or_latest: bool = False


Selection = Subscribe | Pattern | Assign
Place = Literal["earliest", "latest"] | Offsets | Times


@dataclass(frozen=True, slots=True)
class Options:
    bootstrap: str
    selection: Selection
    starting: Place
    ending: Place = "latest"
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


def batch_options(given: Mapping[str, str]) -> Options:
    """Parse the options of a batch read, by default of the whole topic. Raises InvalidRequest."""
    options = _Given(given)
    return _options(options, _starting(options, "earliest", ("earliest",)), _ending(options))


def stream_options(given: Mapping[str, str]) -> Options:
    """Parse the options of a stream, by default of new records. Raises InvalidRequest."""
    options = _Given(given)
    for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"):
        if options.text(name) is not None:
            raise InvalidRequest(f"{name} is for batch reads: a stream has no end")
    return _options(options, _starting(options, "latest", ("earliest", "latest")), "latest")


def includes_headers(given: Mapping[str, str]) -> bool:
    """Return the option `includeHeaders`, on which the schema depends."""
    return _Given(given).flag("includeHeaders", False)


def pushes_filters(given: Mapping[str, str], default: bool) -> bool:
    return _Given(given).flag("filterPushdown", default)


def source_address(given: Mapping[str, str]) -> tuple[str, str | None, Mapping[str, str]]:
    """Return `kafka.bootstrap.servers`, the HTTP address if given, and librdkafka settings. Also
    used by the sink."""
    options = _Given(given)
    return _bootstrap(options), options.text(_HTTP_ADDRESS), options.kafka()


# --- names ---------------------------------------------------------------------------------------

_BOOTSTRAP: Final = "kafka.bootstrap.servers"
_HTTP_ADDRESS: Final = "quackmq.http.address"
_GROUP_ALIAS: Final = "kafka.group.id"
_KAFKA: Final = "kafka."
_OURS: Final = (
    _BOOTSTRAP,
    _HTTP_ADDRESS,
    _GROUP_ALIAS,
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
    "retryTimeoutMs",
)
#: Accepted and ignored: options of Spark's Kafka source, of a table's definition, and of our sink,
#: which shares a table's options with the source.
_LEFT_ALONE: Final = (
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
_KNOWN: Final = {name.lower(): name for name in (*_OURS, *_LEFT_ALONE)}


class _Given:
    """The given options, with names in lower case."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    def check_names(self) -> None:
        for name in self._given:
            if name in _KNOWN or name.startswith(_KAFKA):
                continue
            alike = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"; is {_KNOWN[alike[0]]} meant?" if alike else ""
            raise InvalidRequest(f"there is no option {name!r}{hint}")

    def text(self, name: str) -> str | None:
        value = self._given.get(name.lower())
        return None if value is None else value.strip()

    def number(self, name: str, least: int, most: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise _wrong(name, text, f"it is a whole number from {least} to {most}")
        return int(text)

    def duration_ms(self, name: str, default_ms: int) -> int:
        text = self.text(name)
        if text is None:
            return default_ms
        found = _DURATION.fullmatch(text.lower())
        if found is None:
            raise _wrong(name, text, "it is a time like 500ms, 30s, 15m or 1h")
        return int(found[1]) * _UNITS_MS[found[2]]

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise _wrong(name, text, "it is true or false")
        return text.lower() == "true"

    def kafka(self) -> dict[str, str]:
        """Return the librdkafka settings."""
        return {
            name.removeprefix(_KAFKA): value
            for name, value in self._given.items()
            if name.startswith(_KAFKA) and name not in (_BOOTSTRAP, _GROUP_ALIAS)
        }


# --- all of them ---------------------------------------------------------------------------------

_GREATEST: Final = 2**63 - 1
_LONGEST_MS: Final = 24 * 3_600_000
#: Spark's units of time; the default is milliseconds.
_UNITS_MS: Final = {
    "": 1,
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DURATION: Final = re.compile(r"([0-9]{1,9})\s*(ms|s|min|m|h|d|)")


def _options(given: _Given, starting: Place, ending: Place) -> Options:
    given.check_names()
    selection = _selection(given)
    for place in (starting, ending):
        _check_named(place, selection)
    group = given.text("groupId") or given.text(_GROUP_ALIAS)
    if group is not None and not 0 < len(group.encode()) <= shared_limits.NAME_BYTES:
        raise _wrong("groupId", group, f"a name has 1 to {shared_limits.NAME_BYTES} bytes")
    holds = given.flag("holdRetention", True)
    if group is not None and holds and not (group.isprintable() and " " not in group):
        # The first batch creates a subscription, which must not fail then.
        raise _wrong("groupId", group, "a query that holds retention has a name without spaces")
    return Options(
        bootstrap=_bootstrap(given),
        selection=selection,
        starting=starting,
        ending=ending,
        http_address=given.text(_HTTP_ADDRESS),
        kafka=given.kafka(),
        max_offsets=given.number("maxOffsetsPerTrigger", 1, _GREATEST),
        max_bytes=given.number("maxBytesPerTrigger", 1, _GREATEST),
        min_offsets=given.number("minOffsetsPerTrigger", 1, _GREATEST),
        max_delay_ms=given.duration_ms("maxTriggerDelay", limits.SPARK_DELAY_MS),
        min_partitions=given.number("minPartitions", 1, limits.SPARK_SPLITS) or 1,
        max_records=given.number("maxRecordsPerPartition", 1, _GREATEST),
        split_bytes=given.number("splitBytes", shared_limits.KIB, _GREATEST)
        or limits.SPARK_SPLIT_BYTES,
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        group=group,
        hold_retention=holds,
        hold_for_ms=given.duration_ms("holdRetentionFor", limits.SPARK_HOLD_MS),
        include_headers=given.flag("includeHeaders", False),
        plan=given.text("archivePlan"),
        retry_ms=given.number("retryTimeoutMs", 1, _LONGEST_MS) or limits.SPARK_RETRY_MS,
    )


def _bootstrap(given: _Given) -> str:
    bootstrap = given.text(_BOOTSTRAP)
    if not bootstrap:
        raise InvalidRequest(f"the option {_BOOTSTRAP} is missing: HOST:PORT of the broker")
    return bootstrap


def _selection(given: _Given) -> Selection:
    choices: Mapping[str, Callable[[str], Selection]] = {
        "subscribe": _subscribe,
        "subscribePattern": _pattern,
        "assign": _assign,
    }
    found = [name for name in choices if given.text(name) is not None]
    if len(found) != 1:
        raise InvalidRequest(
            "one of the options subscribe, subscribePattern and assign says what to read; given "
            + (" and ".join(found) if found else "is none of them")
        )
    return choices[found[0]](given.text(found[0]) or "")


def _subscribe(text: str) -> Subscribe:
    names = tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))
    if not names:
        raise _wrong("subscribe", text, "name a topic, or several with commas between them")
    for name in names:
        _check_topic("subscribe", name)
    return Subscribe(names)


def _pattern(text: str) -> Pattern:
    try:
        return Pattern(re.compile(text))
    except re.error as error:
        raise _wrong("subscribePattern", text, f"it is no regular expression: {error}") from None


def _assign(text: str) -> Assign:
    what = 'it is JSON like {"ducks":[0,1]}'
    found = _json("assign", text, what)
    partitions: dict[str, tuple[int, ...]] = {}
    for topic, numbers in sorted(found.items()):
        _check_topic("assign", topic)
        if not isinstance(numbers, list) or not numbers or not all(map(_is_partition, numbers)):
            raise _wrong("assign", text, what)
        partitions[topic] = tuple(sorted(set(numbers)))
    if not partitions:
        raise _wrong("assign", text, what)
    return Assign(partitions)


# --- start and end -------------------------------------------------------------------


def _starting(
    given: _Given, default: Literal["earliest", "latest"], words: tuple[str, ...]
) -> Place:
    strategy = given.text("startingOffsetsByTimestampStrategy") or "error"
    if strategy.lower() not in ("error", "latest"):
        raise _wrong("startingOffsetsByTimestampStrategy", strategy, "it is error or latest")
    return _place(given, "starting", default, words, or_latest=strategy.lower() == "latest")


def _ending(given: _Given) -> Place:
    return _place(given, "ending", "latest", ("latest",), or_latest=True)


def _place(
    given: _Given,
    which: str,
    default: Literal["earliest", "latest"],
    words: tuple[str, ...],
    or_latest: bool,
) -> Place:
    """Parse a start or end. A time takes precedence over offsets, and one time for all over one
    for each, as in Spark's source."""
    time_ms = given.number(f"{which}Timestamp", 0, _GREATEST)
    if time_ms is not None:
        return Times(f"{which}Timestamp", time_ms, {}, or_latest)
    name = f"{which}OffsetsByTimestamp"
    text = given.text(name)
    if text is not None:
        return Times(name, None, _by_partition(name, text, least=0), or_latest)
    name = f"{which}Offsets"
    text = given.text(name)
    if text is None:
        return default
    if text.lower() in words:
        return "earliest" if text.lower() == "earliest" else "latest"
    if not text.startswith("{"):
        told = " or ".join(words)
        raise _wrong(name, text, f'it is {told}, or JSON like {{"ducks":{{"0":17,"1":-2}}}}')
    offsets = _by_partition(name, text, least=EARLIEST)
    for word, number in (("earliest", EARLIEST), ("latest", LATEST)):
        if word not in words and any(number in each.values() for each in offsets.values()):
            raise _wrong(name, text, f"{number} ({word}) cannot stand here")
    return Offsets(name, offsets)


def _by_partition(name: str, text: str, least: int) -> ByPartition:
    what = 'it is JSON like {"ducks":{"0":17,"1":23}}: a number a partition, by topic'
    found = _json(name, text, what)
    numbers: dict[str, dict[int, int]] = {}
    for topic, partitions in sorted(found.items()):
        _check_topic(name, topic)
        if not isinstance(partitions, dict) or not partitions:
            raise _wrong(name, text, what)
        for partition, number in partitions.items():
            if not partition.isascii() or not partition.isdigit() or len(partition) > 9:
                raise _wrong(name, text, what)
            if type(number) is not int or not least <= number <= _GREATEST:
                raise _wrong(name, text, what)
            numbers.setdefault(topic, {})[int(partition)] = number
    if not numbers:
        raise _wrong(name, text, what)
    return numbers


def _check_named(place: Place, selection: Selection) -> None:
    """Check that offsets or times per partition name exactly the topics that are read, as far as
    the options tell."""
    if isinstance(place, Offsets):
        option, topics = place.option, set(place.offsets)
    elif isinstance(place, Times) and place.all_ms is None:
        option, topics = place.option, set(place.by_partition)
    else:
        return
    if isinstance(selection, Pattern):
        return
    named = selection.topics if isinstance(selection, Subscribe) else selection.partitions
    if topics != set(named):
        raise InvalidRequest(
            f"{option} names the topics {', '.join(sorted(topics))}, but read are "
            f"{', '.join(sorted(named))}: give each of its partitions a number"
        )


# --- bits ----------------------------------------------------------------------------------------


def _json(name: str, text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise _wrong(name, text, what) from None
    if not isinstance(found, dict):
        raise _wrong(name, text, what)
    return found


def _check_topic(option: str, name: str) -> None:
    try:
        check_topic_name(name)
    except IllegalTopicName as error:
        raise IllegalTopicName(f"{option}: {error}") from None


def _is_partition(value: object) -> bool:
    return type(value) is int and 0 <= value < shared_limits.PARTITIONS_PER_TOPIC


def _wrong(name: str, text: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} cannot be {text[:200]!r}: {what}")
