"""Getting messages: exactly once by the last id, in turns, waiting, over losses and damage."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from quackmq.broker import Message, Offset
from quackmq.errors import (
    InvalidMessageId,
    StoreReadOnly,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.subscription import RecordPosition, message_id
from quackmq.model.topic import Cursor
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.memory import MemoryStore
from tests.broker.support import (
    CALLER,
    LONG_MS,
    NAME,
    TOPIC,
    get,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    subscribed,
    values_of,
)
from tests.kit import effort
from tests.kit.support import Clock, batch_of, let_others_run

# --- by the last id -----------------------------------------------------------------------------


async def test_a_message_is_sent_again_until_it_is_named() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a", b"b")
        first = await get(broker)
        assert first.record.value == b"a"
        assert await get(broker) == first
        second = await get(broker, first)
        assert second.record.value == b"b"
        assert await get(broker, first) == second, "the reply was lost"
        assert await get(broker) == second, "the client lost its file"
        assert await broker.get(CALLER, NAME, TOPIC, second.id) is None
        assert await broker.get(CALLER, NAME, TOPIC, second.id) is None


async def test_a_message_has_all_that_was_published() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        record = Record(0, 77, b"key", b"value", (("header", None), ("header", b"1")))
        await broker.messages.put(CALLER, TOPIC, [record])
        message = await get(broker)
        assert (message.topic_name, message.partition, message.lost) == (TOPIC, 0, 0)
        assert message.record == record


async def test_an_id_that_was_not_sent_moves_nothing() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a", b"b", b"c")
        first = await get(broker)
        topic_id = broker.topic(TOPIC).id
        for offset in (1, 2, 3, 10**12):
            forged = message_id(topic_id, RecordPosition(0, offset))
            assert await broker.get(CALLER, NAME, TOPIC, forged) == first


async def test_ids_of_other_topics_and_nonsense_send_the_head_again_r2() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a", b"b")
        other = await broker.create_topic(CALLER, "other")
        for token in [
            "",
            "nonsense",
            message_id(other.id, RecordPosition(0, 0)),
            message_id(broker.topic(TOPIC).id, RecordPosition(1, 0)),
        ]:
            message = await broker.get(CALLER, NAME, TOPIC, token)
            assert message is not None and message.record.value == b"a", token
            with pytest.raises(InvalidMessageId):
                await broker.commit(CALLER, NAME, TOPIC, token)


async def test_the_id_of_a_topic_made_anew_acknowledges_nothing() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a")
        message = await get(broker)
        await broker.delete_topic(CALLER, TOPIC)
        await subscribed(broker)
        await publish(broker, b"b")
        for _ in range(2):
            head = await broker.get(CALLER, NAME, TOPIC, message.id)
            assert head is not None and head.record.value == b"b"
        with pytest.raises(InvalidMessageId, match="deleted"):
            await broker.commit(CALLER, NAME, TOPIC, message.id)


async def test_strangers_are_told_so() -> None:
    async with open_broker() as broker:
        with pytest.raises(UnknownTopic):
            await broker.get(CALLER, NAME, TOPIC, None)
        await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(UnknownSubscription):
            await broker.get(CALLER, NAME, TOPIC, None)


async def test_every_name_has_its_own_place() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, "one", TOPIC)
        await broker.subscribe(CALLER, "two", TOPIC)
        await publish_each(broker, b"a", b"b")
        assert values_of(await get_all(broker, name="one")) == [b"a", b"b"]
        assert values_of(await get_all(broker, name="two")) == [b"a", b"b"]


async def test_the_place_outlives_the_broker() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c")
        second = await get(broker, await get(broker))
    async with open_broker(store) as broker:
        assert await get(broker) == second, "not named, so it comes again"
    async with open_broker(store) as broker:
        third = await get(broker, second)
        assert third.record.value == b"c", "named to another broker than sent it"
    async with open_broker(store) as broker:
        assert await get(broker, second) == third, "an id that is past moves nothing"
        assert await broker.get(CALLER, NAME, TOPIC, third.id) is None


async def test_after_a_restart_only_a_head_can_be_named() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
    async with open_broker(store) as broker:
        for offset in (1, 2):
            forged = message_id(broker.topic(TOPIC).id, RecordPosition(0, offset))
            message = await broker.get(CALLER, NAME, TOPIC, forged)
            assert message is not None and message.record.value == b"a"


async def test_an_id_of_what_does_not_exist_yet_moves_nothing_after_a_restart() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
    async with open_broker(store) as broker:
        forged = message_id(broker.topic(TOPIC).id, RecordPosition(0, 0))
        assert await broker.get(CALLER, NAME, TOPIC, forged) is None
        await publish(broker, b"a")
        assert (await get(broker)).record.value == b"a"


async def test_two_gets_at_once_are_answered_alike() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        answers = await asyncio.gather(*(get(broker, first) for _ in range(5)))
        assert values_of(answers) == [b"b"] * 5


async def test_a_cursor_moves_only_when_the_store_has_moved_it() -> None:
    class Full(MemoryStore):
        is_full = False

        async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
            if self.is_full:
                raise StoreReadOnly("the disk is full")
            await super().set_cursors(cursors)

    store = Full()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        store.is_full = True
        with pytest.raises(StoreReadOnly):
            await get(broker, first)
        assert await get(broker) == first, "reading goes on"
        store.is_full = False
        assert (await get(broker, first)).record.value == b"b"


# --- waiting ------------------------------------------------------------------------------------


async def test_a_get_waits_for_a_message_without_keeping_others_out() -> None:
    async with open_broker() as broker:
        await subscribed(broker, partitions=3)
        waiting = asyncio.create_task(get(broker, wait_ms=LONG_MS))
        await let_others_run()
        assert not waiting.done()
        assert await broker.get(CALLER, NAME, TOPIC, None) is None
        assert await broker.lag(CALLER, NAME, TOPIC) == 0
        await publish(broker, b"a", partition=2)
        message = await waiting
        assert message.record.value == b"a"
        assert await get(broker) == message


async def test_a_get_that_waits_in_vain_has_nothing() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        assert await broker.get(CALLER, NAME, TOPIC, None, 5) is None


async def test_naming_and_waiting_go_together() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a")
        first = await get(broker)
        waiting = asyncio.create_task(get(broker, first, wait_ms=LONG_MS))
        await let_others_run()
        assert await broker.lag(CALLER, NAME, TOPIC) == 0, "the last one is done with"
        await publish(broker, b"b")
        assert (await waiting).record.value == b"b"


async def test_a_get_that_is_cancelled_leaves_nothing_behind() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        waiting = asyncio.create_task(get(broker, wait_ms=LONG_MS))
        await let_others_run()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await publish(broker, b"a")
        assert (await get(broker)).record.value == b"a"


# --- partitions ---------------------------------------------------------------------------------


async def test_partitions_take_turns() -> None:
    async with open_broker() as broker:
        await subscribed(broker, partitions=3)
        for partition in range(3):
            await publish(broker, b"first", b"second", partition=partition)
        messages = await get_all(broker)
        assert [message.partition for message in messages] == [0, 1, 2, 0, 1, 2]
        assert values_of(messages) == [b"first"] * 3 + [b"second"] * 3


async def test_partitions_take_turns_also_where_messages_are_committed_and_not_named() -> None:
    async with open_broker() as broker:
        await subscribed(broker, partitions=3)
        for partition in range(3):
            await publish(broker, b"first", b"second", partition=partition)
        seen = []
        for _ in range(6):
            message = await get(broker)
            await broker.commit(CALLER, NAME, TOPIC, message.id)
            seen.append(message.partition)
        assert seen == [0, 1, 2, 0, 1, 2]


async def test_the_outstanding_message_is_sent_again_whatever_comes_elsewhere() -> None:
    async with open_broker() as broker:
        await subscribed(broker, partitions=2)
        await publish(broker, b"a", partition=1)
        first = await get(broker)
        await publish(broker, b"b", partition=0)
        assert await get(broker) == first
        assert (await get(broker, first)).record.value == b"b"


async def test_a_new_partition_is_read_from_its_beginning() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish(broker, b"a")
        await broker.alter_topic(CALLER, TOPIC, partitions=3)
        await publish(broker, b"b", partition=2)
        assert await broker.lag(CALLER, NAME, TOPIC) == 2
        assert values_of(await get_all(broker)) == [b"a", b"b"]
    async with open_broker(store) as broker:
        assert await broker.lag(CALLER, NAME, TOPIC) == 0
        await publish(broker, b"c", partition=1)
        assert values_of(await get_all(broker)) == [b"c"]


async def test_a_partition_that_comes_while_a_get_waits_is_seen() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        waiting = asyncio.create_task(get(broker, wait_ms=LONG_MS))
        await let_others_run()
        await broker.alter_topic(CALLER, TOPIC, partitions=2)
        await publish(broker, b"a", partition=1)
        assert (await waiting).record.value == b"a"


# --- commit, seek, lag --------------------------------------------------------------------------


async def test_a_commit_is_for_all_up_to_it_and_lasts() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        first = await get(broker)
        third = message_id(broker.topic(TOPIC).id, RecordPosition(0, 2))
        await broker.commit(CALLER, NAME, TOPIC, third)
        assert await broker.lag(CALLER, NAME, TOPIC) == 1
        await broker.commit(CALLER, NAME, TOPIC, first.id)
        assert await broker.lag(CALLER, NAME, TOPIC) == 1, "never back"
        assert (await get(broker, first)).record.value == b"d"
    async with open_broker(store) as broker:
        assert (await get(broker)).record.value == b"d"
        with pytest.raises(InvalidMessageId, match="yet"):
            future = message_id(broker.topic(TOPIC).id, RecordPosition(0, 4))
            await broker.commit(CALLER, NAME, TOPIC, future)


async def test_a_seek_goes_back_and_forth_and_lasts() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c")
        messages = await get_all(broker)
        await broker.seek(CALLER, NAME, TOPIC, "beginning")
        assert await get_all(broker, messages[-1]) == messages, "replayed, from the first on"
        await broker.seek(CALLER, NAME, TOPIC, Offset(1))
    async with open_broker(store) as broker:
        assert values_of(await get_all(broker, messages[-1])) == [b"b", b"c"]
        await broker.seek(CALLER, NAME, TOPIC, "beginning")
        await broker.seek(CALLER, NAME, TOPIC, "end")
        assert await get_all(broker) == []


async def test_after_a_seek_to_the_outstanding_message_it_is_sent_again() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        await broker.seek(CALLER, NAME, TOPIC, "beginning")
        assert await get(broker, first) == first
        assert (await get(broker, first)).record.value == b"b"


async def test_a_seek_wakes_a_get_that_waits() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a")
        last = (await get_all(broker))[-1]
        waiting = asyncio.create_task(get(broker, last, wait_ms=LONG_MS))
        await let_others_run()
        assert not waiting.done()
        await broker.seek(CALLER, NAME, TOPIC, "beginning")
        await let_others_run()
        assert waiting.done(), "it was woken, and did not wait for its time to end"
        assert (await waiting).record.value == b"a"


async def test_committing_what_is_gone_leaves_a_later_outstanding_message_to_be_named() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        gone = await get(broker)
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 2)
        outstanding = await get(broker)
        assert outstanding.record.value == b"c"
        await broker.commit(CALLER, NAME, TOPIC, gone.id)
        assert (await get(broker, outstanding)).record.value == b"d", "c is not delivered twice"


async def test_the_lag_counts_what_is_still_to_come() -> None:
    async with open_broker() as broker:
        await subscribed(broker, partitions=2)
        await publish(broker, b"a", b"b", b"c", partition=0)
        await publish(broker, b"d", partition=1)
        assert await broker.lag(CALLER, NAME, TOPIC) == 4
        await get(broker, await get(broker))
        assert await broker.lag(CALLER, NAME, TOPIC) == 3
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 3)
        assert await broker.lag(CALLER, NAME, TOPIC) == 1


# --- many records in a batch --------------------------------------------------------------------


async def test_a_large_batch_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0

    def counting(batch: Batch, **options: int) -> list[Record]:
        nonlocal opened
        opened += 1
        return _decode(batch, **options)

    _decode = codec.decode
    monkeypatch.setattr(codec, "decode", counting)
    async with open_broker() as broker:
        await subscribed(broker, partitions=2)
        values = [b"%d" % number for number in range(500)]
        for partition in range(2):
            await publish(broker, *values, partition=partition)
        messages = await get_all(broker)
        assert len(messages) == 1000
        assert opened == 2


# --- anything may happen ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(effort.of(30)))
async def test_every_message_is_delivered_exactly_once_in_order(seed: int) -> None:
    """A client that keeps the last id on disk, over a network that loses replies, with a broker
    that dies: what the client takes is what was published, a partition at a time."""
    chance = random.Random(seed)
    store = MemoryStore(Clock())
    partitions = chance.choice([1, 1, 3])
    published: dict[int, list[bytes]] = defaultdict(list)
    taken: dict[int, list[bytes]] = defaultdict(list)
    last: Message | None = None
    for _ in range(6):
        # Dies without a word: nothing is closed in order.
        async with open_broker(store) as broker:
            if TOPIC not in broker.topics():
                await subscribed(broker, partitions)
            for _ in range(40):
                if chance.random() < 0.4:
                    partition = chance.randrange(partitions)
                    count = chance.randint(1, 4)
                    start = len(published[partition])
                    values = [b"%d" % number for number in range(start, start + count)]
                    published[partition] += values
                    await publish(broker, *values, partition=partition)
                    continue
                message = await broker.get(CALLER, NAME, TOPIC, last.id if last else None)
                is_reply_lost = chance.random() < 0.3
                if message is None or is_reply_lost:
                    continue
                # The client works by what it keeps: a message it has taken is not taken again.
                if last is None or message.id != last.id:
                    assert message.record.value is not None
                    taken[message.partition].append(message.record.value)
                    last = message
    async with open_broker(store) as broker:
        for message in await get_all(broker, last):
            assert message.record.value is not None
            taken[message.partition].append(message.record.value)
    assert taken == published


async def test_a_batch_of_a_foreign_codec_is_read_as_well() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        records = [Record(0, number, None, b"%d" % number) for number in range(5)]
        for compression in ("gzip", "snappy", "lz4", "zstd"):
            batch = Batch.parse(codec.encode(records, compression=compression))
            await broker.publish(CALLER, broker.topic(TOPIC), 0, batch)
        await broker.publish(CALLER, broker.topic(TOPIC), 0, batch_of(b"last"))
        values = values_of(await get_all(broker))
        assert values == [b"0", b"1", b"2", b"3", b"4"] * 4 + [b"last"]
