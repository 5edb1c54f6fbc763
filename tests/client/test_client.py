"""Put, get, subscribe, unsubscribe: the everyday interface of the Python client (M1, M6)."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from quackmq import AsyncClient, Client, QuackError, errors
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from tests.client.conftest import Clients


def values(messages: Iterator[Any], count: int) -> list[Any]:
    return [message.value for message in islice(messages, count)]


# --- putting and getting -------------------------------------------------------------------------


def test_what_is_put_is_got_with_its_key_and_headers(client: Client, topic: str) -> None:
    client.subscribe(topic)
    before_ms = int(time.time() * 1000)
    message_id = client.put(topic, "rain", key="weather", headers={"lang": "en"})
    message = client.get(topic)
    assert (message.value, message.key, message.headers) == ("rain", b"weather", {"lang": b"en"})
    assert (message.id, message.topic, message.partition) == (message_id, topic, 0)
    assert before_ms <= message.timestamp_ms <= time.time() * 1000
    assert f"'rain' at offset 0 of {topic}, partition 0; id {message_id}>" in repr(message)


def test_messages_come_in_the_order_in_which_they_were_put(client: Client, topic: str) -> None:
    client.subscribe(topic)
    ids = client.put_many(topic, [str(number) for number in range(50)])
    got = [client.get(topic) for _ in range(50)]
    assert [message.value for message in got] == [str(number) for number in range(50)]
    assert [message.id for message in got] == ids


def test_get_and_listen_go_on_where_the_other_stopped(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put_many(topic, list("abcdef"))
    assert client.get(topic).value == "a"
    for message in client.listen(topic):
        assert message.value == "b"
        break
    assert client.get(topic).value == "c"
    assert values(client.listen(topic), 3) == ["d", "e", "f"]


def test_a_get_inside_a_listen_takes_the_next_message(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put_many(topic, list("abcd"))
    seen = []
    for message in client.listen(topic):
        seen.append(message.value)
        if message.value == "b":
            seen.append(client.get(topic).value)
        if message.value == "d":
            break
    assert seen == list("abcd")


def test_a_seek_inside_a_listen_is_followed(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    seen = []
    for message in client.listen(topic):
        seen.append(message.value)
        if seen == ["a"]:
            client.seek(topic, 2)
        if message.value == "c":
            break
    assert seen == ["a", "c"]


@pytest.mark.parametrize(
    ("serialiser", "value"),
    [("bytes", b"\x00\xff"), ("str", "grüße"), ("json", {"pages": [1, None, "x"]})],
)
def test_values_come_back_as_they_were_put(
    clients: Clients, topic: str, serialiser: Any, value: Any
) -> None:
    client = clients(serialiser=serialiser)
    client.subscribe(topic)
    client.put(topic, value)
    assert client.get(topic).value == value


def test_a_serialiser_of_ones_own_is_an_object_with_dumps_and_loads(
    clients: Clients, topic: str
) -> None:
    class Doubling:
        def dumps(self, value: int, /) -> bytes:
            return b"x" * value

        def loads(self, data: bytes, /) -> int:
            return 2 * len(data)

    client = clients(serialiser=Doubling())
    client.subscribe(topic)
    client.put(topic, 21)
    message = client.get(topic)
    assert (message.value, message.data) == (42, b"x" * 21)


@pytest.mark.parametrize("serialiser", ["jsn", None, b"json", object()])
def test_a_serialiser_without_dumps_and_loads_is_refused_at_once(serialiser: Any) -> None:
    with pytest.raises(
        errors.InvalidRequest, match="use one of bytes, str, json, or an object with dump"
    ):
        Client("127.0.0.1:1", serialiser=serialiser)


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_misspelt_argument_is_answered_with_the_right_one(client_class: Any) -> None:
    with pytest.raises(TypeError, match="no argument 'serializer': did you mean 'serialiser'?"):
        client_class("127.0.0.1:1", serializer="json")
    with pytest.raises(TypeError, match="no argument 'colour'$"):
        client_class("127.0.0.1:1", colour="blue")


def test_messages_with_one_key_stay_in_one_partition(client: Client, topic: str) -> None:
    """M7: a topic has partitions, and a key chooses one."""
    client.create_topic(topic, partitions=4)
    client.subscribe(topic)
    for number in range(8):
        client.put(topic, str(number), key=f"key-{number % 2}")
    got = [client.get(topic) for _ in range(8)]
    homes = {(message.key, message.partition) for message in got}
    assert len(homes) == 2
    for key in (b"key-0", b"key-1"):
        mine = [int(message.value) for message in got if message.key == key]
        assert mine == sorted(mine)


def test_a_client_without_a_name_puts(address: str, clients: Clients, topic: str) -> None:
    reader = clients()
    reader.subscribe(topic)
    with Client(address, timeout=20) as anonymous:
        anonymous.put(topic, b"rain")
    assert reader.get(topic).value == "rain"


def test_several_threads_put_through_one_client(client: Client, topic: str) -> None:
    client.subscribe(topic)
    ids: list[str] = []

    def put() -> None:
        for _ in range(20):
            ids.append(client.put(topic, "x"))

    threads = [threading.Thread(target=put) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 120
    assert sorted(message.id for message in islice(client.listen(topic), 120)) == sorted(ids)


def test_of_several_threads_that_get_each_message_goes_to_one(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put_many(topic, [str(number) for number in range(60)])
    got: list[str] = []

    def get() -> None:
        got.extend(client.get(topic).value for _ in range(20))

    threads = [threading.Thread(target=get) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got, key=int) == [str(number) for number in range(60)]


# --- subscriptions -------------------------------------------------------------------------------


def test_a_subscription_lasts_though_its_client_is_gone(clients: Clients, topic: str) -> None:
    """R3."""
    first = clients()
    assert first.subscribe(topic) is True
    first.close()
    clients("press").put(topic, "while it was away")
    second = clients()
    assert second.subscribe(topic) is False
    assert second.get(topic).value == "while it was away"


def test_each_subscriber_gets_every_message(clients: Clients, topic: str) -> None:
    """M2: each group sees every message."""
    names = ["printer", "archive"]
    readers = [clients(name) for name in names]
    for reader in readers:
        reader.subscribe(topic)
    clients("press").put_many(topic, list("abc"))
    assert [values(reader.listen(topic), 3) for reader in readers] == [list("abc")] * 2


def test_a_subscription_begins_where_it_is_told_to(clients: Clients, topic: str) -> None:
    press = clients("press")
    press.put_many(topic, list("ab"))
    between = datetime.datetime.now(datetime.UTC)
    while datetime.datetime.now(datetime.UTC) - between < datetime.timedelta(milliseconds=2):
        pass
    press.put_many(topic, list("cd"))
    begun: dict[Any, str] = {}
    for start in ("beginning", 1, between, "end"):
        client = clients(f"reader-{len(begun)}")
        client.subscribe(topic, start=start)
        begun[start] = client.name or ""
    press.put(topic, "e")
    firsts = [clients(f"reader-{number}").get(topic).value for number in range(4)]
    assert firsts == ["a", "b", "c", "e"]


def test_unsubscribing_ends_a_subscription_and_a_new_one_begins_anew(
    client: Client, topic: str
) -> None:
    client.subscribe(topic)
    client.put(topic, "old")
    assert client.get(topic).value == "old"
    client.unsubscribe(topic)
    assert client.subscriptions() == []
    with pytest.raises(errors.UnknownSubscription, match="subscribe"):
        client.get(topic)
    client.put(topic, "missed")
    assert client.subscribe(topic) is True
    client.put(topic, "new")
    assert client.get(topic).value == "new"


def test_a_subscription_leaves_receipts_if_it_is_told_to_s5(clients: Clients, topic: str) -> None:
    with clients() as client:
        assert client.subscribe(topic, receipts=True)
        assert not client.subscribe(topic)
        client.put_many(topic, ["a", "b"])
        assert values(client.listen(topic), 2) == ["a", "b"]
    reader = clients("auditor")
    reader.subscribe(RECEIPTS_TOPIC, start="beginning")
    told = []
    for message in reader.listen(RECEIPTS_TOPIC):
        receipt = json.loads(message.value)
        if receipt["topic"] == topic:
            told.append((receipt["kind"], receipt["next_offset"]))
        if told and told[-1][1] == 2:
            break
    assert told[0] == ("begun", 0)
    assert {kind for kind, _ in told[1:]} == {"taken"}
    with pytest.raises(errors.InvalidRequest, match="write no receipts"):
        reader.subscribe(RECEIPTS_TOPIC, receipts=True)


def test_subscriptions_are_listed_by_topic(client: Client, topic: str) -> None:
    for name in (f"{topic}-b", f"{topic}-a"):
        client.subscribe(name)
    assert client.subscriptions() == [f"{topic}-a", f"{topic}-b"]


def test_size_counts_what_is_still_to_come(clients: Clients, topic: str) -> None:
    client = clients()
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    assert client.size(topic) == 3
    client.get(topic)
    assert client.size(topic) == 2
    client.close()
    assert clients().size(topic) == 3  # the one in hand comes again


def test_a_seek_goes_back_and_forth(clients: Clients, topic: str) -> None:
    """M3."""
    client = clients()
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    assert values(client.listen(topic), 3) == list("abc")
    client.seek(topic, "beginning")
    assert client.get(topic).value == "a"
    client.seek(topic, 2)
    assert client.get(topic).value == "c"
    client.close()
    again = clients()
    again.seek(topic, 1)
    assert again.get(topic).value == "b"


def test_a_new_partition_is_read_from_its_beginning(client: Client, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewPartitions

    client.create_topic(topic, partitions=1)
    client.subscribe(topic)
    admin = AdminClient({"bootstrap.servers": client.address})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(20)
    for number in range(12):
        client.put(topic, str(number), key=str(number))
    assert sorted(values(client.listen(topic), 12), key=int) == [str(n) for n in range(12)]


# --- topics --------------------------------------------------------------------------------------


def test_topics_are_created_listed_and_deleted(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=2, keep_for_ms=60_000, needs_subscriber=True)
    assert topic in client.topics()
    with pytest.raises(errors.TopicExists):
        client.create_topic(topic)
    client.delete_topic(topic)
    assert topic not in client.topics()
    with pytest.raises(errors.UnknownTopic):
        client.delete_topic(topic)


def test_a_topic_that_exists_may_be_created_again_if_that_is_said(
    client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    client.put(topic, "rain")
    with pytest.raises(errors.TopicExists, match=topic):
        client.create_topic(topic)
    client.create_topic(topic, partitions=7, exist_ok=True)
    client.subscribe(topic, "beginning")
    assert client.size(topic) == 1


def test_policies_go_by_our_names_and_by_kafkas(client: Client, topic: str) -> None:
    client.create_topic(topic, retention_ms=1000)
    with pytest.raises(errors.InvalidPolicy, match=r"flush\.messages"):
        client.create_topic(f"{topic}-2", flush_messages=1)
    with pytest.raises(errors.InvalidPolicy, match="no policy keep_for: did you mean keep_for_ms?"):
        client.create_topic(f"{topic}-2", keep_for=1000)


def test_a_topic_that_nobody_subscribes_to_may_refuse_messages(client: Client, topic: str) -> None:
    """D4."""
    client.create_topic(topic, needs_subscriber=True)
    with pytest.raises(errors.Refused):
        client.put(topic, "for nobody")
    client.subscribe(topic)
    client.put(topic, "for us")
    assert client.get(topic).value == "for us"


def test_a_topic_that_is_full_says_so(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=1, live_entries=1, when_full="refuse")
    client.put(topic, "one")
    why = rf"^topic {topic} refuses the message: it is full \(live_entries is 1, and when_full is "
    why += r"refuse\)$"
    with pytest.raises(errors.Refused, match=why):
        client.put(topic, "two")
    for sequence in (1, 2):  # a transaction that was refused leaves nothing behind
        with pytest.raises(errors.Refused, match=why):
            client.put(topic, "two", sequence=sequence)


def test_a_topic_made_anew_has_other_ids_and_no_subscription(client: Client, topic: str) -> None:
    client.subscribe(topic)
    old = client.put(topic, "old")
    assert client.get(topic).id == old
    client.delete_topic(topic)
    client.create_topic(topic)
    new = client.put(topic, "new")
    assert new != old
    with pytest.raises(errors.UnknownSubscription):
        client.get(topic)
    client.subscribe(topic, "beginning")
    assert client.get(topic, after=None).id == new
    with pytest.raises(errors.InvalidMessageId, match="deleted"):
        client.get(topic, after=old)


def test_a_topic_made_anew_by_somebody_else_is_noticed(clients: Clients, topic: str) -> None:
    client, other = clients(), clients("other")
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    assert client.get(topic).value == "a"
    other.delete_topic(topic)
    other.create_topic(topic)
    other.put(topic, "of the new one")
    with pytest.raises(errors.UnknownSubscription):
        for _ in client.listen(topic, timeout=3):
            pass


# --- bad input -----------------------------------------------------------------------------------


def test_getting_without_a_subscription_says_what_to_do(client: Client, topic: str) -> None:
    client.put(topic, "rain")
    with pytest.raises(errors.UnknownSubscription, match=r"call subscribe\('news"):
        client.get(topic)
    with pytest.raises(errors.UnknownSubscription):
        client.size(topic)
    with pytest.raises(errors.UnknownSubscription, match=f"is not subscribed to topic {topic}$"):
        client.unsubscribe(topic)
    with pytest.raises(errors.UnknownSubscription):
        client.seek(topic, "end")


def test_a_topic_that_is_not_there_is_named(client: Client) -> None:
    with pytest.raises(errors.UnknownTopic, match="nothing-here"):
        client.get("nothing-here")


@pytest.mark.parametrize("name", ["", "two words", "tab\t", "x" * 256])
def test_a_name_that_cannot_be_is_refused(address: str, name: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        Client(address, name)


@pytest.mark.parametrize("name", ["", "..", "a b", "x" * 250, "ä", "\udc80"])
def test_a_topics_name_that_cannot_be_is_refused(client: Client, name: str) -> None:
    for refused in (
        lambda: client.create_topic(name),
        lambda: client.delete_topic(name),
        lambda: client.put(name, "x"),
        lambda: client.put(name, "x", key="k"),
        lambda: client.put(name, "x", sequence=1),
        lambda: client.subscribe(name),
        lambda: client.get(name),
    ):
        with pytest.raises(errors.IllegalTopicName, match="is not a topic name: use 1 to 249"):
            refused()


def test_a_client_without_a_name_says_what_it_lacks(address: str, topic: str) -> None:
    with Client(address) as client:
        for call in (client.subscribe, client.get, client.size, client.last_sequence):
            with pytest.raises(errors.InvalidRequest, match="name"):
                call(topic)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"serialiser": "xml"}, "no serialiser"),
        ({"on_crash": "cry"}, "skip"),
        ({"timeout": -1}, "seconds"),
    ],
)
def test_options_that_make_no_sense_are_refused(address: str, options: Any, complaint: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        Client(address, "billing", **options)


@pytest.mark.parametrize(
    ("serialiser", "value"), [("bytes", "text"), ("str", b"bytes"), ("json", object())]
)
def test_a_value_that_the_serialiser_cannot_take_is_refused(
    clients: Clients, topic: str, serialiser: Any, value: Any
) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"serialiser|JSON"):
        clients(serialiser=serialiser).put(topic, value)


@pytest.mark.parametrize(
    ("headers", "complaint"),
    [
        ({"count": 7}, r"header 'count' is 7, int: .* give str\(7\)"),
        ({7: "count"}, "the name of a header is a str, not int: 7"),
        ([("count", 7.5)], r"header 'count' is 7.5, float"),
        ("count=7", "headers are a dict, .* or pairs of name and value, not 'count=7'"),
        (7, "headers are a dict"),
    ],
)
def test_a_header_that_cannot_be_is_refused_with_a_way_out(
    client: Client, topic: str, headers: Any, complaint: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=complaint):
        client.put(topic, "rain", headers=headers)


def test_a_header_without_a_value_is_passed_on(client: Client, topic: str) -> None:
    client.subscribe(topic)
    client.put(topic, "rain", headers={"mark": None, "lang": b"en"})
    assert client.get(topic).headers == {"mark": None, "lang": b"en"}


def test_a_message_that_is_not_what_the_serialiser_reads_keeps_its_bytes(
    clients: Clients, topic: str
) -> None:
    client = clients(serialiser="json")
    client.subscribe(topic)
    clients("press", serialiser="bytes").put(topic, b"{not json")
    message = client.get(topic)
    with pytest.raises(errors.InvalidRequest, match="data"):
        _ = message.value
    assert message.data == b"{not json"


def test_a_message_that_is_too_large_is_refused_and_others_go_on(
    clients: Clients, topic: str
) -> None:
    client = clients(serialiser="bytes")
    client.subscribe(topic)
    with pytest.raises(errors.RecordTooLarge, match="bytes"):
        client.put(topic, b"x" * 17_000_000)
    client.put(topic, b"small")
    assert client.get(topic).value == b"small"


@pytest.mark.parametrize("start", [-1, 3.5, "middle", datetime.datetime(2020, 1, 1), None])
def test_a_start_that_is_none_is_refused(client: Client, topic: str, start: Any) -> None:
    with pytest.raises(QuackError):
        client.subscribe(topic, start=start)


def test_an_offset_behind_the_end_is_refused(client: Client, topic: str) -> None:
    client.put(topic, "a")
    with pytest.raises(errors.OffsetOutOfRange, match="5"):
        client.subscribe(topic, start=5)


def test_messages_that_the_topic_has_let_go_of_are_stepped_over(client: Client, topic: str) -> None:
    """The topic drops its oldest (M4), whoever has not read them."""
    client.create_topic(topic, live_entries=2, when_full="drop_oldest")
    client.subscribe(topic)
    for value in "abcdef":
        client.put(topic, value)
    left = client.size(topic)
    seen = values(client.listen(topic), left)
    assert seen == list("abcdef")[-left:]
