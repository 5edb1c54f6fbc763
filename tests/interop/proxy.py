"""A relay between clients and a broker that can keep what it carries to itself, or be slow, or cut
connections.

Held are the answers, or the requests, on all connections of that moment; later connections are not
concerned. So a broker can be killed with work done and not acknowledged, and a client can be paused
with requests on the way, for certain instead of by luck.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from tests.interop.running import DEADLINE_SECONDS

CHUNK_BYTES = 64 * 1024


class Proxy:
    """Use as a context manager; clients connect to `address`. Who finds no broker is let go."""

    def __init__(self, broker_address: str | None = None) -> None:
        self._broker: tuple[str, int] | None = None
        if broker_address is not None:
            self.lead_to(broker_address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[Link] = []
        self._paused: list[Link] = []
        self._pace = Pace()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(DEADLINE_SECONDS)
        self._listener.close()
        for link in self._links:
            link.cut()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def lead_to(self, broker_address: str) -> None:
        """Before the first client comes."""
        host, port = broker_address.split(":")
        self._broker = (host, int(port))

    def hold_answers(self) -> None:
        """From now on and for ever, and until an answer is really held."""
        links = list(self._links)
        for link in links:
            link.holds = True
        self._wait_until_held(links, "the broker has nothing to say")

    def pause(self) -> None:
        """Requests stay here, until `resume`."""
        self._paused = list(self._links)
        for link in self._paused:
            link.may_ask.clear()

    def wait_until_held(self) -> None:
        """Until a request is really held."""
        self._wait_until_held(self._paused, "nobody asks for anything")

    def resume(self) -> None:
        for link in self._paused:
            link.may_ask.set()

    def slow_down(self, delay_seconds: float) -> None:
        """Whatever is carried from now on takes so much longer."""
        self._pace.delay_seconds = delay_seconds

    def cut(self) -> None:
        """Every connection of now. Clients may come again."""
        for link in list(self._links):
            link.cut()
            self._links.remove(link)

    def _join(self, client: socket.socket, broker: socket.socket) -> Link:
        return Link(client, broker, self._pace)

    @staticmethod
    def _wait_until_held(links: list[Link], complaint: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(link.held_bytes for link in links):
            assert time.monotonic() < deadline, complaint
            time.sleep(0.001)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            assert self._broker is not None
            try:
                broker = socket.create_connection(self._broker, DEADLINE_SECONDS)
                broker.settimeout(None)
                for end in (client, broker):
                    # What came in pieces is passed on in pieces, without one waiting for another.
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # whoever it is that is gone, others come
                client.close()
                continue
            link = self._join(client, broker)
            self._links.append(link)
            for run in (link.carry_requests, link.carry_answers):
                self._threads.append(threading.Thread(target=run))
                self._threads[-1].start()


class Pace:
    """How slow everything is, on all connections."""

    delay_seconds = 0.0


class Link:
    """One client's connection and its continuation to the broker. A thread for each direction."""

    def __init__(
        self, client: socket.socket, broker: socket.socket, pace: Pace | None = None
    ) -> None:
        self.holds = False
        self.held_bytes = 0
        self.may_ask = threading.Event()
        self.may_ask.set()
        self._pace = pace or Pace()
        self._client = client
        self._broker = broker

    def carry_requests(self) -> None:
        self._carry(self._client, self._broker, answers=False)

    def carry_answers(self) -> None:
        self._carry(self._broker, self._client, answers=True)

    def cut(self) -> None:
        """Both ends hear of it, and both threads end."""
        self.may_ask.set()
        for end in (self._client, self._broker):
            with suppress(OSError):  # it was cut already
                end.shutdown(socket.SHUT_RDWR)

    def _carry(self, source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        with source:
            with suppress(OSError):  # one end is gone, and the other one is told
                while data := source.recv(CHUNK_BYTES):
                    if self._pace.delay_seconds:
                        time.sleep(self._pace.delay_seconds)
                    if answers and self.holds:
                        self.held_bytes += len(data)
                        continue
                    if not answers and not self.may_ask.is_set():
                        self.held_bytes += len(data)
                        self.may_ask.wait()
                    self.pass_on(data, target, answers=answers)
            self.cut()

    def pass_on(self, data: bytes, target: socket.socket, *, answers: bool) -> None:
        target.sendall(data)
