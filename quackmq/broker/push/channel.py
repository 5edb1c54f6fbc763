"""One connected peer of a push subscription: it takes entries and acknowledges each of them.

Several channels may share a subscription; each entry is leased to one of them at a time. The
channel calls `on_change` when `take` may find something: new entries, an expired lease, room that
an acknowledgement made, or the end of the subscription, which `take` then raises. It calls
`on_change` once, and again only after the next `take`; the peer must therefore take until there is
nothing. After a failed read it calls `on_change` after a while, since a disk error may be
temporary.

New entries come from the topic's window, without a read and without waiting. Only a subscription
that is behind the window reads, one region at a time. It yields to other tasks before each read, so
that old entries do not delay new ones (Q13).

Not thread-safe: call from the broker's event loop. A cancelled `take` has leased nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.push.live_tail import LiveTail
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.push_subscription import Part, PushedSubscription, loop_ms
from quackmq.broker.push.window import CatchUpBuffer, LeasedEntry, WindowBatch
from quackmq.errors import DamagedData, OffsetOutOfRange, QuackError, StorageError
from quackmq.loop_clock import loop_clock
from quackmq.model.leases import Counts, Wanted
from quackmq.model.topic import Read, Slice
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: Stale entries that `_lent` may hold besides as many as are still leased.
_SPARE_LENT: Final = 64


class Channel:
    def __init__(
        self,
        held: PushedSubscription,
        pushed: PushRegistry,
        log: LogReader,
        on_change: Callable[[], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        self._held = held
        self._pushed = pushed
        self._log = log
        self._on_change = on_change
        self._on_close = on_close
        #: How often each entry was delivered, by partition and offset. It holds the entries leased
        #: to this channel, and some that were leased to other channels since. It is cleaned when it
        #: has more than `_lent_most` entries.
        self._lent: dict[tuple[int, int], int] = {}
        self._lent_most = _SPARE_LENT
        self._is_told = False
        #: The entry taken last was the newest, and there was no notification since.
        self._is_at_end = False
        self._is_closed = False
        #: Calls `on_change` when a failed read is to be tried again.
        self._again: asyncio.TimerHandle | None = None
        self._time = loop_clock().time
        self.feed: LiveTail | None = None

    @property
    def name(self) -> str:
        return self._held.name

    @property
    def topic_name(self) -> str:
        return self._held.topic.name

    # --- entries ------------------------------------------------------------------------------

    async def take(self, most: int = 1) -> list[LeasedEntry]:
        """Lease entries that are due again or new to this channel, and return them. Return at most
        `most`, and fewer if the rest would have to be read or if there is no room for more leases.
        Return an empty list if there are none.

        Raise the error that ended the subscription: UnknownSubscription, UnknownTopic or
        BrokerClosing. Raise StorageError if there are only entries that cannot be read now.
        """
        most = min(most, limits.TAKEN_ENTRIES)
        stuck: dict[Part, QuackError | None] = {}
        while True:
            self._check_there()
            self._is_told = self._is_at_end = False
            found: list[LeasedEntry] = []
            behind = self._lend(most, found, stuck)
            if found:
                return found
            if behind is None:
                if stuck:
                    self._try_again_later()
                error = next((each for each in stuck.values() if each is not None), None)
                if error is not None:
                    raise error
                return found
            await self._bring(*behind, stuck)

    def take_now(self, most: int = 1) -> list[LeasedEntry] | None:
        """Lease entries as `take` does, but without waiting: the fast path. Return None if
        something must be read first; call `take` then."""
        self._check_there()
        self._is_told = False
        newest = self._next_of_all() if most == 1 else None
        if newest is not None:
            return [newest]
        self._is_at_end = False
        found: list[LeasedEntry] = []
        behind = self._lend(min(most, limits.TAKEN_ENTRIES), found, {})
        return found if found or behind is None else None

    @property
    def is_idle(self) -> bool:
        """Return whether `take` would find nothing now, and `on_change` will be called when that
        changes. This is cheaper than a `take`."""
        feed, parts = self.feed, self._held.parts
        if self._is_told or feed is None or len(feed.windows) < len(parts):
            return False
        if self._is_at_end:
            return True
        now_ms = loop_ms()
        for part, window in zip(parts, feed.windows, strict=False):
            if not part.leases.has_nothing(now_ms, window.end):
                return False
        return True

    def ack(self, partition: int, offset: int) -> bool:
        """Acknowledge an entry. Return False if it is not outstanding: acknowledged before, skipped
        or never leased. The acknowledgement is durable with the next flush."""
        held = self._held
        if held.gone is not None or not 0 <= partition < len(held.parts):
            return False
        part = held.parts[partition]
        leases = part.leases
        had_room = leases.has_room
        if not leases.ack(offset):
            return False
        if part.untold is not None:
            part.untold.ack(offset, leases)
        self._lent.pop((partition, offset), None)
        if not part.is_dirty:
            self._pushed.changed(part)
        if not had_room:
            held.tell()
        return True

    def nack(self, delivery: LeasedEntry, wait_ms: int = 0) -> bool:
        """Reject a delivery: the entry is due again after `wait_ms`. Return False if this delivery
        is not the outstanding one."""
        place = (delivery.partition, delivery.offset)
        if self._held.gone is not None or not 0 <= delivery.partition < len(self._held.parts):
            return False
        if self._lent.get(place) == delivery.deliveries:
            del self._lent[place]
        leases = self._held.parts[delivery.partition].leases
        if not leases.nack(delivery.offset, delivery.deliveries, loop_ms(), wait_ms):
            return False
        if wait_ms:
            self._held.set_timer()
        else:
            self._held.tell()
        return True

    async def flush(self) -> None:
        """Make all acknowledgements so far durable. Raise the errors of the store."""
        await self._pushed.flush()

    # --- progress -----------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the counts of the subscription's entries by outcome, over all its channels."""
        self._skip_old()
        return self._held.counts()

    def lag(self) -> int:
        """Return how many entries are outstanding or not yet delivered."""
        self._skip_old()
        if self.feed is None:
            return 0
        both = zip(self._held.parts, self.feed.windows, strict=False)
        return sum(part.leases.left(window.first, window.end) for part, window in both)

    def low_water_mark(self, partition: int) -> int:
        """Return the offset before which all entries of a partition are done; 0 for an unknown
        partition."""
        parts = self._held.parts
        return parts[partition].leases.low_water_mark if 0 <= partition < len(parts) else 0

    def is_done(self, partition: int, offset: int) -> bool:
        """Return whether an entry will never be leased again."""
        parts = self._held.parts
        return 0 <= partition < len(parts) and parts[partition].leases.is_done(offset)

    def tell(self) -> None:
        """Call `on_change`, unless it was called since the last `take`. For the broker only."""
        if self._is_told or self._is_closed:
            return
        self._is_told = True
        try:
            self._on_change()
        except Exception:
            # Other channels must still be notified after this one.
            log.exception(
                "the callback of push subscription %s failed on new entries", self._held.name
            )

    # --- closing ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give this channel's entries back at once, to the other channels or to the next one."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._again is not None:
            self._again.cancel()
        held = self._held
        held.channels.pop(self, None)
        self._on_close(self)
        if not held.channels:
            for part in held.parts:
                self._log.drop(part)
        if held.gone is not None:
            return
        now_ms = loop_ms()
        for (partition, offset), deliveries in self._lent.items():
            held.parts[partition].leases.nack(offset, deliveries, now_ms)
        self._lent.clear()
        if held.channels:
            held.tell()
            return
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None

    # --- helpers ------------------------------------------------------------------------------

    def _check_there(self) -> None:
        assert not self._is_closed, "a channel is not used after it was closed"
        if self._held.gone is not None:
            raise self._held.gone.with_traceback(None)

    def _lend(
        self, most: int, found: list[LeasedEntry], stuck: dict[Part, QuackError | None]
    ) -> tuple[Part, Wanted] | None:
        """Lease entries that are in memory, partition by partition. Return the first partition, and
        its wanted entries, that must be read for more; None if nothing must be read."""
        feed, held = self.feed, self._held
        assert feed is not None, "an open channel has a feed"
        behind = None
        known = min(len(held.parts), len(feed.windows))
        begin = held.turn % known
        for index in range(known):
            partition = (begin + index) % known
            part = held.parts[partition]
            if part in stuck:
                continue
            missing = self._lend_of(part, feed, most, found)
            behind = behind or missing
            if len(found) >= most:
                break
            if missing is not None and not found and part.leases.terms.reading == "every":
                break  # read it first; a live subscription goes on with new entries elsewhere
        if found:
            held.turn = found[-1].partition + 1
            self._has_lent()
        elif held.is_timer_late:
            self._held.set_timer()
        return behind

    def _next_of_all(self) -> LeasedEntry | None:
        """Lease the next entry on the fast path: the subscription has one partition and has kept
        up. Return None in any other case."""
        feed, held = self.feed, self._held
        assert feed is not None, "an open channel has a feed"
        if len(held.parts) != 1 or len(feed.windows) != 1:
            return None
        part, window = held.parts[0], feed.windows[0]
        leases = part.leases
        offset, end = leases.frontier, window.end
        if not window.start <= offset < end or offset < window.first:
            return None
        entry = window.entry_at(offset, self._log.decoded, held.topic.name)
        if entry is None:
            return None
        if feed.lets_age and leases.terms.reading == "live":
            if feed.asks_ages(0) or feed.live_from(0) > offset:
                return None
        if not leases.lend_next(int(self._time() * 1000), end):
            return None
        self._is_at_end = offset + 1 == end
        self._lent[0, offset] = 1
        if held.timer is None or held.is_timer_late or len(self._lent) > self._lent_most:
            self._has_lent()
        return entry

    def _lend_of(
        self, part: Part, feed: LiveTail, most: int, found: list[LeasedEntry]
    ) -> tuple[Part, Wanted] | None:
        partition, leases = part.key.partition, part.leases
        window = feed.windows[partition]
        now_ms = loop_ms()
        counts = leases.counts
        if leases.terms.reading == "live":
            if feed.asks_ages(partition):
                return part, Wanted(0, 0)
            live_from = feed.live_from(partition)
        else:
            live_from = 0
        missing = None
        while len(found) < most:
            wanted = leases.wanted(now_ms, window.end, live_from)
            if wanted is None:
                break
            if wanted.first_offset < window.first and not wanted.is_again:
                leases.lose_before(window.first)
                continue
            first, end, _ = wanted
            if first < window.first:
                cell, known_to = None, end  # lost: it was deleted from the log
            elif first >= window.start:
                cell = window.cell_at(first, self._log.decoded, self._held.topic.name)
                known_to = window.end
            else:
                cell = self._ahead_at(part, first)
                if cell is None:
                    missing = (part, wanted)
                    break
                known_to = cell.next_offset
            if cell is not None and not cell.is_open:
                missing = (part, wanted)  # its batch must be prepared first
                break
            self._lend_cell(part, wanted, cell, known_to, now_ms, most, found)
        if leases.counts is not counts and not part.is_dirty:
            self._pushed.changed(part)
        return missing

    def _lend_cell(
        self,
        part: Part,
        wanted: Wanted,
        cell: WindowBatch | None,
        known_to: int,
        now_ms: int,
        most: int,
        found: list[LeasedEntry],
    ) -> None:
        """Lease the wanted entries of one window batch. Without a batch, mark the wanted offsets as
        holding no entries. Skipping offsets without entries is one step, however many there are."""
        leases, key = part.leases, part.key
        first = wanted.first_offset
        if cell is None:
            leases.lend(wanted, (), known_to, now_ms)
            return
        if cell.is_poison and not wanted.is_again:
            leases.lose(first, min(cell.next_offset, wanted.next_offset))
            return
        entries, known_to = cell.between(first, wanted.next_offset, most - len(found))
        offsets = [entry.offset for entry in entries]
        lent = leases.lend(wanted, offsets, known_to, now_ms)
        partition = key.partition
        # `lend` leases the first of the wanted entries.
        for (offset, deliveries, _), entry in zip(lent, entries, strict=False):
            self._lent[partition, offset] = deliveries
            if deliveries == 1:
                found.append(entry)
                continue
            found.append(replace(entry, deliveries=deliveries))
            if not part.is_dirty:
                self._pushed.changed(part)

    async def _bring(
        self, part: Part, wanted: Wanted, stuck: dict[Part, QuackError | None]
    ) -> None:
        """Read wanted entries that are not in memory, or prepare their batch. Mark the partition as
        stuck if that fails: a disk error, or damage without a known end."""
        assert self.feed is not None, "an open channel has a feed"
        async with self._held.lock:
            try:
                if wanted.next_offset == 0:
                    await self.feed.look_at_ages(part.key.partition)
                    return
                cell = self._cell_of(part, wanted.first_offset)
                if cell is None:
                    await self._log.read(part, wanted, self._pushed, stuck)
                elif not cell.is_open:
                    offset, topic_name = wanted.first_offset, self._held.topic.name
                    await self._log.decoded.prepare(part.key, cell.batch, offset, topic_name)
                # else another channel has read or prepared it in the meantime
            except StorageError as error:
                stuck[part] = error
            except OSError as error:
                stuck[part] = StorageError(f"partition {part.key.partition}: {error}")

    def _cell_of(self, part: Part, offset: int) -> WindowBatch | None:
        """Return the batch that holds `offset`, from the window or the catch-up buffer; None if
        neither has it."""
        assert self.feed is not None, "an open channel has a feed"
        window = self.feed.windows[part.key.partition]
        if offset >= window.start:
            return window.cell_at(offset, self._log.decoded, self._held.topic.name)
        return self._ahead_at(part, offset)

    def _ahead_at(self, part: Part, offset: int) -> WindowBatch | None:
        if part.ahead is None:
            return None
        return part.ahead.cell_at(offset, self._log.decoded, part.key, self._held.topic.name)

    def _try_again_later(self) -> None:
        if self._again is None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(limits.CHANNEL_RETRY_MS / 1000, self._tell_again)

    def _tell_again(self) -> None:
        self._again = None
        self.tell()

    def _skip_old(self) -> None:
        feed, held = self.feed, self._held
        if feed is None or held.kept.terms.reading != "live" or held.gone is not None:
            return
        for part, window in zip(held.parts, feed.windows, strict=False):
            self._pushed.skip(part, feed.live_from(window.key.partition))

    def _has_lent(self) -> None:
        """Update the timer after a lease, and drop stale entries of `_lent`."""
        if self._held.timer is None or self._held.is_timer_late:
            self._held.set_timer()
        if len(self._lent) > self._lent_most:
            parts = self._held.parts
            self._lent = {
                (partition, offset): deliveries
                for (partition, offset), deliveries in self._lent.items()
                if parts[partition].leases.is_lent(offset, deliveries)
            }
            self._lent_most = 2 * len(self._lent) + _SPARE_LENT


class LogReader:
    """Reads for subscriptions that are behind the window. Buffers entries that are not yet leased,
    within a bound."""

    def __init__(self, store: Store, decoded: DecodedBatches) -> None:
        self.decoded = decoded
        self._store = store
        self._size = 0
        #: The least recently read first.
        self._ahead: OrderedDict[Part, int] = OrderedDict()

    async def read(
        self,
        part: Part,
        wanted: Wanted,
        pushed: PushRegistry,
        stuck: dict[Part, QuackError | None],
    ) -> None:
        """Read the wanted entries into `part.ahead`, or count them as lost. If neither is possible,
        mark `part` as stuck."""
        await asyncio.sleep(0)  # subscriptions that are not behind go first
        max_bytes = 1 if wanted.is_again else shared_limits.REGION_BYTES
        read = Read(part.key, wanted.first_offset, max_bytes, committed=True)
        (found,) = await self._store.read([read], max_bytes=max_bytes)
        if part.held.gone is not None:
            return
        if found.error is not None:
            if self._lose(part, wanted, found, found.error):
                pushed.changed(part)
            else:
                stuck[part] = found.error if isinstance(found.error, QuackError) else None
            return
        if not found.chunks:
            stuck[part] = None
            return
        self.drop(part)
        part.ahead = CatchUpBuffer(found, wanted.first_offset)
        self._ahead[part] = found.size
        self._size += found.size
        while self._size > limits.AHEAD_BYTES and len(self._ahead) > 1:
            self.drop(next(iter(self._ahead)))

    def drop(self, part: Part) -> None:
        """Drop the catch-up buffer of a subscription's partition."""
        part.ahead = None
        self._size -= self._ahead.pop(part, 0)

    def _lose(self, part: Part, wanted: Wanted, found: Slice, error: Exception) -> bool:
        """Count offsets as lost up to the end of the damage; return False if that end is
        unknown."""
        first, end = wanted.first_offset, 0
        if isinstance(error, OffsetOutOfRange):
            end = found.first_offset
        elif isinstance(error, DamagedData):
            end = error.next_offset or 0
        if end <= first:
            return False
        if isinstance(error, DamagedData):
            self.decoded.quarantine(part.key, first, end, part.held.topic.name, error)
        if wanted.is_again:
            part.leases.lend(wanted, (), end, loop_ms())
        else:
            part.leases.lose(first, end)
        return True
