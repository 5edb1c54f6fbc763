"""Chaos clients and a broker that is killed, at one listener; and then the messages are counted.

Two takers, chaos clients that only take, and a putter, one that does everything bad that it can,
are at the same topics as a good producer that numbers its puts (worker.py). From a seed it is drawn
what each of them does, and who is killed when, with SIGKILL: the broker, a taker, the producer.
Whoever died is started again. At the end the log is read back, takers go on until they have all of
it, and the checker (checker.py) compares log and takers with what the producer was told; a putter's
messages, which may be there twice where a listener has no numbers, are compared with the log.

    python -m tests.pubsub.chaos --seconds 600
    python -m tests.pubsub.chaos --seed 17 --door line

For as long as one likes it does so at one listener after the other, and with the clients of the
reliable proxy (proxy_cast.py).

The first violation ends it, its seed is printed, and its directory is kept. A seed repeats the
draws, not the timing of real processes.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError
from confluent_kafka import TopicPartition as Partition

from quackmq.model.subscription import RecordPosition, message_id, parse_message_id
from tests.kit.server import Server
from tests.pubsub import proxy_cast
from tests.pubsub.checker import Stored, Told, violations
from tests.pubsub.results import Notes
from tests.pubsub.soaking import Plan, soak
from tests.pubsub.torture import WORKER, Standstill, WorkerProcess
from tests.real.broker import SMALL_QUACKMQ, Broker
from tests.real.clients import AWAY, QUIET, create_topics

TOPICS: Final = {"ducks": 1, "geese": 3}
TAKERS: Final = ("donald", "gladstone")
PUTTER: Final = "magica"
PRODUCER: Final = "daisy"
HARM: Final = ("broker", "taker", "producer")
#: Without any progress for so long, something hangs. Long, since machines can be busy.
STANDSTILL_S: Final = 90
#: A client that is told to end may be in the middle of a question that nobody answers.
LAST_WORDS_S: Final = 60
PAUSE_S: Final = 0.02
#: By the putter, before it is told to end.
ENOUGH_TAKEN: Final = 5
#: A topic's own id means nothing here: ids are compared by place.
_NO_TOPIC: Final = uuid.UUID(int=0)


class Listener(NamedTuple):
    """How chaos clients are at a listener."""

    #: What `Broker` calls it, and which of its addresses they are told.
    opens: str
    address: str
    #: How the producer puts its messages.
    way: str
    #: What each taker does beside taking. A dead member of a Kafka group is missed after six
    #: seconds, so none dies there but by the hand of this program.
    faults: str
    #: Whether messages come in the order of their offsets, the first time.
    is_ordered: bool
    #: Whether what is put twice at once is there twice.
    doubles: bool


LISTENERS: Final = {
    "line": Listener("line", "line", "zmq", "drop,delay,double,die", False, True),
    "zmq": Listener("zmq", "zmq", "zmq", "drop,delay,double,die", True, True),
    "xpub": Listener("zmq", "proxy", "zmq", "drop,delay,double,die", False, False),
    "kafka": Listener("kafka", "kafka", "python", "drop,delay,double", True, True),
}


class Outcome(NamedTuple):
    violations: list[str]
    puts: int
    #: By takers.
    taken: int
    faults: Counter[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {fault}" for fault, number in sorted(self.faults.items()))
        return f"{self.puts:,} puts, {self.taken:,} messages taken; {faults}"


class Chaos:
    """One run on an empty directory. A context manager, which ends all that it has started."""

    def __init__(
        self,
        directory: Path,
        listener: str,
        seed: int,
        *,
        puts: int,
        command: Sequence[str] = SMALL_QUACKMQ,
        end_s: float = STANDSTILL_S,
    ) -> None:
        """`puts` of the producer to each topic; who has taken nothing for `end_s` at the end, has
        lost what it lacks."""
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._listener = LISTENERS[listener]
        self._name = listener
        self._puts = puts
        self._end_s = end_s
        self._random = random.Random(seed)
        self._faults: Counter[str] = Counter()
        self._logs: list[str] = []
        self._broker = Broker(
            directory / "data",
            *("--line-reading", "every", "--proxy-lease-ms", "300"),
            *("--group-initial-delay-ms", "0"),
            command=command,
            listeners=sorted({"kafka", "zmq", self._listener.opens}),
        )
        self._takers = {name: self._client(name, "--no-puts") for name in TAKERS}
        self._putter = self._client(PUTTER, faults=None)
        self._producer = WorkerProcess(
            WORKER,
            self._random,
            role="producer",
            way=self._listener.way,
            address=self._broker.addresses["kafka" if self._listener.way == "python" else "zmq"],
            name=PRODUCER,
            topics=TOPICS,
            count=puts,
            directory=str(directory),
            mortality=0.0,
        )

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *error: object) -> None:
        for client in (*self._takers.values(), self._putter):
            client.kill()
        self._producer.kill()
        self._broker.__exit__(None, None, None)

    def run(self, kills: int, harm: Sequence[str] = HARM) -> Outcome:
        self._broker.start()
        create_topics(self._broker.address, TOPICS)
        for taker in self._takers.values():
            taker.subscribe()
        for taker in self._takers.values():
            taker.has_subscribed()
            taker.start()
        self._putter.start()
        self._producer.start()
        self._suffer(kills, harm)
        # It runs on until it has had its way for a while, however long its broker was away.
        self._watch(lambda: self._producer.is_done and self._putter.count() >= ENOUGH_TAKEN)
        summaries = [self._putter.end()]
        log = read_back(self._broker.address)
        complaint = self._watch_the_end(log)
        summaries += [taker.end() for taker in self._takers.values()]
        afterwards = read_back(self._broker.address)  # a put that nobody waited for may come late
        exit_code, told = self._broker.stop()
        self._logs.append(told)
        if exit_code:
            complaint.append(f"the broker ended with {exit_code}")
        complaint += [f"the broker failed: {each}" for each in self._logs if "Traceback" in each]
        for summary in summaries:
            self._faults.update(summary["acts"])
            refused = summary["refused"].items()
            self._faults.update({f"refused: {code}": number for code, number in refused})
        return self._outcome(log, afterwards, complaint, summaries[0])

    # --- what happens -----------------------------------------------------------------------

    def _suffer(self, kills: int, harm: Sequence[str]) -> None:
        """Spread over the first two thirds of what is to be taken."""
        whole = self._puts * len(TOPICS) * len(TAKERS)
        due = sorted(self._random.sample(range(1, whole * 2 // 3), kills))
        for number, at in enumerate(due):
            self._watch(partial(self._has_taken, at))
            # Not to wait for anything: this makes the instant a random one.
            time.sleep(self._random.uniform(0, 0.02))
            self._kill(harm[number % len(harm)])

    def _kill(self, whom: str) -> None:
        if whom == "broker":
            self._logs.append(self._broker.kill())
            self._broker.start()
        elif whom == "taker":
            taker = self._takers[self._random.choice(TAKERS)]
            taker.kill()
            taker.start()
        elif not self._producer.is_done:
            self._producer.kill()
            self._producer.start()
        self._faults[f"{whom}s killed"] += 1

    def _watch_the_end(self, log: Mapping[str, Sequence[Stored]]) -> list[str]:
        """Until takers have all that there is; who does not, has lost something."""
        everything = len(self._keys(log))
        try:
            self._watch(
                lambda: all(each.count() >= everything for each in self._takers.values()),
                self._end_s,
            )
        except Standstill as error:
            return [f"not all takers came to the end: {error}"]
        return []

    def _has_taken(self, messages: int) -> bool:
        return sum(each.count() for each in self._takers.values()) >= messages

    def _watch(self, condition: Callable[[], bool], standstill_s: float = STANDSTILL_S) -> None:
        """Until something holds. A producer whose client gave up is started again meanwhile."""
        before, since = self._progress(), time.monotonic()
        while not condition():
            if self._producer.has_died(self._faults):
                self._producer.start()
            for client in (*self._takers.values(), self._putter):
                if client.has_failed:
                    assert client.was_aborted, f"{client.name} has ended: {client.errors()}"
                    self._faults["clients that librdkafka ended"] += 1
                    client.kill()
                    client.start()
            now = self._progress()
            if now != before:
                before, since = now, time.monotonic()
            if time.monotonic() - since > standstill_s:
                raise Standstill(f"nothing moves for {standstill_s} s: {now}")
            time.sleep(PAUSE_S)

    def _progress(self) -> dict[str, int]:
        told = self._producer.path
        counts = {client.name: client.count() for client in (*self._takers.values(), self._putter)}
        return counts | {PRODUCER: told.read_bytes().count(b"\n") if told.exists() else 0}

    # --- its end ----------------------------------------------------------------------------

    def _outcome(
        self,
        log: dict[str, list[Stored]],
        afterwards: dict[str, list[Stored]],
        complaint: list[str],
        put: dict[str, Any],
    ) -> Outcome:
        """Takers have all of the log, and nothing that is not there afterwards."""
        notes = Notes(self._producer.path)
        told = notes.told()
        notes.close()
        puts = {(PRODUCER, topic): Told(self._puts, told.get(topic, ())) for topic in TOPICS}
        stores = {("log", topic): afterwards[topic] for topic in TOPICS}
        for name, taker in self._takers.items():
            for topic, messages in self._placed(taker, afterwards).items():
                stores[name, topic] = messages
        good = {key: [each for each in of if is_good(each)] for key, of in stores.items()}
        found = complaint + violations(puts, good)
        wanted, allowed = self._keys(log), self._keys(afterwards)
        for name in TAKERS:
            has = self._keys({topic: stores[name, topic] for topic in TOPICS})
            found += [f"{name} lacks {each}" for each in sorted(wanted - has)]
            found += [f"{name} has {each}, and the log has not" for each in sorted(has - allowed)]
        found += self._wrongly_put(afterwards, put["counts"])
        return Outcome(
            found,
            sum(len(set(numbers)) for numbers in told.values()),
            sum(each.count() for each in self._takers.values()),
            self._faults,
        )

    def _placed(
        self, taker: _Client, log: Mapping[str, Sequence[Stored]]
    ) -> dict[str, list[Stored]]:
        """What a taker has seen, with ids as the log has them; of an entry of the line listener,
        which has none, that of the first one that says the same."""
        firsts = {
            (topic, each.value): each.id for topic, of in log.items() for each in reversed(of)
        }
        placed: dict[str, list[Stored]] = {topic: [] for topic in TOPICS}
        for told in taker.seen():
            topic, value = told["topic"], told["content"]
            if self._name == "line":
                own_id = firsts.get((topic, value), value)
            elif self._name == "kafka":
                _, partition, offset = told["id"].rsplit("/", 2)
                own_id = message_id(_NO_TOPIC, RecordPosition(int(partition), int(offset)))
            else:
                own_id = message_id(_NO_TOPIC, parse_message_id(told["id"])[1])
            placed[topic].append(Stored(own_id, value))
        if not self._listener.is_ordered:  # ids tell where each belongs
            for messages in placed.values():
                messages.sort(key=lambda each: parse_message_id(each.id)[1])
        return placed

    def _keys(self, stores: Mapping[str, Sequence[Stored]]) -> set[tuple[str, str, str]]:
        """What makes a message another one than the others."""
        has_ids = self._name != "line"
        return {
            (topic, each.value, each.id if has_ids else "")
            for topic, messages in stores.items()
            for each in messages
        }

    def _wrongly_put(
        self, log: Mapping[str, Sequence[Stored]], counts: Mapping[str, int]
    ) -> Iterator[str]:
        values = Counter(
            (topic, each.value)
            for topic, messages in log.items()
            for each in messages
            if not is_good(each)
        )
        for (topic, value), times in values.items():
            if not value.startswith(f"{PUTTER}-"):
                yield f"{value!r} in {topic} was put by nobody"
            if times > (2 if self._listener.doubles else 1):
                yield f"{value!r} is in {topic} {times} times"
        least = counts["put"]
        most = least + counts["uncertain"] if self._putter.lives == 1 else math.inf
        if not least <= values.total() <= most:
            yield f"the putter has put {least} to {most} messages, and {values.total()} are there"

    def _client(self, name: str, *options: object, faults: str | None = "") -> _Client:
        words: list[object] = ["--door", self._name, "--name", name, "--json"]
        words += ["--address", self._broker.addresses[self._listener.address]]
        words += [word for topic in TOPICS for word in ("--topic", topic)]
        if faults is not None:
            words += ["--faults", faults or self._listener.faults, "--keep"]
        return _Client(name, self._directory / f"{name}.seen", self._random, [*words, *options])


class _Client:
    """A chaos client through all its lives, which knows what it has seen."""

    def __init__(
        self, name: str, seen: Path, source: random.Random, words: Sequence[object]
    ) -> None:
        self.name = name
        self._seen = seen
        self._random = source
        self._words = [*map(str, words), "--seen", str(seen)]
        self._process: Server | None = None
        self._may_end = False
        #: Begun, and one more for each of which nothing was told.
        self.lives = 0

    def subscribe(self) -> None:
        """And no more: its plan begins with that."""
        self._process = Server("chaos-client", *self._words, "--acts", str(len(TOPICS)))

    def has_subscribed(self) -> None:
        """Waits until that is done."""
        self.summary()
        self.kill()

    def start(self) -> None:
        self.lives += 1
        seed = self._random.randrange(2**32)
        self._process = Server(
            "chaos-client", "--seed", str(seed), "--seconds", "3600", *self._words
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None

    @property
    def was_aborted(self) -> bool:
        """By librdkafka, which has assertions of its own: a crash as any."""
        exit_code = self._running.process.poll()
        return exit_code == -signal.SIGABRT and "rdkafka" in self.errors()

    @property
    def has_failed(self) -> bool:
        """It ends when it is told to, and not before."""
        return not self._may_end and self._running.process.poll() is not None

    def end(self) -> dict[str, Any]:
        """In good order: nothing has thrown it off. Its summary."""
        self._may_end = True
        self._running.send(signal.SIGTERM)
        return self.summary()

    def summary(self) -> dict[str, Any]:
        exit_code = self._running.process.wait(LAST_WORDS_S)
        if self.was_aborted:
            self.lives += 1
            return {"acts": {}, "refused": {}, "counts": {"put": 0, "uncertain": 0}}
        assert exit_code == 0, self.errors()
        assert self.errors() == "", "it has something to say"
        found: dict[str, Any] = json.loads(self._running.line())
        return found

    def errors(self) -> str:
        return self._running.errors()

    def count(self) -> int:
        return self._seen.read_bytes().count(b"\n") if self._seen.exists() else 0

    def seen(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self._seen.read_bytes().splitlines()]

    @property
    def _running(self) -> Server:
        assert self._process is not None, "it was started"
        return self._process


def is_good(message: Stored) -> bool:
    """Put by the producer."""
    return message.value.startswith(f"{PRODUCER} ")


def read_back(address: str) -> dict[str, list[Stored]]:
    """All that is in the topics now, by topic, each partition in its order."""
    reader = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "afterwards",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    places = {(topic, partition) for topic, of in TOPICS.items() for partition in range(of)}
    reader.assign([Partition(*place, OFFSET_BEGINNING) for place in sorted(places)])
    found: dict[str, list[Stored]] = defaultdict(list)
    deadline = time.monotonic() + STANDSTILL_S
    try:
        while places:
            assert time.monotonic() < deadline, f"{places} are not read to their end"
            for message in reader.consume(1_000, timeout=0.1):
                error, offset = message.error(), message.offset()
                if error is not None and error.code() in AWAY:
                    continue  # it goes on by itself
                topic, partition = message.topic(), message.partition()
                assert topic is not None and partition is not None and offset is not None
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, str(error)
                    places.discard((topic, partition))
                    continue
                own_id = message_id(_NO_TOPIC, RecordPosition(partition, offset))
                found[topic].append(Stored(own_id, (message.value() or b"").decode()))
    finally:
        reader.close()
    return found


# --- for as long as one likes ---------------------------------------------------------------------


#: The clients of the reliable proxy, which do what a chaos client at the listener beside them does
#: not.
CLIENTS: Final = "xpub-clients"
RUNS: Final = (*LISTENERS, CLIENTS)


def main() -> int:
    return soak(_run, "chaos", ("door", RUNS), description=__doc__ or "", puts=150, kills=9)


def _run(plan: Plan) -> Outcome:
    if plan.over == CLIENTS:
        found, deaths = proxy_cast.run(plan.directory, plan.seed, plan.kills)
        faults = Counter({"brokers killed": plan.kills, "deaths": deaths})
        puts = len(proxy_cast.PUBLISHERS) * proxy_cast.PUTS
        return Outcome(found, puts, proxy_cast.WHOLE - puts, faults)
    with Chaos(plan.directory, plan.over, plan.seed, puts=plan.puts) as chaos:
        return chaos.run(plan.kills)


if __name__ == "__main__":
    sys.exit(main())
