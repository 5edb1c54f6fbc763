"""Peers that have come and gone leave nothing behind at any listener: not a connection, not a name,
not a task."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from tests.kit.limits import home_of
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.test_crossed import LISTENERS, PROTOCOLS, Opened, opened

PEERS = 20
#: The attributes of each server that refer to its peers, besides `connections`.
SHARED_STATE = {
    "kafka": ("_waiting_for_room", "waiting_for_memory"),
    "line": ("_subscriber_connections", "tasks"),
    "xpub": ("_subscriber_by_client", "_feed_by_topic"),
}


def connections(running: Opened, listener: str) -> list[Any]:
    opened_listener: Any = running.listeners[listener]
    return list(opened_listener.connections)


async def served_line_subscriber(running: Opened, number: int) -> None:
    """A subscriber of the line protocol, which has a name, a subscription and an entry in hand."""
    reader, writer = await running.connect("line")
    for line in (f"sub s{number} connect", "end", f"sub s{number} topic 1", "end"):
        writer.write(line.encode() + b"\n")
        assert await soon(reader.readline()) == b"accept\n"


@pytest.mark.parametrize("listener", LISTENERS)
@on_both_loops
async def test_a_listener_forgets_peers_that_have_gone(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_LINGER_MS", "KAFKA_LINGER_MS", "ZMQ_LINGER_MS", "LINE_LINGER_MS"):
        monkeypatch.setattr(home_of(name), name, 1)
    async with opened() as running:
        for number in range(PEERS):
            await running.well(listener)
            if listener == "line":
                await served_line_subscriber(running, number)
        foreign, *_ = next(each for each in PROTOCOLS.values() if listener not in each[1])
        await running.connect(listener)  # and says nothing
        _, writer = await running.connect(listener)
        writer.write(foreign())
        await until(lambda: len(connections(running, listener)) >= PEERS)
        gone = [weakref.ref(each) for each in connections(running, listener)]
        await running.close_peers()
        await until(lambda: not connections(running, listener))

        def are_forgotten() -> bool:
            gc.collect()
            return not any(each() for each in gone)

        await until(are_forgotten)
        names: dict[str, Any] = vars(running.listeners[listener])
        await asyncio.sleep(0)
        for name in SHARED_STATE.get(listener, ()):
            assert not names[name], f"{name} holds something"
