"""`AsyncClient`: the same promises in an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quackmq import AsyncClient, Client, QuackTimeout, errors
from quackmq.client import limits
from quackmq.client.kafka.cluster import Cluster
from tests.kit.waiting import soon, until


@pytest_asyncio.fixture
async def client(address: str, topic: str, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    options: Any = {"serialiser": "str", "directory": tmp_path, "timeout": 20}
    async with AsyncClient(address, f"abilling-{topic}", **options) as client:
        yield client


@pytest.mark.processes
async def test_what_is_put_is_got(client: AsyncClient, topic: str) -> None:
    await client.subscribe(topic)
    message_id = await client.put(topic, "rain", key="weather", headers={"lang": "en"})
    message = await client.get(topic)
    assert (message.id, message.value, message.key) == (message_id, "rain", b"weather")
    assert message.headers == {"lang": b"en"}


async def test_many_puts_are_under_way_at_once(client: AsyncClient, topic: str) -> None:
    await client.subscribe(topic)
    ids = await asyncio.gather(*(client.put(topic, str(number)) for number in range(200)))
    assert len(set(ids)) == 200
    got = set()
    async with aclosing(client.listen(topic)) as listening:
        async for message in listening:
            got.add(message.value)
            if len(got) == 200:
                break
    assert got == {str(number) for number in range(200)}
    assert await client.size(topic) == 0


async def test_a_get_that_is_cancelled_takes_no_message_with_it(
    client: AsyncClient, topic: str
) -> None:
    await client.subscribe(topic)
    await client.put(topic, "a")
    assert (await client.get(topic)).value == "a"
    waiting = asyncio.create_task(client.get(topic))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.put_many(topic, ["b", "c"])
    assert [(await client.get(topic)).value for _ in range(2)] == ["b", "c"]


async def test_a_listen_that_is_cancelled_takes_no_message_with_it(
    client: AsyncClient, topic: str
) -> None:
    """It would wait for ever: its thread must not go on doing so."""
    await client.subscribe(topic)
    heard = asyncio.Queue[str]()

    async def listen() -> None:
        async with aclosing(client.listen(topic)) as listening:
            async for message in listening:
                heard.put_nowait(message.value)

    waiting = asyncio.create_task(listen())
    await client.put(topic, "a")
    assert await asyncio.wait_for(heard.get(), 30) == "a"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.put(topic, "b")
    assert (await client.get(topic)).value == "b"


async def test_a_message_in_the_hand_of_a_task_comes_again_after_a_crash(
    address: str, topic: str, tmp_path: Path
) -> None:
    """Closing without being done leaves what a kill leaves. One task's next get says nothing of
    another task's message."""
    options: Any = {"serialiser": "str", "directory": tmp_path, "timeout": 20}
    first = AsyncClient(address, topic, **options)
    await first.subscribe(topic)
    await first.put_many(topic, list("abc"))
    in_hand, over = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        assert (await first.get(topic)).value == "a"
        in_hand.set()
        await over.wait()

    worker = asyncio.create_task(work())
    await in_hand.wait()
    assert [(await first.get(topic)).value for _ in range(2)] == ["b", "c"]
    await first.close()
    over.set()
    await worker
    async with (
        AsyncClient(address, topic, **options) as second,
        aclosing(second.listen(topic)) as listening,
    ):
        assert [(await anext(listening)).value for _ in range(3)] == ["a", "b", "c"]


async def test_all_the_rest_is_there_with_await(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1, keep_for_ms=60_000)
    assert topic in await client.topics()
    await client.subscribe(topic)
    assert await client.subscriptions() == [topic]
    await client.put(topic, "a", sequence=3)
    assert await client.last_sequence(topic) == 3
    assert (await client.get(topic, after=None)).value == "a"
    await client.seek(topic, "beginning")
    assert (await client.get(topic)).value == "a"
    await client.unsubscribe(topic)
    await client.delete_topic(topic)
    with pytest.raises(errors.UnknownTopic):
        await client.get(topic)


async def test_nothing_is_waited_for_for_ever(client: AsyncClient, topic: str) -> None:
    """R5."""
    await client.subscribe(topic)
    with pytest.raises(QuackTimeout, match=topic):
        await client.get(topic, timeout=0.2)
    async with AsyncClient("127.0.0.1:1", "nobody", timeout=0.3) as lost:
        with pytest.raises(QuackTimeout, match=r"127\.0\.0\.1:1"):
            await lost.put(topic, b"rain")
        with pytest.raises(QuackTimeout, match=r"127\.0\.0\.1:1"):
            await lost.topics()


async def test_it_has_every_method_of_the_client_with_the_same_parameters() -> None:
    def methods(of: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(of).items()
            if inspect.isfunction(member)
            and not name.startswith("_")
            and name not in ("serialise", "get_for")
        }

    assert methods(AsyncClient) == methods(Client)


async def test_a_topic_that_is_full_says_so(client: AsyncClient, topic: str) -> None:
    await client.create_topic(topic, partitions=1, live_entries=1, when_full="refuse")
    await client.put(topic, "one")
    why = rf"^topic {topic} refuses the message: it is full \(live_entries is 1, and when_full is "
    why += r"refuse\)$"
    for sequence in (None, 1):
        with pytest.raises(errors.Refused, match=why):
            await client.put(topic, "two", sequence=sequence)


async def test_the_loop_does_not_wait_for_the_id_of_a_topic_made_anew(
    client: AsyncClient, address: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is asked for it in another thread."""
    first = await client.put(topic, "old")
    async with AsyncClient(address, f"other-{topic}", timeout=20) as other:
        await other.delete_topic(topic)
        await other.create_topic(topic)
    waiting_threads: list[threading.Thread] = []
    wait_for_result = Cluster._wait_for_result

    def watched(self: Cluster, *arguments: Any) -> Any:
        waiting_threads.append(threading.current_thread())
        return wait_for_result(self, *arguments)

    monkeypatch.setattr(Cluster, "_wait_for_result", watched)
    second = await client.put(topic, "new")
    third = await client.put(topic, "newer")
    assert waiting_threads, "its id was asked for"
    assert threading.current_thread() not in waiting_threads
    await client.subscribe(topic, "beginning")
    assert [(await client.get(topic)).id for _ in range(2)] == [second, third]
    assert first not in (second, third)


async def test_closing_ends_gets_that_occupy_all_threads(
    address: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_THREADS", 1)
    client = AsyncClient(address, topic, directory=tmp_path, timeout=20)
    await client.subscribe(topic)
    waiting = asyncio.create_task(client.get(topic, timeout=600))
    session = client._client.session
    await until(lambda: topic in session._readers)
    await soon(client.close())
    with pytest.raises(errors.ClientClosed):
        await soon(waiting)


async def test_a_closed_client_says_so_and_may_be_closed_again(
    client: AsyncClient, topic: str
) -> None:
    await client.close()
    await client.close()
    for call in (client.put(topic, "late"), client.get(topic), client.topics()):
        with pytest.raises(errors.ClientClosed):
            await call


async def test_a_client_closes_though_a_cancelled_get_could_not_be_undone(
    client: AsyncClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise QuackTimeout("planted")

    session = client._client.session
    await client.subscribe(topic)
    monkeypatch.setattr(session, "put_back", fail)
    got, release = threading.Event(), threading.Event()
    get_for = client._client.get_for

    def slow_get(*arguments: Any) -> Any:
        message = get_for(*arguments)
        got.set()
        assert release.wait(30)
        return message

    monkeypatch.setattr(client._client, "get_for", slow_get)
    await client.put(topic, "a")
    waiting = asyncio.create_task(client.get(topic))
    await until(got.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await client.close()
    with pytest.raises(errors.ClientClosed):
        await client.put(topic, "late")


async def test_gets_that_occupy_all_threads_hold_up_no_other_calls(
    address: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_THREADS", 1)
    other_topic = f"{topic}-2"
    async with AsyncClient(
        address, topic, directory=tmp_path, timeout=20, serialiser="str"
    ) as client:
        await client.subscribe(topic)
        await client.subscribe(other_topic)
        waiting = asyncio.create_task(client.get(topic, timeout=600))
        await until(lambda: topic in client._client.session._readers)
        # Other calls have other threads; a further get says what it waits for.
        assert await soon(client.subscriptions()) == [topic, other_topic]
        await soon(client.put(other_topic, "b", key="k"))
        with pytest.raises(QuackTimeout, match="waited 0.2 s for a free thread: 1 other calls"):
            await soon(client.get(other_topic, timeout=0.2))
        # One that is cancelled before it has a thread takes nothing with it.
        cancelled = asyncio.create_task(client.get(other_topic, timeout=600))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(cancelled)
        await soon(client.put(topic, "a"))
        assert (await soon(waiting)).value == "a"
        assert (await soon(client.get(other_topic))).value == "b"
