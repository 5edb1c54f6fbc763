"""What a subscriber has lost, over ZeroMQ: named once by an error, and then it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quackmq.broker import Broker, Caller, Message
from quackmq.client.zmq import ZmqClient
from quackmq.errors import EntriesLost
from quackmq.model.policy import Policy, WhenFull
from tests.kit.waiting import soon
from tests.protocols.zmq.peers import DEADLINE_S, TESTER, Served, served


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
            b"ERR entries_lost 2 entries of topic ducks, partition 0 were lost before donald "
            b"has read them: offsets 0 to 1; get again to continue after them"
        )
        answer = await socket.ask(b"GET donald ducks -1")
        assert answer.endswith(b" c")
        assert await socket.ask(b"GET donald ducks -1") == answer


class LateBroker(Broker):
    """A broker in which a GET that has found nothing begins to wait when the test says so."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.has_found_nothing = asyncio.Event()
        self.may_wait = asyncio.Event()

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int = 0,
        *,
        raise_on_loss: bool = False,
    ) -> Message | None:
        if wait_ms:
            self.has_found_nothing.set()
            await self.may_wait.wait()
        return await super().get(
            caller, name, topic_name, last_id, wait_ms, raise_on_loss=raise_on_loss
        )


async def test_a_loss_while_a_get_waits_is_named_too() -> None:
    async with served(LateBroker) as running:
        broker, socket = running.broker, running.socket()
        assert isinstance(broker, LateBroker)
        policy = Policy(keep_until_consumed=True, hold_for_ms=0)
        await broker.create_topic(TESTER, "ducks", policy=policy)
        await socket.ask(b"SUB donald ducks")
        waiting = asyncio.create_task(socket.ask(b"GET donald ducks -1"))
        await soon(broker.has_found_nothing.wait())
        other = running.socket()
        await other.ask(b"PUT daisy ducks a")
        await broker.clean()
        await broker.alter_topic(TESTER, "ducks", policy=Policy())
        await other.ask(b"PUT daisy ducks b")
        broker.may_wait.set()
        assert (await waiting).startswith(b"ERR entries_lost 1 ")
        assert (await socket.ask(b"GET donald ducks -1")).endswith(b" b")


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
            assert message.text == "c"
