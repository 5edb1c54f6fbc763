"""The heaviest turn of an event loop that does nothing but receive batches of 1 MB.

    python -m benchmarks.growth_floor [BATCHES]

A floor for the rows of the growth benchmark about turns: a bare loop receives as many batches as
those rows send, into new buffers, and computes their checksums. It keeps the last `KEPT_BATCHES` of
them, about as much memory as the broker uses, and writes nothing. The CPU of its heaviest turn is
the work of the operating system, above all to provide memory that this process has not used before.
A virtual machine that gets its memory from the host on first use makes that expensive. Run it while
the machine is as busy as during the benchmark. Prints lines as `growth_broker` does, then how many
batches were received.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections import deque
from typing import Final

from crc32c import crc32c

from benchmarks.growth_broker import TurnMeter
from quackmq.cli.broker.process import loop_factory
from quackmq.loop_clock import loop_clock

BATCH_BYTES: Final = 1_024_000
BATCHES: Final = 500
KEPT_BATCHES: Final = 100


class Receiver(asyncio.BufferedProtocol):
    def __init__(self, batches: int) -> None:
        self.is_done = asyncio.Event()
        self._left = batches
        self._kept: deque[memoryview] = deque(maxlen=KEPT_BATCHES)
        self._begin()

    def _begin(self) -> None:
        self._buffer = memoryview(bytearray(BATCH_BYTES))
        self._received = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._received == BATCH_BYTES:
            crc32c(self._buffer)
            self._kept.append(self._buffer)
            self._left -= 1
            self._begin()
            if not self._left:
                self.is_done.set()


async def receive(batches: int) -> None:
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    receiver = Receiver(batches)
    TurnMeter(loop, loop_clock())
    transport, _ = await loop.create_connection(lambda: receiver, sock=here)

    def send() -> None:
        with there:
            for _ in range(batches):
                there.sendall(bytes(BATCH_BYTES))

    sender = threading.Thread(target=send)
    sender.start()
    await receiver.is_done.wait()
    sender.join()
    transport.close()
    print(f"{batches} batches were received")


if __name__ == "__main__":
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else BATCHES
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(receive(batches))
