"""The publisher and the subscriber of experiments: programs that speak the line protocol on their
stdin and stdout, as anybody's would.

    python -m quackmq.cli.experiment.peer JSON        JSON: a `Part`

Beside the protocol each has a *control* channel to whoever runs the experiment, a socket that it
inherits, with one JSON array a line. It tells `["ready"]` when its topics are agreed on, `["done"]`
when there is nothing more that it would publish, and last of all `["report", {...}]`, a `Report`.
It is told `["go", START_NS]`, a moment of the monotonic clock that all processes share, and
`["end"]`: then it says `terminate`, awaits `terminate`, and reports.

An entry is `PUBLISHER NUMBER SENT_NS`, and dots up to its size: what a subscriber needs to know it
again, and to tell how long it took. Numbers count from 0 for each publisher and topic.

Promised: who runs the experiment and goes away, however, leaves none of these behind: either pipe
or the control channel at its end is the end of the program.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NoReturn

import msgspec

from quackmq import limits
from quackmq.cli.experiment.latency import Latencies
from quackmq.errors import ProtocolError
from quackmq.protocols.line.codec import (
    Choose,
    Connect,
    Entry,
    Lines,
    Message,
    Role,
    Word,
    encode,
    parse,
)

#: After `retry`, a topic is left alone for so long.
RETRY_S: Final = 0.005
#: So many times less often than at its rate does a slow publisher publish.
_SLOWER: Final = 10
#: Where the others publish as fast as they can, a tenth of this.
_USUAL_RATE: Final = 100.0
#: How often a publisher that is busy looks whether it is to end.
LOOK_S: Final = 0.05
_READ_BYTES: Final = 64 * limits.KIB
_IN: Final = 0
_OUT: Final = 1


class Behaviour(StrEnum):
    STEADY = "steady"
    #: Lets its broker wait for each answer; as a publisher, publishes at a tenth of the rate.
    SLOW = "slow"
    #: Stops answering, and listens on.
    SILENT = "silent"
    #: Goes without a word, with an entry in hand.
    DYING = "dying"
    #: Subscribes, goes away, and is back when all was published.
    LATE = "late"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    role: Role
    id: str
    topics: list[str]
    control_fd: int
    behaviour: Behaviour = Behaviour.STEADY
    #: Of a publisher: entries a second, None for as fast as it goes; until when.
    rate: float | None = None
    seconds: float = 0.0
    #: So many at the most, over all topics.
    entries: int = 0
    entry_bytes: int = 100
    #: Of a slow subscriber: how long it takes to answer.
    answer_ms: int = 0
    #: Of a silent or dying one: so many entries are answered before.
    after: int = 0
    #: A slice of the report's series.
    slice_ms: int = 100


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one process saw. `entries` by topic: those that were taken from a publisher, or that a
    subscriber has answered, each once."""

    entries: dict[str, int]
    retried: int = 0
    rejected: int = 0
    #: Entries that came once more.
    doubled: int = 0
    #: Whether it ended by `terminate` and `terminate`.
    terminated: bool = False
    #: By slice of time since the start: how many entries took how long, see `Latencies`.
    latencies: dict[int, dict[int, int]] = {}


class Over(Exception):
    """The broker has said `terminate`, or hung up, or the experiment is no more."""

    def __init__(self, *, terminated: bool = False) -> None:
        self.terminated = terminated


def content(publisher: str, number: int, sent_ns: int, size: int) -> bytes:
    return (b"%b %d %d " % (publisher.encode(), number, sent_ns)).ljust(size, b".")


# --- the two programs -----------------------------------------------------------------------


def publish(part: Part, peer: Peer) -> Report:
    peer.connect(part)
    end_s = peer.ready() / 1e9 + part.seconds
    turns = Turns(part)
    taken: Counter[str] = Counter(dict.fromkeys(part.topics, 0))
    answers: Counter[Word] = Counter()
    try:
        while sum(taken.values()) < part.entries and peer.waited_until(turns.due_s, end_s):
            topic = turns.topic
            entry = content(part.id, taken[topic], time.monotonic_ns(), part.entry_bytes)
            peer.say(Entry(topic, entry))
            answer = peer.word()
            answers[answer] += 1
            taken[topic] += answer is Word.SUCCESSFUL
            turns.answered(answer is Word.SUCCESSFUL)
        peer.done()
        terminated = peer.terminate()
    except Over as over:
        terminated = over.terminated
    return Report(
        entries=dict(taken),
        retried=answers[Word.RETRY],
        rejected=answers[Word.REJECT],
        terminated=terminated,
    )


class Turns:
    """What a publisher tries next, and when: it goes round its topics at its rate, and one that has
    no room rests for a moment while the others go on."""

    def __init__(self, part: Part) -> None:
        self._interval_s = 1 / part.rate if part.rate else 0.0
        if part.behaviour is Behaviour.SLOW:
            self._interval_s = _SLOWER / (part.rate or _USUAL_RATE)
        #: When each topic was tried, or may be tried again.
        self._tried_s = dict.fromkeys(part.topics, 0.0)
        self._due_s = time.monotonic()

    @property
    def topic(self) -> str:
        return min(self._tried_s, key=self._tried_s.__getitem__)

    @property
    def due_s(self) -> float:
        return max(self._due_s, self._tried_s[self.topic])

    def answered(self, is_taken: bool) -> None:
        topic, now_s = self.topic, time.monotonic()
        self._tried_s[topic] = now_s if is_taken else now_s + RETRY_S
        if is_taken:
            # What was missed while the broker was slow is not made up for all at once.
            self._due_s = max(self._due_s + self._interval_s, now_s - self._interval_s)


def subscribe(part: Part, peer: Peer) -> Report:
    peer.connect(part)
    if part.behaviour is Behaviour.LATE:  # it is back as a steady one
        peer.ready()
        return Report(entries={}, terminated=peer.terminate())
    start_ns = peer.ready()
    seen = Seen(start_ns, part.slice_ms)
    try:
        while (entry := peer.entry_or_end()) is not None:
            if seen.answered >= part.after:
                if part.behaviour is Behaviour.DYING:
                    _die(peer, seen)
                if part.behaviour is Behaviour.SILENT:
                    peer.listen_on()
            arrived_ns = time.monotonic_ns()
            if part.answer_ms:
                peer.rest(part.answer_ms / 1000)
            peer.say(Word.SUCCESSFUL)
            seen.note(entry, arrived_ns)
        terminated = peer.terminate()
    except Over as over:
        terminated = over.terminated
    return seen.report(terminated)


def _die(peer: Peer, seen: Seen) -> NoReturn:
    """What it has seen is told, since the accounts need it; the broker is told nothing."""
    peer.tell(["report", msgspec.to_builtins(seen.report(terminated=False), str_keys=True)])
    os._exit(1)


@dataclass(slots=True)
class Seen:
    """What a subscriber has answered."""

    start_ns: int
    slice_ms: int
    answered: int = 0
    doubled: int = 0
    entries: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)
    #: A byte an entry, by publisher and topic.
    numbers: dict[tuple[str, bytes], bytearray] = field(default_factory=dict)

    def note(self, entry: Entry, arrived_ns: int) -> None:
        self.answered += 1
        publisher, number, sent_ns, *_ = entry.content.split(b" ", 3)
        marks = self.numbers.setdefault((entry.topic, publisher), bytearray())
        place = int(number)
        if place >= len(marks):
            marks.extend(bytes(place + 1 - len(marks)))
        if marks[place]:
            self.doubled += 1
            return
        marks[place] = 1
        self.entries[entry.topic] += 1
        when = max(0, arrived_ns - self.start_ns) // (self.slice_ms * 1_000_000)
        self.latencies.add(when, arrived_ns - int(sent_ns))

    def report(self, terminated: bool) -> Report:
        return Report(
            entries=dict(self.entries),
            doubled=self.doubled,
            terminated=terminated,
            latencies=self.latencies.slices,
        )


# --- the protocol, from a client's side -------------------------------------------------------


class Peer:
    """This process's two pipes and its control channel."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._commands = bytearray()
        self._lines = Lines()
        self._is_to_end = False
        self._looked_s = 0.0

    # --- with the broker ---

    def connect(self, part: Part) -> None:
        """Up to the last `accept`. Over where something is refused."""
        self._ask(Connect(part.role, part.id))
        self._ask(Word.END)
        for topic in part.topics:
            self._ask(Choose(part.role, part.id, topic))
        self._ask(Word.END)

    def say(self, message: Message) -> None:
        data = memoryview(encode(message))
        try:
            while data:
                data = data[os.write(_OUT, data) :]
        except BrokenPipeError:
            raise Over from None

    def word(self) -> Word:
        """The next answer; Over at the end."""
        answer = self._message()
        if answer is Word.TERMINATE:
            raise Over(terminated=True)
        assert isinstance(answer, Word), f"{answer} is no answer to a publisher"
        return answer

    def entry_or_end(self) -> Entry | None:
        """None when it is time to end."""
        while (line := self._lines.next_line()) is None:
            if self.is_told_to_end(None, _IN):
                return None
        message = _parsed(line)
        if message is Word.TERMINATE:
            raise Over(terminated=True)
        return message if isinstance(message, Entry) else self.entry_or_end()

    def terminate(self) -> bool:
        """Whether it was answered; entries that are on their way are left unanswered."""
        with suppress(Over):
            self.say(Word.TERMINATE)
        while self._message() is not Word.TERMINATE:
            pass
        return True

    def rest(self, seconds: float) -> None:
        """So long, or until it is time to end."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self.is_told_to_end(left_s):
            pass

    def listen_on(self) -> NoReturn:
        """And never answer."""
        while True:
            self._receive()
            while self._lines.next_line() is not None:
                pass

    # --- with who runs the experiment ---

    def tell(self, message: list[object]) -> None:
        try:
            self._control.sendall(msgspec.json.encode(message) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(1) from None

    def ready(self) -> int:
        """Say so, and await the start."""
        self.tell(["ready"])
        while (command := self._command()) is None:
            pass
        if command[0] != "go":
            raise ProtocolError(f"{command!r:.100} where the start of an experiment was expected")
        return int(str(command[1]))

    def done(self) -> None:
        self.tell(["done"])
        while not self.is_told_to_end(None, _IN):
            pass

    def waited_until(self, due_s: float, end_s: float) -> bool:
        """Wait for that moment. False if it is to end before, by word or by the clock."""
        while (now_s := time.monotonic()) < end_s:
            if now_s < due_s or now_s - self._looked_s >= LOOK_S:
                self._looked_s = now_s
                if self.is_told_to_end(min(due_s, end_s) - now_s):
                    return False
            if time.monotonic() >= due_s:
                return True
        return False

    def is_told_to_end(self, wait_s: float | None, also: int | None = None) -> bool:
        """Wait so long for it, or for something to read from `also`; what came there is taken."""
        sources: list[socket.socket | int] = [self._control]
        if also is not None:
            sources.append(also)
        # It may have come together with what was read before.
        if not self._is_to_end and b"\n" not in self._commands:
            wait_s = None if wait_s is None else max(0.0, wait_s)
            readable = select.select(sources, [], [], wait_s)[0]
            if also in readable:
                self._receive()
            if self._control not in readable:
                return False
        self._is_to_end = self._is_to_end or self._command() == ["end"]
        return self._is_to_end

    # --- how ---

    def _ask(self, message: Message) -> None:
        self.say(message)
        if self.word() is not Word.ACCEPT:
            raise SystemExit(f"{message} was refused")

    def _message(self) -> Message:
        while (line := self._lines.next_line()) is None:
            self._receive()
        return _parsed(line)

    def _receive(self) -> None:
        data = os.read(_IN, _READ_BYTES)
        if not data:
            raise Over
        self._lines.receive(data)

    def _command(self) -> list[object] | None:
        """The next one, or None if it has not come whole."""
        end = self._commands.find(b"\n")
        if end < 0:
            data = self._control.recv(limits.KIB)
            if not data:  # who runs the experiment is gone
                raise SystemExit(1)
            self._commands += data
            end = self._commands.find(b"\n")
            if end < 0:
                return None
        line = bytes(self._commands[:end])
        del self._commands[: end + 1]
        return msgspec.json.decode(line, type=list[object])


def _parsed(line: bytes | Exception) -> Message:
    if isinstance(line, Exception):
        raise line
    return parse(line)


def main() -> None:
    part = msgspec.json.decode(sys.argv[1], type=Part)
    # The lowest that is free: `select` knows none above 1,023, and an experiment of many has them.
    lowest_fd = os.dup(part.control_fd)
    os.close(part.control_fd)
    with socket.socket(fileno=lowest_fd) as control:
        peer = Peer(control)
        report = (publish if part.role is Role.PUB else subscribe)(part, peer)
        peer.tell(["report", msgspec.to_builtins(report, str_keys=True)])


if __name__ == "__main__":
    main()
