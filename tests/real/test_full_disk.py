"""A disk that fills up: publishers are told, nothing acknowledged is lost, reads go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.kit.server import DEADLINE_S
from tests.real.broker import Broker
from tests.real.clients import Kind, Progress, Publisher, create_topics, read_back
from tests.real.disks import BoundedFiles, FullDisk, SmallFileSystem
from tests.real.ledger import Place, check, lost

pytestmark = pytest.mark.processes

TOPICS = {"ducks": 1, "geese": 2}
PLACES = [Place(topic, number) for topic, count in TOPICS.items() for number in range(count)]

DISKS = [BoundedFiles, pytest.param(SmallFileSystem, marks=pytest.mark.needs("tmpfs"))]


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    make: Callable[[Path], AbstractContextManager[FullDisk]] = request.param
    with make(tmp_path) as made:
        yield made


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("disk", DISKS, indirect=True)
def test_on_a_full_disk_publishers_are_told_and_nothing_is_lost(
    disk: FullDisk, ending: ExitStack
) -> None:
    broker = ending.enter_context(Broker(disk.directory / "data", command=disk.command))
    broker.start()
    create_topics(broker.address, TOPICS)
    progress = Progress()
    once, patient = (
        Publisher(name, kind, broker.address, PLACES, random.Random(name), progress)
        for name, kind in (("once", Kind("at_most_once")), ("patient", Kind("exactly_once")))
    )
    ending.callback(once.abandon)
    ending.callback(patient.abandon)

    # It fills up: who does not repeat hears why; who does is not answered.
    assert once.failing.wait(DEADLINE_S)
    told = once.finish()
    assert set(told.failures) == {KafkaError.KAFKA_STORAGE_ERROR}
    acknowledged = progress.count
    assert acknowledged > 0

    # Reads go on; no other change is taken.
    readable = read_back(broker.address, PLACES)
    assert list(lost(told, readable)) == []
    with pytest.raises(KafkaException) as refused:
        create_topics(broker.address, {"swans": 1})
    assert refused.value.args[0].code() == KafkaError.KAFKA_STORAGE_ERROR
    assert progress.count == acknowledged

    # Started again with no room at all, it says so in its last words.
    log = broker.kill()
    assert "Free disk space" in log
    disk.leave_no_room()
    broker.command = disk.command
    broker.launch()
    exit_code, log = broker.wait()
    assert exit_code == 1
    assert log.splitlines()[-1].startswith("quackmq: ") and disk.complaint in log

    # With room all is there, and who waited is answered.
    disk.make_room()
    broker.command = disk.command
    broker.start()
    accounts = [told, patient.finish()]
    found = read_back(broker.address, PLACES)
    assert check(accounts, found, [readable]) == []
    assert progress.count > acknowledged
    exit_code, log = broker.stop()
    assert exit_code == 0, log
