"""The client of the ZeroMQ listener (R1 to R6), against a broker in a process of its own."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from confluent_kafka import Producer

from quackmq.client.files import durable
from quackmq.client.proxy import ReliablePublisher, ReliableSubscriber
from quackmq.client.zeromq.last_ids import LastIds
from quackmq.client.zmq import BEFORE_THE_FIRST, ZmqClient
from quackmq.errors import (
    ClientClosed,
    IllegalTopicName,
    InvalidMessageId,
    InvalidRequest,
    ProtocolError,
    QuackError,
    QuackTimeout,
    StoreLocked,
    UnknownSubscription,
    UnusableDirectory,
)
from tests.kit.server import DEADLINE_S, Server
from tests.kit.waiting import wait_until

#: Short, where it is the point that nothing comes.
IMPATIENT_S = 0.3


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server("serve", "--store", "memory:", "--zmq", "127.0.0.1:0") as server:
        yield server.listeners()["zmq"]


@pytest.fixture
def client(address: str) -> Iterator[ZmqClient]:
    with ZmqClient(address, "donald") as client:
        yield client


def test_r1_what_is_put_is_got_by_who_subscribed(client: ZmqClient, topic: str) -> None:
    assert client.subscribe(topic) is True
    assert client.subscribe(topic) is False
    client.put(topic, "quack quack\n")
    client.put(topic, "grün".encode())
    client.put(topic, "")
    messages = [client.get(topic) for _ in range(3)]
    assert [message.text for message in messages] == ["quack quack\n", "grün", ""]
    assert {message.topic for message in messages} == {topic}
    client.unsubscribe(topic)
    with pytest.raises(UnknownSubscription):
        client.get(topic)


def test_an_id_that_names_no_message_gets_the_head_again_r2(client: ZmqClient, topic: str) -> None:
    client.subscribe(topic)
    client.put(topic, "one")
    client.put(topic, "two")
    for after in ("nonsense", "A" * 39, None):
        assert client.get(topic, after=after).text == "one"


def test_errors_are_those_of_the_one_tree(client: ZmqClient, topic: str) -> None:
    with pytest.raises(UnknownSubscription, match="has not subscribed"):
        client.put(topic, "x")
        client.get(topic)
    with pytest.raises(IllegalTopicName):
        client.put("no topic", "x")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        client.put(topic, b"\xff")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        client.put(topic, "\ud800")
    for sequence in (-1, 2**63):
        with pytest.raises(InvalidRequest, match="invalid sequence"):
            client.put(topic, "x", sequence=sequence)
    for after in ("", "two words", "\udc80", "a\n"):
        with pytest.raises(InvalidMessageId, match="is not a message id"):
            client.get(topic, after=after)
    with pytest.raises(InvalidRequest):
        ZmqClient("127.0.0.1:1", "two words")
    with ZmqClient("nonsense", "donald") as lost, pytest.raises(InvalidRequest, match="nonsense"):
        lost.put(topic, "x")


def test_a_closed_client_says_so(address: str, topic: str) -> None:
    client = ZmqClient(address, "donald")
    client.put(topic, "x")
    client.close()
    client.close()
    with pytest.raises(InvalidRequest, match="closed"):
        client.put(topic, "x")


# --- getting ---------------------------------------------------------------------------------


def test_r2_with_a_directory_no_message_is_returned_twice_whoever_crashes(
    address: str, topic: str, tmp_path: Path
) -> None:
    with ZmqClient(address, "donald", directory=tmp_path) as client:
        client.subscribe(topic)
        for number in range(6):
            client.put(topic, str(number))
    got = []
    for _ in range(3):  # each time as if the one before had crashed with a message in hand
        with ZmqClient(address, "donald", directory=tmp_path) as client:
            got += [client.get(topic).text, client.get(topic).text]
    assert got == ["0", "1", "2", "3", "4", "5"]


def test_without_a_directory_the_message_in_hand_comes_again(address: str, topic: str) -> None:
    with ZmqClient(address, "donald") as client:
        client.subscribe(topic)
        client.put(topic, "one")
        client.put(topic, "two")
        assert client.get(topic).text == "one"
    with ZmqClient(address, "donald") as client:
        assert client.get(topic).text == "one"
        assert client.get(topic).text == "two"


def test_r2_a_program_may_keep_the_id_in_its_own_store(client: ZmqClient, topic: str) -> None:
    client.subscribe(topic)
    client.put(topic, "one")
    client.put(topic, "two")
    first = client.get(topic, after=BEFORE_THE_FIRST)
    assert client.get(topic, after=BEFORE_THE_FIRST) == first, "its result was not stored"
    assert client.get(topic, after=first.id).text == "two"


def test_who_subscribes_anew_begins_anew(address: str, topic: str, tmp_path: Path) -> None:
    with ZmqClient(address, "donald", directory=tmp_path) as client:
        client.subscribe(topic)
        client.put(topic, "one")
        assert client.get(topic).text == "one"
        client.unsubscribe(topic)
        assert not list(tmp_path.rglob("*.id"))
        client.put(topic, "missed")
        client.subscribe(topic)
        client.put(topic, "two")
        assert client.get(topic).text == "two"


def test_m6_get_waits_for_a_message(address: str, client: ZmqClient, topic: str) -> None:
    client.subscribe(topic)
    texts: list[str] = []
    waiting = threading.Thread(
        target=lambda: texts.append(client.get(topic, timeout=DEADLINE_S).text)
    )
    waiting.start()
    with ZmqClient(address, "daisy") as daisy:
        daisy.put(topic, "quack")
    waiting.join(DEADLINE_S)
    assert texts == ["quack"]


# --- R5: nothing waits for ever --------------------------------------------------------------


def test_r5_get_says_what_it_waited_for(client: ZmqClient, topic: str) -> None:
    client.subscribe(topic)
    with pytest.raises(QuackTimeout, match=f"GET {topic}: waited 0.3 s for a message, for donald"):
        client.get(topic, timeout=IMPATIENT_S)
    client.put(topic, "quack")
    assert client.get(topic).text == "quack"


def test_r5_a_broker_that_is_not_there_is_not_waited_for_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with ZmqClient(f"tcp://127.0.0.1:{port}", "donald", timeout=IMPATIENT_S) as client:
            with pytest.raises(QuackTimeout, match="its outcome is unknown$"):
                client.put("ducks", "quack")
            with pytest.raises(QuackTimeout, match="put it again with the same sequence"):
                client.put("ducks", "quack", sequence=1)
            with pytest.raises(QuackTimeout, match="SUB ducks"):
                client.subscribe("ducks")


def test_r5_a_call_does_not_wait_longer_than_its_timeout_for_one_in_another_thread(
    address: str, topic: str
) -> None:
    client = ZmqClient(address, "donald", timeout=IMPATIENT_S)
    client.subscribe(topic)
    errors: list[QuackError] = []
    is_waiting = threading.Event()

    def get() -> None:
        is_waiting.set()
        try:
            client.get(topic, timeout=math.inf)
        except QuackError as error:
            errors.append(error)

    waiting = threading.Thread(target=get)
    waiting.start()
    assert is_waiting.wait(DEADLINE_S)
    wait_until(client._lock.locked)
    with pytest.raises(QuackTimeout, match="waited 0.3 s for another call of donald to end"):
        client.put(topic, "quack")
    with pytest.raises(QuackTimeout, match="waited 0.1 s for another call"):
        client.get(topic, timeout=0.1)
    client.close()
    waiting.join(DEADLINE_S)
    assert [type(error) for error in errors] == [ClientClosed], "closing ends the wait"


@pytest.mark.parametrize("timeout", [-1, math.nan, "5", True])
def test_a_timeout_that_is_none_is_refused(client: ZmqClient, topic: str, timeout: Any) -> None:
    for refused in (
        lambda: ZmqClient("127.0.0.1:1", "donald", timeout=timeout),
        lambda: ReliablePublisher("127.0.0.1:1", "donald", timeout=timeout),
        lambda: ReliableSubscriber("127.0.0.1:1", "donald", timeout=timeout),
        lambda: client.get(topic, timeout=timeout),
    ):
        with pytest.raises(InvalidRequest, match="a timeout is a number of seconds"):
            refused()


def test_a_late_answer_is_not_taken_for_that_of_another_request() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0

    def answer_the_put() -> None:
        while b"PUT" not in (frames := router.recv_multipart())[-1]:
            continue
        router.send_multipart(frames)

    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with ZmqClient(f"127.0.0.1:{port}", "donald", timeout=DEADLINE_S) as client:
            while not router.poll(int(IMPATIENT_S * 1000)):  # until one has gone out in time
                with pytest.raises(QuackTimeout):
                    client.get("ducks", timeout=IMPATIENT_S)
            router.send_multipart(router.recv_multipart())
            answering = threading.Thread(target=answer_the_put)
            answering.start()
            client.put("ducks", "second")
            answering.join(DEADLINE_S)
    finally:
        context.destroy(linger=0)


def test_an_answer_that_makes_no_sense_is_an_error() -> None:
    context = zmq.Context()
    reply = context.socket(zmq.REP)
    try:
        port = reply.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            for frames in ([b"nonsense"], [b"PUT donald ducks x", b"more"]):
                reply.recv()
                reply.send_multipart(frames)

        answering = threading.Thread(target=answer)
        answering.start()
        with ZmqClient(f"127.0.0.1:{port}", "donald") as client:
            for _ in range(2):
                with pytest.raises(ProtocolError):
                    client.put("ducks", "x")
        answering.join(DEADLINE_S)
    finally:
        context.destroy(linger=0)


# --- R6: crashes -----------------------------------------------------------------------------


@pytest.mark.processes
def test_r6_what_was_acknowledged_survives_the_brokers_crash(tmp_path: Path) -> None:
    data, ids = tmp_path / "data", tmp_path / "ids"
    got: list[str] = []
    held: int | None = None
    for life in range(2):
        with Server("serve", "--data", data, "--zmq", "127.0.0.1:0") as server:
            address = server.listeners()["zmq"]
            with (
                ZmqClient(address, "donald", directory=ids, timeout=DEADLINE_S) as donald,
                ZmqClient(address, "daisy", timeout=DEADLINE_S) as daisy,
            ):
                assert donald.subscribe("ducks") is (life == 0)
                assert daisy.last_sequence("ducks") == held
                for number in range(life * 10, life * 10 + 10):
                    for _ in range(2):  # as after an answer that was lost
                        daisy.put("ducks", str(number), sequence=number)
                    held = number
                got += [donald.get("ducks").text for _ in range(7)]
                server.send(signal.SIGKILL)
                server.exit_code()
    assert got == [str(number) for number in range(14)]


@pytest.mark.processes
def test_what_a_kafka_client_produces_is_got_as_it_is(topic: str) -> None:
    """All listeners are one broker; bytes that are no text come as they are."""
    listeners = ("--kafka", "127.0.0.1:0", "--zmq", "[::1]:0")
    with Server("serve", "--store", "memory:", *listeners) as server:
        addresses = server.listeners()
        assert addresses["zmq"].startswith("[::1]:")
        with ZmqClient(addresses["zmq"], "donald") as client:
            client.subscribe(topic)
            producer = Producer({"bootstrap.servers": addresses["kafka"]})
            for value in (b"\xff\x00", None, "grün".encode()):
                producer.produce(topic, value)
            assert producer.flush(DEADLINE_S) == 0
            messages = [client.get(topic) for _ in range(3)]
        assert [message.content for message in messages] == [b"\xff\x00", b"", "grün".encode()]
        assert messages[2].text == "grün"
        with pytest.raises(UnicodeDecodeError):
            _ = messages[0].text
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


# --- last ids on disk ------------------------------------------------------------------------


def test_an_id_on_disk_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever step of storing fails, the file is whole."""
    steps = {"write": os, "sync_data": durable, "replace": Path}
    for step, target in steps.items():
        directory = tmp_path / step
        ids = LastIds(directory, "donald")
        ids.put("ducks", "old")
        with monkeypatch.context() as patch:
            patch.setattr(target, step, fail)
            with pytest.raises(UnusableDirectory, match="no space"):
                ids.put("ducks", "new")
        assert ids.get("ducks") == "old"
        ids.close()
        again = LastIds(directory, "donald")
        assert again.get("ducks") == "old"
        again.put("ducks", "new")
        again.close()
        third = LastIds(directory, "donald")
        assert third.get("ducks") == "new"
        third.close()


def fail(*arguments: object, **more: object) -> None:
    raise OSError(28, "no space")


def test_an_id_on_disk_is_the_old_one_when_there_are_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened after the rename, so that no lack of descriptors can fail there."""
    ids = LastIds(tmp_path, "donald")
    ids.put("ducks", "old")
    really_open, opened = os.open, 0
    for allowed in range(2):
        opened = 0

        def open_few(*arguments: Any, allowed: int = allowed, **more: Any) -> int:
            nonlocal opened
            opened += 1
            if opened > allowed:
                raise OSError(errno.EMFILE, "too many open files")
            return really_open(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_few)
            with pytest.raises(UnusableDirectory, match="too many open files"):
                ids.put("ducks", "new")
        assert (tmp_path / "donald" / "ducks.id").read_text() == "old\n"
    ids.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\xff\xfe", b"\0" * 20, None],
    ids=["empty", "line", "utf", "zeros", "dir"],
)
def test_an_id_that_cannot_be_read_is_named_and_the_directory_is_free_again(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "donald" / "ducks.id"
    file.parent.mkdir()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    problem = "donald: Is a directory" if content is None else "ducks.id is damaged.*remove it"
    with pytest.raises(UnusableDirectory, match=problem):
        ZmqClient("127.0.0.1:1", "donald", directory=tmp_path)
    if content is None:
        file.rmdir()
    else:
        file.unlink()
    ZmqClient("127.0.0.1:1", "donald", directory=tmp_path).close()


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(UnusableDirectory, match="No locks available"):
            ZmqClient("127.0.0.1:1", "donald", directory=tmp_path)
    ZmqClient("127.0.0.1:1", "donald", directory=tmp_path).close()


def test_clients_names_and_topics_of_any_kind_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["donald", "../donald", "donald/daisy", ".", "..", "dönald", "d" * 255, "e" * 255]
    topics = ["ducks", ".ducks", "ducks.id", ".ducks.id", "new", "lock", "d" * 249]
    for name in names:
        ids = LastIds(tmp_path / "ids", name)
        for topic in topics:
            assert ids.get(topic) is None
            ids.put(topic, f"{name} {topic}")
        ids.close()
    for name in names:
        ids = LastIds(tmp_path / "ids", name)
        assert [ids.get(topic) for topic in topics] == [f"{name} {topic}" for topic in topics]
        ids.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_two_processes_do_not_share_a_name_and_a_directory(tmp_path: Path) -> None:
    first = ZmqClient("127.0.0.1:1", "donald", directory=tmp_path)
    with pytest.raises(StoreLocked, match="only one process at a time"):
        ZmqClient("127.0.0.1:1", "donald", directory=tmp_path)
    ZmqClient("127.0.0.1:1", "daisy", directory=tmp_path).close()
    first.close()
    ZmqClient("127.0.0.1:1", "donald", directory=tmp_path).close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableDirectory, match="file"):
        ZmqClient("127.0.0.1:1", "donald", directory=tmp_path / "file")


# --- the example -----------------------------------------------------------------------------


@pytest.mark.processes
def test_m12_the_example_does_what_it_says(tmp_path: Path) -> None:
    with Server("serve", "--store", "memory:", "--zmq", "127.0.0.1:0") as server:
        address = server.listeners()["zmq"]
        printed = example(tmp_path, address)
        # It does not wait for long: on a busy machine one life may be too short for all of them.
        while "quack quack quack" not in printed:
            printed += example(tmp_path, address)
        words = [line for line in printed if line.startswith("quack")]
        assert words == ["quack", "quack quack", "quack quack quack"]
        while not (printed := example(tmp_path, address, "--unsubscribe")):
            continue
        assert printed == ["that was all"]


def example(directory: Path, *arguments: str) -> list[str]:
    """What it prints, in a life that may end by a timeout."""
    program = Path(__file__).resolve().parents[2] / "examples" / "zmq_client.py"
    run = subprocess.run(
        [sys.executable, program, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )
    assert run.returncode == 0 or "QuackTimeout" in run.stderr, run.stderr
    return run.stdout.splitlines()


def test_every_error_is_a_quack_error(client: ZmqClient) -> None:
    with pytest.raises(QuackError):
        client.unsubscribe("never-there")


def test_an_id_that_cannot_be_kept_is_an_error_of_ours_and_its_message_comes_again(
    address: str, topic: str, tmp_path: Path
) -> None:
    with ZmqClient(address, "keeper", directory=tmp_path) as client:
        client.subscribe(topic)
        client.put(topic, "one")
        (tmp_path / "keeper" / "new").mkdir()
        with pytest.raises(UnusableDirectory):
            client.get(topic)
        (tmp_path / "keeper" / "new").rmdir()
        assert client.get(topic).text == "one"
