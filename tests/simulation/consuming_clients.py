"""A program that reads a topic with the Python client's own accounts of its progress.

`Progress` and `choose_position` (quackmq.client.consuming) decide which message is delivered next,
up to where the messages are done, and where the next process starts. They run here unchanged. What
librdkafka does is done by a model that speaks to the real Kafka server: it fetches, reads the
committed offset, and commits. The position file is a model, too: it survives the death of its
process, but after a power cut it may be outdated.

- With `on_crash="repeat"`, the next process starts with the first message that is not done: it
  skips no message, and repeats no message that is done, unless the power was cut.
- With `on_crash="skip"`, no message is delivered twice, and a death skips at most one message.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.client.consuming.progress import Mode, Progress
from quackmq.client.consuming.start import PartitionPosition, choose_position, has_note
from quackmq.client.kafka.cluster import Committed
from tests.protocols.kafka.client import FETCH, Client, fetch_fields, only_partition
from tests.protocols.kafka.membership import OFFSET_COMMIT, OFFSET_FETCH
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import ProtocolClient, fetch_without_session, records_of

_NOTE: Final = "quackmq:file:model"
#: Longer than a seed takes: no message is taken away from its holder.
_BUSY_S: Final = 1e9
_HOLDERS: Final = ("one", "two", "three")


class _Record(NamedTuple):
    """Stands for confluent-kafka's message."""

    number: int

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.number


class _PositionModel:
    """The position file of a partition, as far as `Progress` uses it."""

    is_ours = True

    def __init__(self) -> None:
        #: The positions since the last one that is surely on disk, which is the first.
        self.positions: list[int] = []

    def note(self, position: int) -> None:
        self.positions.append(position)

    def write(self, position: int) -> None:
        self.positions = [position]

    def close(self) -> None:
        return


class ConsumingProgram(ProtocolClient[Client]):
    """Reads partition 0, in which the number at offset n is n."""

    server = "kafka"

    def __init__(self, name: str, topic: str, mode: Mode) -> None:
        super().__init__(name, topic)
        self.mode = mode
        self._file = _PositionModel()
        self._progress: Progress | None = None
        self._was_power_cut = False
        #: The offset of the last acknowledged commit.
        self._committed = 0
        #: The number that each holder has in hand.
        self._in_hand: dict[str, int] = {}
        self._done: set[int] = set()
        self._delivered_end = 0
        #: Messages that a death may have skipped, in the mode SKIP.
        self._may_skip = 0

    @property
    def done_end(self) -> int:
        """The first number that is not done."""
        end = 0
        while end in self._done:
            end += 1
        return end

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        return Client(reader, writer)

    async def _step(self, peer: Client, loop: NetworkLoop) -> None:
        if self._progress is None:
            self._progress = await self._start(peer)
            return
        progress = self._progress
        state = progress.position_in(0)
        assert state is not None
        if not state.is_claimed:
            state.is_claimed = await self._commit(peer, state)
            return
        if not len(progress):
            await self._fetch(peer, progress, state)
        for _ in range(loop.source.randint(0, 4)):
            self._use(progress, state, loop)
        if state.is_behind and loop.source.random() < 0.3:
            await self._commit(peer, state)
        if loop.source.random() < 0.15:
            self._die(loop)

    async def _start(self, peer: Client) -> Progress | None:
        """Start a process: find its position, and check it."""
        cursor = await self._find_cursor(peer)
        if cursor is None:
            return None
        found = self._file.positions[-1] if self._file.positions else None
        start = choose_position(cursor, found, _NOTE)
        self._check_start(start)
        state = PartitionPosition(start, self._file)  # type: ignore[arg-type]
        state.committed = cursor.offset
        state.is_claimed = has_note(cursor.note, _NOTE)
        progress = Progress(self.mode, _BUSY_S)
        progress.add_partition(0, state)
        self._was_power_cut = False
        return progress

    def _check_start(self, start: int) -> None:
        if self.mode is Mode.SKIP:
            least, most = self._delivered_end, self._delivered_end + self._may_skip
        else:
            most = self.done_end
            least = self._committed if self._was_power_cut else most
        if not least <= start <= most:
            raise Violation(f"{self.name} starts at {start}, not from {least} to {most}")
        # The messages from here on are delivered, perhaps again.
        self._done = set(range(start))
        self._delivered_end = start
        self._may_skip = 0

    def _die(self, loop: NetworkLoop) -> None:
        """End the process, sometimes with the power of its machine."""
        loop.counts[f"consuming programs killed: {self.mode.value}"] += 1
        self._progress = None
        self._in_hand.clear()
        if loop.source.random() < 0.3 and self._file.positions:
            self._was_power_cut = True
            self._file.positions = [loop.source.choice(self._file.positions)]

    def _use(self, progress: Progress, state: PartitionPosition, loop: NetworkLoop) -> None:
        """Let a holder finish its message and take the next one, or put it back."""
        holder = loop.source.choice(_HOLDERS)
        if self.mode is Mode.REPEAT and holder in self._in_hand and loop.source.random() < 0.1:
            del self._in_hand[holder]
            progress.put_back(holder)
            return
        first = progress.first_buffered()
        if first is not None and self.mode is Mode.SKIP:
            # As the reader does: the position is on disk before the message is delivered.
            self._file.write(max(state.delivered_end, (first.offset() or 0) + 1))
            if loop.source.random() < 0.02:
                self._may_skip = 1
                self._die(loop)
                return
        if holder in self._in_hand:
            self._done.add(self._in_hand.pop(holder))
        record: Any = progress.deliver_next(holder, loop.time())
        if record is not None:
            self._on_delivered(record.number, holder)
            loop.counts[f"messages consumed: {self.mode.value}"] += 1

    def _on_delivered(self, number: int, holder: str) -> None:
        if number in self._in_hand.values() or number in self._done:
            raise Violation(f"{self.name} got {number} again")
        if self.mode is Mode.SKIP and number != self._delivered_end:
            raise Violation(f"{self.name} got {number}, not {self._delivered_end}")
        self._delivered_end = max(self._delivered_end, number + 1)
        self._in_hand[holder] = number

    # --- what librdkafka does -----------------------------------------------------------------

    async def _fetch(self, peer: Client, progress: Progress, state: PartitionPosition) -> None:
        fields = fetch_fields(state.fetched_end, topic=self.topic, wait_ms=100)
        part = only_partition(await peer.ask(FETCH, 11, **fetch_without_session(fields)))
        if part.error_code == ErrorCode.none:
            progress.add(_Record(offset) for offset, _ in records_of(part))  # type: ignore[misc]

    async def _find_cursor(self, peer: Client) -> Committed | None:
        """Return the committed offset; None if the broker does not say."""
        answer = await peer.ask(
            OFFSET_FETCH,
            7,
            group_id=self.name,
            topics=[{"name": self.topic, "partition_indexes": [0]}],
            require_stable=True,
        )
        if answer.error_code != ErrorCode.none:
            return None
        part = only_partition(answer)
        if part.error_code != ErrorCode.none:
            return None
        return Committed(max(0, int(part.committed_offset)), part.metadata or "")

    async def _commit(self, peer: Client, state: PartitionPosition) -> bool:
        """Commit what is done; return whether the broker has acknowledged that."""
        offset = state.done
        partition = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_metadata": _NOTE,
            "committed_leader_epoch": -1,
        }
        answer = await peer.ask(
            OFFSET_COMMIT,
            8,
            group_id=self.name,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[{"name": self.topic, "partitions": [partition]}],
        )
        if only_partition(answer).error_code != ErrorCode.none:
            return False
        self._committed = state.committed = offset
        return True
