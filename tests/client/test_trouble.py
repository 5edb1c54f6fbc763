"""An error of a call that got no answer says which address did not answer, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError

from quackmq import AsyncClient, Client, QuackTimeout
from quackmq.client.kafka.connection_errors import ConnectionErrors
from tests.kit.server import Server


class Said(NamedTuple):
    """As librdkafka's error is."""

    words: str
    number: int = KafkaError._TRANSPORT

    def code(self) -> int:
        return self.number

    def str(self) -> str:
        return self.words


def words_of(said: Any, addresses: str = "here:9092, other:9092") -> str:
    trouble = ConnectionErrors(addresses)
    trouble.on_error(said)
    return trouble.suffix()


REFUSED = "Connect to ipv4#10.0.0.9:9092 failed: Connection refused (after 0ms in state CONNECT)"


@pytest.mark.parametrize("place", ["here:9092/bootstrap", "here:9092/1", "ssl://other:9092/2"])
def test_of_an_address_that_the_program_gave_only_the_reason_is_told(place: str) -> None:
    assert words_of(Said(f"{place}: {REFUSED}")) == " (connection refused)"


@pytest.mark.parametrize("place", ["10.0.0.9:9092/1", "sasl_ssl://10.0.0.9:9092/12"])
def test_an_advertised_address_is_named(place: str) -> None:
    told = words_of(Said(f"{place}: {REFUSED}"), "here:9092")
    where = "10.0.0.9:9092, the address that the broker at here:9092 advertises"
    assert told == f" (connection refused at {where})"


def test_other_words_are_told_as_they_are_and_other_errors_not_at_all() -> None:
    assert words_of(Said("No route")) == " (no route)"
    assert words_of(Said("1/1 brokers are down", KafkaError._ALL_BROKERS_DOWN)) == ""


def test_trouble_is_over_when_an_answer_comes() -> None:
    trouble = ConnectionErrors("here:9092")
    said: Any = Said(f"10.0.0.9:9092/1: {REFUSED}")
    trouble.on_error(said)
    trouble.clear()
    assert trouble.suffix() == ""


@pytest.mark.processes
def test_a_broker_that_advertises_an_address_out_of_reach_is_told_of(tmp_path: Path) -> None:
    command = ("serve", "--store", "memory:", "--kafka", "127.0.0.1:0")
    with Server(*command, "--advertise", "127.0.0.1:1") as server:
        address = server.ready()
        said = rf"127\.0\.0\.1:1, the address that the broker at {address} advertises"
        with Client(address, "billing", directory=tmp_path, timeout=2.0) as client:
            for call in (
                lambda: client.put("news", b"rain"),
                lambda: client.put("news", b"rain", sequence=1),
                lambda: client.subscribe("news"),
                lambda: client.topics(),
            ):
                with pytest.raises(QuackTimeout, match=said):
                    call()

        async def put() -> None:
            async with AsyncClient(address, timeout=2.0) as client:
                await client.put("news", b"rain")

        with pytest.raises(QuackTimeout, match=said):
            asyncio.run(put())
