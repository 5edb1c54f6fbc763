"""The Python client's own logic, against the real servers on a network and a disk that fail.

Programs use the libraries of the queue (`quackmq.client.queue`, over HTTP) and of ZeroMQ
(`quackmq.client.zmq`), as their documentation says. The broker crashes and restarts beside them,
and they are killed at any wait and at any operation on their files (blocking.py, client_files.py).

- A message that a producer enqueues is there once and in order, whichever calls failed, if the
  producer repeats the same text, or numbers its messages over its own death.
- A consumer with a directory gets no message twice. It misses only a message that it had received
  when it was killed.
- A program that stores the ids itself gets each message exactly once.
- No call takes longer than its timeout.
- Programs that use `quackmq.client.consuming` get what consuming_clients.py says.

    python -m tests.simulation.python_clients --seed 7               this seed alone, with a trace
    python -m tests.simulation.python_clients --seed 7 --seeds 500   this one and 499 more
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from quackmq.client.consuming.progress import Mode
from quackmq.client.queue import Consumer, ConsumerError, Producer, ProducerError
from quackmq.client.zmq import BEFORE_THE_FIRST, ZmqClient
from quackmq.errors import QuackError, QuackTimeout
from tests.simulation.blocking import Program, blocking_calls
from tests.simulation.client_files import ClientFiles, client_files
from tests.simulation.consuming_clients import ConsumingProgram
from tests.simulation.life import CALLER
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, Weather
from tests.simulation.protocol_clients import Servers
from tests.simulation.protocols import ProtocolWorld
from tests.simulation.soak import main
from tests.simulation.world import Trace

_HTTP_PORT: Final = 8002
_ZMQ_PORT: Final = 5555
_HTTP_ADDRESS: Final = f"127.0.0.1:{_HTTP_PORT}"
_ZMQ_ADDRESS: Final = f"127.0.0.1:{_ZMQ_PORT}"
_HTTP_TOPIC, _ZMQ_TOPIC = "by-queue", "by-zmq-client"
#: Timeouts of calls: shorter than a restart of the broker, and longer.
_TIMEOUTS_S: Final = (0.2, 1.0, 5.0)
#: How much longer than its timeout a call may take: the last attempt may begin just before it.
_GRACE_S: Final = 0.5
_KILL_CHANCE: Final = 0.004
#: Between two calls of a program.
_PAUSE_S: Final = 0.05
#: Error codes of a broker that fails or closes, or that could not be reached.
_EXPECTED: Final = (
    "closing",
    "empty",
    "limit_reached",
    "no_answer",
    "outcome_unknown",
    "store_read_only",
    "storage_error",
    "unreachable",
    "unusable_directory",
)


class Account:
    """What a program was promised, and what it has got. It outlives the program."""

    def __init__(self, world: PythonClientWorld, topic: str) -> None:
        self.world = world
        self.topic = topic
        self.timeout_s = world.choose_timeout_s()

    def timed(self, call: Callable[[], Any]) -> Any:
        """Call, and check that the call keeps its timeout."""
        return self.world.timed(call, self.timeout_s)

    def count(self, what: str) -> None:
        self.world.counts[what] += 1

    def check_error(self, error: QuackError) -> None:
        """Raise Violation for an error that neither the broker nor the network explains."""
        reason = getattr(error, "reason", error.code)
        if reason not in _EXPECTED and not isinstance(error, QuackTimeout):
            raise Violation(f"a call failed: {reason}: {error}") from error
        self.count(f"calls that failed: {reason}")


class Puts(Account):
    """Puts 0, 1, 2, … Each number is repeated until it is acknowledged."""

    acknowledged = 0

    def acknowledge(self) -> None:
        self.acknowledged += 1
        self.count(f"messages put: {self.topic}")


class Gets(Account):
    """Gets the numbers of a topic, from some number on."""

    #: The next number; None before the first.
    expected: int | None = None
    #: How many messages may be missing: one for each start of the program since the last message.
    may_miss = 0

    def got(self, text: str) -> None:
        number = int(text)
        if self.expected is not None:
            most = self.expected + self.may_miss
            if not self.expected <= number <= most:
                raise Violation(f"a consumer of {self.topic} got {number}, not {self.expected}")
        self.expected, self.may_miss = number + 1, 0
        self.count(f"messages got: {self.topic}")


class QueueProducer(Puts):
    """Enqueues through the queue's library, which numbers the messages. Only the first message
    after a death has an explicit number: its first request may still be on its way."""

    numbers_all = False
    _id: str | None = None

    def __call__(self, program: Program) -> None:
        with Producer(_HTTP_ADDRESS, timeout=self.timeout_s) as producer:
            is_numbered = self._id is not None or self.numbers_all
            while not program.is_stopping:
                try:
                    self._put(producer, is_numbered)
                    is_numbered = self.numbers_all
                except ProducerError as error:
                    self.check_error(error)
                program.sleep(_PAUSE_S)

    def _put(self, producer: Producer, is_numbered: bool) -> None:
        if self._id is None:
            self._id = producer.register_producer(self.topic)
        number = self.acknowledged
        sequence = number if is_numbered else None
        enqueue = partial(producer.enqueue, self._id, self.topic, str(number), sequence=sequence)
        self.timed(enqueue)
        self.acknowledge()


class NumberingProducer(QueueProducer):
    """Numbers all its messages itself."""

    numbers_all = True


class QueueConsumer(Gets):
    """Dequeues through the queue's library, with a directory."""

    def __init__(self, world: PythonClientWorld, topic: str, directory: str) -> None:
        super().__init__(world, topic)
        self._directory = directory

    def __call__(self, program: Program) -> None:
        self.may_miss += 1
        try:
            with Consumer(
                _HTTP_ADDRESS, timeout=self.timeout_s, directory=self._directory
            ) as consumer:
                while not program.is_stopping:
                    self._get(consumer, program)
                    program.sleep(_PAUSE_S)
        except ConsumerError as error:  # the directory cannot be used at the moment
            self.check_error(error)

    def _get(self, consumer: Consumer, program: Program) -> None:
        assert program.loop is not None
        try:
            if consumer.topics:
                if program.loop.source.random() < 0.1:
                    self.timed(lambda: consumer.size(self.topic))
                self.got(self.timed(lambda: consumer.dequeue(self.topic)))
            elif self.expected is not None:
                raise Violation("the directory has forgotten the topic of a consumer")
            else:
                consumer.register_consumer(self.topic)
        except ConsumerError as error:
            self.check_error(error)


class ZmqPutter(Puts):
    """Puts through the ZeroMQ client, with a sequence, also over its own death."""

    def __call__(self, program: Program) -> None:
        with ZmqClient(_ZMQ_ADDRESS, "putter", timeout=self.timeout_s) as client:
            while not program.is_stopping:
                try:
                    self.timed(partial(self._put, client, self.acknowledged))
                    self.acknowledge()
                except QuackError as error:
                    self.check_error(error)
                program.sleep(_PAUSE_S)

    def _put(self, client: ZmqClient, number: int) -> None:
        client.put(self.topic, str(number), sequence=number)


class ZmqGetter(Gets):
    """Gets through the ZeroMQ client, with a directory or with ids that it stores itself."""

    def __init__(
        self, world: PythonClientWorld, topic: str, name: str, directory: str | None
    ) -> None:
        super().__init__(world, topic)
        self._name = name
        self._directory = directory
        self._is_subscribed = False
        self._last_id = BEFORE_THE_FIRST

    def __call__(self, program: Program) -> None:
        self.may_miss += self._directory is not None
        try:
            with ZmqClient(
                _ZMQ_ADDRESS, self._name, directory=self._directory, timeout=self.timeout_s
            ) as client:
                while not program.is_stopping:
                    try:
                        self._get(client)
                    except QuackError as error:
                        self.check_error(error)
                    program.sleep(_PAUSE_S)
        except QuackError as error:  # the directory cannot be used at the moment
            self.check_error(error)

    def _get(self, client: ZmqClient) -> None:
        if not self._is_subscribed:
            client.subscribe(self.topic)
            self._is_subscribed = True
        after = self._last_id if self._directory is None else None
        message = self.timed(lambda: client.get(self.topic, after=after))
        self.got(message.text)
        self._last_id = message.id


class PythonClientWorld(ProtocolWorld):
    program = "python_clients"
    http_port = _HTTP_PORT
    zmq_port = _ZMQ_PORT

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self.publishers, self.readers, self.subscribers, self.members = [], [], [], []
        self._consuming = [
            ConsumingProgram(f"consuming-{mode.value}", _ZMQ_TOPIC, mode)
            for mode in (Mode.REPEAT, Mode.SKIP)
        ]
        self._life_number = 0
        self._files = ClientFiles(random.Random(f"{seed}/client files"))
        make_producer = self._source.choice((QueueProducer, QueueProducer, NumberingProducer))
        self._puts: tuple[Puts, ...] = (
            make_producer(self, _HTTP_TOPIC),
            ZmqPutter(self, _ZMQ_TOPIC),
        )
        self._gets: tuple[Gets, ...] = (
            QueueConsumer(self, _HTTP_TOPIC, "/queue-consumer/"),
            ZmqGetter(self, _ZMQ_TOPIC, "getter", "/zmq-getter"),
            ZmqGetter(self, _ZMQ_TOPIC, "own-store", None),
        )
        names = ("queue-producer", "zmq-putter", "queue-consumer", "zmq-getter", "own-store")
        accounts: tuple[Any, ...] = (*self._puts, *self._gets)
        self._programs = [
            Program(name, account) for name, account in zip(names, accounts, strict=True)
        ]
        for each in self._programs:
            each.on_death = partial(self._files.on_death, each)

    def choose_timeout_s(self) -> float:
        return self._source.choice(_TIMEOUTS_S)

    def timed(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Call, and check that the call keeps its timeout. The check is left out if the broker has
        died meanwhile, since programs stand still until the next broker has started."""
        began_s, life = self._clock.seconds, self._life_number
        try:
            return call()
        finally:
            took_s = self._clock.seconds - began_s
            if took_s > timeout_s + _GRACE_S and life == self._life_number:
                raise Violation(f"a call took {took_s:.2f} s")

    def run(self) -> None:
        try:
            super().run()
        finally:
            for program in self._programs:
                program.end()

    def _make_loop(self, source: random.Random) -> NetworkLoop:
        """Lose many connections: the libraries are mostly about lost answers."""
        weather = Weather(
            resets=self._source.choice((0.0, 0.02, 0.05)),
            stalls=self._source.choice((0.0, 0.02, 0.05)),
        )
        return NetworkLoop(self._clock, source, weather, self.counts)

    def shrink_more(self, stack: ExitStack) -> None:
        super().shrink_more(stack)
        stack.enter_context(blocking_calls(self._clock))
        stack.enter_context(client_files(self._files))

    # --- one life -----------------------------------------------------------------------------

    async def _register(self, servers: Servers, loop: NetworkLoop) -> None:
        self._life_number += 1
        for consuming in self._consuming:
            consuming.forget_connection()
        for topic in (_HTTP_TOPIC, _ZMQ_TOPIC):
            if topic not in servers.broker.topics():
                await servers.broker.create_topic(CALLER, topic)

    async def _work(self, servers: Servers, loop: NetworkLoop) -> None:
        """Let the programs work for a while, and close the broker while they are busy."""
        for program in self._programs:
            program.kill_chance = _KILL_CHANCE
        async with asyncio.TaskGroup() as group:
            driving = [
                group.create_task(program.drive(loop), name=program.name)
                for program in self._programs
            ]
            for consuming in self._consuming:
                group.create_task(consuming.run(servers, loop, 30), name=consuming.name)
            await asyncio.sleep(self._source.choice((0.5, 2.0, 4.0)))
            await self._close(servers)
            await asyncio.sleep(self._source.choice((0.0, 1.0)))  # nobody listens
            for task in driving:
                task.cancel()

    async def _finish(self, servers: Servers, loop: NetworkLoop) -> None:
        """Nothing fails any more: everything that was put is got."""
        self._files.fails = False
        for program in self._programs:
            program.kill_chance = 0.0
        async with asyncio.TaskGroup() as group:
            for program in self._programs:
                group.create_task(program.drive(loop), name=program.name)
            goals = [each.acknowledged + 2 for each in self._puts]
            async with asyncio.timeout(600):
                while not self._has_all(goals):
                    await asyncio.sleep(0.1)
                for program in self._programs:
                    program.is_stopping = True
                for consuming in self._consuming:
                    while consuming.done_end < goals[-1] and consuming.mode is Mode.REPEAT:
                        await consuming.run(servers, loop, 1)
                    consuming.hang_up()
        await self._check_topics(servers)
        await self._close(servers)

    def _has_all(self, goals: list[int]) -> bool:
        """Return whether all have put and got so many messages."""
        goal_by_topic = {each.topic: goal for each, goal in zip(self._puts, goals, strict=True)}
        return all(each.acknowledged >= goal_by_topic[each.topic] for each in self._puts) and all(
            (each.expected or 0) >= goal_by_topic[each.topic] for each in self._gets
        )

    async def _check_topics(self, servers: Servers) -> None:
        """Each topic has the numbers that were put, each once and in order."""
        for puts in self._puts:
            page = await servers.broker.messages.read(
                CALLER, puts.topic, 0, 0, max_records=100_000, max_bytes=1 << 26
            )
            values = [int(message.record.value or b"") for message in page.messages]
            # A program that was stopped may have put one more than was acknowledged.
            if values != list(range(len(values))) or len(values) - puts.acknowledged not in (0, 1):
                raise Violation(f"{puts.topic} has {values}, not 0 to {puts.acknowledged - 1}")


simulate_python_clients = PythonClientWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=simulate_python_clients))
