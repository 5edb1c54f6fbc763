"""Exactly once under blows: a stream from topic to topic, and what can go wrong with it (S2, S3).

A driver of its own process copies one topic to another through Spark, turning each value to upper
case. It is struck where it hurts:

    before-stage    a task has begun: what was committed last is in Spark's log
    mid-stage       a task has staged some of its rows
    after-stage     a task has staged all of them, and nobody knows
    before-commit   the driver has heard of all tasks, and not committed
    after-commit    it has committed, and Spark's log does not know

by SIGKILL of the driver and its JVM, by an exception, by SIGKILL of the executor, by SIGKILL of the
broker, which is started again, or by a task that waits until another attempt at it, a speculative
one, has begun. Between two lives Spark's last commit may be taken out of its log. In the end the
target holds each record of the source once: key, value, headers, time, compared one by one.

    python -m tests.spark.torture --seed 17 --blows 12 --cluster
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from tests.kit.server import Server
from tests.spark import cluster
from tests.spark.addresses import reserved
from tests.spark.cluster import ROOT, standalone

Point = Literal["before-stage", "mid-stage", "after-stage", "before-commit", "after-commit"]
How = Literal["kill", "raise", "executor", "broker", "speculate"]

POINTS: tuple[Point, ...] = (
    "before-stage",
    "mid-stage",
    "after-stage",
    "before-commit",
    "after-commit",
)
IN_TASKS = POINTS[:3]
SOURCE, TARGET = "torture.in", "torture.out"
PARTITIONS = 3
#: Two tasks at a time, and four attempts at each.
LOCAL = "local[2,4]"
#: As in the README.
PLAIN = "local[*]"
#: For a life on a machine that has other things to do as well.
LIFE_S = 600
#: For one thing that the broker is asked for.
DEADLINE_S = 120
PAUSE_S = 0.05


@dataclass(frozen=True)
class Blow:
    """What happens, when the batch of this number comes to this point for the first time."""

    batch: int
    point: Point
    how: How


class Record(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


class Outcome(NamedTuple):
    """What the target lacks, and what it has too often or should not have at all."""

    missing: list[Record]
    surplus: list[Record]
    lives: int
    struck: int


# --- the checker ---------------------------------------------------------------------------------


def compare(
    source: Sequence[Record], target: Sequence[Record]
) -> tuple[list[Record], list[Record]]:
    """Missing and surplus, record by record."""
    expected = Counter(
        record._replace(value=None if record.value is None else record.value.upper())
        for record in source
    )
    found = Counter(target)
    return list((expected - found).elements()), list((found - expected).elements())


# --- the whole story -----------------------------------------------------------------------------


class Torture:
    """One story: a broker, a source with records, a checkpoint. `keyed=False` drops the commit's
    key, to show that the checker would notice. With `plain`, Spark's settings are those that a
    reader of the README has: one attempt at a task, no speculation."""

    def __init__(
        self,
        directory: Path,
        *,
        records: int,
        per_batch: int,
        masters: Sequence[str] = (LOCAL,),
        keyed: bool = True,
        plain: bool = False,
    ) -> None:
        self.directory = directory
        self.checkpoint = directory / "checkpoint"
        self.records, self.per_batch = records, per_batch
        #: Of each life; the last is that of all that follow.
        self.masters, self.keyed, self.plain = masters, keyed, plain
        self.lives = 0
        self._server: Server | None = None
        self._listeners: dict[str, str] = {}

    def run(self, blows: Sequence[Blow], *, forget_commits_of: Sequence[int] = ()) -> Outcome:
        """Live until all is copied. After each life that a kill has ended with the last commit of
        one of these batches, Spark's log forgets that it was committed."""
        with reserved() as kafka, reserved() as http:
            self._listeners = {"kafka": kafka, "http": http}
            return self._story(blows, forget_commits_of)

    def _story(self, blows: Sequence[Blow], forget_commits_of: Sequence[int]) -> Outcome:
        try:
            self._serve()
            source = self._fill()
            while self._live(blows) != 0:
                assert self.lives <= len(blows) + 1, "a life ended for no reason"
                self._forget(forget_commits_of)
            missing, surplus = compare(source, self._read(TARGET))
            return Outcome(missing, surplus, self.lives, len(self._struck()))
        finally:
            if self._server is not None:
                self._server.__exit__(None, None, None)

    def _serve(self) -> None:
        self._server = Server(
            *("serve", "--data", self.directory / "data"),
            *("--kafka", self._listeners["kafka"], "--http", self._listeners["http"]),
            environment=dict(os.environ),
        )
        self._server.ready()

    def _fill(self) -> list[Record]:
        admin = AdminClient({"bootstrap.servers": self._listeners["kafka"]})
        made = admin.create_topics([NewTopic(name, PARTITIONS) for name in (SOURCE, TARGET)])
        for each in made.values():
            each.result(DEADLINE_S)
        producer = Producer({"bootstrap.servers": self._listeners["kafka"], "linger.ms": 20})
        for number in range(self.records):
            producer.produce(
                SOURCE,
                key=None if number % 7 == 0 else b"key-%d" % (number % 11),
                value=None if number % 13 == 0 else b"value %d" % number,
                headers=[("number", b"%d" % number)],
                timestamp=1_700_000_000_000 + number,
            )
        assert producer.flush(DEADLINE_S) == 0
        return self._read(SOURCE)

    def _live(self, blows: Sequence[Blow]) -> int:
        """One driver, until it has copied everything or is dead; its exit code."""
        self.lives += 1
        settings = {
            "bootstrap": self._listeners["kafka"],
            "checkpoint": str(self.checkpoint),
            "marks": str(self.directory / "marks"),
            "per_batch": self.per_batch,
            "master": self.masters[min(self.lives, len(self.masters)) - 1],
            "keyed": self.keyed,
            "plain": self.plain,
            "blows": [asdict(blow) for blow in blows],
        }
        (self.directory / "marks").mkdir(exist_ok=True)
        log = self.directory / f"driver-{self.lives}.log"
        with log.open("wb") as output:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.torture", "--driver", json.dumps(settings)],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Executors are to find `tests`, too.
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
            )
            try:
                self._watch(driver)
            finally:
                driver.kill()
                code = driver.wait()
        assert code in (0, -signal.SIGKILL), log.read_text(errors="replace")[-5_000:]
        return code

    def _watch(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait for the driver's end, and see to the broker meanwhile."""
        wish = self.directory / "marks" / "broker"
        deadline = time.monotonic() + LIFE_S
        while driver.poll() is None:
            assert time.monotonic() < deadline, f"life {self.lives} takes too long"
            if wish.exists():
                assert self._server is not None
                self._server.__exit__(None, None, None)
                self._serve()
                wish.unlink()
            time.sleep(PAUSE_S)

    def _struck(self) -> list[Path]:
        return list((self.directory / "marks").glob("*-*"))

    def _forget(self, batches: Sequence[int]) -> None:
        commits = self.checkpoint / "commits"
        done = sorted(int(each.name) for each in commits.glob("[0-9]*")) if commits.exists() else []
        if done and done[-1] in batches:
            (commits / str(done[-1])).unlink()
            (commits / f".{done[-1]}.crc").unlink(missing_ok=True)

    def _read(self, topic: str) -> list[Record]:
        """Everything that a Kafka consumer of committed records reads."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._listeners["kafka"],
                "group.id": "checker",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
            return list(_until_the_end(consumer))
        finally:
            consumer.close()


def _until_the_end(consumer: Consumer) -> Iterator[Record]:
    ended: set[int] = set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(DEADLINE_S)
        assert message is not None, "the consumer hears nothing"
        if message.error() is not None:
            ended.add(message.partition() or 0)
            continue
        headers: Any = message.headers() or ()
        yield Record(message.key(), message.value(), tuple(headers), message.timestamp()[1])


def seeded(seed: int, count: int, batches: int, kinds: Sequence[How]) -> list[Blow]:
    """Blows at different batches, at any point, of any of these kinds."""
    chance = random.Random(seed)
    numbers = sorted(chance.sample(range(batches), count))
    blows = []
    for number in numbers:
        how = chance.choice(kinds)
        points = IN_TASKS if how in ("executor", "speculate") else POINTS
        blows.append(Blow(number, chance.choice(points), how))
    return blows


# --- the driver, in a process of its own ---------------------------------------------------------


def drive(settings: Mapping[str, Any]) -> None:
    """Copy everything, beginning again where an exception has ended a query."""
    # Only the driver's process pays for Spark.
    from tests.spark.session import session
    from tests.spark.torture_source import TortureSource

    configs = {} if settings["plain"] else _CONFIGS
    with session(settings["master"], **configs) as spark:
        spark.dataSource.register(TortureSource)
        _copy(spark, settings)


def _copy(spark: SparkSession, settings: Mapping[str, Any]) -> None:
    from tests.spark.session import STARVED

    gateway: Any = spark.sparkContext._gateway
    # The driver first: it would tell of its JVM's death.
    pids = [os.getpid(), gateway.proc.pid]
    told = json.dumps({**settings, "pids": pids})
    options = {"kafka.bootstrap.servers": settings["bootstrap"], "blows": told}
    while True:
        rows = (
            spark.readStream.format("quackmq")
            .option("kafka.bootstrap.servers", settings["bootstrap"])
            .option("subscribe", SOURCE)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", settings["per_batch"])
            .option("includeHeaders", "true")
            .load()
            .selectExpr("key", "upper(string(value)) AS value", "headers", "timestamp")
            .repartition(2)
        )
        query = (
            rows.writeStream.format("quackmq-torture")
            .options(**options)
            .option("topic", TARGET)
            .option("checkpointLocation", settings["checkpoint"])
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except Exception as error:
            if "a blow" not in str(error) and STARVED not in str(error):
                raise
            continue
        return


_CONFIGS = {
    # Two attempts at a task at once, wherever one is a little slower; where there are two hosts.
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1ms",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    **cluster.CONFIGS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--blows", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0, help="go on with new seeds for so long")
    parser.add_argument("--cluster", action="store_true", help="a master and two workers")
    given = parser.parse_args()
    if given.driver:
        drive(json.loads(given.driver))
        return
    _soak(given)


def _soak(given: argparse.Namespace) -> None:
    deadline = time.monotonic() + given.seconds
    seed = random.randrange(2**32) if given.seed is None else given.seed
    while True:
        kinds: tuple[How, ...] = ("kill", "raise", "broker")
        if given.cluster:
            kinds += ("executor", "speculate")
        blows = seeded(seed, given.blows, 2 * given.blows, kinds)
        print(f"seed {seed}: {[f'{each.batch} {each.point} {each.how}' for each in blows]}")
        directory = Path(tempfile.mkdtemp(prefix="quackmq-spark-"))
        try:
            # Every second one has the settings of somebody who has read the README, and no more.
            plain = not given.cluster and seed % 2 == 1
            local = nullcontext(PLAIN if plain else LOCAL)
            with standalone(directory / "spark") if given.cluster else local as master:
                records = 100 * 2 * given.blows
                story = Torture(
                    directory, records=records, per_batch=100, masters=[master], plain=plain
                )
                forget = [each.batch for each in blows if each.how == "kill"]
                outcome = story.run(blows, forget_commits_of=forget)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        print(
            f"seed {seed}: {outcome.lives} lives, {outcome.struck} blows, "
            f"{len(outcome.missing)} missing, {len(outcome.surplus)} surplus"
        )
        if outcome.missing or outcome.surplus:
            sys.exit(f"replay it with --seed {seed} --blows {given.blows}")
        if time.monotonic() >= deadline:
            return
        seed += 1


if __name__ == "__main__":
    main()
