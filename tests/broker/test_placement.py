"""Where the records of a put go, and where a repeat finds them, whatever the topic is now."""

from __future__ import annotations

import asyncio
import dataclasses
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.broker import Broker, Put
from quackmq.broker import limits as broker_limits
from quackmq.broker.publish.messages import _key_producer_id
from quackmq.broker.publish.placement import Placement, choose_partitions
from quackmq.errors import Conflict
from quackmq.model.partitioning import Partitioner, choose_partition, murmur2
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond
from tests.broker.putting import WAITS, keyed, numbered, places, record
from tests.broker.support import CALLER, NAME, TOPIC, get_all, open_broker, values_in
from tests.kit.support import Clock
from tests.kit.tables import each

#: A directory that the last version without partitioners wrote: the topic `ducks` of 3 partitions
#: with a record for each of 20 keys and one with an empty key, and `pond` of one partition.
OLD_DIRECTORY = Path(__file__).parent.parent / "data" / "before-partitioner.tar.xz"
#: They lie in several partitions, by every rule and for every number of partitions here.
DUCKS = [record(f"duck {number}".encode(), f"{number}".encode()) for number in range(6)]


# --- a directory of before ----------------------------------------------------------------------


async def test_keys_of_an_old_directory_stay_where_they_are(tmp_path: Path) -> None:
    with tarfile.open(OLD_DIRECTORY) as archive:
        archive.extractall(tmp_path, filter="data")
    before: dict[bytes, int] = {}
    for turn in range(2):
        async with Pond("local", tmp_path, Clock()).open() as broker:
            ducks, pond = broker.topic("ducks"), broker.topic("pond")
            assert ducks.policy == Policy(keep_bytes=10**9, partitioner=Partitioner.LEGACY)
            assert pond.policy.partitioner is Partitioner.MURMUR2, "it has no placement to keep"
            found = await keys_by_partition(broker, "ducks")
            before = before or found
            assert found == before
            assert len(before) == 21
            for key in before:
                await broker.messages.put(CALLER, "ducks", [record(b"again", key)])
            # A change of something else is written with the partitioner.
            if turn == 0:
                await broker.alter_topic(CALLER, "ducks", policy=_keeping_less)
                await broker.alter_topic(CALLER, "ducks", policy=_keeping_as_much)


async def test_a_topic_that_grows_from_one_partition_uses_the_rule_of_today(
    tmp_path: Path,
) -> None:
    with tarfile.open(OLD_DIRECTORY) as archive:
        archive.extractall(tmp_path, filter="data")
    async with Pond("local", tmp_path, Clock()).open() as broker:
        await broker.alter_topic(CALLER, "pond", partitions=3)
    async with Pond("local", tmp_path, Clock()).open() as broker:
        assert broker.topic("pond").policy.partitioner is Partitioner.MURMUR2


async def test_the_setting_can_be_changed_and_lasts(pond: Pond) -> None:
    async with pond.open(default_partitions=4) as broker:
        for partitioner in Partitioner:
            policy = Policy(partitioner=partitioner)
            await broker.create_topic(CALLER, partitioner, partitions=4, policy=policy)
        await broker.alter_topic(CALLER, "legacy", policy=Policy(partitioner=Partitioner.CRC32))
    async with pond.open(default_partitions=4) as broker:
        kept = {name: topic.policy.partitioner for name, topic in broker.topics().items()}
        assert kept == {"murmur2": "murmur2", "crc32": "crc32", "legacy": "crc32"}


async def keys_by_partition(broker: Broker, name: str) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for partition in range(broker.topic(name).partitions):
        page = await broker.messages.read(
            CALLER, name, partition, 0, max_records=1000, max_bytes=2**20
        )
        found |= {
            each.record.key: partition for each in page.messages if each.record.key is not None
        }
    return found


def _keeping_less(policy: Policy) -> Policy:
    return dataclasses.replace(policy, keep_bytes=10**8)


def _keeping_as_much(policy: Policy) -> Policy:
    return dataclasses.replace(policy, keep_bytes=10**9)


# --- repeats by key -----------------------------------------------------------------------------


async def everything(broker: Broker) -> list[bytes]:
    held = [await values_in(broker, partition=each) for each in range(partitions_of(broker))]
    return sorted(sum(held, []))


def partitions_of(broker: Broker) -> int:
    return broker.topic(TOPIC).partitions


async def test_a_repeat_is_known_however_many_partitions_there_are_now(pond: Pond) -> None:
    records = [*DUCKS, record(b"of nobody")]
    async with pond.open(default_partitions=2) as broker:
        first = await keyed(broker, "order-1", *records)
        assert len({place.partition for place in places(broker, first)}) > 1
        for partitions in (3, 7):
            await broker.alter_topic(CALLER, TOPIC, partitions=partitions)
            assert await keyed(broker, "order-1", *records) == Put(first.ids, repeated=True)
    async with pond.open() as broker:
        await broker.alter_topic(CALLER, TOPIC, partitions=11)
        assert await keyed(broker, "order-1", *records) == Put(first.ids, repeated=True)
        assert len(await everything(broker)) == len(records)


@each("before", Partitioner)
@each("after", Partitioner)
async def test_a_repeat_is_known_whatever_the_partitioner_is_now(
    before: Partitioner, after: Partitioner
) -> None:
    async with open_broker() as broker:
        policy = Policy(partitioner=before)
        await broker.create_topic(CALLER, TOPIC, partitions=3, policy=policy)
        first = await keyed(broker, "order-1", *DUCKS)
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(partitioner=after), partitions=4)
        assert await keyed(broker, "order-1", *DUCKS) == Put(first.ids, repeated=True)


async def test_the_ids_of_a_repeat_are_exact_where_another_placement_would_fit_too() -> None:
    two, three = (Placement(Partitioner.MURMUR2, partitions) for partitions in (2, 3))
    names = [f"duck-{number}".encode() for number in range(100)]
    by_two, by_three = (
        await choose_partitions(two, names, 0),
        await choose_partitions(three, names, 0),
    )
    rows = list(zip(names, by_two, by_three, strict=True))
    one = next(name for name, *both in rows if both == [0, 1])
    other = next(name for name, *both in rows if both == [1, 0])
    async with open_broker(default_partitions=2) as broker:
        records = [record(b"one", one), record(b"other", other)]
        first = await keyed(broker, "order-1", *records)
        await broker.alter_topic(CALLER, TOPIC, partitions=3)
        assert (await keyed(broker, "order-1", *records)).ids == first.ids


@pytest.mark.parametrize("first_partition", [None, 1])
@pytest.mark.parametrize("then_partition", [None, 0])
async def test_a_repeat_is_known_whether_or_not_a_partition_is_named(
    first_partition: int | None, then_partition: int | None
) -> None:
    async with open_broker(default_partitions=2) as broker:

        async def put(partition: int | None) -> Put:
            return await broker.messages.put(
                CALLER, TOPIC, DUCKS, partition=partition, idempotency_key="order-1"
            )

        first = await put(first_partition)
        assert await put(then_partition) == Put(first.ids, repeated=True)
        assert len(await everything(broker)) == len(DUCKS)


async def test_another_put_under_the_key_is_a_conflict_after_the_topic_has_grown() -> None:
    async with open_broker(default_partitions=2) as broker:
        await keyed(broker, "order-1", *DUCKS)
        await broker.alter_topic(CALLER, TOPIC, partitions=5)
        same_partition = [record(b"x", b"0")] * len(DUCKS)
        for records in (DUCKS[1:], [*DUCKS, DUCKS[0]], same_partition):
            with pytest.raises(Conflict, match="order-1"):
                await keyed(broker, "order-1", *records)
        assert len(await everything(broker)) == len(DUCKS)


@pytest.mark.parametrize("partitions_now", [2, 3])
async def test_a_put_of_the_version_that_kept_no_placement_is_known_again(
    partitions_now: int,
) -> None:
    store = MemoryStore(Clock())
    async with open_broker(store, default_partitions=2) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        chosen = [choose_partition(Partitioner.LEGACY, each.key, 2) for each in DUCKS]
        producer_id = _key_producer_id(topic, b"order-1")
        for partition in (0, 1):
            share = [one for one, at in zip(DUCKS, chosen, strict=True) if at == partition]
            await store.append(
                [Append(PartitionKey(topic.id, partition), _as_before(share, producer_id))]
            )
        await broker.alter_topic(CALLER, TOPIC, partitions=partitions_now)
        answer = await keyed(broker, "order-1", *DUCKS)
        assert answer.repeated
        assert [place.partition for place in places(broker, answer)] == chosen
        assert len(await everything(broker)) == len(DUCKS)


def _as_before(records: Sequence[Record], producer_id: int) -> Batch:
    data = codec.encode(
        [each._replace(timestamp_ms=1) for each in records],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
    )
    return Batch.peek(data)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_repeat_is_known_while_the_first_waits_for_room_and_the_topic_grows(
    leaves: bool,
) -> None:
    """Its publisher may have hung up meanwhile: the first is on its way all the same."""
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=WAITS)
        await broker.subscribe(CALLER, NAME, TOPIC)
        for partition in (0, 1):
            full = [record(b"full"), record(b"full")]
            await broker.messages.put(CALLER, TOPIC, full, partition=partition)
        records = [record(b"a", b"2"), record(b"b", b"4")]
        first = asyncio.create_task(keyed(broker, "order-1", *records))
        for _ in range(10):
            await asyncio.sleep(0)
        await broker.alter_topic(CALLER, TOPIC, partitions=3)
        if leaves:
            first.cancel()
        again = asyncio.create_task(keyed(broker, "order-1", *records))
        while not again.done():
            await get_all(broker)
            await asyncio.sleep(0)
        assert (await again).repeated
        assert leaves or (await first).ids == (await again).ids
        offsets = [
            await broker.offsets(CALLER, PartitionKey(broker.topic(TOPIC).id, each))
            for each in range(3)
        ]
        assert sum(each.next for each in offsets) == 4 + len(records)


async def test_a_numbered_put_is_known_again_in_a_topic_that_has_grown(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        first = await numbered(broker, 1, b"a")
        await broker.alter_topic(CALLER, TOPIC, partitions=3)
        assert await numbered(broker, 1, b"a") == Put(first.ids, repeated=True)
    async with pond.open() as broker:
        await broker.alter_topic(CALLER, TOPIC, partitions=5)
        assert (await numbered(broker, 1, b"a")).repeated
        assert await everything(broker) == [b"a"]


# --- distributing -------------------------------------------------------------------------------


async def test_every_placement_has_an_epoch_of_its_own() -> None:
    counts = (1, 2, limits.PARTITIONS_PER_TOPIC - 1, limits.PARTITIONS_PER_TOPIC)
    epochs = [Placement(each, count).epoch for each in Partitioner for count in counts]
    assert len(set(epochs)) == len(epochs)
    assert all(0 < epoch < 2**15 for epoch in epochs), "0 is kept for puts without a placement"


async def test_long_and_many_keys_are_hashed_in_steps_between_which_others_have_their_turn() -> (
    None
):
    long = b"quack" * broker_limits.HASHED_KEY_BYTES
    many = [b"k" * 100] * (broker_limits.HASHED_KEY_BYTES // 20)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    for keys in ([long], many):
        turns = 0
        found = await choose_partitions(Placement(Partitioner.MURMUR2, 7), keys, 0)
        assert found == [(murmur2(key) & 0x7FFFFFFF) % 7 for key in keys]
        assert turns >= 5
    counting.cancel()


async def test_a_long_key_does_not_let_later_puts_of_its_publisher_overtake_it() -> None:
    async with open_broker(default_partitions=2) as broker:
        slow = [record(b"first", b"k" * 10 * broker_limits.HASHED_KEY_BYTES)]
        puts = [
            broker.messages.put(CALLER, TOPIC, records, publisher="quill", sequence=number)
            for number, records in enumerate((slow, [record(b"second", b"k")]))
        ]
        answers = await asyncio.gather(*puts)
        assert not any(answer.repeated for answer in answers)
        assert await everything(broker) == [b"first", b"second"]


async def test_a_long_key_is_not_hashed_by_a_put_that_cannot_wait() -> None:
    async with open_broker(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC)
        begin = broker.messages.begin_put
        assert begin(CALLER, TOPIC, b"x", b"k" * (broker_limits.HASHED_KEY_BYTES + 1)) is None
        begun = begin(CALLER, TOPIC, b"x", b"k" * broker_limits.HASHED_KEY_BYTES)
        assert begun is not None
        await begun.appended
