"""Clients of the world in together.py. A party is several clients that share a ledger."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from quackmq.broker import Broker, Commit, Heartbeat, MemberRef, Message
from quackmq.errors import (
    Conflict,
    FencedMemberEpoch,
    NotRegistered,
    QuackError,
    StaleMemberEpoch,
    UnknownMember,
)
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.subscription import RecordPosition, parse_position
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.stores.contract import Store
from tests.kit.support import offsets_and_values
from tests.simulation.life import CALLER
from tests.simulation.model import UNKNOWN_OUTCOMES, Register, Violation
from tests.simulation.platter import Counts
from tests.simulation.shrunk import REACHED

TOPIC = "pond"
#: The topic is not grown beyond that.
_MOST_PARTITIONS = 4


@dataclass
class Together:
    """One life of the broker, as all share it."""

    broker: Broker
    store: Store
    source: random.Random
    counts: Counts
    tick: Callable[[], int]
    now_ms: Callable[[], int]

    async def values(self, topic_name: str) -> dict[tuple[int, int], bytes]:
        """Every record of a topic, by partition and offset."""
        found: dict[tuple[int, int], bytes] = {}
        topic = self.broker.topic(topic_name)
        for partition in range(topic.partitions):
            key = PartitionKey(topic.id, partition)
            offsets = await self.broker.offsets(CALLER, key)
            offset = offsets.first
            while offset < offsets.next:
                read = Read(key, offset, 2**20)
                (part,) = await self.broker.read(CALLER, [read], max_bytes=2**20)
                if part.error is not None or not part.chunks:
                    raise Violation(f"{read} met {part.error!r}")
                for at, value in offsets_and_values(part):
                    found[partition, at] = value
                    offset = at + 1
        return found


class Party(Protocol):
    name: str
    clients: int

    async def check(self, life: Together) -> None:
        """Compare what is there with what clients were told. Nothing is under way."""

    async def step(self, life: Together, number: int) -> None:
        """One thing that client `number` does."""


@dataclass
class _Keyed:
    values: tuple[bytes, ...]
    #: Where the records lie, once somebody was told.
    places: tuple[tuple[int, int], ...] | None = None


class KeyedPuts:
    """Put under idempotency keys, several clients under one; the topic grows meanwhile."""

    name = "keyed puts"
    clients = 3

    def __init__(self) -> None:
        self._puts: dict[str, _Keyed] = {}

    async def step(self, life: Together, number: int) -> None:
        topic = life.broker.topic(TOPIC)
        if number == 0 and topic.partitions < _MOST_PARTITIONS and life.source.random() < 0.05:
            await life.broker.alter_topic(CALLER, TOPIC, partitions=topic.partitions + 1)
            life.counts["topics grown between keyed puts"] += 1
            return
        if not self._puts or life.source.random() < 0.5:
            name = f"key {len(self._puts)}"
            values = tuple(b"%s/%d" % (name.encode(), n) for n in range(life.source.randint(1, 3)))
            self._puts[name] = _Keyed(values)
        else:  # what another has put, or is just putting, or nobody knows of
            name = life.source.choice(list(self._puts)[-5:])
        await self._put(life, name, self._puts[name])

    async def _put(self, life: Together, name: str, keyed: _Keyed) -> None:
        topic = life.broker.topic(TOPIC)
        records = [Record(0, NO_TIMESTAMP, value, value) for value in keyed.values]
        put = await life.broker.messages.put(CALLER, TOPIC, records, idempotency_key=name)
        found = tuple((each.partition, each.offset) for each in map(_place(topic.id), put.ids))
        if len(found) != len(records):
            raise Violation(f"{name}: {len(found)} ids for {len(records)} records")
        if keyed.places not in (None, found):
            raise Violation(f"{name} lies at {keyed.places}, and a repeat is told {found}")
        if put.repeated:
            life.counts["repeats of keyed puts"] += 1
        keyed.places = found

    async def check(self, life: Together) -> None:
        where: dict[bytes, list[tuple[int, int]]] = {}
        for place, value in (await life.values(TOPIC)).items():
            where.setdefault(value, []).append(place)
        for name, keyed in self._puts.items():
            times = [len(where.get(value, ())) for value in keyed.values]
            if max(times) > 1:
                raise Violation(f"{name} is there twice: {times}")
            if len(set(times)) > 1:
                raise Violation(f"of {name} some is there and some not: {times}")
            if keyed.places is not None and times[0] != 1:
                raise Violation(f"{name} was acknowledged and is lost")
            for value, place in zip(keyed.values, keyed.places or (), strict=False):
                if where[value] != [place]:
                    raise Violation(f"{name} lies at {where[value]}, not at {place}")


def _place(topic_id: UUID) -> Callable[[str], RecordPosition]:
    return lambda token: parse_position(token, topic_id)


class Registrar:
    """Register producers and consumers of the queue; ids are given once, and stay registered."""

    name = "registrations"
    clients = 2

    def __init__(self) -> None:
        self._producers: dict[str, None] = {}
        self._consumers: dict[str, None] = {}

    async def step(self, life: Together, number: int) -> None:
        registrations = life.broker.registrations
        if life.source.random() < 0.6:
            given, known = await registrations.register_producer(CALLER, TOPIC), self._producers
        elif len(self._consumers) < 4:
            given, known = await registrations.register_consumer(CALLER, TOPIC), self._consumers
        else:
            return
        if given in known:
            raise Violation(f"{given} was given twice")
        known[given] = None
        life.counts["registrations"] += 1

    async def check(self, life: Together) -> None:
        for producer_id in self._producers:
            try:
                life.broker.registrations.check_producer(TOPIC, producer_id)
            except QuackError as error:
                is_known = isinstance(error, NotRegistered)
                if not is_known or not life.counts[f"{REACHED}REGISTERED_PRODUCERS"]:
                    raise Violation(f"{producer_id} is no longer registered: {error}") from error
        for consumer_id in self._consumers:
            try:
                life.broker.registrations.check_consumer(TOPIC, consumer_id)
            except QuackError as error:
                raise Violation(f"{consumer_id} is no longer subscribed: {error}") from error


class ReceiptChain:
    """Consume with receipts: each step of the cursor has left one, and no other is there."""

    name = "receipts"
    clients = 1
    _subscription = "told"

    def __init__(self) -> None:
        self._last: Message | None = None
        self._is_subscribed = False

    async def step(self, life: Together, number: int) -> None:
        if not self._is_subscribed:
            await life.broker.subscribe(
                CALLER, self._subscription, TOPIC, "beginning", receipts=True
            )
            self._is_subscribed = True
        last = None if self._last is None else self._last.id
        self._last = await life.broker.get(CALLER, self._subscription, TOPIC, last)
        life.counts["messages taken with receipts"] += self._last is not None

    async def check(self, life: Together) -> None:
        if RECEIPTS_TOPIC not in life.broker.topics():
            if self._last is not None:
                raise Violation("messages were taken, and there are no receipts")
            return
        ends: dict[int, int] = {}
        receipts = await life.values(RECEIPTS_TOPIC)
        for place in sorted(receipts):
            receipt = json.loads(receipts[place])
            partition = receipt["partition"]
            begin = ends.get(partition, receipt["from_offset"])
            if receipt["kind"] == "begun":
                begin = receipt["from_offset"]
            if receipt["from_offset"] != begin:
                raise Violation(f"a receipt goes on from {begin}: {receipt}")
            ends[partition] = receipt["next_offset"]
            life.counts[f"receipts {receipt['kind']}"] += 1
        cursors = await life.store.cursors()
        for key, cursor in cursors.items():
            end = ends.get(key.partition, 0)
            if key.name == self._subscription and cursor.offset != end:
                raise Violation(f"receipts of {key.partition} end at {end}, not {cursor.offset}")


@dataclass
class _Member:
    member_id: str
    epoch: int = 0
    #: What it holds: told to it, and not let go of.
    holds: frozenset[PartitionKey] = frozenset()
    life: Together | None = None


@dataclass
class NewerMembers:
    """Members of one group of the newer protocol that heartbeat, commit, leave and come again."""

    name: str = "newer members"
    clients: int = 3
    _members: list[_Member] = field(
        default_factory=lambda: [_Member(f"member-{number}") for number in range(3)]
    )
    _committed: dict[PartitionKey, Register[int | None]] = field(default_factory=dict)
    _group: str = "newer"

    async def step(self, life: Together, number: int) -> None:
        member = self._members[number]
        if member.life is not life:  # its connection was cut: it says everything again
            member.life = life
            member.holds = frozenset() if life.source.random() < 0.3 else member.holds
            if not member.holds:
                member.epoch = 0
        fate = life.source.random()
        if fate < 0.6 or not member.epoch:
            await self._beat(life, member)
        elif fate < 0.9 and member.holds:
            await self._commit(life, member)
        else:
            await self._leave(life, member)

    async def _beat(self, life: Together, member: _Member) -> None:
        holds = member.holds if member.epoch else frozenset()
        beat = Heartbeat(
            member.member_id,
            member.epoch,
            "simulation",
            "",
            rebalance_timeout_ms=60_000,
            topics=frozenset({TOPIC}),
            owned=holds,
        )
        try:
            answer = await life.broker.groups.consumer_heartbeat(CALLER, self._group, beat)
        except (UnknownMember, FencedMemberEpoch):
            member.epoch, member.holds = 0, frozenset()
            return
        if answer.epoch < member.epoch:
            raise Violation(f"{member} is told of epoch {answer.epoch}")
        member.epoch = answer.epoch
        life.counts["heartbeats of the newer protocol"] += 1
        if answer.assignment is not None:
            member.holds = answer.assignment
        for other in self._members:
            both = member.holds & other.holds
            if other is not member and other.life is life and other.epoch and both:
                raise Violation(f"{member} and {other} both hold {both}")

    async def _commit(self, life: Together, member: _Member) -> None:
        key = life.source.choice(sorted(member.holds, key=lambda each: each.partition))
        register = self._committed.setdefault(key, Register(f"offset of {key.partition}", None))
        if register.maybe:  # unsure since a failure, or somebody commits just now
            return
        offset = life.tick()
        register.maybe.append(offset)
        ref = MemberRef(member.member_id, member.epoch)
        try:
            outcomes = await life.broker.groups.commit(
                CALLER, self._group, ref, [Commit(key, offset, "")]
            )
        except QuackError as error:
            if not isinstance(error, UNKNOWN_OUTCOMES):
                register.maybe.remove(offset)
            if isinstance(error, (UnknownMember, StaleMemberEpoch, FencedMemberEpoch, Conflict)):
                return
            raise
        if outcomes != [None]:
            raise Violation(f"{member} cannot commit: {outcomes}")
        register.settle(offset)
        life.counts["offsets committed by newer members"] += 1

    async def _leave(self, life: Together, member: _Member) -> None:
        epoch, member.epoch, member.holds = member.epoch, 0, frozenset()
        if epoch:
            beat = Heartbeat(member.member_id, -1)
            try:
                await life.broker.groups.consumer_heartbeat(CALLER, self._group, beat)
            except UnknownMember:
                return

    async def check(self, life: Together) -> None:
        found = await life.broker.groups.committed(CALLER, self._group)
        for key, register in self._committed.items():
            cursor = found.get(key)
            register.observe(None if cursor is None else cursor.offset)
