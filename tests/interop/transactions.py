"""What every client that writes transactions has to come through, and every one that reads them.

A scenario is given a client (clients/interface.py) and fails by an assertion. It ends with a plain
record: a reader that has come to it has read all that there is to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

import pytest

from quackmq.model.topic import PartitionKey
from quackmq.records.batch import NO_TIMESTAMP, Record
from tests.interop.clients.interface import TOPIC, Client, Reader, Refused, Writer
from tests.interop.proxy import Proxy
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

LONG_MS: Final = 60_000
#: The least that librdkafka takes.
SHORT_MS: Final = 1_000
END: Final = "the end"

T = TypeVar("T")


class Stage:
    """Writers and readers of one client, all in partition 0 of the topic."""

    def __init__(self, client: Client, address: str) -> None:
        self._writers: list[Writer] = []
        self._client = client
        self._address = address

    def writer(self, name: str = "tx", timeout_ms: int = LONG_MS) -> Writer:
        return self._client.writer(self._address, name, timeout_ms)

    def next_writer(self) -> Writer:
        """Return a writer for one transaction more: the same, if the client's readers allow it."""
        if not self._writers or self._client.confuses_aborts:
            self._writers.append(self.writer(f"tx-{len(self._writers)}"))
        return self._writers[-1]

    def reader(self, *, committed: bool) -> Reader:
        return self._client.reader(self._address, committed=committed)


@contextmanager
def staged(client: Client, proxy: Proxy | None = None) -> Iterator[tuple[RunningBroker, Stage]]:
    """Start a broker, to which the client comes by a proxy, if there is one."""
    client.may_complain()  # of what is fenced, or takes too long
    with RunningBroker(advertise=proxy.address if proxy else None) as broker:
        broker.call(broker.broker.create_topic(TESTER, TOPIC))
        if proxy is not None:
            proxy.lead_to(broker.address)
        try:
            yield broker, Stage(client, proxy.address if proxy else broker.address)
        finally:
            client.close()


def later(call: Callable[[], T]) -> Future[T]:
    """Begin a call that may take its time."""
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(call)
    finally:
        executor.shutdown(wait=False)


def publish(broker: RunningBroker, value: str, topic: str = TOPIC) -> None:
    """A record outside of all transactions."""
    broker.call(
        broker.broker.messages.put(TESTER, topic, [Record(0, NO_TIMESTAMP, None, value.encode())])
    )


# --- the scenarios -----------------------------------------------------------------------------


def commits_are_seen_and_aborts_are_not(client: Client) -> None:
    """By who reads committed records, and not before they are committed; others see all at once."""
    with staged(client) as (broker, stage):
        cautious, hasty = stage.reader(committed=True), stage.reader(committed=False)
        sent, committed = [], []
        for number, ends in enumerate(("commit", "abort", "commit", "abort", "commit")):
            values = [f"{number}a", f"{number}b"]
            writer = stage.next_writer()
            writer.begin()
            writer.put(TOPIC, *values, partition=0)
            publish(broker, f"{number} plain")
            sent += [*values, f"{number} plain"]
            assert hasty.texts(3) == sent[-3:], "who reads all does not wait for a decision"
            if ends == "commit":
                writer.commit()
                committed += values
            else:
                writer.abort()
            committed.append(f"{number} plain")
        publish(broker, END)
        assert cautious.texts(len(committed) + 1) == [*committed, END]
        assert hasty.texts(1) == [END]
        # Who comes later sees the same.
        assert stage.reader(committed=True).texts(len(committed) + 1) == [*committed, END]
        assert stage.reader(committed=False).texts(len(sent) + 1) == [*sent, END]


def offsets_go_with_their_transaction(client: Client) -> None:
    with staged(client) as (broker, stage):
        source = broker.call(broker.broker.create_topic(TESTER, "source"))
        for number in range(5):
            publish(broker, str(number), "source")

        def committed() -> int | None:
            found = broker.call(broker.broker.groups.committed(TESTER, "ducks"))
            cursor = found.get(PartitionKey(source.id, 0))
            return None if cursor is None else cursor.offset

        for offset, ends in ((1, "abort"), (2, "commit"), (3, "abort")):
            before = committed()
            writer = stage.next_writer()
            writer.begin()
            writer.put(TOPIC, f"up to {offset}", partition=0)
            writer.send_offset("ducks", "source", offset)
            assert committed() == before
            if ends == "commit":
                writer.commit()
            else:
                writer.abort()
            assert committed() == (offset if ends == "commit" else before)
        publish(broker, END)
        assert stage.reader(committed=True).texts(2) == ["up to 2", END]


def who_takes_too_long_is_aborted(client: Client) -> None:
    """What lies behind an abandoned transaction is not held up for ever."""
    with staged(client) as (broker, stage):
        slow, reader = stage.writer(timeout_ms=SHORT_MS), stage.reader(committed=True)
        slow.begin()
        slow.put(TOPIC, "slow", partition=0)
        publish(broker, "plain")
        assert reader.texts(1) == ["plain"], "the time of the open one is up"
        with pytest.raises(Refused):
            slow.commit()
        again = stage.writer()
        again.begin()
        again.put(TOPIC, "again", partition=0)
        again.commit()
        publish(broker, END)
        assert reader.texts(2) == ["again", END]


def a_second_instance_fences_the_first(client: Client) -> None:
    with staged(client) as (broker, stage):
        first = stage.writer()
        first.begin()
        first.put(TOPIC, "first", partition=0)
        second = stage.writer()
        second.begin()
        second.put(TOPIC, "second", partition=0)
        refused_in(lambda: (first.put(TOPIC, "late", partition=0), first.commit()))
        second.commit()
        publish(broker, END)
        assert stage.reader(committed=True).texts(2) == ["second", END]
        assert stage.reader(committed=False).texts(3) == ["first", "second", END]


def a_zombie_comes_too_late(client: Client) -> None:
    """A writer pauses with a record and its commit on the way. When they arrive, another one has
    taken over and committed: nothing of the zombie's is ever seen, and it is told so."""
    with Proxy() as proxy, staged(client, proxy) as (broker, stage):
        zombie = stage.writer()
        zombie.begin()
        zombie.put(TOPIC, "zombie", partition=0)
        proxy.pause()
        late = later(lambda: (zombie.put(TOPIC, "late", partition=0), zombie.commit()))
        proxy.wait_until_held()
        heir = stage.writer()
        heir.begin()
        heir.put(TOPIC, "heir", partition=0)
        heir.commit()
        proxy.resume()
        refused_in(lambda: late.result(DEADLINE_SECONDS))
        publish(broker, END)
        assert stage.reader(committed=True).texts(2) == ["heir", END]
        assert stage.reader(committed=False).texts(3) == ["zombie", "heir", END]


def refused_in(call: Callable[[], object]) -> None:
    with pytest.raises(Refused) as refused:
        call()
    print(f"the client says {refused.value.name}")
