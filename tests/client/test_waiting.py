"""How long calls of the Python client wait, for what, and how a wait ends (R5)."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any

import pytest

from quackmq import Client, QuackTimeout, errors
from quackmq.client.consuming.consumer import Reader
from quackmq.client.deadline import Deadline
from tests.client.conftest import Clients


def values(messages: Iterator[Any], count: int) -> list[Any]:
    return [message.value for message in islice(messages, count)]


def test_nothing_to_get_is_a_timeout_that_says_what_it_waited_for(
    client: Client, topic: str
) -> None:
    """R5."""
    client.subscribe(topic)
    with pytest.raises(QuackTimeout, match=rf"0\.5 s (for|to join) .*{topic}"):
        client.get(topic, timeout=0.5)
    client.put(topic, "late")
    assert client.get(topic).value == "late"


def test_a_listen_that_hears_nothing_times_out_and_may_be_repeated(
    client: Client, topic: str
) -> None:
    client.subscribe(topic)
    client.put(topic, "a")
    heard = []
    with pytest.raises(QuackTimeout):
        for message in client.listen(topic, timeout=1):
            heard.append(message.value)
    client.put(topic, "b")
    # On a busy machine it may have heard nothing at all.
    rest = values(client.listen(topic, timeout=math.inf), 2 - len(heard))
    assert [*heard, *rest] == ["a", "b"]


def test_a_listen_waits_for_ever_unless_told_otherwise(clients: Clients, topic: str) -> None:
    """Longer than every other call of the client would."""
    client = clients(timeout=0.2)
    client.subscribe(topic, timeout=20)
    heard = []
    listener = threading.Thread(
        target=lambda: heard.append(next(iter(client.listen(topic))).value), daemon=True
    )
    listener.start()
    for _ in range(3):  # three times as long as the client's own timeout, and more
        listener.join(0.3)
        assert listener.is_alive()
    client.put(topic, "late", timeout=20)
    listener.join(30)
    assert heard == ["late"]


def test_closing_a_client_ends_a_listen_that_waits(clients: Clients, topic: str) -> None:
    client = clients()
    client.subscribe(topic)
    client.put(topic, "a")
    heard: list[str] = []
    first = threading.Event()

    def listen() -> None:
        try:
            for message in client.listen(topic):
                heard.append(message.value)
                first.set()
        except errors.ClientClosed as error:
            heard.append(str(error))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert first.wait(30)
    client.close()
    listener.join(30)
    assert heard == ["a", "the client is closed"]


def test_the_first_call_may_wait_for_ever_too(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put(topic, "a")
    assert client.get(topic, timeout=math.inf).value == "a"


def test_a_broker_that_is_not_there_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5. It is not waited for, unless a timeout is given."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with Client("127.0.0.1:1", "billing") as client:
        said = r"nothing listens at 127\.0\.0\.1:1 \(connection refused\), and nothing was sent"
        for call in (client.get, client.size, client.subscribe, client.last_sequence):
            with pytest.raises(errors.NoBroker, match=said):
                call("news")
        with pytest.raises(errors.NoBroker, match=r"start a broker .*`quackmq serve`.*HOST:PORT"):
            client.put("news", b"rain")
        with pytest.raises(errors.NoBroker, match=said):
            client.topics()
        with pytest.raises(errors.NoBroker, match=said):
            client.listen("news")


def test_a_broker_that_is_not_there_is_waited_for_if_a_timeout_is_given() -> None:
    with Client("127.0.0.1:1", "billing", timeout=0.3) as client:
        with pytest.raises(QuackTimeout, match=r"127\.0\.0\.1:1 after 0\.3 s"):
            client.put("news", b"rain")
    with Client("127.0.0.1:1", "billing") as client:
        with pytest.raises(QuackTimeout, match=r"127\.0\.0\.1:1 after 0\.2 s"):
            client.get("news", timeout=0.2)


def test_of_several_addresses_one_is_enough(address: str, topic: str) -> None:
    with Client(f"127.0.0.1:1, {address}", timeout=20) as client:
        assert client.put(topic, b"rain")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("127.0.0.1:1,[::1]:1", "connection refused"),
        ("PLAINTEXT://127.0.0.1:1", "connection refused"),
        ("nowhere.invalid:9092", "nowhere.invalid: "),
    ],
)
def test_why_no_address_answers_is_told(wrong: str, why: str) -> None:
    with Client(wrong) as client, pytest.raises(errors.NoBroker) as raised:
        client.put("news", b"rain")
    assert f"nothing listens at {wrong} ({why}" in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("9092", r"9092 is not HOST:PORT, as in 127\.0\.0\.1:9092"),
        ("localhost:", "localhost: is not HOST:PORT"),
        ("http://localhost:8002", r"http://localhost:8002 is not HOST:PORT: leave out http://"),
        ("127.0.0.1:9092,http://localhost/", "http://localhost/ is not HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_is_told_of_before_anything_is_asked(
    wrong: str, why: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=why):
        Client(wrong)


def test_what_is_no_broker_is_told_at_once(address: str, topic: str) -> None:
    """Though a timeout is given: it will not become one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        elsewhere = "{}:{}".format(*listening.getsockname())
        answering = threading.Thread(target=_answer_as_http, args=(listening, 2), daemon=True)
        answering.start()
        with Client(elsewhere, timeout=600) as client:
            said = f"the server at {elsewhere} does not speak the Kafka protocol, and nothing was"
            with pytest.raises(errors.NoBroker, match=said):
                client.put(topic, b"rain")
        with Client(f"{elsewhere},{address}", timeout=60) as client:
            client.session.check_reachable(Deadline(60))
        answering.join(60)


def _answer_as_http(listening: socket.socket, times: int) -> None:
    for _ in range(times):
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    "how",
    [{"settings": {"security.protocol": "SASL_SSL"}}, {"address": "SSL://{}"}],
)
def test_a_broker_behind_tls_is_not_asked_in_plain_words(how: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        options = {"address": "{}"} | how
        options["address"] = options["address"].format("{}:{}".format(*listening.getsockname()))
        with Client(**options) as client:
            client.session.check_reachable(Deadline(60))
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(60)
                assert connection.recv(1000) == b""


def test_a_client_can_be_closed_in_the_middle_of_joining(clients: Clients, topic: str) -> None:
    """An assignment that is on its way then once made librdkafka wait for ever."""
    for number, timeout in enumerate((0.15, 0.2, 0.25, 0.27, 0.3, 0.35)):
        client = clients(f"hasty{number}")
        client.subscribe(topic)
        with pytest.raises(QuackTimeout, match=topic):
            client.get(topic, timeout=timeout)
        client.close()


def test_a_client_that_leaves_while_it_joins_is_no_member_any_more(
    clients: Clients, topic: str
) -> None:
    """The group would wait for it for as long as a session lasts: here, longer than `get` does."""
    alerts = f"{topic}-alerts"
    client = clients(session_timeout=120)
    client.subscribe(topic, start="beginning")
    client.subscribe(alerts)
    client.put(topic, "rain")
    for _ in range(3):  # the second and third time one of the client's own readers is a member
        with pytest.raises(QuackTimeout):
            client.get(alerts, timeout=0.02)
        client.unsubscribe(alerts)
        client.subscribe(alerts)
        assert client.get(topic, after=None).value == "rain"
    with pytest.raises(QuackTimeout):
        client.get(alerts, timeout=0.02)
    client.close()
    assert clients().get(topic).value == "rain"


def test_a_get_that_is_too_short_to_join_says_so(clients: Clients, topic: str) -> None:
    said = ""
    for number in range(10):  # on a busy machine it may not even come to joining
        client = clients(f"hasty{number}")
        client.subscribe(topic)
        with pytest.raises(QuackTimeout) as raised:
            client.get(topic, timeout=0.2)
        said = str(raised.value)
        if "join" in said:
            break
    assert said == (
        f"waited 0.2 s to join the readers of topic {topic} as {client.name}: give a longer timeout"
    )


@pytest.mark.parametrize("options", [{}, {"after": None}])
def test_partitions_that_a_client_could_not_begin_with_are_begun_later(
    monkeypatch: pytest.MonkeyPatch, client: Client, topic: str, options: Any
) -> None:
    """The group gives them but once: a reader once waited for ever if the broker was away then."""
    client.create_topic(topic, partitions=3)
    client.subscribe(topic, start="beginning")
    client.put(topic, "rain")
    silent_when(monkeypatch, client, lambda asked: asked in {2, 3})
    assert client.get(topic, **options).value == "rain"


def test_partitions_that_a_client_could_not_begin_with_go_to_who_can(
    monkeypatch: pytest.MonkeyPatch, clients: Clients, topic: str
) -> None:
    client, other = clients(), clients()
    client.create_topic(topic, partitions=3)
    client.subscribe(topic, start="beginning")
    client.put_many(topic, [str(number) for number in range(30)])
    silent_when(monkeypatch, client, lambda asked: asked > 1)
    with pytest.raises(QuackTimeout):
        client.get(topic, timeout=1)
    got: set[str] = set()
    deadline = time.monotonic() + 60
    # It takes part in handing them over though it never got any; and in the end it leaves.
    while not got and time.monotonic() < deadline:
        with pytest.raises(QuackTimeout):
            client.get(topic, timeout=0.2)
        with suppress(QuackTimeout):
            got.add(other.get(topic, timeout=0.2).value)
    client.close()
    while len(got) < 30:
        got.add(other.get(topic).value)


def silent_when(
    monkeypatch: pytest.MonkeyPatch, client: Client, is_silent: Callable[[int], bool]
) -> None:
    """The broker does not say where a client's name stands: by which time it is asked, from 1."""
    cluster, asked = client.session.cluster, count(1)
    answer = cluster.committed

    def committed(*about: Any) -> Any:
        if is_silent(next(asked)):
            raise QuackTimeout("the broker does not answer")
        return answer(*about)

    monkeypatch.setattr(cluster, "committed", committed)


def test_a_topic_whose_reader_cannot_be_closed_leaves_no_other_reader_open(
    clients: Clients, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process would stay a member of the group, and keep its partitions."""
    client = clients()
    topics = [topic, f"{topic}-2", f"{topic}-3"]
    for each in topics:
        client.subscribe(each)
        client.put(each, each)
        assert client.get(each).value == each
    closed: list[str] = []
    really_close = Reader.close

    def close(self: Reader, *arguments: Any, **options: Any) -> None:
        really_close(self, *arguments, **options)
        closed.append(self.topic.name)
        if self.topic.name == topics[1]:
            raise QuackTimeout("planted")

    monkeypatch.setattr(Reader, "close", close)
    with pytest.raises(QuackTimeout, match="planted"):
        client.close()
    assert sorted(closed) == topics


def test_a_client_that_is_closed_says_so(client: Client, topic: str) -> None:
    client.close()
    client.close()
    for call in (client.get, client.size, client.subscribe):
        with pytest.raises(errors.ClientClosed, match="the client is closed"):
            call(topic)
    with pytest.raises(errors.ClientClosed, match="the client is closed"):
        client.put(topic, "rain")
