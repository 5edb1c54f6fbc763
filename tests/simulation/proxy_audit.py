"""Check the proxy's own accounts: bounds of peers while it serves, and nothing left after that."""

from __future__ import annotations

import asyncio

from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.proxy.xpub import Subscriber
from quackmq.protocols.zmq.proxy.xsub import Publisher
from tests.simulation.model import Violation
from tests.simulation.proxy_peers import ProxyServers

#: The largest message of a model, with its topic.
_MESSAGE_BYTES = 1_000
#: The names of the proxy's own tasks begin so.
_TASKS = ("Feed.", "Retransmission.", "Publisher.", "Clients.", "Connection.")


def check_bounds(servers: ProxyServers) -> None:
    """Raise Violation if a peer, or all peers together, use more than their limits."""
    _check_publishers(servers)
    _check_subscribers(servers)
    _check_clients(servers)
    budgets = servers.proxy.budgets
    if not 0 <= budgets.receive.used_bytes <= budgets.receive.most_bytes + 10 * _MESSAGE_BYTES:
        raise Violation(f"all peers use {budgets.receive.used_bytes} bytes for what they send")
    if budgets.send.unsent_bytes < 0:
        raise Violation(f"the budget counts {budgets.send.unsent_bytes} unsent bytes")


def _check_publishers(servers: ProxyServers) -> None:
    for peer in servers.xsub.connections:
        assert isinstance(peer, Publisher)
        if not 0 <= peer.unpublished <= limits.PROXY_PUBLISHER_MESSAGES:
            raise Violation(f"a PUB socket has {peer.unpublished} unpublished messages")
        if peer._unpublished_bytes >= limits.PROXY_PUBLISHER_BYTES + _MESSAGE_BYTES:
            raise Violation(f"a PUB socket has {peer._unpublished_bytes} unpublished bytes")


def _check_subscribers(servers: ProxyServers) -> None:
    xpub = servers.xpub
    for peer in xpub.connections:
        assert isinstance(peer, Subscriber)
        page_bytes = limits.PROXY_PAGE_RECORDS * _MESSAGE_BYTES
        # A subscriber that is not slow yet gets one page more.
        if peer.unsent_bytes > max(
            limits.PROXY_UNSENT_BYTES, limits.ZMQ_WRITE_BUFFER_BYTES + page_bytes
        ):
            raise Violation(f"a SUB socket has {peer.unsent_bytes} unsent bytes")
    followed = sum(feed.topic.partitions for feed in xpub._feed_by_topic.values())
    if xpub._partitions != followed:
        raise Violation(f"{xpub._partitions} partitions are counted, and {followed} are followed")
    for name, feed in xpub._feed_by_topic.items():
        if not feed.has_subscribers:
            raise Violation(f"nobody subscribes to {name}, which is followed")
    for client, subscriber in xpub._subscriber_by_client.items():
        if subscriber.is_disconnected:
            raise Violation(f"the SUB socket of {client} is kept after it has disconnected")


def _check_clients(servers: ProxyServers) -> None:
    clients = servers.proxy.clients
    retransmissions = [
        each for by_topic in clients._retransmissions.values() for each in by_topic.values()
    ]
    if clients._retransmission_count != len(retransmissions):
        raise Violation(
            f"{clients._retransmission_count} clients are counted, not {len(retransmissions)}"
        )
    if set(clients._connections) != set(clients._retransmissions):
        raise Violation("a client without a topic has a connection, or one with a topic has none")
    for each in retransmissions:
        if len(each._early_acknowledgements) > limits.PROXY_EARLY:
            raise Violation(
                f"{len(each._early_acknowledgements)} early acknowledgements of {each.client} are "
                "kept"
            )


async def check_nothing_left(servers: ProxyServers) -> None:
    """Raise Violation if something of the proxy is left after the broker has closed."""
    await asyncio.sleep(0.1)
    clients = servers.proxy.clients
    left = {
        "followed topics": servers.xpub._feed_by_topic,
        "SUB sockets of clients": servers.xpub._subscriber_by_client,
        "connections": clients._connections,
        "retransmissions": clients._retransmissions,
        "clients that are not reached": servers.broker.pushing.unreached,
        "tasks": [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__qualname__", "").startswith(_TASKS)
        ],
    }
    if any(left.values()):
        raise Violation(f"the proxy has closed, and this is left: {left}")
