"""Clients that write transactions, each behind the same few calls, whatever its language.

What a client calls an error is kept as `Refused`, with the client's own name for it. Calls block;
one that is to wait for something else is made in a thread (`later`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from tests.interop.driver import Client as Driven
from tests.interop.driver import ClientFailure, Session

T = TypeVar("T")

#: All transactions are written here, to partition 0.
TOPIC: Final = "news"


class Refused(Exception):
    """The client, or the broker through it, did not do it. `name` is the client's own word."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Writer(ABC):
    """A producer of a transactional id, from its beginning on; one may begin as late as with its
    first transaction."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send(self, *values: str) -> None:
        """Until they are acknowledged."""

    @abstractmethod
    def send_offset(self, group: str, topic: str, offset: int) -> None:
        """That a group has come to this offset in partition 0 goes with the transaction."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Also one that was fenced, or whose transaction is open."""


class Reader(ABC):
    """A consumer of partition 0 from its start, who reads committed records only, or all."""

    @abstractmethod
    def take(self, count: int) -> list[str]:
        """The next values, so many."""

    @abstractmethod
    def close(self) -> None: ...


class Client(ABC):
    """Knows how to open them."""

    #: Whether its readers remember one aborted transaction of a producer in each answer, and show
    #: the records of those before it: then each producer aborts once.
    confuses_aborts = False

    @abstractmethod
    def writer(self, address: str, name: str, timeout_ms: int) -> Writer: ...

    @abstractmethod
    def reader(self, address: str, committed: bool) -> Reader: ...


def later(call: Callable[[], T]) -> Future[T]:
    """What becomes of a call that may take its time."""
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(call)
    finally:
        executor.shutdown(wait=False)


# --- clients that are driven -------------------------------------------------------------------


class DrivenClient(Client):
    """One of driver.py. The settings' names are the client's own: of a writer, by the transactional
    id and the timeout; of a reader, by whether it reads committed records."""

    def __init__(
        self,
        session: Session,
        writer: Callable[[str, int], Mapping[str, Any]],
        reader: Callable[[bool], Mapping[str, Any]],
        confuses_aborts: bool = False,
    ) -> None:
        self.confuses_aborts = confuses_aborts
        self._session = session
        self._writer = writer
        self._reader = reader

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        settings = self._writer(name, timeout_ms)
        made = self._session.open("producer", address=address, settings=settings)
        writer = DrivenWriter(made)
        writer.begin_to_exist()
        return writer

    def reader(self, address: str, committed: bool) -> Reader:
        settings = self._reader(committed)
        made = self._session.open("consumer", address=address, settings=settings)
        made.call("assign", partitions=[[TOPIC, 0, "start"]])
        return DrivenReader(made)


class DrivenWriter(Writer):
    def __init__(self, client: Driven) -> None:
        self._client = client

    def begin_to_exist(self) -> None:
        self._call("init_transactions")

    def begin(self) -> None:
        self._call("begin")

    def send(self, *values: str) -> None:
        records = [{"value": value, "partition": 0} for value in values]
        for place in self._call("send", topic=TOPIC, records=records):
            if "offset" not in place:
                raise Refused(**place)

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        self._call("send_offset", group=group, topic=topic, offset=offset)

    def commit(self) -> None:
        self._call("commit_transaction")

    def abort(self) -> None:
        self._call("abort")

    def close(self) -> None:
        self._client.close()

    def _call(self, what: str, **arguments: Any) -> Any:
        try:
            return self._client.call(what, **arguments)
        except ClientFailure as failure:
            raise Refused(failure.name, str(failure)) from failure


class DrivenReader(Reader):
    def __init__(self, client: Driven) -> None:
        self._client = client

    def take(self, count: int) -> list[str]:
        return self._client.values(count)

    def close(self) -> None:
        self._client.close()
