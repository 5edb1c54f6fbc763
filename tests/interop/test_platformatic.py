"""@platformatic/kafka, a client for Node.js, against the Kafka door.

Node.js has zstd from 22.15 on; an older one gets it from javascript/codecs.mjs. The client reads in
groups only, and logs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from quackmq.model.policy import Policy
from tests.interop import driven, scenarios
from tests.interop.driver import Client, ClientFailure, Driver, Session
from tests.interop.languages import javascript
from tests.interop.programs import Client as ProgramClient
from tests.interop.running import RunningBroker
from tests.interop.table import each_compression

pytestmark = pytest.mark.needs("@platformatic/kafka")

CLIENT: Final = "@platformatic/kafka"
PROGRAM: Final = ProgramClient(*javascript("platformatic-program.mjs"))
CONFIGS_OF_A_TOPIC: Final = 2
SET: Final = 0


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def session(platformatic_driver: Driver, broker: RunningBroker) -> Iterator[Session]:
    """The client is content: what it has to complain about, the broker does wrong."""
    with Session(platformatic_driver, broker.address) as opened:
        yield opened
        assert opened.complaints() == []


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression(CLIENT))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    session: Session, broker: RunningBroker, compression: str
) -> None:
    producer = session.producer(compression=compression)
    driven.batches_are_stored_as_they_were_sent(session, broker, compression, producer)


@pytest.mark.proves(CLIENT, "produce")
@pytest.mark.parametrize("acks", [0, 1, -1])
def test_every_kind_of_acknowledgement_works(
    session: Session, broker: RunningBroker, acks: int
) -> None:
    driven.every_kind_of_acknowledgement_works(session, broker, session.producer(acks=acks))


@pytest.mark.proves(CLIENT, "headers and keys")
def test_records_come_back_with_key_headers_and_time(session: Session) -> None:
    driven.records_come_back_whole(session)


def test_partitions_are_kept_apart_and_each_in_order(
    session: Session, broker: RunningBroker
) -> None:
    driven.partitions_are_kept_apart(session, broker)


@pytest.mark.proves(CLIENT, "consume from start")
def test_a_reader_begins_at_the_start(session: Session) -> None:
    driven.reading_begins_at_the_start(session)


@pytest.mark.proves(CLIENT, "from end")
def test_a_reader_begins_at_the_end(session: Session, broker: RunningBroker) -> None:
    driven.reading_begins_at_the_end(session, broker)


@pytest.mark.proves(CLIENT, "from a time")
def test_a_reader_begins_at_a_time(session: Session) -> None:
    driven.reading_begins_at_a_time(session)


@pytest.mark.proves(CLIENT, "idempotent produce across kill -9")
def test_each_record_is_there_once_and_in_order_whenever_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    scenarios.a_producer_lives_through_kills(PROGRAM, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.proves(CLIENT, "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(PROGRAM)


@pytest.mark.proves(CLIENT, "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(PROGRAM)


@pytest.mark.proves(CLIENT, "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(PROGRAM, tmp_path / "data")


# --- admin calls -------------------------------------------------------------------------------


@pytest.mark.proves(CLIENT, "create topics")
def test_topics_are_created_listed_and_deleted(session: Session, broker: RunningBroker) -> None:
    admin = session.admin()
    configs = [{"name": "retention.ms", "value": "60000"}]
    wanted = {"topics": ["first", "second"], "partitions": 2, "configs": configs}
    created = admin.method("createTopics", wanted)
    assert [(topic["name"], topic["partitions"]) for topic in created] == [
        ("first", 2),
        ("second", 2),
    ]
    assert created[0]["configuration"]["retention.ms"] == "60000"
    assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
    assert failure(admin, "createTopics", {"topics": ["first"]}) == "TOPIC_ALREADY_EXISTS"
    assert admin.method("listTopics") == ["first", "second"]
    admin.method("deleteTopics", {"topics": ["first"]})
    assert admin.method("listTopics") == ["second"]


@pytest.mark.proves(CLIENT, "admin calls", "configs")
def test_configs_are_described_and_altered(session: Session, broker: RunningBroker) -> None:
    admin = session.admin()
    news = {"resourceType": CONFIGS_OF_A_TOPIC, "resourceName": "news"}
    admin.method("createTopics", {"topics": ["news"]})
    change = {"name": "quackmq.live_entries", "value": "10", "configOperation": SET}
    admin.method("incrementalAlterConfigs", {"resources": [{**news, "configs": [change]}]})
    assert broker.broker.topic("news").policy == Policy(live_entries=10)
    instead = {"name": "retention.ms", "value": "60000"}
    admin.method("alterConfigs", {"resources": [{**news, "configs": [instead]}]})
    assert broker.broker.topic("news").policy == Policy(keep_for_ms=60_000)
    asked = {"resources": [{**news, "configurationKeys": ["retention.ms"]}]}
    (described,) = admin.method("describeConfigs", asked)
    assert [(one["name"], one["value"]) for one in described["configs"]] == [
        ("retention.ms", "60000")
    ]
    change["name"] = "no.such"
    refused = {"resources": [{**news, "configs": [change]}]}
    assert failure(admin, "incrementalAlterConfigs", refused) == "INVALID_CONFIG"


@pytest.mark.proves(CLIENT, "admin calls", "partitions")
def test_a_topic_gets_more_partitions(session: Session, broker: RunningBroker) -> None:
    admin = session.admin()
    admin.method("createTopics", {"topics": ["news"]})
    wanted = {"name": "news", "count": 3}
    admin.method("createPartitions", {"topics": [wanted]})
    assert broker.broker.topic("news").partitions == 3
    wanted["count"] = 2
    assert failure(admin, "createPartitions", {"topics": [wanted]}) == "INVALID_PARTITIONS"


@pytest.mark.proves(CLIENT, "admin calls", "delete records")
def test_records_are_deleted_up_to_an_offset(session: Session) -> None:
    driven.publish_with_times(session)
    admin = session.admin()

    def delete(before: int) -> dict[str, Any]:
        partitions = [{"partition": 0, "offset": {"bigint": before}}]
        return {"topics": [{"name": "news", "partitions": partitions}]}

    (deleted,) = admin.method("deleteRecords", delete(4))
    assert deleted["partitions"] == [{"partition": 0, "lowWatermark": 4}]
    assert driven.reader(session, "start").values(6) == list("456789")
    assert failure(admin, "deleteRecords", delete(11)) == "OFFSET_OUT_OF_RANGE"


def test_offsets_and_sizes_are_told(session: Session) -> None:
    driven.publish_with_times(session)
    admin = session.admin()
    for wanted, found in {-2: (0, -1), -1: (10, -1), -3: (9, 1900), 1450: (5, 1500)}.items():
        partitions = [{"partitionIndex": 0, "timestamp": {"bigint": wanted}}]
        asked = {"topics": [{"name": "news", "partitions": partitions}]}
        (topic,) = admin.method("listOffsets", asked)
        (partition,) = topic["partitions"]
        assert (partition["offset"], partition["timestamp"]) == found
    (told,) = admin.method("describeLogDirs", {"topics": [{"name": "news", "partitions": [0]}]})
    ((topic,),) = [result["topics"] for result in told["results"]]
    assert topic["partitions"][0]["partitionSize"] > 0


@pytest.mark.proves(CLIENT, "admin calls", "groups")
def test_groups_are_described_and_emptied_their_offsets_moved_and_all_deleted(
    session: Session,
) -> None:
    driven.publish_with_times(session)
    admin = session.admin()

    def committed() -> list[tuple[int, int]]:
        (group,) = admin.method("listConsumerGroupOffsets", {"groups": ["ducks"]})
        parts = [part for topic in group["topics"] for part in topic["partitions"]]
        return [(part["partitionIndex"], part["committedOffset"]) for part in parts]

    member = session.consumer(groupId="ducks", groupInstanceId="ann")
    member.call("subscribe", topics=["news"])
    assert member.values(10) == list("0123456789")
    five = {"topic": "news", "partition": 0, "offset": {"bigint": 5}, "leaderEpoch": 0}
    member.method("commit", {"offsets": [five]})
    assert committed() == [(0, 5)]
    listed = admin.method("listGroups")["ducks"]
    assert (listed["state"].upper(), listed["groupType"]) == ("STABLE", "classic")
    described = admin.method("describeGroups", {"groups": ["ducks"]})["ducks"]
    (one,) = described["members"].values()
    assert (one["groupInstanceId"], one["clientId"]) == ("ann", "platformatic")
    assert one["assignments"] == {"news": {"topic": "news", "partitions": [0]}}
    four = {"name": "news", "partitionOffsets": [{"partition": 0, "offset": {"bigint": 4}}]}
    moved = {"groupId": "ducks", "topics": [four]}
    assert failure(admin, "alterConsumerGroupOffsets", moved) == "UNKNOWN_MEMBER_ID"
    assert failure(admin, "deleteGroups", {"groups": ["ducks"]}) == "NON_EMPTY_GROUP"
    member.close()
    admin.method("alterConsumerGroupOffsets", moved)
    assert committed() == [(0, 4)]
    named = {"groupId": "ducks", "topics": [{"name": "news", "partitionIndexes": [0]}]}
    admin.method("deleteConsumerGroupOffsets", named)
    assert committed() == []
    admin.method("deleteGroups", {"groups": ["ducks"]})
    assert admin.method("listGroups") == {}
    assert failure(admin, "deleteGroups", {"groups": ["ducks"]}) == "GROUP_ID_NOT_FOUND"


def failure(client: Client, name: str, *given: Any) -> str:
    """The broker's name for what went wrong."""
    with pytest.raises(ClientFailure) as raised:
        client.method(name, *given)
    return raised.value.name
