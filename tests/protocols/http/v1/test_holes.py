"""Offsets that no reader is given, and why; and receipts as they are asked for over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.protocols.http import limits as http_limits
from tests.broker.transacting import Transactor
from tests.protocols.http.v1.serving import Client, Serving, serving
from tests.stores.local.directories import flip, packs_of


def holes_of(api: Client, topic: str, offset: int = 0) -> Any:
    answer = api.get(f"/v1/topics/{topic}/partitions/0/holes?offset={offset}")
    assert answer.status == 200, answer
    return answer.json


def test_markers_and_aborted_batches_are_told_with_their_producers_numbers(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, "a", "b")
    transactor = Transactor(served.broker, f"till of {topic}", implicit=False)
    served.run(transactor.init())
    served.run(transactor.send(b"c", b"d", b"e", topic=topic))
    served.run(transactor.commit())
    served.run(transactor.send(b"never", b"nor this", topic=topic))
    served.run(transactor.abort())
    producer = {
        "producer_id": transactor.producer.producer_id,
        "producer_epoch": transactor.producer.epoch,
    }
    found = holes_of(api, topic)
    assert found["holes"] == [
        {"first_offset": 5, "next_offset": 6, "reason": "marker", **producer, "first_sequence": -1},
        {"first_offset": 6, "next_offset": 8, "reason": "aborted", **producer, "first_sequence": 3},
        {"first_offset": 8, "next_offset": 9, "reason": "marker", **producer, "first_sequence": -1},
    ]
    assert (found["next_offset"], found["end_offset"]) == (9, 9)
    assert len(holes_of(api, topic, 8)["holes"]) == 1
    assert holes_of(api, topic, 9) == {"holes": [], "next_offset": 9, "end_offset": 9}


def test_a_stretch_is_bounded_and_its_reader_moves_on(
    served: Serving, api: Client, topic: str
) -> None:
    transactor = Transactor(served.broker, f"till of {topic}")
    served.run(transactor.init())
    api.publish(topic, "first")
    large = b"x" * (http_limits.HTTP_HOLES_BYTES // 2)
    for _ in range(4):
        served.run(transactor.send(large, topic=topic))
        served.run(transactor.abort())
    found: list[int] = []
    offset = requests = 0
    while offset < 9:
        page = holes_of(api, topic, offset)
        found += [hole["first_offset"] for hole in page["holes"]]
        assert page["next_offset"] > offset
        offset, requests = page["next_offset"], requests + 1
    assert found == list(range(1, 9))
    assert requests > 1


def test_holes_of_nowhere_are_refused(api: Client, topic: str) -> None:
    api.publish(topic, "a")
    path = f"/v1/topics/{topic}/partitions"
    api.get(f"{path}/0/holes?offset=7").problem(416, "offset_out_of_range")
    api.get(f"{path}/1/holes?offset=0").problem(404, "unknown_partition")
    other = "00000000-0000-0000-0000-000000000000"
    api.get(f"{path}/0/holes?offset=0&topic_id={other}").problem(404, "unknown_topic")


def test_what_is_damaged_is_told_with_where_to_go_on(tmp_path: Path) -> None:
    """As by whoever reads batches: nobody is stuck in front of it."""
    topic, values = "ducks", ("first", "second", "third")
    with serving(directory=tmp_path) as running:
        for value in values:
            running.client().publish(topic, value)
    (pack,) = packs_of(tmp_path)
    flip(pack, pack.read_bytes().index(b"second"))
    with serving(directory=tmp_path) as running:
        api = running.client()
        for page in ("holes", "batches"):
            path = f"/v1/topics/{topic}/partitions/0/{page}?offset="
            answer = api.get(f"{path}1")
            answer.problem(500, "damaged_data")
            assert answer.headers["quackmq-next-offset"] == "2"
            assert api.get(f"{path}2").status == 200


def test_receipts_are_asked_for_shown_and_ended(api: Client, topic: str) -> None:
    path = f"/v1/subscriptions/billing/topics/{topic}"
    assert api.put(path, {"start": "beginning", "receipts": True}).json["receipts"] is True
    api.publish(topic, "a")
    first = api.post(f"{path}/get").json
    api.post(f"{path}/ack", {"id": first["id"]})
    assert api.put(path, {}).json["receipts"] is True
    listed = api.get(f"/v1/subscriptions?topic={topic}").json["subscriptions"]
    assert [each["receipts"] for each in listed] == [True]
    assert api.put(path, {"receipts": False}).json["receipts"] is False
    read = api.get(f"/v1/topics/{RECEIPTS_TOPIC}/partitions/0/messages?offset=0").json["messages"]
    assert [each["key"] for each in read] == ["billing", "billing"]
    refused = api.put(f"/v1/subscriptions/x/topics/{RECEIPTS_TOPIC}", {"receipts": True})
    assert "leave no receipts" in refused.problem(400, "invalid_request")
