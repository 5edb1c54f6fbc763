"""D3 through the queue's endpoints: how many have yet to take a message, and what is gone."""

from __future__ import annotations

from quackmq.model.policy import Policy
from tests.protocols.http.peers import TESTER, Peer, served


async def consume(peer: Peer, consumer_id: str, last_id: str | None = None) -> dict[str, object]:
    target = f"/consumer/consume?topic=ducks&consumer_id={consumer_id}"
    if last_id is not None:
        target += f"&last_id={last_id}"
    return (await peer.get(target)).succeeded()


async def test_d3_a_message_says_how_many_subscribers_are_left_and_goes_with_the_last() -> None:
    async with served() as running:
        policy = Policy(keep_until_consumed=True)
        topic = await running.broker.create_topic(TESTER, "ducks", policy=policy)
        peer = await running.peer()
        producer = (await peer.post("/producer/register?topic=ducks")).succeeded()["producer_id"]
        consumers = [
            (await peer.post("/consumer/register?topic=ducks")).succeeded()["consumer_id"]
            for _ in range(2)
        ]
        fields = {"topic": "ducks", "producer_id": producer, "message": "quack"}
        assert (await peer.post("/producer/produce", fields)).succeeded()
        first = await consume(peer, consumers[0])
        assert (first["message"], first["subscribers"]) == ("quack", 1)
        held = await consume(peer, consumers[1], "")
        assert held["subscribers"] == 1, "it comes again until it is named"
        await running.broker.clean()
        assert (await consume(peer, consumers[1]))["subscribers"] == 0
        await running.broker.clean()
        page = await running.broker.messages.read(
            TESTER, topic.name, 0, 1, max_records=1, max_bytes=1
        )
        assert (page.first_offset, page.messages) == (1, ())


async def test_a_consumer_is_told_what_it_has_lost() -> None:
    async with served() as running:
        broker = running.broker
        policy = Policy(keep_until_consumed=True, hold_for_ms=0)
        await broker.create_topic(TESTER, "ducks", policy=policy)
        peer = await running.peer()
        producer = (await peer.post("/producer/register?topic=ducks")).succeeded()["producer_id"]
        consumer = (await peer.post("/consumer/register?topic=ducks")).succeeded()["consumer_id"]
        fields = {"topic": "ducks", "producer_id": producer}
        await peer.post("/producer/produce", fields | {"message": "a"})
        await broker.clean()
        await broker.alter_topic(TESTER, "ducks", policy=Policy())
        await peer.post("/producer/produce", fields | {"message": "b"})
        got = await consume(peer, consumer)
        assert (got["message"], got["lost"]) == ("b", 1)
        assert got["lost_ranges"] == [{"first_offset": 0, "next_offset": 1}]
        await peer.post("/producer/produce", fields | {"message": "c"})
        assert "lost" not in await consume(peer, consumer)
