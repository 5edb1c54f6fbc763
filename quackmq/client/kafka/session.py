"""The parts of a client and how they work together; shared by `Client` and `AsyncClient`.

Parts are created on first use: a program that only puts never joins a group, and one that only gets
has no producer. Any thread may call.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka import Message as Record

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.consuming.commits import commit_by_joining, evict
from quackmq.client.consuming.consumer import OnCrash, Reader
from quackmq.client.consuming.directory import Directory, default_directory
from quackmq.client.consuming.start import choose_position, is_subscribed, not_subscribed_error
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import BY_LIBRDKAFKA, Cluster
from quackmq.client.kafka.config import KafkaConfig, Settings
from quackmq.client.kafka.numbered import Numbered
from quackmq.client.kafka.producer import PendingDeliveries, Publisher, SerializedMessage
from quackmq.client.kafka.reachable import wait_for_broker
from quackmq.client.kafka.types import TopicInfo
from quackmq.client.locks import locked
from quackmq.errors import (
    ClientClosed,
    InvalidRequest,
    MemberFenced,
    NameInOtherMode,
    NotFound,
    QuackError,
    QuackTimeout,
    Refused,
    UnknownMember,
)
from quackmq.model.subscription import RecordPosition, message_id

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading, see `Client`."""

    on_crash: OnCrash = "repeat"
    timeout_s: float | None = None
    session_ms: int = limits.CLIENT_SESSION_MS
    busy_ms: int = limits.CLIENT_BUSY_MS


class Session:
    def __init__(
        self,
        config: KafkaConfig,
        name: str | None,
        directory: Path | None,
        options: ReadOptions,
    ) -> None:
        self.config = config
        self._name = name
        self._read_options = options
        self._directory_path = directory
        self._lock = threading.Lock()
        self._is_closed = False
        #: Whether a broker has accepted a connection.
        self.is_reached = False
        self._cluster: Cluster | None = None
        self._numbered: Numbered | None = None
        self._directory: Directory | None = None
        self._publishers: dict[int, Publisher] = {}
        self._readers: dict[str, Reader] = {}
        self._reader_locks: dict[str, threading.RLock] = {}
        #: The deadlines of running calls.
        self._deadlines: weakref.WeakSet[Deadline] = weakref.WeakSet()

    @property
    def repeats(self) -> bool:
        """Whether the message that was unfinished at a crash is delivered again."""
        return self._read_options.on_crash == "repeat"

    def close(self, *, is_done: bool) -> None:
        """Close, within a bounded time whatever the broker does."""
        if self.end_calls():
            self.close_parts(is_done=is_done)

    def end_calls(self) -> bool:
        """Refuse new calls and end the waits of running ones. Return False if this was done before.
        Does not wait."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            deadlines = list(self._deadlines)
        for each in deadlines:
            each.end()
        return True

    def close_parts(self, *, is_done: bool) -> None:
        """Close all parts, after `end_calls`. If a part raises an error, the others are closed
        nevertheless."""
        deadline = Deadline(min(self.timeout_s, limits.CLIENT_CLOSE_MS / 1000))
        with ExitStack() as closing:  # it closes in reverse order
            if self._cluster is not None:
                closing.callback(self._cluster.close, deadline)
            if self._directory is not None:
                closing.callback(self._directory.close)
            if self._numbered is not None:
                closing.callback(self._numbered.close)
            for publisher in self._publishers.values():
                closing.callback(publisher.close, deadline)
            for topic in list(self._readers):
                closing.callback(self.drop_reader, topic, deadline, is_done=is_done)

    @property
    def timeout_s(self) -> float:
        """The default timeout of a call."""
        timeout_s = self._read_options.timeout_s
        return shared_limits.CLIENT_TIMEOUT_MS / 1000 if timeout_s is None else timeout_s

    def check_reachable(self, deadline: Deadline) -> None:
        """Check once that a broker listens at the address. Raises NoBroker."""
        if not self.is_reached:
            is_encrypted = self.config.is_encrypted
            wait_for_broker(self.config.address, deadline, is_encrypted=is_encrypted)
            self.is_reached = True

    # --- parts ------------------------------------------------------------------------------

    def start_call(self, timeout: float | None, default_s: float | None = None) -> Deadline:
        """Start a call and return its deadline: from its own timeout, from `default_s`, or from
        the client's timeout. Raises ClientClosed after `close`.
        """
        is_explicit = timeout is not None or self._read_options.timeout_s is not None
        if timeout is None:
            timeout = default_s if default_s is not None else self.timeout_s
        deadline = Deadline(timeout, is_explicit=is_explicit)
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._deadlines.add(deadline)
        return deadline

    @property
    def name(self) -> str:
        """The client's name. Raises InvalidRequest if it has none."""
        if self._name is None:
            raise InvalidRequest(
                "a client without a name can only put: give it a name, under which the broker "
                "keeps its subscriptions, as in Client(address, 'billing')"
            )
        return self._name

    @property
    def cluster(self) -> Cluster:
        with self._lock:
            if self._cluster is None:
                self._cluster = Cluster(self.config)
            return self._cluster

    @property
    def numbered(self) -> Numbered:
        """The part for numbered puts, created on first use. Raises InvalidRequest if the client has
        no name."""
        # Read these before locking: the property `cluster` takes the same lock.
        name, cluster = self.name, self.cluster
        with self._lock:
            if self._numbered is None:
                self._numbered = Numbered(self.config, name, cluster)
            return self._numbered

    @property
    def directory(self) -> Directory:
        """The client's directory, opened on first use. Raises InvalidRequest without a name, or
        UnusableDirectory."""
        name = self.name
        with self._lock:
            if self._directory is None:
                self._directory = Directory(self._directory_path or default_directory(name))
            return self._directory

    def publisher(self, deadline: Deadline) -> Publisher:
        """Return the producer whose delivery timeout matches the deadline. When there are too
        many producers, return one with a longer timeout."""
        # `seconds` may be 0, which librdkafka takes for no timeout, or infinite.
        timeout_ms = max(
            1, int(min(deadline.seconds, shared_limits.CLIENT_LONGEST_MS / 1000) * 1000)
        )
        with self._lock:
            if timeout_ms not in self._publishers:
                if len(self._publishers) >= limits.CLIENT_PRODUCERS:
                    longer = [each for each in self._publishers if each > timeout_ms]
                    return self._publishers[min(longer, default=max(self._publishers))]
                self._publishers[timeout_ms] = Publisher(self.config, timeout_ms)
            return self._publishers[timeout_ms]

    # --- putting ----------------------------------------------------------------------------

    def put(
        self, topic: str, messages: Sequence[SerializedMessage], deadline: Deadline
    ) -> list[str]:
        """Put messages and wait until the broker has stored them; return their ids. Raises Refused
        with the reason, or QuackTimeout, after which the outcome is unknown."""
        publisher = self.publisher(deadline)
        deliveries = PendingDeliveries(len(messages))
        has_keys = any(key is not None for _, key, _ in messages)
        key_partitioner = (
            self.cluster.key_partitioner(topic, deadline) if has_keys else BY_LIBRDKAFKA
        )
        for index, message in enumerate(messages):
            partition = key_partitioner.partition(message[1])
            self._send(publisher, topic, message, deliveries, index, partition, deadline)
        # Otherwise librdkafka may wait half a second for its producer id before the first message.
        publisher.speed_up_first_message(topic, deadline)
        publisher.wait(deliveries, deadline)
        try:
            positions = _read_positions(publisher, topic, deliveries, deadline)
        except Refused as refused:
            raise self.explain_refusal(topic, refused) from None
        is_recreated = self.cluster.is_recreated(topic, positions)
        topic_id = self.topic_of_put(topic, deadline, refresh=is_recreated).id
        return [message_id(topic_id, position) for position in positions]

    def put_numbered(
        self, topic: str, messages: Sequence[SerializedMessage], sequence: int, deadline: Deadline
    ) -> list[str | None]:
        """Put messages numbered from `sequence` on; return their ids. See `Numbered.put`."""
        try:
            return self.numbered.put(topic, messages, sequence, deadline)
        except Refused as refused:
            raise self.explain_refusal(topic, refused) from None

    def explain_refusal(self, topic: str, refused: Refused) -> Refused:
        """Return the error with the reason, if the topic's policies tell it: librdkafka does not
        pass on the broker's message."""
        # Subclasses of Refused, such as LimitReached, already say the reason.
        if type(refused) is not Refused:
            return refused
        try:
            short_deadline = Deadline(limits.CLIENT_REQUEST_RETRY_MS / 1000)
            reasons = self.cluster.reasons_to_refuse(topic, short_deadline)
        except (KafkaException, QuackError) as error:
            log.debug("the policies of topic %s are not readable: %s", topic, error)
            return refused
        if not reasons:
            return refused
        return Refused(f"topic {topic} refuses the message: {' or '.join(reasons)}")

    def begin_put(
        self,
        topic: str,
        message: SerializedMessage,
        partition: int,
        on_done: Callable[[], None],
        deadline: Deadline,
    ) -> Callable[[], RecordPosition]:
        """Start sending a message to a partition (-1: librdkafka chooses). `on_done` is called
        in some thread when the result is known; then the returned function returns the message's
        position or raises the error, without waiting. Raises BufferError if too many messages are
        queued."""
        publisher = self.publisher(deadline)
        deliveries = PendingDeliveries(1, on_done)
        publisher.send(topic, message, deliveries, 0, partition)
        publisher.start_poller(topic)
        return lambda: _read_positions(publisher, topic, deliveries, deadline)[0]

    def topic_of_put(self, topic: str, deadline: Deadline, *, refresh: bool) -> TopicInfo:
        """Return the topic into which messages were put, possibly from the cache; with `refresh`,
        always request it. Raises QuackTimeout."""
        # The messages are stored, so it is worth exceeding the deadline a little for their ids.
        id_deadline = Deadline(max(deadline.remaining_s(), 1.0))
        return self.cluster.topic(topic, id_deadline, refresh=refresh)

    def _send(
        self,
        publisher: Publisher,
        topic: str,
        message: SerializedMessage,
        deliveries: PendingDeliveries,
        index: int,
        partition: int,
        deadline: Deadline,
    ) -> None:
        """Start sending a message. While librdkafka's queue is full, wait for room. Raises
        QuackTimeout."""
        while True:
            try:
                publisher.send(topic, message, deliveries, index, partition)
                return
            except BufferError:
                if deadline.has_passed():
                    raise deadline.timeout_error(f"room for a message to topic {topic}") from None
                publisher.make_room(deadline)

    # --- getting ----------------------------------------------------------------------------

    @contextmanager
    def using_reader(
        self, topic: str, deadline: Deadline, *, by_id: bool = False
    ) -> Iterator[Reader]:
        """Provide the topic's reader for one call. Raises UnknownTopic or UnknownSubscription."""
        with locked(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            try:
                yield self._open_reader(topic, by_id, deadline)
            except (NotFound, MemberFenced, NameInOtherMode):
                # This reader cannot continue; the next call creates another.
                self.drop_reader(topic, Deadline(0))
                raise

    def call_reader(
        self, topic: str, deadline: Deadline, call: Callable[[Reader], T], *, by_id: bool = False
    ) -> T:
        """Call `call` with the topic's reader and return the result. After being fenced, try once
        more: a member may have been fenced by itself, when a restarted broker received its new
        join before its earlier requests. If another process really uses its identity, the second
        attempt fails, too.
        """
        try:
            try:
                with self.using_reader(topic, deadline, by_id=by_id) as reader:
                    return call(reader)
            except (MemberFenced, UnknownMember) as error:
                log.warning("%s joins its group again: %s", self.name, error)
            with self.using_reader(topic, deadline, by_id=by_id) as reader:
                return call(reader)
        except QuackTimeout:
            if self._is_closed:  # closing ended the wait
                raise _closed() from None
            raise

    def fill(self, topic: str, holder: object, deadline: Deadline) -> Reader:
        """Return the topic's reader with buffered messages. The holder's last message is done."""

        def fill(reader: Reader) -> Reader:
            reader.fill(holder, deadline)
            return reader

        return self.call_reader(topic, deadline, fill)

    @contextmanager
    def existing_reader(self, topic: str, deadline: Deadline) -> Iterator[Reader | None]:
        """Provide the topic's reader, or None if there is none."""
        with locked(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            yield self._readers.get(topic)

    def put_back(self, topic: str, holder: object, record: Record) -> None:
        """Take back a message from its holder (the thread or task that got it), so that the next
        get returns it. Do nothing if the topic has no reader any more."""
        with self.existing_reader(
            topic, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000)
        ) as reader:
            if reader is not None:
                reader.put_back(holder, record)

    def end_loop(self, topic: str, loop: object, caller: object) -> None:
        """End a loop over messages: its last one is done when `caller` requests another."""
        reader = self._readers.get(topic)
        if reader is not None:
            reader.end_loop(loop, caller)

    def drop_reader(self, topic: str, deadline: Deadline, *, is_done: bool = False) -> None:
        """Close the topic's reader, if there is one. With `is_done`, messages in hand are done."""
        with locked(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            # Remove it first: `_poll_others` must not poll a reader that is closing.
            reader = self._readers.pop(topic, None)
            if reader is not None:
                reader.close(deadline, is_done=is_done)

    def _reader_lock(self, topic: str) -> threading.RLock:
        with self._lock:
            return self._reader_locks.setdefault(topic, threading.RLock())

    def _open_reader(self, topic: str, by_id: bool, deadline: Deadline) -> Reader:
        """Return the topic's reader; open it if missing. A reader in the other mode (`by_id` or
        with the file) is closed first. Raises UnknownTopic or UnknownSubscription."""
        reader = self._readers.get(topic)
        if reader is not None and reader.by_id == by_id:
            return reader
        if reader is not None:
            self.drop_reader(topic, deadline)
        name = self.name
        info = self.cluster.topic(topic, deadline, refresh=True)
        if not is_subscribed(self.cluster.committed(name, info, deadline)):
            raise not_subscribed_error(name, topic)
        self._evict_dead(info, deadline, kept_instance=self.directory.instance(info.id))
        self._readers[topic] = Reader(
            self.config,
            self.cluster,
            info,
            name,
            self.directory,
            by_id=by_id,
            on_crash=self._read_options.on_crash,
            session_ms=self._read_options.session_ms,
            busy_ms=self._read_options.busy_ms,
            poll_others=lambda: self._poll_others(topic),
        )
        return self._readers[topic]

    def _poll_others(self, topic: str) -> None:
        """Poll the readers of other topics: they are members of the same group, and a new member
        waits for them."""
        for other_topic, reader in list(self._readers.items()):
            lock = self._reader_lock(other_topic)
            # A reader whose lock is taken is in a call, which polls itself.
            if other_topic != topic and lock.acquire(blocking=False):
                try:
                    if self._readers.get(other_topic) is reader:
                        reader.poll_group()
                finally:
                    lock.release()

    # --- subscriptions ------------------------------------------------------------------------

    def positions(self, topic: str, deadline: Deadline) -> tuple[TopicInfo, dict[int, int]]:
        """Return the topic and this name's position by partition. Raises UnknownTopic or
        UnknownSubscription."""
        directory = self.directory
        info = self.cluster.topic(topic, deadline, refresh=True)
        committed = self.cluster.committed(self.name, info, deadline)
        if not is_subscribed(committed):
            raise not_subscribed_error(self.name, topic)
        positions = {
            partition: choose_position(cursor, directory.peek(info.id, partition), directory.note)
            for partition, cursor in committed.items()
        }
        with self.existing_reader(topic, deadline) as reader:
            if reader is not None and reader.topic.id == info.id:
                positions |= reader.positions()
        return info, positions

    def commit(
        self, info: TopicInfo, offsets: Mapping[int, int], note: str, deadline: Deadline
    ) -> None:
        """Commit offsets for this name. While the group has members, join it to commit. Without
        an explicit timeout, wait until the group has removed a dead member."""
        try:
            self.commit_without_joining(info, offsets, note, deadline)
        except UnknownMember:
            poll_others = partial(self._poll_others, info.name)
            longer_deadline = self._extend_by_session(deadline)
            commit_by_joining(
                self._settings(), info.name, offsets, note, longer_deadline, poll_others
            )

    def commit_without_joining(
        self, info: TopicInfo, offsets: Mapping[int, int], note: str, deadline: Deadline
    ) -> None:
        """Commit offsets without being a member of the group, which works only while the group
        has no members. So evict the members of dead processes of this directory first, if there
        are any. Raises UnknownMember."""
        try:
            self.cluster.commit(self.name, info, offsets, note, deadline)
        except UnknownMember:
            if not self._evict_dead(info, deadline):
                raise
            self.cluster.commit(self.name, info, offsets, note, deadline)

    def _evict_dead(self, topic: TopicInfo, deadline: Deadline, *, kept_instance: str = "") -> bool:
        """Remove the members of dead processes of this directory from the group, which would
        otherwise wait until their sessions expire. Keep the member `kept_instance`, which this
        process replaces anyway. Return whether there were any.
        """
        used_instances = {each.instance for each in list(self._readers.values())} | {kept_instance}
        try:
            instances = self.cluster.instances(self.name, deadline)
            with self.directory.dead_instances(
                each for each in instances if each not in used_instances
            ) as dead:
                if dead:
                    evicted = dead[: limits.CLIENT_EVICTIONS]
                    log.info(
                        "%s removes %d members of dead processes from its group",
                        self.name,
                        len(evicted),
                    )
                    poll_others = partial(self._poll_others, topic.name)
                    evict(self._settings(), topic.name, evicted, deadline, poll_others)
                return bool(dead)
        except (KafkaException, QuackError) as error:
            log.debug("the dead members of %s were not removed: %s", self.name, error)
            return False

    def _settings(self) -> Settings:
        return self.config.consumer(
            self.name, self._read_options.session_ms, self._read_options.busy_ms
        )

    def _extend_by_session(self, deadline: Deadline) -> Deadline:
        """Return a deadline that is longer by the session timeout, after which the group removes
        dead members. A timeout that the program has set is not extended."""
        if deadline.is_explicit:
            return deadline
        extended = Deadline(
            deadline.remaining_s() + self._read_options.session_ms / 1000, is_explicit=False
        )
        # `close` ends all deadlines in this set.
        with self._lock:
            self._deadlines.add(extended)
        return extended


def _read_positions(
    publisher: Publisher, topic: str, deliveries: PendingDeliveries, deadline: Deadline
) -> list[RecordPosition]:
    """Return the positions of the delivered messages. Raises the error of a failed message, or
    QuackTimeout if some are not acknowledged."""
    if deliveries.error is not None:
        raise publisher.translate_failure(topic, deliveries.error, deadline)
    if not deliveries.is_done:
        raise publisher.timeout_error(topic, deadline)
    publisher.clear_connection_error()
    return [position for position in deliveries.positions if position is not None]


def _closed() -> ClientClosed:
    return ClientClosed("the client is closed")
