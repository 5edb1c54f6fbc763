"""Publish the entries of one publisher, one at a time.

The answer to an entry is `successful` when the entry is durable. It is `retry` when the topic is
full and its policy lets publishers wait for room. Then the entry is discarded, and the publisher
may continue with another topic. So there is at most one pending entry, and no topic delays another.
Any other failure is answered with `reject` and its reason, and logged.

If the connection ends while an entry is unanswered, the publisher does not know whether the entry
was stored. Publishing that has begun is completed.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from quackmq.broker import Broker, Caller, TopicQueue
from quackmq.errors import BrokerClosing, OutcomeUnknown, QuackError, StoreFenced, TopicFull
from quackmq.model.topic import Topic
from quackmq.protocols.line.codec.messages import Entry, Word
from quackmq.protocols.line.records import End

log = logging.getLogger(__name__)


class PublisherPeer(Protocol):
    """The part of the connection that a publisher uses."""

    @property
    def caller(self) -> Caller: ...

    def answer(self, word: Word) -> None: ...

    def reject(self, error: QuackError) -> None:
        """Answer `reject` with the reason."""

    def end(self, end: End, detail: str = "") -> None: ...


class Publisher:
    """Publish the entries of one publisher."""

    def __init__(self, broker: Broker, peer: PublisherPeer, name: str, entry_bytes: int) -> None:
        self._broker = broker
        self._peer = peer
        self._name = name
        self._entry_bytes = entry_bytes
        #: The queues of each topic, one per partition.
        self._queues_by_topic: dict[str, list[TopicQueue]] = {}
        #: The partition of each topic that gets the next entry.
        self._next_partitions: dict[str, int] = {}
        #: The entry that is being published.
        self._pending: asyncio.Future[int] | None = None
        self._entries = 0
        self._retries = 0
        #: The class of the last rejection that was logged.
        self._logged_error_class: type[QuackError] | None = None

    def counts(self) -> dict[str, int]:
        return {"entries": self._entries, "retries": self._retries}

    # --- called by the connection -----------------------------------------------------------

    async def choose(self, topic_name: str) -> None:
        """Create the topic if it does not exist."""
        await self._broker.ensure_topic(self._peer.caller, topic_name)

    async def begin(self, topic_names: Sequence[str]) -> None:
        """Open the queues of the chosen topics."""
        for name in topic_names:
            topic = await self._broker.ensure_topic(self._peer.caller, name)
            self._queues_by_topic[name] = self._make_queues(topic)

    def publish(self, entry: Entry) -> None:
        """Start to publish an entry. The answer is given to the peer, immediately or later."""
        assert self._pending is None, "one entry at a time"
        try:
            queue = self._next_queue(entry.topic)
            pending = queue.begin_enqueue(self._name, entry.content, wait_for_room=False)
        except Exception as error:
            self._refuse(entry, error)
            return
        self._pending = pending
        pending.add_done_callback(partial(self._on_done, entry))

    async def close(self) -> None:
        """Wait until the pending entry is stored or has failed."""
        if self._pending is not None:
            await asyncio.wait([self._pending])

    # --- internal ---------------------------------------------------------------------------

    def _make_queues(self, topic: Topic) -> list[TopicQueue]:
        """Return one queue for each partition of a topic."""
        return [
            TopicQueue(
                self._broker,
                topic.name,
                partition=partition,
                entry_bytes=self._entry_bytes,
                caller=self._peer.caller,
            )
            for partition in range(topic.partitions)
        ]

    def _next_queue(self, topic_name: str) -> TopicQueue:
        """Return the queue of the next partition. Entries go to the partitions in turn."""
        queues = self._queues_by_topic[topic_name]
        topic = self._broker.topics().get(topic_name)
        if topic is None:
            return queues[0]  # the entry may create the topic again
        if topic.partitions != len(queues):
            queues = self._queues_by_topic[topic_name] = self._make_queues(topic)
        partition = self._next_partitions.get(topic_name, 0)
        self._next_partitions[topic_name] = (partition + 1) % len(queues)
        # A new topic of the same name may have fewer partitions than the old one.
        return queues[partition % len(queues)]

    def _on_done(self, entry: Entry, done: asyncio.Future[int]) -> None:
        """Answer an entry that was stored or has failed."""
        self._pending = None
        error = BrokerClosing("the broker is closing") if done.cancelled() else done.exception()
        if error is not None:
            self._refuse(entry, error)
            return
        self._entries += 1
        self._peer.answer(Word.SUCCESSFUL)

    def _refuse(self, entry: Entry, error: BaseException) -> None:
        """Answer an entry that was not stored. End the connection if another broker must be asked,
        or if the entry may have been stored: a rejection would say that it was not."""
        if isinstance(error, (BrokerClosing, OutcomeUnknown, StoreFenced)):
            self._peer.end(End.CLOSED)
        elif isinstance(error, TopicFull) and self._waits_when_full(entry.topic):
            self._retries += 1
            self._peer.answer(Word.RETRY)
        elif isinstance(error, QuackError):
            # A publisher may repeat its mistake for ever, so only the first one is a warning.
            is_logged = type(error) is self._logged_error_class
            self._logged_error_class = type(error)
            level = logging.DEBUG if is_logged else logging.WARNING
            log.log(level, "an entry of pub %s was rejected: %s", self._name, error)
            self._peer.reject(error)
        else:
            log.error("an entry of pub %s failed", self._name, exc_info=error)
            self._peer.end(End.FAILED)

    def _waits_when_full(self, topic_name: str) -> bool:
        topic = self._broker.topics().get(topic_name)
        return topic is not None and topic.policy.waits_when_full
