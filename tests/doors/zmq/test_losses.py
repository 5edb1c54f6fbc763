"""What a subscriber has lost, over ZeroMQ: named once by an error, and then it goes on."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.client.zmq import ZmqClient
from quackmq.errors import EntriesLost
from quackmq.policy import Policy, WhenFull
from tests.doors.zmq.peers import DEADLINE_S, TESTER, Served, served

pytestmark = pytest.mark.asyncio


async def overtaken(running: Served, policy: Policy) -> None:
    """Subscribe, put a and b, let the topic go of them by its policy, put c."""
    broker = running.broker
    await broker.create_topic(TESTER, "ducks", policy=policy)
    socket = running.socket()
    await socket.ask(b"SUB donald ducks")
    await socket.ask(b"PUT daisy ducks a")
    await socket.ask(b"PUT daisy ducks b")
    await broker.clean()
    await broker.alter_topic(TESTER, "ducks", policy=Policy())
    await socket.ask(b"PUT daisy ducks c")


async def test_a_loss_is_named_with_its_offsets_and_the_next_get_goes_on() -> None:
    async with served() as running:
        await overtaken(running, Policy(keep_until_consumed=True, hold_for_ms=0))
        socket = running.socket()
        assert await socket.ask(b"GET donald ducks -1") == (
            b"ERR entries_lost 2 entries of topic ducks, partition 0 are gone before donald has "
            b"read them: offsets 0 to 1; get again to go on behind them"
        )
        answer = await socket.ask(b"GET donald ducks -1")
        assert answer.endswith(b" c")
        assert await socket.ask(b"GET donald ducks -1") == answer


async def test_where_the_oldest_are_dropped_by_rule_subscribers_just_go_on() -> None:
    async with served() as running:
        policy = Policy(live_entries=1, when_full=WhenFull.DROP_OLDEST)
        await running.broker.create_topic(TESTER, "ducks", policy=policy)
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"PUT daisy ducks a")
        await socket.ask(b"PUT daisy ducks b")
        assert (await socket.ask(b"GET donald ducks -1")).endswith(b" b")


async def test_the_python_client_raises_it_by_its_name() -> None:
    async with served() as running:
        await overtaken(running, Policy(keep_until_consumed=True, hold_for_ms=0))
        host, port = running.address
        with ZmqClient(f"{host}:{port}", "donald", timeout=DEADLINE_S) as client:
            with pytest.raises(EntriesLost, match="offsets 0 to 1"):
                await asyncio.to_thread(client.get, "ducks")
            message = await asyncio.to_thread(client.get, "ducks")
            assert message is not None and message.text == "c"
