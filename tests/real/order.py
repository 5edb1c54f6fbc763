"""From a trace of the broker: was each acknowledgement sent only after a sync that covers it?

Published values hold tokens, none twice. A token is durable once

- a journal frame that holds it inline was written, then the slot was synced; or
- the segment that holds it was written, then synced, then a journal frame that refers to these
  bytes was written, then the slot was synced;

and the names of the files, if they are new, were made durable by a sync of their directory: of the
segment before the frame that refers to it, of the slot before the answer. Each "then" means that
the one call had returned before the other began. The answer to a Produce request must begin to be
sent when every token of the request is durable.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from quackmq.disk.real import RealDisk
from quackmq.stores.local.files.format import AppendEntry, entries, parse_frame
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.recovery import read_meta
from tests.real.strace import RECEIVES, SENDS, SYNCS, WRITES, Call

TOKEN: Final = re.compile(rb"<token \d+>")
PRODUCE: Final = 0
#: size, API key, version, correlation id; a response begins with size and correlation id.
_REQUEST: Final = struct.Struct(">ihhi")
_RESPONSE: Final = struct.Struct(">ii")
NEVER: Final = float("inf")


@dataclass
class Findings:
    violations: list[str] = field(default_factory=list)
    answers: int = 0
    inline: int = 0
    referenced: int = 0


class Message(NamedTuple):
    """A whole request or response, and when its first byte came or went."""

    data: bytes
    began: int


def judge(calls: Sequence[Call], data: Path) -> Findings:
    meta = read_meta(RealDisk(data))
    assert meta is not None
    findings = Findings()
    durable = _durable_tokens(_Files(calls, data), meta.salt, findings)
    for socket in {call.target for call in calls if call.name in SENDS}:
        requests = {
            correlation: message.data
            for message in _messages(calls, socket, RECEIVES)
            for _, key, _, correlation in [_REQUEST.unpack_from(message.data)]
            if key == PRODUCE
        }
        for answer in _messages(calls, socket, SENDS):
            _, correlation = _RESPONSE.unpack_from(answer.data)
            if correlation in requests:
                _judge_answer(answer, requests[correlation], durable, findings)
    return findings


def _judge_answer(
    answer: Message, request: bytes, durable: dict[bytes, float], findings: Findings
) -> None:
    findings.answers += 1
    for token in TOKEN.findall(request):
        since = durable.get(token, NEVER)
        if not since < answer.began:
            findings.violations.append(
                f"{token!r} was acknowledged at line {answer.began}, durable at {since}"
            )


class _Files:
    """The writes and syncs of a trace, by paths below the store's directory."""

    def __init__(self, calls: Sequence[Call], data: Path) -> None:
        self.writes: dict[str, list[Call]] = defaultdict(list)
        self._syncs: dict[str, list[Call]] = defaultdict(list)
        self._made: dict[str, int] = {}
        for call in calls:
            if not call.target.startswith(f"{data}/") and call.target != str(data):
                continue
            path = call.target.removeprefix(str(data)).removeprefix("/")
            if call.name in WRITES:
                self.writes[path].append(call)
            elif call.name in SYNCS:
                self._syncs[path].append(call)
            elif call.creates:
                self._made.setdefault(path, call.ended)

    def synced_at(self, path: str, behind: int) -> float:
        """When the first sync had returned that began behind a line."""
        return min((sync.ended for sync in self._syncs[path] if sync.began > behind), default=NEVER)

    def named_at(self, path: str) -> float:
        """When the path's own name, and those of the directories above, were durable."""
        at = 0.0
        while path:
            directory = path.rpartition("/")[0]
            if path in self._made:
                at = max(at, self.synced_at(directory, self._made[path]))
            path = directory
        return at


def _durable_tokens(files: _Files, salt: int, findings: Findings) -> dict[bytes, float]:
    durable: dict[bytes, float] = {}
    slots = [path for path in files.writes if path.startswith(f"{JOURNAL_DIRECTORY}/")]
    for slot in slots:
        for write in files.writes[slot]:
            frame = parse_frame(write.data, 0, salt)
            assert frame is not None, f"line {write.ended}: something else than a whole frame"
            at = max(files.synced_at(slot, write.ended), files.named_at(slot))
            for entry in entries(frame.payload):
                if not isinstance(entry, AppendEntry):
                    continue
                if entry.data is not None:
                    tokens = TOKEN.findall(entry.data)
                    findings.inline += len(tokens)
                else:
                    tokens = list(_referenced_tokens(files, entry, write.began))
                    findings.referenced += len(tokens)
                durable |= dict.fromkeys(tokens, at)
    return durable


def _referenced_tokens(files: _Files, entry: AppendEntry, before: int) -> Iterator[bytes]:
    """Those in the bytes of a segment that an entry names, if they lasted before a line."""
    descriptor = entry.descriptor
    path = Segment(descriptor.key, descriptor.segment_base).path
    if not files.named_at(path) < before:
        return
    span = range(descriptor.position, descriptor.position + descriptor.length)
    for write in files.writes[path]:
        if not files.synced_at(path, write.ended) < before:
            continue
        for found in TOKEN.finditer(write.data):
            if write.position + found.start() in span:
                yield found.group()


def _messages(calls: Sequence[Call], socket: str, names: Sequence[str]) -> Iterator[Message]:
    """The messages that went one way through a socket, each behind its length."""
    stream = bytearray()
    began: list[tuple[int, int]] = []
    for call in calls:
        if call.target == socket and call.name in names:
            began.append((len(stream), call.began))
            stream += call.data
    position = 0
    while position + 4 <= len(stream):
        end = position + 4 + int.from_bytes(stream[position : position + 4])
        if end > len(stream):
            break
        at = max(line for start, line in began if start <= position)
        yield Message(bytes(stream[position:end]), at)
        position = end
