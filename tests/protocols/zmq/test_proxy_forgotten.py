"""X3, X4: what all have acknowledged is forgotten. Seen in the store, not by what the broker says:
what is kept of a client shrinks to a mark, and the messages themselves go where a topic says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from quackmq.broker import Terms
from quackmq.model.leases import Leases
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from tests.protocols.zmq.peers import DEADLINE_S, TESTER
from tests.protocols.zmq.proxied import Proxied, ask, proxied, receive

NAMES = ("donald", "daisy")
MESSAGES = 40
OPTIONS = LocalOptions(sync="os")


async def test_x3_what_is_kept_of_a_client_shrinks_and_what_all_have_goes(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path, OPTIONS)
    async with proxied(store=store) as running:
        policy = Policy(keep_until_consumed=True)
        await running.broker.create_topic(TESTER, "ducks", policy=policy)
        for name in NAMES:
            await hello(running, name)
        empty_bytes = await kept_bytes(store)
        tokens = await published(running)

        for name in NAMES:  # every other one: what they lack lies between what they have
            await acknowledge(running, name, tokens[1::2])
        await until_kept(store, lambda leases: leases.outstanding == MESSAGES // 2)
        assert await kept_bytes(store) > empty_bytes + MESSAGES, "each that is missing is named"
        await running.broker.clean()
        assert await held(store, running) == MESSAGES, "the first is not acknowledged"

        await acknowledge(running, NAMES[0], tokens[0::2])
        await until_kept(store, lambda leases: leases.low_water_mark == MESSAGES, NAMES[0])
        await running.broker.clean()
        assert await held(store, running) == MESSAGES, "one has it, and the other has not"

        await acknowledge(running, NAMES[1], tokens[0::2])
        await until_kept(store, lambda leases: leases.low_water_mark == MESSAGES)
        async with asyncio.timeout(DEADLINE_S):
            while await held(store, running):  # the broker hears of what is durable a moment later
                await running.broker.clean()
                await asyncio.sleep(0.002)
    await store.close()

    store = await LocalStore.open(tmp_path, OPTIONS)
    try:
        for leases in (await kept(store)).values():
            assert (leases.low_water_mark, leases.frontier) == (MESSAGES, MESSAGES)
            assert leases.done_ranges() == [] and leases.leases() == [] and leases.gaps() == []
        assert await kept_bytes(store) <= empty_bytes + 2 * len(NAMES) * NUMBER_BYTES
        async with proxied(store=store) as running:
            assert await held(store, running) == 0
            for name in NAMES:
                assert await running.broker.lag(TESTER, name, "ducks") == 0
                await ask(running.client(), f"goodbye {name} ducks".encode())
            for prefix in ("leases/", "pushed/"):
                assert await store.states(prefix) == {}, "nothing is left of who said goodbye"
    finally:
        await store.close()


#: What a number that has grown, a mark or a count, takes more than a 0.
NUMBER_BYTES = 4


async def hello(running: Proxied, name: str) -> None:
    """At an address that never answers: what is acknowledged came over SUB."""
    _, port = running.rep()
    answer = await ask(running.client(), f"hello {name} ducks tcp://127.0.0.1:{port}".encode())
    assert answer.startswith(b"ack_welcome ")


async def published(running: Proxied) -> Sequence[str]:
    """The ids of so many messages, in the order of their offsets, when both clients have got all
    of them."""
    bodies = [b"quack %d" % number for number in range(MESSAGES)]
    subscribers = [
        await running.subscriber(f"client {name}".encode(), b"ids ducks") for name in NAMES
    ]
    await running.put("ducks", *bodies)
    for subscriber in subscribers:
        found = [await receive(subscriber) for _ in bodies]
        assert [content for _, content, _ in found] == bodies
    return [token.decode() for _, _, token in found]


async def acknowledge(running: Proxied, name: str, tokens: Sequence[str]) -> None:
    frame = " ".join(("ack_received", name, "ducks", *tokens)).encode()
    answer = await ask(running.client(), frame)
    assert not answer.startswith(b"ERR"), answer


async def held(store: LocalStore, running: Proxied) -> int:
    """How many messages are in the log."""
    offsets = await store.offsets(PartitionKey(running.broker.topic("ducks").id, 0))
    return offsets.next - offsets.first


async def kept(store: LocalStore) -> dict[str, Leases]:
    """By client, as the broker that comes next will find it."""
    states = await store.states("leases/")
    return {
        key.rpartition("/")[2]: Leases.decode(state.value or b"", Terms(), 0)
        for key, state in states.items()
    }


async def kept_bytes(store: LocalStore) -> int:
    return sum(len(state.value or b"") for state in (await store.states("leases/")).values())


async def until_kept(store: LocalStore, condition: Callable[[Leases], bool], *names: str) -> None:
    """Of these clients, or of all."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await kept(store)
            if all(condition(found[name]) for name in names or NAMES):
                return
            await asyncio.sleep(0.002)
