"""Programs on the clients of every listener, to be killed while they consume or publish.

    python -m tests.pubsub.mortal

One process forks each program, so that a program begins within milliseconds and can be killed many
times. It takes one JSON object a line on stdin, `{"run": {…}}` with the fields of a `Task` or
`{"kill": PID}`, and answers each with a line: the process id, or `dead`.

A program appends to its log what it has seen, one line each, by one system call: a killed program
leaves behind all that it has written. A consumer writes `ready` when it is subscribed, then each
number when it is given it, and once more with a dot when it has worked on it. A publisher writes
`+N` before it publishes N and `-N` when that is acknowledged; it begins behind the last
acknowledged number of the log, as a program would that does not know whether the one in doubt was
taken.

To add a client, write a consumer or a publisher below and name it in its table.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quackmq import AsyncClient, Client
from quackmq.cli import get as getting
from quackmq.cli.main import main as command_line
from quackmq.client.proxy import ReliablePublisher, ReliableSubscriber
from quackmq.client.queue import Consumer, ConsumerError, Producer
from quackmq.client.zmq import ZmqClient

READY = "ready"
TIMEOUT_S = 60.0
#: Who has nothing to do for the moment, and no call that waits.
PAUSE_S = 0.001
#: Behind a number that a consumer has worked on.
DONE = "."
#: A consumer works on a message for so long, at the most. Else some would have seen everything
#: before anybody could kill them, and few would die with a message in hand.
WORK_S = 0.004


@dataclass(frozen=True)
class Task:
    """What a program is told. `address` is that of its listener; `directory` is "" for none; `home`
    is where the user's programs keep their state."""

    role: str
    address: str
    name: str
    topic: str
    log: str
    directory: str = ""
    home: str = ""

    @property
    def kept(self) -> str | None:
        return self.directory or None


class Log:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def lines(self) -> list[str]:
        return self.path.read_text().split()


# --- consumers: each yields READY, then the numbers that it is given ------------------------------


def consume_queue(task: Task) -> Iterator[str]:
    with Consumer(task.address, timeout=TIMEOUT_S, directory=task.kept) as consumer:
        consumer.register_consumer(task.topic)
        yield READY
        while True:
            try:
                yield consumer.dequeue(task.topic)
            except ConsumerError as error:
                if error.reason != "empty":
                    raise
                consumer.size(task.topic)  # tells the broker that the last one is done
                time.sleep(PAUSE_S)


def consume_zmq(task: Task) -> Iterator[str]:
    with ZmqClient(task.address, task.name, directory=task.kept, timeout=TIMEOUT_S) as client:
        client.subscribe(task.topic)
        yield READY
        while True:
            yield client.get(task.topic).text


def consume_proxy(task: Task) -> Iterator[str]:
    with ReliableSubscriber(
        task.address, task.name, directory=task.kept, timeout=TIMEOUT_S
    ) as subscriber:
        subscriber.subscribe(task.topic)
        yield READY
        while True:
            yield subscriber.get().text


class Lines:
    """A connection of the line protocol."""

    def __init__(self, task: Task, role: str) -> None:
        host, port = task.address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        for line in (
            f"{role} {task.name} connect",
            "end",
            f"{role} {task.name} topic {task.topic}",
            "end",
        ):
            self.say(line)
            assert self.hear() == "accept", line

    def say(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def hear(self) -> str:
        return self._file.readline().decode().rstrip("\n")


def consume_line(task: Task) -> Iterator[str]:
    lines = Lines(task, "sub")
    yield READY
    while True:
        entry = lines.hear().removeprefix(f"topic {task.topic} ")
        yield entry[1:-1]
        lines.say("successful")


def consume_python(task: Task) -> Iterator[str]:
    with Client(task.address, task.name, serialiser="str", timeout=TIMEOUT_S) as client:
        client.subscribe(task.topic)
        yield READY
        for message in client.listen(task.topic):
            yield message.value


def consume_python_get(task: Task) -> Iterator[str]:
    with Client(task.address, task.name, serialiser="str", timeout=TIMEOUT_S) as client:
        client.subscribe(task.topic)
        yield READY
        while True:
            yield client.get(task.topic).value


def consume_python_skip(task: Task) -> Iterator[str]:
    with Client(task.address, task.name, on_crash="skip", timeout=TIMEOUT_S) as client:
        client.subscribe(task.topic)
        yield READY
        for message in client.listen(task.topic):
            yield message.value.decode()


def consume_async(task: Task) -> Iterator[str]:
    """Each step of the loop is one of the generator."""
    loop = asyncio.new_event_loop()
    loop_of = AsyncClient(task.address, task.name, serialiser="str", timeout=TIMEOUT_S)
    loop.run_until_complete(loop_of.subscribe(task.topic))
    yield READY
    messages = loop_of.listen(task.topic)

    async def next_value() -> str:
        return str((await anext(messages)).value)

    while True:
        yield loop.run_until_complete(next_value())


def consume_cli(task: Task) -> Iterator[str]:
    """`quackmq get`, which prints to the log."""
    name, broker = ("--name", task.name), ("--broker", task.address, "--timeout", str(TIMEOUT_S))
    with Client(task.address, task.name, timeout=TIMEOUT_S) as client:
        client.subscribe(task.topic)
    yield READY
    os.dup2(os.open(task.log, os.O_WRONLY | os.O_APPEND), 1)
    line = getting._format_line

    def slowly(*arguments: Any, **options: Any) -> bytes:
        time.sleep(random.uniform(0, WORK_S))
        return line(*arguments, **options)

    getting._format_line = slowly
    command_line(["get", task.topic, *name, *broker, "--follow"])


CONSUMERS: dict[str, Callable[[Task], Iterator[str]]] = {
    "queue": consume_queue,
    "zmq": consume_zmq,
    "proxy": consume_proxy,
    "line": consume_line,
    "python": consume_python,
    "python get": consume_python_get,
    "python skip": consume_python_skip,
    "async": consume_async,
    "cli": consume_cli,
}


# --- publishers: each returns what publishes a number, and returns when it is acknowledged --------


def publish_queue(task: Task) -> Callable[[int], object]:
    """By a new registration each time, as the example has it."""
    producer = Producer(task.address, timeout=TIMEOUT_S)
    me = producer.register_producer(task.topic)
    return lambda number: producer.enqueue(me, task.topic, str(number))


def publish_queue_numbered(task: Task) -> Callable[[int], object]:
    """As one producer for ever, whose program kept its id and numbers its messages."""
    producer = Producer(task.address, timeout=TIMEOUT_S)
    kept = Path(task.directory) / "producer"
    if not kept.exists():
        kept.parent.mkdir()
        kept.write_text(producer.register_producer(task.topic))
    me = kept.read_text()
    return lambda number: producer.enqueue(me, task.topic, str(number), sequence=number)


def publish_zmq(task: Task) -> Callable[[int], object]:
    client = ZmqClient(task.address, task.name, timeout=TIMEOUT_S)
    return lambda number: client.put(task.topic, str(number))


def publish_zmq_numbered(task: Task) -> Callable[[int], object]:
    client = ZmqClient(task.address, task.name, timeout=TIMEOUT_S)
    return lambda number: client.put(task.topic, str(number), sequence=number)


def publish_proxy(task: Task) -> Callable[[int], object]:
    publisher = ReliablePublisher(task.address, task.name, timeout=TIMEOUT_S)
    return lambda number: publisher.publish(task.topic, str(number))


def publish_proxy_numbered(task: Task) -> Callable[[int], object]:
    publisher = ReliablePublisher(task.address, task.name, timeout=TIMEOUT_S)
    return lambda number: publisher.publish(task.topic, str(number), number=number)


def publish_line(task: Task) -> Callable[[int], object]:
    lines = Lines(task, "pub")

    def publish(number: int) -> None:
        lines.say(f"topic {task.topic} [{number}]")
        assert lines.hear() == "successful"

    return publish


def publish_python(task: Task) -> Callable[[int], object]:
    client = Client(task.address, serialiser="str", timeout=TIMEOUT_S)
    return lambda number: client.put(task.topic, str(number))


def publish_python_numbered(task: Task) -> Callable[[int], object]:
    client = Client(task.address, task.name, serialiser="str", timeout=TIMEOUT_S)
    return lambda number: client.put(task.topic, str(number), sequence=number)


def publish_async(task: Task) -> Callable[[int], object]:
    loop = asyncio.new_event_loop()
    client = AsyncClient(task.address, serialiser="str", timeout=TIMEOUT_S)
    return lambda number: loop.run_until_complete(client.put(task.topic, str(number)))


def publish_cli(task: Task) -> Callable[[int], object]:
    """`quackmq put`, once for each message."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    broker = ("--broker", task.address, "--timeout", str(TIMEOUT_S))

    def publish(number: int) -> None:
        assert command_line(["put", task.topic, str(number), *broker]) == 0

    return publish


PUBLISHERS: dict[str, Callable[[Task], Callable[[int], object]]] = {
    "queue": publish_queue,
    "queue numbered": publish_queue_numbered,
    "zmq": publish_zmq,
    "zmq numbered": publish_zmq_numbered,
    "proxy": publish_proxy,
    "proxy numbered": publish_proxy_numbered,
    "line": publish_line,
    "python": publish_python,
    "python numbered": publish_python_numbered,
    "async": publish_async,
    "cli": publish_cli,
}


def run(task: Task) -> None:
    os.environ["XDG_STATE_HOME"] = task.home
    log = Log(task.log)
    if task.role in PUBLISHERS and task.name.startswith("pub"):
        publish = PUBLISHERS[task.role](task)
        number = max((int(line[1:]) + 1 for line in log.lines() if line[0] == "-"), default=0)
        while True:
            log.write(f"+{number}")
            publish(number)
            log.write(f"-{number}")
            number += 1
    for seen in CONSUMERS[task.role](task):
        log.write(seen)
        if seen != READY:
            time.sleep(random.uniform(0, WORK_S))
            log.write(seen + DONE)


# --- the process that forks them ------------------------------------------------------------------


class Mortals:
    """The process that forks programs, as a test sees it. All are killed on leaving the block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pubsub.mortal"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Mortals:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._process:
            self._process.wait(TIMEOUT_S)

    def run(self, task: Task) -> int:
        return int(self._ask({"run": asdict(task)}))

    def kill(self, pid: int) -> None:
        """By SIGKILL; return when it is dead."""
        assert self._ask({"kill": pid}) == "dead", "it had ended by itself: see its traceback"

    def _ask(self, command: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def main() -> None:
    running: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            pid = os.fork()
            if not pid:
                run(Task(**command["run"]))
                os._exit(0)
            running.add(pid)
            print(pid, flush=True)
            continue
        running.discard(command["kill"])
        print("dead" if _killed(command["kill"]) else "was dead", flush=True)
    for pid in running:
        _killed(pid)


def _killed(pid: int) -> bool:
    """Kill a child and wait for its end; False if it had ended by itself."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    main()
