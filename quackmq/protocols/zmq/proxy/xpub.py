"""The XPUB socket: SUB sockets say what they want, and get it, at most once.

A subscription is a prefix of topics' names; the empty one is all of them, those to come included.
What else can be subscribed to, `quackmq.protocols.zmq.codec.proxy_language` says. Messages are
those that are published after the subscription has come.

A subscriber that does not keep up gets a bounded number of bytes ahead of what it has taken; beyond
that it misses messages, as it would at any PUB socket, and nobody else is held up by it. How many
were dropped, the log says once in a while. Clients that have introduced themselves are sent what
they missed (`clients`).

Who may call: the loop.
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
from quackmq.protocols.zmq.codec.proxy_language import subscribing_client, topic_with_ids
from quackmq.protocols.zmq.codec.pubsub import SubscriberDecoder
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.proxy.xpub_feed import Feed
from quackmq.protocols.zmq.server import Listener
from quackmq.serving.rate_limited_log import RateLimitedLog
from quackmq.serving.server import Address

log = logging.getLogger(__name__)


class XpubServer(Listener):
    name = "xpub"

    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        super().__init__(broker, host, port, budgets)
        time = asyncio.get_running_loop().time
        self.dropped = RateLimitedLog(
            log, "%d messages dropped for slow subscribers, the last %s", time
        )
        self._feeds: dict[str, Feed] = {}
        self._clients: dict[str, Subscriber] = {}
        self._parts = 0

    def make_connection(self, channel: str = "") -> Subscriber:
        return Subscriber(self)

    async def start(self) -> Address:
        self.broker.topic_watchers.add(self._on_topic)
        return await super().start()

    async def close(self) -> None:
        self.broker.topic_watchers.discard(self._on_topic)
        feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.stop()
        for feed in feeds:
            await feed.wait_stopped()
        await super().close()

    def following(self) -> dict[str, bool]:
        """The topics that are read for somebody, and whether what is published from now on will be
        sent: not before it is known where a topic ends."""
        return {name: feed.has_begun for name, feed in self._feeds.items()}

    def covers(self, client: str, topic: str, partition: int, offset: int) -> bool:
        """Whether an entry was sent to a client that has subscribed with ids and said who it is,
        or will be in its turn."""
        subscriber = self._clients.get(client)
        feed = self._feeds.get(topic)
        if subscriber is None or feed is None:
            return False
        return feed.covers(subscriber, partition, offset)

    # --- what subscribers call --------------------------------------------------------------

    def wants(self, subscriber: Subscriber, prefix: bytes) -> None:
        """Every topic that begins so. ProtocolError where that is too much."""
        for topic in list(self.broker.topics().values()):
            if topic.name.encode().startswith(prefix):
                self._feed(topic, None).plain[subscriber] = None

    def wants_ids(self, subscriber: Subscriber, name: str) -> None:
        """The topic need not be there yet."""
        topic = self.broker.topics().get(name)
        if topic is not None:
            self._feed(topic, None).add_with_ids(subscriber)

    def is_client(self, subscriber: Subscriber, client: str) -> None:
        # Who comes anew is known before TCP knows that the old connection is gone.
        self._clients[client] = subscriber

    def unsubscribed(self, subscriber: Subscriber) -> None:
        """It wants less than before, or is gone."""
        for feed in list(self._feeds.values()):
            if subscriber in feed.plain and not subscriber.matches(feed.topic.name):
                del feed.plain[subscriber]
            if subscriber in feed.with_ids and feed.topic.name not in subscriber.with_ids:
                del feed.with_ids[subscriber]
            if not feed.is_wanted:
                self._stop(feed)
        client = subscriber.client
        if client is not None and subscriber.is_gone and self._clients.get(client) is subscriber:
            del self._clients[client]

    # --- inside -----------------------------------------------------------------------------

    def _on_topic(self, topic: Topic) -> None:
        """A topic has come, or was altered."""
        feed = self._feeds.get(topic.name)
        if feed is not None and feed.topic.id == topic.id:
            self._parts += topic.partitions - feed.topic.partitions
            feed.follow(topic)
            return
        if feed is not None:
            self._stop(feed)
        for peer in list(self.connections):
            assert isinstance(peer, Subscriber), "it makes no others"
            if peer.is_gone:
                continue
            try:
                if peer.matches(topic.name):
                    self._feed(topic, 0).plain[peer] = None
                if topic.name in peer.with_ids:
                    self._feed(topic, 0).add_with_ids(peer)
            except ProtocolError as error:
                peer.disconnect(str(error))

    def _feed(self, topic: Topic, start: int | None) -> Feed:
        feed = self._feeds.get(topic.name)
        if feed is None:
            if self._parts + topic.partitions > limits.PROXY_FEEDS:
                raise ProtocolError(
                    f"more than {limits.PROXY_FEEDS} partitions are followed: subscribe to fewer"
                )
            self._parts += topic.partitions
            feed = self._feeds[topic.name] = Feed(self.broker, topic, self._on_end)
            feed.begin(start)
        return feed

    def _on_end(self, feed: Feed) -> None:
        """Its topic is gone."""
        if self._feeds.get(feed.topic.name) is feed:
            self._stop(feed)

    def _stop(self, feed: Feed) -> None:
        del self._feeds[feed.topic.name]
        self._parts -= feed.topic.partitions
        feed.stop()


class Subscriber(Peer):
    may_be_slow = True

    def __init__(self, door: XpubServer) -> None:
        super().__init__(door, SubscriberDecoder())
        self._xpub = door
        #: As they came; and the topics whose messages it wants with their ids.
        self.subscriptions: set[bytes] = set()
        self.with_ids: set[str] = set()
        #: Who it says that it is.
        self.client: str | None = None
        self.is_gone = False

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def matches(self, topic: str) -> bool:
        name = topic.encode()
        return any(name.startswith(prefix) for prefix in self.subscriptions)

    def send(self, frames: bytes, messages: int) -> None:
        """Messages, unless there are too many already that it has not taken."""
        transport = self._transport
        if transport is None or self._has_ended:
            return
        if self._slow_since is None:
            transport.write(frames)
            return
        unsent = transport.get_write_buffer_size()
        if unsent + len(frames) > limits.PROXY_UNSENT_BYTES or not self._budgets.sendable.is_set():
            self._xpub.dropped.add(f"for {self._caller.address}", messages)
            return
        transport.write(frames)
        self._note_unsent()

    # --- what it is made of -----------------------------------------------------------------

    def _introduction(self) -> bytes:
        return zmtp.ready("XPUB")

    def _may_begin(self) -> bool:
        return not self._draining

    def _is_done(self) -> bool:
        return True

    def _on_gone(self) -> None:
        self.is_gone = True
        self.subscriptions.clear()
        self.with_ids.clear()
        self._xpub.unsubscribed(self)

    def _on_message(self, event: zmtp.Event) -> None:
        if not isinstance(event, zmtp.Subscribe | zmtp.Cancel):
            return
        try:
            client, topic = subscribing_client(event.prefix), topic_with_ids(event.prefix)
        except InvalidRequest as error:
            raise ProtocolError(str(error)) from None
        if isinstance(event, zmtp.Subscribe):
            self._subscribe(event.prefix, client, topic)
            return
        self.subscriptions.discard(event.prefix)
        if topic is not None:
            self.with_ids.discard(topic)
        self._xpub.unsubscribed(self)

    def _subscribe(self, prefix: bytes, client: str | None, topic: str | None) -> None:
        if len(self.subscriptions) >= limits.PROXY_SUBSCRIPTIONS:
            raise ProtocolError(
                f"a subscriber may have {limits.PROXY_SUBSCRIPTIONS} subscriptions, not more"
            )
        self.subscriptions.add(prefix)
        if client is not None:
            self.client = client
            self._xpub.is_client(self, client)
        elif topic is not None:
            self.with_ids.add(topic)
            self._xpub.wants_ids(self, topic)
        else:
            self._xpub.wants(self, prefix)
