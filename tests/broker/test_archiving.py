"""A broker that archives by itself: what policies say, who published, and an end in between."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.builder import LocalFileBuilder
from quackmq.archive.archiving.pieces import BuildProgress, LogPiece, UnknownProducers
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker
from quackmq.model.policy import Policy
from quackmq.stores.local import LocalOptions, LocalStore
from tests.broker.archives import beside
from tests.broker.support import CALLER, TOPIC, key_of, publish
from tests.broker.transacting import Transactor, committed_values
from tests.kit.waiting import until

AT_ONCE = Policy(archive_after_ms=0, archive_bytes=1)


async def test_the_archive_says_who_published_in_transactions(tmp_path: Path) -> None:
    async with beside(tmp_path) as home:
        await home.broker.create_topic(CALLER, TOPIC)
        duck = Transactor(home.broker, "duck")
        await duck.init()
        await duck.send(b"aborted")
        await duck.abort()
        await duck.send(b"committed")
        await duck.commit()
        await publish(home.broker, b"plain")
        assert (await home.archive.archive(CALLER, TOPIC)).records == 2
        (rows,) = home.rows([file.name for file in (await home.listed()).files])
        assert rows.column("value").to_pylist() == [b"committed", b"plain"]
        assert rows.column("publisher").to_pylist() == ["duck", None]
        assert await committed_values(home.broker) == [b"committed", b"plain"]


async def test_a_topic_is_archived_as_its_policy_says_and_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q7, Q8: by itself, while others publish."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 1)
    async with beside(tmp_path) as home:
        topic = await home.broker.create_topic(CALLER, TOPIC)
        await publish(home.broker, b"1", b"2")
        assert home.archive.state(CALLER).archiver.due_partitions == 0
        await home.broker.alter_topic(CALLER, TOPIC, policy=AT_ONCE)

        async def is_archived() -> bool:
            return (await home.store.inner.offsets(key_of(topic))).first >= 2

        await until(is_archived)
        assert await committed_values(home.broker) == [b"1", b"2"]


async def test_a_broker_closes_at_once_while_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 1)
    begun = threading.Event()
    ended = threading.Event()

    class Endless(LocalFileBuilder):
        def add(
            self, piece: LogPiece, publishers: Mapping[int, str | None]
        ) -> BuildProgress | UnknownProducers:
            begun.set()
            assert ended.wait(timeout=30)
            return super().add(piece, publishers)

        def close(self) -> None:
            ended.set()

    log = await LocalStore.open(tmp_path, LocalOptions(sync="os"))
    store = await TieredStore.open(log, log.disk)
    broker = Broker(store, archive=store, file_builder=Endless())
    await broker.open()
    await broker.create_topic(CALLER, TOPIC, policy=AT_ONCE)
    await publish(broker, b"1")
    await until(begun.is_set)
    await broker.close()
    await store.close()
    async with beside(tmp_path) as home:
        assert (await home.listed()).files == ()
        assert await committed_values(home.broker) == [b"1"]
