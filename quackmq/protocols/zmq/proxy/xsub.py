"""The XSUB socket: what PUB sockets send is published.

A message is two frames, the topic's name and the body. It is published as by any door: the topic
comes to life by its first message, its policy holds. There is no answer: a PUB socket has no ear
for one (who wants to know publishes over the proxy's REP socket). What cannot be published is
counted, and the log says why once in a while.

What comes while something is being published is gathered and published together, in the order in
which it came. Beyond a number of messages, or bytes, nothing more is read from the peer: TCP and
its own high-water mark hold it up. What was read is published also if the peer goes.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from quackmq import limits as shared_limits
from quackmq.broker import Broker
from quackmq.errors import IllegalTopicName, QuackError, RecordTooLarge, TopicFull
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.codec.pubsub import PublisherDecoder, subscription
from quackmq.protocols.zmq.connection import Peer, large_bytes
from quackmq.protocols.zmq.server import Listener
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.serving.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)


class XsubServer(Listener):
    name = "xsub"

    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        super().__init__(broker, host, port, budgets)
        time = asyncio.get_running_loop().time
        self.refused = RateLimitedLog(
            log, "%d messages of PUB sockets were not published, the last: %s", time
        )
        self._publishing: set[asyncio.Task[None]] = set()

    def make_connection(self, channel: str = "") -> Publisher:
        return Publisher(self)

    async def close(self) -> None:
        """Let nobody in, publish what was read. What waits for room in a full topic is not waited
        for beyond a time: the broker, when it closes, refuses it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limits.ZMQ_DRAIN_MS / 1000
        await super().close()
        if self._publishing:
            await asyncio.wait(self._publishing, timeout=max(0.0, end_s - loop.time()))

    def start_publishing(self, publisher: Publisher) -> None:
        task = asyncio.get_running_loop().create_task(publisher.publish())
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)


class Publisher(Peer):
    events_at_once = limits.PROXY_PUBLISHER_MESSAGES

    def __init__(self, door: XsubServer) -> None:
        super().__init__(door, PublisherDecoder())
        self._xsub = door
        self._pending: list[tuple[bytes, bytes]] = []
        #: How many messages are pending or being published, and their bytes.
        self.unpublished = 0
        self._bytes = 0
        self._is_publishing = False

    # --- what it is made of -----------------------------------------------------------------

    def _introduction(self) -> bytes:
        # Everything: what is wanted by whom is for the broker to know.
        return zmtp.ready("XSUB") + subscription(b"", self._decoder.minor)

    def _may_begin(self) -> bool:
        return (
            self.unpublished < limits.PROXY_PUBLISHER_MESSAGES
            and self._bytes < limits.PROXY_PUBLISHER_BYTES
            and not self._draining
            and (not self.unpublished or self._door.has_room())
        )

    def _on_message(self, event: zmtp.Event) -> None:
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
        self._bytes += len(body)
        self._door.begun(large_bytes(len(body)))
        self._release_reserved()
        self._pending.append((topic, body))
        if not self._is_publishing:
            self._is_publishing = True
            self._xsub.start_publishing(self)

    def _is_done(self) -> bool:
        return not self.unpublished

    # --- publishing -------------------------------------------------------------------------

    async def publish(self) -> None:
        """Until nothing is left."""
        try:
            while self._pending:
                taken, self._pending = self._pending, []
                by_topic: dict[bytes, list[bytes]] = {}
                for topic, body in taken:
                    by_topic.setdefault(topic, []).append(body)
                if len(by_topic) == 1:
                    await self._publish_to(*next(iter(by_topic.items())))
                else:
                    await asyncio.gather(*(self._publish_to(*each) for each in by_topic.items()))
                for _, body in taken:
                    self.unpublished -= 1
                    self._bytes -= len(body)
                    self._door.done(large_bytes(len(body)))
                self.pump()
        finally:
            self._is_publishing = False
        self._end_if_done()

    async def _publish_to(self, topic: bytes, bodies: list[bytes]) -> None:
        try:
            name = topic.decode("ascii")
        except UnicodeDecodeError:
            self._refuse(IllegalTopicName(f"{topic!r} is no topic's name"), len(bodies))
            return
        for part in _parts(bodies):
            await self._put(name, part)

    async def _put(self, topic: str, bodies: Sequence[bytes]) -> None:
        records = [Record(0, NO_TIMESTAMP, None, body) for body in bodies]
        try:
            await self._broker.messages.put(self._caller, topic, records)
        except (RecordTooLarge, TopicFull) as error:
            if len(bodies) == 1:
                self._refuse(error)
                return
            # Together they are too much; as many as fit are wanted, and nothing was taken.
            for body in bodies:
                await self._put(topic, (body,))
        except QuackError as error:
            self._refuse(error, len(bodies))
        except Exception:
            log.exception("publishing to %s failed", topic)

    def _refuse(self, error: QuackError, count: int = 1) -> None:
        self._release_reserved()
        self._xsub.refused.add(f"{error} ({self._caller.address})", count)


def _parts(bodies: list[bytes]) -> Iterator[list[bytes]]:
    """As many at once as one batch takes well."""
    part: list[bytes] = []
    size = 0
    for body in bodies:
        if part and size + len(body) > shared_limits.ENCODED_BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
        size += len(body)
    yield part
