"""Transactional ids through the listener: who may be one, where they are looked after, and the look
at all of them, at their transactions and at the producers of a partition."""

from __future__ import annotations

import asyncio
import datetime
import struct
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import limits as broker_limits
from quackmq.errors import BrokerClosing, ProducerFenced, StoreReadOnly
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.handlers.transactions import transaction_code_of
from tests.kit.tables import each
from tests.protocols.kafka.client import (
    API_VERSIONS,
    DEADLINE_SECONDS,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    served,
)
from tests.protocols.kafka.membership import versions_of
from tests.protocols.kafka.transacting import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
    Transactor,
    begun,
    transactor,
)

NONE = ErrorCode.none
FIRST_WITH_PATTERN = 2

# --- beginning ---------------------------------------------------------------------------------


@each("version", versions_of(INIT_PRODUCER_ID))
async def test_who_begins_takes_the_next_epoch(version: int) -> None:
    async with served() as running:
        first, second = [Transactor(await running.client()) for _ in range(2)]
        assert await first.init(version) == NONE
        assert await second.init(version) == NONE
        assert (second.id, second.epoch) == (first.id, first.epoch + 1)


@pytest.mark.parametrize("version", [v for v in versions_of(INIT_PRODUCER_ID) if v >= 3])
async def test_a_producer_may_name_the_epoch_that_it_has(version: int) -> None:
    async with served() as running:
        producer = Transactor(await running.client())
        assert await producer.init(version) == NONE
        before = {"producer_id": producer.id, "producer_epoch": producer.epoch}
        assert await producer.init(version, **before) == NONE
        assert producer.epoch == before["producer_epoch"] + 1
        # It may not have heard the answer.
        assert await producer.init(version, **before) == NONE
        assert producer.epoch == before["producer_epoch"] + 1
        assert await producer.init(version) == NONE
        fenced = ErrorCode.producer_fenced if version >= 4 else ErrorCode.invalid_producer_epoch
        assert await producer.init(version, **before) == fenced


@pytest.mark.parametrize("name", ["tx", None])
async def test_who_names_half_of_itself_is_refused(name: str | None) -> None:
    async with served() as running:
        producer = Transactor(await running.client(), name)
        assert await producer.init(producer_id=7) == ErrorCode.invalid_request
        assert await producer.init(producer_epoch=7) == ErrorCode.invalid_request
        answer = await producer.client.ask(
            INIT_PRODUCER_ID, 5, transactional_id="", transaction_timeout=1
        )
        assert answer.error_code == ErrorCode.invalid_request
        assert (answer.producer_id, answer.producer_epoch) == (-1, -1)


@pytest.mark.parametrize("timeout_ms", [0, -1, broker_limits.TRANSACTION_MAX_MS + 1, 2**31 - 1])
async def test_a_timeout_that_is_none_is_refused(timeout_ms: int) -> None:
    async with served() as running:
        producer = Transactor(await running.client())
        for version in versions_of(INIT_PRODUCER_ID):
            code = await producer.init(version, timeout_ms)
            assert code == ErrorCode.invalid_transaction_timeout


@each("version", [v for v in versions_of(FIND_COORDINATOR) if v >= 1])
async def test_transactions_are_looked_after_here(version: int) -> None:
    async with served() as running:
        client = await running.client()
        answer = await client.ask(
            FIND_COORDINATOR, version, key="tx", key_type=1, coordinator_keys=["tx"]
        )
        (node,) = answer.coordinators if version >= 4 else [answer]
        assert (node.error_code, (node.host, node.port)) == (NONE, running.address)


async def test_newer_clients_are_told_which_way_transactions_go() -> None:
    async with served() as running:
        client = await running.client()
        software = {"client_software_name": "tester", "client_software_version": "1.0"}
        for version in (3, 4):
            answer = await client.ask(API_VERSIONS, version, **software)
            finalized = {each.name: each.max_version_level for each in answer.finalized_features}
            assert finalized["transaction.version"] == 2
            assert answer.finalized_features_epoch >= 0
            # A least version of 0 is more than clients of version 3 can take.
            supported = {
                each.name: (each.min_version, each.max_version)
                for each in answer.supported_features
            }
            expected = (0, 2) if version == 4 else None
            assert supported.get("transaction.version") == expected


def test_a_coordinator_that_cannot_go_on_is_to_be_looked_for_again() -> None:
    assert transaction_code_of(BrokerClosing("x"), True) == ErrorCode.not_coordinator
    assert transaction_code_of(StoreReadOnly("x"), True) == ErrorCode.coordinator_not_available
    assert transaction_code_of(ProducerFenced("x"), True) == ErrorCode.producer_fenced
    assert transaction_code_of(ProducerFenced("x"), False) == ErrorCode.invalid_producer_epoch


# --- looking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions_of(LIST_TRANSACTIONS))
async def test_transactions_are_listed_by_state_producer_and_duration(version: int) -> None:
    async with begun() as (running, open_one):
        idle = await transactor(running, "idle")
        done = await transactor(running, "done")
        assert await open_one.send(b"a") == NONE
        assert await done.send(b"a", partition=1) == NONE
        assert await done.end(commit=False) == NONE

        async def listed(**filters: Any) -> dict[str, tuple[int, str]]:
            fields = {"state_filters": [], "producer_id_filters": [], **filters}
            answer = await idle.client.ask(LIST_TRANSACTIONS, version, **fields)
            assert answer.error_code == NONE
            known = {"Empty", "Ongoing", "PrepareCommit"}
            assert set(answer.unknown_state_filters) == set(fields["state_filters"]) - known
            return {
                each.transactional_id: (each.producer_id, each.transaction_state)
                for each in answer.transaction_states
            }

        every = {
            "tx": (open_one.id, "Ongoing"),
            "idle": (idle.id, "Empty"),
            "done": (done.id, "CompleteAbort"),
        }
        assert await listed() == every
        assert (await listed(state_filters=["Ongoing", "Empty"])).keys() == {"tx", "idle"}
        assert await listed(state_filters=["PrepareCommit"]) == {}
        assert await listed(state_filters=["Strange"]) == {}
        assert (await listed(producer_id_filters=[done.id, 99])).keys() == {"done"}
        if version >= 1:
            assert (await listed(duration_filter=-1)) == every
            assert (await listed(duration_filter=3_600_000)).keys() == {"idle"}
            async with asyncio.timeout(DEADLINE_SECONDS):
                while await listed(duration_filter=1) != every:
                    await asyncio.sleep(0.001)
        if version >= FIRST_WITH_PATTERN:
            assert await listed(transactional_id_pattern="") == every
            assert (await listed(transactional_id_pattern=".*e")).keys() == {"idle", "done"}
            assert await listed(transactional_id_pattern="idl") == {}


@pytest.mark.parametrize("pattern", ["(", "(?=x)", "x" * (limits.PATTERN_CHARS + 1)])
async def test_a_pattern_of_transactional_ids_that_is_none_is_refused(pattern: str) -> None:
    async with begun() as (_, producer):
        answer = await producer.client.ask(
            LIST_TRANSACTIONS,
            FIRST_WITH_PATTERN,
            state_filters=[],
            producer_id_filters=[],
            transactional_id_pattern=pattern,
        )
        assert answer.error_code == ErrorCode.invalid_regular_expression
        assert answer.transaction_states == ()


async def test_a_transaction_is_described() -> None:
    async with begun() as (running, producer):
        assert await producer.send(b"a") == NONE
        assert await producer.send(b"a", partition=1) == NONE
        client = await running.client()
        ids = ["tx", "nobody", ""]
        answer = await client.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=ids)
        first, second, third = answer.transaction_states
        assert [state.transactional_id for state in answer.transaction_states] == ids
        assert (first.error_code, first.transaction_state) == (NONE, "Ongoing")
        assert (first.producer_id, first.producer_epoch) == (producer.id, producer.epoch)
        assert first.transaction_timeout == datetime.timedelta(minutes=1)
        assert [(topic.topic, topic.partitions) for topic in first.topics] == [("news", (0, 1))]
        assert first.transaction_start_time.year >= 2024
        assert second.error_code == ErrorCode.transactional_id_not_found
        assert third.error_code == ErrorCode.invalid_request


async def test_where_nothing_is_open_there_is_no_time_at_which_it_began() -> None:
    async with begun() as (running, producer):
        client = await running.client()
        # kio cannot read a time before the first one, by which Kafka says that there is none.
        client.send_unanswered(DESCRIBE_TRANSACTIONS, 0, transactional_ids=["tx"])
        answer = await client.receive_frame()
        state, timeout_ms, none = b"\x06Empty", struct.pack(">i", 60_000), struct.pack(">q", -1)
        who = struct.pack(">qh", producer.id, producer.epoch)
        assert state + timeout_ms + none + who in answer


async def test_an_answer_describes_only_so_many_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_TRANSACTIONS_ANSWER", 5)
    async with begun() as (_, producer):
        assert await producer.send(b"a") == NONE
        assert await producer.send(b"a", partition=1) == NONE
        answer = await producer.client.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=["tx"] * 4)
        codes = [state.error_code for state in answer.transaction_states]
        assert codes == [NONE, NONE, ErrorCode.policy_violation, ErrorCode.policy_violation]
        wanted = [{"name": "news", "partition_indexes": [0] * 7}]
        answer = await producer.client.ask(DESCRIBE_PRODUCERS, 0, topics=wanted)
        codes = [part.error_code for part in answer.topics[0].partitions]
        assert codes == [NONE] * 5 + [ErrorCode.policy_violation] * 2


async def test_the_producers_of_a_partition_are_described() -> None:
    async with begun() as (running, producer):
        assert await producer.send(b"a", b"b") == NONE
        assert await producer.send(b"c") == NONE
        wanted = [
            {"name": "news", "partition_indexes": [0, 1, 9]},
            {"name": "nowhere", "partition_indexes": [0]},
        ]
        answer = await producer.client.ask(DESCRIBE_PRODUCERS, 0, topics=wanted)
        news, nowhere = answer.topics
        written, empty, unknown = news.partitions
        (told,) = written.active_producers
        assert (told.producer_id, told.producer_epoch) == (producer.id, producer.epoch)
        assert (told.last_sequence, told.current_txn_start_offset) == (2, 0)
        assert told.last_timestamp > 0
        assert (empty.error_code, empty.active_producers) == (NONE, ())
        assert unknown.error_code == ErrorCode.unknown_topic_or_partition
        assert nowhere.partitions[0].error_code == ErrorCode.unknown_topic_or_partition
        assert await producer.end(commit=True) == NONE
        answer = await producer.client.ask(DESCRIBE_PRODUCERS, 0, topics=wanted[:1])
        (told,) = answer.topics[0].partitions[0].active_producers
        assert (told.producer_epoch, told.current_txn_start_offset) == (producer.epoch, -1)
