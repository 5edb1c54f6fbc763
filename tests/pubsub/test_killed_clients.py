"""Clients of the HTTP, ZeroMQ, proxy and line doors, killed by SIGKILL again and again while they
consume or publish, with the defaults that an example of the documents has: what they were given,
what they acknowledged and what came again, compared with what was published."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.process import DEADLINE_S, Server
from tests.pubsub.mortal import CONSUMERS, PUBLISHERS, READY, Mortals, Task

pytestmark = pytest.mark.processes

MESSAGES = 200
KILLS = 8
#: A program is killed when it has seen so many more messages, at the most.
STRIDE = 30
#: Which door serves a client.
DOOR_OF = {"queue": "http", "zmq": "zmq", "proxy": "proxy", "line": "line"}


class World(NamedTuple):
    doors: dict[str, str]
    mortals: Mortals

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"http://{self.doors['http']}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return json.loads(response.read() or b"{}")

    def publish(self, topic: str) -> None:
        messages = [{"value": str(number)} for number in range(MESSAGES)]
        self.ask("POST", f"/v1/topics/{topic}/messages", {"messages": messages})

    def lag(self, name: str, topic: str) -> int:
        lag: int = self.ask("GET", f"/v1/subscriptions/{name}/topics/{topic}/lag")["lag"]
        return lag

    def published(self, topic: str) -> list[int]:
        """All that a topic holds."""
        found: list[int] = []
        while True:
            path = f"/v1/topics/{topic}/partitions/0/messages?offset={len(found)}&limit=1000"
            page = self.ask("GET", path)["messages"]
            if not page:
                return found
            found += [int(message["value"]) for message in page]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    doors = [word for door in ("http", "zmq", "line") for word in (f"--{door}", "127.0.0.1:0")]
    # What the proxy has sent to a client that died is sent again after the lease.
    with (
        Server("serve", "--store", "memory:", "--proxy-lease-ms", "300", *doors) as server,
        Mortals() as mortals,
    ):
        yield World(server.doors(), mortals)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.0005)


class Life:
    """One program after another with the same task, each killed."""

    def __init__(self, world: World, task: Task) -> None:
        self.world = world
        self.task = task
        self.kills = 0
        self._log = Path(task.log)
        self._pid = 0

    def begin(self) -> None:
        self._pid = self.world.mortals.run(self.task)

    def live(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let the program see some more, or all that there is."""
        chance = random.Random(f"{self.task.role} {self.kills}")
        enough = len(self.lines()) + chance.randrange(1, STRIDE)
        until(lambda: len(self.lines()) >= enough or is_over())

    def die(self) -> None:
        self.world.mortals.kill(self._pid)
        self.kills += 1

    def lines(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []

    def runs(self) -> list[list[int]]:
        """What each program was given, of those that were subscribed when they died."""
        found: list[list[int]] = []
        for line in self.lines():
            if line == READY:
                found.append([])
            else:
                found[-1].append(int(line))
        return found

    def given(self) -> Counter[int]:
        return Counter(number for run in self.runs() for number in run)


def consumed(world: World, tmp_path: Path, role: str, *, keeps: bool) -> Life:
    """Publish when the first program is subscribed, and kill programs until all is consumed."""
    topic = f"{role}-{'kept' if keeps else 'plain'}"
    directory = tmp_path / "kept"
    task = Task(
        role,
        world.doors[DOOR_OF[role]],
        f"sub-{topic}",
        topic,
        str(tmp_path / "log"),
        str(directory) if keeps else "",
    )
    world.ask("POST", "/v1/topics", {"name": topic})
    life = Life(world, task)
    life.begin()
    until(lambda: READY in life.lines())
    name = task.name
    if role == "queue":
        name = json.loads((directory / "consumer.json").read_text())["consumer_id"]
    world.publish(topic)
    while life.kills < KILLS:
        life.live(lambda: world.lag(name, topic) == 0)
        life.die()
        # With a directory the message in hand is acknowledged before the program is given it.
        in_hand = life.kills if keeps else 0
        assert world.lag(name, topic) >= MESSAGES - len(life.given()) - in_hand, (
            "a message is acknowledged that no program was given"
        )
        life.begin()
    until(lambda: world.lag(name, topic) == 0)
    life.die()
    return life


@pytest.mark.parametrize("role", ["zmq", "proxy", "line"])
def test_a_killed_consumer_misses_nothing_and_only_its_last_messages_come_again(
    role: str, world: World, tmp_path: Path
) -> None:
    """One message in hand; of the proxy also those whose acknowledgements were on their way."""
    life = consumed(world, tmp_path, role, keeps=False)
    runs = life.runs()
    assert sorted(life.given()) == list(range(MESSAGES))
    for index, run in enumerate(runs):
        assert len({*run}) == len(run), "one came twice in one life"
        later = {number for each in runs[index + 1 :] for number in each}
        again = [number for number in run if number in later]
        assert again == run[len(run) - len(again) :], "an acknowledged one came again"
        assert role == "proxy" or len(again) <= 1


@pytest.mark.parametrize("role", ["queue", "zmq", "proxy"])
def test_a_killed_consumer_with_a_directory_is_given_nothing_twice(
    role: str, world: World, tmp_path: Path
) -> None:
    """The message in hand was given once, or was about to be."""
    life = consumed(world, tmp_path, role, keeps=True)
    given = life.given()
    assert given.total() == len(given), "one was given twice"
    assert len(given) >= MESSAGES - life.kills, "more are missing than were in hand"
    if role != "proxy":  # whose messages may come in another order
        for run in life.runs():
            assert run == list(range(run[0], run[0] + len(run))) if run else True


def test_a_killed_consumer_of_the_queue_without_a_directory_leaves_its_messages_at_its_id(
    world: World, tmp_path: Path
) -> None:
    """A program that comes back registers anew, and begins with what comes then. What it had not
    taken waits under its former id, the message in hand included."""
    task = Task("queue", world.doors["http"], "", "queue-anew", str(tmp_path / "log"))
    world.ask("POST", "/v1/topics", {"name": task.topic})
    life = Life(world, task)
    life.begin()
    until(lambda: READY in life.lines())
    world.publish(task.topic)
    life.live()
    life.die()
    (run,) = life.runs()
    assert run == list(range(len(run)))
    (found,) = world.ask("GET", f"/v1/subscriptions?topic={task.topic}")["subscriptions"]
    former = f"topic={task.topic}&consumer_id={found['name']}&last_id="
    assert int(world.ask("GET", f"/consumer/consume?{former}")["message"]) - run[-1] in (0, 1)
    life.begin()
    until(lambda: life.lines().count(READY) == 2)
    world.ask("POST", f"/v1/topics/{task.topic}/messages", {"value": str(MESSAGES)})
    until(lambda: str(MESSAGES) in life.lines())
    life.die()
    assert life.runs()[1] == [MESSAGES]


@pytest.mark.parametrize("role", PUBLISHERS)
def test_what_a_killed_publisher_knows_to_be_published_is_there_and_only_doubts_come_twice(
    role: str, world: World, tmp_path: Path
) -> None:
    topic = f"by-{role.replace(' ', '-')}"
    address = world.doors[DOOR_OF[role.split()[0]]]
    life = Life(
        world,
        Task(role, address, f"pub-{topic}", topic, str(tmp_path / "log"), str(tmp_path / "kept")),
    )
    for _ in range(KILLS):
        life.begin()
        life.live()
        life.die()
    tried = Counter(int(line[1:]) for line in life.lines() if line[0] == "+")
    acknowledged = {int(line[1:]) for line in life.lines() if line[0] == "-"}
    there = Counter(world.published(topic))
    assert acknowledged <= set(there) <= set(tried)
    assert there <= tried, "one is there more often than it was published"
    assert world.published(topic) == sorted(there.elements()), "in their order"
    if role.endswith("numbered"):
        assert there.total() == len(there), "one is there twice"


def test_every_client_of_these_doors_is_killed_here() -> None:
    assert set(CONSUMERS) == set(DOOR_OF)
    assert {role.split()[0] for role in PUBLISHERS} == set(DOOR_OF)
