"""Record batches over HTTP as they are, and the offsets of many partitions at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quackmq import limits
from quackmq.model.topic import Append, PartitionKey
from quackmq.protocols.http import limits as http_limits
from quackmq.records import codec
from quackmq.records.batch import Batch, batches
from tests.broker.transacting import Transactor
from tests.kit.support import batch_of
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S, Answered, Client, Serving


def path_of(topic: str, query: str, partition: int = 0) -> str:
    return f"/v1/topics/{topic}/partitions/{partition}/batches?{query}"


def values(answer: Answered) -> list[bytes | None]:
    assert answer.status == 200, answer
    assert answer.headers["content-type"] == "application/octet-stream"
    return [
        record.value
        for batch in batches(answer.body)
        if not batch.is_control
        for record in codec.decode(Batch.parse(batch.view))
    ]


def offsets(answer: Answered) -> tuple[int, int, int]:
    names = ("first", "next", "end")
    first, following, end = (int(answer.headers[f"quackmq-{name}-offset"]) for name in names)
    return first, following, end


def append(served: Serving, topic: str, *batch_values: list[bytes]) -> None:
    key = PartitionKey(served.run(served.broker.ensure_topic(CALLER, topic)).id, 0)

    async def publish() -> None:
        for some in batch_values:
            await served.broker.publish_together(
                CALLER, served.broker.topic(topic), [Append(key, batch_of(*some))]
            )

    served.run(publish())


def test_batches_are_given_as_they_are_from_the_one_that_holds_the_offset(
    served: Serving, api: Client, topic: str
) -> None:
    append(served, topic, [b"a", b"b"], [b"c"], [b"d", b"e", b"f"])
    answer = api.get(path_of(topic, "offset=0"))
    assert values(answer) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert offsets(answer) == (0, 6, 6)
    within = api.get(path_of(topic, "offset=1"))
    assert values(within)[:2] == [b"a", b"b"]
    at_end = api.get(path_of(topic, "offset=6"))
    assert (values(at_end), offsets(at_end)) == ([], (0, 6, 6))


def test_batches_that_begin_at_the_end_or_later_are_left_out(
    served: Serving, api: Client, topic: str
) -> None:
    append(served, topic, [b"a", b"b"], [b"c"], [b"d", b"e", b"f"])
    for end, expected, following in (
        (1, [b"a", b"b"], 2),
        (2, [b"a", b"b"], 2),
        (3, [b"a", b"b", b"c"], 3),
        (4, [b"a", b"b", b"c", b"d", b"e", b"f"], 6),
    ):
        answer = api.get(path_of(topic, f"offset=0&end={end}"))
        assert values(answer) == expected
        assert offsets(answer)[1] == following
    nothing = api.get(path_of(topic, "offset=3&end=3"))
    assert (values(nothing), offsets(nothing)[1]) == ([], 3)


def test_an_answer_is_bounded_and_its_reader_moves_on(
    served: Serving, api: Client, topic: str
) -> None:
    append(served, topic, *([b"x" * 1_000] for _ in range(20)))
    read: list[bytes | None] = []
    offset, answers = 0, 0
    while offset < 20:
        answer = api.get(path_of(topic, f"offset={offset}&max_bytes=3000"))
        assert 0 < len(answer.body) <= 3_000
        read += values(answer)
        offset = offsets(answer)[1]
        answers += 1
    assert len(read) == 20 and answers > 5
    assert len(values(api.get(path_of(topic, "offset=0&max_bytes=1")))) == 1


def test_only_what_is_committed_is_given(served: Serving, api: Client, topic: str) -> None:
    append(served, topic, [b"plain"])
    transactor = Transactor(served.broker, topic)
    served.run(transactor.init())
    served.run(transactor.send(b"aborted", topic=topic))
    served.run(transactor.abort())
    served.run(transactor.send(b"committed", topic=topic))
    served.run(transactor.commit())
    end = offsets(api.get(path_of(topic, "offset=0")))[2]
    served.run(transactor.send(b"open", topic=topic))
    append(served, topic, [b"behind it"])
    answer = api.get(path_of(topic, "offset=0"))
    assert values(answer) == [b"plain", b"committed"]
    assert offsets(answer) == (0, end, end)
    only_aborted = api.get(path_of(topic, "offset=1&end=2"))
    assert values(only_aborted) == [] and offsets(only_aborted)[1] >= 2
    served.run(transactor.abort())


def test_append_times_are_told_as_differences(served: Serving, api: Client, topic: str) -> None:
    append(served, topic, [b"a", b"b"], [b"c"])
    assert "quackmq-append-times" not in api.get(path_of(topic, "offset=0")).headers
    told = api.get(path_of(topic, "offset=0&append_times=true")).headers["quackmq-append-times"]
    offset, time_ms = told.split(",")[0].split(":")
    assert int(offset) == 0 and int(time_ms) > 1_600_000_000_000


def test_an_answer_with_many_append_times_is_shorter(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(served, topic, *([b"x"] for _ in range(10)))
    monkeypatch.setattr(http_limits, "HTTP_APPEND_TIMES", 1)
    read: list[bytes | None] = []
    offset = 0
    while offset < 10:
        answer = api.get(path_of(topic, f"offset={offset}&append_times=true"))
        assert answer.headers["quackmq-append-times"].count(":") == 1
        read += values(answer)
        offset = offsets(answer)[1]
    assert len(read) == 10


def test_a_reader_waits_for_batches(served: Serving, api: Client, topic: str) -> None:
    append(served, topic, [b"a"])
    found: list[list[bytes | None]] = []

    def wait() -> None:
        found.append(values(served.client().get(path_of(topic, "offset=1&wait_ms=30000"))))

    waiting = threading.Thread(target=wait)
    waiting.start()
    append(served, topic, [b"b"])
    waiting.join(DEADLINE_S)
    assert found == [[b"b"]]


def test_a_topic_made_anew_is_not_read_by_who_names_the_former_id(
    served: Serving, api: Client, topic: str
) -> None:
    append(served, topic, [b"old"])
    former = served.broker.topic(topic).id
    assert values(api.get(path_of(topic, f"offset=0&topic_id={former}"))) == [b"old"]
    served.run(served.broker.delete_topic(CALLER, topic))
    append(served, topic, [b"new"])
    detail = api.get(path_of(topic, f"offset=0&topic_id={former}")).problem(404, "unknown_topic")
    assert "created again" in detail


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("", 400, "invalid_request"),
        ("offset=-1", 400, "invalid_request"),
        ("offset=7", 416, "offset_out_of_range"),
        ("offset=0&max_bytes=0", 400, "invalid_request"),
        ("offset=0&topic_id=x", 400, "invalid_request"),
        ("offset=0&append_times=yes", 400, "invalid_request"),
        ("offset=0&endd=3", 400, "invalid_request"),
    ],
)
def test_what_cannot_be_read_is_refused(
    served: Serving, api: Client, query: str, status: int, code: str
) -> None:
    append(served, "there", [b"a"])
    api.get(path_of("there", query)).problem(status, code)


# --- offsets -------------------------------------------------------------------------------------


def ask(api: Client, **body: Any) -> dict[str, Any]:
    answer = api.post("/v1/offsets", body)
    assert answer.status == 200, answer
    return dict(answer.json)


def test_offsets_of_many_topics_are_told_at_once(served: Serving, api: Client, topic: str) -> None:
    append(served, topic, [b"a", b"b"])
    served.run(served.broker.create_topic(CALLER, f"{topic}.2", partitions=2))
    found = ask(api, topics=[topic, "nothing", f"{topic}.2"])
    assert found["cluster_id"] == served.broker.cluster_id
    one, two = found["topics"]
    assert (one["topic"], one["id"]) == (topic, str(served.broker.topic(topic).id))
    (partition,) = one["partitions"]
    assert partition.pop("bytes") > 0
    assert partition == {
        "partition": 0,
        "first_offset": 0,
        "next_offset": 2,
        "stable_offset": 2,
    }
    assert [each["partition"] for each in two["partitions"]] == [0, 1]


def test_who_is_at_the_end_waits_for_more_and_who_is_not_hears_at_once(
    served: Serving, api: Client, topic: str
) -> None:
    append(served, topic, [b"a"])
    behind = [{"topic": topic, "partition": 0, "offset": 0}]
    assert ask(api, topics=[topic], beyond=behind, wait_ms=30_000)["topics"]
    at_end = [{"topic": topic, "partition": 0, "offset": 1}]
    found: list[Any] = []

    def wait() -> None:
        found.append(ask(served.client(), topics=[topic], beyond=at_end, wait_ms=30_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    append(served, topic, [b"b"])
    waiting.join(DEADLINE_S)
    assert found[0]["topics"][0]["partitions"][0]["stable_offset"] == 2
    in_vain = ask(api, topics=[topic], beyond=[{**at_end[0], "offset": 2}], wait_ms=1)
    assert in_vain["topics"][0]["partitions"][0]["stable_offset"] == 2
    ask(
        api, topics=[topic], beyond=[{"topic": "gone", "partition": 0, "offset": 0}], wait_ms=30_000
    )


def test_too_many_partitions_in_one_answer_are_refused(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.run(served.broker.create_topic(CALLER, topic, partitions=3))
    monkeypatch.setattr(limits, "HTTP_OFFSETS_PARTITIONS", 2)
    api.post("/v1/offsets", {"topics": [topic]}).problem(429, "limit_reached")


def test_publishers_have_their_names(served: Serving, api: Client, topic: str) -> None:
    transactor = Transactor(served.broker, topic)
    producer_id = served.run(transactor.init()).producer_id
    answer = api.post("/v1/publishers", {"producer_ids": [producer_id, 2**40]})
    assert answer.json == {"publishers": [{"producer_id": producer_id, "name": topic}]}
