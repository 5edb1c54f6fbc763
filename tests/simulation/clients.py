"""Random clients that read, administer, and keep cursors and state, and write down what they learn.

Each has a single purpose and one writer's discipline: what it changes nobody else changes, so that
after a crash there are few things that its values can be. What it learned it tells the model; what
the model finds impossible it raises.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from quackmq.errors import (
    OffsetOutOfRange,
    StateChanged,
    TopicExists,
    UnknownTopic,
    WriteFailed,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Cursor, CursorKey, PartitionKey, Read, Slice, Topic
from quackmq.records.batch import Batch, Buffer, batches
from tests.simulation.life import CALLER, Life, is_read_error
from tests.simulation.model import (
    Attempt,
    Register,
    TopicSlot,
    Unit,
    Violation,
    Wish,
    leader_epoch_of,
)
from tests.simulation.publishers import new_attempt


class AtomicWriter:
    """Appends to several partitions and moves cursors, all in one call to the store."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(2, 4)) if (key := life.some_partition())]
        if not keys:
            return
        attempts = [new_attempt(life, key) for key in keys]
        cursors = [_next_cursor(life, self.name, key) for key in dict.fromkeys(keys)]
        await change_together(life, attempts, cursors)


class CursorKeeper:
    """Commits several cursors in one call, all or none."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        cursors = [_next_cursor(life, self.name, key) for key in dict.fromkeys(keys)]
        if cursors:
            await change_together(life, [], cursors)


def _next_cursor(life: Life, name: str, key: PartitionKey) -> Cursor:
    """Never the same twice: the metadata tells one commit from the next, and so does the leader
    epoch, which the checker reads there (`leader_epoch_of`)."""
    cursor_key = CursorKey(name, key.topic_id, key.partition)
    offset: int | None = life.source.randint(0, life.model.partition(key).next + 1)
    if life.source.random() < 0.05:
        offset = None
    metadata = f"m{life.model.tick()}"
    return Cursor(cursor_key, offset, metadata, life.now_ms(), leader_epoch_of(metadata))


async def change_together(life: Life, attempts: list[Attempt], cursors: list[Cursor]) -> None:
    model = life.model
    registers = [
        model.cursors.setdefault(each.key, Register(f"cursor {each.key}", (None, "")))
        for each in cursors
    ]
    values = [(each.offset, each.metadata if each.offset is not None else "") for each in cursors]
    unit = Unit(attempts, [(each.key, value) for each, value in zip(cursors, values, strict=True)])
    model.units.append(unit)
    definite = model.read_only
    try:
        with ExitStack() as stack:
            stack.enter_context(model.calling(*attempts))
            for register, value in zip(registers, values, strict=True):
                stack.enter_context(model.changing(register, value))
            if attempts:
                appends = [Append(each.key, Batch.parse(each.body or b"")) for each in attempts]
                answers = await life.store.append(appends, cursors)
                for attempt, answer in zip(attempts, answers, strict=True):
                    model.acknowledge(attempt, answer.base_offset, answer.next_offset)
            else:
                await life.store.set_cursors(cursors)
    except UnknownTopic as error:
        model.units.remove(unit)
        topics = {each.key.topic_id for each in attempts} | {each.key.topic_id for each in cursors}
        if not topics & model.doomed:
            raise Violation("a topic is gone, and nobody deleted it") from error
    except WriteFailed:
        if definite:
            model.units.remove(unit)
        raise
    else:
        model.units.remove(unit)
        life.counts["changes made together"] += 1


class StateKeeper:
    """Compares and sets small values; now and then with a version that must be refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        key = f"{self.name}/{life.source.randint(0, 4)}"
        register = life.model.states.setdefault(key, Register(f"state {key}", (None, 0)))
        if register.maybe:  # unsure since a failure in this life: nobody can say the version
            return
        version = register.known[1]
        if life.source.random() < 0.1:
            await self._put_wrongly(life, key, version + 1)
            return
        value: bytes | None = b"%d" % life.model.tick() + b"s" * life.source.choice((0, 50, 600))
        if version and life.source.random() < 0.1:
            value = None
        change = (value, version + 1 if value is not None else 0)
        with life.model.changing(register, change):
            state = await life.store.put_state(key, value, version)
        if (state.value, state.version) != register.known:
            raise Violation(f"{key} was put as {register.known}, the answer is {state}")
        seen = await life.store.state(key)
        register.observe((seen.value, seen.version))

    async def _put_wrongly(self, life: Life, key: str, version: int) -> None:
        try:
            await life.store.put_state(key, b"never", version)
        except StateChanged:
            return
        raise Violation(f"{key} was changed against version {version}, which it does not have")


class Reader:
    """Reads from anywhere, waits at the end, and remembers all that it saw."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._life: Life | None = None
        #: What was read and is still being sent, and its bytes when it was read.
        self._sending: list[tuple[list[Buffer], list[bytes]]] = []

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        if not keys:
            return
        reads, expected = [], []
        for key in keys:
            try:
                offsets = await life.broker.offsets(CALLER, key)
            except UnknownTopic as error:
                life.excuse(key, error)
                return
            offset = life.source.randint(offsets.first, offsets.next)
            if life.source.random() < 0.2:
                offset = offsets.next
            reads.append(Read(key, offset, life.source.choice((1, 500, 5_000, 100_000))))
            expected.append(life.model.partition(key).next)
        slices = await life.broker.read(
            CALLER,
            reads,
            max_bytes=life.source.choice((1, 2_000, 100_000)),
            min_bytes=life.source.choice((1, 1, 1, 3_000)),
            wait_ms=life.source.choice((0, 0, 0, 20, 300)),
        )
        for read, found, at_least in zip(reads, slices, expected, strict=True):
            check_slice(life, read, found, at_least)
        self._send(life, [chunk for found in slices for chunk in found.chunks])

    def _send(self, life: Life, chunks: list[Buffer]) -> None:
        """As to slow consumers: what was read must not change before it has left, whatever becomes
        of its segment meanwhile."""
        if self._life is not life:
            self._life, self._sending = life, []
        self._sending.append((chunks, [bytes(chunk) for chunk in chunks]))
        self._check_what_is_sent(life)
        while self._sending and life.source.random() < 0.4:
            self._sending.pop(0)

    def _check_what_is_sent(self, life: Life) -> None:
        if life.disk.failed:  # a sync that failed may have cost pages that were only cached
            return
        for chunks, before in self._sending:
            if chunks != before:
                raise Violation(f"{self.name} was sending bytes that changed meanwhile")

    def finish(self, life: Life) -> None:
        """Send the rest."""
        if self._life is life:
            self._check_what_is_sent(life)
        self._life, self._sending = None, []


def check_slice(life: Life, read: Read, found: Slice, at_least: int) -> None:
    """One answer of the store against the model; what it shows is remembered."""
    if isinstance(found.error, UnknownTopic):
        life.excuse(read.key, found.error)
        return
    if isinstance(found.error, OffsetOutOfRange):
        if found.first_offset <= read.offset <= found.next_offset:
            raise Violation(f"{read} is in range, the answer is {found.error}")
        return
    if found.error is not None:
        if life.disk.failed:  # a sync that failed may have cost pages that were only cached
            life.counts["reads that met a failed disk"] += 1
            return
        if is_read_error(found.error):
            life.counts["read errors told in a slice"] += 1
            return
        raise Violation(f"{read} met {found.error!r}") from found.error
    partition = life.model.partition(read.key)
    if found.next_offset < at_least:
        raise Violation(f"{read}: the end is at {found.next_offset}, it was at {at_least}")
    if found.size != sum(len(chunk) for chunk in found.chunks):
        raise Violation(f"{read}: {found.size} bytes announced")
    offset = read.offset
    for batch in (each for chunk in found.chunks for each in batches(chunk)):
        straddles = offset == read.offset and batch.base_offset <= offset < batch.next_offset
        # What lies between may have been trimmed during the read, or taken by a power cut.
        gap = batch.base_offset <= found.first_offset or partition.gaps_allowed
        if batch.base_offset != offset and not straddles and not gap:
            raise Violation(f"{read}: {batch.base_offset} where {offset} was due")
        life.model.observe_batch(read.key, Batch.parse(batch.view))
        offset = batch.next_offset
    if offset > found.next_offset:
        raise Violation(f"{read}: read up to {offset}, beyond the end at {found.next_offset}")


class Administrator:
    """Creates, alters, deletes and trims, and takes names again that were used before."""

    def __init__(self, name: str, names: list[str], policies: list[Policy]) -> None:
        self.name = name
        self._names = names
        self._policies = policies

    async def step(self, life: Life) -> None:
        slot = life.model.topics.setdefault(
            name := life.source.choice(self._names), TopicSlot(name)
        )
        if slot.busy or slot.maybe:
            return
        if slot.known is None:
            await self._create(life, slot)
            return
        fate = life.source.random()
        if fate < 0.05:
            await self._delete(life, slot, slot.known)
        elif fate < 0.25:
            await self._alter(life, slot, slot.known)
        elif fate < 0.65:
            await self._trim(life, slot.known)

    async def _create(self, life: Life, slot: TopicSlot) -> None:
        wish = Wish(life.source.randint(1, 3), life.source.choice(self._policies))
        with life.model.changing_topic(slot, wish):
            topic = await life.broker.create_topic(
                CALLER, slot.name, partitions=wish.partitions, policy=cast("Policy", wish.policy)
            )
        life.model.learn_topic(topic)
        try:
            await life.broker.create_topic(CALLER, slot.name, partitions=1)
        except TopicExists:
            return
        raise Violation(f"{slot.name} was created twice")

    async def _alter(self, life: Life, slot: TopicSlot, topic: Topic) -> None:
        partitions = topic.partitions + (life.source.random() < 0.3)
        policy = life.source.choice(self._policies)
        wish = Topic(topic.id, topic.name, partitions, policy, topic.created_ms)
        with life.model.changing_topic(slot, wish):
            answer = await life.broker.alter_topic(
                CALLER, slot.name, partitions=partitions, policy=policy
            )
        if answer != wish:
            raise Violation(f"{wish} was asked for, {answer} is the answer")
        life.model.learn_topic(answer)

    async def _delete(self, life: Life, slot: TopicSlot, topic: Topic) -> None:
        life.model.doomed.add(topic.id)
        with life.model.changing_topic(slot, None):
            await life.broker.delete_topic(CALLER, slot.name)
        slot.settle(None)
        life.model.gone.add(topic.id)
        life.counts["topics deleted"] += 1
        [found] = await life.broker.read(
            CALLER, [Read(PartitionKey(topic.id, 0), 0, 1000)], max_bytes=1000
        )
        if not isinstance(found.error, UnknownTopic):
            raise Violation(f"{topic} was deleted, and reading it gives {found}")

    async def _trim(self, life: Life, topic: Topic) -> None:
        key = PartitionKey(topic.id, life.source.randrange(topic.partitions))
        partition = life.model.partition(key)
        before = life.source.randint(0, partition.next)
        partition.first_at_most = max(partition.first_at_most, before)
        try:
            first = await life.broker.trim(CALLER, key, before)
        except UnknownTopic as error:
            life.excuse(key, error)
            return
        except OffsetOutOfRange as error:
            if partition.gaps_allowed:
                return
            raise Violation(f"{key} holds {before}, and cannot be trimmed there") from error
        if first < before:
            raise Violation(f"{key} was trimmed before {before} and begins at {first}")
        partition.first = max(partition.first, first)
