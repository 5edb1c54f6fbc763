"""Transactions through the listener, in every version that is advertised: what readers see of one,
which offsets go with it, and what each API says when something is not as it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from kio.schema.errors import ErrorCode

from quackmq.model.topic import Append, AppendResult, Cursor, StatePut
from quackmq.stores.memory import MemoryStore
from tests.kit.support import batches_of, let_others_run
from tests.kit.tables import each
from tests.kit.waiting import soon
from tests.protocols.kafka.client import (
    FETCH,
    LIST_OFFSETS,
    PRODUCE,
    TESTER,
    Client,
    fetch_fields,
    news,
    only_partition,
    produce_fields,
    served,
)
from tests.protocols.kafka.membership import OFFSET_FETCH, member, served_at_once, versions_of
from tests.protocols.kafka.transacting import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    NEW_COMMIT,
    NEW_END,
    NEW_PRODUCE,
    TXN_OFFSET_COMMIT,
    Transactor,
    begun,
    transactor,
)

NONE = ErrorCode.none
UNCOMMITTED, COMMITTED = 0, 1
BOTH_WAYS = each("new_way", [False, True])


async def fetch(client: Client, isolation: int, version: int = 12, offset: int = 0) -> Any:
    fields = fetch_fields(offset, isolation_level=isolation)
    return only_partition(await client.ask(FETCH, version, **fields))


def values(part: Any) -> list[bytes]:
    """All records of an answer's batches that are no markers."""
    return [
        record.value
        for batch in batches_of([part.records])
        if not batch.is_control
        for record in DefaultRecordBatch(bytearray(batch.view))
    ]


# --- what readers see --------------------------------------------------------------------------


@each("version", versions_of(FETCH))
@BOTH_WAYS
async def test_a_transaction_is_seen_by_who_reads_committed_when_it_is(
    version: int, new_way: bool
) -> None:
    async with begun(new_way=new_way) as (running, producer):
        reader = await running.client()
        topic = running.broker.topic("news").id
        by_id: dict[str, Any] = {"topic": topic, "by": "topic_id"} if version >= 13 else {}

        async def read(isolation: int) -> Any:
            fields = fetch_fields(isolation_level=isolation, **by_id)
            return only_partition(await reader.ask(FETCH, version, **fields))

        assert await producer.send(b"a", b"b") == NONE
        part = await read(COMMITTED)
        assert (values(part), part.aborted_transactions) == ([], ())
        assert (part.high_watermark, part.last_stable_offset) == (2, 0)
        part = await read(UNCOMMITTED)
        assert (values(part), part.aborted_transactions) == ([b"a", b"b"], None)
        assert (part.high_watermark, part.last_stable_offset) == (2, 0)
        assert await producer.end(commit=True) == NONE
        part = await read(COMMITTED)
        assert (values(part), part.aborted_transactions) == ([b"a", b"b"], ())
        assert (part.high_watermark, part.last_stable_offset) == (3, 3)


@each("version", [v for v in versions_of(FETCH) if v < 13])
@BOTH_WAYS
async def test_who_reads_committed_is_told_what_was_aborted(version: int, new_way: bool) -> None:
    async with begun(new_way=new_way) as (running, producer):
        reader = await running.client()
        assert (
            only_partition(
                await reader.ask(PRODUCE, 9, **produce_fields(news(b"plain")))
            ).error_code
            == NONE
        )
        first_id = producer.id
        assert await producer.send(b"a", b"b") == NONE
        assert await producer.end(commit=False) == NONE
        part = await fetch(reader, COMMITTED, version)
        told = [(each.producer_id, each.first_offset) for each in part.aborted_transactions]
        assert told == [(first_id, 1)]
        assert (part.high_watermark, part.last_stable_offset) == (4, 4)
        part = await fetch(reader, UNCOMMITTED, version)
        assert (values(part), part.aborted_transactions) == ([b"plain", b"a", b"b"], None)
        part = await fetch(reader, COMMITTED, version, offset=4)
        assert (part.records, part.aborted_transactions) == (b"", ())


async def test_who_waits_for_committed_records_is_woken_by_the_end_and_not_before() -> None:
    async with begun() as (running, producer):
        reader = await running.client()
        fields = fetch_fields(isolation_level=COMMITTED, wait_ms=20_000)
        reader.send(FETCH, 12, **fields)
        waiting = asyncio.create_task(reader.receive())
        assert await producer.send(b"a") == NONE
        await let_others_run(50)
        assert not waiting.done()
        assert await producer.end(commit=True) == NONE
        assert values(only_partition(await soon(waiting))) == [b"a"]


async def test_what_is_published_behind_an_open_transaction_waits_for_it() -> None:
    async with begun() as (running, producer):
        reader = await running.client()
        assert await producer.send(b"a") == NONE
        await reader.ask(PRODUCE, 9, **produce_fields(news(b"plain")))
        assert values(await fetch(reader, COMMITTED)) == []
        assert await producer.end(commit=True) == NONE
        assert values(await fetch(reader, COMMITTED)) == [b"a", b"plain"]


@each("version", [v for v in versions_of(PRODUCE) if v >= 3])
async def test_transactional_batches_come_by_every_version_of_produce(version: int) -> None:
    new_way = version >= NEW_PRODUCE
    async with begun(new_way=new_way) as (running, producer):
        reader = await running.client()
        by_id = version >= 13
        topic = running.broker.topic("news").id if by_id else "news"
        by = "topic_id" if by_id else "name"
        for number in range(3):
            sent = await producer.sent(b"%d" % number, topic=topic, by=by, version=version)
            assert sent == (NONE, number)
        assert await producer.end(commit=True) == NONE
        assert values(await fetch(reader, COMMITTED)) == [b"0", b"1", b"2"]


@BOTH_WAYS
async def test_one_transaction_follows_the_other(new_way: bool) -> None:
    async with begun(new_way=new_way) as (running, producer):
        reader = await running.client()
        for number in range(6):
            if not new_way:
                assert await producer.add(0) == [NONE]
            assert await producer.send(b"%d" % number) == NONE
            epoch = producer.epoch
            assert await producer.end(commit=number % 2 == 0) == NONE
            assert producer.epoch == (epoch + 1 if new_way else epoch)
        part = await fetch(reader, COMMITTED)
        assert len(part.aborted_transactions) == 3
        assert part.last_stable_offset == part.high_watermark == 12


@each("version", versions_of(LIST_OFFSETS))
async def test_the_end_is_where_the_first_open_transaction_begins(version: int) -> None:
    async with begun() as (running, producer):
        reader = await running.client()
        await reader.ask(PRODUCE, 9, **produce_fields(news(b"early", timestamp_ms=1000)))
        assert await producer.send(b"open") == NONE
        await reader.ask(PRODUCE, 9, **produce_fields(news(b"late", timestamp_ms=2000)))

        async def ask(timestamp: int, isolation: int) -> int:
            wanted = {"partition_index": 0, "timestamp": timestamp}
            answer = await reader.ask(
                LIST_OFFSETS,
                version,
                replica_id=-1,
                isolation_level=isolation,
                timeout=0,
                topics=[{"name": "news", "partitions": [wanted]}],
            )
            offset: int = only_partition(answer).offset
            return offset

        knows_isolation = version >= 2
        assert await ask(-1, UNCOMMITTED) == 3
        assert await ask(-1, COMMITTED) == (1 if knows_isolation else 3)
        assert await ask(-2, COMMITTED) == 0
        assert await ask(1000, COMMITTED) == 0
        assert await ask(1001, UNCOMMITTED) == 1
        assert await ask(1001, COMMITTED) == (-1 if knows_isolation else 1)
        assert await producer.end(commit=True) == NONE
        assert await ask(-1, COMMITTED) == 4
        assert await ask(1001, COMMITTED) == 1


# --- offsets -----------------------------------------------------------------------------------


async def committed(
    client: Client, version: int = 9, *, stable: bool = False, named: bool = True
) -> tuple[int, ErrorCode]:
    """What the group has of partition 0."""
    topics = [{"name": "news", "partition_indexes": [0]}] if named else None
    answer = await client.ask(
        OFFSET_FETCH,
        version,
        group_id="group",
        topics=topics,
        groups=[{"group_id": "group", "topics": topics}],
        require_stable=stable,
    )
    part = only_partition(answer.groups[0] if version >= 8 else answer)
    return part.committed_offset, part.error_code


@each("version", versions_of(TXN_OFFSET_COMMIT))
@each("commit", [True, False])
async def test_offsets_are_committed_by_the_end_of_their_transaction(
    version: int, commit: bool
) -> None:
    new_way = version >= NEW_COMMIT
    async with begun(new_way=new_way) as (running, producer):
        reader = await running.client()
        if not new_way:
            assert await producer.add_offsets() == NONE
        assert await producer.commit_offset(5, version=version) == NONE
        assert await committed(reader) == (-1, NONE)
        assert await producer.end(commit=commit) == NONE
        assert await committed(reader) == ((5 if commit else -1), NONE)


@each("version", [v for v in versions_of(OFFSET_FETCH) if 7 <= v < 10])
@each("named", [True, False])
async def test_who_requires_stable_offsets_hears_that_a_transaction_may_change_them(
    version: int, named: bool
) -> None:
    async with begun() as (running, producer):
        reader = await running.client()
        assert await producer.commit_offset(3) == NONE
        assert await producer.end(commit=True) == NONE
        assert await producer.commit_offset(5) == NONE
        assert await committed(reader, version, named=named) == (3, NONE)
        unstable = (-1, ErrorCode.unstable_offset_commit)
        assert await committed(reader, version, stable=True, named=named) == unstable
        assert await producer.end(commit=False) == NONE
        assert await committed(reader, version, stable=True, named=named) == (3, NONE)


@each("version", versions_of(TXN_OFFSET_COMMIT))
async def test_offsets_of_a_group_that_was_not_added_are_refused_in_the_old_way(
    version: int,
) -> None:
    async with begun(new_way=False) as (_, producer):
        expected = ErrorCode.transaction_abortable if version >= 4 else ErrorCode.invalid_txn_state
        if version >= NEW_COMMIT:
            expected = NONE
        assert await producer.commit_offset(5, version=version) == expected


async def test_a_member_that_the_group_does_not_know_commits_no_offsets() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        only = await member(running)
        await only.settle()
        producer = await transactor(running)
        named: dict[str, Any] = {"member_id": only.id, "generation_id": only.generation}
        stranger = {**named, "member_id": "nobody"}
        older = {**named, "generation_id": only.generation - 1}
        assert await producer.commit_offset(5, **stranger) == ErrorCode.unknown_member_id
        assert await producer.commit_offset(5, **older) == ErrorCode.illegal_generation
        assert await producer.commit_offset(5, **named) == NONE
        # Clients of before KIP-447 do not say who they are.
        assert await producer.commit_offset(6, version=2) == NONE
        assert await producer.end(commit=True) == NONE
        assert await committed(only.client) == (6, NONE)


async def test_offsets_that_cannot_be_committed_are_named_one_by_one() -> None:
    async with begun() as (_, producer):
        unknown = ErrorCode.unknown_topic_or_partition
        assert await producer.commit_offset(5, topic="nowhere") == unknown
        assert await producer.commit_offset(5, partition=9) == unknown
        assert await producer.commit_offset(-1) == ErrorCode.invalid_request
        assert await producer.commit_offset(5, group="") == ErrorCode.invalid_group_id
        assert await producer.add_offsets("") == NONE
        assert await producer.add_offsets("x" * 1000) == ErrorCode.invalid_group_id
        assert await producer.commit_offset(5) == NONE


# --- where a transaction writes ----------------------------------------------------------------


@each("version", versions_of(ADD_PARTITIONS_TO_TXN))
async def test_partitions_are_added_in_every_version(version: int) -> None:
    async with begun(partitions=3) as (_, producer):
        assert await producer.add(0, 2, version=version) == [NONE, NONE]
        assert await producer.send(b"a", partition=2, version=11) == NONE
        refused = await producer.send(b"a", partition=1, version=11)
        assert refused == ErrorCode.transaction_abortable


@each("version", versions_of(ADD_PARTITIONS_TO_TXN))
async def test_if_one_partition_is_not_there_none_is_added(version: int) -> None:
    async with begun() as (_, producer):
        unknown, left = ErrorCode.unknown_topic_or_partition, ErrorCode.operation_not_attempted
        assert await producer.add(0, 7, 1, version=version) == [left, unknown, left]
        assert await producer.add(0, topic="nowhere", version=version) == [unknown]
        assert await producer.send(b"a", version=10) == ErrorCode.invalid_txn_state


async def test_if_one_topic_is_not_there_nothing_is_attempted_with_the_others() -> None:
    async with begun() as (_, producer):
        topics = [{"name": "news", "partitions": [0]}, {"name": "nowhere", "partitions": [0]}]
        named = {f"v3_and_below_{name}": value for name, value in producer.named().items()}
        answer = await producer.client.ask(
            ADD_PARTITIONS_TO_TXN, 3, **named, v3_and_below_topics=topics
        )
        there, nowhere = answer.results_by_topic_v3_and_below
        code = there.results_by_partition[0].partition_error_code
        assert code == ErrorCode.operation_not_attempted
        code = nowhere.results_by_partition[0].partition_error_code
        assert code == ErrorCode.unknown_topic_or_partition


@pytest.mark.parametrize("version", [4, 5])
async def test_partitions_can_be_verified_without_adding_them(version: int) -> None:
    async with begun() as (running, producer):
        assert await producer.add(0) == [NONE]
        told = await producer.add(0, 1, version=version, verify_only=True)
        assert told == [NONE, ErrorCode.transaction_abortable]
        stranger = Transactor(producer.client, "nobody")
        mapping = [ErrorCode.invalid_producer_id_mapping]
        assert await stranger.add(0, version=version, verify_only=True) == mapping
        producer.epoch -= 1
        fenced = [ErrorCode.producer_fenced]
        assert await producer.add(0, version=version, verify_only=True) == fenced
        producer.id += 1
        assert await producer.add(0, version=version, verify_only=True) == mapping


@each("version", [v for v in versions_of(PRODUCE) if v >= 3])
async def test_a_partition_that_was_not_added_is_refused_in_the_words_of_the_version(
    version: int,
) -> None:
    async with begun(partitions=3) as (running, producer):
        by_id = version >= 13
        topic = running.broker.topic("news").id if by_id else "news"
        code = await producer.send(
            b"a", topic=topic, by="topic_id" if by_id else "name", version=version
        )
        if version >= NEW_PRODUCE:
            assert code == NONE
        elif version >= 11:
            assert code == ErrorCode.transaction_abortable
        else:
            assert code == ErrorCode.invalid_txn_state


async def test_a_batch_that_is_no_part_of_the_open_transaction_is_refused() -> None:
    async with begun() as (_, producer):
        assert await producer.send(b"a") == NONE
        code, _ = await producer.sent(b"plain", transactional=False)
        assert code == ErrorCode.invalid_txn_state
        assert await producer.end(commit=True) == NONE


# --- ending ------------------------------------------------------------------------------------


@each("version", versions_of(END_TXN))
@each("commit", [True, False])
async def test_an_end_that_is_repeated_is_answered_like_the_first(
    version: int, commit: bool
) -> None:
    async with begun(new_way=version >= NEW_END) as (_, producer):
        assert await producer.send(b"a") == NONE
        before = producer.epoch
        assert await producer.end(commit, version) == NONE
        after = (producer.id, producer.epoch)
        producer.epoch = before
        assert await producer.end(commit, version) == NONE
        assert (producer.id, producer.epoch) == after


@each("version", versions_of(END_TXN))
async def test_what_was_never_begun_cannot_be_committed(version: int) -> None:
    async with begun() as (_, producer):
        assert await producer.end(True, version) == ErrorCode.invalid_txn_state


@pytest.mark.parametrize("api_key", [ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN])
async def test_a_producer_that_the_id_is_not_mapped_to_is_told_so(api_key: int) -> None:
    async with begun() as (_, producer):
        mapping = ErrorCode.invalid_producer_id_mapping
        for stranger in (Transactor(producer.client, "nobody"), producer):
            stranger.id = producer.id + 1
            for version in versions_of(api_key):
                assert await asked(stranger, api_key, version) == mapping
        assert await producer.commit_offset(1) == mapping
        assert await producer.send(b"a") == mapping


async def asked(producer: Transactor, api_key: int, version: int) -> ErrorCode:
    if api_key == ADD_PARTITIONS_TO_TXN:
        (code,) = await producer.add(0, version=version)
        return code
    if api_key == ADD_OFFSETS_TO_TXN:
        return await producer.add_offsets(version=version)
    return await producer.end(True, version)


@pytest.mark.parametrize("api_key", [ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN])
async def test_a_zombie_is_fenced_in_the_words_of_the_version(api_key: int) -> None:
    async with begun() as (running, zombie):
        await transactor(running)
        for version in versions_of(api_key):
            fenced = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
            assert await asked(zombie, api_key, version) == fenced


async def test_a_zombie_neither_writes_nor_commits_offsets() -> None:
    async with begun() as (running, zombie):
        assert await zombie.send(b"a") == NONE
        await transactor(running)
        for version in (*range(3, 13),):
            assert await zombie.send(b"b", version=version) == ErrorCode.invalid_producer_epoch
        for version in versions_of(TXN_OFFSET_COMMIT):
            code = await zombie.commit_offset(5, version=version)
            assert code == ErrorCode.invalid_producer_epoch
        part = await fetch(zombie.client, COMMITTED)
        assert [each.first_offset for each in part.aborted_transactions] == [0]
        assert part.last_stable_offset == part.high_watermark == 2


async def test_a_transaction_whose_time_is_up_is_aborted_and_its_producer_fenced() -> None:
    async with begun() as (running, reader):
        producer = await transactor(running, "slow", timeout_ms=50)
        fields = fetch_fields(isolation_level=COMMITTED, wait_ms=20_000)
        assert await producer.send(b"a") == NONE
        part = only_partition(await reader.client.ask(FETCH, 12, **fields))
        assert [each.first_offset for each in part.aborted_transactions] == [0]
        assert await producer.send(b"b") == ErrorCode.invalid_producer_epoch
        assert await producer.end(commit=True) == ErrorCode.producer_fenced
        assert await producer.end(commit=True, version=1) == ErrorCode.invalid_producer_epoch
        assert await producer.init() == NONE
        assert await producer.send(b"c") == NONE
        assert await producer.end(commit=True) == NONE


class SlowStore(MemoryStore):
    """A store in memory whose ends of transactions wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.ending = asyncio.Event()

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if states and not self.may_end.is_set():
            return self._append_late(appends, cursors, states)
        return super().append(appends, cursors, states)

    async def _append_late(self, *given: Any) -> list[AppendResult]:
        self.ending.set()
        await self.may_end.wait()
        return await super().append(*given)


async def test_a_batch_that_meets_the_end_of_its_transaction_is_to_be_sent_again() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        await running.broker.create_topic(TESTER, "news")
        producer = await transactor(running)
        assert await producer.send(b"a") == NONE
        store.may_end.clear()
        other = await running.client()
        other.send(END_TXN, 4, **producer.named(), committed=True)
        ended = asyncio.create_task(other.receive())
        await soon(store.ending.wait())
        assert await producer.send(b"b", version=12) == ErrorCode.concurrent_transactions
        assert await producer.send(b"b", version=11) == ErrorCode.not_enough_replicas
        store.may_end.set()
        assert (await soon(ended)).error_code == NONE
        assert await producer.send(b"b", version=12) == NONE
