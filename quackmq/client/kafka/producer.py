"""Send messages to the broker and wait for their acknowledgements.

librdkafka sends in its own threads and reports results to the thread that polls. A single put polls
itself, so that no thread switch delays its result. Of several concurrent puts, one polls for all,
and passes this on when its own message is acknowledged.

An acknowledged message is on disk. Within this process, a message that librdkafka sends again is
stored once. After a QuackTimeout the outcome is unknown; numbered puts solve this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Record

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import Deadline, kafka_error, no_topic_name, translated
from quackmq.errors import ClientClosed, QuackError, RecordTooLarge
from quackmq.model.subscription import RecordPosition

log = logging.getLogger(__name__)

#: librdkafka's own interval of requests for a producer id.
_OWN_TIMER_MS: Final = 500

#: Value, key and headers of a message, serialised.
SerializedMessage = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


class PendingDeliveries:
    """The messages of one call, until each is acknowledged or has failed."""

    __slots__ = ("_awake", "_left", "error", "is_done", "on_done", "places")

    def __init__(self, count: int, on_done: Callable[[], None] | None = None) -> None:
        self.places: list[RecordPosition | None] = [None] * count
        self.error: KafkaError | None = None
        self.is_done = count == 0
        self.on_done = on_done
        self._left = count
        self._awake = threading.Lock()
        self._awake.acquire()

    def report(self, index: int) -> Callable[[KafkaError | None, Record], None]:
        """Return librdkafka's delivery callback for a message."""

        def reported(error: KafkaError | None, record: Record) -> None:
            if error is None:
                self.places[index] = RecordPosition(record.partition() or 0, record.offset() or 0)
            else:
                self.error = error
            self.count_down()

        return reported

    def count_down(self, by: int = 1) -> None:
        self._left -= by
        if self._left == 0:
            self.is_done = True
            if self.on_done is not None:
                self.on_done()
            self.wake()

    def wake(self) -> None:
        try:
            self._awake.release()
        except RuntimeError:
            pass  # it is already awake

    def sleep(self, seconds: float) -> None:
        self._awake.acquire(timeout=seconds)


class Publisher:
    """A producer for calls of one timeout. Any thread may call."""

    def __init__(self, connection: KafkaConfig, timeout_ms: int) -> None:
        self._address = connection.address
        self._trouble = connection.trouble
        self._producer = Producer(connection.producer(timeout_ms))
        self._polling = threading.Lock()
        self._waiting: dict[PendingDeliveries, None] = {}
        self._poller: threading.Thread | None = None
        self._is_closed = False
        #: Whether `hurry` has run.
        self._has_begun = False

    def send(
        self,
        topic: str,
        parcel: SerializedMessage,
        sending: PendingDeliveries,
        index: int,
        partition: int,
    ) -> None:
        """Start sending a message to a partition (-1: librdkafka chooses) and report the result
        to `sending`. Raises BufferError if too many messages are queued."""
        if self._is_closed:
            raise ClientClosed("the client is closed")
        value, key, headers = parcel
        try:
            more: dict[str, Any] = {} if headers is None else {"headers": headers}
            self._producer.produce(
                topic, value, key, partition, on_delivery=sending.report(index), **more
            )
        except KafkaException as exception:
            raise self._refusal(topic, parcel, exception) from exception

    def wait(self, sending: PendingDeliveries, deadline: Deadline) -> None:
        """Wait until all messages are acknowledged or have failed, or until the deadline."""
        if self._poller is None and self._polling.acquire(blocking=False):
            try:
                self._poll_for(sending, deadline)
            finally:
                self._polling.release()
                self._hand_on()
            return
        self._waiting[sending] = None
        try:
            while not sending.is_done and not deadline.passed():
                sending.sleep(deadline.slice())
                if self._poller is None and self._polling.acquire(blocking=False):
                    try:
                        self._poll_for(sending, deadline)
                    finally:
                        self._polling.release()
        finally:
            del self._waiting[sending]
            self._hand_on()

    def make_room(self, deadline: Deadline) -> None:
        """Wait until some queued messages are sent."""
        self._producer.poll(deadline.slice())

    def hurry(self, topic: str, deadline: Deadline) -> None:
        """Make librdkafka send the first message sooner. It needs a producer id, which it
        requests only every half second or when it receives metadata. So request metadata."""
        wait_ms = limits.CLIENT_HURRY_MS
        while not self._has_begun and len(self._producer) and wait_ms < _OWN_TIMER_MS:
            self._producer.poll(min(wait_ms / 1000, deadline.left()))
            if not len(self._producer) or deadline.passed():
                break
            try:
                self._producer.list_topics(topic, min(deadline.left(), 1.0))
            except KafkaException as exception:
                log.debug("no list of topics: %s", exception)
            wait_ms *= 2
        self._has_begun = True

    def poll_always(self, topic: str) -> None:
        """Start a thread that polls, for callers that do not wait in a thread. The first message
        will be for this topic."""
        if self._poller is None:
            self._poller = threading.Thread(
                target=self._poll_until_closed,
                args=(topic,),
                name="quackmq-client-reports",
                daemon=True,
            )
            self._poller.start()

    def close(self, deadline: Deadline) -> None:
        """Close; queued messages may be sent until the deadline."""
        self._is_closed = True
        self._producer.flush(deadline.left())
        if self._poller is not None:
            self._poller.join(deadline.left() + limits.CLIENT_POLL_MS / 1000)

    def note_answer(self) -> None:
        """Forget the last connection error, after an answer arrived."""
        self._trouble.clear()

    def failure(self, topic: str, error: KafkaError, deadline: Deadline) -> QuackError:
        if error.code() == KafkaError._MSG_TIMED_OUT:
            return self.unanswered(topic, deadline)
        if error.code() == KafkaError.TOPIC_EXCEPTION:
            return no_topic_name(topic)
        what = f"{self._address} to take a message for topic {topic}"
        return translated(error, what, deadline)

    def unanswered(self, topic: str, deadline: Deadline) -> QuackError:
        return deadline.timeout(
            f"{self._address} to acknowledge a message for topic {topic}: the outcome is unknown"
            f"{self._trouble.words()}"
        )

    def _poll_for(self, sending: PendingDeliveries, deadline: Deadline) -> None:
        poll = self._producer.poll
        while not sending.is_done and not deadline.passed():
            poll(deadline.slice())

    def _poll_until_closed(self, topic: str) -> None:
        self.hurry(topic, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))
        while not self._is_closed:
            self._producer.poll(limits.CLIENT_POLL_MS / 1000)

    def _hand_on(self) -> None:
        """Wake another waiting call, which then polls."""
        for each in list(self._waiting):
            if not each.is_done:
                each.wake()
                return

    def _refusal(
        self, topic: str, parcel: SerializedMessage, exception: KafkaException
    ) -> QuackError:
        error = kafka_error(exception)
        if error is None:
            return QuackError(f"a message for topic {topic}: {exception}")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            size = sum(len(part) for part in parcel[:2] if part is not None)
            return RecordTooLarge(
                f"a message of {size} bytes for topic {topic}: the limit is "
                f"{shared_limits.BATCH_BYTES} bytes"
            )
        return translated(error, f"a message for topic {topic}")
