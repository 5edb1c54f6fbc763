"""One peer's hold on a pushed subscription: it takes entries, and says what became of each.

Several channels may share a subscription; each entry is lent to one of them at a time. A channel is
told by `on_change` when `take` may find something: new entries, a lease that has run out, room that
an acknowledgement made, or the end of the subscription, which `take` then raises. It is told once,
and again after the next `take`; so whoever is told takes until there is nothing. Where something
could not be read it is told after a while, for a disk may fail once and then be well.

What is new is lent from the topic's window, without a read and without waiting. Only who is behind
reads, a region at a time, and lets others have a turn before each read: old news does not delay
new news (Q13).

Who may call: the broker's loop. A `take` that is cancelled has lent nothing.
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

#: What a channel may remember to have been lent and has no longer, beyond as many as it has.
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
        #: By partition and offset, how often what this channel has was lent; and of what it had,
        #: and others were lent since, some. It is looked through when there are so many.
        self._lent: dict[tuple[int, int], int] = {}
        self._lent_most = _SPARE_LENT
        self._is_told = False
        #: The last that was taken was the newest, and nobody was told of anything since.
        self._is_at_end = False
        self._is_closed = False
        #: Rings when what could not be read is to be tried again.
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
        """What is due again or new, now, lent to this channel: up to `most`, as there is room for
        them, and fewer where more would have to be read. Nothing if there is nothing.

        Raises what has ended the subscription: UnknownSubscription, UnknownTopic, BrokerClosing;
        and StorageError where nothing is left that can be read now."""
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
        """The same without waiting, for who counts microseconds; None where something has to be
        read first: then `take`."""
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
        """Whether a `take` would find nothing now, and `on_change` will tell when that changes: for
        who would only take to find out."""
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
        """It is done. False if it is not outstanding: acked before, skipped meanwhile, or never
        lent. Durable with the next flush."""
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
        """It was not taken: it is due again after so long. False if that delivery is not the one
        that is outstanding."""
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
        """All acks so far are durable; what the store raises."""
        await self._pushed.flush()

    # --- how it stands ------------------------------------------------------------------------

    def counts(self) -> Counts:
        """What became of the subscription's entries, over all its channels."""
        self._skip_old()
        return self._held.counts()

    def lag(self) -> int:
        """How many entries are still to come or outstanding."""
        self._skip_old()
        if self.feed is None:
            return 0
        both = zip(self._held.parts, self.feed.windows, strict=False)
        return sum(part.leases.left(window.first, window.end) for part, window in both)

    def low_water_mark(self, partition: int) -> int:
        """Everything of a partition before it is done; 0 for one that is not there."""
        parts = self._held.parts
        return parts[partition].leases.low_water_mark if 0 <= partition < len(parts) else 0

    def is_done(self, partition: int, offset: int) -> bool:
        """Whether an entry will not be lent any more."""
        parts = self._held.parts
        return 0 <= partition < len(parts) and parts[partition].leases.is_done(offset)

    def tell(self) -> None:
        """For the broker: `take` may find something."""
        if self._is_told or self._is_closed:
            return
        self._is_told = True
        try:
            self._on_change()
        except Exception:
            # Others wait to be told behind this one.
            log.exception("whoever is served as %s failed when told of news", self._held.name)

    # --- the end ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give back what it holds, at once, to the other channels or to the next one."""
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
        """Lend what is in memory, partition by partition; what has to be read for more, if
        anything is wanted that is not."""
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
                break  # it has its turn; a live reading takes first what is new elsewhere
        if found:
            held.turn = found[-1].partition + 1
            self._has_lent()
        elif held.is_timer_late:
            self._held.set_timer()
        return behind

    def _next_of_all(self) -> LeasedEntry | None:
        """What comes most, at a fraction of the cost: the next entry, of the only partition, of a
        subscription that has kept up. None where it is not so simple."""
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
                cell, known_to = None, end  # lost: it is gone from the log
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
                missing = (part, wanted)  # its batch has to be prepared
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
        """Lend what one cell has of what is wanted; without one there is nothing there. However
        much of it holds no entries, that is one step."""
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
        # Of those wanted, the first so many.
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
        """Read what is wanted and not in memory, or prepare its batch. If that does not help, the
        partition is stuck for now: damaged, and nobody knows where the damage ends, or the disk
        refuses."""
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
                # else another channel has read or prepared it meanwhile
            except StorageError as error:
                stuck[part] = error
            except OSError as error:
                stuck[part] = StorageError(f"partition {part.key.partition}: {error}")

    def _cell_of(self, part: Part, offset: int) -> WindowBatch | None:
        """The cell that has what is wanted, in the window or read before."""
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
        """Something was lent: the timer may have to ring sooner, what is remembered may be old."""
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
    """Reads for subscriptions that are behind the window; holds what is not lent yet, bounded."""

    def __init__(self, store: Store, decoded: DecodedBatches) -> None:
        self.decoded = decoded
        self._store = store
        self._size = 0
        #: In the order of their last read.
        self._ahead: OrderedDict[Part, int] = OrderedDict()

    async def read(
        self,
        part: Part,
        wanted: Wanted,
        pushed: PushRegistry,
        stuck: dict[Part, QuackError | None],
    ) -> None:
        """Have what is wanted ahead in `part`, or count it as lost; if neither can be done, it is
        stuck."""
        await asyncio.sleep(0)  # those who are not behind first
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
        """Hold nothing for a subscription in a partition any more."""
        part.ahead = None
        self._size -= self._ahead.pop(part, 0)

    def _lose(self, part: Part, wanted: Wanted, found: Slice, error: Exception) -> bool:
        """Whether what is wrong has an end, up to which all is lost."""
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
