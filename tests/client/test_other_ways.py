"""A name used in another way, a broker that cannot write: the client says which it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quackmq import Client, errors
from quackmq.client.zmq import ZmqClient
from quackmq.stores.memory import MemoryStore
from tests.interop.running import RunningBroker
from tests.kit.server import DEADLINE_S, Server


@pytest.fixture(scope="module")
def listeners() -> Iterator[dict[str, str]]:
    listening = ("--kafka", "127.0.0.1:0", "--zmq", "127.0.0.1:0")
    with Server("serve", "--store", "memory:", *listening) as server:
        yield server.listeners()


@pytest.mark.processes
def test_a_name_that_goes_by_last_id_elsewhere_is_told_so(
    listeners: dict[str, str], tmp_path: Path, topic: str
) -> None:
    """Neither way takes anything from the other, which goes on."""
    name = f"walker-{topic}"
    options: Any = {"serialiser": "str", "directory": tmp_path, "timeout": DEADLINE_S}
    with (
        ZmqClient(listeners["zmq"], name, timeout=DEADLINE_S) as other,
        Client(listeners["kafka"], name, **options) as client,
    ):
        other.subscribe(topic)
        client.put_many(topic, list("abc"))
        assert other.get(topic).text == "a"
        for call in (client.get, lambda each: client.get(each, after=None)):
            with pytest.raises(errors.NameInOtherMode, match=f"name {name} is used"):
                call(topic)
        client.subscribe(f"{topic}-2")
        client.put(f"{topic}-2", "elsewhere")
        assert client.get(f"{topic}-2").value == "elsewhere", "a mode holds for one topic"
        assert other.get(topic).text == "b"


@pytest.mark.processes
def test_a_name_that_a_client_reads_by_is_refused_elsewhere_until_it_is_closed(
    listeners: dict[str, str], tmp_path: Path, topic: str
) -> None:
    name = f"walker-{topic}"
    options: Any = {"serialiser": "str", "directory": tmp_path, "timeout": DEADLINE_S}
    with ZmqClient(listeners["zmq"], name, timeout=DEADLINE_S) as other:
        with Client(listeners["kafka"], name, **options) as client:
            client.subscribe(topic)
            client.put_many(topic, list("ab"))
            assert client.get(topic).value == "a"
            with pytest.raises(errors.NameInOtherMode, match=name):
                other.get(topic)
        assert other.get(topic).text == "b"


def test_a_broker_that_cannot_write_says_so_and_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"serialiser": "str", "directory": tmp_path, "timeout": DEADLINE_S}
    with RunningBroker() as broker, Client(broker.address, "reader", **options) as client:
        client.subscribe("news")
        client.put_many("news", list("ab"))
        assert client.get("news", after=None).value == "a"

        async def refuse(*arguments: object, **options: object) -> None:
            raise errors.StoreReadOnly("no space left on device")

        with monkeypatch.context() as full:
            full.setattr(MemoryStore, "append", refuse)
            with pytest.raises(errors.StoreReadOnly, match="news"):
                client.put("news", "c")
            first = client.get("news", after=None)
            assert client.get("news", after=first.id).value == "b"
        client.put("news", "d")
