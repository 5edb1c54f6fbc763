"""`getentry` over HTTP: entries by number, from 1 on, and the answer if there is none (Q5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quackmq.stores.memory import MemoryStore
from tests.broker.transacting import Transactor
from tests.kit.machine_clock import Machine
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import Client, Serving, serving


def get_entry(api: Client, topic: str, last: int | None = None, partition: int = 0) -> Any:
    query = "" if last is None else f"?last={last}"
    answer = api.get(f"/v1/topics/{topic}/partitions/{partition}/entry{query}")
    assert answer.status == 200, answer
    return answer.json


def numbers(api: Client, topic: str) -> list[int]:
    """The numbers that a polling reader gets, with the answer that ends them."""
    found = [get_entry(api, topic)["number"]]
    while found[-1] > 0:
        found.append(get_entry(api, topic, found[-1])["number"])
    return found


def test_q5_entries_are_numbered_from_1_without_gaps_until_minus_the_last(
    api: Client, topic: str
) -> None:
    assert api.put(f"/v1/topics/{topic}").status == 200
    assert get_entry(api, topic) == {"number": 0, "entry": None}
    headers = [{"name": "publisher", "value": "donald"}]
    messages = [{"value": "Ducks win", "headers": headers}, {"value_base64": "/+8="}]
    assert api.post(f"/v1/topics/{topic}/messages", {"messages": messages}).status == 201
    api.publish(topic, *"cdefg")
    stored = api.get(f"/v1/topics/{topic}/partitions/0/messages").json["messages"]
    first_ms, second_ms = (each["timestamp_ms"] for each in stored[:2])
    assert get_entry(api, topic, 0) == {
        "number": 1,
        "entry": {"timestamp_ms": first_ms, "publisher": "donald", "value": "Ducks win"},
    }
    assert get_entry(api, topic, 1) == {
        "number": 2,
        "entry": {"timestamp_ms": second_ms, "publisher": "", "value_base64": "/+8="},
    }
    assert numbers(api, topic) == [1, 2, 3, 4, 5, 6, 7, -7]
    assert get_entry(api, topic, 100) == {"number": -7, "entry": None}


def test_q5_the_queue_holds_maxentries_that_are_younger_than_delta() -> None:
    machine = Machine()
    clock = machine.clock()
    with serving(MemoryStore(clock), clock=clock) as served:
        api = served.client()
        policy = {"live_entries": 3, "live_for_ms": 1_000}
        assert api.post("/v1/topics", {"name": "news", "policy": policy}).status == 201
        api.publish("news", *"abcd")
        assert numbers(api, "news") == [2, 3, 4, -4], "the first entry has left; a newer one comes"
        machine.pass_ms(999)
        api.publish("news", "e")
        machine.pass_ms(1)
        assert numbers(api, "news") == [5, -5]
        machine.pass_ms(1_000)
        assert numbers(api, "news") == [-5]


def test_q8_entries_that_leave_the_queue_are_archived_soon(tmp_path: Path) -> None:
    machine = Machine()
    with serving(directory=tmp_path, clock=machine.clock()) as served:
        api = served.client()
        policy = {"live_for_ms": 1_000, "archive_after_live_ms": 2_000}
        assert api.post("/v1/topics", {"name": "news", "policy": policy}).status == 201
        api.publish("news", *"abc")

        def archived_to() -> int:
            (partition,) = api.get("/v1/topics/news/archive").json["partitions"]
            return int(partition["next_offset"])

        assert (numbers(api, "news"), archived_to()) == ([1, 2, 3, -3], 0)
        machine.pass_ms(1_000)
        assert numbers(api, "news") == [-3]
        machine.pass_ms(2_000)
        wait_until(lambda: archived_to() == 3, "the entries are in the archive")
        history = api.get("/v1/topics/news/partitions/0/messages").json["messages"]
        assert [message["value"] for message in history] == ["a", "b", "c"]


def test_q5_a_topic_refuses_entries_of_more_than_quacksize_bytes(api: Client) -> None:
    assert api.post("/v1/topics", {"name": "short", "policy": {"entry_bytes": 5}}).status == 201
    api.publish("short", "quack")
    refused = api.post("/v1/topics/short/messages", {"value": "quacks"})
    assert "an entry of 6 bytes" in refused.problem(413, "record_too_large")
    assert api.ask("PATCH", "/v1/topics/short", {"policy": {"entry_bytes": 6}}).status == 200
    api.publish("short", "quacks")
    assert numbers(api, "short") == [1, 2, -2]


def test_each_partition_has_numbers_of_its_own(api: Client) -> None:
    assert api.post("/v1/topics", {"name": "parts", "partitions": 2}).status == 201
    api.publish("parts", "a", "b", query="?partition=1")
    assert get_entry(api, "parts", 0, partition=0)["number"] == 0
    assert get_entry(api, "parts", 1, partition=1)["entry"]["value"] == "b"


def test_marks_of_transactions_take_numbers_and_open_ones_hide_newer_entries(
    served: Serving, api: Client, topic: str
) -> None:
    assert api.put(f"/v1/topics/{topic}").status == 200
    transactor = Transactor(served.broker, topic)
    served.run(transactor.init())
    served.run(transactor.send(b"a", topic=topic))
    assert numbers(api, topic) == [0], "not decided yet"
    served.run(transactor.commit())
    api.publish(topic, "b")
    assert numbers(api, topic) == [1, 3, -3], "number 2 is the mark of the commit"


def test_what_is_not_there_is_named(api: Client, topic: str) -> None:
    assert api.put(f"/v1/topics/{topic}").status == 200
    api.get("/v1/topics/none/partitions/0/entry").problem(404, "unknown_topic")
    api.get(f"/v1/topics/{topic}/partitions/7/entry").problem(404, "unknown_partition")
    api.get(f"/v1/topics/{topic}/partitions/0/entry?last=-1").problem(400, "invalid_request")
    api.get(f"/v1/topics/{topic}/partitions/0/entry?lst=1").problem(400, "invalid_request")
