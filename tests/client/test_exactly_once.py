"""The two ways of remembering how far a program has come, through crashes of it (R2).

By id the program does. By the client's file the message in hand at a crash is given again, and no
other; or, by choice, it is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from quackmq import Client, errors
from quackmq.client import limits as client_limits
from quackmq.model.partitioning import Partitioner, choose_partition
from tests.client.conftest import Clients
from tests.client.program import DEADLINE_S, Program


@pytest.fixture
def start(address: str, tmp_path: Path, topic: str) -> Iterator[Any]:
    """Starts programs of one name on one machine, and kills what is left of them."""
    started: list[Program] = []

    def start(name: str = "billing", **options: Any) -> Program:
        whole = f"{name}-{topic}"
        options = {"directory": str(tmp_path / whole)} | options
        started.append(Program(address, whole, **options))
        return started[-1]

    yield start
    for program in started:
        program.kill()


def wait_until_shared(address: str, name: str, members: int) -> None:
    """Until so many members read one partition each."""
    admin = AdminClient({"bootstrap.servers": address})
    deadline = time.monotonic() + DEADLINE_S
    shares: list[int] = []
    while shares != [1] * members:
        assert time.monotonic() < deadline, f"the members of {name} have {shares} partitions"
        group = admin.describe_consumer_groups([name])[name].result(DEADLINE_S)
        shares = [len(member.assignment.topic_partitions) for member in group.members]


# --- by id ---------------------------------------------------------------------------------------


def test_a_message_that_was_not_named_is_returned_again(client: Client, topic: str) -> None:
    """R2."""
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    first = client.get(topic, after=None)
    assert client.get(topic, after=None).id == first.id
    second = client.get(topic, after=first.id)
    assert (first.value, second.value) == ("a", "b")
    assert client.get(topic, after=first.id).id == second.id
    assert client.get(topic, after=second.id).value == "c"


def test_an_id_that_was_not_returned_last_is_gone_to(client: Client, topic: str) -> None:
    client.subscribe(topic)
    ids = [each or "" for each in client.put_many(topic, list("abcde"))]
    assert client.get(topic, after=ids[2]).value == "d"
    assert client.get(topic, after=ids[0]).value == "b"
    assert client.get(topic, after=[ids[3]]).value == "e"


def test_what_is_named_is_committed_before_the_client_is_closed(
    clients: Clients, topic: str
) -> None:
    client = clients()
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    last = None
    for _ in range(3):
        last = client.get(topic, after=last).id
    client.close()
    assert clients().size(topic) == 1  # the last one returned was not named


@pytest.mark.processes
def test_a_program_killed_at_any_point_goes_on_behind_what_it_has_stored(
    start: Any, topic: str
) -> None:
    """Nothing is committed by a process that is killed at once: the id alone tells."""
    with start() as first:
        first.call("subscribe", topic)
        ids = first.call("put_many", topic, list("abc"))
        assert first.call("get", topic, after=None) == "a"
        assert first.call("get", topic, after=ids[0]) == "b"
    with start() as second:
        assert second.call("get", topic, after=ids[0]) == "b"
        assert second.call("get", topic, after=ids[1]) == "c"


@pytest.mark.processes
def test_one_id_is_enough_for_many_partitions(start: Any, clients: Clients, topic: str) -> None:
    """What is done in the others is committed before a message of another one is returned."""
    admin = clients("press")
    admin.create_topic(topic, partitions=3)
    wanted = {admin.put(topic, str(number), key=str(number)): number for number in range(30)}
    seen: list[int] = []
    last: str | None = None
    clients().subscribe(topic, "beginning")
    for stop in (7, 8, 30):
        with start() as program:  # until it is killed
            while len(seen) < stop:
                value, last = program.call("get_with_id", topic, after=last)
                seen.append(int(value))
    assert sorted(seen) == sorted(wanted.values())


def test_what_is_done_in_one_partition_is_committed_before_a_message_of_another_is_returned(
    clients: Clients, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's one id says nothing of the other partitions: if it were killed now, the
    broker's cursor would have to."""
    monkeypatch.setattr(client_limits, "CLIENT_COMMIT_MS", 3_600_000)  # not by and by
    client = clients()
    client.create_topic(topic, partitions=2)
    for number in range(40):
        client.put(topic, str(number), key=str(number))
    client.subscribe(topic, "beginning")
    message = client.get(topic, after=None)
    first, done = message.partition, 0
    while message.partition == first:
        message = client.get(topic, after=message.id)
        done += 1
    assert clients().size(topic) == 40 - done


def test_several_ids_are_for_several_partitions(clients: Clients, topic: str) -> None:
    client = clients()
    client.create_topic(topic, partitions=2)
    ids = {}
    for number in range(40):
        message_id = client.put(topic, str(number), key=str(number))
        ids[number] = message_id
    client.subscribe(topic, "beginning")
    done: dict[int, str] = {}
    seen = []
    for _ in range(20):
        message = client.get(topic, after=done.values())
        done[message.partition] = message.id
        seen.append(message.value)
    again = [client.get(topic, after=done.values()).value]
    assert len(set(seen) | set(again)) == 21


def test_ids_that_are_not_of_the_topic_are_refused(clients: Clients, topic: str) -> None:
    client = clients()
    client.subscribe(topic)
    client.put(topic, "a")
    other = client.put(f"{topic}-other", "x")
    for wrong in ("", "nonsense", "A" * 39, other):
        with pytest.raises(errors.InvalidMessageId):
            client.get(topic, after=wrong)
    assert client.get(topic, after=None).value == "a"


# --- by the client's file ------------------------------------------------------------------------


@pytest.mark.processes
def test_after_a_kill_only_the_message_in_hand_is_given_again(start: Any, topic: str) -> None:
    """Wherever it is killed in a loop over `listen`, and however many messages wait."""
    with start() as press:
        press.call("subscribe", topic)
        press.call("put_many", topic, [str(number) for number in range(2_000)])
    in_hand = 0
    for take in (1, 10, 300):
        with start() as program:
            given = program.call("next", topic, take)
            assert given == [str(number) for number in range(in_hand, in_hand + take)]
            in_hand += take - 1
    with start() as last:
        assert last.call("get", topic) == str(in_hand)


@pytest.mark.processes
def test_after_a_kill_the_message_that_get_returned_is_given_again(start: Any, topic: str) -> None:
    with start() as first:
        first.call("subscribe", topic)
        first.call("put_many", topic, list("abcd"))
        assert [first.call("get", topic) for _ in range(2)] == ["a", "b"]
    with start() as second:
        assert [second.call("get", topic) for _ in range(2)] == ["b", "c"]


@pytest.mark.processes
def test_with_skip_the_message_in_hand_alone_is_left_out(start: Any, topic: str) -> None:
    with start(on_crash="skip") as first:
        first.call("subscribe", topic)
        first.call("put_many", topic, list("abcdefgh"))
        assert [first.call("get", topic) for _ in range(2)] == ["a", "b"]
    with start(on_crash="skip") as second:
        assert second.call("next", topic, 3) == ["c", "d", "e"]
    with start(on_crash="skip") as third:
        assert third.call("get", topic) == "f"


@pytest.mark.processes
def test_a_broker_never_hears_of_a_message_that_the_program_was_not_given(
    start: Any, clients: Clients, tmp_path: Path, topic: str
) -> None:
    """Somewhere else the broker's cursor is all there is."""
    for on_crash, expected in (("repeat", "b"), ("skip", "c")):
        elsewhere = {"directory": tmp_path / f"elsewhere-{on_crash}", "on_crash": on_crash}
        with start(on_crash, on_crash=on_crash) as first:
            first.call("subscribe", topic)
            first.call("put_many", topic, list("abcd"))
            assert first.call("next", topic, 2) == ["a", "b"]
            first.call("close")  # which commits
        second = clients(on_crash, **elsewhere)
        assert second.get(topic).value == expected
        second.unsubscribe(topic)


@pytest.mark.processes
def test_of_a_loop_that_was_left_the_last_message_is_in_hand(start: Any, topic: str) -> None:
    with start() as first:
        first.call("subscribe", topic)
        first.call("put_many", topic, list("abcd"))
        assert first.call("take", topic, 2) == ["a", "b"]
    with start() as second:
        assert second.call("take", topic, 2) == ["b", "c"]
        assert second.call("get", topic) == "d"  # by which the loop's last one is done
    with start() as third:
        assert third.call("get", topic) == "d"


def test_a_message_in_another_threads_hand_is_not_done(clients: Clients, topic: str) -> None:
    """A thread is done with its message when it asks for the next, not when another does."""
    client = clients()
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    got, asked = threading.Event(), threading.Event()

    def work() -> None:
        client.get(topic)
        got.set()
        assert asked.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    assert got.wait(30)
    assert [client.get(topic).value for _ in range(2)] == ["b", "c"]
    client.close(done=False)
    asked.set()
    worker.join()
    assert clients().get(topic).value == "a"


def test_a_block_that_ends_well_is_done_and_one_that_fails_is_not(
    clients: Clients, topic: str
) -> None:
    with clients() as first:
        first.subscribe(topic)
        first.put_many(topic, list("abc"))
        assert first.get(topic).value == "a"
    with pytest.raises(ValueError), clients() as second:
        for message in second.listen(topic):
            assert message.value == "b"
            raise ValueError("the work failed")
    third = clients()
    assert third.get(topic).value == "b"
    third.close()
    fourth = clients()
    assert fourth.get(topic).value == "b"
    fourth.close(done=True)
    assert clients().get(topic).value == "c"


@pytest.mark.processes
def test_a_client_needs_no_directory_to_be_given(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """Positions are in the user's state directory, by the client's name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for expected in ("ab", "bc"):
        with start(directory=None) as program:
            if program.call("subscribe", topic):
                program.call("put_many", topic, list("abc"))
            assert program.call("next", topic, 2) == list(expected)
    (directory,) = (tmp_path / "state" / "quackmq").iterdir()
    assert len([*directory.glob("*.position")]) == 1


def test_the_brokers_cursor_beats_the_file_when_somebody_else_moved_it(
    clients: Clients, tmp_path: Path, topic: str
) -> None:
    """Elsewhere the name went on, or was moved: an old file must not count."""
    here = clients()
    here.subscribe(topic)
    here.put_many(topic, list("abcdef"))
    assert here.get(topic).value == "a"
    here.close(done=True)
    elsewhere = clients(directory=tmp_path / "elsewhere")
    assert [elsewhere.get(topic).value for _ in range(3)] == ["b", "c", "d"]
    elsewhere.close(done=True)
    assert clients().get(topic).value == "e"
    clients("other").close()


def test_a_seek_while_the_client_was_away_counts(clients: Clients, topic: str) -> None:
    here = clients()
    here.subscribe(topic)
    here.put_many(topic, list("abcd"))
    assert [here.get(topic).value for _ in range(3)] == ["a", "b", "c"]
    here.close()
    other = clients()
    other.seek(topic, 1)
    other.close()
    assert clients().get(topic).value == "b"


def test_a_directory_that_is_lost_costs_no_more_than_the_commits_that_were_due(
    clients: Clients, tmp_path: Path, topic: str
) -> None:
    client = clients()
    client.subscribe(topic)
    client.put_many(topic, list("abc"))
    client.get(topic)
    client.close(done=True)
    assert clients(directory=tmp_path / "empty").get(topic).value == "b"


def test_a_directory_that_cannot_be_used_is_named(clients: Clients, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    client = clients(directory=tmp_path / "file")
    client.subscribe("somewhere")
    with pytest.raises(errors.UnusableDirectory, match="file"):
        client.get("somewhere")


# --- processes that share a name -----------------------------------------------------------------


@pytest.mark.processes
def test_processes_that_share_a_name_share_by_partition(
    start: Any, clients: Clients, topic: str
) -> None:
    """M2: each message goes to one member of a group."""
    press = clients("press")
    press.create_topic(topic, partitions=2)
    with start() as first, start() as second:
        first.call("subscribe", topic)
        for program in (first, second):
            program.begin("get", topic, 40)
        wait_until_shared(press.address, f"billing-{topic}", members=2)
        got: list[str] = []
        for partition in range(2):  # each has one, whichever it is
            press.put(topic, f"{partition}", key=_key_for(partition, 2))
        got += [first.answer(), second.answer()]
        assert sorted(got) == ["0", "1"]


def test_a_process_that_leaves_hands_its_partitions_on_at_once(
    clients: Clients, topic: str
) -> None:
    first, second = clients(), clients()
    first.create_topic(topic, partitions=1)
    first.subscribe(topic)
    first.put_many(topic, list("ab"))
    assert first.get(topic).value == "a"
    told = ""
    while "other processes" not in told:  # a busy broker may not have answered in time
        with pytest.raises(errors.QuackTimeout) as raised:
            second.get(topic, timeout=1)
        told = str(raised.value)
    first.close(done=True)
    assert second.get(topic).value == "b"


@pytest.mark.processes
def test_a_name_that_others_use_may_be_subscribed_to_further_topics(
    start: Any, clients: Clients, topic: str
) -> None:
    further = f"{topic}-further"
    with start() as first:
        first.call("subscribe", topic)
        first.call("put", topic, "a")
        assert first.call("get", topic) == "a"  # it is a member of the group from now on
        first.begin("get", topic)
        second = clients()
        assert second.subscribe(further) is True
        second.put(further, "b")
        assert second.get(further).value == "b"
        with pytest.raises(errors.GroupNotEmpty, match="stop them"):
            clients().seek(topic, "beginning")
        second.put(topic, "c")
        assert first.answer() == "c"


def test_a_client_reads_several_topics_in_turn(client: Client, topic: str) -> None:
    topics = [f"{topic}-{number}" for number in range(4)]
    for each in topics:
        client.subscribe(each)
        client.put_many(each, list("ab"))
    for value in "ab":
        assert [client.get(each).value for each in topics] == [value] * 4


def _key_for(partition: int, partitions: int) -> str:
    """Return a key of this partition."""
    return next(
        str(number)
        for number in range(1000)
        if choose_partition(Partitioner.MURMUR2, str(number).encode(), partitions) == partition
    )
