"""The catalog: topics, cursors and small state, as every store keeps them in memory.

Only `apply` changes the catalog. It takes a change: a frozen value that can be encoded for a
journal. For each request a method checks it against the catalog and returns the change, or raises
as the store contract says; the method itself changes nothing. So a store requests a change, writes
it to disk if it has one, and applies it.

Promised: a change that a catalog made can be applied to it. The same changes in the same order make
equal catalogs. A catalog made from a snapshot equals the original. Invalid bytes, snapshots and
changes raise DamagedStore. Not promised: anything about durability, or about batches. Pure except
for its own dictionaries. Not thread-safe.

A change is a JSON array, its first element the kind:

    ["topic", id, name, partitions, {policy field: value, where not the default}, created_ms]
                                    (`_encode_policy` says which are there even with the default)
    ["topic-deleted", id]
    ["cursor", name, topic id, partition, offset | null, metadata, updated_ms]
                                    (and the leader epoch, if the cursor has one)
    ["state", key, base64 value | null, version]

A snapshot is the array of changes that make the catalog out of an empty one.
"""

from __future__ import annotations

import base64
import dataclasses
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from quackmq import limits as shared_limits
from quackmq.errors import (
    DamagedStore,
    InvalidPolicy,
    InvalidRequest,
    LimitReached,
    StateChanged,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.partitioning import Partitioner
from quackmq.model.policy import Policy
from quackmq.model.topic import (
    NO_LEADER_EPOCH,
    Cursor,
    CursorKey,
    PartitionKey,
    State,
    StatePut,
    Topic,
    check_topic_name,
)
from quackmq.stores import limits

NO_STATE: Final = State(None, 0)
_OFFSET_MAX: Final = 2**63 - 1
#: Policy fields that are stored even with their default, since their absence has a meaning: the
#: topic was written before they existed.
_PARTITIONER: Final = "partitioner"
_ARCHIVE_AFTER_LIVE_MS: Final = "archive_after_live_ms"
_Owner = TypeVar("_Owner")


@dataclass(frozen=True, slots=True)
class TopicPut:
    """A topic was created or altered."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """A topic was deleted, and its cursors with it."""

    topic_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class CursorSet:
    """A cursor was set, or removed if its offset is None."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class StateSet:
    """A small value was set, or removed if it is None."""

    key: str
    state: State


Change = TopicPut | TopicDeleted | CursorSet | StateSet


class CapturedCatalog(NamedTuple):
    """A snapshot of a catalog, in immutable values."""

    topics: tuple[Topic, ...]
    cursors: tuple[Cursor, ...]
    states: tuple[tuple[str, State], ...]

    def rows(self) -> Iterator[list[Any]]:
        """Yield rows for JSON; `Catalog.from_snapshot` reads them."""
        yield from (_encode_row(TopicPut(topic)) for topic in self.topics)
        yield from (_encode_row(CursorSet(cursor)) for cursor in self.cursors)
        yield from (_encode_row(StateSet(key, state)) for key, state in self.states)


class Catalog:
    """The catalog of one store. Not thread-safe. Its results are frozen, or views that must not be
    kept across a change."""

    def __init__(self) -> None:
        self._topics: dict[uuid.UUID, Topic] = {}
        self._topics_by_name: dict[str, Topic] = {}
        self._partition_count = 0
        # Cursors are looked up by name (every fetch of a subscription) and removed by topic.
        self._cursors: dict[CursorKey, Cursor] = {}
        self._cursors_by_name: dict[str, dict[CursorKey, Cursor]] = {}
        self._cursors_by_topic: dict[uuid.UUID, dict[CursorKey, Cursor]] = {}
        self._states: dict[str, State] = {}

    @classmethod
    def from_snapshot(cls, snapshot: object) -> Catalog:
        """Return the catalog that the rows of a snapshot make. Raises DamagedStore."""
        if not isinstance(snapshot, list):
            raise DamagedStore("the catalog's snapshot is not a list of changes")
        catalog = cls()
        for row in snapshot:
            catalog.apply(_decode_row(row))
        return catalog

    def snapshot(self) -> list[list[Any]]:
        """Return the whole catalog as rows for JSON; `from_snapshot` reads them."""
        return list(self.capture().rows())

    def capture(self) -> CapturedCatalog:
        """Return a snapshot of the whole catalog."""
        return CapturedCatalog(
            tuple(self._topics.values()),
            tuple(self._cursors.values()),
            tuple(self._states.items()),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Catalog):
            return NotImplemented
        return (
            self._topics == other._topics
            and self._cursors == other._cursors
            and self._states == other._states
        )

    __hash__ = None  # type: ignore[assignment]

    # --- content ----------------------------------------------------------------------------

    @property
    def topics(self) -> Mapping[str, Topic]:
        """Every topic by name."""
        return MappingProxyType(self._topics_by_name)

    @property
    def topics_by_id(self) -> Mapping[uuid.UUID, Topic]:
        return MappingProxyType(self._topics)

    def topic(self, topic_id: uuid.UUID) -> Topic:
        """Return a topic. Raises UnknownTopic."""
        topic = self._topics.get(topic_id)
        if topic is None:
            raise UnknownTopic(f"there is no topic with id {topic_id}")
        return topic

    def topic_of(self, key: PartitionKey) -> Topic:
        """Return the topic of an existing partition. Raises UnknownTopic, UnknownPartition."""
        topic = self.topic(key.topic_id)
        if not 0 <= key.partition < topic.partitions:
            raise UnknownPartition(
                f"topic {topic.name} has no partition {key.partition}: "
                f"it has {topic.partitions}, counted from 0"
            )
        return topic

    def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> dict[CursorKey, Cursor]:
        """Return the cursors of a name, of a topic, of both, or all."""
        if name is None:
            if topic_id is None:
                return dict(self._cursors)
            return dict(self._cursors_by_topic.get(topic_id, {}))
        named_cursors = self._cursors_by_name.get(name, {})
        if topic_id is None:
            return dict(named_cursors)
        return {key: cursor for key, cursor in named_cursors.items() if key.topic_id == topic_id}

    def state(self, key: str) -> State:
        return self._states.get(key, NO_STATE)

    def states(self, prefix: str) -> dict[str, State]:
        return {key: state for key, state in self._states.items() if key.startswith(prefix)}

    # --- requests, checked and turned into changes ------------------------------------------

    def new_topic(
        self, name: str, partitions: int, policy: Policy, topic_id: uuid.UUID, created_ms: int
    ) -> TopicPut:
        """Return the change that creates a topic. Raises IllegalTopicName, TopicExists,
        InvalidRequest, LimitReached."""
        check_topic_name(name)
        if name in self._topics_by_name:
            raise TopicExists(f"topic {name} already exists")
        if len(self._topics) >= limits.TOPICS:
            raise LimitReached(
                f"there are already {limits.TOPICS} topics, the limit: delete one first"
            )
        self._check_partitions(partitions, 0)
        return TopicPut(Topic(topic_id, name, partitions, _share_policy(policy), created_ms))

    def altered_topic(
        self, topic_id: uuid.UUID, partitions: int | None, policy: Policy | None
    ) -> TopicPut:
        """Return the change that sets the partitions or the policy; None leaves a value unchanged.
        Raises UnknownTopic, InvalidRequest, LimitReached."""
        topic = self.topic(topic_id)
        if partitions is None:
            partitions = topic.partitions
        if partitions < topic.partitions:
            raise InvalidRequest(
                f"topic {topic.name} has {topic.partitions} partitions; "
                f"it cannot be reduced to {partitions}"
            )
        self._check_partitions(partitions, topic.partitions)
        policy = topic.policy if policy is None else _share_policy(policy)
        return TopicPut(dataclasses.replace(topic, partitions=partitions, policy=policy))

    def deleted_topic(self, topic_id: uuid.UUID) -> TopicDeleted:
        """Return the change that deletes a topic. Raises UnknownTopic."""
        return TopicDeleted(self.topic(topic_id).id)

    def cursor_changes(self, cursors: Sequence[Cursor]) -> list[CursorSet]:
        """Return changes for all cursors. Raises UnknownTopic, UnknownPartition, InvalidRequest,
        LimitReached."""
        for cursor in cursors:
            self.topic_of(PartitionKey(cursor.key.topic_id, cursor.key.partition))
            if cursor.offset is not None and not 0 <= cursor.offset <= _OFFSET_MAX:
                raise InvalidRequest(f"invalid offset {cursor.offset} of a cursor: use 0 or more")
            _check_text("a cursor's name", cursor.key.name, shared_limits.NAME_BYTES)
            _check_text("a cursor's metadata", cursor.metadata, shared_limits.CURSOR_METADATA_BYTES)
        # Counting exactly takes time, because many of the cursors exist already. It is done only if
        # the limit could be exceeded.
        if len(self._cursors) + len(cursors) > limits.CURSORS:
            self._check_cursor_count(cursors)
        return [CursorSet(cursor) for cursor in cursors]

    def state_changes(self, states: Sequence[StatePut]) -> list[StateSet]:
        """Return changes for all states, with their new versions. Raises StateChanged,
        InvalidRequest, LimitReached."""
        changes = [self._state_change(*state) for state in states]
        if len({change.key for change in changes}) < len(changes):
            raise InvalidRequest("one call sets the same state twice")
        # The new version is 1 only if the key had no value.
        added = sum(change.state.version == 1 for change in changes)
        if added and len(self._states) + added > limits.STATE_KEYS:
            raise LimitReached(
                f"there are already {limits.STATE_KEYS} states, the limit: remove one first"
            )
        return changes

    def _state_change(self, key: str, value: bytes | None, expected_version: int) -> StateSet:
        """Return the change of one state. Raises StateChanged unless its version is as expected,
        InvalidRequest, LimitReached."""
        _check_text("a state's key", key, shared_limits.STATE_KEY_BYTES)
        if value is not None and len(value) > shared_limits.STATE_VALUE_BYTES:
            raise LimitReached(
                f"the value of state {key} has {len(value)} bytes; at most "
                f"{shared_limits.STATE_VALUE_BYTES} are allowed"
            )
        current = self.state(key)
        if current.version != expected_version:
            raise StateChanged(
                f"the state {key} is at version {current.version}, not {expected_version}: "
                "read it again and retry"
            )
        if value is None:
            # A removed key has version 0 again, as if it had never been set.
            return StateSet(key, NO_STATE)
        return StateSet(key, State(_copy_exact(value), current.version + 1))

    # --- applying changes -------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Apply a change. Raises DamagedStore, and changes nothing, if it does not fit."""
        match change:
            case TopicPut(topic):
                self._put_topic(topic)
            case TopicDeleted(topic_id):
                self._delete_topic(topic_id)
            case CursorSet(cursor):
                self._set_cursor(cursor)
            case StateSet(key, state) if state.value is None:
                self._states.pop(key, None)
            case StateSet(key, state):
                self._states[key] = state

    def apply_all(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self.apply(change)

    def revert(self, change: Change, durable: Catalog) -> None:
        """Undo the last change, which is not in `durable` and never will be: set what it concerns
        to what `durable` has of it. A topic that was created and deleted since then is in
        neither."""
        match change:
            case TopicPut(topic):
                stored = durable._topics.get(topic.id)
                if stored is not None:
                    self._put_topic(stored)
                elif topic.id in self._topics:
                    self._delete_topic(topic.id)
            case TopicDeleted(topic_id) if topic_id in durable._topics:
                self._put_topic(durable.topic(topic_id))
                for cursor in durable.cursors(topic_id=topic_id).values():
                    self._set_cursor(cursor)
            case CursorSet(cursor):
                stored_cursor = durable._cursors.get(cursor.key)
                if stored_cursor is not None:
                    self._set_cursor(stored_cursor)
                elif cursor.key in self._cursors:
                    self._set_cursor(cursor._replace(offset=None))
            case StateSet(key, _):
                self.apply(StateSet(key, durable.state(key)))

    def _put_topic(self, topic: Topic) -> None:
        """Add or replace a topic. Raises DamagedStore if its name or its id belongs to another
        topic."""
        topic_with_name = self._topics_by_name.get(topic.name)
        if topic_with_name is not None and topic_with_name.id != topic.id:
            raise DamagedStore(
                f"two topics have the name {topic.name}: {topic_with_name.id} and {topic.id}"
            )
        previous = self._topics.get(topic.id)
        if previous is not None and previous.name != topic.name:
            raise DamagedStore(f"topic {topic.id} has two names: {previous.name} and {topic.name}")
        self._topics[topic.id] = topic
        self._topics_by_name[topic.name] = topic
        self._partition_count += topic.partitions - (0 if previous is None else previous.partitions)

    def _delete_topic(self, topic_id: uuid.UUID) -> None:
        """Delete a topic and its cursors. Raises DamagedStore if it does not exist."""
        topic = self._topics.pop(topic_id, None)
        if topic is None:
            raise DamagedStore(f"topic {topic_id} is deleted but never existed")
        del self._topics_by_name[topic.name]
        self._partition_count -= topic.partitions
        for key in self._cursors_by_topic.pop(topic_id, {}):
            del self._cursors[key]
            _remove_cursor(self._cursors_by_name, key.name, key)

    def _set_cursor(self, cursor: Cursor) -> None:
        """Set a cursor, or remove it if its offset is None. Raises DamagedStore if its partition
        does not exist."""
        key = cursor.key
        topic = self._topics.get(key.topic_id)
        if topic is None or not 0 <= key.partition < topic.partitions:
            raise DamagedStore(f"{key.name} has a cursor in an unknown partition: {key}")
        if cursor.offset is not None:
            self._cursors[key] = cursor
            self._cursors_by_name.setdefault(key.name, {})[key] = cursor
            self._cursors_by_topic.setdefault(key.topic_id, {})[key] = cursor
        elif key in self._cursors:
            del self._cursors[key]
            _remove_cursor(self._cursors_by_name, key.name, key)
            _remove_cursor(self._cursors_by_topic, key.topic_id, key)

    # --- checks -----------------------------------------------------------------------------

    def _check_partitions(self, partitions: int, current: int) -> None:
        """Raise unless a topic may grow from `current` to this number of partitions."""
        if partitions < 1:
            raise InvalidRequest(f"a topic must have at least one partition, not {partitions}")
        if partitions > shared_limits.PARTITIONS_PER_TOPIC:
            raise LimitReached(
                f"a topic may have at most {shared_limits.PARTITIONS_PER_TOPIC} partitions, "
                f"not {partitions}"
            )
        if self._partition_count + partitions - current > limits.PARTITIONS:
            raise LimitReached(
                f"{partitions - current} more partitions would exceed the limit of "
                f"{limits.PARTITIONS} over all topics"
            )

    def _check_cursor_count(self, cursors: Sequence[Cursor]) -> None:
        """Raise LimitReached if these cursors, without those that exist already, are too many."""
        added = {cursor.key for cursor in cursors if cursor.offset is not None}
        added.difference_update(self._cursors)
        if added and len(self._cursors) + len(added) > limits.CURSORS:
            raise LimitReached(
                f"{len(added)} more cursors would exceed the limit of {limits.CURSORS}"
            )


def encode_change(change: Change) -> bytes:
    """Encode a change as JSON; `decode_change` reads it."""
    return _copy_exact(orjson.dumps(_encode_row(change)))


def _copy_exact(data: bytes) -> bytes:
    """Return a copy that takes no more memory than its length. A result of orjson takes at least
    4 KiB, which is too much for bytes that stay in memory."""
    return memoryview(data).tobytes()


def decode_change(data: bytes | bytearray | memoryview) -> Change:
    """Decode a change. Raises DamagedStore."""
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DamagedStore(f"a change of the catalog is not JSON: {error}") from error
    return _decode_row(row)


def _encode_row(change: Change) -> list[Any]:
    """Return a change as a JSON array, as drawn at the top of this module."""
    match change:
        case TopicPut(Topic(topic_id, name, partitions, policy, created_ms)):
            return ["topic", topic_id.hex, name, partitions, _encode_policy(policy), created_ms]
        case TopicDeleted(topic_id):
            return ["topic-deleted", topic_id.hex]
        case CursorSet(Cursor((name, topic_id, partition), offset, metadata, updated_ms, epoch)):
            row = ["cursor", name, topic_id.hex, partition, offset, metadata, updated_ms]
            # A cursor without a leader epoch has the shorter row of older directories.
            return row if epoch == NO_LEADER_EPOCH else [*row, epoch]
        case StateSet(key, State(value, version)):
            text = None if value is None else base64.b64encode(value).decode("ascii")
            return ["state", key, text, version]


@lru_cache(limits.SHARED_POLICIES)
def _share_policy(policy: Policy) -> Policy:
    """Return the policy that was first seen with these values: many topics have the same."""
    return policy


def _decode_row(row: object) -> Change:
    """Return the change that a JSON array describes. Raises DamagedStore."""
    try:
        match row:
            case ["topic", str(id_), str(name), int(partitions), dict(fields), int(created_ms)]:
                policy = _share_policy(_decode_policy(fields, partitions))
                return TopicPut(Topic(uuid.UUID(id_), name, partitions, policy, created_ms))
            case ["topic-deleted", str(id_)]:
                return TopicDeleted(uuid.UUID(id_))
            case [
                "cursor",
                str(name),
                str(id_),
                int(partition),
                int() | None as offset,
                str(metadata),
                int(updated_ms),
                *rest,
            ] if (epoch := _decode_leader_epoch(rest)) is not None:
                key = CursorKey(name, uuid.UUID(id_), partition)
                return CursorSet(Cursor(key, offset, metadata, updated_ms, epoch))
            case ["state", str(key), str() | None as text, int(version)]:
                value = None if text is None else base64.b64decode(text, validate=True)
                return StateSet(key, State(value, version))
    except (ValueError, InvalidPolicy) as error:
        raise DamagedStore(f"a change of the catalog is invalid: {error}") from error
    raise DamagedStore(f"a change of the catalog has an unknown kind: {str(row)[:200]}")


def _decode_leader_epoch(rest: list[object]) -> int | None:
    """Return the leader epoch at the end of a cursor's row; None if the rest is invalid."""
    match rest:
        case []:
            return NO_LEADER_EPOCH
        case [int(epoch)]:
            return epoch
    return None


def _encode_policy(policy: Policy) -> dict[str, Any]:
    """Return the fields that differ from the default, and those whose absence has a meaning. An
    enum is stored as its word."""
    always = {_PARTITIONER}
    if policy.archive_after_ms is None and policy.archive_bytes is None:
        always.add(_ARCHIVE_AFTER_LIVE_MS)
    values = ((field, getattr(policy, field.name)) for field in dataclasses.fields(policy))
    return {
        field.name: value
        for field, value in values
        if value != field.default or field.name in always
    }


def _decode_policy(values: dict[str, Any], partitions: int) -> Policy:
    """Return the policy of a topic.

    A topic without a partitioner was written before topics had one. If it has several partitions,
    it keeps the partitioner of that time, so that its keys stay in their partitions. Likewise, a
    topic that was never archived before `archive_after_live_ms` existed is still not archived."""
    if _PARTITIONER not in values and partitions > 1:
        values = {**values, _PARTITIONER: Partitioner.LEGACY}
    if (
        values.get("archive_after_ms", 0) is None
        and values.get("archive_bytes", 0) is None
        and _ARCHIVE_AFTER_LIVE_MS not in values
    ):
        values = {**values, _ARCHIVE_AFTER_LIVE_MS: None}
    fields = {field.name: field for field in dataclasses.fields(Policy)}
    unknown = values.keys() - fields.keys()
    if unknown:
        raise ValueError(f"unknown policy fields {sorted(unknown)}")
    return Policy(
        **{name: _decode_policy_value(fields[name], value) for name, value in values.items()}
    )


def _decode_policy_value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a policy field, an enum for its word. Raises ValueError for a value of a
    wrong type."""
    default = field.default
    if isinstance(default, StrEnum):
        return type(default)(value)
    # Types are compared exactly, because True is an int to `isinstance`.
    if isinstance(default, bool):
        is_valid = type(value) is bool
    else:
        is_valid = value is None or type(value) is int
    if not is_valid:
        raise ValueError(f"the policy field {field.name} cannot be {value!r}")
    return value


def _check_text(what: str, text: str, max_bytes: int) -> None:
    """Raise LimitReached for text that is too long, InvalidRequest for text that is not valid
    Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is not valid Unicode text") from error
    if size > max_bytes:
        raise LimitReached(f"{what} has {size} bytes; at most {max_bytes} are allowed")


def _remove_cursor(
    index: dict[_Owner, dict[CursorKey, Cursor]], owner: _Owner, key: CursorKey
) -> None:
    """Remove a cursor from an index. Remove an owner's entry when it is empty, so that entries of
    owners without cursors do not accumulate."""
    cursors = index[owner]
    del cursors[key]
    if not cursors:
        del index[owner]
