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
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import illegal_topic_name, kafka_error, translate_error
from quackmq.errors import ClientClosed, QuackError, RecordTooLarge
from quackmq.model.subscription import RecordPosition
from quackmq.model.topic import check_topic_name

log = logging.getLogger(__name__)

#: librdkafka's own interval of requests for a producer id.
_OWN_TIMER_MS: Final = 500

#: Value, key and headers of a message, serialised.
SerializedMessage = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


class PendingDeliveries:
    """The messages of one call, until each is acknowledged or has failed."""

    __slots__ = ("_awake", "_pending_count", "error", "is_done", "on_done", "positions")

    def __init__(self, count: int, on_done: Callable[[], None] | None = None) -> None:
        self.positions: list[RecordPosition | None] = [None] * count
        self.error: KafkaError | None = None
        self.is_done = count == 0
        self.on_done = on_done
        self._pending_count = count
        self._awake = threading.Lock()
        # The lock is held while the call sleeps; `wake` releases it.
        self._awake.acquire()

    def make_callback(self, index: int) -> Callable[[KafkaError | None, Record], None]:
        """Return librdkafka's delivery callback for a message."""

        def on_delivery(error: KafkaError | None, record: Record) -> None:
            """Store the position or the error of the message."""
            if error is None:
                self.positions[index] = RecordPosition(
                    record.partition() or 0, record.offset() or 0
                )
            else:
                self.error = error
            self.count_down()

        return on_delivery

    def count_down(self, count: int = 1) -> None:
        """Count messages that are acknowledged or have failed. After the last one, call `on_done`
        and wake the waiting call."""
        self._pending_count -= count
        if self._pending_count == 0:
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
        """Wait until another thread calls `wake`, or until the time is over."""
        self._awake.acquire(timeout=seconds)


class Publisher:
    """A producer for calls of one timeout. Any thread may call."""

    def __init__(self, config: KafkaConfig, timeout_ms: int) -> None:
        self._address = config.address
        self._connection_errors = config.connection_errors
        self._producer = Producer(config.producer(timeout_ms))
        self._polling = threading.Lock()
        self._waiting: dict[PendingDeliveries, None] = {}
        self._poller: threading.Thread | None = None
        self._is_closed = False
        #: Whether `speed_up_first_message` has run.
        self._has_sped_up = False

    def send(
        self,
        topic: str,
        message: SerializedMessage,
        deliveries: PendingDeliveries,
        index: int,
        partition: int,
    ) -> None:
        """Start sending a message to a partition (-1: librdkafka chooses) and report the result to
        `deliveries`. Raises BufferError if too many messages are queued, and IllegalTopicName.
        """
        if self._is_closed:
            raise ClientClosed("the client is closed")
        value, key, headers = message
        try:
            options: dict[str, Any] = {} if headers is None else {"headers": headers}
            self._producer.produce(
                topic, value, key, partition, on_delivery=deliveries.make_callback(index), **options
            )
        except KafkaException as exception:
            check_topic_name(topic)
            raise self._explain_rejection(topic, message, exception) from exception
        except UnicodeEncodeError:
            check_topic_name(topic)
            raise

    def wait(self, deliveries: PendingDeliveries, deadline: Deadline) -> None:
        """Wait until all messages are acknowledged or have failed, or until the deadline."""
        # No other call polls, so poll here. The result then arrives in this thread.
        if self._poller is None and self._polling.acquire(blocking=False):
            try:
                self._poll_for(deliveries, deadline)
            finally:
                self._polling.release()
                self._wake_next_poller()
            return
        self._waiting[deliveries] = None
        try:
            while not deliveries.is_done and not deadline.has_passed():
                deliveries.sleep(deadline.slice_s())
                if self._poller is None and self._polling.acquire(blocking=False):
                    try:
                        self._poll_for(deliveries, deadline)
                    finally:
                        self._polling.release()
        finally:
            del self._waiting[deliveries]
            self._wake_next_poller()

    def make_room(self, deadline: Deadline) -> None:
        """Wait until some queued messages are sent."""
        self._producer.poll(deadline.slice_s())

    def speed_up_first_message(self, topic: str, deadline: Deadline) -> None:
        """Make librdkafka send the first message sooner. It needs a producer id, which it
        requests only every half second or when it receives metadata. So request metadata."""
        wait_ms = limits.CLIENT_PRODUCER_ID_MS
        while not self._has_sped_up and len(self._producer) and wait_ms < _OWN_TIMER_MS:
            self._producer.poll(min(wait_ms / 1000, deadline.remaining_s()))
            if not len(self._producer) or deadline.has_passed():
                break
            try:
                self._producer.list_topics(topic, min(deadline.remaining_s(), 1.0))
            except KafkaException as exception:
                log.debug("no list of topics: %s", exception)
            wait_ms *= 2
        self._has_sped_up = True

    def start_poller(self, topic: str) -> None:
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
        self._producer.flush(deadline.remaining_s())
        if self._poller is not None:
            self._poller.join(deadline.remaining_s() + limits.CLIENT_LONGEST_POLL_MS / 1000)

    def clear_connection_error(self) -> None:
        """Forget the last connection error, after a response arrived."""
        self._connection_errors.clear()

    def translate_failure(self, topic: str, error: KafkaError, deadline: Deadline) -> QuackError:
        """Translate the delivery error of a message. A timed-out message has an unknown outcome."""
        if error.code() == KafkaError._MSG_TIMED_OUT:
            return self.timeout_error(topic, deadline)
        if error.code() == KafkaError.TOPIC_EXCEPTION:
            return illegal_topic_name(topic)
        waited_for = f"{self._address} to accept a message for topic {topic}"
        return translate_error(error, waited_for, deadline)

    def timeout_error(self, topic: str, deadline: Deadline) -> QuackError:
        return deadline.timeout_error(
            f"{self._address} to acknowledge a message for topic {topic}: the outcome is unknown"
            f"{self._connection_errors.suffix()}"
        )

    def _poll_for(self, deliveries: PendingDeliveries, deadline: Deadline) -> None:
        poll = self._producer.poll
        while not deliveries.is_done and not deadline.has_passed():
            poll(deadline.slice_s())

    def _poll_until_closed(self, topic: str) -> None:
        """Poll for all calls of an asynchronous client; the body of the poller thread."""
        self.speed_up_first_message(topic, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))
        while not self._is_closed:
            self._producer.poll(limits.CLIENT_LONGEST_POLL_MS / 1000)

    def _wake_next_poller(self) -> None:
        """Wake another waiting call, which then polls."""
        for each in list(self._waiting):
            if not each.is_done:
                each.wake()
                return

    def _explain_rejection(
        self, topic: str, message: SerializedMessage, exception: KafkaException
    ) -> QuackError:
        """Return the error for a message that librdkafka does not accept. If the message is too
        large, name its size and the limit."""
        error = kafka_error(exception)
        if error is None:
            return QuackError(f"a message for topic {topic}: {exception}")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            size = sum(len(part) for part in message[:2] if part is not None)
            return RecordTooLarge(
                f"a message of {size} bytes for topic {topic}: the limit is "
                f"{shared_limits.BATCH_BYTES} bytes"
            )
        return translate_error(error, f"a message for topic {topic}")
