"""One round: load on a broker that is killed at random instants, and the check of what it holds.

Several publishers of every kind write to several topics, a reader follows. A kill comes a random
number of acknowledgements and a random time after the start, or while the broker starts. After the
last one everything is read back and compared with what each client was told.

A seed draws kinds, sizes and instants; since the processes are real, it does not repeat a run
exactly.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.real.broker import QUACKMQ, Broker
from tests.real.clients import Follower, Kind, Progress, Publisher, create_topics, read_back
from tests.real.ledger import Place, check

TOPICS: Final = {"ducks": 1, "geese": 3, "swans": 2}
PLACES: Final = [Place(topic, number) for topic, count in TOPICS.items() for number in range(count)]
KINDS: Final = {
    "numbered": Kind("exactly_once"),
    "numbered-lz4": Kind("exactly_once", "lz4"),
    "unrepeated": Kind("at_most_once"),
    "repeating": Kind("at_least_once"),
}
#: A kill while the broker starts: as often as that, and so long after it began to open its
#: directory at the most. Before that it only loads its code.
STARTING_SHARE: Final = 0.25
OPENING_S: Final = 0.03
#: A kill of a broker that runs: behind so many acknowledgements, and so much later, at the most.
MOST_ACKNOWLEDGEMENTS: Final = 2_000
LATER_S: Final = 0.05
#: What the store logs when it was not closed.
RECOVERED: Final = "frames replayed"


@dataclass(frozen=True)
class Result:
    kills: int
    kills_while_starting: int
    recoveries: int
    acknowledged: int
    failed: int
    found: int
    violations: list[str]

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.kills_while_starting} while starting, {self.recoveries} "
            f"recoveries), {self.acknowledged:,} acknowledged, {self.failed:,} failed, "
            f"{self.found:,} found, "
            f"{len(self.violations)} violations"
        )


def run_round(
    data: Path,
    seed: int,
    kills: int,
    *,
    command: Sequence[str] = QUACKMQ,
    sync: str = "always",
    configs: Mapping[str, str] | None = None,
    wait: Callable[[], None] | None = None,
) -> Result:
    """`configs` are those of the topics. A running broker is killed a moment after `wait` returns,
    or after some acknowledgements."""
    source = random.Random(seed)
    progress = Progress()
    with ExitStack() as ending:
        broker = ending.enter_context(Broker(data, "--sync", sync, command=command))
        make_directory(broker, source)
        create_topics(broker.address, TOPICS, configs)
        publishers = [
            Publisher(name, kind, broker.address, PLACES, random.Random(source.random()), progress)
            for name, kind in KINDS.items()
        ]
        for publisher in publishers:
            ending.callback(publisher.abandon)
        follower = Follower(broker.address, PLACES)
        ending.callback(follower.abandon)
        logs, while_starting = kill_again_and_again(
            broker, source, kills, wait or (lambda: some_progress(progress, source))
        )
        accounts = [publisher.finish() for publisher in publishers]
        found = read_back(broker.address, PLACES)
        followed = follower.finish(sum(map(len, found.values())))
        exit_code, log = broker.stop()
    violations = check(accounts, found, [followed])
    if exit_code != 0:
        violations.append(f"told to stop, the broker ended with {exit_code}: {log}")
    return Result(
        kills=kills,
        kills_while_starting=while_starting,
        recoveries=sum(RECOVERED in log for log in (*logs, log)),
        acknowledged=progress.count,
        failed=sum(account.failures.total() for account in accounts),
        found=sum(map(len, found.values())),
        violations=violations,
    )


def some_progress(progress: Progress, source: random.Random) -> None:
    progress.wait_for_more(round(MOST_ACKNOWLEDGEMENTS ** source.random()))


def make_directory(broker: Broker, source: random.Random) -> None:
    """A first start, at times after one that was killed while it made the directory."""
    if source.random() < STARTING_SHARE:
        broker.launch()
        broker.wait_until_opening()
        time.sleep(source.uniform(0, OPENING_S))
        broker.kill()
    broker.start()


def kill_again_and_again(
    broker: Broker,
    source: random.Random,
    kills: int,
    wait: Callable[[], None],
) -> tuple[list[str], int]:
    """What each life had logged, and how many never became ready. At the end the broker runs."""
    logs = []
    while_starting = 0
    ready = True
    for number in range(1, kills + 1):
        if ready:
            wait()
        else:
            broker.wait_until_opening()
        # Not to wait for anything: this makes the instant a random one.
        time.sleep(source.uniform(0, LATER_S if ready else OPENING_S))
        logs.append(broker.kill())
        ready = number == kills or source.random() >= STARTING_SHARE
        if ready:
            broker.start()
        else:
            while_starting += 1
            broker.launch()
    return logs, while_starting
