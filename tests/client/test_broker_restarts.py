"""A client whose broker is killed and started again: it goes on, and complains of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq import Client
from tests.client.program import Program
from tests.real.broker import Broker

pytestmark = pytest.mark.processes

KILLS = 3


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker") / "data") as running:
        running.start()
        yield running


def test_a_reader_goes_on_after_each_crash_without_a_fatal_error(
    broker: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """librdkafka writes fatal errors to standard error: that a member is fenced, for instance."""
    with Client(
        broker.address, "billing", directory=tmp_path / "billing", serialiser="str", timeout=60.0
    ) as client:
        for topic in ("news", "weather"):
            client.subscribe(topic)
        for life in range(KILLS):
            for topic in ("news", "weather"):
                client.put(topic, f"{life}")
                assert client.get(topic).value == f"{life}"
            broker.kill()
            broker.start()
            for topic in ("news", "weather"):
                client.put(topic, f"{life} again")
                assert client.get(topic).value == f"{life} again"
    said = capfd.readouterr().err
    assert "FATAL" not in said
    assert "fenced" not in said


def test_a_program_outlives_calls_that_time_out_while_its_broker_is_away(
    broker: Broker, tmp_path: Path
) -> None:
    """A request to a group's coordinator that times out in librdkafka would end the process when
    the broker is back."""
    with Program(broker.address, "audit", directory=str(tmp_path / "audit")) as program:
        assert program.call("subscribe", "reports") is True
        broker.kill()
        for _ in range(2):
            assert program.call("subscribe", "reports", timeout=1.0) == "QuackTimeout"
            assert program.call("subscriptions", timeout=1.0) == "QuackTimeout"
        broker.start()
        assert program.call("subscribe", "reports") is False
        program.call("put", "reports", "here")
        assert program.call("get", "reports") == "here"
