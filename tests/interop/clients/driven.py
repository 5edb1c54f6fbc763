"""What the clients of other languages share: a process that does what lines of JSON ask for.

See tests/interop/driver.py. Keys, values and headers are strings there whose characters are bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, ClassVar, Final, Literal

from tests.interop.clients import interface
from tests.interop.clients.interface import TOPIC, AtTime, Message, Refused, Start, refusing
from tests.interop.driver import Client as Driven
from tests.interop.driver import ClientFailure, Driver, Session

#: A group of its own for each reader of a client that cannot read without one.
GROUPS: Final = (f"reader-{number}" for number in count())

Settings = Mapping[str, Any]


def text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("latin-1")


def data(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


class DrivenClient(interface.Client):
    #: Words of the lines that the client logs when the broker refuses something.
    refusal_logs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.session: Final = self._alive.enter_context(Session(driver, ""))
        self._admins: dict[str, Driven] = {}

    def close(self) -> None:
        """Also check that the client is content: its complaints are faults of the broker."""
        complaints = [] if self._may_complain else self.session.complaints()
        super().close()
        assert not complaints, complaints

    def kafka_name(self, name: str) -> str:
        """Return Kafka's name for an error, given the client's."""
        return name

    def refused(self) -> AbstractContextManager[None]:
        def name_of(failure: ClientFailure) -> str:
            for words in self.refusal_logs:
                self.session.expect(words)
            return self.kafka_name(failure.name)

        return refusing(ClientFailure, name_of)

    # --- the client's own names for settings ---------------------------------------------------

    @abstractmethod
    def publisher_settings(self, compression: str | None, acks: str, idempotent: bool) -> Settings:
        """Return the settings of a producer."""

    @abstractmethod
    def reader_settings(self, committed: bool) -> Settings:
        """Return the settings of a consumer that is told what to read."""

    @abstractmethod
    def writer_settings(self, name: str, timeout_ms: int) -> Settings:
        """Return the settings of a producer with a transactional id."""

    @abstractmethod
    def find_offset(self, address: str, topic: str, what: Start) -> int | None:
        """Look an offset of partition 0 up; return None if no record has this time or later."""

    # --- what is opened ------------------------------------------------------------------------

    def publisher(
        self,
        address: str,
        *,
        compression: str | None = None,
        acks: Literal["0", "1", "all"] = "all",
        idempotent: bool = False,
    ) -> Publisher:
        settings = self.publisher_settings(compression, acks, idempotent)
        return Publisher(self, self.open("producer", address, settings))

    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader:
        consumer = self.open("consumer", address, self.reader_settings(committed))
        begin = {"time": start.ms} if isinstance(start, AtTime) else start
        with self.refused():
            consumer.call("assign", partitions=[[topic, number, begin] for number in partitions])
        return Reader(self, consumer, address, topic)

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        writer = Writer(
            self, self.open("producer", address, self.writer_settings(name, timeout_ms))
        )
        writer.initialise()
        return writer

    def driven_admin(self, address: str) -> Driven:
        """Return the one admin for this address."""
        if address not in self._admins:
            self._admins[address] = self.open("admin", address, {})
        return self._admins[address]

    def open(self, kind: str, address: str, settings: Settings) -> Driven:
        return self.session.open(kind, address=address, settings=settings)


class Publisher(interface.Publisher):
    def __init__(self, client: DrivenClient, producer: Driven) -> None:
        self._client = client
        self._producer = producer

    def send(self, topic: str, *messages: Message) -> list[int]:
        places = self._call("send", topic=topic, records=[in_json(one) for one in messages])
        for place in places:
            if "name" in place:
                raise Refused(self._client.kafka_name(place["name"]), place["text"])
        return [place["offset"] for place in places if "offset" in place]

    def close(self) -> None:
        self._producer.close()

    def _call(self, what: str, **arguments: Any) -> Any:
        with self._client.refused():
            return self._producer.call(what, **arguments)


class Writer(Publisher, interface.Writer):
    def initialise(self) -> None:
        self._call("init_transactions")

    def begin(self) -> None:
        self._call("begin")

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        self._call("send_offset", group=group, topic=topic, offset=offset)

    def commit(self) -> None:
        self._call("commit_transaction")

    def abort(self) -> None:
        self._call("abort")


class Reader(interface.Reader):
    def __init__(self, client: DrivenClient, consumer: Driven, address: str, topic: str) -> None:
        self._client = client
        self._consumer = consumer
        self._address = address
        self._topic = topic

    def take(self, count: int) -> list[Message]:
        with self._client.refused():
            return [from_json(record) for record in self._consumer.take(count)]

    def bounds(self) -> tuple[int, int]:
        first, end = (
            self._client.find_offset(self._address, self._topic, "start"),
            self._client.find_offset(self._address, self._topic, "end"),
        )
        assert first is not None
        assert end is not None
        return first, end

    def offset_at(self, time_ms: int) -> int | None:
        return self._client.find_offset(self._address, self._topic, AtTime(time_ms))

    def close(self) -> None:
        self._consumer.close()


def in_json(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"value": text(message.value)}
    if message.key is not None:
        record["key"] = text(message.key)
    if message.headers:
        record["headers"] = [[name, text(value)] for name, value in message.headers]
    if message.timestamp is not None:
        record["timestamp"] = message.timestamp
    if message.partition is not None:
        record["partition"] = message.partition
    return record


def from_json(record: Mapping[str, Any]) -> Message:
    return Message(
        data(record["value"]),
        data(record["key"]),
        tuple((name, data(value)) for name, value in record["headers"]),
        record["timestamp"],
        record["partition"],
        record["offset"],
    )
