"""What one client has yet to acknowledge of one topic: sent to its REP socket until it does.

The first delivery of an entry is what the XPUB socket sends to the client, if it has subscribed
there (`XpubServer.covers`). What was published before it had, and what it has not acknowledged when
the lease runs out, is sent as `data` over a REQ connection; the answer is the acknowledgement. A
client that says `not_yet` has the message in hand: it is asked again later, each time after a
longer wait. Where nobody answers, nothing is tried for a while, longer each time, and the broker's
health names the client meanwhile.

An acknowledgement may come before the entry was lent, since XPUB does not wait for leases: it is
remembered until then, up to a bound. One that is forgotten costs a repeat, which the client knows
by its id.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from quackmq.broker import Broker, Caller, Channel, LeasedEntry
from quackmq.errors import BrokerClosing, NotFound, QuackError
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec.proxy_language import Data, data_words, read_received
from quackmq.protocols.zmq.proxy.callback_connection import Outgoing

log = logging.getLogger(__name__)


class Multicast(Protocol):
    """The XPUB socket."""

    def covers(self, client: str, topic: str, partition: int, offset: int) -> bool:
        """Whether an entry was, or will be, sent to a client there."""


class Retransmission:
    def __init__(
        self,
        broker: Broker,
        caller: Caller,
        topic: str,
        outgoing: Outgoing,
        multicast: Multicast,
        lease_ms: int,
        large: asyncio.Semaphore,
        on_end: Callable[[Retransmission], None],
    ) -> None:
        """`caller` is the client, by its name; `large` is held around what takes much memory."""
        self.outgoing = outgoing
        self.client = caller.client
        self.topic = topic
        #: How many messages were sent to the client's address, and how many tries failed.
        self.sent = 0
        self.failed = 0
        self._broker = broker
        self._caller = caller
        self._multicast = multicast
        self._lease_ms = lease_ms
        self._large = large
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._reachable = asyncio.Event()
        self._channel: Channel | None = None
        #: Acknowledged and not lent yet, in the order in which they came.
        self._early: dict[tuple[int, int], None] = {}
        self._failures = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def renew(self, outgoing: Outgoing) -> None:
        """The client has introduced itself again."""
        self.outgoing = outgoing
        self._is_well()
        self._reachable.set()
        self._changed.set()

    def acknowledge(self, partition: int, offset: int) -> None:
        channel = self._channel
        if channel is not None and (
            channel.ack(partition, offset) or channel.is_done(partition, offset)
        ):
            self._look_whether_well(channel)
            return
        self._early[partition, offset] = None
        if len(self._early) > limits.PROXY_EARLY:
            del self._early[next(iter(self._early))]

    def low_water_mark(self, partition: int) -> int:
        return 0 if self._channel is None else self._channel.low_water_mark(partition)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    # --- how it is done -----------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._follow()
                except BrokerClosing:
                    return
                except NotFound:
                    if self._channel is None:
                        return
                    # Gone, but there may be another in its place: the next turn tells.
                    await self._leave()
                except QuackError as error:
                    await self._back_off(error)
                except Exception:
                    log.exception("sending %s to %s failed", self.topic, self.client)
                    await asyncio.sleep(limits.PROXY_RETRY_MS / 1000)
        finally:
            self._is_well()
            await self._leave()
            self._on_end(self)

    async def _leave(self) -> None:
        channel, self._channel = self._channel, None
        # An offset may mean another entry, of another topic of this name.
        self._early.clear()
        if channel is not None:
            await channel.close()

    async def _follow(self) -> None:
        if self._channel is None:
            self._channel = await self._broker.pushing.open(
                self._caller, self.client, self.topic, self._changed.set
            )
        channel = self._channel
        while True:
            self._changed.clear()
            while taken := await channel.take(limits.PROXY_TAKEN):
                await self._deliver(channel, taken)
                await asyncio.sleep(0)  # others are to have their turn
            self._look_whether_well(channel)
            await self._changed.wait()

    async def _deliver(self, channel: Channel, taken: list[LeasedEntry]) -> None:
        """What is not otherwise on its way, in order; if one cannot be sent, the others wait."""
        for index, delivery in enumerate(taken):
            if self._is_acknowledged(channel, delivery) or self._is_on_its_way(delivery):
                continue
            try:
                is_received = await self._send(delivery)
            except QuackError as error:
                for left in taken[index:]:
                    if not self._is_on_its_way(left):
                        channel.nack(left)
                self._broker.pushing.unreached[self.client, self.topic] = str(error)
                await self._back_off(error)
                return
            if is_received:
                channel.ack(delivery.partition, delivery.offset)
            elif not self._is_acknowledged(channel, delivery):
                channel.nack(delivery, self._later_ms(delivery))

    def _is_acknowledged(self, channel: Channel, delivery: LeasedEntry) -> bool:
        place = (delivery.partition, delivery.offset)
        if place not in self._early:
            return channel.is_done(*place)
        del self._early[place]
        channel.ack(*place)
        return True

    def _is_on_its_way(self, delivery: LeasedEntry) -> bool:
        return delivery.deliveries == 1 and self._multicast.covers(
            self.client, self.topic, delivery.partition, delivery.offset
        )

    async def _send(self, delivery: LeasedEntry) -> bool:
        """Whether it is done with. Unreachable, or another error of the client's."""
        content = delivery.record.value or b""
        data = Data(self.client, self.topic, delivery.id, content)
        if len(content) > limits.ZMQ_UNRESERVED_BYTES:
            answer = await self.outgoing.ask_large(data_words(data), content, self._large)
        else:
            answer = await self.outgoing.ask(data_words(data), content)
        is_received = read_received(data, answer)
        self.sent += 1
        if self._failures:
            log.info(
                "%s is reached again, for %s; %d tries failed", self.client, self.topic, self.failed
            )
            self._is_well()
        return is_received

    async def _back_off(self, error: QuackError) -> None:
        self.failed += 1
        if not self._failures:
            log.warning(
                "%s does not get what it has missed of %s; it is tried again: %s",
                self.client,
                self.topic,
                error,
            )
        wait_ms = min(limits.PROXY_BACKOFF_MS * 2**self._failures, limits.PROXY_LONGEST_BACKOFF_MS)
        self._failures = min(self._failures + 1, 32)
        self._reachable.clear()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._reachable.wait()
        except TimeoutError:
            return

    def _look_whether_well(self, channel: Channel) -> None:
        """Who has got by other ways what could not be sent to it misses nothing."""
        if self._failures and not channel.lag():
            self._is_well()

    def _is_well(self) -> None:
        """Reached again, without need of it, or gone."""
        self._failures = 0
        self._broker.pushing.unreached.pop((self.client, self.topic), None)

    def _later_ms(self, delivery: LeasedEntry) -> int:
        return min(
            self._lease_ms << min(delivery.deliveries - 1, 16), limits.PROXY_LONGEST_BACKOFF_MS
        )
