"""A transactional producer over one connection, speaking the versions that a test wants.

With the newest versions it goes KIP-890's way; with Produce up to 11, EndTxn and TxnOffsetCommit up
to 4 the older one, in which it says beforehand where it writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kio.schema.errors import ErrorCode

from tests.kit.support import batch_of
from tests.protocols.kafka.client import (
    INIT_PRODUCER_ID,
    PRODUCE,
    TESTER,
    Client,
    Served,
    only_partition,
    served,
)

ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 24, 25, 26, 28
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66

ADD_WITH_SEVERAL = 4
#: Versions of the newer way: Produce, EndTxn, TxnOffsetCommit.
NEW_PRODUCE, NEW_END, NEW_COMMIT = 12, 5, 5


class Transactor:
    """What a client remembers of its transactional id."""

    def __init__(self, client: Client, name: str | None = "tx", *, new_way: bool = True) -> None:
        self.client = client
        self.name = name
        self.id = -1
        self.epoch = -1
        self.is_new_way = new_way
        self.produce_version = NEW_PRODUCE if new_way else NEW_PRODUCE - 1
        self.end_version = NEW_END if new_way else NEW_END - 1
        self.commit_version = NEW_COMMIT if new_way else NEW_COMMIT - 1
        self._sequences: dict[tuple[str, int], int] = {}

    async def init(self, version: int = 5, timeout_ms: int = 60_000, **more: Any) -> ErrorCode:
        """More: the producer id and epoch that it names."""
        answer = await self.client.ask(
            INIT_PRODUCER_ID,
            version,
            transactional_id=self.name,
            transaction_timeout=timeout_ms,
            **more,
        )
        code: ErrorCode = answer.error_code
        if code == ErrorCode.none:
            self._become(answer.producer_id, answer.producer_epoch)
        return code

    async def add(
        self, *partitions: int, topic: str = "news", version: int = 3, verify_only: bool = False
    ) -> list[ErrorCode]:
        topics = [{"name": topic, "partitions": list(partitions)}]
        transaction = {**self.named(), "verify_only": verify_only, "topics": topics}
        answer = await self.client.ask(
            ADD_PARTITIONS_TO_TXN,
            version,
            **{f"v3_and_below_{name}": value for name, value in transaction.items()},
            transactions=[transaction],
        )
        if version < ADD_WITH_SEVERAL:
            results = answer.results_by_topic_v3_and_below
        else:
            (result,) = answer.results_by_transaction
            assert (answer.error_code, result.transactional_id) == (ErrorCode.none, self.name)
            results = result.topic_results
        (part,) = results
        assert [each.partition_index for each in part.results_by_partition] == [*partitions]
        return [each.partition_error_code for each in part.results_by_partition]

    async def send(
        self,
        *values: bytes,
        topic: Any = "news",
        partition: int = 0,
        version: int | None = None,
        by: str = "name",
    ) -> ErrorCode:
        """One batch; its sequence goes on when it is taken."""
        code, _ = await self.sent(*values, topic=topic, partition=partition, version=version, by=by)
        return code

    async def sent(
        self,
        *values: bytes,
        topic: Any = "news",
        partition: int = 0,
        version: int | None = None,
        by: str = "name",
        transactional: bool = True,
    ) -> tuple[ErrorCode, int]:
        """The same, with the offset."""
        sequence = self._sequences.get((topic, partition), 0)
        batch = batch_of(
            *values,
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
        data = [{by: topic, "partition_data": [{"index": partition, "records": bytes(batch.view)}]}]
        part = only_partition(
            await self.client.ask(
                PRODUCE,
                self.produce_version if version is None else version,
                transactional_id=self.name,
                acks=-1,
                timeout=1000,
                topic_data=data,
            )
        )
        if part.error_code == ErrorCode.none:
            self._sequences[topic, partition] = sequence + len(values)
        return part.error_code, part.base_offset

    async def add_offsets(self, group: str = "group", version: int = 4) -> ErrorCode:
        fields = {**self.named(), "group_id": group}
        answer = await self.client.ask(ADD_OFFSETS_TO_TXN, version, **fields)
        code: ErrorCode = answer.error_code
        return code

    async def commit_offset(
        self,
        offset: int,
        *,
        group: str = "group",
        topic: str = "news",
        partition: int = 0,
        version: int | None = None,
        **member: Any,
    ) -> ErrorCode:
        wish = {
            "partition_index": partition,
            "committed_offset": offset,
            "committed_metadata": "note",
        }
        answer = await self.client.ask(
            TXN_OFFSET_COMMIT,
            self.commit_version if version is None else version,
            **self.named(),
            group_id=group,
            topics=[{"name": topic, "partitions": [wish]}],
            **{"generation_id": -1, "member_id": "", "group_instance_id": None, **member},
        )
        part = only_partition(answer)
        code: ErrorCode = part.error_code
        return code

    async def end(self, commit: bool, version: int | None = None) -> ErrorCode:
        version = self.end_version if version is None else version
        answer = await self.client.ask(END_TXN, version, **self.named(), committed=commit)
        code: ErrorCode = answer.error_code
        if version >= NEW_END:
            if code == ErrorCode.none:
                self._become(answer.producer_id, answer.producer_epoch)
            else:
                assert (answer.producer_id, answer.producer_epoch) == (-1, -1)
        return code

    def named(self) -> dict[str, Any]:
        return {
            "transactional_id": self.name,
            "producer_id": self.id,
            "producer_epoch": self.epoch,
        }

    def _become(self, producer_id: int, epoch: int) -> None:
        """A new epoch begins to count anew."""
        if (producer_id, epoch) != (self.id, self.epoch):
            self._sequences.clear()
        self.id, self.epoch = producer_id, epoch


@asynccontextmanager
async def begun(
    *, new_way: bool = True, partitions: int = 2
) -> AsyncIterator[tuple[Served, Transactor]]:
    """A listener, a topic, and a producer that has begun and, in the old way, added its
    partitions."""
    async with served() as running:
        await running.broker.create_topic(TESTER, "news", partitions=partitions)
        yield running, await transactor(running, new_way=new_way, partitions=partitions)


async def transactor(
    running: Served, name: str = "tx", *, new_way: bool = True, partitions: int = 2, **more: Any
) -> Transactor:
    found = Transactor(await running.client(), name, new_way=new_way)
    assert await found.init(**more) == ErrorCode.none
    if not new_way:
        assert set(await found.add(*range(partitions))) == {ErrorCode.none}
    return found


_NOBODY = {"transactional_id": "none", "producer_id": 7, "producer_epoch": 0}
_TOPICS = [{"name": "none", "partitions": [0]}]

#: A sound request of each API of transactions, for an id that is not there.
TRANSACTION_REQUESTS: dict[int, dict[str, Any]] = {
    ADD_PARTITIONS_TO_TXN: {
        **{f"v3_and_below_{name}": value for name, value in _NOBODY.items()},
        "v3_and_below_topics": _TOPICS,
        "transactions": [{**_NOBODY, "topics": _TOPICS}],
    },
    ADD_OFFSETS_TO_TXN: {**_NOBODY, "group_id": "none"},
    END_TXN: {**_NOBODY, "committed": True},
    TXN_OFFSET_COMMIT: {
        **_NOBODY,
        "group_id": "none",
        "member_id": "nobody",
        "group_instance_id": None,
        "topics": [
            {
                "name": "none",
                "partitions": [
                    {"partition_index": 0, "committed_offset": 0, "committed_metadata": "note"}
                ],
            }
        ],
    },
    DESCRIBE_PRODUCERS: {"topics": [{"name": "none", "partition_indexes": [0]}]},
    DESCRIBE_TRANSACTIONS: {"transactional_ids": ["none"]},
    LIST_TRANSACTIONS: {"state_filters": ["Ongoing"], "producer_id_filters": [7]},
}
