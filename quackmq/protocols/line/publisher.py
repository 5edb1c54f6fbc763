"""The proxy of one publisher: puts its entries into their topics, one at a time.

An entry is answered `successful` when it is durable, and `retry` when its topic is full and waits
for room: then nothing of it is kept, and the publisher may go on with another topic meanwhile. So
there is one pending entry at the most, and no topic holds up another. Whatever else keeps an entry
from being taken is answered `reject`, and named in the log.

A connection that ends with an entry unanswered leaves it open whether that was kept: it is carried
through once it has begun.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from quackmq.broker import Broker, Caller, TopicQueue
from quackmq.errors import BrokerClosing, QuackError, TopicFull
from quackmq.model.policy import WhenFull
from quackmq.model.topic import Topic
from quackmq.protocols.line.codec import Entry, Word
from quackmq.protocols.line.records import End

log = logging.getLogger(__name__)


class Peer(Protocol):
    """What a publisher needs of its connection."""

    @property
    def caller(self) -> Caller: ...

    def answer(self, word: Word) -> None: ...

    def end(self, end: End, detail: str = "") -> None: ...


class Publisher:
    def __init__(self, broker: Broker, peer: Peer, name: str, entry_bytes: int) -> None:
        self._broker = broker
        self._peer = peer
        self._name = name
        self._entry_bytes = entry_bytes
        #: Of each topic, one for each partition; and the one whose turn it is.
        self._queues: dict[str, list[TopicQueue]] = {}
        self._turns: dict[str, int] = {}
        #: The entry that is on its way.
        self._pending: asyncio.Future[int] | None = None
        self._entries = 0
        self._retries = 0
        #: Of the last rejection.
        self._told: type[QuackError] | None = None

    def counts(self) -> dict[str, int]:
        return {"entries": self._entries, "retries": self._retries}

    # --- what the connection calls ----------------------------------------------------------

    async def choose(self, topic_name: str) -> None:
        """The topic may come to life by it."""
        await self._broker.ensure_topic(self._peer.caller, topic_name)

    async def begin(self, topic_names: Sequence[str]) -> None:
        for name in topic_names:
            topic = await self._broker.ensure_topic(self._peer.caller, name)
            self._queues[name] = self._queues_of(topic)

    def publish(self, entry: Entry) -> None:
        """Answered by the peer's `answer`, now or later."""
        assert self._pending is None, "one at a time"
        try:
            queue = self._next_queue(entry.topic)
            pending = queue.begin_enqueue(self._name, entry.content, wait_for_room=False)
        except Exception as error:
            self._refuse(entry, error)
            return
        self._pending = pending
        pending.add_done_callback(partial(self._published, entry))

    async def close(self) -> None:
        """Returns when what was begun is done, whatever became of it."""
        if self._pending is not None:
            await asyncio.wait([self._pending])

    # --- inside -----------------------------------------------------------------------------

    def _queues_of(self, topic: Topic) -> list[TopicQueue]:
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
        queues = self._queues[topic_name]
        topic = self._broker.topics().get(topic_name)
        if topic is None:
            return queues[0]  # it may come to life again
        if topic.partitions != len(queues):
            queues = self._queues[topic_name] = self._queues_of(topic)
        turn = self._turns.get(topic_name, 0)
        self._turns[topic_name] = (turn + 1) % len(queues)
        return queues[turn % len(queues)]

    def _published(self, entry: Entry, done: asyncio.Future[int]) -> None:
        self._pending = None
        error = BrokerClosing("the broker is closing") if done.cancelled() else done.exception()
        if error is not None:
            self._refuse(entry, error)
            return
        self._entries += 1
        self._peer.answer(Word.SUCCESSFUL)

    def _refuse(self, entry: Entry, error: BaseException) -> None:
        if isinstance(error, BrokerClosing):
            self._peer.end(End.CLOSED)
        elif isinstance(error, TopicFull) and self._waits(entry.topic):
            self._retries += 1
            self._peer.answer(Word.RETRY)
        elif isinstance(error, QuackError):
            # A publisher may send the same again and again.
            level = logging.DEBUG if type(error) is self._told else logging.WARNING
            self._told = type(error)
            log.log(level, "an entry of pub %s was rejected: %s", self._name, error)
            self._peer.answer(Word.REJECT)
        else:
            log.error("an entry of pub %s failed", self._name, exc_info=error)
            self._peer.end(End.FAILED)

    def _waits(self, topic_name: str) -> bool:
        topic = self._broker.topics().get(topic_name)
        return topic is not None and topic.policy.when_full is WhenFull.WAIT
