"""The parts of a client and how they work together; shared by `Client` and `AsyncClient`.

Parts are created on first use: a program that only puts never joins a group, and one that only gets
has no producer. Any thread may call.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from quackmq.client.consuming.start import is_subscribed, not_subscribed, position_by
from quackmq.client.kafka.cluster import BY_LIBRDKAFKA, Cluster
from quackmq.client.kafka.config import KafkaConfig, Settings
from quackmq.client.kafka.errors import Deadline
from quackmq.client.kafka.numbered import Numbered
from quackmq.client.kafka.producer import PendingDeliveries, Publisher, SerializedMessage
from quackmq.client.kafka.reachable import reach
from quackmq.client.kafka.types import TopicInfo
from quackmq.client.locks import held
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
from quackmq.model.subscription import message_id

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
        connection: KafkaConfig,
        name: str | None,
        directory: Path | None,
        options: ReadOptions,
    ) -> None:
        self.connection = connection
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
        """Close all parts, within a bounded time whatever the broker does."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = list(self._deadlines)
        for each in waiting:
            each.end()
        deadline = Deadline(min(self.timeout_s, limits.CLIENT_CLOSE_MS / 1000))
        try:
            for topic in list(self._readers):
                self.drop_reader(topic, deadline, is_done=is_done)
        finally:
            for publisher in self._publishers.values():
                publisher.close(deadline)
            if self._numbered is not None:
                self._numbered.close()
            if self._directory is not None:
                self._directory.close()
            if self._cluster is not None:
                self._cluster.close(deadline)

    @property
    def timeout_s(self) -> float:
        """The default timeout of a call."""
        given = self._read_options.timeout_s
        return shared_limits.CLIENT_TIMEOUT_MS / 1000 if given is None else given

    def reach(self, deadline: Deadline) -> None:
        """Check once that a broker listens at the address. Raises NoBroker."""
        if not self.is_reached:
            is_encrypted = self.connection.is_encrypted
            reach(self.connection.address, deadline, is_encrypted=is_encrypted)
            self.is_reached = True

    # --- parts ------------------------------------------------------------------------------

    def begin(self, timeout: float | None, otherwise: float | None = None) -> Deadline:
        """Start a call and return its deadline: from its own timeout, from `otherwise`, or from
        the client's timeout. Raises ClientClosed after `close`."""
        is_given = timeout is not None or self._read_options.timeout_s is not None
        if timeout is None:
            timeout = otherwise if otherwise is not None else self.timeout_s
        found = Deadline(timeout, is_given=is_given)
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._deadlines.add(found)
        return found

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
                self._cluster = Cluster(self.connection)
            return self._cluster

    @property
    def numbered(self) -> Numbered:
        name, cluster = self.name, self.cluster
        with self._lock:
            if self._numbered is None:
                self._numbered = Numbered(self.connection, name, cluster)
            return self._numbered

    @property
    def directory(self) -> Directory:
        name = self.name
        with self._lock:
            if self._directory is None:
                self._directory = Directory(self._directory_path or default_directory(name))
            return self._directory

    def publisher(self, deadline: Deadline) -> Publisher:
        """Return the producer whose delivery timeout matches the deadline. When there are too
        many producers, return one with a longer timeout."""
        timeout_ms = max(
            1, int(min(deadline.seconds, shared_limits.CLIENT_LONGEST_MS / 1000) * 1000)
        )
        with self._lock:
            if timeout_ms not in self._publishers:
                if len(self._publishers) >= limits.CLIENT_PRODUCERS:
                    longer = [each for each in self._publishers if each > timeout_ms]
                    return self._publishers[min(longer, default=max(self._publishers))]
                self._publishers[timeout_ms] = Publisher(self.connection, timeout_ms)
            return self._publishers[timeout_ms]

    # --- putting ----------------------------------------------------------------------------

    def put(
        self, topic: str, parcels: Sequence[SerializedMessage], deadline: Deadline
    ) -> list[str]:
        publisher = self.publisher(deadline)
        sending = PendingDeliveries(len(parcels))
        has_keys = any(key is not None for _, key, _ in parcels)
        key_partitioner = (
            self.cluster.key_partitioner(topic, deadline) if has_keys else BY_LIBRDKAFKA
        )
        for index, parcel in enumerate(parcels):
            partition = key_partitioner.partition(parcel[1])
            self._send(publisher, topic, parcel, sending, index, partition, deadline)
        publisher.hurry(topic, deadline)
        publisher.wait(sending, deadline)
        try:
            return self._ids(publisher, topic, sending, deadline)
        except Refused as refused:
            raise self.refusal(topic, refused) from None

    def put_numbered(
        self, topic: str, parcels: Sequence[SerializedMessage], sequence: int, deadline: Deadline
    ) -> list[str | None]:
        try:
            return self.numbered.put(topic, parcels, sequence, deadline)
        except Refused as refused:
            raise self.refusal(topic, refused) from None

    def refusal(self, topic: str, refused: Refused) -> Refused:
        """Return the error with the reason, if the topic's policies tell it: librdkafka does not
        pass on the broker's message."""
        if type(refused) is not Refused:
            return refused
        try:
            patience = Deadline(limits.CLIENT_ASK_MS / 1000)
            reasons = self.cluster.reasons_to_refuse(topic, patience)
        except (KafkaException, QuackError) as error:
            log.debug("the policies of topic %s are not readable: %s", topic, error)
            return refused
        return (
            Refused(f"topic {topic} refuses the message: {' or '.join(reasons)}")
            if reasons
            else refused
        )

    def begin_put(
        self,
        topic: str,
        parcel: SerializedMessage,
        partition: int,
        on_done: Callable[[], None],
        deadline: Deadline,
    ) -> Callable[[], str]:
        """Start sending a message to a partition (-1: librdkafka chooses). `on_done` is called
        in some thread when the result is known; then the returned function returns the message
        id or raises the error. Raises BufferError if too many messages are queued."""
        publisher = self.publisher(deadline)
        sending = PendingDeliveries(1, on_done)
        publisher.send(topic, parcel, sending, 0, partition)
        publisher.poll_always(topic)
        return lambda: self._ids(publisher, topic, sending, deadline)[0]

    def _send(
        self,
        publisher: Publisher,
        topic: str,
        parcel: SerializedMessage,
        sending: PendingDeliveries,
        index: int,
        partition: int,
        deadline: Deadline,
    ) -> None:
        while True:
            try:
                publisher.send(topic, parcel, sending, index, partition)
                return
            except BufferError:
                if deadline.passed():
                    raise deadline.timeout(f"room for a message to topic {topic}") from None
                publisher.make_room(deadline)

    def _ids(
        self, publisher: Publisher, topic: str, sending: PendingDeliveries, deadline: Deadline
    ) -> list[str]:
        if sending.error is not None:
            raise publisher.failure(topic, sending.error, deadline)
        if not sending.is_done:
            raise publisher.unanswered(topic, deadline)
        publisher.note_answer()
        places = [place for place in sending.places if place is not None]
        # The messages are stored, so it is worth exceeding the deadline a little for their ids.
        patience = Deadline(max(deadline.left(), 1.0))
        topic_id = self.cluster.topic_of_put(topic, places, patience).id
        return [message_id(topic_id, place) for place in places]

    # --- getting ----------------------------------------------------------------------------

    @contextmanager
    def reading(self, topic: str, deadline: Deadline, *, by_id: bool = False) -> Iterator[Reader]:
        """Provide the topic's reader for one call. Raises UnknownTopic or UnknownSubscription."""
        with held(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            try:
                yield self._reader(topic, by_id, deadline)
            except (NotFound, MemberFenced, NameInOtherMode):
                # This reader cannot continue; the next call creates another.
                self.drop_reader(topic, Deadline(0))
                raise

    def take(
        self, topic: str, deadline: Deadline, take: Callable[[Reader], T], *, by_id: bool = False
    ) -> T:
        """Call `take` with the topic's reader and return the result. After being fenced, try
        once more: a member may have been fenced by itself, when a broker that was away first
        received its new join and then its earlier requests. If another process really uses its
        identity, the second attempt fails, too."""
        try:
            try:
                with self.reading(topic, deadline, by_id=by_id) as reader:
                    return take(reader)
            except (MemberFenced, UnknownMember) as error:
                log.warning("%s joins its group again: %s", self.name, error)
            with self.reading(topic, deadline, by_id=by_id) as reader:
                return take(reader)
        except QuackTimeout:
            if self._is_closed:  # closing ended the wait
                raise _closed() from None
            raise

    def fill(self, topic: str, holder: object, deadline: Deadline) -> Reader:
        """Return the topic's reader with buffered messages. The holder's last message is done."""

        def fill(reader: Reader) -> Reader:
            reader.fill(holder, deadline)
            return reader

        return self.take(topic, deadline, fill)

    @contextmanager
    def present_reader(self, topic: str, deadline: Deadline) -> Iterator[Reader | None]:
        """Provide the topic's reader, or None if there is none."""
        with held(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            yield self._readers.get(topic)

    def put_back(self, topic: str, holder: object, record: Record) -> None:
        """Let the next get return the message that a holder was given."""
        with self.present_reader(topic, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000)) as reader:
            if reader is not None:
                reader.put_back(holder, record)

    def leave(self, topic: str, loop: object, caller: object) -> None:
        """End a loop over messages: its last one is done when `caller` asks for another."""
        reader = self._readers.get(topic)
        if reader is not None:
            reader.leave(loop, caller)

    def drop_reader(self, topic: str, deadline: Deadline, *, is_done: bool = False) -> None:
        with held(self._reader_lock(topic), f"topic {topic} to be free", deadline):
            reader = self._readers.pop(topic, None)
            if reader is not None:
                reader.close(deadline, is_done=is_done)

    def _reader_lock(self, topic: str) -> threading.RLock:
        with self._lock:
            return self._reader_locks.setdefault(topic, threading.RLock())

    def _reader(self, topic: str, by_id: bool, deadline: Deadline) -> Reader:
        found = self._readers.get(topic)
        if found is not None and found.by_id == by_id:
            return found
        if found is not None:
            self.drop_reader(topic, deadline)
        name = self.name
        info = self.cluster.topic(topic, deadline, again=True)
        if not is_subscribed(self.cluster.committed(name, info, deadline)):
            raise not_subscribed(name, topic)
        self._evict_dead(info, deadline, but=self.directory.instance(info.id))
        self._readers[topic] = Reader(
            self.connection,
            self.cluster,
            info,
            name,
            self.directory,
            by_id=by_id,
            on_crash=self._read_options.on_crash,
            session_ms=self._read_options.session_ms,
            busy_ms=self._read_options.busy_ms,
            tend_others=lambda: self._tend_others(topic),
        )
        return self._readers[topic]

    def _tend_others(self, topic: str) -> None:
        """Poll the readers of other topics: they are members of the same group, and a new member
        waits for them."""
        for other, reader in list(self._readers.items()):
            lock = self._reader_lock(other)
            if other != topic and lock.acquire(blocking=False):
                try:
                    if self._readers.get(other) is reader:
                        reader.tend()
                finally:
                    lock.release()

    # --- subscriptions ------------------------------------------------------------------------

    def positions(self, topic: str, deadline: Deadline) -> tuple[TopicInfo, dict[int, int]]:
        """Return the topic and this name's position by partition. Raises UnknownTopic or
        UnknownSubscription."""
        directory = self.directory
        info = self.cluster.topic(topic, deadline, again=True)
        committed = self.cluster.committed(self.name, info, deadline)
        if not is_subscribed(committed):
            raise not_subscribed(self.name, topic)
        positions = {
            partition: position_by(cursor, directory.peek(info.id, partition), directory.note)
            for partition, cursor in committed.items()
        }
        with self.present_reader(topic, deadline) as reader:
            if reader is not None and reader.topic.id == info.id:
                positions |= reader.positions()
        return info, positions

    def commit(
        self, info: TopicInfo, offsets: Mapping[int, int], note: str, deadline: Deadline
    ) -> None:
        """Commit offsets for this name. While the group has members, join it to commit. Without
        an explicit timeout, wait until the group has removed a dead member."""
        try:
            self.commit_as_nobody(info, offsets, note, deadline)
        except UnknownMember:
            tend_others = partial(self._tend_others, info.name)
            patience = self._session_longer(deadline)
            commit_by_joining(self._settings(), info.name, offsets, note, patience, tend_others)

    def commit_as_nobody(
        self, info: TopicInfo, offsets: Mapping[int, int], note: str, deadline: Deadline
    ) -> None:
        """Commit offsets without being a member. Possible while no process of this name reads;
        dead processes of this directory are evicted first. Raises UnknownMember."""
        try:
            self.cluster.commit(self.name, info, offsets, note, deadline)
        except UnknownMember:
            if not self._evict_dead(info, deadline):
                raise
            self.cluster.commit(self.name, info, offsets, note, deadline)

    def _evict_dead(self, topic: TopicInfo, deadline: Deadline, *, but: str = "") -> bool:
        """Remove the members of dead processes of this directory from the group, which would
        otherwise wait until their sessions expire. Keep the member `but`, which this process
        replaces anyway. Return whether there were any."""
        used = {each.instance for each in list(self._readers.values())} | {but}
        try:
            instances = self.cluster.instances(self.name, deadline)
            with self.directory.dead(each for each in instances if each not in used) as dead:
                if dead:
                    some = dead[: limits.CLIENT_EVICTIONS]
                    log.info(
                        "%s removes %d members of dead processes from its group",
                        self.name,
                        len(some),
                    )
                    tend_others = partial(self._tend_others, topic.name)
                    evict(self._settings(), topic.name, some, deadline, tend_others)
                return bool(dead)
        except (KafkaException, QuackError) as error:
            log.debug("the dead members of %s were not removed: %s", self.name, error)
            return False

    def _settings(self) -> Settings:
        return self.connection.consumer(
            self.name, self._read_options.session_ms, self._read_options.busy_ms
        )

    def _session_longer(self, deadline: Deadline) -> Deadline:
        if deadline.is_given:
            return deadline
        found = Deadline(deadline.left() + self._read_options.session_ms / 1000, is_given=False)
        with self._lock:
            self._deadlines.add(found)
        return found


def _closed() -> ClientClosed:
    return ClientClosed("the client is closed")
