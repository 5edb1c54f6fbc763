"""Publishers and subscribers of the reliable proxy who die and go on, a broker that is killed, and
a chaos client at the same topic; and what the checker of all listeners has to say to that.

Nobody but the broker is killed from outside: the others (proxy_program.py) kill themselves at a
step that is drawn from the seed. A seed repeats the draws, not the timing of real processes.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quackmq.client.proxy import ReliableSubscriber
from quackmq.model.subscription import RecordPosition, parse_message_id
from tests.kit.server import Server
from tests.pubsub.checker import Stored, Told, violations
from tests.pubsub.proxy_program import lines
from tests.real.broker import Broker

TOPIC = "ducks"
PUBLISHERS = ("daisy", "dewey")
SUBSCRIBERS = ("donald", "gladstone")
PUTS = 25
#: Of each publisher and each subscriber. A message has two steps for a publisher, and for a
#: subscriber, who has those of both, three: nobody comes to its end before it has died so often.
DEATHS = 2
MOST_STEPS = PUTS
#: What publishers are told and subscribers store, together.
WHOLE = (len(PUBLISHERS) + len(PUBLISHERS) * len(SUBSCRIBERS)) * PUTS
#: Without any progress for so long, something hangs. Long, since machines can be busy.
STANDSTILL_S = 120


class Outcome(NamedTuple):
    violations: list[str]
    deaths: int


def run(directory: Path, seed: int, broker_kills: int) -> Outcome:
    """On an empty directory. AssertionError if somebody fails or nothing goes on."""
    chance = random.Random(seed)
    logs: list[str] = []
    with Broker(directory / "data", "--proxy-lease-ms", "300", listeners=["zmq"]) as broker:
        broker.start()
        address = broker.addresses["proxy"]
        with (
            Chaos(address, directory / "chaos", seed) as chaos,
            Cast(address, directory, seed) as cast,
        ):
            subscribe_all(broker, directory)
            chaos.wait_until_it_runs()
            for kill_at in sorted(chance.sample(range(1, WHOLE * 2 // 3), broker_kills)):
                cast.play(partial(cast.has_come_to, kill_at))
                logs.append(broker.kill())
                broker.start()
            cast.play(partial(cast.has_come_to, WHOLE))
            found = [
                f"{name} was done with {each}" for name in SUBSCRIBERS for each in cast.wrong(name)
            ]
            told = {(name, TOPIC): Told(PUTS, cast.told(name)) for name in PUBLISHERS}
            # This listener promises no order: what was missed comes later. Ids tell where it
            # belongs.
            stored = {(name, TOPIC): sorted(cast.stored(name), key=place) for name in SUBSCRIBERS}
            chaos.end()
            logs.append(broker.kill())
            found += [f"the broker failed: {each}" for each in logs if "Traceback" in each]
            return Outcome(found + violations(told, stored), cast.deaths)


class Cast:
    """Publishers and subscribers, each in a process of its own that is started again when it dies.
    A context manager, which ends all that it has started."""

    def __init__(self, address: str, directory: Path, seed: int) -> None:
        self._address = address
        self._directory = directory
        self._random = random.Random(seed)
        self._lives: dict[str, subprocess.Popen[bytes]] = {}
        self._deaths: Counter[str] = Counter()

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._lives.values():
            process.kill()
        for process in self._lives.values():
            process.wait()

    @property
    def deaths(self) -> int:
        return self._deaths.total()

    def keep_alive(self) -> None:
        for name in (*PUBLISHERS, *SUBSCRIBERS):
            life = self._lives.get(name)
            exit_code = None if life is None else life.poll()
            assert exit_code in (None, 0, -signal.SIGKILL), f"{name} failed: it says why above"
            if life is None or exit_code == -signal.SIGKILL:
                self._deaths[name] += life is not None
                self._lives[name] = self._start(name)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        role = "publisher" if name in PUBLISHERS else "subscriber"
        steps = self._random.randint(1, MOST_STEPS) if self._deaths[name] < DEATHS else 0
        words = [sys.executable, "-m", "tests.pubsub.proxy_program", role, self._address, name]
        words += [str(self._directory), TOPIC, str(steps), str(PUTS)]
        return subprocess.Popen(words)

    def told(self, name: str) -> list[int]:
        return [int(line) for line in lines(self._directory / f"{name}.told")]

    def stored(self, name: str) -> list[Stored]:
        found = lines(self._directory / f"{name}.stored")
        return [Stored(*line.split(" ", 1)) for line in found]

    def wrong(self, name: str) -> list[str]:
        return lines(self._directory / f"{name}.wrong")

    def progress(self) -> int:
        return sum(len(self.told(name)) for name in PUBLISHERS) + sum(
            len(self.stored(name)) for name in SUBSCRIBERS
        )

    def has_come_to(self, progress: int) -> bool:
        return self.progress() >= progress

    def play(self, is_enough: Callable[[], bool]) -> None:
        """Until it is; fails if nothing goes on."""
        last, since = self.progress(), time.monotonic()
        while not is_enough():
            self.keep_alive()
            now = self.progress()
            if now != last:
                last, since = now, time.monotonic()
            assert time.monotonic() - since < STANDSTILL_S, f"nothing goes on after {now} steps"
            time.sleep(0.02)


class Chaos:
    """A chaos client that only takes, whatever becomes of its broker. A context manager, which ends
    it."""

    def __init__(self, address: str, seen: Path, seed: int) -> None:
        self._seen = seen
        options = ("--topic", TOPIC, "--no-puts", "--seconds", 3_600, "--seed", seed, "--json")
        self._client = Server(
            "chaos-client", "--door", "xpub", "--address", address, "--seen", seen, *options
        )

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.__exit__(None, None, None)

    def wait_until_it_runs(self) -> None:
        end_s = time.monotonic() + STANDSTILL_S
        while not self._seen.exists():
            assert time.monotonic() < end_s, "it does not begin"
            time.sleep(0.01)

    def end(self) -> None:
        """In good order: nothing has thrown it off."""
        self._client.send(signal.SIGTERM)
        assert self._client.exit_code() == 0, self._client.errors()
        assert json.loads(self._client.line())["counts"]["acts"] > 0


def subscribe_all(broker: Broker, directory: Path) -> None:
    """Before anything is published: what comes from here on is everybody's."""
    for name in SUBSCRIBERS:
        with ReliableSubscriber(
            broker.addresses["proxy"], name, directory=directory / "done", timeout=STANDSTILL_S
        ) as subscriber:
            assert subscriber.subscribe(TOPIC) is True


def place(stored: Stored) -> RecordPosition:
    return parse_message_id(stored.id)[1]
