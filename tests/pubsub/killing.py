"""Kills the clients of every listener while they consume or publish, and compares what they saw.

Programs on the clients (mortal.py) use the defaults that a reader of the documents has. They are
killed by SIGKILL at points drawn from a seed and started again, until everything is consumed. Then
what they were given, acknowledged and given again is compared with what was published.

    python -m tests.pubsub.killing --seconds 600
    python -m tests.pubsub.killing --seed 17 --client python

The first violation ends it, and its seed is printed. A seed repeats the draws, not the timing of
real processes.
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.kit.server import DEADLINE_S, Server
from tests.kit.waiting import wait_until
from tests.pubsub.mortal import CONSUMERS, DONE, PUBLISHERS, READY, Mortals, Task
from tests.pubsub.soaking import Plan, soak

MESSAGES: Final = 200
KILLS: Final = 8
#: A program is killed when it has seen so many more messages, at the most.
STRIDE: Final = 30
#: Which listener serves a client, by the first word of its role.
LISTENER_OF: Final = {
    "queue": "http",
    "zmq": "zmq",
    "proxy": "proxy",
    "line": "line",
    "python": "kafka",
    "async": "kafka",
    "cli": "kafka",
}
#: Consumers whose acknowledgements are on their way when they die: more than one may come again.
SLOW_TO_ACKNOWLEDGE: Final = {"proxy"}
#: Consumers whose log does not say which messages they have worked on.
SILENT_ABOUT_WORK: Final = {"cli"}
#: Consumers that would rather miss the message in hand than be given it twice, and whether they
#: need a directory for that.
GIVEN_ONCE: Final = {"queue": True, "zmq": True, "proxy": True, "python skip": False}


@contextmanager
def world() -> Iterator[World]:
    """A broker with all the listeners, and the process that forks programs."""
    names = ("kafka", "http", "zmq", "line")
    listeners = [word for listener in names for word in (f"--{listener}", "127.0.0.1:0")]
    # What the proxy has sent to a client that died is sent again after the lease.
    with (
        Server("serve", "--store", "memory:", "--proxy-lease-ms", "300", *listeners) as server,
        Mortals() as mortals,
    ):
        yield World(server.listeners(), mortals)


class World(NamedTuple):
    listeners: dict[str, str]
    mortals: Mortals

    def address(self, role: str) -> str:
        return self.listeners[LISTENER_OF[role.split(maxsplit=1)[0]]]

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"http://{self.listeners['http']}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return json.loads(response.read() or b"{}")

    def publish(self, topic: str, count: int = MESSAGES) -> None:
        messages = [{"value": str(number)} for number in range(count)]
        self.ask("POST", f"/v1/topics/{topic}/messages", {"messages": messages})

    def lag(self, name: str, topic: str) -> int:
        lag: int = self.ask("GET", f"/v1/subscriptions/{name}/topics/{topic}/lag")["lag"]
        return lag

    def published(self, topic: str) -> list[int]:
        """All that a topic holds."""
        found: list[int] = []
        offset = 0
        while True:
            path = f"/v1/topics/{topic}/partitions/0/messages?offset={offset}&limit=1000"
            page = self.ask("GET", path)["messages"]
            if not page:
                return found
            found += [int(message["value"]) for message in page]
            offset = page[-1]["offset"] + 1


class Life:
    """One program after another with the same task, each killed."""

    def __init__(self, world: World, task: Task, seed: int = 0) -> None:
        self.world = world
        self.task = task
        self.kills = 0
        self._random = random.Random(f"{task.role} {seed}")
        self._log = Path(task.log)
        self._pid = 0

    def begin(self) -> None:
        self._pid = self.world.mortals.run(self.task)

    def live(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let the program see some more, or all that there is."""
        enough = self._seen() + self._random.randrange(1, STRIDE)
        wait_until(lambda: self._seen() >= enough or is_over())

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
            elif not line.endswith(DONE):
                found[-1].append(int(line))
        return found

    def done(self) -> set[int]:
        """What was worked on."""
        return {int(line.removesuffix(DONE)) for line in self.lines() if line.endswith(DONE)}

    def in_hand(self) -> list[int | None]:
        """The message that each program had in hand when it died."""
        found: list[int | None] = []
        for line in self.lines():
            if line == READY:
                found.append(None)
            else:
                found[-1] = None if line.endswith(DONE) else int(line)
        return found

    def _seen(self) -> int:
        return sum(not line.endswith(DONE) for line in self.lines())

    def given(self) -> Counter[int]:
        return Counter(number for run in self.runs() for number in run)


def consumed(
    world: World,
    directory: Path,
    role: str,
    *,
    keeps: bool,
    seed: int = 0,
    count: int = MESSAGES,
    kills: int = KILLS,
) -> Life:
    """Publish when the first program is subscribed, and kill programs until all is consumed. With
    `keeps` they are given a directory of their own."""
    topic = f"{role.replace(' ', '-')}-{'kept' if keeps else 'plain'}-{seed}"
    kept = directory / "kept"
    task = Task(
        role,
        world.address(role),
        f"sub-{topic}",
        topic,
        str(directory / "log"),
        str(kept) if keeps else "",
        str(directory / "home"),
    )
    world.ask("POST", "/v1/topics", {"name": topic})
    life = Life(world, task, seed)
    life.begin()
    wait_until(lambda: READY in life.lines())
    name = task.name
    if role == "queue":
        name = json.loads((kept / "consumer.json").read_text())["consumer_id"]
    world.publish(topic, count)
    while life.kills < kills:
        life.live(lambda: world.lag(name, topic) == 0)
        life.die()
        # Where it is not given again, the message in hand is acknowledged before it is given.
        may_be_acknowledged = len(life.done())
        if keeps or role in GIVEN_ONCE:
            may_be_acknowledged = len(life.given()) + life.kills
        elif role in SILENT_ABOUT_WORK:
            may_be_acknowledged = len(life.given())
        assert world.lag(name, topic) >= count - may_be_acknowledged, (
            "a message is acknowledged that no program was given, or had worked on"
        )
        life.begin()
    wait_until(lambda: world.lag(name, topic) == 0)
    life.die()
    return life


def published(world: World, directory: Path, role: str, *, seed: int = 0, kills: int) -> Life:
    """Kill a publisher again and again."""
    topic = f"by-{role.replace(' ', '-')}-{seed}"
    log, kept, home = (str(directory / name) for name in ("log", "kept", "home"))
    task = Task(role, world.address(role), f"pub-{topic}", topic, log, kept, home)
    life = Life(world, task, seed)
    for _ in range(kills):
        life.begin()
        life.live()
        life.die()
    return life


# --- what must hold: each yields what does not ----------------------------------------------------


def at_least_once(life: Life, count: int = MESSAGES) -> Iterator[str]:
    """Nothing is missing, and only the last message of a life comes again; of slow ones several."""
    runs = life.runs()
    missing = set(range(count)) - set(life.given())
    if missing:
        yield f"never given: {sorted(missing)}"
    for index, run in enumerate(runs):
        if len({*run}) != len(run):
            yield f"one came twice in life {index}"
        later = {number for each in runs[index + 1 :] for number in each}
        again = [number for number in run if number in later]
        if again != run[len(run) - len(again) :]:
            yield f"acknowledged ones came again after life {index}: {again}"
        if len(again) > 1 and life.task.role not in SLOW_TO_ACKNOWLEDGE:
            yield f"more than the message in hand came again after life {index}: {again}"
        in_hand = None if life.task.role in SILENT_ABOUT_WORK else life.in_hand()[index]
        if in_hand is not None and in_hand not in later:
            yield f"{in_hand} was in hand at the end of life {index} and did not come again"


def at_most_once(life: Life, count: int = MESSAGES) -> Iterator[str]:
    """Nothing comes twice, and only messages in hand are missing."""
    given = life.given()
    if given.total() != len(given):
        yield f"given twice: {[number for number, times in given.items() if times > 1]}"
    if len(given) < count - life.kills:
        yield f"{count - len(given)} are missing after {life.kills} kills"
    if life.task.role not in SLOW_TO_ACKNOWLEDGE:  # whose messages may come in another order
        for run in life.runs():
            if run and run != list(range(run[0], run[0] + len(run))):
                yield f"out of order: {run}"


def acknowledged_is_there(life: Life) -> Iterator[str]:
    """What was acknowledged is there once, in order; what was not, as often as it was tried."""
    tried = Counter(int(line[1:]) for line in life.lines() if line[0] == "+")
    acknowledged = {int(line[1:]) for line in life.lines() if line[0] == "-"}
    found = life.world.published(life.task.topic)
    there = Counter(found)
    if not acknowledged <= set(there):
        yield f"acknowledged and not there: {sorted(acknowledged - set(there))}"
    if not there <= tried:
        yield "one is there more often than it was published"
    if found != sorted(found):
        yield "out of order"
    if life.task.role.endswith("numbered") and there.total() != len(there):
        yield f"there twice: {[number for number, times in there.items() if times > 1]}"


# --- for as long as one likes ---------------------------------------------------------------------


class Outcome(NamedTuple):
    violations: list[str]
    told: str

    def __str__(self) -> str:
        return self.told


def roles() -> list[str]:
    return [f"get {role}" for role in CONSUMERS] + [f"put {role}" for role in PUBLISHERS]


def _run(plan: Plan) -> Outcome:
    what, _, role = plan.over.partition(" ")
    with world() as found:
        try:
            if what == "put":
                life = published(found, plan.directory, role, seed=plan.seed, kills=plan.kills)
                wrong = list(acknowledged_is_there(life))
            else:
                keeps = GIVEN_ONCE.get(role, False)
                settings = {"seed": plan.seed, "count": plan.puts, "kills": plan.kills}
                life = consumed(found, plan.directory, role, keeps=keeps, **settings)
                check = at_most_once if role in GIVEN_ONCE else at_least_once
                wrong = list(check(life, plan.puts))
        except AssertionError as error:
            return Outcome([str(error)], "failed")
    return Outcome(wrong, f"{life.kills} kills, {len(life.lines())} lines in its log")


def main() -> int:
    over = "client", roles()
    return soak(_run, "killing", over, description=__doc__ or "", puts=2_000, kills=30)


if __name__ == "__main__":
    sys.exit(main())
