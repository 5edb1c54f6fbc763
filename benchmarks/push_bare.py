"""What the push listeners are held to: the least that fans out, in one loop, and keeps nothing.

    python -m benchmarks.push_bare line
    python -m benchmarks.push_bare xpub
    python -m benchmarks.push_bare backlog DIRECTORY ENTRIES READERS

Each says where it listens, as the broker does. `line` speaks the line protocol's messages, one
entry at a time to each subscriber and the next when it is acknowledged; `xpub` forwards what comes
to an XSUB to an XPUB. `backlog` is no bare thing but a broker with two line listeners, one live,
one for every entry, over a topic that has a backlog which the second listener's readers have yet to
read.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, cast

import zmq

from benchmarks.processes import HOST
from quackmq.broker import Broker, Caller
from quackmq.cli.broker.process import loop_factory, prepare
from quackmq.model.topic import Append, PartitionKey
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.local import LocalOptions, LocalStore

TOPIC: Final = "bench"
#: Messages before the first entry: connect, end, topic, end.
_GREETINGS: Final = 4
_CALLER: Final = Caller("bench")
_BATCH_RECORDS: Final = 100


class Fan:
    def __init__(self) -> None:
        self.subscribers: set[Peer] = set()


class Peer(asyncio.Protocol):
    def __init__(self, fan: Fan) -> None:
        self._fan = fan
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._greetings = 0
        self._is_publisher = False
        self._waits = False
        self._queue: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._fan.subscribers.discard(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def push(self, line: bytes) -> None:
        if self._waits:
            self._queue.append(line)
        else:
            self._waits = True
            self._write(line)

    def _hear(self, line: bytes) -> None:
        if self._greetings < _GREETINGS:
            self._greetings += 1
            self._is_publisher = self._is_publisher or line.startswith(b"pub")
            self._write(b"accept\n")
            if self._greetings == _GREETINGS and not self._is_publisher:
                self._fan.subscribers.add(self)
        elif self._is_publisher:
            for subscriber in self._fan.subscribers:
                subscriber.push(line + b"\n")
            self._write(b"successful\n")
        elif self._queue:
            self._write(self._queue.popleft())
        else:
            self._waits = False

    def _write(self, line: bytes) -> None:
        assert self._transport is not None
        self._transport.write(line)


async def fan_out() -> None:
    fan = Fan()
    server = await asyncio.get_running_loop().create_server(lambda: Peer(fan), HOST, 0)
    _say(line=server.sockets[0].getsockname()[1])
    await server.serve_forever()


def forward() -> None:
    context = zmq.Context()
    xsub, xpub = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for each in (xsub, xpub):
        each.set_hwm(0)
    ports = [each.bind_to_random_port(f"tcp://{HOST}") for each in (xsub, xpub)]
    _say(xsub=ports[0], xpub=ports[1])
    poller = zmq.Poller()
    poller.register(xsub, zmq.POLLIN)
    poller.register(xpub, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if xpub in ready:
            xsub.send_multipart(xpub.recv_multipart())
        if xsub in ready:
            xpub.send_multipart(xsub.recv_multipart())


async def serve_backlog(directory: str, entries: int, readers: int) -> None:
    store = await LocalStore.open(Path(directory), LocalOptions(sync="os"))
    broker = Broker(store)
    await broker.open()
    topic = await broker.create_topic(_CALLER, TOPIC)
    records = [Record(number, 0, None, b"x" * 100) for number in range(_BATCH_RECORDS)]
    batch = Batch.peek(codec.encode(records))
    for _ in range(entries // _BATCH_RECORDS):
        await store.room()
        await store.append([Append(PartitionKey(topic.id, 0), batch)])
    every = LineSettings(reading="every")
    for number in range(readers):
        await broker.pushing.subscribe(_CALLER, f"reader-{number}", TOPIC, every.terms, "beginning")
    ports = {}
    for name, settings in (("live", LineSettings()), ("every", every)):
        where = await LineServer(broker, (HOST, 0), settings).start()
        assert isinstance(where, tuple)
        ports[name] = where[1]
    _say(**ports)
    await asyncio.Event().wait()


def _say(**ports: int) -> None:
    for name, port in ports.items():
        print(f"{name} listening on {HOST}:{port}")
    print("ready", flush=True)


def _run(server: Coroutine[Any, Any, None]) -> None:
    """On the loop that the broker runs on."""
    prepare()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server)


def main(kind: str, *words: str) -> None:
    if kind == "line":
        _run(fan_out())
    elif kind == "xpub":
        forward()
    else:
        directory, entries, readers = words
        _run(serve_backlog(directory, int(entries), int(readers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
