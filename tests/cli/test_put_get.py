"""`quackmq put` and `quackmq get`: messages in and out by hand, as a shell runs them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from quackmq import Client
from quackmq.cli import get as getting
from quackmq.cli import put as putting
from quackmq.cli.main import main
from quackmq.client import limits as client_limits
from quackmq.client.consuming.browse import Browser
from quackmq.errors import QuackTimeout, RecordTooLarge, UnknownTopic
from tests.kit.server import AS_ON_A_TERMINAL, DEADLINE_S, SCRIPT, Server

_numbers = count(1)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Server("serve", "--store", "memory:", "--kafka", "127.0.0.1:0") as server:
        yield server.ready()


@pytest.fixture
def topic() -> str:
    return f"typed-{next(_numbers)}"


def run(
    command: str,
    topic: str,
    address: str,
    *options: object,
    stdin: bytes = b"",
    home: Path | None = None,
    says: str = "",
) -> bytes:
    """What it prints, when it has ended well; `says` is what it tells on stderr."""
    arguments = [command, topic, "--broker", address, "--timeout", DEADLINE_S, *options]
    result = subprocess.run(
        [*SCRIPT, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=3 * DEADLINE_S,
        env={"HOME": str(home or "/nonexistent")},
        check=False,
    )
    assert (result.returncode, result.stderr.decode()) == (0, says)
    return result.stdout


@pytest.mark.processes
def test_x5_messages_are_put_and_got_by_hand(address: str, topic: str) -> None:
    said = run("put", topic, address, "quack", "two words", "ünïcode")
    assert said == f"3 messages put into {topic}\n".encode()
    got = run("get", topic, address, "--count", 3)
    assert got.decode() == "quack\ntwo words\nünïcode\n"


@pytest.mark.processes
def test_options_may_stand_anywhere(address: str, topic: str) -> None:
    options = ["--broker", address, "--timeout", str(DEADLINE_S)]
    for arguments in (
        ["--key", "k", topic, "a"],
        [topic, "--key", "k", "a"],
        [topic, "a", "--ids"],
    ):
        assert main(["put", *arguments, *options]) == 0
    assert run("get", topic, address, "--count", 3) == b"a\na\na\n"


@pytest.mark.processes
def test_each_line_of_stdin_is_a_message(address: str, topic: str) -> None:
    said = run("put", topic, address, stdin=b"one\n\nthree\r\n\xff\xfe\nno newline")
    assert said == f"5 messages put into {topic}\n".encode()
    got = run("get", topic, address, "--count", 5)
    assert got == b"one\n\nthree\n\xff\xfe\nno newline\n", "bytes stay as they are"


@pytest.mark.processes
def test_a_message_that_is_got_as_json_has_all_that_belongs_to_it(address: str, topic: str) -> None:
    ids = run("put", topic, address, "-", "--key", "k", "--header", "a=1=2", "--ids", stdin=b"\xff")
    (line,) = run("get", topic, address, "--count", 1, "--json").splitlines()
    message = json.loads(line)
    assert message.pop("timestamp").endswith("Z")
    assert message == {
        "id": ids.decode().strip(),
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "key": "k",
        "headers": {"a": "1=2"},
        "value": {"base64": "/w=="},
    }


@pytest.mark.processes
def test_under_a_name_the_next_get_goes_on(address: str, topic: str, tmp_path: Path) -> None:
    run("put", topic, address, "one", "two", "three")
    named = ("--name", f"reader-{topic}", "--from", "beginning")
    says = f"quackmq: reader-{topic} is subscribed to {topic}, starting at its beginning\n"
    first = run("get", topic, address, *named, "--count", 2, home=tmp_path, says=says)
    assert first == b"one\ntwo\n"
    assert run("get", topic, address, *named, "--count", 1, home=tmp_path) == b"three\n"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_without_a_name_nothing_is_left_behind(
    address: str, topic: str, number: signal.Signals
) -> None:
    """Whatever ends it: it never subscribes."""
    admin = AdminClient({"bootstrap.servers": address})
    with Client(address, timeout=DEADLINE_S) as client:
        client.put(topic, b"one")
    before = groups(admin)
    arguments = ["get", topic, "--broker", address, "--timeout", str(DEADLINE_S), "--follow"]
    with Server(*arguments) as following:
        assert following.line() == "one\n"
        with Client(address, timeout=DEADLINE_S) as client:
            client.put(topic, b"two")
        assert following.line() == "two\n"
        following.send(number)
        assert following.exit_code() == (-number if number == signal.SIGKILL else 0)
        assert following.errors() == ""
    assert groups(admin) == before


@pytest.mark.parametrize(
    ("is_putting", "rest"), [(False, ""), (True, ", 1 message sent and perhaps stored")]
)
def test_a_put_that_is_interrupted_prints_how_many_messages_were_acknowledged(
    is_putting: bool,
    rest: str,
    address: str,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C comes while the command waits for more lines, or for the broker."""
    put_many = Client.put_many

    def put_or_stop(client: Client, topic: str, messages: list[bytes], **options: Any) -> Any:
        if messages == [b"three"]:
            raise KeyboardInterrupt
        return put_many(client, topic, messages, **options)

    def batches(_: list[str]) -> Iterator[list[bytes]]:
        yield [b"one", b"two"]
        if is_putting:
            yield [b"three"]
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "put_many", put_or_stop)
    monkeypatch.setattr(putting, "_message_batches", batches)
    assert main(["put", topic, "--broker", address, "--timeout", str(DEADLINE_S)]) == 130
    assert capsys.readouterr() == ("", f"quackmq: interrupted: 2 messages acknowledged{rest}\n")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_count_that_a_signal_cuts_short_is_no_success(
    address: str, topic: str, number: signal.Signals
) -> None:
    with Client(address, timeout=DEADLINE_S) as client:
        client.put(topic, b"one")
    arguments = ["get", topic, "--broker", address, "--timeout", str(DEADLINE_S), "--count", "2"]
    with Server(*arguments, command=[*AS_ON_A_TERMINAL, *SCRIPT]) as getting_two:
        assert getting_two.line() == "one\n"
        getting_two.send(number)
        assert getting_two.exit_code() == 128 + number


def test_a_broker_that_is_away_is_waited_for_by_whoever_follows(
    address: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partitions are not known for a while, and messages come afterwards."""
    monkeypatch.setattr(client_limits, "CLIENT_TOPIC_MS", 1)
    with Client(address, timeout=DEADLINE_S) as client:
        client.create_topic(topic)
        with Browser(client, topic, "beginning") as browser:
            silences = []

            def silent(*_: Any, **__: Any) -> Any:
                silences.append(True)
                if len(silences) == 1:
                    with Client(address, timeout=DEADLINE_S) as another:
                        another.put(topic, b"late")
                raise QuackTimeout("no answer")

            monkeypatch.setattr(client.session.cluster, "topic", silent)
            assert browser.get(math.inf).value == b"late"
            assert silences


def test_a_follow_that_cannot_go_on_is_no_success(
    address: str, topic: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(*_: Any) -> Any:
        raise QuackTimeout("waited 5 s for something")

    monkeypatch.setattr(Browser, "get", silent)
    options = ["--broker", address, "--timeout", str(DEADLINE_S)]
    assert main(["get", topic, "--follow", *options]) == 1
    assert capsys.readouterr().err == "quackmq: waited 5 s for something\n"


def test_a_topic_that_a_subscription_creates_is_told_as_new(
    address: str,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(getting._MessagePrinter, "run", lambda *_: None)
    get = ["get", topic, "--broker", address, "--timeout", str(DEADLINE_S), "--name"]
    assert main([*get, f"ann-{topic}"]) == 0
    assert capsys.readouterr().err == (
        f"quackmq: topic {topic} was created, and ann-{topic} is subscribed to it\n"
    )
    assert main([*get, f"eve-{topic}"]) == 0
    assert capsys.readouterr().err == (
        f"quackmq: eve-{topic} is subscribed to {topic}, starting at its end\n"
    )
    assert main([*get, f"eve-{topic}"]) == 0
    assert capsys.readouterr().err == ""


def groups(admin: AdminClient) -> set[str]:
    found: Any = admin.list_consumer_groups(request_timeout=DEADLINE_S).result()
    return {each.group_id for each in found.valid}


def test_partitions_that_are_added_are_followed_too(
    address: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_limits, "CLIENT_TOPIC_MS", 1)
    with Client(address, timeout=DEADLINE_S) as client:
        client.create_topic(topic, partitions=1)
        with Browser(client, topic, "beginning") as browser:
            client.put(topic, b"one")
            assert browser.get(DEADLINE_S).value == b"one"
            admin = AdminClient({"bootstrap.servers": address})
            admin.create_partitions([NewPartitions(topic, 2)])[topic].result()
            producer = Producer({"bootstrap.servers": address})
            producer.produce(topic, b"two", partition=1)
            producer.flush(DEADLINE_S)
            assert browser.get(DEADLINE_S).value == b"two"


def test_a_topic_that_goes_while_it_is_looked_at_is_named(address: str, topic: str) -> None:
    with Client(address, timeout=DEADLINE_S) as client:
        client.put(topic, b"one")
        with Browser(client, topic, "beginning") as browser:
            assert browser.get(DEADLINE_S).value == b"one"
            client.delete_topic(topic)
            with pytest.raises(UnknownTopic, match=topic):
                browser.get(DEADLINE_S)


@pytest.mark.processes
def test_a_message_that_a_closed_pipe_did_not_take_comes_again(
    address: str, topic: str, tmp_path: Path
) -> None:
    with Client(address, timeout=DEADLINE_S) as client:
        client.put_many(topic, [b"one", b"two"])
    named = ["--name", f"reader-{topic}", "--from", "beginning"]
    command = [*SCRIPT, "get", topic, "--broker", address, "--timeout", str(DEADLINE_S), *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"HOME": str(tmp_path)}) as process:
        assert process.stdout is not None
        process.stdout.close()
        try:
            assert process.wait(2 * DEADLINE_S) == 141
        finally:
            process.kill()
    assert run("get", topic, address, *named, "--count", 2, home=tmp_path) == b"one\ntwo\n"


def test_a_terminal_that_is_closed_ends_it_once_and_what_is_left_is_done_in_peace() -> None:
    """The kernel tells it, and so does the shell: the second time must not end the good order."""
    numbers = (signal.SIGHUP, signal.SIGTERM)
    heard: list[int] = []
    before = {each: signal.signal(each, lambda each, _: heard.append(each)) for each in numbers}
    try:
        with pytest.raises(KeyboardInterrupt), getting._signals_as_interrupt():
            try:
                signal.raise_signal(signal.SIGHUP)
            finally:
                for each in numbers:
                    signal.raise_signal(each)
        assert heard == []
        signal.raise_signal(signal.SIGHUP)
        assert heard == [signal.SIGHUP], "as it was before"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_name_that_is_empty_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a look at the broker: it would be a subscription that nobody can name."""
    assert main(["get", "ducks", "--name", "", "--broker", "127.0.0.1:1"]) == 2
    assert "a subscription name must have 1 to 255 bytes" in capsys.readouterr().err


@pytest.mark.processes
def test_a_reader_that_has_enough_ends_it_quietly(address: str, topic: str) -> None:
    run("put", topic, address, "one", "two")
    command = [*SCRIPT, "get", topic, "--broker", address, "--timeout", str(DEADLINE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        try:
            assert process.wait(2 * DEADLINE_S) == 141
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_fewer_than_were_asked_for_is_exit_code_1(
    address: str, topic: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["put", topic, "one", "--broker", address, "--timeout", "30"]) == 0
    options = ["--broker", address, "--timeout", "2", "--count", "2"]
    exit_code = main(["get", topic, *options])
    captured = capsysbinary.readouterr()
    assert exit_code == 1
    assert captured.err == b"quackmq: only 1 of 2 messages arrived: no more within 2 s\n"


def test_a_name_that_no_topic_can_have_is_told_so(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["put", "a pond", "one", "--broker", address, "--timeout", "30"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quackmq: 'a pond' is not a topic name: use 1 to 249 of the characters")


def test_a_policy_that_refuses_a_message_is_told_as_one(
    address: str, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(address, timeout=DEADLINE_S) as client:
        client.create_topic(topic, needs_subscriber=True)
    assert main(["put", topic, "one", "--broker", address, "--timeout", "30"]) == 1
    assert capsys.readouterr().err == (
        f"quackmq: topic {topic} refuses the message: it has no subscriber (needs_subscriber is "
        "true)\n"
    )


def test_a_broker_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["put", "ducks", "quack"], ["get", "ducks"], ["get", "ducks", "--name", "x"]):
        assert main([*command, "--broker", "127.0.0.1:1"]) == 1
        assert capsys.readouterr().err.startswith(
            "quackmq: nothing listens at 127.0.0.1:1 (connection refused), and nothing was sent: "
        )


def test_a_topic_that_is_not_there_is_not_made_by_looking_at_it(
    address: str, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--broker", address, "--timeout", str(DEADLINE_S)]
    assert main(["put", topic, "one", *options]) == 0
    capsys.readouterr()
    assert main(["get", f"{topic}x", *options]) == 1
    assert capsys.readouterr().err == (
        f"quackmq: there is no topic {topic}x: did you mean {topic!r}?\n"
    )
    with Client(address, timeout=DEADLINE_S) as client:
        assert f"{topic}x" not in client.topics()


def test_lines_come_as_they_are_there() -> None:
    read_fd, write_fd = os.pipe()
    try:
        found = putting.read_lines(read_fd)
        os.write(write_fd, b"one\ntwo\nthr")
        assert next(found) == [b"one", b"two"]
        os.write(write_fd, b"ee\n")
        assert next(found) == [b"three"]
        os.write(write_fd, b"last")
        os.close(write_fd)
        write_fd = -1
        assert list(found) == [[b"last"]]
    finally:
        os.close(read_fd)
        if write_fd >= 0:
            os.close(write_fd)


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quackmq.limits.BATCH_BYTES", 10)
    file = tmp_path / "endless"
    file.write_bytes(b"." * 100)
    with file.open("rb") as stream, pytest.raises(RecordTooLarge, match="more than 10 bytes"):
        list(putting.read_lines(stream.fileno()))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["put"], "the following arguments are required: TOPIC (see"),
        (["put", "ducks", "quack", "--header", "no"], "--header: 'no' is not NAME=VALUE"),
        (["put", "ducks", "quack", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["get", "ducks", "--count", "0"], "--count: '0' is not a number greater than 0"),
        (["get", "ducks", "--count", "1", "--follow"], "not allowed with argument --count"),
    ],
)
def test_a_slip_is_one_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = main([*arguments, "--broker", "127.0.0.1:1"])
    except SystemExit as ending:
        ended = ending.code
    captured = capsys.readouterr()
    assert ended in (1, 2)
    assert complaint in captured.err and captured.err.count("\n") == 1
