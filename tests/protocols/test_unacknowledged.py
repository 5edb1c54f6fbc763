"""Who has not acknowledged a message, of both push protocols, asked over HTTP and on the command
line (X3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quackmq import limits
from quackmq.broker import RecordPosition, Terms, message_id
from quackmq.broker import limits as broker_limits
from quackmq.cli.main import main
from quackmq.model.policy import Policy
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.zmq import limits as zmq_limits
from tests.broker.support import key_of
from tests.kit.waiting import soon
from tests.protocols.http.v1.serving import Answered
from tests.protocols.http.v1.serving import Client as HttpClient
from tests.protocols.line.peers import Served
from tests.protocols.zmq.peers import TESTER
from tests.protocols.zmq.proxied import HOST, LONG_LEASE, Proxied, proxied
from tests.protocols.zmq.test_proxy_clients import Client

TOPIC = "ducks"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines can be busy: nobody is given up for it."""
    monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 60_000)


class Listeners:
    """A broker with its line, proxy and HTTP listeners."""

    def __init__(self, proxy: Proxied, line: Served, port: int) -> None:
        self.broker = proxy.broker
        self.proxy = proxy
        self.line = line
        self.port = port
        self._http = HttpClient(HOST, port)

    async def get(
        self, query: str, *, path: str = "unacknowledged", topic: str = TOPIC
    ) -> Answered:
        url = f"/v1/topics/{topic}/{path}?{query}"
        return await soon(asyncio.to_thread(self._http.get, url))

    async def states(self, offset: int) -> dict[str, str]:
        """The states of the subscriptions that have not acknowledged a message, by name."""
        answer = await self.get(f"offset={offset}")
        assert answer.status == 200, answer
        assert answer.json["count"] == len(answer.json["subscriptions"])
        return {each["name"]: each["state"] for each in answer.json["subscriptions"]}

    async def until_states(self, offset: int, states: dict[str, str]) -> None:
        async with asyncio.timeout(60):
            while await self.states(offset) != states:
                await asyncio.sleep(0.005)

    async def command(self, *words: str) -> int:
        address = ("--http", f"{HOST}:{self.port}")
        return await soon(asyncio.to_thread(main, ["unacknowledged", *words, *address]))

    async def offline(self, *names: str, reading: Any = "every") -> None:
        """Push subscriptions without a subscriber."""
        for name in names:
            await self.broker.pushing.subscribe(TESTER, name, TOPIC, Terms(reading))

    def close(self) -> None:
        self._http.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Listeners]:
    async with proxied(LONG_LEASE) as proxy:
        listener = LineServer(proxy.broker, (HOST, 0))
        line = Served(proxy.broker, listener, await listener.start())
        http = HttpServer(proxy.broker, HOST, 0)
        where = await http.start()
        assert isinstance(where, tuple)
        listeners = Listeners(proxy, line, where[1])
        try:
            yield listeners
        finally:
            listeners.close()
            await line.close_peers()
            await soon(listener.close())
            await soon(http.close())


async def test_x3_the_subscribers_of_both_push_protocols_are_listed_until_they_acknowledge() -> (
    None
):
    async with listening() as running:
        await running.broker.create_topic(TESTER, TOPIC)
        daisy = await running.line.subscriber("daisy", TOPIC)
        donald = Client(running.proxy, "donald", TOPIC)
        assert (await donald.hello()).startswith("ack_welcome")
        await running.line.put(TOPIC, b"a", b"b")
        assert await daisy.hears() == f"topic {TOPIC} [a]"
        first_id, _ = await donald.missed()
        await running.until_states(0, {"daisy": "sent", "donald": "sent"})
        assert (await running.states(1))["daisy"] == "waiting", "one entry at a time"
        listed = (await running.get("offset=0")).json
        (_, at_donald) = listed["subscriptions"]
        assert (at_donald["deliveries"], at_donald["reason"]) == (1, None)
        message = (await running.get("", path="partitions/0/messages")).json["messages"][0]
        assert abs(at_donald["sent_ms"] - message["timestamp_ms"]) < 60_000
        by_id = (await running.get(f"id={first_id}")).json
        for each in (*by_id["subscriptions"], *listed["subscriptions"]):
            del each["sent_ms"]  # it comes from two clocks, and may vary by a millisecond
        assert by_id == listed
        await donald.answer("ack_received", first_id)
        await running.until_states(0, {"daisy": "sent"})
        assert (await running.get("offset=0", path="unacknowledged/count")).json["count"] == 1
        assert await daisy.ask("successful") == f"topic {TOPIC} [b]"
        assert await running.states(0) == {}
        assert (await running.get("offset=0", path="unacknowledged/count")).json["count"] == 0


async def test_x3_a_subscriber_that_is_away_is_unreachable_and_the_reason_is_told() -> None:
    async with listening() as running:
        await running.broker.create_topic(TESTER, TOPIC)
        daisy = await running.line.subscriber("daisy", TOPIC)
        donald = Client(running.proxy, "donald", TOPIC)
        await donald.hello()
        donald.rep.close()
        await running.line.put(TOPIC, b"a")
        assert await daisy.hears() == f"topic {TOPIC} [a]"
        await daisy.close()
        await running.until_states(0, {"daisy": "unreachable", "donald": "unreachable"})
        subscriptions = (await running.get("offset=0")).json["subscriptions"]
        at_daisy, at_donald = subscriptions
        assert at_daisy["reason"] == "it is not connected"
        assert at_daisy["deliveries"] == 1, "it was sent, and not acknowledged"
        assert at_donald["reason"] not in (None, "it is not connected")
        daisy = await running.line.subscriber("daisy", TOPIC)
        assert await daisy.hears() == f"topic {TOPIC} [a]"
        assert (await running.states(0))["daisy"] == "sent"


async def test_pages_list_every_subscription_once_and_examine_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as running:
        await running.broker.create_topic(TESTER, TOPIC)
        names = [f"duck-{number}" for number in range(7)]
        await running.offline(*reversed(names))
        await running.line.put(TOPIC, b"a", b"b")
        # One has acknowledged the second entry and not the first.
        channel = await running.broker.pushing.open(TESTER, names[3], TOPIC, lambda: None)
        _, second = await channel.take(2)
        assert channel.ack(0, second.offset)
        await channel.close()
        del names[3]

        async def pages(limit: int) -> list[list[str]]:
            found, after = [], ""
            while True:
                page = (await running.get(f"offset=1&limit={limit}{after}")).json
                assert page["count"] == 6
                found.append([each["name"] for each in page["subscriptions"]])
                if page["next"] is None:
                    return found
                after = f"&after={page['next']}"

        assert await pages(100) == [names]
        assert await pages(2) == [names[:2], names[2:3], names[3:5], names[5:]]
        monkeypatch.setattr(broker_limits, "UNACKNOWLEDGED_SEARCHED", 2)
        assert await pages(2) == [names[:2], names[2:3], names[3:5], names[5:]]
        monkeypatch.setattr(broker_limits, "UNACKNOWLEDGED_EXAMINED", 1)
        assert [len(page) for page in await pages(100)] == [1, 1, 1, 0, 1, 1, 1]
        most = limits.HTTP_PAGE_ITEMS
        assert (await running.get(f"offset=1&limit={most}")).status == 200
        (await running.get(f"offset=1&limit={most + 1}")).problem(400, "invalid_request")


async def test_entries_that_are_too_old_for_live_subscriptions_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "UNACKNOWLEDGED_EXAMINED", 1)
    async with listening() as running:
        await running.broker.create_topic(TESTER, TOPIC, policy=Policy(live_entries=1))
        await running.offline("huey", "dewey", reading="live")
        await running.offline("louie")
        await running.line.put(TOPIC, b"a", b"b")
        counts = [
            (await running.get(f"offset={offset}", path="unacknowledged/count")).json["count"]
            for offset in (0, 1)
        ]
        assert counts == [1, 3]


async def test_a_deleted_message_waits_for_nobody_and_unknown_ones_are_refused() -> None:
    async with listening() as running:
        topic = await running.broker.create_topic(TESTER, TOPIC)
        await running.offline("daisy")
        await running.line.put(TOPIC, b"a", b"b")
        await running.broker.trim(TESTER, key_of(topic), 1)
        assert (await running.get("offset=0")).json["subscriptions"] == []
        assert (await running.get("offset=1")).json["count"] == 1
        for query, status, code in [
            ("offset=2", 416, "offset_out_of_range"),
            ("offset=0&partition=1", 404, "unknown_partition"),
            ("", 400, "invalid_request"),
            ("id=x", 400, "invalid_message_id"),
            (f"id={message_id(topic.id, RecordPosition(0, 1))}&offset=1", 400, "invalid_request"),
            (
                f"id={message_id(topic.id, RecordPosition(0, 1))}&partition=0",
                400,
                "invalid_request",
            ),
            (f"id={message_id(topic.id, RecordPosition(0, 9))}", 416, "offset_out_of_range"),
        ]:
            for path in ("unacknowledged", "unacknowledged/count"):
                (await running.get(query, path=path)).problem(status, code)
        (await running.get("offset=0", topic="none")).problem(404, "unknown_topic")


async def test_the_reason_why_a_subscriber_is_not_reached_is_cut_off() -> None:
    async with listening() as running:
        await running.broker.create_topic(TESTER, TOPIC)
        await running.offline("daisy")
        await running.line.put(TOPIC, b"a")
        most = broker_limits.UNREACHED_REASON_CHARS
        running.broker.pushing.unreached["daisy", TOPIC] = "x" * (most + 1)
        (at_daisy,) = (await running.get("offset=0")).json["subscriptions"]
        assert at_daisy["reason"] == "x" * most


# --- the command line ------------------------------------------------------------------------


async def test_x3_the_command_lists_and_counts_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with listening() as running:
        topic = await running.broker.create_topic(TESTER, TOPIC)
        daisy = await running.line.subscriber("daisy", TOPIC)
        await running.offline("huey", "louie")
        await running.line.put(TOPIC, b"a")
        assert await daisy.hears() == f"topic {TOPIC} [a]"
        running.broker.pushing.unreached["louie", TOPIC] = "no\x1b[2Janswer"
        assert await running.command(TOPIC, "--offset", "0") == 0
        head, columns, *rows = capsys.readouterr().out.splitlines()
        assert head == "ducks, partition 0, offset 0: 3 push subscriptions not acknowledged"
        assert columns.split() == ["subscription", "state", "sent", "last", "sent", "reason"]
        assert rows[0].split()[:3] == ["daisy", "sent", "1"]
        assert rows[1].split() == ["huey", "unreachable", "0", "it", "is", "not", "connected"]
        assert rows[2].split() == ["louie", "unreachable", "0", "no?[2Janswer"]

        token = message_id(topic.id, RecordPosition(0, 0))
        assert await running.command(TOPIC, "--id", token, "--count") == 0
        assert capsys.readouterr().out == "3\n"
        assert await running.command(TOPIC, "--id", token, "--count", "--json") == 0
        counted = {"id": token, "topic": TOPIC, "partition": 0, "offset": 0, "count": 3}
        assert json.loads(capsys.readouterr().out) == counted

        monkeypatch.setattr(broker_limits, "UNACKNOWLEDGED_EXAMINED", 1)
        assert await running.command(TOPIC, "--offset", "0", "--limit", "2", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert [each["name"] for each in answer["subscriptions"]] == ["daisy", "huey"]
        words = ("--offset", "0", "--partition", "0", "--limit", "1", "--after", "daisy")
        assert await running.command(TOPIC, *words) == 0
        printed = capsys.readouterr().out
        assert "huey" in printed and printed.endswith("There are more: --after huey\n")

        assert await running.command(TOPIC, "--offset", "7") == 1
        assert "no message at offset 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--offset", "0", "--limit", "0"], "--limit"),
        (["--offset", "0", "--limit", "1001"], "--limit"),
        (["--id", "x", "--partition", "0"], "--partition"),
        (["--offset", "0", "--count", "--after", "x"], "--after"),
        (["--offset", "0", "--http", "nowhere"], "--http"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["unacknowledged", TOPIC, *words]) == 2
    assert said in capsys.readouterr().err
