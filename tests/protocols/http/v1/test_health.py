"""Whether the broker lives, and whether it can be written to."""

from __future__ import annotations

import pytest

import quackmq
from quackmq.errors import QuackError, StoreReadOnly, StoreUnavailable
from quackmq.loop_clock import Pause, loop_clock
from quackmq.stores.memory import MemoryStore
from tests.kit.machine_clock import YEAR_MS, Machine
from tests.protocols.http.v1.serving import Client, serving


class FullStore(MemoryStore):
    """As a store whose disk is full, or whose database is away, from when it is told so."""

    full: StoreReadOnly | None = None
    away: StoreUnavailable | None = None

    @property
    def failure(self) -> QuackError | None:
        return self.full

    @property
    def outage(self) -> StoreUnavailable | None:
        return self.away


def test_a_broker_that_lives_says_what_it_is(api: Client, topic: str) -> None:
    before = api.get("/v1/health").json
    api.publish(topic, "a")
    after = api.get("/v1/health").json
    assert after["status"] == "live"
    assert after["version"] == quackmq.__version__
    assert after["topics"] == before["topics"] + 1
    assert after["connections"] >= 1
    assert after["streams"] == 0
    ready = api.get("/v1/ready")
    assert (ready.status, ready.json["status"]) == (200, "ready")


def test_the_longest_pause_of_the_loop_is_told_with_its_cause() -> None:
    with serving() as served:
        api = served.client()
        served.run(_pause())
        pause = api.get("/v1/health").json["longest_pause"]
        assert pause == {"pause_ms": 2_500, "cpu_ms": 2_400, "ended_ms": 7, "cause": "decoding"}


async def _pause() -> None:
    loop_clock().longest = Pause(2_500, 2_400, 7, "decoding")


def test_a_broker_whose_disk_is_full_lives_but_is_not_ready() -> None:
    store = FullStore()
    with serving(store) as served:
        api = served.client()
        assert api.get("/v1/ready").status == 200
        store.full = StoreReadOnly("no space left on device")
        answer = api.get("/v1/ready")
        assert answer.problem(503, "store_read_only") == "no space left on device"
        assert answer.headers["retry-after"]
        assert api.get("/v1/health").status == 200


def test_a_broker_whose_database_cannot_be_reached_is_ready_when_it_can_again() -> None:
    store = FullStore()
    with serving(store) as served:
        api = served.client()
        store.away = StoreUnavailable("db/orders cannot be reached")
        answer = api.get("/v1/ready")
        assert answer.problem(503, "store_unavailable") == "db/orders cannot be reached"
        assert api.get("/v1/health").status == 200
        store.away = None
        assert api.get("/v1/ready").status == 200


@pytest.mark.parametrize("path", ["/v1/health", "/v1/ready"])
def test_looking_can_be_done_without_a_body(api: Client, path: str) -> None:
    answer = api.ask("HEAD", path)
    assert (answer.status, answer.body) == (200, b"")


def test_health_shows_the_clock_and_its_confirmation() -> None:
    machine = Machine()
    clock = machine.clock()
    with serving(MemoryStore(clock), clock=clock) as served:
        api = served.client()
        assert api.get("/v1/health").json["clock"]["status"] == "steady"
        machine.jump(YEAR_MS)
        shown = api.get("/v1/health").json["clock"]
        assert (shown["status"], shown["ahead_ms"]) == ("jumped", YEAR_MS)
        assert api.get("/v1/clock").json == shown
        answer = api.ask("POST", "/v1/clock/confirm")
        assert (answer.status, answer.json["confirmed"]) == (200, True)
        assert answer.json["clock"] == api.get("/v1/clock").json
        assert answer.json["clock"]["time_ms"] == machine.wall_ms
        assert api.get("/v1/ready").json["clock"]["status"] == "steady"
        again = api.post("/v1/clock/confirm", {"passed": False})
        assert (again.status, again.json["confirmed"]) == (200, False)
        assert api.post("/v1/clock/confirm", {"passt": True}).status == 400
