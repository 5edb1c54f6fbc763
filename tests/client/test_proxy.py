"""The clients of the reliable proxy (X1 to X4, X6), against a broker in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import zmq

from quackmq.client.proxy import ReliablePublisher, ReliableSubscriber
from quackmq.errors import (
    ClientClosed,
    IllegalTopicName,
    InvalidRequest,
    NotAllowed,
    QuackTimeout,
    StoreLocked,
    UnknownSubscription,
    UnusableDirectory,
)
from quackmq.model.subscription import RecordPosition, message_id, parse_message_id
from quackmq.protocols.zmq.codec.proxy_language import ids_subscription
from tests.kit.server import DEADLINE_S, Server
from tests.real.broker import Broker

#: Short, where it is the point that nothing comes.
IMPATIENT_S = 0.3
LEASE_MS = "200"
#: For what has to wait until a broker is there again.
LONG_S = DEADLINE_S * 4

pytestmark = pytest.mark.processes

_numbers = count()


@pytest.fixture(scope="module")
def listeners() -> Iterator[dict[str, str]]:
    listening = ("--zmq", "127.0.0.1:0", "--proxy-lease-ms", LEASE_MS)
    with Server("serve", "--store", "memory:", *listening) as server:
        yield server.listeners()


@pytest.fixture
def name() -> str:
    return f"donald-{next(_numbers)}"


@pytest.fixture
def publisher(listeners: dict[str, str]) -> Iterator[ReliablePublisher]:
    with ReliablePublisher(
        listeners["proxy"], f"daisy-{next(_numbers)}", timeout=DEADLINE_S
    ) as made:
        yield made


def subscriber(
    listeners: dict[str, str], name: str, directory: Path | None = None
) -> ReliableSubscriber:
    return ReliableSubscriber(listeners["proxy"], name, directory=directory, timeout=DEADLINE_S)


def texts(receiving: ReliableSubscriber, number: int) -> list[str]:
    return [receiving.get().text for _ in range(number)]


def test_what_is_published_comes_once(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str
) -> None:
    with subscriber(listeners, name) as receiving:
        assert receiving.subscribe(topic) is True
        assert receiving.subscribe(topic) is False
        for number in range(50):
            assert publisher.publish(topic, str(number)) == number
        got = [receiving.get() for _ in range(50)]
        assert sorted(int(message.text) for message in got) == list(range(50))
        assert {message.topic for message in got} == {topic}
        assert sorted(message.offset for message in got) == list(range(50))
        assert len({message.id for message in got}) == 50
        with pytest.raises(QuackTimeout, match="waited 0.3 s for a message"):
            receiving.get(timeout=IMPATIENT_S)


def test_x1_what_a_plain_pub_socket_sends_comes_once(
    listeners: dict[str, str], topic: str, name: str
) -> None:
    with subscriber(listeners, name) as receiving, zmq.Context() as context:
        receiving.subscribe(topic)
        with context.socket(zmq.XPUB) as publishing:
            publishing.linger = 0
            publishing.connect(f"tcp://{listeners['xsub']}")
            assert publishing.poll(DEADLINE_S * 1000)
            for number in range(20):
                publishing.send_multipart([topic.encode(), b"%d" % number])
            got = texts(receiving, 20)
        assert sorted(got, key=int) == [str(number) for number in range(20)]


def test_x3_what_was_published_while_the_subscriber_was_away_comes_when_it_is_back(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str
) -> None:
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
    for number in range(20):
        publisher.publish(topic, str(number))
    with subscriber(listeners, name) as receiving:
        assert receiving.subscribe(topic) is False
        assert sorted(texts(receiving, 20), key=int) == [str(number) for number in range(20)]


def test_without_a_directory_the_last_message_comes_again_to_the_next_process(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str
) -> None:
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
        for content in ("one", "two"):
            publisher.publish(topic, content)
        first, second = receiving.get(), receiving.get()
        receiving.flush()
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
        assert receiving.get() == second
        assert first.id != second.id
        with pytest.raises(QuackTimeout):
            receiving.get(timeout=IMPATIENT_S)


def test_with_a_directory_a_message_is_returned_once_also_if_the_broker_never_hears_of_it(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str, tmp_path: Path
) -> None:
    with subscriber(listeners, name, tmp_path) as receiving:
        receiving.subscribe(topic)
        publisher.publish(topic, "one")
        publisher.publish(topic, "two")
        one = receiving.get(hold=True)
        two = receiving.get(hold=True)
        # As by a process that dies after it has noted it and before it has said so.
        receiving._receiver._acks.clear()
        receiving._receiver._processed.add(*parse_message_id(two.id))
    with subscriber(listeners, name, tmp_path) as receiving:
        receiving.subscribe(topic)
        assert receiving.get() == one
        with pytest.raises(QuackTimeout):
            receiving.get(timeout=1.0)  # several leases


def test_a_message_that_cannot_be_noted_is_got_by_the_next_call(
    listeners: dict[str, str],
    publisher: ReliablePublisher,
    topic: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise UnusableDirectory("the disk is full")

    with subscriber(listeners, name, tmp_path) as receiving:
        receiving.subscribe(topic)
        publisher.publish(topic, "quack")
        with monkeypatch.context() as patch:
            patch.setattr(receiving._receiver._processed, "add", fail)
            with pytest.raises(UnusableDirectory):
                receiving.get()
        assert receiving.get().text == "quack"


def test_a_message_that_is_held_comes_again_unless_it_is_done(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str, tmp_path: Path
) -> None:
    with subscriber(listeners, name, tmp_path) as receiving:
        receiving.subscribe(topic)
        for content in ("kept", "done"):
            publisher.publish(topic, content)
        held = {message.text: message for message in (receiving.get(hold=True) for _ in range(2))}
        receiving.done(held["done"])
        with pytest.raises(QuackTimeout):
            receiving.get(timeout=1.0)  # while it is held, it does not come again
    with subscriber(listeners, name, tmp_path) as receiving:
        receiving.subscribe(topic)
        assert receiving.get() == held["kept"]
        with pytest.raises(QuackTimeout):
            receiving.get(timeout=IMPATIENT_S)


def test_topics_are_left_one_by_one(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str
) -> None:
    other = f"{topic}-other"
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
        receiving.subscribe(other)
        publisher.publish(topic, "to be left")
        receiving.unsubscribe(topic)
        publisher.publish(topic, "unheard")
        publisher.publish(other, "heard")
        assert texts(receiving, 1) == ["heard"]
        with pytest.raises(UnknownSubscription):
            receiving.unsubscribe(topic)
        assert receiving.subscribe(topic) is True
        publisher.publish(topic, "after")
        assert texts(receiving, 1) == ["after"]


def test_x6_a_number_is_published_once(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str
) -> None:
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
        assert publisher.last_number(topic) is None
        for _ in range(2):
            publisher.publish(topic, b"\xff seven", number=7)
        assert publisher.last_number(topic) == 7
        with ReliablePublisher(listeners["proxy"], publisher.name, timeout=DEADLINE_S) as later:
            assert later.publish(topic, "eight") == 8
        got = [receiving.get().content for _ in range(2)]
        assert sorted(got) == [b"eight", b"\xff seven"]
        for number in (-1, 2**63):
            with pytest.raises(InvalidRequest, match="invalid sequence"):
                publisher.publish(topic, "x", number=number)


def test_x4_and_x6_subscriber_and_publisher_go_on_when_the_broker_is_back(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", "--proxy-lease-ms", LEASE_MS, listeners=["zmq"]) as broker:
        broker.start()
        address = broker.addresses["proxy"]
        with (
            ReliableSubscriber(address, "donald", timeout=LONG_S) as receiving,
            ReliablePublisher(address, "daisy", timeout=LONG_S) as publisher,
        ):
            receiving.subscribe("ducks")
            publisher.publish("ducks", "before")
            held = receiving.get(hold=True)
            broker.kill()
            while_away = threading.Thread(target=publisher.publish, args=("ducks", "while away"))
            while_away.start()
            broker.start()
            while_away.join(LONG_S)
            assert not while_away.is_alive()
            assert receiving.get().text == "while away"
            publisher.publish("ducks", "after")
            assert receiving.get().text == "after"
            receiving.done(held)
            with pytest.raises(QuackTimeout):
                receiving.get(timeout=1.0)


def test_a_process_that_is_killed_has_seen_no_message_twice(
    listeners: dict[str, str], publisher: ReliablePublisher, topic: str, name: str, tmp_path: Path
) -> None:
    """X4, the client's side: each life takes some messages and is killed with the last in hand."""
    with subscriber(listeners, name) as receiving:
        receiving.subscribe(topic)
    for number in range(9):
        publisher.publish(topic, str(number))
    program = (
        "import os, sys\n"
        "from quackmq.client.proxy import ReliableSubscriber\n"
        "address, name, directory, topic = sys.argv[1:]\n"
        f"s = ReliableSubscriber(address, name, directory=directory, timeout={DEADLINE_S})\n"
        "s.subscribe(topic)\n"
        "for _ in range(3): os.write(1, s.get().content + b' ')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    seen: list[int] = []
    for _ in range(3):
        words = [sys.executable, "-c", program, listeners["proxy"], name, str(tmp_path), topic]
        life = subprocess.run(words, stdout=subprocess.PIPE, timeout=DEADLINE_S * 2, check=False)
        assert life.returncode == -signal.SIGKILL
        seen += map(int, life.stdout.split())
    assert sorted(seen) == list(range(9))


def test_an_address_that_the_proxy_cannot_reach_is_told(
    listeners: dict[str, str], name: str
) -> None:
    with ReliableSubscriber(
        listeners["proxy"], name, listen="127.0.0.2:0", timeout=DEADLINE_S
    ) as receiving:
        with pytest.raises(NotAllowed, match="is not on the host that says hello"):
            receiving.subscribe("ducks")
    with ReliableSubscriber(
        listeners["proxy"], name, listen="0.0.0.0:0", timeout=DEADLINE_S
    ) as receiving:
        assert receiving.subscribe("any-host") is True


def test_bad_names_and_a_broker_that_is_not_there(name: str) -> None:
    with pytest.raises(InvalidRequest):
        ReliablePublisher("127.0.0.1:1", "two words")
    for address in ("127.0.0.1", "127.0.0.1:", ":5558", "127.0.0.1:quack", "127.0.0.1:99999"):
        with pytest.raises(InvalidRequest, match="not the address of a proxy: write HOST:PORT"):
            ReliableSubscriber(address, name)
    with ReliablePublisher("127.0.0.1:1", name, timeout=IMPATIENT_S) as publisher:
        with pytest.raises(QuackTimeout, match="last_published ducks: waited 0.3 s"):
            publisher.publish("ducks", "x")
        with pytest.raises(
            QuackTimeout, match="outcome is unknown: publish it again with number=7"
        ):
            publisher.publish("ducks", "x", number=7)
        with pytest.raises(InvalidRequest, match="UTF-8"):
            publisher.publish("ducks", "\udc80")
        with pytest.raises(IllegalTopicName):
            publisher.publish("no topic", "x")
    with ReliableSubscriber("127.0.0.1:1", name, timeout=IMPATIENT_S) as receiving:
        with pytest.raises(QuackTimeout, match="hello ducks: waited 0.3 s"):
            receiving.subscribe("ducks")
    with pytest.raises(InvalidRequest, match="closed"):
        receiving.get()
    with pytest.raises(InvalidRequest, match="closed"):
        publisher.publish("ducks", "x")


def test_one_process_uses_a_directory(listeners: dict[str, str], name: str, tmp_path: Path) -> None:
    with subscriber(listeners, name, tmp_path):
        with pytest.raises(StoreLocked):
            subscriber(listeners, name, tmp_path)
    subscriber(listeners, name, tmp_path).close()


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_message_is_not_done_when_the_subscriber_is_closed(
    listeners: dict[str, str],
    publisher: ReliablePublisher,
    topic: str,
    name: str,
    tmp_path: Path,
    has_directory: bool,
) -> None:
    directory = tmp_path if has_directory else None
    with subscriber(listeners, name, directory) as receiving:
        receiving.subscribe(topic)
        publisher.publish(topic, "x")
        message = receiving.get(hold=True)
    with pytest.raises(ClientClosed):
        receiving.done(message)
    with subscriber(listeners, name, directory) as receiving:
        receiving.subscribe(topic)
        assert receiving.get().id == message.id


def test_invalid_messages_from_a_proxy_do_not_end_the_subscriber(name: str) -> None:
    """A proxy of another version, or another program at its port."""
    with zmq.Context() as context, context.socket(zmq.REP) as proxy:
        with context.socket(zmq.XPUB) as publishing:
            proxy.linger = publishing.linger = 0
            port = proxy.bind_to_random_port("tcp://127.0.0.1")
            xpub_port = publishing.bind_to_random_port("tcp://127.0.0.1")
            with ReliableSubscriber(f"127.0.0.1:{port}", name, timeout=DEADLINE_S) as receiving:
                greeting = threading.Thread(target=receiving.subscribe, args=("ducks",))
                greeting.start()
                assert proxy.recv().startswith(b"hello")
                proxy.send(f"ack_welcome {name} ducks new {xpub_port}".encode())
                greeting.join(DEADLINE_S)
                first = ids_subscription("ducks")
                while publishing.recv() != b"\x01" + first:
                    pass
                valid = message_id(uuid.uuid4(), RecordPosition(0, 0))
                for token in (b"nonsense", b"\xff", valid.encode()):
                    publishing.send_multipart([first, b"body", token])
                assert receiving.get().id == valid
                # The answer to an acknowledgement contains an invalid mark.
                with pytest.raises(QuackTimeout, match="waited 0.3 s for a message"):
                    receiving.get(timeout=IMPATIENT_S)
                assert proxy.recv().startswith(b"ack_received")
                proxy.send(f"ack_noted {name} ducks nonsense".encode())
                receiving.flush()


def test_a_wait_ends_when_the_subscriber_is_closed(listeners: dict[str, str], name: str) -> None:
    receiving = subscriber(listeners, name)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            receiving.get(timeout=DEADLINE_S)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    receiving.close()
    waiting.join(DEADLINE_S)
    assert isinstance(errors[0], InvalidRequest)


def test_the_example_prints_each_message_once_however_often_it_is_started(
    listeners: dict[str, str], tmp_path: Path
) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "proxy_client.py"
    words = [sys.executable, str(example), listeners["proxy"]]
    printed: list[str] = []
    wanted = {"quack", "quack quack", "quack quack quack", "that was all"}
    # It does not wait for long: on a busy machine one life may be too short for all of them.
    while not wanted <= set(printed):
        life = subprocess.run(
            words, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S * 2, check=False
        )
        assert life.returncode == 0 or b"QuackTimeout" in life.stderr, life.stderr
        printed += life.stdout.decode().splitlines()
    assert len([line for line in printed if line.startswith("quack")]) == 3
