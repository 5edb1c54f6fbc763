"""Options: those of Spark's Kafka source, and what is wrong with them quoted."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.spark.source.options import (
    Assign,
    Offsets,
    Pattern,
    Subscribe,
    Times,
    batch_options,
    stream_options,
)
from tests.kit.tables import each

BASE = {"kafka.bootstrap.servers": "here:1", "subscribe": "ducks"}


def test_a_batch_reads_all_there_is_and_a_stream_what_comes() -> None:
    batch, stream = batch_options(BASE), stream_options(BASE)
    assert (batch.starting, batch.ending) == ("earliest", "latest")
    assert stream.starting == "latest"
    assert batch.selection == Subscribe(("ducks",))
    assert batch.fail_on_data_loss and batch.group is None and batch.min_partitions == 1


def test_names_are_in_any_case_and_values_may_have_spaces_around_them() -> None:
    options = stream_options(
        {
            "KAFKA.BOOTSTRAP.SERVERS": "here:1",
            "Subscribe": " geese , ducks ",
            "STARTINGOFFSETS": "Earliest",
            "maxoffsetspertrigger": " 17 ",
            "failondataloss": "FALSE",
            "groupid": "flock",
        }
    )
    assert options.selection == Subscribe(("ducks", "geese"))
    assert (options.starting, options.max_offsets) == ("earliest", 17)
    assert (options.fail_on_data_loss, options.group) == (False, "flock")


def test_what_to_read_is_said_by_names_a_pattern_or_partitions() -> None:
    given = {"kafka.bootstrap.servers": "here:1"}
    pattern = batch_options({**given, "subscribePattern": "duck.*"}).selection
    assert isinstance(pattern, Pattern) and pattern.pattern.fullmatch("ducks")
    assigned = batch_options({**given, "assign": '{"ducks":[1,0,1]}'}).selection
    assert assigned == Assign({"ducks": (0, 1)})


def test_offsets_and_times_a_partition() -> None:
    given = {**BASE, "startingOffsets": '{"ducks":{"0":17,"1":-2}}'}
    assert batch_options(given).starting == Offsets("startingOffsets", {"ducks": {0: 17, 1: -2}})
    given = {**BASE, "startingTimestamp": "5", "startingOffsets": "earliest"}
    assert batch_options(given).starting == Times("startingTimestamp", 5, {})
    given = {**BASE, "endingOffsetsByTimestamp": '{"ducks":{"0":5}}'}
    assert batch_options(given).ending == Times(
        "endingOffsetsByTimestamp", None, {"ducks": {0: 5}}, or_latest=True
    )
    given = {**BASE, "startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "latest"}
    assert stream_options(given).starting == Times("startingTimestamp", 5, {}, or_latest=True)


def test_settings_of_kafkas_go_on_to_the_client_but_for_those_that_are_ours() -> None:
    options = batch_options({**BASE, "kafka.client.rack": "pond", "kafka.group.id": "flock"})
    assert options.kafka == {"client.rack": "pond"}
    assert options.group == "flock"


@pytest.mark.parametrize(("text", "delay_ms"), [("500", 500), ("500ms", 500), ("2 m", 120_000)])
def test_a_time_may_have_a_unit_as_in_sparks_kafka_source(text: str, delay_ms: int) -> None:
    assert stream_options({**BASE, "maxTriggerDelay": text}).max_delay_ms == delay_ms


def test_options_of_sparks_kafka_source_that_mean_nothing_here_are_left_alone() -> None:
    batch_options({**BASE, "kafkaConsumer.pollTimeoutMs": "512", "fetchOffset.numRetries": "3"})


WRONG = [
    ({"startingOfsets": "earliest"}, "'startingofsets'; is startingOffsets meant?"),
    ({"xyz": "1"}, "there is no option 'xyz'$"),
    ({"startingOffsets": "erliest"}, "startingOffsets cannot be 'erliest'"),
    ({"startingOffsets": "latest"}, "startingOffsets cannot be 'latest': it is earliest, or JSON"),
    ({"startingOffsets": '{"ducks":{"0":-1}}'}, r"startingOffsets .* -1 \(latest\) is not allowed"),
    ({"endingOffsets": '{"ducks":{"0":-2}}'}, r"endingOffsets .* -2 \(earliest\) is not allowed"),
    ({"endingOffsets": '{"ducks":{"0":-3}}'}, "endingOffsets cannot be"),
    ({"endingOffsets": '{"ducks":{"x":3}}'}, "endingOffsets cannot be"),
    ({"endingOffsets": '{"ducks":{"0":true}}'}, "endingOffsets cannot be"),
    ({"endingOffsets": '{"ducks":'}, "endingOffsets cannot be"),
    ({"endingOffsets": "{}"}, "endingOffsets cannot be"),
    (
        {"endingOffsets": '{"geese":{"0":3}}'},
        "endingOffsets names the topics geese, but the query reads d",
    ),
    ({"startingTimestamp": "-1"}, "startingTimestamp cannot be '-1'"),
    ({"startingOffsetsByTimestamp": '{"ducks":{"0":-1}}'}, "startingOffsetsByTimestamp cannot be"),
    ({"startingOffsetsByTimestampStrategy": "none"}, "startingOffsetsByTimestampStrategy cannot"),
    ({"maxTriggerDelay": "soon"}, "maxTriggerDelay cannot be 'soon': it is a time like 500ms"),
    ({"minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger cannot be '0'"),
    ({"minPartitions": "0"}, "minPartitions cannot be '0'"),
    ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger cannot be 'many'"),
    ({"maxBytesPerTrigger": "1e3"}, "maxBytesPerTrigger cannot be '1e3'"),
    ({"failOnDataLoss": "perhaps"}, "failOnDataLoss cannot be 'perhaps': it is true or false"),
    ({"groupId": "x" * (limits.NAME_BYTES + 1)}, "groupId cannot be"),
    ({"groupId": "two words"}, "groupId cannot be 'two words': .* a name without spaces"),
    ({"holdRetentionFor": "long"}, "holdRetentionFor cannot be 'long': it is a time like"),
    ({"subscribe": " , "}, "subscribe cannot be ','"),
    ({"subscribe": "no ducks"}, "subscribe: 'no ducks' is not a topic name"),
    ({"assign": "{}"}, "you set subscribe and assign"),
    ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers is missing"),
]


@each(("more", "said"), WRONG)
def test_what_cannot_be_is_refused_with_the_option_quoted(more: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        batch_options({**BASE, **more})


@each("text", ["[", '{"ducks":0}', '{"ducks":[-1]}', '{"ducks":[]}', "{}", '"x"'])
def test_an_assignment_that_is_none_is_quoted(text: str) -> None:
    with pytest.raises(InvalidRequest, match="assign cannot be"):
        batch_options({"kafka.bootstrap.servers": "here:1", "assign": text})


def test_nothing_to_read_a_bad_pattern_and_an_end_of_a_stream_are_refused() -> None:
    given = {"kafka.bootstrap.servers": "here:1"}
    with pytest.raises(InvalidRequest, match="one of the options subscribe"):
        batch_options(given)
    with pytest.raises(InvalidRequest, match=r"subscribePattern cannot be '\('"):
        batch_options({**given, "subscribePattern": "("})
    with pytest.raises(InvalidRequest, match="endingOffsets is for batch reads"):
        stream_options({**BASE, "endingOffsets": "latest"})
