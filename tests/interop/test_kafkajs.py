"""kafkajs, a client for Node.js, against the Kafka door.

It has gzip of its own; other codecs are plug-ins (javascript/codecs.mjs). It reads in groups only.
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

pytestmark = pytest.mark.needs("kafkajs")

PROGRAM: Final = ProgramClient(*javascript("kafkajs-program.mjs"))
CONFIGS_OF_A_TOPIC: Final = 2


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def session(kafkajs_driver: Driver, broker: RunningBroker) -> Iterator[Session]:
    """The client is content: what it has to complain about, the broker does wrong."""
    with Session(kafkajs_driver, broker.address) as opened:
        yield opened
        assert opened.complaints() == []


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression("kafkajs"))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    session: Session, broker: RunningBroker, compression: str
) -> None:
    producer = session.producer(compression=compression)
    driven.batches_are_stored_as_they_were_sent(session, broker, compression, producer)


@pytest.mark.proves("kafkajs", "produce")
@pytest.mark.parametrize("acks", [0, 1, -1])
def test_every_kind_of_acknowledgement_works(
    session: Session, broker: RunningBroker, acks: int
) -> None:
    driven.every_kind_of_acknowledgement_works(session, broker, session.producer(acks=acks))


@pytest.mark.proves("kafkajs", "headers and keys")
def test_records_come_back_with_key_headers_and_time(session: Session) -> None:
    driven.records_come_back_whole(session, empty_header="")


def test_partitions_are_kept_apart_and_each_in_order(
    session: Session, broker: RunningBroker
) -> None:
    driven.partitions_are_kept_apart(session, broker)


@pytest.mark.proves("kafkajs", "consume from start")
def test_a_reader_begins_at_the_start(session: Session) -> None:
    driven.reading_begins_at_the_start(session)


@pytest.mark.proves("kafkajs", "from end")
def test_a_reader_begins_at_the_end(session: Session, broker: RunningBroker) -> None:
    driven.reading_begins_at_the_end(session, broker)


@pytest.mark.proves("kafkajs", "from a time")
def test_a_reader_begins_at_a_time(session: Session) -> None:
    driven.reading_begins_at_a_time(session)


@pytest.mark.proves("kafkajs", "idempotent produce across kill -9")
def test_each_record_is_there_once_and_in_order_whenever_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    scenarios.a_producer_lives_through_kills(PROGRAM, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.proves("kafkajs", "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(PROGRAM)


@pytest.mark.proves("kafkajs", "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(PROGRAM, tmp_path / "data")


# --- admin calls -------------------------------------------------------------------------------


@pytest.mark.proves("kafkajs", "create topics")
def test_topics_are_created_described_listed_and_deleted(
    session: Session, broker: RunningBroker
) -> None:
    admin = session.admin()
    config = {"name": "retention.ms", "value": "60000"}
    wanted = {"topic": "first", "numPartitions": 2, "configEntries": [config]}
    assert admin.method("createTopics", {"topics": [wanted, {"topic": "second"}]}) is True
    assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
    assert sorted(admin.method("listTopics")) == ["first", "second"]
    (described,) = admin.method("fetchTopicMetadata", {"topics": ["first"]})["topics"]
    leaders = [(part["partitionId"], part["leader"]) for part in described["partitions"]]
    assert sorted(leaders) == [(0, 1), (1, 1)]
    cluster = admin.method("describeCluster")
    assert (cluster["clusterId"], cluster["controller"]) == (broker.broker.cluster_id, 1)
    admin.method("deleteTopics", {"topics": ["first"]})
    assert admin.method("listTopics") == ["second"]
    session.expect("Topic creation errors")
    # What is there already it does not take for an error.
    assert admin.method("createTopics", {"topics": [{"topic": "second"}]}) is False
    assert failure(admin, "createTopics", {"topics": [{"topic": "a b"}]}) == (
        "INVALID_TOPIC_EXCEPTION"
    )


@pytest.mark.proves("kafkajs", "admin calls", "configs")
def test_configs_are_described_and_altered(session: Session, broker: RunningBroker) -> None:
    admin = session.admin()
    news = {"type": CONFIGS_OF_A_TOPIC, "name": "news"}
    admin.method("createTopics", {"topics": [{"topic": "news"}]})
    entries = [{"name": "quackmq.live_entries", "value": "10"}]
    altered = {"validateOnly": False, "resources": [{**news, "configEntries": entries}]}
    admin.method("alterConfigs", altered)
    assert broker.broker.topic("news").policy == Policy(live_entries=10)
    asked = {"includeSynonyms": True, "resources": [{**news, "configNames": [entries[0]["name"]]}]}
    (described,) = admin.method("describeConfigs", asked)["resources"]
    (entry,) = described["configEntries"]
    assert (entry["configValue"], entry["isDefault"]) == ("10", False)
    session.expect("Response AlterConfigs")
    entries[0]["name"] = "no.such"
    assert failure(admin, "alterConfigs", altered) == "INVALID_CONFIG"


@pytest.mark.proves("kafkajs", "admin calls", "partitions")
def test_a_topic_gets_more_partitions(session: Session, broker: RunningBroker) -> None:
    admin = session.admin()
    admin.method("createTopics", {"topics": [{"topic": "news"}]})
    wanted = {"topic": "news", "count": 3}
    admin.method("createPartitions", {"topicPartitions": [wanted]})
    assert broker.broker.topic("news").partitions == 3
    session.expect("Response CreatePartitions")
    wanted["count"] = 2
    assert failure(admin, "createPartitions", {"topicPartitions": [wanted]}) == (
        "INVALID_PARTITIONS"
    )


@pytest.mark.proves("kafkajs", "admin calls", "delete records")
def test_records_are_deleted_up_to_an_offset(session: Session) -> None:
    driven.publish_with_times(session)
    admin = session.admin()
    records = {"topic": "news", "partitions": [{"partition": 0, "offset": "4"}]}
    # It knows no topic but those that it was asked about.
    admin.method("fetchTopicOffsets", "news")
    admin.method("deleteTopicRecords", records)
    (offsets,) = admin.method("fetchTopicOffsets", "news")
    assert (offsets["low"], offsets["high"]) == ("4", "10")
    assert driven.reader(session, "start").values(6) == list("456789")


@pytest.mark.proves("kafkajs", "admin calls", "groups")
def test_groups_are_listed_described_and_deleted_and_their_offsets_moved(
    session: Session,
) -> None:
    driven.publish_with_times(session)
    admin = session.admin()

    def committed() -> list[tuple[int, str]]:
        (topic,) = admin.method("fetchOffsets", {"groupId": "ducks", "topics": ["news"]})
        return [(part["partition"], part["offset"]) for part in topic["partitions"]]

    member = session.consumer(groupId="ducks")
    member.call("subscribe", topics=["news"])
    assert member.values(10) == list("0123456789")
    member.method("commitOffsets", [{"topic": "news", "partition": 0, "offset": "5"}])
    assert committed() == [(0, "5")]
    (listed,) = admin.method("listGroups")["groups"]
    assert (listed["groupId"], listed["protocolType"]) == ("ducks", "consumer")
    described, none = admin.method("describeGroups", ["ducks", "none"])["groups"]
    assert (described["state"], described["protocol"]) == ("Stable", "RoundRobinAssigner")
    assert [one["clientId"] for one in described["members"]] == ["kafkajs"]
    assert none["state"] == "Dead"
    member.close()
    # To set offsets it joins the group and takes five seconds for it: once is enough.
    admin.method("resetOffsets", {"groupId": "ducks", "topic": "news", "earliest": True})
    assert committed() == [(0, "0")]
    admin.method("deleteGroups", ["ducks"])
    assert admin.method("listGroups")["groups"] == []


def failure(client: Client, name: str, *given: Any) -> str:
    """The broker's name for what went wrong."""
    with pytest.raises(ClientFailure) as raised:
        client.method(name, *given)
    return raised.value.name
