"""`Client`: put, get and subscribe, for programs that do not want to deal with offsets.

It uses the Kafka protocol through librdkafka, so the same program runs against QuackMQ and against
a Kafka cluster; only the address differs. Every call has a timeout and raises QuackTimeout, which
says what it waited for. All errors are QuackErrors.

A put that returned is on disk. A subscription lasts until `unsubscribe`. Messages are delivered at
least once: after a crash, the unfinished message is delivered again. They are delivered exactly
once if the program stores their ids (`after`), and at most once with on_crash="skip".
docs/python.md explains the choice.

Any thread may call. If several threads get from one topic, each message goes to one of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Never, Self, overload

from quackmq.client import limits
from quackmq.client.consuming.consumer import OnCrash, Reader
from quackmq.client.consuming.start import is_subscribed
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.producer import SerializedMessage
from quackmq.client.kafka.reachable import check_addresses
from quackmq.client.kafka.session import ReadOptions, Session
from quackmq.client.kafka.types import (
    Headers,
    Message,
    Serialiser,
    SerialiserName,
    StartLike,
    describe_unknown_argument,
    find_serialiser,
    header_pairs,
    key_bytes,
    make_origin,
    parse_start,
)
from quackmq.errors import (
    GroupNotEmpty,
    InvalidPolicy,
    InvalidRequest,
    TopicExists,
    UnknownMember,
    UnknownSubscription,
)
from quackmq.model.offset_notes import RECEIPTS_TOPIC, SUBSCRIBED, UNSUBSCRIBED
from quackmq.model.policy import CONFIG_PREFIX, Policy
from quackmq.model.subscription import check_name, parse_position, subscribed_note

_POLICIES: Final = {field.name for field in dataclasses.fields(Policy)}


class Remembered(Enum):
    """The default of `after`: the client's position file says where to continue."""

    IN_FILE = "by the client's file"


IN_FILE: Final = Remembered.IN_FILE
#: The ids of processed messages: one, several, or none yet.
After = str | Iterable[str] | None | Literal[Remembered.IN_FILE]


class Client:
    """A connection of a program to a broker.

    >>> with quackmq.Client(address, "printer", serialiser="json") as client:
    ...     client.subscribe("jobs")
    ...     client.put("jobs", {"pages": 3})
    ...     client.get("jobs").value
    True
    'A...'
    {'pages': 3}
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9092",
        name: str | None = None,
        *,
        serialiser: SerialiserName | Serialiser = "bytes",
        timeout: float | None = None,
        directory: str | Path | None = None,
        on_crash: OnCrash = "repeat",
        session_timeout: float = limits.CLIENT_SESSION_MS / 1000,
        busy_timeout: float = limits.CLIENT_BUSY_MS / 1000,
        settings: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        """`address` is HOST:PORT, or several separated by commas. The constructor does not connect.

        `timeout`: the timeout of a call in seconds. By default it is 5 s, and a call fails at once
        if nothing listens at the address. With an explicit timeout, the client also waits for a
        broker to start. `name`: the broker stores subscriptions and numbers under it; without a
        name, a client can only put. `directory`: where the client stores its positions; by default
        a directory for this name below the user's state directory. `on_crash`: whether the message
        that was unfinished at a crash is delivered again ("repeat") or not ("skip").
        `session_timeout`: after how many seconds the other processes of this name take over from a
        dead one. `busy_timeout`: how long a message may be processed. `settings`: further settings
        of librdkafka, for example for TLS or passwords of a cluster.
        """
        if unknown:
            raise TypeError(describe_unknown_argument(next(iter(unknown)), Client.__init__))
        if name is not None:
            check_name(name)
        check_addresses(address)
        # The constructor of a deadline checks the number; this object is not used.
        if timeout is not None:
            Deadline(timeout)
        if on_crash not in ("skip", "repeat"):
            raise InvalidRequest(f"on_crash is 'repeat' or 'skip', not {on_crash!r}")
        self.address = address
        self.name = name
        self.serialiser = find_serialiser(serialiser)
        #: Also used by `AsyncClient`.
        self.session = Session(
            KafkaConfig(address, name, dict(settings or {})),
            name,
            None if directory is None else Path(directory),
            ReadOptions(on_crash, timeout, int(session_timeout * 1000), int(busy_timeout * 1000)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.close(is_done=kind is None)

    def close(self, *, done: bool = False) -> None:
        """Close the client: finish running operations as far as the client's timeout allows. Calls
        that wait in other threads raise ClientClosed.

        The last message is delivered again to the next client of this name, because it is unknown
        whether the program has finished it. It is not delivered again with `done`, or after a
        `with` block that ends without an error.

        >>> client.close()
        """
        self.session.close(is_done=done)

    # --- putting ----------------------------------------------------------------------------

    @overload
    def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: None = None,
        timeout: float | None = None,
    ) -> str: ...

    @overload
    def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: int | None,
        timeout: float | None = None,
    ) -> str | None: ...

    def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> str | None:
        """Put one message and return its id. The message is on disk when this returns. The topic is
        created if the broker creates topics automatically. Messages with the same key stay in
        order.

        With `sequence`, an ascending number (gaps are allowed), a producer can put a message with
        an unknown outcome again, even after a crash: the broker drops it if it has it. The returned
        id is then None, unless it was the last message.

        >>> client.put("news", "rain")
        'A...'
        >>> first = client.put("news", "sun", sequence=1)
        >>> client.put("news", "sun", sequence=1) == first  # dropped
        True
        """
        deadline = self._deadline(timeout)
        message_bytes = self.serialise(message, key, headers)
        if sequence is not None:
            return self.session.put_numbered(topic, [message_bytes], sequence, deadline)[0]
        return self.session.put(topic, [message_bytes], deadline)[0]

    def put_many(
        self,
        topic: str,
        messages: Iterable[Any],
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> list[str | None]:
        """Put messages in order and return their ids. All are on disk when this returns. If it
        raises, some of them may be stored. With `sequence`, the number of the first message, either
        all or none are stored.

        >>> len(client.put_many("news", ["rain", "sun"]))
        2
        """
        deadline = self._deadline(timeout)
        serialised = [self.serialise(message, key, headers) for message in messages]
        if sequence is not None:
            return self.session.put_numbered(topic, serialised, sequence, deadline)
        return list(self.session.put(topic, serialised, deadline))

    def last_sequence(self, topic: str, *, timeout: float | None = None) -> int | None:
        """Return the last number that the broker has stored for this name in a topic; None before
        the first. After this call, other processes of this name cannot put numbered messages any
        more.

        >>> client.put("news", "rain", sequence=7)
        'A...'
        >>> client.last_sequence("news")
        7
        """
        return self.session.numbered.last(topic, self._deadline(timeout))

    # --- getting ----------------------------------------------------------------------------

    def get(self, topic: str, timeout: float | None = None, after: After = IN_FILE) -> Message:
        """Return the next message of a subscribed topic. Raises QuackTimeout if none arrives.

        Without `after`, the client stores the progress: a message is done when the same thread asks
        for the next one. With `after`, the program stores the progress: it passes the id of the
        last message that it has processed (None before the first). That message is done, and the
        next one is returned, again and again until its id is passed. For a topic with several
        partitions one id is enough; several, one per partition, may be given.

        >>> client.put_many("news", ["rain", "sun"])
        ['A...', 'A...']
        >>> client.get("news").value
        'rain'
        >>> message = client.get("news", after=None)
        >>> client.get("news", after=None).value == message.value
        True
        """
        return self.get_for(self._deadline(timeout), topic, after, threading.current_thread())

    def listen(self, topic: str, timeout: float | None = None) -> Iterator[Message]:
        """Yield the messages of a topic, one after the other, and wait for more, by default
        forever. With a timeout, raise QuackTimeout if no message arrives for that long. A message
        is done when the loop asks for the next one. The last message of a loop that was left is
        done when its thread asks for another message.

        >>> client.put_many("news", ["rain", "sun"])
        ['A...', 'A...']
        >>> for message in client.listen("news"):
        ...     print(message.value)
        ...     if message.value == "sun":
        ...         break
        rain
        sun
        """
        self._deadline(timeout)  # raise errors now, not at the first iteration
        return self._listen(topic, timeout)

    def size(self, topic: str, *, timeout: float | None = None) -> int:
        """Return the number of unread messages of this name. Each transaction (such as a numbered
        put) adds a little to it.

        >>> client.put_many("news", ["rain", "sun"])
        ['A...', 'A...']
        >>> client.size("news")
        2
        """
        deadline = self._deadline(timeout)
        info, positions = self.session.positions(topic, deadline)
        first, end = self.session.cluster.first_and_end_offsets(info, deadline)
        return sum(
            max(0, end[partition] - max(first[partition], positions.get(partition, 0)))
            for partition in range(info.partitions)
        )

    # --- subscribing ------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        start: StartLike = "end",
        *,
        receipts: bool = False,
        timeout: float | None = None,
    ) -> bool:
        """Subscribe this name to a topic until `unsubscribe`, whether or not a client runs. `start`
        is "end", "beginning", an offset or a time. Return True if the subscription is new; an
        existing one is not changed. The topic is created if missing. With `receipts`, a new
        subscription writes receipts, from which an audit can prove what was delivered.

        >>> client.subscribe("weather", start="beginning")
        True
        >>> client.subscribe("weather")
        False
        """
        deadline = self._deadline(timeout)
        if receipts and topic == RECEIPTS_TOPIC:
            raise InvalidRequest(f"subscriptions to {RECEIPTS_TOPIC} itself write no receipts")
        start_position, session = parse_start(start), self.session
        name, cluster = session.name, session.cluster
        info = cluster.ensure_topic(topic, deadline)
        if is_subscribed(cluster.committed(name, info, deadline)):
            return False
        starts = cluster.start_offsets(info, start_position, deadline)
        session.commit(info, starts, subscribed_note(start_position, receipts=receipts), deadline)
        return True

    def unsubscribe(self, topic: str, *, timeout: float | None = None) -> None:
        """End this name's subscription for all its processes, which should stop before. Raises
        UnknownSubscription.

        >>> client.unsubscribe("news")
        """
        deadline = self._deadline(timeout)
        try:
            info, positions = self.session.positions(topic, deadline)
        except UnknownSubscription:
            raise UnknownSubscription(f"{self.name} is not subscribed to topic {topic}") from None
        self.session.drop_reader(topic, deadline)
        self.session.commit(info, positions, UNSUBSCRIBED, deadline)
        self.session.directory.forget(info.id)

    def subscriptions(self, *, timeout: float | None = None) -> list[str]:
        """Return the topics that this name is subscribed to.

        >>> client.subscriptions()
        ['news']
        """
        deadline = self._deadline(timeout)
        committed = self.session.cluster.all_committed(self.session.name, deadline)
        return sorted(topic for topic, cursors in committed.items() if is_subscribed(cursors))

    def seek(self, topic: str, to: StartLike, *, timeout: float | None = None) -> None:
        """Move the position forwards or backwards. Raises GroupNotEmpty if other processes of this
        name read the topic and this one does not. An id passed as `after` takes precedence.

        >>> client.put("news", "rain")
        'A...'
        >>> client.get("news").value
        'rain'
        >>> client.seek("news", "beginning")
        >>> client.get("news").value
        'rain'
        """
        deadline = self._deadline(timeout)
        start_position, session = parse_start(to), self.session
        info, _ = session.positions(topic, deadline)
        starts = session.cluster.start_offsets(info, start_position, deadline)
        with session.existing_reader(topic, deadline) as reader:
            if reader is not None:
                reader.seek(starts, SUBSCRIBED, deadline)
                return
            try:
                session.commit_without_joining(info, starts, SUBSCRIBED, deadline)
            except UnknownMember:
                raise GroupNotEmpty(
                    f"other processes named {session.name} are reading: stop them, or seek in one "
                    "of them"
                ) from None

    # --- topics -----------------------------------------------------------------------------

    def topics(self, *, timeout: float | None = None) -> list[str]:
        """Return the names of all topics.

        >>> client.topics()
        ['news']
        """
        return self.session.cluster.topic_names(self._deadline(timeout))

    def create_topic(
        self,
        topic: str,
        partitions: int | None = None,
        *,
        exist_ok: bool = False,
        timeout: float | None = None,
        **policies: str | int | bool | None,
    ) -> None:
        """Create a topic. The default number of partitions is the broker's. With `exist_ok`, an
        existing topic is not changed, neither its partitions nor its policies. Policies are those
        of docs/kafka.md, for example `keep_for_ms=60_000`; for a Kafka cluster, use its config
        names with `_` for each dot, for example `retention_ms`. Raises TopicExists or
        InvalidPolicy.

        >>> client.create_topic("jobs", partitions=4, needs_subscriber=True)
        """
        configs = {_config_name(name): _config_text(value) for name, value in policies.items()}
        # -1 is Kafka's number for the broker's default.
        partition_count = -1 if partitions is None else partitions
        try:
            self.session.cluster.create_topic(
                topic, partition_count, configs, self._deadline(timeout)
            )
        except TopicExists:
            if not exist_ok:
                raise
        except InvalidPolicy as error:
            # The broker knows only config names. If an unknown policy resembles a known one,
            # suggest that.
            for name in policies.keys() - _POLICIES:
                near = difflib.get_close_matches(name, _POLICIES, n=1)
                if near and _config_name(name) in str(error):
                    raise InvalidPolicy(
                        f"there is no policy {name}: did you mean {near[0]}?"
                    ) from None
            raise

    def delete_topic(self, topic: str, *, timeout: float | None = None) -> None:
        """Delete a topic with its messages and subscriptions. Raises UnknownTopic.

        >>> client.delete_topic("news")
        """
        deadline = self._deadline(timeout)
        self.session.drop_reader(topic, deadline)
        self.session.cluster.delete_topic(topic, deadline)

    # --- helpers ----------------------------------------------------------------------------------

    def get_for(self, deadline: Deadline, topic: str, after: After, holder: object) -> Message:
        """Like `get`, with a deadline that another thread may end. The holder's last message is
        done."""
        ids = None
        if after is not IN_FILE:
            ids = [after] if isinstance(after, str) else list(after or ())

        def receive(reader: Reader) -> Message:
            """Get a message from the reader, by position file or by the ids that the program has
            passed."""
            if ids is None:
                record = reader.get(holder, deadline)
            else:
                positions = [parse_position(token, reader.topic.id) for token in ids]
                record = reader.get_after(positions, deadline)
            return Message(record, make_origin(reader.topic, self.serialiser))

        return self.session.call_reader(topic, deadline, receive, by_id=ids is not None)

    def serialise(
        self, message: Any, key: str | bytes | None, headers: Headers | None
    ) -> SerializedMessage:
        """Return the serialised message."""
        return self.serialiser.dumps(message), key_bytes(key), header_pairs(headers)

    def _deadline(self, timeout: float | None, default_s: float | None = None) -> Deadline:
        deadline = self.session.start_call(timeout, default_s)
        self.session.check_reachable(deadline)
        return deadline

    def _listen(self, topic: str, timeout: float | None) -> Iterator[Message]:
        """Yield messages until the timeout or the end of the loop. Messages come from the reader's
        buffer, without its lock; only filling the buffer needs a call with a deadline."""
        # With on_crash="skip", the position must be on disk before each message is delivered. So
        # get the messages one by one.
        if not self.session.repeats:
            thread = threading.current_thread()
            while True:
                yield self.get_for(self._deadline(timeout, math.inf), topic, IN_FILE, thread)
        # A loop is a holder of its own, so that a `get` in its thread does not finish its message.
        loop = object()
        try:
            while True:
                reader = self.session.fill(topic, loop, self._deadline(timeout, math.inf))
                origin = make_origin(reader.topic, self.serialiser)
                while (record := reader.take_buffered(loop)) is not None:
                    yield Message(record, origin)
        finally:
            self.session.end_loop(topic, loop, threading.current_thread())


def _config_name(policy: str) -> str:
    """Return the config name of a policy of QuackMQ, or of a config of a Kafka cluster."""
    return CONFIG_PREFIX + policy if policy in _POLICIES else policy.replace("_", ".")


def _config_text(value: str | int | bool | None) -> str:
    """Return a config value as text; -1 means no bound."""
    if value is None:
        return "-1"
    return str(value).lower() if isinstance(value, bool) else str(value)
