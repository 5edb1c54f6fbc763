"""This broker answers as Apache Kafka does, by what Kafka's answers were recorded to be."""

from __future__ import annotations

import pytest

from quackmq.broker import BrokerSettings
from tests.likeness.asking import Broker
from tests.likeness.cases import CASES
from tests.likeness.recording import answers_of, recorded
from tests.protocols.kafka.client import served


@pytest.mark.parametrize("name", sorted(CASES))
async def test_the_answers_are_those_of_kafka(name: str) -> None:
    async with served(settings=BrokerSettings(group_initial_delay_ms=0)) as running:
        broker = Broker(running.client, name)
        assert await answers_of(broker, CASES[name]) == recorded()[name]


def test_every_case_is_recorded_and_no_other() -> None:
    assert sorted(recorded()) == sorted(CASES)
