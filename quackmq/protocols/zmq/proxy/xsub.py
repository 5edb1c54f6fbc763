"""The XSUB socket: publish the messages that PUB sockets send.

A message has two frames, the topic's name and the body. It is published as with any other protocol:
the first message creates the topic, and the topic's policy applies. There is no reply, because a
PUB socket cannot receive one; a publisher that needs replies uses the proxy's REP socket. Messages
that cannot be published are counted, and the log reports them at intervals.

Messages that arrive during a publish are collected and published together, in their order. Beyond a
number of messages or bytes the server stops reading from the peer, so TCP and the peer's own
high-water mark slow it down. Messages that were read are published even if the peer disconnects.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from quackmq import limits as shared_limits
from quackmq.broker import Broker
from quackmq.errors import IllegalTopicName, InternalError, QuackError, RecordTooLarge, TopicFull
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.codec.pubsub import PublisherDecoder, encode_subscription
from quackmq.protocols.zmq.connection import Peer, large_bytes
from quackmq.protocols.zmq.server import ZmtpServer
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.serving.rate_limited_log import RateLimitedLog
from quackmq.tasks import TaskSet

log = logging.getLogger(__name__)


class XsubServer(ZmtpServer):
    """The server of the XSUB socket."""

    name = "xsub"

    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        super().__init__(broker, host, port, budgets)
        time = asyncio.get_running_loop().time
        self.refused = RateLimitedLog(
            log, "%d messages of PUB sockets were not published, the last: %s", time
        )
        self._publishing = TaskSet()

    def make_connection(self, channel: str = "") -> Publisher:
        return Publisher(self)

    async def close(self) -> None:
        """Stop accepting peers, and publish the messages that were read. Messages that wait for
        room in a full topic beyond the drain deadline are refused when the broker closes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.ZMQ_DRAIN_MS / 1000
        await super().close()
        await self._publishing.finish_within(max(0.0, deadline - loop.time()))

    def start_publishing(self, publisher: Publisher) -> None:
        self._publishing.start(publisher.publish_pending())


class Publisher(Peer):
    """A PUB socket, whose messages are published."""

    events_per_turn = limits.PROXY_PUBLISHER_MESSAGES

    def __init__(self, server: XsubServer) -> None:
        super().__init__(server, PublisherDecoder())
        self._xsub = server
        #: Topics and bodies that the next publish will contain.
        self._pending: list[tuple[bytes, bytes]] = []
        #: Messages that are pending or being published, and the bytes of their bodies.
        self.unpublished = 0
        self._unpublished_bytes = 0
        self._is_publishing = False

    # --- called by Peer ---------------------------------------------------------------------

    def _ready_command(self) -> bytes:
        # Subscribe to all messages: the broker decides who gets them.
        return zmtp.ready("XSUB") + encode_subscription(b"", self._decoder.minor)

    def _may_accept_message(self) -> bool:
        """Return whether another message may be read. The first unpublished message of a peer needs
        no room in the server, so every peer makes progress.
        """
        return (
            self.unpublished < limits.PROXY_PUBLISHER_MESSAGES
            and self._unpublished_bytes < limits.PROXY_PUBLISHER_BYTES
            and not self._is_draining
            and (not self.unpublished or self._server.has_room())
        )

    def _on_message(self, event: zmtp.Event) -> None:
        """Add a message to the next publish, and start publishing if that is not running."""
        if isinstance(event, zmtp.Refused):
            self._refuse(event.error)
            return
        if not isinstance(event, zmtp.Multipart):
            return
        if len(event.frames) != limits.PROXY_FRAMES:
            self._refuse(IllegalTopicName("a message is two frames: its topic and its body"))
            return
        topic, body = event.frames
        self.unpublished += 1
        self._unpublished_bytes += len(body)
        self._server.begin_request(large_bytes(len(body)))
        self._release_reserved()
        self._pending.append((topic, body))
        if not self._is_publishing:
            self._is_publishing = True
            self._xsub.start_publishing(self)

    def _is_idle(self) -> bool:
        return not self.unpublished

    # --- publishing -------------------------------------------------------------------------

    async def publish_pending(self) -> None:
        """Publish pending messages until there are none."""
        try:
            while self._pending:
                messages, self._pending = self._pending, []
                bodies_by_topic: dict[bytes, list[bytes]] = {}
                for topic, body in messages:
                    bodies_by_topic.setdefault(topic, []).append(body)
                if len(bodies_by_topic) == 1:
                    await self._publish_to(*next(iter(bodies_by_topic.items())))
                else:
                    await asyncio.gather(
                        *(self._publish_to(*item) for item in bodies_by_topic.items())
                    )
                for _, body in messages:
                    self.unpublished -= 1
                    self._unpublished_bytes -= len(body)
                    self._server.end_request(large_bytes(len(body)))
                self.pump()
        finally:
            self._is_publishing = False
        self._end_if_done()

    async def _publish_to(self, topic: bytes, bodies: list[bytes]) -> None:
        """Publish bodies to a topic. Refuse them all if its name is not ASCII."""
        try:
            name = topic.decode("ascii")
        except UnicodeDecodeError:
            self._refuse(IllegalTopicName(f"{topic!r} is no topic's name"), len(bodies))
            return
        for batch in _split_into_batches(bodies):
            await self._put(name, batch)

    async def _put(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish messages as one batch. If the batch is too large for the topic, publish each
        message by itself.
        """
        records = [Record(0, NO_TIMESTAMP, None, body) for body in bodies]
        try:
            await self._broker.messages.put(self._caller, topic, records)
        except (RecordTooLarge, TopicFull) as error:
            if len(bodies) == 1:
                self._refuse(error)
                return
            # The broker stores all or nothing, so no message of the batch was published.
            for body in bodies:
                await self._put(topic, (body,))
        except QuackError as error:
            self._refuse(error, len(bodies))
        except Exception:
            log.exception("publishing to %s failed", topic)
            self._refuse(InternalError("the broker failed; its log says why"), len(bodies))

    def _refuse(self, error: QuackError, count: int = 1) -> None:
        """Count messages that are not published, and log the error at intervals."""
        self._release_reserved()
        self._xsub.refused.add(f"{error} ({self._caller.address})", count)


def _split_into_batches(bodies: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the bodies in lists that each fit into one batch."""
    batch: list[bytes] = []
    size_bytes = 0
    for body in bodies:
        if batch and size_bytes + len(body) > shared_limits.ENCODED_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(body)
        size_bytes += len(body)
    yield batch
