"""Clients by different hands in one group."""

from __future__ import annotations

import sys

import pytest

from tests.interop import scenarios
from tests.interop.programs import Client

pytestmark = pytest.mark.processes


def test_members_of_different_clients_share_a_topic() -> None:
    scenarios.members_come_and_go(
        *[
            Client(sys.executable, "-m", f"tests.interop.python.{name}_program")
            for name in ("aiokafka", "confluent", "kafka_python")
        ]
    )
