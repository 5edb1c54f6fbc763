"""A broker as users run it, archiving all the while: killed at any instant, told to stop, kept from
writing. What was acknowledged is there once, at its offset, in log and archive as one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.real import RealDisk
from tests.kit.waiting import wait_until
from tests.real.broker import Broker
from tests.real.clients import Kind, Progress, Publisher, create_topics, read_back
from tests.real.killing import PLACES, TOPICS, run_round
from tests.real.ledger import check

pytestmark = pytest.mark.timeout(900)

#: Files are made by a process that others go before: on a busy machine it gets a thirtieth of a
#: processor, and has to start first.
ARCHIVED_S = 240
#: Whatever is there is archived, in many small files.
AT_ONCE = {"quackmq.archive_bytes": "1", "quackmq.archive_after_ms": "0"}


def listed(data: Path) -> list[Manifest]:
    """Every manifest that there is, whole as it must be at any moment."""
    found = sorted((data / "archive").glob("*/*/_manifest.json"))
    return [manifests.decode(path.read_bytes(), str(path)) for path in found]


def wait_for_archiving(data: Path, changes: int = 1) -> None:
    """Until manifests were changed so often from now on."""
    due = sum(each.version for each in listed(data)) + changes
    wait_until(lambda: sum(each.version for each in listed(data)) >= due, "archiving", ARCHIVED_S)


def busy(broker: Broker, progress: Progress) -> Publisher:
    kind = Kind("exactly_once")
    return Publisher("busy", kind, broker.address, PLACES, random.Random(1), progress)


@pytest.mark.processes
def test_a_broker_killed_while_it_archives_keeps_what_it_promised(tmp_path: Path) -> None:
    """Q8, and what was acknowledged before it was archived."""
    data = tmp_path / "data"
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    result = run_round(data, seed, kills=4, configs=AT_ONCE, wait=lambda: wait_for_archiving(data))
    assert result.violations == [], str(result)
    assert sum(each.records for each in listed(data)) > 0
    assert [name for each in listed(data) for name in unlisted(data, each)] == []


@pytest.mark.processes
def test_every_file_that_a_killed_broker_lists_is_whole(tmp_path: Path) -> None:
    """Without a start in between that could have mended anything."""
    data = tmp_path / "data"
    with Broker(data) as broker:
        broker.start()
        create_topics(broker.address, TOPICS, AT_ONCE)
        publisher = busy(broker, Progress())
        try:
            wait_for_archiving(data, changes=3)
            broker.kill()
        finally:
            publisher.abandon()
    disk = RealDisk(data, read_only=True)
    reader = ArchiveReader(disk)
    for each in listed(data):
        for file in each.files:
            reader.verify(each, file)
    disk.close()


@pytest.mark.processes
def test_a_broker_told_to_stop_while_it_archives_does_so_at_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker(data) as broker:
        broker.start()
        create_topics(broker.address, TOPICS, AT_ONCE)
        progress = Progress()
        publisher = busy(broker, progress)
        try:
            wait_for_archiving(data, changes=2)
            exit_code, log = broker.stop()
            assert exit_code == 0, log
            broker.start()
            account = publisher.finish()
        finally:
            publisher.abandon()
        assert check([account], read_back(broker.address, PLACES)) == []


@pytest.mark.processes
def test_a_broker_that_cannot_archive_publishes_on_and_catches_up_by_itself(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with Broker(data) as broker:
        broker.start()
        broker.stop()
        (data / "archive").touch()  # in the place of a directory
        broker.start()
        create_topics(broker.address, TOPICS, AT_ONCE)
        progress = Progress()
        publisher = busy(broker, progress)
        try:
            progress.wait_for_more(1_000)
            account = publisher.finish()
        finally:
            publisher.abandon()
        (data / "archive").unlink()
        wait_until(lambda: len(listed(data)) == len(PLACES), "archiving", ARCHIVED_S)
        assert check([account], read_back(broker.address, PLACES)) == []
        exit_code, log = broker.stop()
        assert exit_code == 0
        assert "the archive cannot be read" in log


def unlisted(data: Path, manifest: Manifest) -> list[str]:
    """Files of a partition that its manifest does not name."""
    directory = data / "archive" / manifest.topic / str(manifest.key.partition)
    names = {path.name for path in directory.iterdir()} - {"_manifest.json"}
    return sorted(names - set(manifests.list_names(manifest)))
