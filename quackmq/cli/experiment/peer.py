"""The publisher and the subscriber of experiments: programs that speak the line protocol on stdin
and stdout, as any other client.

    python -m quackmq.cli.experiment.peer JSON        JSON: a `Part`

Besides the protocol, each peer has a *control* channel to the runner of the experiment: an
inherited socket with one JSON array per line. The peer sends `["ready"]` when its topics are
chosen, `["done"]` when it has published everything, and finally `["report", {...}]`, a `Report`.
The runner sends `["go", START_NS]`, a time of the monotonic clock that all processes share, and
`["end"]`: then the peer sends `terminate`, awaits `terminate`, and reports.

An entry is `PUBLISHER NUMBER SENT_NS`, padded with dots to its size: enough for a subscriber to
recognise it and to measure its latency. Numbers start at 0 for each publisher and topic.

If the runner dies, its peers exit too: a peer exits when a pipe or the control channel is closed.
"""

from __future__ import annotations

import os
import re
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

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.experiment.latency import Latencies
from quackmq.errors import ProtocolError
from quackmq.protocols.line.codec.messages import (
    Choose,
    Connect,
    Entry,
    Lines,
    Message,
    Rejection,
    Role,
    Word,
    encode,
    parse,
)

#: Pause before a topic that answered `retry` is tried again.
RETRY_S: Final = 0.005
#: A slow publisher publishes this many times less often.
_SLOWER: Final = 10
#: The rate on which slow publishers are based if the others publish as fast as possible.
_USUAL_RATE: Final = 100.0
#: How often a busy publisher checks whether it should end.
CHECK_S: Final = 0.05
#: The content of an entry, see `make_content`.
_CONTENT: Final = re.compile(rb"(p[0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,19}) \.*")
_READ_BYTES: Final = 64 * shared_limits.KIB
_IN: Final = 0
_OUT: Final = 1


class Behaviour(StrEnum):
    STEADY = "steady"
    #: As a subscriber, answers late; as a publisher, publishes at a tenth of the rate.
    SLOW = "slow"
    #: Stops answering but continues to read.
    SILENT = "silent"
    #: Exits before it answers an entry.
    DYING = "dying"
    #: Subscribes, leaves, and returns after the last publish.
    LATE = "late"
    #: A program of the user, which behaves as it likes.
    PROGRAM = "program"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process."""

    role: Role
    id: str
    topics: list[str]
    control_fd: int
    behaviour: Behaviour = Behaviour.STEADY
    #: Publisher: entries per second (None: as fast as possible) and duration.
    rate: float | None = None
    seconds: float = 0.0
    #: Publisher: the largest number of entries, over all topics.
    entries: int = 0
    entry_bytes: int = 100
    #: Slow subscriber: its answer time.
    answer_ms: int = 0
    #: Silent or dying subscriber: the number of entries that it answers first.
    after: int = 0
    #: The length of a slice of time in the report.
    slice_ms: int = 100


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one process. `entries` by topic: different entries that the broker accepted
    from a publisher, or that a subscriber answered."""

    entries: dict[str, int]
    retried: int = 0
    rejected: int = 0
    #: Entries that were received again, and entries that came after a later one of their publisher
    #: and topic.
    doubled: int = 0
    reordered: int = 0
    #: Whether both sides sent `terminate`.
    terminated: bool = False
    #: The latency histogram of each slice of time since the start, see `Latencies`.
    latencies: dict[int, dict[int, int]] = {}


class ConnectionEnded(Exception):
    """The broker sent `terminate` or closed the connection, or the experiment is over."""

    def __init__(self, *, terminated: bool = False) -> None:
        self.terminated = terminated


def make_content(publisher: str, number: int, sent_ns: int, size: int) -> bytes:
    return (b"%b %d %d " % (publisher.encode(), number, sent_ns)).ljust(size, b".")


def parse_content(content: bytes) -> tuple[str, int, int] | None:
    """Return the publisher, number and time of an entry that `make_content` made; None for the
    entry of another program."""
    found = _CONTENT.fullmatch(content)
    if found is None or int(found[2]) >= limits.EXPERIMENT_ENTRIES:
        return None
    return found[1].decode(), int(found[2]), int(found[3])


# --- the two programs -----------------------------------------------------------------------


def publish(part: Part, peer: Peer) -> Report:
    """Publish entries until the time is over, `part.entries` are accepted, or the runner asks to
    end; then terminate. Return the counts."""
    peer.connect(part)
    end_s = peer.wait_for_start() / 1e9 + part.seconds
    schedule = PublishSchedule(part)
    accepted: Counter[str] = Counter(dict.fromkeys(part.topics, 0))
    answers: Counter[Word] = Counter()
    try:
        while sum(accepted.values()) < part.entries and peer.wait_until(schedule.due_s, end_s):
            topic = schedule.topic
            # The number grows only when an entry is accepted, so a retried entry keeps its number
            # and the accepted entries have no gap.
            entry = make_content(part.id, accepted[topic], time.monotonic_ns(), part.entry_bytes)
            peer.send_message(Entry(topic, entry))
            answer = peer.receive_word()
            answers[answer] += 1
            accepted[topic] += answer is Word.SUCCESSFUL
            schedule.record_answer(answer is Word.SUCCESSFUL)
        peer.report_done()
        terminated = peer.terminate()
    except ConnectionEnded as ended:
        terminated = ended.terminated
    return Report(
        entries=dict(accepted),
        retried=answers[Word.RETRY],
        rejected=answers[Word.REJECT],
        terminated=terminated,
    )


class PublishSchedule:
    """Decide which topic a publisher tries next, and when. It visits its topics in turn at its
    rate. A topic that is full pauses while the others continue."""

    def __init__(self, part: Part) -> None:
        self._interval_s = 1 / part.rate if part.rate else 0.0
        if part.behaviour is Behaviour.SLOW:
            self._interval_s = _SLOWER / (part.rate or _USUAL_RATE)
        #: When each topic was last tried, or may be tried again.
        self._tried_s = dict.fromkeys(part.topics, 0.0)
        self._due_s = time.monotonic()

    @property
    def topic(self) -> str:
        """Return the topic to try next: the one that was tried longest ago."""
        return min(self._tried_s, key=self._tried_s.__getitem__)

    @property
    def due_s(self) -> float:
        """Return when to try `topic`, by the monotonic clock."""
        return max(self._due_s, self._tried_s[self.topic])

    def record_answer(self, is_accepted: bool) -> None:
        """Record that `topic` was tried now. The rate counts accepted entries only, so a refused
        entry is retried without waiting for the next interval."""
        topic, now_s = self.topic, time.monotonic()
        self._tried_s[topic] = now_s if is_accepted else now_s + RETRY_S
        if is_accepted:
            # After the broker was slow, missed entries are not sent all at once.
            self._due_s = max(self._due_s + self._interval_s, now_s - self._interval_s)


def subscribe(part: Part, peer: Peer) -> Report:
    """Receive entries and answer each one, as the behaviour of the part says, until the runner asks
    to end; then terminate. Return the counts."""
    peer.connect(part)
    if part.behaviour is Behaviour.LATE:  # it returns as a steady subscriber
        peer.wait_for_start()
        return Report(entries={}, terminated=peer.terminate())
    start_ns = peer.wait_for_start()
    received = ReceivedEntries(start_ns, part.slice_ms)
    try:
        while (entry := peer.receive_entry_or_end()) is not None:
            # Silent and dying subscribers answer some entries first, so they end in the middle of
            # the stream.
            if received.answered >= part.after:
                if part.behaviour is Behaviour.DYING:
                    _die(peer, received)
                if part.behaviour is Behaviour.SILENT:
                    peer.read_without_answering()
            arrived_ns = time.monotonic_ns()
            if part.answer_ms:
                peer.sleep(part.answer_ms / 1000)
            peer.send_message(Word.SUCCESSFUL)
            received.note(entry, arrived_ns)
        terminated = peer.terminate()
    except ConnectionEnded as ended:
        terminated = ended.terminated
    return received.report(terminated)


def _die(peer: Peer, received: ReceivedEntries) -> NoReturn:
    """Report the counts to the runner, then exit without telling the broker."""
    peer.send_to_runner(
        ["report", msgspec.to_builtins(received.report(terminated=False), str_keys=True)]
    )
    os._exit(1)


@dataclass(slots=True)
class ReceivedEntries:
    """The entries that a subscriber has answered."""

    start_ns: int
    slice_ms: int
    answered: int = 0
    doubled: int = 0
    reordered: int = 0
    entries: Counter[str] = field(default_factory=Counter)
    latencies: Latencies = field(default_factory=Latencies)
    #: One byte per entry, by topic and publisher: 1 if it was received.
    numbers: dict[tuple[str, str], bytearray] = field(default_factory=dict)

    def note(self, entry: Entry, arrived_ns: int) -> None:
        """Count an answered entry. An entry that was received before counts as doubled, and its
        latency is not counted again. An entry counts as reordered if a later one of its publisher
        and topic was received before. Entries of other programs have no number and no time, so they
        are only counted."""
        self.answered += 1
        content = parse_content(entry.content)
        if content is None:
            self.entries[entry.topic] += 1
            return
        publisher, index, sent_ns = content
        marks = self.numbers.setdefault((entry.topic, publisher), bytearray())
        if index >= len(marks):
            marks.extend(bytes(index + 1 - len(marks)))
        elif marks[index]:
            self.doubled += 1
            return
        else:
            self.reordered += 1
        marks[index] = 1
        self.entries[entry.topic] += 1
        # The number of the slice of time in which the entry arrived.
        when = max(0, arrived_ns - self.start_ns) // (self.slice_ms * 1_000_000)
        self.latencies.add(when, arrived_ns - sent_ns)

    def report(self, terminated: bool) -> Report:
        """Return the counts as the message for the runner."""
        return Report(
            entries=dict(self.entries),
            doubled=self.doubled,
            reordered=self.reordered,
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
        self._should_end = False
        self._last_check_s = 0.0

    # --- with the broker ---

    def connect(self, part: Part) -> None:
        """Connect and choose the topics. Exits if the broker refuses."""
        self._ask(Connect(part.role, part.id))
        self._ask(Word.END)
        for topic in part.topics:
            self._ask(Choose(part.role, part.id, topic))
        self._ask(Word.END)

    def send_message(self, message: Message) -> None:
        """Write the whole message to the broker. Raises ConnectionEnded if the broker has closed
        the pipe."""
        data = memoryview(encode(message))
        try:
            while data:
                data = data[os.write(_OUT, data) :]
        except BrokenPipeError:
            raise ConnectionEnded from None

    def receive_word(self) -> Word:
        """Return the next answer without its reason. Raises ConnectionEnded at the end of the
        connection."""
        answer = self._receive_answer()
        return Word.REJECT if isinstance(answer, Rejection) else answer

    def receive_entry_or_end(self) -> Entry | None:
        """Return the next entry, or None when the runner asks the peer to end. Raises
        ConnectionEnded when the broker ends the connection. Other messages are ignored."""
        while (line := self._lines.next_line()) is None:
            if self.should_end(None, _IN):
                return None
        message = _parse_line(line)
        if message is Word.TERMINATE:
            raise ConnectionEnded(terminated=True)
        return message if isinstance(message, Entry) else self.receive_entry_or_end()

    def terminate(self) -> bool:
        """Send `terminate` and wait for `terminate` from the broker; return True. Entries received
        meanwhile stay unanswered. Raises ConnectionEnded if the broker closes the connection
        instead."""
        # The broker may have sent its own `terminate` and closed the pipe. That message is still to
        # be read below.
        with suppress(ConnectionEnded):
            self.send_message(Word.TERMINATE)
        while self._receive_message() is not Word.TERMINATE:
            pass
        return True

    def sleep(self, seconds: float) -> None:
        """Sleep for this time, or until the runner asks the peer to end."""
        until_s = time.monotonic() + seconds
        while (remaining_s := until_s - time.monotonic()) > 0 and not self.should_end(remaining_s):
            pass

    def read_without_answering(self) -> NoReturn:
        """Read until the connection ends, without answering."""
        while True:
            self._receive()
            while self._lines.next_line() is not None:
                pass

    # --- with the runner of the experiment ---

    def send_to_runner(self, message: list[object]) -> None:
        """Send a message to the runner. Exits if the runner is gone."""
        try:
            self._control.sendall(msgspec.json.encode(message) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(1) from None

    def wait_for_start(self) -> int:
        """Report `ready` and wait for the start; return the start time."""
        self.send_to_runner(["ready"])
        while (command := self._receive_command()) is None:
            pass
        if command[0] != "go":
            raise ProtocolError(f"{command!r:.100} instead of the start of an experiment")
        return int(str(command[1]))

    def report_done(self) -> None:
        """Report `done` and wait until the runner asks the peer to end."""
        self.send_to_runner(["done"])
        while not self.should_end(None, _IN):
            pass

    def wait_until(self, start_s: float, end_s: float) -> bool:
        """Wait until `start_s` and return True. Return False if the peer should end before, by
        command or because `end_s` has passed."""
        while (now_s := time.monotonic()) < end_s:
            # A publisher that is never early still looks for commands now and then, but not before
            # each entry: the check costs a system call.
            if now_s < start_s or now_s - self._last_check_s >= CHECK_S:
                self._last_check_s = now_s
                if self.should_end(min(start_s, end_s) - now_s):
                    return False
            if time.monotonic() >= start_s:
                return True
        return False

    def should_end(self, wait_s: float | None, also: int | None = None) -> bool:
        """Return whether the runner has asked the peer to end. Wait for its command up to `wait_s`
        (None: without limit). If `also` is given, also return when that descriptor is readable, and
        receive its input."""
        sources: list[socket.socket | int] = [self._control]
        if also is not None:
            sources.append(also)
        # The command may have been read together with an earlier one.
        if not self._should_end and b"\n" not in self._commands:
            wait_s = None if wait_s is None else max(0.0, wait_s)
            readable = select.select(sources, [], [], wait_s)[0]
            if also in readable:
                self._receive()
            if self._control not in readable:
                return False
        self._should_end = self._should_end or self._receive_command() == ["end"]
        return self._should_end

    # --- helpers ---

    def _ask(self, message: Message) -> None:
        """Send a message and wait for `accept`. Exits if the broker refuses."""
        self.send_message(message)
        answer = self._receive_answer()
        if answer is not Word.ACCEPT:
            reason = f": {answer.reason}" if isinstance(answer, Rejection) else ""
            raise SystemExit(f"{message} was refused{reason}")

    def _receive_answer(self) -> Word | Rejection:
        """Return the next answer. Raises ConnectionEnded at the end of the connection."""
        answer = self._receive_message()
        if answer is Word.TERMINATE:
            raise ConnectionEnded(terminated=True)
        assert isinstance(answer, Word | Rejection), f"{answer} is not an answer to a publisher"
        return answer

    def _receive_message(self) -> Message:
        while (line := self._lines.next_line()) is None:
            self._receive()
        return _parse_line(line)

    def _receive(self) -> None:
        data = os.read(_IN, _READ_BYTES)
        if not data:
            raise ConnectionEnded
        self._lines.receive(data)

    def _receive_command(self) -> list[object] | None:
        """Return the next command, or None if it is still incomplete."""
        end = self._commands.find(b"\n")
        if end < 0:
            data = self._control.recv(shared_limits.KIB)
            if not data:  # the runner is gone
                raise SystemExit(1)
            self._commands += data
            end = self._commands.find(b"\n")
            if end < 0:
                return None
        line = bytes(self._commands[:end])
        del self._commands[: end + 1]
        return msgspec.json.decode(line, type=list[object])


def _parse_line(line: bytes | Exception) -> Message:
    if isinstance(line, Exception):
        raise line
    return parse(line)


def main() -> None:
    """Run the part in the first argument of this process, and send its report to the runner."""
    part = msgspec.json.decode(sys.argv[1], type=Part)
    # Move the socket to the lowest free descriptor: `select` accepts none above 1023, and large
    # experiments use more.
    lowest_fd = os.dup(part.control_fd)
    os.close(part.control_fd)
    with socket.socket(fileno=lowest_fd) as control:
        peer = Peer(control)
        report = (publish if part.role is Role.PUB else subscribe)(part, peer)
        peer.send_to_runner(["report", msgspec.to_builtins(report, str_keys=True)])


if __name__ == "__main__":
    main()
