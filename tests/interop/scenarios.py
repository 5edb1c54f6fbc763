"""What every client has to come through: groups whose members come and go, and brokers that die.

A scenario starts a client's program (programs.py says how that must behave) once or several times,
and a broker for it; it fails by an assertion. Records keep coming all the time, from a producer
that all scenarios share, and each has its number as its value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from tests.interop.deliveries import violations
from tests.interop.feeder import Feeder
from tests.interop.programs import Cast, Client, Program
from tests.interop.proxy import Proxy
from tests.interop.running import DEADLINE_SECONDS, RunningBroker
from tests.real.broker import Broker
from tests.real.clients import QUIET
from tests.real.clients import consumer as reader
from tests.real.ledger import Place

TOPIC: Final = "pond"
GROUP: Final = "ducks"
PARTITIONS: Final = 6
#: For members that are killed: the others wait so long for them. Those that live must be heard as
#: often, also if their machine is busy.
SHORT_SESSION_MS: Final = 3_000
#: For members that must not be taken for dead, also on a machine that is busy with other things.
LONG_SESSION_MS: Final = 20_000
#: For one that has to be started again meanwhile.
ABSENCE_MS: Final = 45_000
HEARTBEAT_MS: Final = 200


# --- groups ------------------------------------------------------------------------------------


def members_come_and_go(*clients: Client, protocol: str = "classic") -> None:
    """They start, leave, are killed: all is delivered, and nothing committed comes again."""
    with (
        RunningBroker() as broker,
        Group(clients, broker.address, SHORT_SESSION_MS, protocol=protocol) as group,
    ):
        ann = group.join("ann")
        group.settle(ann)
        ben, cid = group.join("ben"), group.join("cid")
        group.settle(ann, ben, cid)
        group.leave(cid)
        group.settle(ann, ben)
        ben.kill()
        group.settle(ann)
        dot = group.join("dot")
        group.settle(ann, dot)
        group.finish(ann, dot)


def a_rebalance_leaves_alone_what_stays(client: Client, protocol: str = "classic") -> None:
    """The cooperative protocol: who keeps a partition is not interrupted in it."""
    with (
        RunningBroker() as broker,
        Group([client], broker.address, LONG_SESSION_MS, True, protocol) as group,
    ):
        ann = group.join("ann")
        group.settle(ann)
        ben = group.join("ben")
        group.settle(ann, ben)
        moved = sorted(ben.held)
        assert changes(ann, "revoked") == moved, "only what moves is taken away"
        group.leave(ben)
        group.settle(ann)
        assert changes(ann, "assigned") == sorted([*range(PARTITIONS), *moved])
        group.finish(ann)


def a_static_member_comes_back(client: Client) -> None:
    """Who has a name and comes back in time has what it had, and the others notice nothing."""
    with RunningBroker() as broker, Group([client], broker.address, LONG_SESSION_MS) as group:
        ann, ben = group.join("ann", instance="a"), group.join("ben", instance="b")
        group.settle(ann, ben)
        before = changes(ann, "assigned", "revoked")
        ben.kill()
        again = group.join("ben again", instance="b")
        group.settle(ann, again)
        assert again.held == ben.held
        assert changes(ann, "assigned", "revoked") == before
        group.finish(ann, again)


def a_static_member_leaves_for_a_while(client: Client) -> None:
    """The newer protocol: who has a name, and says that it will be back, has what it had."""
    with (
        RunningBroker() as broker,
        Group([client], broker.address, ABSENCE_MS, protocol="consumer") as group,
    ):
        ann, ben = group.join("ann", instance="a"), group.join("ben", instance="b")
        group.settle(ann, ben)
        before, held = changes(ann, "assigned", "revoked"), ben.held
        group.leave(ben)
        again = group.join("ben again", instance="b")
        group.settle(ann, again)
        assert again.held == held
        assert changes(ann, "assigned", "revoked") == before
        group.finish(ann, again)


def a_group_goes_on_after_the_broker_died(
    client: Client, data: Path, protocol: str = "classic"
) -> None:
    """Killed or stopped: what was committed stays so, and members that live on find it again."""
    # In the newer protocol members are still such, if they are heard within a session.
    session_ms = SHORT_SESSION_MS if protocol == "classic" else LONG_SESSION_MS
    with Broker(data) as broker:
        broker.start()
        with Group([client], broker.address, session_ms, protocol=protocol) as group:
            # Clients may join again by themselves, though a classic member still is one, too.
            comes_back = group.reads_again if protocol == "classic" else group.goes_on
            ann = group.join("ann")
            group.settle(ann)
            with comes_back(ann):
                broker.kill()
                broker.start()
            group.leave(ann)
            ben = group.join("ben")
            group.settle(ben)
            with comes_back(ben):
                broker.stop()
                broker.start()
            group.finish(ben)


def changes(member: Program, *kinds: str) -> list[int]:
    """The partitions that were given to it, or taken from it, each as often as that was."""
    return sorted(
        partition
        for event in member.events
        if event.kind in kinds
        for partition in event.partitions
    )


class Group:
    """A group of programs that read a topic to which records keep coming. A context manager."""

    def __init__(
        self,
        clients: Sequence[Client],
        address: str,
        session_ms: int,
        cooperative: bool = False,
        protocol: str = "classic",
    ) -> None:
        self.cast = Cast(*clients)
        create_topic(address, PARTITIONS)
        self._feeder = Feeder(address, TOPIC, PARTITIONS)
        if protocol == "consumer":
            set_times(address, session_ms)
        self._settings: dict[str, Any] = {
            "role": "member",
            "address": address,
            "topic": TOPIC,
            "group": GROUP,
            "session_ms": session_ms,
            "heartbeat_ms": HEARTBEAT_MS,
            "cooperative": cooperative,
            "protocol": protocol,
        }

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self._feeder.abandon()
        self.cast.__exit__()

    def join(self, name: str, instance: str | None = None) -> Program:
        return self.cast.start(name, **self._settings, instance=instance)

    def settle(self, *members: Program) -> None:
        """Until these members share all partitions among them, and records come from each."""
        before: dict[int, int] = {}

        def moving() -> bool:
            held = sorted(partition for member in members for partition in member.held)
            if held != list(range(PARTITIONS)) or not all(member.held for member in members):
                before.clear()  # whatever was counted came before the last change
                return False
            now = {place: member.counts[place] for member in members for place in member.held}
            for partition, records in now.items():
                before.setdefault(partition, records)
            return all(records > before[partition] for partition, records in now.items())

        names = " and ".join(member.name for member in members)
        self.cast.wait_until(moving, f"{names} share the topic and read it")

    @contextmanager
    def reads_again(self, member: Program) -> Iterator[None]:
        """What happens here does not keep it from reading on, whether it joins again or not."""
        yield
        self.settle(member)

    @contextmanager
    def goes_on(self, member: Program) -> Iterator[None]:
        """What happens here does not keep it from what it holds; wait until it reads again."""
        before = changes(member, "assigned", "revoked")
        yield
        self.settle(member)
        assert changes(member, "assigned", "revoked") == before

    def leave(self, member: Program) -> None:
        """In good order, while records keep coming, if the client can do that."""
        if not member.client.drops_when_it_leaves:
            member.leave()
            return
        with self._feeder.paused() as published:
            self._wait_until_delivered(published)
            member.leave()

    def finish(self, *members: Program) -> None:
        """No more records; those that are there come to somebody, and all promises were kept."""
        published = self._feeder.finish()
        self._wait_until_delivered(published)
        for member in members:
            member.leave()
        found = violations(self.cast.events(), published)
        assert not found, found

    def _wait_until_delivered(self, published: set[str]) -> None:
        programs = self.cast.programs.values()

        def all_delivered() -> bool:
            if sum(len(program.values) for program in programs) < len(published):
                return False
            return published <= set().union(*[program.values for program in programs])

        self.cast.wait_until(all_delivered, f"all {len(published)} records are delivered")


# --- producing ---------------------------------------------------------------------------------


def a_producer_lives_through_kills(client: Client, data: Path) -> None:
    """The broker is killed and started again while a producer sends: each record once, in order.

    The second time it has stored something and nobody has heard of it, so the producer repeats it.
    """
    with Broker(data) as broker, Proxy(broker.address) as proxy, Cast(client) as cast:
        broker.options = ("--advertise", proxy.address)
        broker.start()
        create_topic(broker.address, 1)
        producer = cast.start("producer", role="producer", address=proxy.address, topic=TOPIC)
        for hold in (False, True):
            wait_for_more_records(producer, broker.address)
            if hold:
                proxy.hold_answers()
            broker.kill()
            broker.start()
        wait_for_more_records(producer, broker.address)
        producer.leave()
        sent = producer.events[-1].total
        assert values_in_topic(broker.address) == [str(n) for n in range(sent)]


def wait_for_more_records(producer: Program, address: str, more: int = 500) -> None:
    """Until the topic has so many more than now, while the producer lives."""
    consumer = reader(address, [])
    deadline = time.monotonic() + DEADLINE_SECONDS
    wanted = more + end_of_topic(consumer)
    while (held := end_of_topic(consumer)) < wanted:
        assert producer.ended() is None, f"the producer ended: {producer.errors}"
        assert time.monotonic() < deadline, f"{held} of {wanted} records; {producer.errors}"
        time.sleep(0.01)
    consumer.close()


def end_of_topic(consumer: Consumer) -> int:
    return consumer.get_watermark_offsets(Partition(TOPIC, 0), DEADLINE_SECONDS)[1]


def values_in_topic(address: str) -> list[str]:
    """All that partition 0 holds."""
    consumer = reader(address, [Place(TOPIC, 0)])
    values: list[str] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        assert time.monotonic() < deadline, f"the end did not come behind {len(values)} records"
        for message in consumer.consume(1_000, timeout=0.1):
            error = message.error()
            if error is None:
                values.append((message.value() or b"").decode())
                continue
            assert error.code() == KafkaError._PARTITION_EOF, str(error)
            consumer.close()
            return values


def create_topic(address: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    admin.create_topics([NewTopic(TOPIC, partitions)])[TOPIC].result(DEADLINE_SECONDS)


def set_times(address: str, session_ms: int) -> None:
    """In the newer protocol they are a group's configs, not its members'."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    times = {"session.timeout": session_ms, "heartbeat.interval": HEARTBEAT_MS}
    entries = [
        ConfigEntry(f"consumer.{name}.ms", str(value), incremental_operation=AlterConfigOpType.SET)
        for name, value in times.items()
    ]
    group = ConfigResource(ResourceType.GROUP, GROUP, incremental_configs=entries)
    admin.incremental_alter_configs([group])[group].result(DEADLINE_SECONDS)
