"""What the adapter of a Kafka client does: publish, read, join, write transactions, administer.

Each client of Python has a module here. Clients of other languages are driven by lines of JSON
(driven.py), and kcat by its command line. tests/interop/suite.py lists them all.

The proofs of the suite (test_records.py, test_groups.py, test_transactions.py and
test_administration.py) use these calls only. A client that has no such call leaves the method out
of its adapter: table.MISSING, or the proof itself, says why the client is not in that proof.

All calls block. Everything that an adapter opens is closed with it. An error that the client raises
is `Refused`, under Kafka's name for it where there is one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode

from tests.interop.programs import Client as Program
from tests.interop.running import DEADLINE_SECONDS

T = TypeVar("T")

#: The topic of a proof, unless it needs another one.
TOPIC: Final = "news"

Headers = tuple[tuple[str, bytes | None], ...]


class Message(NamedTuple):
    """A record. Partition and timestamp may be left to the client; the offset is the broker's."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None
    partition: int | None = None
    offset: int | None = None


class AtTime(NamedTuple):
    """Begin with the first record of this time or later."""

    ms: int


#: Where a reader begins: at one of the ends, at an offset, or at a time.
Start = Literal["start", "end"] | int | AtTime


class Committed(NamedTuple):
    offset: int
    #: What Kafka calls metadata: a text that goes with the offset.
    note: str = ""


class GroupMember(NamedTuple):
    client_id: str
    #: Topics and partitions.
    assigned: list[tuple[str, int]]


class Group(NamedTuple):
    #: In Kafka's spelling: Stable, Empty.
    state: str
    members: list[GroupMember]


class Refused(Exception):
    """The client, or the broker through it, raised an error.

    `name` is that of Kafka's protocol, such as TOPIC_ALREADY_EXISTS, or else the client's own.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Publisher(ABC):
    @abstractmethod
    def send(self, topic: str, *messages: Message) -> list[int]:
        """Publish, wait for the acknowledgements, and return the offsets.

        Without acknowledgements, or if the client does not tell offsets, the result means nothing.
        """

    @abstractmethod
    def close(self) -> None: ...

    def put(self, topic: str, *values: str, **more: Any) -> list[int]:
        """Publish these texts, all with the same key and so on."""
        return self.send(topic, *[Message(value.encode(), **more) for value in values])


class Writer(Publisher):
    """A producer with a transactional id.

    It may take the id over when it is opened, or as late as in its first transaction. `close` works
    also if it was fenced, or while its transaction is open.
    """

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send_offset(self, group: str, topic: str, offset: int) -> None:
        """Commit this offset of partition 0 for the group as a part of the transaction."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...


class Reader(ABC):
    """A consumer of some partitions of a topic."""

    @abstractmethod
    def take(self, count: int) -> list[Message]:
        """Wait for this number of records and return them."""

    @abstractmethod
    def close(self) -> None: ...

    def bounds(self) -> tuple[int, int]:
        """Return the first offset of partition 0 and the one behind its last record."""
        raise NotImplementedError

    def offset_at(self, time_ms: int) -> int | None:
        """Return the first offset in partition 0 of this time or later, if there is one."""
        raise NotImplementedError

    def values(self, count: int) -> list[bytes | None]:
        return [message.value for message in self.take(count)]

    def texts(self, count: int) -> list[str]:
        return [(value or b"").decode() for value in self.values(count)]


class Member(Reader):
    """A consumer that is a member of a group, and reads from the start of the topic."""

    @abstractmethod
    def commit(self, offset: int, note: str = "") -> None:
        """Commit this offset of partition 0, with a note if the client has such."""


class Admin(ABC):
    @abstractmethod
    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None: ...

    @abstractmethod
    def delete_topic(self, name: str) -> None: ...

    @abstractmethod
    def topics(self) -> set[str]: ...

    @abstractmethod
    def partitions(self, topic: str) -> int: ...

    @abstractmethod
    def add_partitions(self, topic: str, total: int) -> None: ...

    @abstractmethod
    def configs(self, topic: str) -> dict[str, str]:
        """Return the configs that are not at their defaults."""

    @abstractmethod
    def delete_records(self, topic: str, before: int) -> int:
        """Delete records of partition 0 below an offset; return its first offset."""

    @abstractmethod
    def groups(self) -> list[str]:
        """Return the names of all groups of consumers."""

    @abstractmethod
    def group(self, name: str) -> Group: ...

    @abstractmethod
    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        """Return the group's offsets by topic and partition."""

    def set_config(self, topic: str, name: str, value: str | None) -> None:
        """Change one config, or reset it with None; the others stay."""
        raise NotImplementedError

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        """Set these configs, and reset all others."""
        raise NotImplementedError

    def move(self, group: str, topic: str, offset: int) -> None:
        """Set the group's offset of partition 0."""
        raise NotImplementedError

    def forget(self, group: str, topic: str) -> None:
        """Delete the group's offset of partition 0."""
        raise NotImplementedError

    def delete_group(self, name: str) -> None:
        raise NotImplementedError


class Client(ABC):
    """Opens all of the above; close it with `close`."""

    #: The client.id of its group members.
    client_id: ClassVar[str] = "duck"
    #: Whether a publisher learns the offsets of its records.
    tells_offsets: ClassVar[bool] = True
    #: Whether a header may be null, and a name may occur twice.
    null_headers: ClassVar[bool] = True
    repeated_headers: ClassVar[bool] = True
    #: Whether a note goes with a committed offset.
    commits_notes: ClassVar[bool] = True
    #: Whether a reader fetches before it is asked for records.
    fetches_ahead: ClassVar[bool] = True
    #: Whether a reader of committed records remembers only one aborted transaction of a producer in
    #: each response, and shows the records of the others: then each producer aborts once.
    confuses_aborts: ClassVar[bool] = False
    #: The programs that tests/interop/scenarios.py starts, as members and as producers.
    member_program: ClassVar[Program]
    producer_program: ClassVar[Program]

    def __init__(self) -> None:
        self._alive = ExitStack()
        self._may_complain = False

    def close(self) -> None:
        self._alive.close()

    def may_complain(self) -> None:
        """Say that the proof provokes warnings, so that they are no sign of a broken broker."""
        self._may_complain = True

    @abstractmethod
    def publisher(
        self,
        address: str,
        *,
        compression: str | None = None,
        acks: Literal["0", "1", "all"] = "all",
        idempotent: bool = False,
    ) -> Publisher: ...

    @abstractmethod
    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader: ...

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        raise NotImplementedError

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        """Join the group as a reader of TOPIC, and as a static member if it gets a name."""
        raise NotImplementedError

    def admin(self, address: str) -> Admin:
        raise NotImplementedError


def kafka_name(code: int) -> str:
    """Return the name that Kafka's protocol has for an error."""
    return ErrorCode(code).name.upper()


@contextmanager
def refusing(error: type[Exception], name_of: Callable[[Any], str]) -> Iterator[None]:
    """Raise errors of a client as Refused."""
    try:
        yield
    except error as raised:
        raise Refused(name_of(raised), str(raised)) from raised


def gather(count: int, more: Callable[[int], Sequence[T]]) -> list[T]:
    """Call `more` with the number that is missing until there are enough, or until the deadline."""
    found: list[T] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records came"
        found += more(count - len(found))
    return found
