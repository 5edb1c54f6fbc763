"""The XPUB socket: it sends messages to the SUB sockets that subscribe to them, at most once.

A subscription is a prefix of topic names. The empty prefix selects all topics, also those that are
created later. `codec.proxy_language` describes two further kinds of subscription. A subscriber gets
the messages that are published after its subscription has arrived.

A slow subscriber may have a bounded number of unsent bytes. Beyond it, the subscriber misses
messages, as it would with any PUB socket; other subscribers are not delayed. The log reports the
number of dropped messages at intervals. Clients that have said `hello` get missed messages another
way (`retransmission`).

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging

from quackmq.broker import Broker
from quackmq.errors import InvalidRequest, ProtocolError
from quackmq.model.topic import Topic
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.codec.proxy_language import (
    parse_client_subscription,
    parse_ids_subscription,
)
from quackmq.protocols.zmq.codec.pubsub import SubscriberDecoder
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.proxy.xpub_feed import Feed
from quackmq.protocols.zmq.server import ZmtpServer
from quackmq.serving.rate_limited_log import RateLimitedLog
from quackmq.serving.server import Address

log = logging.getLogger(__name__)


class XpubServer(ZmtpServer):
    """The server of the XPUB socket, with a feed for each followed topic."""

    name = "xpub"

    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        super().__init__(broker, host, port, budgets)
        time = asyncio.get_running_loop().time
        self.dropped = RateLimitedLog(
            log, "%d messages dropped for slow subscribers, the last %s", time
        )
        self._feed_by_topic: dict[str, Feed] = {}
        self._subscriber_by_client: dict[str, Subscriber] = {}
        #: The number of partitions that all feeds follow.
        self._partitions = 0

    def make_connection(self, channel: str = "") -> Subscriber:
        return Subscriber(self)

    async def start(self) -> Address:
        self.broker.topic_watchers.add(self._on_topic)
        return await super().start()

    async def close(self) -> None:
        """Stop all feeds, then the server."""
        self.broker.topic_watchers.discard(self._on_topic)
        feeds, self._feed_by_topic = list(self._feed_by_topic.values()), {}
        for feed in feeds:
            feed.stop()
        for feed in feeds:
            await feed.wait_stopped()
        await super().close()

    def following(self) -> dict[str, bool]:
        """Return the followed topics, and for each whether its feed has begun. Messages that are
        published after that will be sent.
        """
        return {name: feed.has_begun for name, feed in self._feed_by_topic.items()}

    def covers(self, client: str, topic: str, partition: int, offset: int) -> bool:
        """Return whether this socket has sent an entry to a client, or will send it.

        That is so only for clients that subscribe with ids and have named themselves.
        """
        subscriber = self._subscriber_by_client.get(client)
        feed = self._feed_by_topic.get(topic)
        if subscriber is None or feed is None:
            return False
        return feed.covers(subscriber, partition, offset)

    # --- called by subscribers --------------------------------------------------------------

    def subscribe_prefix(self, subscriber: Subscriber, prefix: bytes) -> None:
        """Send the messages of every topic whose name begins with `prefix`. Raise ProtocolError if
        that exceeds the bound on followed partitions.
        """
        for topic in list(self.broker.topics().values()):
            if topic.name.encode().startswith(prefix):
                self._ensure_feed(topic, None).plain[subscriber] = None

    def subscribe_with_ids(self, subscriber: Subscriber, name: str) -> None:
        """Send the messages of one topic with their ids. The topic may be created later."""
        topic = self.broker.topics().get(name)
        if topic is not None:
            self._ensure_feed(topic, None).add_with_ids(subscriber)

    def set_client(self, subscriber: Subscriber, client: str) -> None:
        """Name the client of a subscriber. Forget the name that the subscriber had before."""
        self._forget_client(subscriber)
        subscriber.client = client
        # A client may reconnect before TCP detects that its old connection is broken. So the new
        # subscriber replaces the old one.
        self._subscriber_by_client[client] = subscriber

    def remove_unsubscribed(self, subscriber: Subscriber) -> None:
        """Remove a subscriber from the feeds that its subscriptions no longer select. Forget its
        client if it has disconnected.
        """
        for feed in list(self._feed_by_topic.values()):
            if subscriber in feed.plain and not subscriber.matches(feed.topic.name):
                del feed.plain[subscriber]
            if subscriber in feed.with_ids and feed.topic.name not in subscriber.topics_with_ids:
                del feed.with_ids[subscriber]
            if not feed.has_subscribers:
                self._stop_feed(feed)
        if subscriber.is_disconnected:
            self._forget_client(subscriber)

    # --- internal ---------------------------------------------------------------------------

    def _forget_client(self, subscriber: Subscriber) -> None:
        """Forget the name of a subscriber's client, unless another subscriber has it now."""
        client = subscriber.client
        if client is not None and self._subscriber_by_client.get(client) is subscriber:
            del self._subscriber_by_client[client]

    def _on_topic(self, topic: Topic) -> None:
        """Follow a topic that was created or altered, if a subscription selects it. Disconnect its
        subscribers if too many partitions would be followed.
        """
        feed = self._feed_by_topic.get(topic.name)
        if feed is not None and feed.topic.id == topic.id:
            self._follow_altered(feed, topic)
            return
        if feed is not None:
            self._stop_feed(feed)
        # The topic is new, so it is read from offset 0: its subscribers get all messages.
        for subscriber in list(self.connections):
            assert isinstance(subscriber, Subscriber), "make_connection makes no others"
            if subscriber.is_disconnected:
                continue
            try:
                if subscriber.matches(topic.name):
                    self._ensure_feed(topic, 0).plain[subscriber] = None
                if topic.name in subscriber.topics_with_ids:
                    self._ensure_feed(topic, 0).add_with_ids(subscriber)
            except ProtocolError as error:
                subscriber.disconnect(str(error))

    def _follow_altered(self, feed: Feed, topic: Topic) -> None:
        """Read the partitions that were added to a topic. If they exceed the bound, disconnect the
        topic's subscribers: otherwise they would miss messages without notice.
        """
        added = topic.partitions - feed.topic.partitions
        try:
            self._count_partitions(added)
        except ProtocolError as error:
            for subscriber in [*feed.plain, *feed.with_ids]:
                assert isinstance(subscriber, Subscriber), "only subscribers are added to feeds"
                subscriber.disconnect(str(error))
            return
        feed.follow_altered(topic)

    def _ensure_feed(self, topic: Topic, start: int | None) -> Feed:
        """Return the feed of a topic. A new feed starts at offset `start`, or at the topic's end.
        Raise ProtocolError if too many partitions are followed.
        """
        feed = self._feed_by_topic.get(topic.name)
        if feed is None:
            self._count_partitions(topic.partitions)
            feed = self._feed_by_topic[topic.name] = Feed(self.broker, topic, self._on_feed_end)
            feed.begin(start)
        return feed

    def _count_partitions(self, added: int) -> None:
        """Count followed partitions. Raise ProtocolError, and count nothing, if the bound does not
        allow them.
        """
        if self._partitions + added > limits.PROXY_FEEDS:
            raise ProtocolError(
                f"more than {limits.PROXY_FEEDS} partitions would be followed: subscribe to fewer "
                "topics"
            )
        self._partitions += added

    def _on_feed_end(self, feed: Feed) -> None:
        """Remove a feed whose topic was deleted."""
        if self._feed_by_topic.get(feed.topic.name) is feed:
            self._stop_feed(feed)

    def _stop_feed(self, feed: Feed) -> None:
        del self._feed_by_topic[feed.topic.name]
        self._partitions -= feed.topic.partitions
        feed.stop()


class Subscriber(Peer):
    """A SUB socket and its subscriptions."""

    may_be_slow = True

    def __init__(self, server: XpubServer) -> None:
        super().__init__(server, SubscriberDecoder())
        self._xpub = server
        #: All subscriptions, as received.
        self.subscriptions: set[bytes] = set()
        #: The topics that it subscribes to with message ids.
        self.topics_with_ids: set[str] = set()
        #: The client's name that the peer has sent last, if any.
        self.client: str | None = None
        self.is_disconnected = False

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def matches(self, topic: str) -> bool:
        """Return whether a subscription is a prefix of the topic's name."""
        name = topic.encode()
        return any(name.startswith(prefix) for prefix in self.subscriptions)

    def send(self, frames: bytes, messages: int) -> None:
        """Send encoded messages. Drop and count them if too many bytes are unsent."""
        transport = self._transport
        if transport is None or self._has_ended:
            return
        if self._slow_since is None:
            transport.write(frames)
            return
        unsent_bytes = transport.get_write_buffer_size()
        is_full = unsent_bytes + len(frames) > limits.PROXY_UNSENT_BYTES
        if is_full or not self._budgets.sendable.is_set():
            self._xpub.dropped.add(f"for {self._caller.address}", messages)
            return
        transport.write(frames)
        self._count_unsent()

    def disconnect(self, reason: str) -> None:
        """Disconnect the peer, and end its subscriptions at once: no topic is followed for it."""
        super().disconnect(reason)
        self._on_disconnected()

    # --- called by Peer ---------------------------------------------------------------------

    def _ready_command(self) -> bytes:
        return zmtp.ready("XPUB")

    def _may_accept_message(self) -> bool:
        return not self._is_draining

    def _is_idle(self) -> bool:
        return True

    def _on_disconnected(self) -> None:
        self.is_disconnected = True
        self.subscriptions.clear()
        self.topics_with_ids.clear()
        self._xpub.remove_unsubscribed(self)

    def _on_message(self, event: zmtp.Event) -> None:
        """Add or remove a subscription. Raise ProtocolError if it is invalid."""
        if not isinstance(event, zmtp.Subscribe | zmtp.Cancel):
            return
        try:
            client = parse_client_subscription(event.prefix)
            topic = parse_ids_subscription(event.prefix)
        except InvalidRequest as error:
            raise ProtocolError(str(error)) from None
        if isinstance(event, zmtp.Subscribe):
            self._subscribe(event.prefix, client, topic)
            return
        self.subscriptions.discard(event.prefix)
        if topic is not None:
            self.topics_with_ids.discard(topic)
        self._xpub.remove_unsubscribed(self)

    def _subscribe(self, prefix: bytes, client: str | None, topic: str | None) -> None:
        """Add a subscription: a client name, a topic with ids, or a prefix. Raise ProtocolError if
        there are too many.
        """
        if len(self.subscriptions) >= limits.PROXY_SUBSCRIPTIONS:
            raise ProtocolError(
                f"a subscriber may have {limits.PROXY_SUBSCRIPTIONS} subscriptions, not more"
            )
        self.subscriptions.add(prefix)
        if client is not None:
            self._xpub.set_client(self, client)
        elif topic is not None:
            self.topics_with_ids.add(topic)
            self._xpub.subscribe_with_ids(self, topic)
        else:
            self._xpub.subscribe_prefix(self, prefix)
