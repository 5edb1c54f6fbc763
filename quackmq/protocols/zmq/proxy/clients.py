"""Clients that have introduced themselves: which there are, where each listens, what it is sent.

`hello` makes a durable subscription, of which each message is acknowledged by itself, and notes the
address of the client's REP socket; both last until `goodbye`, through a crash of the broker and of
the client. A client that comes back says `hello` again, and may have moved. It may have several
topics, and is asked at its last address for all of them.

An address has to be the client's own, that is, on the host from which it speaks: otherwise anybody
could have messages sent to anybody. And there has to be a REP socket at it, when it is named; for
finding out there is one time in all, and only so many are asked at once.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Final

from quackmq import limits as shared_limits
from quackmq.broker import Broker, Caller, Terms
from quackmq.broker.lifecycle import NamedLocks
from quackmq.errors import (
    BrokerClosing,
    InvalidRequest,
    LimitReached,
    NotAllowed,
    QuackError,
    UnknownSubscription,
    Unreachable,
)
from quackmq.loop_clock import loop_clock
from quackmq.model.topic import check_topic_name
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.proxy.callback_connection import Outgoing, Target
from quackmq.protocols.zmq.proxy.host_limiter import PerHostLimiter
from quackmq.protocols.zmq.proxy.retransmission import Multicast, Retransmission

log = logging.getLogger(__name__)

#: Whose notes they are.
_NOTES: Final = "proxy"
_SCHEME: Final = "tcp://"
_ANY_HOST: Final = "*"


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How clients are served. With `any_address` they may name addresses of other hosts."""

    lease_ms: int = shared_limits.LEASE_MS
    any_address: bool = False


class Clients:
    def __init__(self, broker: Broker, multicast: Multicast, settings: ProxySettings) -> None:
        self._broker = broker
        self._multicast = multicast
        self._settings = settings
        self._outgoing: dict[str, Outgoing] = {}
        #: By client and topic, and how many they are.
        self._sending: dict[str, dict[str, Retransmission]] = {}
        self._count = 0
        #: Held by whoever changes what a client has.
        self._locks = NamedLocks()
        self._large = asyncio.Semaphore(limits.PROXY_LARGE_EXCHANGES)
        self._turns = PerHostLimiter(limits.PROXY_HELLOS, limits.PROXY_HELLOS_OF_HOST)
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def load(self) -> None:
        """Take up what was noted before."""
        for name, address in (await self._broker.notes.all(_NOTES)).items():
            topic, _, client = name.partition("/")
            if self._find(client, topic) is None:  # else it was faster, and says where it is now
                self._begin(Caller(client=client), topic, _parsed(address))

    async def close(self) -> None:
        self._is_closing = True
        of_clients = list(self._sending.values())
        await asyncio.gather(*(each.stop() for topics in of_clients for each in topics.values()))
        if self._ending:
            await asyncio.wait(self._ending)
        for outgoing in self._outgoing.values():
            outgoing.close()

    # --- what clients ask ---------------------------------------------------------------------

    async def hello(self, caller: Caller, topic: str, address: str) -> bool:
        """Whether the subscription is new. NotAllowed, Unreachable, and what
        `PushService.subscribe` raises."""
        client = caller.client
        check_topic_name(topic)
        if self._count >= limits.PROXY_CLIENTS and self._find(client, topic) is None:
            raise LimitReached(f"{limits.PROXY_CLIENTS} clients have introduced themselves")
        outgoing = await self._reached(caller, address)
        try:
            async with self._locks.hold(client):
                is_new = await self._subscribe(caller, topic, outgoing.target)
                if self._is_closing:
                    raise BrokerClosing("the broker is closing: say hello again when it is back")
                self._introduce(caller, topic, outgoing)
                return is_new
        except BaseException:
            if self._outgoing.get(client) is not outgoing:
                outgoing.close()
            raise

    async def goodbye(self, caller: Caller, topic: str) -> None:
        """UnknownSubscription, UnknownTopic."""
        client = caller.client
        async with self._locks.hold(client):
            sending = self._find(client, topic)
            await self._broker.pushing.unsubscribe(caller, client, topic)
            await self._broker.notes.put(_NOTES, f"{topic}/{client}", None)
            if sending is not None:
                await sending.stop()

    def received(self, caller: Caller, topic: str, places: list[tuple[int, int]]) -> dict[int, int]:
        """Of each partition, before which offset everything is done. UnknownSubscription."""
        sending = self._find(caller.client, topic)
        if sending is None:
            raise UnknownSubscription(f"{caller.client} has said no hello to {topic}")
        for partition, offset in places:
            sending.acknowledge(partition, offset)
        return {partition: sending.low_water_mark(partition) for partition, _ in places}

    # --- inside -------------------------------------------------------------------------------

    def _find(self, client: str, topic: str) -> Retransmission | None:
        return self._sending.get(client, {}).get(topic)

    async def _subscribe(self, caller: Caller, topic: str, target: Target) -> bool:
        # The note first: one without a subscription is found and removed, but a subscription
        # without an address would hold its topic's messages, and nobody would send them.
        note = f"{topic}/{caller.client}"
        await self._broker.notes.put(_NOTES, note, str(target))
        terms = Terms(lease_ms=self._settings.lease_ms)
        try:
            return await self._broker.pushing.subscribe(caller, caller.client, topic, terms)
        except QuackError:
            if self._find(caller.client, topic) is None:
                await self._broker.notes.put(_NOTES, note, None)
            raise

    def _introduce(self, caller: Caller, topic: str, outgoing: Outgoing) -> None:
        """From now on the client is asked there."""
        client = caller.client
        former = self._outgoing.get(client)
        self._outgoing[client] = outgoing
        for sending in self._sending.get(client, {}).values():
            sending.renew(outgoing)
        if former is not None:
            former.close()
        if self._find(client, topic) is None:
            self._begin(caller, topic, outgoing.target)

    def _begin(self, caller: Caller, topic: str, target: Target) -> None:
        client = caller.client
        outgoing = self._outgoing.get(client)
        if outgoing is None:
            outgoing = self._outgoing[client] = Outgoing(target)
        self._count += 1
        self._sending.setdefault(client, {})[topic] = Retransmission(
            self._broker,
            caller,
            topic,
            outgoing,
            self._multicast,
            self._settings.lease_ms,
            self._large,
            self._on_end,
        )

    def _on_end(self, sending: Retransmission) -> None:
        """Its subscription is gone, or the broker closes."""
        client, topic = sending.client, sending.topic
        del self._sending[client][topic]
        self._count -= 1
        if not self._sending[client]:
            del self._sending[client]
            self._outgoing.pop(client).close()
        if not self._is_closing:
            task = asyncio.get_running_loop().create_task(self._tidy(client, topic))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _tidy(self, client: str, topic: str) -> None:
        """A subscription that went by another way, with its topic say, leaves a note."""
        async with self._locks.hold(client):
            if self._find(client, topic) is not None or self._is_closing:
                return
            try:
                await self._broker.notes.put(_NOTES, f"{topic}/{client}", None)
            except Exception as error:
                log.warning("the address of %s for %s stays noted: %s", client, topic, error)

    async def _reached(self, caller: Caller, address: str) -> Outgoing:
        """A connection to where the client says that it listens. NotAllowed, Unreachable."""
        try:
            async with loop_clock().timeout(shared_limits.PROXY_CONNECT_MS / 1000):
                async with self._turns.hold(_host_of(caller)):
                    outgoing = Outgoing(await self._checked(caller, address))
                    await outgoing.reach()
                    return outgoing
        except TimeoutError:
            raise Unreachable(
                f"nobody at {address} in {shared_limits.PROXY_CONNECT_MS} ms"
            ) from None

    async def _checked(self, caller: Caller, address: str) -> Target:
        """Where the client says that it listens. NotAllowed if that is not its own host."""
        host, port = _split(address)
        own = _host_of(caller)
        if host == _ANY_HOST:
            return Target(own, port)
        try:
            found = {_normal(host)}
        except ValueError:
            found = await _look_up(host)
        if own in found:
            return Target(own, port)
        if not self._settings.any_address:
            raise NotAllowed(
                f"{address} is not on the host that says hello, which is {own}: a client names its "
                "own address"
            )
        return Target(min(found), port)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not (port.isascii() and port.isdigit()):
        raise InvalidRequest(f"{address!r} is no address: write tcp://HOST:PORT")
    if not 1 <= int(port) <= 65_535:
        raise InvalidRequest(f"{address!r} has no port between 1 and 65535")
    return host, int(port)


def _parsed(address: str) -> Target:
    """One that was noted."""
    return Target(*_split(address))


def _host_of(caller: Caller) -> str:
    return _normal(caller.address.rpartition(":")[0])


def _normal(host: str) -> str:
    """An address in one spelling. ValueError for a name."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


async def _look_up(host: str) -> set[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"there is no host {host}: {error}") from None
    return {_normal(str(each[4][0])) for each in found}
