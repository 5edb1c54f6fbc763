"""Clients of every listener, killed by SIGKILL again and again while they consume or publish, with
the defaults that an example of the documents has: what they were given, what they acknowledged and
what came again, compared with what was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.pubsub.killing import (
    GIVEN_ONCE,
    KILLS,
    LISTENER_OF,
    MESSAGES,
    Life,
    World,
    acknowledged_is_there,
    at_least_once,
    at_most_once,
    consumed,
    published,
    world,
)
from tests.pubsub.mortal import CONSUMERS, PUBLISHERS, READY, Task

pytestmark = pytest.mark.processes

#: To join a group again takes a program some tenths of a second.
GROUP_KILLS = 4


def kills_of(role: str) -> int:
    return GROUP_KILLS if LISTENER_OF[role.split(maxsplit=1)[0]] == "kafka" else KILLS


@pytest.fixture(scope="module", name="world")
def shared_world() -> Iterator[World]:
    with world() as found:
        yield found


@pytest.mark.parametrize("role", sorted({*CONSUMERS} - {"queue", "python skip"}))
def test_a_killed_consumer_misses_nothing_and_only_its_last_messages_come_again(
    role: str, world: World, tmp_path: Path
) -> None:
    """One message in hand; of the proxy also those whose acknowledgements were on their way."""
    life = consumed(world, tmp_path, role, keeps=False, kills=kills_of(role))
    assert list(at_least_once(life)) == []
    # Nothing is proved by kills that came too late.
    assert sum(map(bool, life.runs())) > 2


@pytest.mark.parametrize("role", GIVEN_ONCE)
def test_a_killed_consumer_that_keeps_what_it_was_given_is_given_nothing_twice(
    role: str, world: World, tmp_path: Path
) -> None:
    """The message in hand was given once, or was about to be."""
    life = consumed(world, tmp_path, role, keeps=GIVEN_ONCE[role], kills=kills_of(role))
    assert list(at_most_once(life)) == []


def test_a_killed_consumer_of_the_queue_without_a_directory_leaves_its_messages_at_its_id(
    world: World, tmp_path: Path
) -> None:
    """A program that comes back registers anew, and begins with what comes then. What it had not
    taken waits under its former id, the message in hand included."""
    task = Task("queue", world.listeners["http"], "", "queue-anew", str(tmp_path / "log"))
    world.ask("POST", "/v1/topics", {"name": task.topic})
    life = Life(world, task)
    life.begin()
    wait_until(lambda: READY in life.lines())
    world.publish(task.topic)
    life.live()
    life.die()
    (run,) = life.runs()
    assert run == list(range(len(run)))
    (found,) = world.ask("GET", f"/v1/subscriptions?topic={task.topic}")["subscriptions"]
    former = f"topic={task.topic}&consumer_id={found['name']}&last_id="
    assert int(world.ask("GET", f"/consumer/consume?{former}")["message"]) - run[-1] in (0, 1)
    life.begin()
    wait_until(lambda: life.lines().count(READY) == 2)
    world.ask("POST", f"/v1/topics/{task.topic}/messages", {"value": str(MESSAGES)})
    wait_until(lambda: str(MESSAGES) in life.lines())
    life.die()
    assert life.runs()[1] == [MESSAGES]


@pytest.mark.parametrize("role", PUBLISHERS)
def test_what_a_killed_publisher_knows_to_be_published_is_there_and_only_doubts_come_twice(
    role: str, world: World, tmp_path: Path
) -> None:
    life = published(world, tmp_path, role, kills=kills_of(role))
    assert list(acknowledged_is_there(life)) == []


def test_every_client_of_these_listeners_is_killed_here() -> None:
    assert {role.split()[0] for role in CONSUMERS} == set(LISTENER_OF)
    assert {role.split()[0] for role in PUBLISHERS} == set(LISTENER_OF)
