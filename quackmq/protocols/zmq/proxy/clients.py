"""The clients that have said `hello`: their subscriptions and the addresses of their REP sockets.

`hello` creates a durable push subscription and stores the address of the client's REP socket. Both
last until `goodbye`, even if the broker or the client crashes. A restarted client says `hello`
again, perhaps with another address. A client may subscribe to several topics; its last address is
used for all of them.

The address must be on the host from which the client connects. Otherwise any client could direct
messages to any host. A REP socket must listen there when `hello` names the address. One deadline
covers the whole check, and the number of concurrent checks is bounded.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
from quackmq.protocols.zmq.proxy.callback_connection import CallbackConnection, Target
from quackmq.protocols.zmq.proxy.host_limiter import PerHostLimiter
from quackmq.protocols.zmq.proxy.retransmission import Multicast, Retransmission
from quackmq.tasks import TaskSet

log = logging.getLogger(__name__)

#: The owner under which the broker's notes store the addresses, by `topic/client`.
_NOTE_OWNER: Final = "proxy"
_SCHEME: Final = "tcp://"
_ANY_HOST: Final = "*"


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How clients are served. With `any_address` they may name addresses of other hosts."""

    lease_ms: int = shared_limits.LEASE_MS
    any_address: bool = False


class Clients:
    """All clients of the proxy. Each has a connection, and a retransmission for each topic."""

    def __init__(self, broker: Broker, multicast: Multicast, settings: ProxySettings) -> None:
        self._broker = broker
        self._multicast = multicast
        self._settings = settings
        self._connections: dict[str, CallbackConnection] = {}
        #: By client and topic.
        self._retransmissions: dict[str, dict[str, Retransmission]] = {}
        self._retransmission_count = 0
        #: Places reserved for the retransmissions that running calls of `hello` may add.
        self._reserved_places = 0
        #: One lock per client, held while its subscriptions or its address change.
        self._locks = NamedLocks()
        #: Bounds the large messages that are sent to all clients at a time.
        self._large_slots = asyncio.Semaphore(limits.PROXY_LARGE_EXCHANGES)
        self._hello_limiter = PerHostLimiter(limits.PROXY_HELLOS, limits.PROXY_HELLOS_OF_HOST)
        self._cleanups = TaskSet()
        self._is_closing = False

    async def load(self) -> None:
        """Serve the clients whose addresses were stored before the broker started."""
        for name, address in (await self._broker.notes.all(_NOTE_OWNER)).items():
            topic, _, client = name.partition("/")
            # A client that has already said `hello` again has named its present address.
            if self._find(client, topic) is None:
                self._start(Caller(client=client), topic, _parse_stored_address(address))

    async def close(self) -> None:
        """Stop all retransmissions, wait for cleanups, and close the connections."""
        # From now on, `_on_end` keeps the stored addresses.
        self._is_closing = True
        await asyncio.gather(
            *(
                retransmission.stop()
                for by_topic in list(self._retransmissions.values())
                for retransmission in by_topic.values()
            )
        )
        await self._cleanups.finish()
        for connection in self._connections.values():
            connection.close()

    # --- requests of clients ------------------------------------------------------------------

    async def hello(self, caller: Caller, topic: str, address: str) -> bool:
        """Subscribe a client, and send its messages to `address` from now on. Return whether the
        subscription is new. Raise LimitReached, NotAllowed, Unreachable, and the errors of
        `PushService.subscribe`.
        """
        client = caller.client
        check_topic_name(topic)
        with self._reserving(client, topic):
            connection = await self._connect(caller, address)
            try:
                async with self._locks.hold(client):
                    is_new = await self._subscribe(caller, topic, connection.target)
                    await self._store_for_other_topics(client, topic, connection.target)
                    if self._is_closing:
                        raise BrokerClosing(
                            "the broker is closing: say hello again when it is back"
                        )
                    self._use_connection(caller, topic, connection)
                    return is_new
            except BaseException:
                # Close the new connection unless it is already in use.
                if self._connections.get(client) is not connection:
                    connection.close()
                raise

    async def goodbye(self, caller: Caller, topic: str) -> None:
        """End a client's subscription. Raise UnknownSubscription or UnknownTopic."""
        client = caller.client
        async with self._locks.hold(client):
            retransmission = self._find(client, topic)
            await self._broker.pushing.unsubscribe(caller, client, topic)
            await self._broker.notes.put(_NOTE_OWNER, f"{topic}/{client}", None)
            if retransmission is not None:
                await retransmission.stop()

    def acknowledge(
        self, caller: Caller, topic: str, positions: list[tuple[int, int]]
    ) -> dict[int, int]:
        """Acknowledge entries, each named by partition and offset. For each of their partitions,
        return the offset before which all entries are acknowledged. Raise UnknownSubscription.
        """
        retransmission = self._find(caller.client, topic)
        if retransmission is None:
            raise UnknownSubscription(f"{caller.client} has said no hello to {topic}")
        for partition, offset in positions:
            retransmission.acknowledge(partition, offset)
        return {partition: retransmission.low_water_mark(partition) for partition, _ in positions}

    # --- internal -----------------------------------------------------------------------------

    def _find(self, client: str, topic: str) -> Retransmission | None:
        return self._retransmissions.get(client, {}).get(topic)

    @contextmanager
    def _reserving(self, client: str, topic: str) -> Iterator[None]:
        """Reserve a place for a new client within the block, because many may say `hello` at a
        time. Raise LimitReached.
        """
        if self._find(client, topic) is not None:
            yield
            return
        if self._retransmission_count + self._reserved_places >= limits.PROXY_CLIENTS:
            raise LimitReached(
                f"{limits.PROXY_CLIENTS} clients have introduced themselves: say goodbye with one "
                "that is no longer needed"
            )
        self._reserved_places += 1
        try:
            yield
        finally:
            self._reserved_places -= 1

    async def _subscribe(self, caller: Caller, topic: str, target: Target) -> bool:
        """Store the address, then create the subscription; return whether it is new."""
        # The address is stored first. An address without a subscription is found and removed. A
        # subscription without an address would hold its topic's messages, and nothing would send
        # them.
        note = f"{topic}/{caller.client}"
        await self._broker.notes.put(_NOTE_OWNER, note, str(target))
        terms = Terms(lease_ms=self._settings.lease_ms)
        try:
            return await self._broker.pushing.subscribe(caller, caller.client, topic, terms)
        except QuackError:
            if self._find(caller.client, topic) is None:
                await self._broker.notes.put(_NOTE_OWNER, note, None)
            raise

    async def _store_for_other_topics(self, client: str, topic: str, target: Target) -> None:
        """Store the address of a client for its other topics, too. Otherwise a restarted broker
        would find several addresses of the client, and could use a former one.
        """
        for other in list(self._retransmissions.get(client, {})):
            if other != topic and self._find(client, other) is not None:
                await self._broker.notes.put(_NOTE_OWNER, f"{other}/{client}", str(target))

    def _use_connection(self, caller: Caller, topic: str, connection: CallbackConnection) -> None:
        """Use this connection for all topics of the client; close the former one."""
        client = caller.client
        former = self._connections.get(client)
        self._connections[client] = connection
        for retransmission in self._retransmissions.get(client, {}).values():
            retransmission.replace_connection(connection)
        if former is not None:
            former.close()
        if self._find(client, topic) is None:
            self._start(caller, topic, connection.target)

    def _start(self, caller: Caller, topic: str, target: Target) -> None:
        """Start to send a client the entries of a topic."""
        client = caller.client
        connection = self._connections.get(client)
        if connection is None:
            connection = self._connections[client] = CallbackConnection(target)
        self._retransmission_count += 1
        self._retransmissions.setdefault(client, {})[topic] = Retransmission(
            self._broker,
            caller,
            topic,
            connection,
            self._multicast,
            self._settings.lease_ms,
            self._large_slots,
            self._on_end,
        )

    def _on_end(self, retransmission: Retransmission) -> None:
        """Forget a retransmission whose subscription was deleted, or that the closing broker has
        ended.
        """
        client, topic = retransmission.client, retransmission.topic
        del self._retransmissions[client][topic]
        self._retransmission_count -= 1
        if not self._retransmissions[client]:
            del self._retransmissions[client]
            self._connections.pop(client).close()
        if not self._is_closing:
            self._cleanups.start(self._delete_address(client, topic))

    async def _delete_address(self, client: str, topic: str) -> None:
        """Delete the address of a subscription that ended without `goodbye`, for example because
        its topic was deleted.
        """
        async with self._locks.hold(client):
            if self._find(client, topic) is not None or self._is_closing:
                return
            try:
                await self._broker.notes.put(_NOTE_OWNER, f"{topic}/{client}", None)
            except Exception as error:
                log.warning("the address of %s for %s stays stored: %s", client, topic, error)

    async def _connect(self, caller: Caller, address: str) -> CallbackConnection:
        """Connect to the address that a client names. Raise NotAllowed or Unreachable."""
        try:
            async with loop_clock().timeout(shared_limits.PROXY_CONNECT_MS / 1000):
                async with self._hello_limiter.slot(_host_of(caller)):
                    connection = CallbackConnection(await self._find_target(caller, address))
                    await connection.reach()
                    return connection
        except TimeoutError:
            raise Unreachable(
                f"nobody at {address} in {shared_limits.PROXY_CONNECT_MS} ms"
            ) from None

    async def _find_target(self, caller: Caller, address: str) -> Target:
        """Resolve the address that a client names. Raise NotAllowed if it is on another host."""
        host, port = _split_address(address)
        caller_host = _host_of(caller)
        if host == _ANY_HOST:
            return Target(caller_host, port)
        try:
            hosts = {_normalize_host(host)}
        except ValueError:
            hosts = await _resolve_host(host)
        if caller_host in hosts:
            return Target(caller_host, port)
        if not self._settings.any_address:
            raise NotAllowed(
                f"{address} is not on the host that says hello, which is {caller_host}: a client "
                "names its own address"
            )
        return Target(min(hosts), port)


def _split_address(address: str) -> tuple[str, int]:
    """Split `tcp://HOST:PORT` or `HOST:PORT`. Raise InvalidRequest for any other text."""
    host, _, port = address.removeprefix(_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not (port.isascii() and port.isdigit()):
        raise InvalidRequest(f"{address!r} is no address: write tcp://HOST:PORT")
    if not 1 <= int(port) <= 65_535:
        raise InvalidRequest(f"{address!r} has no port between 1 and 65535")
    return host, int(port)


def _parse_stored_address(address: str) -> Target:
    return Target(*_split_address(address))


def _host_of(caller: Caller) -> str:
    return _normalize_host(caller.address.rpartition(":")[0])


def _normalize_host(host: str) -> str:
    """Return an IP address in its one normal spelling. Raise ValueError for a host name."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


async def _resolve_host(name: str) -> set[str]:
    """Return the IP addresses of a host name. Raise Unreachable if there are none."""
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"there is no host {name}: {error}") from None
    return {_normalize_host(str(address[4][0])) for address in addresses}
