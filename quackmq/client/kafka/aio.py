"""`AsyncClient`: the same as `Client`, for programs with an event loop.

A put needs no thread: librdkafka sends the message, and the acknowledgement wakes the loop. So
thousands of puts can run at once and share batches and syncs. Every other call runs `Client` in one
of a bounded number of threads. Calls that wait for messages have threads of their own, so that they
delay no other calls. (confluent-kafka's own asyncio producer collects messages until a
timer expires, which delays single messages, and it supports no headers.)

A cancelled `get` loses no message: if its thread has got one, the next `get` returns it.

Use a client within one event loop; create and close it there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.consuming.consumer import Reader
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.client import IN_FILE, After, Client
from quackmq.client.kafka.cluster import BY_LIBRDKAFKA, KeyPartitioner
from quackmq.client.kafka.producer import SerializedMessage
from quackmq.client.kafka.types import Headers, Message, StartLike, make_origin
from quackmq.errors import ClientClosed, Refused
from quackmq.model.subscription import RecordPosition, message_id

log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncClient:
    """The asyncio version of `Client`, with the same arguments.

    >>> async def tour():
    ...     async with quackmq.AsyncClient(address, "aprinter", serialiser="str") as client:
    ...         await client.subscribe("jobs")
    ...         await client.put("jobs", "print this")
    ...         return (await client.get("jobs")).value
    >>> asyncio.run(tour())
    'print this'
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = Client(*arguments, **options)
        self._threads = ThreadPoolExecutor(
            limits.CLIENT_THREADS, thread_name_prefix="quackmq-client"
        )
        self._waiting_threads = ThreadPoolExecutor(
            limits.CLIENT_THREADS, thread_name_prefix="quackmq-client-wait"
        )
        #: Gets from one topic run one after the other, so that the next one returns the message of
        #: a cancelled one.
        self._get_locks: dict[str, asyncio.Lock] = {}
        self._cleanups: set[asyncio.Future[Any]] = set()
        #: Pending requests for a topic's partitioner.
        self._partitioner_requests: dict[str, asyncio.Future[KeyPartitioner]] = {}

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def name(self) -> str | None:
        return self._client.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close(is_done=kind is None)

    async def close(self, *, done: bool = False) -> None:
        """See `Client.close`."""
        await self._close(is_done=done)

    # --- putting ----------------------------------------------------------------------------

    @overload
    async def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: None = None,
        timeout: float | None = None,
    ) -> str: ...

    @overload
    async def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: int | None,
        timeout: float | None = None,
    ) -> str | None: ...

    async def put(
        self,
        topic: str,
        message: Any,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> str | None:
        """See `Client.put`. The outcome of a cancelled put is unknown."""
        if sequence is not None:
            numbered = partial(self._client.put, sequence=sequence, timeout=timeout)
            return await self._run(numbered, topic, message, key, headers)
        deadline = await self._deadline(timeout)
        serialised = self._client.serialise(message, key, headers)
        read_position = await self._send(topic, serialised, deadline)
        session = self._client.session
        try:
            position = read_position()
        except Refused as refused:
            raise await self._run(session.explain_refusal, topic, refused) from None
        is_recreated = session.cluster.is_recreated(topic, [position])
        info = None if is_recreated else session.cluster.cached_topic(topic)
        if info is None:
            # This asks the cluster for the topic's id, and the loop must not wait for that.
            info = await self._run(session.topic_of_put, topic, deadline, refresh=is_recreated)
        return message_id(info.id, position)

    async def put_many(
        self,
        topic: str,
        messages: Iterable[Any],
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> list[str | None]:
        """See `Client.put_many`."""
        put = partial(
            self._client.put_many, key=key, headers=headers, sequence=sequence, timeout=timeout
        )
        return await self._run(put, topic, list(messages))

    async def last_sequence(self, topic: str, *, timeout: float | None = None) -> int | None:
        """See `Client.last_sequence`."""
        return await self._run(self._client.last_sequence, topic, timeout=timeout)

    # --- getting ----------------------------------------------------------------------------

    async def get(
        self, topic: str, timeout: float | None = None, after: After = IN_FILE
    ) -> Message:
        """See `Client.get`. A message is done when the same task requests the next one."""
        return await self._get(topic, await self._deadline(timeout), after)

    async def _get(self, topic: str, deadline: Deadline, after: After) -> Message:
        """Return the next message for the current task. A cancelled call leaves its thread running;
        `_put_back` then keeps the lock until the message of that thread is back in the buffer.
        Raises QuackTimeout."""
        holder = asyncio.current_task()
        lock = self._get_locks.setdefault(topic, asyncio.Lock())
        if lock.locked():
            try:
                await asyncio.wait_for(lock.acquire(), deadline.remaining_s())
            except TimeoutError:
                raise deadline.timeout_error(f"another get from topic {topic} to end") from None
        else:
            await lock.acquire()
        get = self._begin_waiting(self._client.get_for, deadline, topic, after, holder)
        try:
            message = await get.result(deadline)
        except asyncio.CancelledError:
            if get.cancel_unless_begun():
                lock.release()
                raise
            deadline.end()  # the thread stops waiting soon
            cleanup = asyncio.create_task(self._put_back(topic, holder, get.future, lock))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise
        except BaseException:
            lock.release()
            raise
        lock.release()
        return message

    async def listen(
        self, topic: str, timeout: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """See `Client.listen`. To stop in the middle, close it: `contextlib.aclosing`."""
        session = self._client.session
        # With on_crash="skip", the position must be on disk before each message is delivered. So
        # get the messages one by one.
        if not session.repeats:
            while True:
                yield await self._get(topic, await self._deadline(timeout, math.inf), IN_FILE)
        loop = object()
        try:
            while True:
                deadline = await self._deadline(timeout, math.inf)
                reader = await self._fill_reader(topic, loop, deadline)
                origin = make_origin(reader.topic, self._client.serialiser)
                while (record := reader.take_buffered(loop)) is not None:
                    yield Message(record, origin)
        finally:
            session.end_loop(topic, loop, asyncio.current_task())

    async def size(self, topic: str, *, timeout: float | None = None) -> int:
        """See `Client.size`."""
        return await self._run(self._client.size, topic, timeout=timeout)

    # --- subscribing ------------------------------------------------------------------------

    async def subscribe(
        self,
        topic: str,
        start: StartLike = "end",
        *,
        receipts: bool = False,
        timeout: float | None = None,
    ) -> bool:
        """See `Client.subscribe`."""
        return await self._run(
            self._client.subscribe, topic, start, receipts=receipts, timeout=timeout
        )

    async def unsubscribe(self, topic: str, *, timeout: float | None = None) -> None:
        """See `Client.unsubscribe`."""
        await self._run(self._client.unsubscribe, topic, timeout=timeout)

    async def subscriptions(self, *, timeout: float | None = None) -> list[str]:
        """See `Client.subscriptions`."""
        return await self._run(self._client.subscriptions, timeout=timeout)

    async def seek(self, topic: str, to: StartLike, *, timeout: float | None = None) -> None:
        """See `Client.seek`."""
        await self._run(self._client.seek, topic, to, timeout=timeout)

    # --- topics -----------------------------------------------------------------------------

    async def topics(self, *, timeout: float | None = None) -> list[str]:
        """See `Client.topics`."""
        return await self._run(self._client.topics, timeout=timeout)

    async def create_topic(
        self,
        topic: str,
        partitions: int | None = None,
        *,
        exist_ok: bool = False,
        timeout: float | None = None,
        **policies: str | int | bool | None,
    ) -> None:
        """See `Client.create_topic`."""
        create = partial(
            self._client.create_topic, topic, partitions, exist_ok=exist_ok, timeout=timeout
        )
        await self._run(create, **policies)

    async def delete_topic(self, topic: str, *, timeout: float | None = None) -> None:
        """See `Client.delete_topic`."""
        await self._run(self._client.delete_topic, topic, timeout=timeout)

    # --- helpers --------------------------------------------------------------------------------

    async def _deadline(self, timeout: float | None, default_s: float | None = None) -> Deadline:
        """Start a call and return its deadline. Before the first call, check in a thread that a
        broker listens at the address. Raises NoBroker or ClientClosed."""
        session = self._client.session
        deadline = session.start_call(timeout, default_s)
        if not session.is_reached:
            await self._run(session.check_reachable, deadline)
        return deadline

    async def _send(
        self, topic: str, serialised: SerializedMessage, deadline: Deadline
    ) -> Callable[[], RecordPosition]:
        """Send a message and wait for its outcome or the deadline; return a function that
        returns the position or raises the error."""
        loop = asyncio.get_running_loop()
        delivered = loop.create_future()

        def wake() -> None:
            # The future is already done if the put was cancelled.
            if not delivered.done():
                delivered.set_result(None)

        def on_delivered() -> None:
            """Wake the loop from librdkafka's thread. A result may arrive after the loop was
            closed; nothing waits for it then."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        _, key, _ = serialised
        key_partitioner = await self._find_key_partitioner(topic, key, deadline)
        partition = key_partitioner.partition(key)
        result = await self._begin_put(topic, serialised, partition, on_delivered, deadline)
        await asyncio.wait(
            (delivered,),
            timeout=min(deadline.remaining_s(), shared_limits.CLIENT_LONGEST_MS / 1000),
        )
        return result

    async def _find_key_partitioner(
        self, topic: str, key: bytes | None, deadline: Deadline
    ) -> KeyPartitioner:
        """Return the partitioner of the topic. Puts that have to ask the broker wait for the
        same answer, so that they keep their order."""
        cluster = self._client.session.cluster
        cached = BY_LIBRDKAFKA if key is None else cluster.cached_key_partitioner(topic)
        if cached is not None and topic not in self._partitioner_requests:
            return cached
        if topic not in self._partitioner_requests:
            request = self._partitioner_requests[topic] = self._submit(
                cluster.key_partitioner, topic, deadline
            )

            def on_answered(finished: asyncio.Future[KeyPartitioner]) -> None:
                del self._partitioner_requests[topic]
                if not finished.cancelled():
                    # Retrieve the error, or asyncio warns about it; waiting puts raise it.
                    finished.exception()

            request.add_done_callback(on_answered)
        return await asyncio.shield(self._partitioner_requests[topic])

    async def _begin_put(
        self,
        topic: str,
        serialised: SerializedMessage,
        partition: int,
        on_delivered: Callable[[], None],
        deadline: Deadline,
    ) -> Callable[[], RecordPosition]:
        """Start sending a message; return a function that returns its position or raises its error.
        While librdkafka's queue is full, wait and try again. Raises QuackTimeout."""
        begin = self._client.session.begin_put
        while True:
            try:
                return begin(topic, serialised, partition, on_delivered, deadline)
            except BufferError:
                if deadline.has_passed():
                    raise deadline.timeout_error(f"room for a message to topic {topic}") from None
                await asyncio.sleep(limits.CLIENT_SHORT_POLL_MS / 1000)

    async def _fill_reader(self, topic: str, loop: object, deadline: Deadline) -> Reader:
        """Return the topic's reader with buffered messages. If cancelled, also end the wait in
        the thread."""
        fill = self._begin_waiting(self._client.session.fill, topic, loop, deadline)
        try:
            return await fill.result(deadline)
        except asyncio.CancelledError:
            if fill.cancel_unless_begun():
                raise
            deadline.end()
            cleanup = asyncio.ensure_future(asyncio.gather(fill.future, return_exceptions=True))
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _put_back(
        self,
        topic: str,
        holder: object,
        get_future: asyncio.Future[Message],
        lock: asyncio.Lock,
    ) -> None:
        """Put the message of a cancelled get back, before the next get may run."""
        try:
            (outcome,) = await asyncio.gather(get_future, return_exceptions=True)
            if isinstance(outcome, Message):
                await self._run(self._client.session.put_back, topic, holder, outcome.record)
        finally:
            lock.release()

    def _submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> asyncio.Future[T]:
        """Run a call in a thread. Raises ClientClosed after `close`."""
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._threads, partial(call, *arguments, **options))
        except RuntimeError:  # the threads were shut down
            raise ClientClosed("the client is closed") from None

    def _begin_waiting(self, call: Callable[..., T], *arguments: Any) -> _WaitingCall[T]:
        """Run a call that waits for messages in a thread. Raises ClientClosed after `close`."""
        try:
            return _WaitingCall(self._waiting_threads.submit(call, *arguments))
        except RuntimeError:  # the threads were shut down
            raise ClientClosed("the client is closed") from None

    async def _run(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return await self._submit(call, *arguments, **options)

    async def _close(self, *, is_done: bool) -> None:
        """Wait for the cleanups of cancelled calls, then close the client in a thread. The close
        continues even if the caller is cancelled."""
        session = self._client.session
        # End the waits first: they may occupy all threads.
        if not session.end_calls():
            return
        # A message that could not be put back is delivered again to the next client of this name.
        for outcome in await asyncio.gather(*self._cleanups, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.debug("a cancelled get was not undone: %s", outcome)
        closing = self._submit(session.close_parts, is_done=is_done)
        closing.add_done_callback(self._shut_down_threads)
        await asyncio.shield(closing)

    def _shut_down_threads(self, _closed: object) -> None:
        for threads in (self._threads, self._waiting_threads):
            threads.shutdown(wait=False, cancel_futures=True)


class _WaitingCall(Generic[T]):
    """A call that waits for messages in a thread. It begins when a thread is free."""

    def __init__(self, thread_future: concurrent.futures.Future[T]) -> None:
        self._thread_future = thread_future
        self.future = asyncio.wrap_future(thread_future)

    async def result(self, deadline: Deadline) -> T:
        """Return the result. A call that has begun observes the deadline itself. Raises
        QuackTimeout if the call has not begun by the deadline, because no thread was free, and
        ClientClosed if `close` has cancelled it."""
        remaining_s = deadline.remaining_s()
        await asyncio.wait((self.future,), timeout=None if math.isinf(remaining_s) else remaining_s)
        if not self.future.done() and self.cancel_unless_begun():
            raise deadline.timeout_error(
                f"a free thread: {limits.CLIENT_THREADS} other calls of this client wait for "
                "messages; use another client, or fewer calls at a time"
            )
        if self.future.cancelled():
            raise ClientClosed("the client is closed")
        return await asyncio.shield(self.future)

    def cancel_unless_begun(self) -> bool:
        """Cancel the call if it still waits for a thread; return whether it did."""
        return self._thread_future.cancel()
