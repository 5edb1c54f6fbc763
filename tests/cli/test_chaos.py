"""Chaos clients against a broker as users run it: what they do, and that nobody is harmed."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import pytest

from quackmq import Client
from quackmq.cli.chaos.command import _check_address
from quackmq.cli.chaos.plan import FAULTS, PUTS, TAKES, Act, plan
from quackmq.cli.chaos.runner import _stop_on_signals
from quackmq.cli.main import main
from quackmq.errors import InvalidRequest
from tests.kit.server import DEADLINE_S, Server

LISTENERS = ["line", "zmq", "xpub", "kafka"]
#: Long enough for whatever comes again after a while, also where a dead member has to be missed.
PATIENT = ("--seconds", 60, "--settle", 60)
#: For one that has much to wait for; less than a test may take.
WHOLE_RUN_S = 100

_numbers = count(1)


@pytest.fixture(scope="module")
def listeners() -> Iterator[dict[str, str]]:
    """A broker's listeners; it is also found to be well at the end."""
    arguments = ["--store", "memory:", "--line-reading", "every"]
    arguments += ["--proxy-lease-ms", "300", "--group-initial-delay-ms", "0"]
    for listener in ("kafka", "http", "zmq", "line"):
        arguments += [f"--{listener}", "127.0.0.1:0"]
    with Server("serve", *arguments) as server:
        yield server.listeners()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "Traceback" not in server.errors()


@pytest.fixture
def topic() -> str:
    return f"chaos-{next(_numbers)}"


def chaos(listeners: dict[str, str], listener: str, topic: str, *options: object) -> dict[str, Any]:
    """Its summary, when it has ended well."""
    address = listeners["proxy" if listener == "xpub" else listener]
    arguments = (
        "--door",
        listener,
        "--address",
        address,
        "--topic",
        topic,
        "--name",
        f"bad-{topic}",
    )
    with Server("chaos-client", *arguments, "--json", *options) as client:
        return summary_of(client)


def summary_of(client: Server) -> dict[str, Any]:
    client.process.wait(timeout=WHOLE_RUN_S)
    assert client.exit_code() == 0, client.errors()
    found: dict[str, Any] = json.loads(client.line())
    return found


# --- plans -----------------------------------------------------------------------------------


def test_one_seed_is_one_plan_and_another_is_another() -> None:
    first, again, other = (list(islice(plan(seed, ["a", "b"]), 200)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_x5_a_plan_has_every_fault() -> None:
    steps = list(islice(plan(0, ["a", "b"]), 2_000))
    assert {step.act for step in steps} == set(Act)
    assert {step.topic for step in steps} == {"a", "b"}
    assert [step.act for step in steps[:2]] == [Act.SUBSCRIBE] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_has_just_the_faults_that_were_chosen(fault: str) -> None:
    acts = {step.act for step in islice(plan(3, ["a"], [fault]), 1, 1_000)}
    assert acts == {Act.PUT, Act.TAKE, *FAULTS[fault]}


def test_who_is_not_to_put_only_takes() -> None:
    acts = {step.act for step in islice(plan(3, ["a"], with_puts=False), 1_000)}
    assert not acts & PUTS
    assert acts >= TAKES


def test_a_fault_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no fault 'explode'; there are drop, delay"):
        next(plan(0, ["a"], ["explode"]))


# --- at each listener ----------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("listener", LISTENERS)
def test_x5_whatever_it_drops_comes_again_until_it_has_all(
    listener: str, listeners: dict[str, str], topic: str, tmp_path: Path
) -> None:
    """It drops, delays, doubles and dies; what it acknowledged at last is every message, once. Of a
    Kafka group nobody dies here: a dead member is missed after six seconds, as Kafka has it."""
    seen, wanted = tmp_path / "seen", 20
    chaos(listeners, listener, topic, "--acts", 1, "--keep")
    with Client(listeners["kafka"], timeout=DEADLINE_S) as client:
        client.put_many(topic, [f"quack {number}".encode() for number in range(wanted)])
    faults = "drop,delay,double" if listener == "kafka" else "drop,delay,double,die"
    bad = ("--faults", faults, "--no-puts", "--acts", 30, "--seed", 11)
    chaos(listeners, listener, topic, *bad, *PATIENT, "--expect", wanted, "--seen", seen)
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert sorted(each["content"] for each in found) == sorted(
        f"quack {number}" for number in range(wanted)
    )
    assert len({each["id"] for each in found}) == wanted


@pytest.mark.processes
@pytest.mark.parametrize("listener", LISTENERS)
def test_x5_it_does_what_its_seed_says_and_harms_nobody_else(
    listener: str, listeners: dict[str, str], topic: str, tmp_path: Path
) -> None:
    """A good client of the same topic gets its own messages, each once and in order."""
    with Client(
        listeners["kafka"], f"good-{topic}", timeout=DEADLINE_S, directory=tmp_path
    ) as client:
        client.subscribe(topic)
        wanted = [f"good {number}".encode() for number in range(20)]
        client.put_many(topic, wanted[:10])
        summary = chaos(listeners, listener, topic, "--seed", 5, "--acts", 40, "--seconds", 100)
        client.put_many(topic, wanted[10:])
        client.put(topic, b"the end")
        got = []
        while (message := client.get(topic)).data != b"the end":
            got.append(message.data)
        client.unsubscribe(topic)
    assert [data for data in got if data and data.startswith(b"good")] == wanted
    acts = Counter(step.act.value for step in islice(plan(5, [topic]), 40))
    assert (summary["seed"], summary["acts"]) == (5, dict(acts))
    counts = summary["counts"]
    others = len(got) - len(wanted)
    assert counts["put"] <= others <= counts["put"] + counts["uncertain"]


@pytest.mark.processes
def test_the_same_words_in_two_topics_are_two_messages(
    listeners: dict[str, str], topic: str, tmp_path: Path
) -> None:
    """At the line listener, whose entries have no ids."""
    seen, topics = tmp_path / "seen", [topic, f"{topic}-other"]
    both = ("--topic", topics[1], "--acts", 2, "--no-puts")
    chaos(listeners, "line", topic, *both, "--keep")
    with Client(listeners["kafka"], timeout=DEADLINE_S) as client:
        for each in topics:
            client.put(each, b"quack")
    good = ("--faults", "", *PATIENT)
    chaos(listeners, "line", topic, *both, *good, "--expect", 2, "--seen", seen)
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert sorted(each["topic"] for each in found) == topics
    assert [each["content"] for each in found] == ["quack"] * 2


@pytest.mark.processes
def test_what_it_has_seen_is_known_after_its_own_death(
    listeners: dict[str, str], topic: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    chaos(listeners, "zmq", topic, "--acts", 1, "--keep")
    with Client(listeners["kafka"], timeout=DEADLINE_S) as client:
        client.put_many(topic, [b"one", b"two"])
    taking = ("--faults", "", "--no-puts", "--acts", 1, *PATIENT, "--seen", seen, "--keep")
    chaos(listeners, "zmq", topic, *taking, "--expect", 1)
    with seen.open("a") as file:
        file.write('{"topic":"torn')  # a kill amid a line
    chaos(listeners, "zmq", topic, *taking, "--expect", 2)
    found = [json.loads(line)["content"] for line in seen.read_text().splitlines()]
    assert found == ["one", "two"], "the first came again, since its id was named by nobody"


@pytest.mark.processes
def test_it_goes_on_when_its_broker_is_killed_and_back(tmp_path: Path) -> None:
    where, seen, wanted = f"unix:{tmp_path}/line", tmp_path / "seen", 12
    serve = ("serve", "--data", tmp_path / "data", "--line", where, "--kafka", "127.0.0.1:0")
    bad = ("chaos-client", "--door", "line", "--address", where, "--topic", "ducks", "--json")
    faults = ("--no-puts", "--faults", "drop,delay,die", "--seen", seen, "--keep")
    with Server(*serve, "--line-reading", "every") as broker:
        address = broker.ready()
        with Server(*bad, "--acts", 1, *faults) as client:
            assert client.exit_code() == 0
        with Client(address, timeout=DEADLINE_S) as good:
            good.put_many("ducks", [f"quack {number}".encode() for number in range(wanted)])
        broker.send(signal.SIGKILL)
        broker.exit_code()
    with Server(*bad, *faults, *PATIENT, "--acts", 30, "--expect", wanted) as client:
        with Server(*serve, "--line-reading", "every") as broker:
            broker.ready()
            summary = summary_of(client)
    assert summary["counts"]["taken"] == wanted
    found = {json.loads(line)["content"] for line in seen.read_text().splitlines()}
    assert found == {f"quack {number}" for number in range(wanted)}


@pytest.mark.processes
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_good_order_and_it_prints_its_summary(
    listeners: dict[str, str], topic: str, number: signal.Signals, exit_code: int
) -> None:
    arguments = ("--door", "line", "--address", listeners["line"], "--topic", topic, "--seed", 1)
    with Client(listeners["kafka"], f"watch-{topic}", timeout=DEADLINE_S) as client:
        client.subscribe(topic)
        with Server("chaos-client", *arguments, "--seconds", 1000) as chaotic:
            assert client.get(topic).data is not None, "it has begun"
            chaotic.send(number)
            assert chaotic.line() == "chaos over line, seed 1\n"
            assert chaotic.exit_code() == exit_code
        client.unsubscribe(topic)


@pytest.mark.parametrize(
    ("listener", "address"),
    [
        ("line", "unix:/run/quack"),
        ("zmq", "tcp://127.0.0.1:5555"),
        ("xpub", "tcp://[::1]:5558"),
        ("kafka", "here:9092,[::1]:9093"),
    ],
)
def test_an_address_is_taken_as_the_listener_has_it(listener: str, address: str) -> None:
    assert _check_address(listener, address) == address


@pytest.mark.parametrize(
    ("arguments", "exit_code", "complaint"),
    [
        (["--door", "bell"], 2, "invalid choice: 'bell'"),
        (["--door", "zqm"], 2, "argument --door: 'zqm' is not a valid choice: did you mean 'zmq'?"),
        (["--door", "line", "--faults", "drop,explode"], 2, "there is no fault 'explode'"),
        (["--door", "line", "--acts", "0"], 2, "--acts: 0 is not a number greater than 0"),
        (["--door", "line", "--seconds", "soon"], 2, "--seconds: 'soon' is not a number of"),
        (["--door", "line", "--topic", "no topic"], 2, "no topic"),
        (["--door", "line", "--address", "here"], 2, "'here' is not HOST:PORT"),
        (["--door", "xpub", "--address", "here"], 2, "'here' is not HOST:PORT"),
        (["--door", "zmq", "--address", "here"], 2, "'here' is not HOST:PORT"),
        (["--door", "kafka", "--address", "here:1,there"], 2, "there' is not HOST:PORT"),
        (
            ["--door", "line", "--address", "unix:no-such-file", "--seconds", "0.1"],
            1,
            "no answer from unix:no-such-file: No such file or directory",
        ),
        (
            ["--door", "kafka", "--address", "127.0.0.1:1", "--acts", "3", "--no-puts", "--keep"],
            1,
            "nothing listens at 127.0.0.1:1",
        ),
        (
            ["--door", "kafka", "--broker", "127.0.0.1:1", "--acts", "1", "--no-puts", "--keep"],
            1,
            "nothing listens at 127.0.0.1:1",
        ),
        (["--door", "line", "--broker", "a:1"], 2, "--broker is the address of the kafka listener"),
        (["--door", "kafka", "--broker", "a:1", "--address", "a:1"], 2, "give only one of them"),
    ],
)
def test_a_slip_is_answered_in_one_sentence(
    arguments: list[str], exit_code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = main(["chaos-client", *arguments])
    except SystemExit as ending:
        ended = ending.code
    captured = capsys.readouterr()
    assert ended == exit_code
    assert complaint in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_signal_that_comes_within_a_wait_for_it_does_not_wait_for_itself() -> None:
    """Who waits for an event holds its lock for a moment, and a handler runs in the same thread."""
    with _stop_on_signals() as stopping:
        with cast(Any, stopping)._cond:
            signal.raise_signal(signal.SIGTERM)
        assert stopping.wait(DEADLINE_S)
