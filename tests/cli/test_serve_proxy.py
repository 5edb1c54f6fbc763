"""Where the four sockets of the ZeroMQ listener listen."""

from __future__ import annotations

from typing import Any

import pytest

from quackmq.broker import Broker, BrokerSettings
from quackmq.cli.broker.address import Address
from quackmq.cli.broker.runner import LISTENER_MAKERS, make_listener
from quackmq.cli.broker.settings import load
from quackmq.cli.serve import describe_closed_listeners, plan_listeners
from quackmq.errors import InvalidSetting
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.stores.memory import MemoryStore
from tests.kit.server import Server


def planned(**options: str) -> dict[str, str]:
    return {name: str(address) for name, address in plan_listeners(load(options, {})).items()}


def test_without_any_listener_named_all_open_the_proxys_behind_zmq() -> None:
    listeners = planned()
    assert list(listeners) == ["kafka", "http", "zmq", "xsub", "xpub", "proxy", "line"]
    assert listeners["zmq"] == "127.0.0.1:5555"
    assert [listeners[name] for name in ("xsub", "xpub", "proxy")] == [
        "127.0.0.1:5556",
        "127.0.0.1:5557",
        "127.0.0.1:5558",
    ]


def test_zmq_alone_brings_the_others_on_the_next_ports_of_its_host() -> None:
    assert planned(zmq="[::1]:7000") == {
        "zmq": "[::1]:7000",
        "xsub": "[::1]:7001",
        "xpub": "[::1]:7002",
        "proxy": "[::1]:7003",
    }
    assert set(planned(http="127.0.0.1:80")) == {"http"}


def test_each_may_be_told_another_place_and_port_0_asks_for_a_free_one() -> None:
    assert planned(zmq="127.0.0.1:7000", xpub="0.0.0.0:9", proxy="127.0.0.1:0") == {
        "zmq": "127.0.0.1:7000",
        "xsub": "127.0.0.1:7001",
        "xpub": "0.0.0.0:9",
        "proxy": "127.0.0.1:0",
    }
    assert set(planned(zmq="127.0.0.1:0").values()) == {"127.0.0.1:0"}
    assert planned(xsub="127.0.0.1:9")["zmq"] == str(Address("127.0.0.1", 5555))


def test_the_listeners_that_stay_closed_are_named_with_the_reason_and_the_way_to_open_them() -> (
    None
):
    def said(environment: dict[str, str] | None = None, **options: str) -> str:
        loaded = load(options, environment or {})
        return describe_closed_listeners(loaded, plan_listeners(loaded))

    assert said() == ""
    here = "127.0.0.1:0"
    assert said(kafka=here, http=here, zmq=here, line=here) == ""
    assert said(kafka="127.0.0.1:0", sync="os") == (
        "only kafka will open, because of the option --kafka; closed: http, zmq and line. To open "
        "these too, add --http 127.0.0.1:8002 --zmq 127.0.0.1:5555 --line 127.0.0.1:5550"
    )
    assert said({"QUACKMQ_HTTP": "127.0.0.1:0"}, xpub="127.0.0.1:0", line="unix:quack") == (
        "only http, zmq and line will open, because of the environment variable QUACKMQ_HTTP, the "
        "option --xpub and the option --line; closed: kafka. To open these too, add --kafka "
        "127.0.0.1:9092"
    )


def test_a_port_that_has_none_behind_it_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="port 65536 of xpub does not exist: give --xpub"):
        planned(zmq="127.0.0.1:65534")
    assert planned(zmq="127.0.0.1:65534", xpub="127.0.0.1:1", proxy="127.0.0.1:2")["xsub"] == (
        "127.0.0.1:65535"
    )


async def test_the_http_listener_goes_by_the_names_that_the_settings_have() -> None:
    options = {"http_names": "queue.example", "advertise": "adv.example:9092"}
    store = MemoryStore()
    broker = Broker(store, BrokerSettings())
    listener = LISTENER_MAKERS["http"](
        broker, Address("listener.example", 0), load(options, {}).settings
    )
    assert isinstance(listener, HttpServer)
    for name in (b"queue.example", b"adv.example", b"listener.example:8002"):
        assert listener.names.allows_host(name, is_loopback=True), name
    assert not listener.names.allows_host(b"evil.example", is_loopback=True)
    assert listener.names.is_own_origin(b"https://queue.example", b"127.0.0.1:8002")
    await store.close()


async def test_the_zmq_sockets_of_a_broker_share_the_memory_for_their_peers() -> None:
    store = MemoryStore()
    broker = Broker(store, BrokerSettings())
    budgets = Budgets()
    made: dict[str, Any] = {}
    for name in ("zmq", "xsub", "xpub", "proxy"):
        made[name] = make_listener(
            name, broker, Address("127.0.0.1", 0), load({}, {}).settings, budgets, made
        )
    assert all(listener.budgets is budgets for listener in made.values())
    await store.close()


@pytest.mark.processes
def test_a_line_for_each_is_printed_before_ready() -> None:
    with Server("serve", "--store", "memory:", "--zmq", "127.0.0.1:0") as server:
        listeners = server.listeners()
        assert list(listeners) == ["zmq", "xsub", "xpub", "proxy"]
        assert len(set(listeners.values())) == 4
