"""A ROUTER that sends back what it is sent and does nothing else: the limit of the ZeroMQ listener.

    python -m benchmarks.echo asyncio|libzmq|zmtp HOST:PORT

All run on the loop that the broker runs on. `asyncio` is pyzmq's socket for such loops, as programs
have it; `libzmq` the same socket without futures, all that is there taken at one go; `zmtp` is the
listener's codec on the loop's sockets, so all of the listener but the broker.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop
import zmq
import zmq.asyncio

from quackmq.cli.broker import process
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.codec import zmtp


async def echo_by_futures(address: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(f"tcp://{address}")
        while True:
            await socket.send_multipart(await socket.recv_multipart())


class Router:
    """The library says by a descriptor that there may be something; then all of it is taken."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://{address}")
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._take_all)

    def _take_all(self) -> None:
        socket = self._socket
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            socket.send_multipart(socket.recv_multipart(zmq.NOBLOCK), zmq.NOBLOCK)


class Echo(asyncio.BufferedProtocol):
    _scratch = memoryview(bytearray(zmq_limits.ZMQ_SCRATCH_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._decoder = zmtp.EnvelopeDecoder()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(zmtp.GREETING)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._decoder.receive(bytes(self._scratch[:nbytes]))
        while (event := self._decoder.next_event()) is not None:
            if isinstance(event, zmtp.Message):
                head = zmtp.reply_head(event.envelope, len(event.content))
                self._transport.write(head + event.content)
            elif isinstance(event, zmtp.Ready):
                self._transport.write(zmtp.ready())


async def serve(kind: str, address: str) -> None:
    process.prepare()  # as the broker's own process is
    if kind == "asyncio":
        await echo_by_futures(address)
    if kind == "libzmq":
        router = Router(address)
        await asyncio.Event().wait()
        del router
    host, _, port = address.partition(":")
    server = await asyncio.get_running_loop().create_server(Echo, host, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:]))
