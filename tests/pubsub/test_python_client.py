"""What the torture found in the Python client, each as a test of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quackmq import Client
from quackmq.client.consuming.consumer import Reader
from tests.kit.server import DEADLINE_S
from tests.real.broker import Broker

pytestmark = pytest.mark.processes


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data") as broker:
        broker.start()
        yield broker


@pytest.fixture
def client(broker: Broker, tmp_path: Path) -> Iterator[Client]:
    with Client(
        broker.address, "duck", serialiser="str", timeout=DEADLINE_S, directory=tmp_path / "duck"
    ) as client:
        yield client


def test_a_reader_outlives_its_broker_without_being_fenced_by_itself(
    broker: Broker, client: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """The broker that comes back knows no members: this one joins anew, while what it committed
    before may still be on its way under its old id. librdkafka says nothing of a fatal error."""
    client.subscribe("ducks")
    last_id = None
    for life in range(3):
        for number in range(5):
            client.put("ducks", f"{life}.{number}")
        for number in range(5):
            message = client.get("ducks", after=last_id)
            assert message.value == f"{life}.{number}"
            last_id = message.id
        broker.kill()
        broker.start()
    client.close()
    assert "FATAL" not in capfd.readouterr().err


def test_the_gap_of_a_transactions_marker_is_not_read_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbered puts are transactions, so every second offset is a marker. Named one by one, the
    messages that were fetched are returned, without asking the broker anew for each."""
    went: list[int] = []
    seek = Reader._seek_partition

    def noted_seek(self: Reader, *where: Any) -> None:
        went.append(where[1])
        seek(self, *where)

    monkeypatch.setattr(Reader, "_seek_partition", noted_seek)
    client.subscribe("ducks")
    for number in range(10):
        client.put("ducks", str(number), sequence=number)
    last_id = None
    for number in range(10):
        message = client.get("ducks", after=last_id)
        assert message.value == str(number)
        last_id = message.id
    assert went == []
