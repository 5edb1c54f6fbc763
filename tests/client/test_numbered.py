"""Numbered puts: who repeats after its own crash what it is unsure of doubles nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from quackmq import Client, QuackError, QuackTimeout, errors
from quackmq.client import limits as client_limits
from quackmq.client.kafka.numbered import Numbered
from tests.client.conftest import Clients
from tests.client.program import Program
from tests.interop.proxy import Proxy
from tests.real.broker import Broker


def everything(clients: Clients, topic: str, count: int) -> list[str]:
    """What is in the topic, which must be so many and then an end mark of our own."""
    reader = clients("reader")
    reader.subscribe(topic, "beginning")
    clients("end").put(topic, "END")
    found = [message.value for message in islice(reader.listen(topic), count + 1)]
    assert found[-1] == "END"
    return found[:-1]


def test_what_the_broker_has_is_dropped(clients: Clients, topic: str) -> None:
    press = clients("press")
    assert press.last_sequence(topic) is None
    first = press.put(topic, "a", sequence=0)
    assert press.put(topic, "a", sequence=0) == first
    press.put(topic, "b", sequence=5)
    assert press.put(topic, "late", sequence=3) is None
    assert press.last_sequence(topic) == 5
    assert everything(clients, topic, 2) == ["a", "b"]


def test_numbers_are_of_a_name_and_a_topic(clients: Clients, topic: str) -> None:
    for name in ("press", "radio"):
        clients(name).put(topic, name, sequence=1)
        clients(name).put(f"{topic}-2", name, sequence=1)
    assert sorted(everything(clients, topic, 2)) == ["press", "radio"]


def test_many_are_there_all_or_none_and_a_repeat_adds_what_is_missing(
    clients: Clients, topic: str
) -> None:
    press = clients("press")
    ids = press.put_many(topic, list("abc"), sequence=10)
    assert press.last_sequence(topic) == 12
    again = press.put_many(topic, list("abcde"), sequence=10)
    assert again[:2] == [None, None]
    assert again[2] == ids[2]
    assert None not in again[3:]
    assert everything(clients, topic, 5) == list("abcde")


def test_a_topic_made_anew_has_no_numbers_yet(clients: Clients, topic: str) -> None:
    press = clients("press")
    first = press.put(topic, "old", sequence=5)
    press.delete_topic(topic)
    press.create_topic(topic)
    assert press.last_sequence(topic) is None
    second = press.put(topic, "new", sequence=5)
    assert second not in (first, None)
    assert press.put(topic, "new", sequence=5) == second
    assert everything(clients, topic, 1) == ["new"]


def test_numbers_of_a_topic_made_anew_by_somebody_else_are_asked_for_again(
    clients: Clients, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the time for which a client may take a topic for the old one."""
    monkeypatch.setattr(client_limits, "CLIENT_TOPIC_MS", 0)
    press, other = clients("press"), clients("other")
    first = press.put(topic, "old", sequence=5)
    other.delete_topic(topic)
    other.create_topic(topic)
    second = press.put(topic, "new", sequence=3)
    assert second not in (first, None)
    reader = clients("reader")
    reader.subscribe(topic, "beginning")
    message = reader.get(topic)
    assert (message.value, message.id) == ("new", second)


def test_a_put_into_a_topic_made_anew_unnoticed_can_be_repeated(
    clients: Clients, topic: str
) -> None:
    press, other = clients("press"), clients("other")
    press.put(topic, "old", sequence=5)
    other.delete_topic(topic)
    other.create_topic(topic)
    with pytest.raises(QuackError, match="put it again with the same sequence"):
        press.put(topic, "new", sequence=6)
    second = press.put(topic, "new", sequence=6)
    reader = clients("reader")
    reader.subscribe(topic, "beginning")
    message = reader.get(topic)
    assert (message.value, message.id) == ("new", second)


@pytest.mark.processes
def test_a_process_that_begins_again_knows_the_last_number_and_its_id(
    address: str, clients: Clients, tmp_path: Path, topic: str
) -> None:
    with Program(address, f"press-{topic}", directory=str(tmp_path / "press")) as first:
        stored = first.call("put", topic, "a", sequence=7)
    with Program(address, f"press-{topic}", directory=str(tmp_path / "press")) as second:
        assert second.call("last_sequence", topic) == 7
        assert second.call("put", topic, "a", sequence=7) == stored
        second.call("put", topic, "b", sequence=8)
    assert everything(clients, topic, 2) == ["a", "b"]


def test_a_second_process_of_the_name_fences_the_first(clients: Clients, topic: str) -> None:
    first, second = clients("press"), clients("press")
    first.put(topic, "a", sequence=1)
    second.put(topic, "b", sequence=2)
    with pytest.raises(errors.ProducerFenced, match="another process"):
        first.put(topic, "c", sequence=3)
    assert everything(clients, topic, 2) == ["a", "b"]


def test_an_error_of_one_put_takes_it_back_and_the_next_one_goes_on(
    clients: Clients, topic: str
) -> None:
    press = clients("press", serialiser="bytes")
    press.create_topic(topic, batch_bytes=1000)
    press.put(topic, b"a", sequence=1)
    with pytest.raises(errors.RecordTooLarge):
        press.put_many(topic, [b"b", b"x" * 5000], sequence=2)
    assert press.last_sequence(topic) == 1
    press.put(topic, b"c", sequence=2)
    assert everything(clients, topic, 2) == ["a", "c"]


@pytest.mark.parametrize("sequence", [-1, 2**63 - 1])
def test_a_number_that_is_none_is_refused(client: Client, topic: str, sequence: int) -> None:
    with pytest.raises(errors.InvalidRequest, match="sequence"):
        client.put(topic, "a", sequence=sequence)


def test_a_name_too_long_for_its_numbers_is_refused(clients: Clients, topic: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="245"):
        clients("x" * 240).put(topic, "a", sequence=1)


def test_an_outcome_that_is_unknown_is_resolved_by_the_last_number(
    clients: Clients, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit took place and its answer was lost: who puts again is told that it is there."""
    press = clients("press")
    press.put(topic, "a", sequence=1)

    class Deaf:
        """A producer that does not hear the answer to its next commit."""

        def __init__(self, real: object) -> None:
            self._real = real

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def commit_transaction(self, timeout: float) -> None:
            getattr(self._real, "commit_transaction")(timeout)  # noqa: B009
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    numbered = press.session.numbered
    assert isinstance(numbered, Numbered)
    monkeypatch.setattr(numbered, "_producer", Deaf(numbered._producer))
    with pytest.raises(QuackTimeout, match="same sequence"):
        press.put(topic, "b", sequence=2)
    press.put(topic, "b", sequence=2)
    assert everything(clients, topic, 2) == ["a", "b"]


# --- a broker that goes away ---------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data") as broker:
        broker.start()
        yield broker


@pytest.mark.processes
def test_a_put_lasts_through_a_broker_that_is_killed(broker: Broker, tmp_path: Path) -> None:
    """R6: what returned is there, numbered or not, and a client goes on with the next life."""
    options: dict[str, Any] = {"serialiser": "str", "timeout": 30}
    with (
        Client(broker.address, "press", directory=tmp_path / "press", **options) as press,
        Client(broker.address, "billing", directory=tmp_path / "billing", **options) as billing,
    ):
        billing.subscribe("news")
        press.put("news", "a")
        press.put("news", "b", sequence=1)
        assert billing.get("news").value == "a"
        broker.kill()
        broker.start()
        press.put("news", "c")
        press.put("news", "b", sequence=1)
        press.put("news", "d", sequence=2)
        assert [billing.get("news").value for _ in range(3)] == ["b", "c", "d"]


@pytest.mark.processes
def test_a_put_whose_answer_is_lost_is_there_once(broker: Broker, tmp_path: Path) -> None:
    """The answer never leaves, the broker is killed, and librdkafka sends the message again."""
    with Proxy(broker.address) as proxy:
        broker.kill()
        broker.options = ("--advertise", proxy.address)
        broker.start()
        with Client(proxy.address, "press", serialiser="str", timeout=30) as press:
            press.put("news", "a")
            holding = threading.Thread(target=proxy.hold_answers)
            holding.start()
            putting = threading.Thread(target=press.put, args=("news", "b"))
            putting.start()
            holding.join()  # an answer is there and stays with the proxy
            broker.kill()
            broker.start()
            putting.join(40)
            assert not putting.is_alive()
            press.put("news", "c")
        directory = tmp_path / "reader"
        with Client(proxy.address, "reader", serialiser="str", directory=directory) as reader:
            reader.subscribe("news", "beginning", timeout=30)
            got = [message.value for message in islice(reader.listen("news", timeout=30), 3)]
        assert got == ["a", "b", "c"]
