"""Send one client the entries of one topic that it has not acknowledged, until it does.

Usually the XPUB socket makes the first delivery of an entry, if the client subscribes there
(`XpubServer.covers`). This module sends the other entries as `data` requests to the client's REP
socket:

- entries that were published before the client subscribed at the XPUB socket;
- entries that the client had not acknowledged when their lease expired.

The reply to `data` is the acknowledgement. The reply `not_yet` means that the client has the
message but has not processed it. Such a message is sent again later, each time after a longer
wait. If the client is unreachable, the next try comes after a back-off that doubles each time.
Meanwhile the broker's health names the client.

An acknowledgement may arrive before its entry is leased, because XPUB does not wait for leases. It
is remembered until then, up to a bound. If one is forgotten, the client gets the entry again and
recognizes it by its id.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from quackmq.broker import Broker, Caller, Channel, LeasedEntry
from quackmq.errors import BrokerClosing, NotFound, QuackError
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec.proxy_language import Data, data_words, read_data_reply
from quackmq.protocols.zmq.proxy.callback_connection import CallbackConnection

log = logging.getLogger(__name__)

#: Doublings of the back-off that are counted; the longest back-off is reached much earlier.
_MOST_DOUBLINGS: Final = 32


class Multicast(Protocol):
    """The XPUB socket."""

    def covers(self, client: str, topic: str, partition: int, offset: int) -> bool:
        """Return whether the socket has sent an entry to a client, or will send it."""


class Retransmission:
    """The deliveries of one topic to one client."""

    def __init__(
        self,
        broker: Broker,
        caller: Caller,
        topic: str,
        connection: CallbackConnection,
        multicast: Multicast,
        lease_ms: int,
        large_slots: asyncio.Semaphore,
        on_end: Callable[[Retransmission], None],
    ) -> None:
        """Start sending. `caller` names the client. `large_slots` bounds the large messages that
        are sent to all clients at a time.
        """
        self.client = caller.client
        self.topic = topic
        #: Messages that were sent to the client's address.
        self.sent = 0
        self._connection = connection
        self._broker = broker
        self._caller = caller
        self._multicast = multicast
        self._lease_ms = lease_ms
        self._large_slots = large_slots
        self._on_end = on_end
        #: Set when the channel may have entries to send.
        self._changed = asyncio.Event()
        #: Set when the client says `hello` again, which ends a back-off.
        self._reachable = asyncio.Event()
        self._channel: Channel | None = None
        #: Partition and offset of acknowledged entries that are not leased yet, the oldest first.
        self._early_acknowledgements: dict[tuple[int, int], None] = {}
        #: Failed tries since the last successful one.
        self._failed_tries = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def replace_connection(self, connection: CallbackConnection) -> None:
        """Use the address with which the client has said `hello` again; end a back-off."""
        self._connection = connection
        self._clear_failures()
        self._reachable.set()
        self._changed.set()

    def acknowledge(self, partition: int, offset: int) -> None:
        """Acknowledge an entry. If it is not leased yet, remember the acknowledgement."""
        channel = self._channel
        if channel is not None and (
            channel.ack(partition, offset) or channel.is_done(partition, offset)
        ):
            self._clear_failures_if_caught_up(channel)
            return
        self._early_acknowledgements[partition, offset] = None
        if len(self._early_acknowledgements) > limits.PROXY_EARLY:
            del self._early_acknowledgements[next(iter(self._early_acknowledgements))]

    def low_water_mark(self, partition: int) -> int:
        """Return the offset before which all entries of a partition are acknowledged."""
        return 0 if self._channel is None else self._channel.low_water_mark(partition)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    # --- internal -----------------------------------------------------------------------------

    async def _run(self) -> None:
        """Deliver entries until the subscription is deleted or the broker closes. Retry after
        errors.
        """
        try:
            while True:
                try:
                    await self._follow()
                except BrokerClosing:
                    return
                except NotFound:
                    if self._channel is None:
                        return
                    # The subscription was deleted. The next round finds out whether there is a new
                    # one of the same name.
                    await self._close_channel()
                except QuackError as error:
                    await self._back_off(error)
                except Exception:
                    log.exception("sending %s to %s failed", self.topic, self.client)
                    await asyncio.sleep(limits.PROXY_RETRY_MS / 1000)
        finally:
            self._clear_failures()
            await self._close_channel()
            self._on_end(self)

    async def _close_channel(self) -> None:
        """Close the channel, and forget early acknowledgements."""
        channel, self._channel = self._channel, None
        # In a new topic of the same name the offsets mean other entries.
        self._early_acknowledgements.clear()
        if channel is not None:
            await channel.close()

    async def _follow(self) -> None:
        """Open the channel if needed; lease and deliver its entries for ever."""
        if self._channel is None:
            self._channel = await self._broker.pushing.open(
                self._caller, self.client, self.topic, self._changed.set
            )
        channel = self._channel
        while True:
            self._changed.clear()
            while entries := await channel.take(limits.PROXY_TAKEN):
                await self._deliver(channel, entries)
                await asyncio.sleep(0)  # let other tasks run
            self._clear_failures_if_caught_up(channel)
            await self._changed.wait()

    async def _deliver(self, channel: Channel, entries: list[LeasedEntry]) -> None:
        """Send the entries that XPUB does not deliver, in order. If one cannot be sent, give back
        all remaining entries and back off.
        """
        for index, entry in enumerate(entries):
            if self._is_acknowledged(channel, entry) or self._is_sent_by_xpub(entry):
                continue
            try:
                is_processed = await self._send(entry)
            except QuackError as error:
                for remaining in entries[index:]:
                    if not self._is_sent_by_xpub(remaining):
                        channel.nack(remaining)
                self._broker.pushing.unreached[self.client, self.topic] = str(error)
                await self._back_off(error)
                return
            if is_processed:
                channel.ack(entry.partition, entry.offset)
            elif not self._is_acknowledged(channel, entry):
                channel.nack(entry, self._retry_delay_ms(entry))

    def _is_acknowledged(self, channel: Channel, entry: LeasedEntry) -> bool:
        """Return whether an entry is acknowledged. Apply an early acknowledgement first."""
        position = (entry.partition, entry.offset)
        if position not in self._early_acknowledgements:
            return channel.is_done(*position)
        del self._early_acknowledgements[position]
        channel.ack(*position)
        return True

    def _is_sent_by_xpub(self, entry: LeasedEntry) -> bool:
        """Return whether the XPUB socket makes this delivery, which is the first of the entry."""
        return entry.deliveries == 1 and self._multicast.covers(
            self.client, self.topic, entry.partition, entry.offset
        )

    async def _send(self, entry: LeasedEntry) -> bool:
        """Send an entry; return whether the client has processed it. Raise Unreachable, or the
        error that the client replies.
        """
        content = entry.record.value or b""
        data = Data(self.client, self.topic, entry.id, content)
        if len(content) > limits.ZMQ_UNRESERVED_BYTES:
            reply = await self._connection.request_large(
                data_words(data), content, self._large_slots
            )
        else:
            reply = await self._connection.request(data_words(data), content)
        is_processed = read_data_reply(data, reply)
        self.sent += 1
        if self._failed_tries:
            log.info(
                "%s is reached again, for %s; %d tries failed",
                self.client,
                self.topic,
                self._failed_tries,
            )
            self._clear_failures()
        return is_processed

    async def _back_off(self, error: QuackError) -> None:
        """Wait after a failure, longer each time, or until the client says `hello` again."""
        if not self._failed_tries:
            log.warning(
                "%s does not get what it has missed of %s; it is tried again: %s",
                self.client,
                self.topic,
                error,
            )
        doublings = min(self._failed_tries, _MOST_DOUBLINGS)
        wait_ms = min(limits.PROXY_BACKOFF_MS << doublings, limits.PROXY_LONGEST_BACKOFF_MS)
        self._failed_tries += 1
        self._reachable.clear()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._reachable.wait()
        except TimeoutError:
            return

    def _clear_failures_if_caught_up(self, channel: Channel) -> None:
        """Clear the failures of a client that got all entries another way, for example by XPUB."""
        if self._failed_tries and not channel.lag():
            self._clear_failures()

    def _clear_failures(self) -> None:
        """Stop reporting the client as unreachable; restart the back-off at its beginning."""
        self._failed_tries = 0
        self._broker.pushing.unreached.pop((self.client, self.topic), None)

    def _retry_delay_ms(self, entry: LeasedEntry) -> int:
        """Return how long to wait with the next delivery: twice as long after each one."""
        # 16 doublings exceed the longest back-off even for a lease of 1 ms.
        return min(self._lease_ms << min(entry.deliveries - 1, 16), limits.PROXY_LONGEST_BACKOFF_MS)
