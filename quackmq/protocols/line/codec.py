r"""The line protocol of publishers and subscribers, from the broker's side: bytes in, events out.

A message is a line that ends with a newline, or a carriage return and a newline. Its words are
parted by one space:

    pub ID connect   sub ID connect   end   pub ID topic K   sub ID topic K   topic K [entry]
    accept           reject           successful             retry            terminate

**Entries.** The document speaks of QUACKSIZE bytes, and not of where a shorter entry ends; its
brackets may be a placeholder, or sent. Here they are sent, and the line ends the entry: it is all
between the `[` behind the topic and the `]` before the line's end. Brackets inside need no care;
spaces at its ends, an empty entry and a terminal's carriage return leave no doubt. Four bytes are
written as two: `\\` for the backslash, and `\n`, `\r` and `\0` for newline, carriage return and
zero, where programs stop that read lines or C's strings. Received as they are, the last two are
taken; any other byte stands for itself. So a message can be typed, any bytes can be sent, and after
a bad message the next one is found at the next line. What lost: entries of a fixed size, padded
(nobody can type them, and padding cannot be told from content); a size before the entry (not the
document's message, and after one wrong number all others are misread); base64 (unreadable).

**Conversation.** Each state knows some messages. Anything else is out of order and refused, which
changes nothing; in the state *new* it also ends the conversation. The first of the answers takes
the conversation on, any other one leaves it where it is. Messages without an answer take it on at
once.

    state           message        answers                     then
    --------------- -------------- --------------------------- -------------
    new             pub connect    accept, reject              pub named
    new             sub connect    accept, reject              sub named
    new             terminate      terminate                   over
    pub named       end            accept, reject              pub choosing
    pub named       terminate      terminate                   over
    pub choosing    pub topic      accept, reject              pub choosing
    pub choosing    end            accept, reject              publishing
    pub choosing    terminate      terminate                   over
    publishing      entry          successful, retry, reject   publishing
    publishing      terminate      terminate                   over
    sub named       end            accept, reject              sub choosing
    sub named       terminate      terminate                   over
    sub choosing    sub topic      accept, reject              sub choosing
    sub choosing    end            accept, reject              listening
    sub choosing    terminate      terminate                   over
    listening       terminate      terminate                   over
    delivering      successful     -                           listening
    delivering      terminate      terminate                   over

Beside what is received: an entry that the broker sends takes *listening* to *delivering*, so there
is one at a time; and the broker may say `terminate` at any time.

**Strangers.** A peer that has not connected is somebody else's client until it proves otherwise: a
web page can send any text to any port, behind the head of an HTTP request. So the first line that
is refused before `connect` is accepted ends the conversation, and so does the first byte that no
line holds there. Nothing behind it is looked at.

Promised: any bytes, however they are cut, give the same events, given the same answers, or a
ProtocolError, after which the conversation is over. Half a line takes bounded memory; a line too
long is read past and told of as `Refused`. While an answer is owed the next message stays unread,
and `unread_bytes` says how much waits: the shell stops reading then. Not here: timers, and whether
an id or a topic exists. A client needs no more than `Lines`, `parse` and `encode`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest, ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.line import limits
from quackmq.serving import limits as serving_limits


class Role(StrEnum):
    PUB = "pub"
    SUB = "sub"


class Connect(NamedTuple):
    role: Role
    id: str


class Choose(NamedTuple):
    """A topic that this publisher or subscriber is interested in."""

    role: Role
    id: str
    topic: str


class Entry(NamedTuple):
    topic: str
    content: bytes


class Word(StrEnum):
    """The messages that are one word."""

    END = "end"
    ACCEPT = "accept"
    REJECT = "reject"
    SUCCESSFUL = "successful"
    RETRY = "retry"
    TERMINATE = "terminate"


Message = Connect | Choose | Entry | Word


class Refused(NamedTuple):
    """What came is no message, or none for now: to be answered with `reject`."""

    error: QuackError


Event = Message | Refused


# --- messages as lines ----------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The message as a line, with its end."""
    if isinstance(message, Word):
        return _LINES[message]
    if isinstance(message, Entry):
        return b"topic %b [%b]\n" % (message.topic.encode(), _escaped(message.content))
    if isinstance(message, Connect):
        return f"{message.role} {message.id} connect\n".encode()
    return f"{message.role} {message.id} topic {message.topic}\n".encode()


def parse(line: bytes, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> Message:
    """Of a line without its end. InvalidRequest, mostly as ProtocolError, for what is no message;
    RecordTooLarge for an entry of more than `entry_bytes`."""
    word = _WORDS.get(line)
    if word is not None:
        return word
    if line.startswith(b"topic "):
        return _entry(line, entry_bytes)
    match line.split(b" "):
        case [(b"pub" | b"sub") as role, name, b"connect"]:
            return Connect(Role(role.decode()), _name("id", name, shared_limits.NAME_BYTES))
        case [(b"pub" | b"sub") as role, name, b"topic", topic]:
            return Choose(
                Role(role.decode()), _name("id", name, shared_limits.NAME_BYTES), _topic(topic)
            )
    raise ProtocolError(f"{_shown(line)} is no message; words are parted by one space")


def check_size(size: int, entry_bytes: int) -> None:
    """RecordTooLarge for an entry of more."""
    if size > entry_bytes:
        raise RecordTooLarge(f"an entry of {size} bytes; {entry_bytes} are taken")


class Lines:
    """One peer's bytes, as lines. `receive` takes them, `next_line` gives them one at a time."""

    __slots__ = ("_buffer", "_half", "_line_bytes", "_position", "_seen_bytes")

    def __init__(self, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> None:
        #: Every byte of an entry may be written as two.
        self._line_bytes = limits.LINE_HEAD_BYTES + 2 * entry_bytes
        self._buffer = b""
        self._position = 0
        #: Of the line that is not whole: what is kept of it, and how much has come of it.
        self._half = bytearray()
        self._seen_bytes = 0

    @property
    def half(self) -> bytes:
        """The beginning of the line that is not whole."""
        return bytes(self._half)

    @property
    def is_amid(self) -> bool:
        """Whether something has come that was not given out as a line."""
        return self._seen_bytes > 0 or self._position < len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        """How much has come that `next_line` has not looked at."""
        return len(self._buffer) - self._position

    def receive(self, data: bytes) -> None:
        if self._position < len(self._buffer):
            data = self._buffer[self._position :] + data
        self._buffer = data
        self._position = 0

    def next_line(self) -> bytes | RecordTooLarge | None:
        """The next line, or that it is too long, or None until more has come. ProtocolError for one
        that does not end."""
        begin = self._position
        end = self._buffer.find(b"\n", begin)
        if end < 0:
            self._see(len(self._buffer) - begin)
            if self._seen_bytes <= self._line_bytes:
                self._half += memoryview(self._buffer)[begin:]
            else:
                self._half.clear()
            self._buffer = b""
            self._position = 0
            return None
        self._see(end - begin)
        self._position = end + 1
        size, self._seen_bytes = self._seen_bytes, 0
        if size > self._line_bytes:
            self._half.clear()
            return RecordTooLarge(f"a line of {size} bytes; {self._line_bytes} are taken")
        line = self._buffer[begin:end]
        if self._half:
            line = bytes(self._half) + line
            self._half.clear()
        return line[:-1] if line.endswith(b"\r") else line

    def _see(self, size: int) -> None:
        self._seen_bytes += size
        most = self._line_bytes + limits.LINE_LEFT_OUT_BYTES
        if self._seen_bytes > most:
            raise ProtocolError(f"a line of more than {most} bytes: messages end with a newline")


# --- the conversation -----------------------------------------------------------------------


class State(StrEnum):
    NEW = "new"
    PUB_NAMED = "pub named"
    PUB_CHOOSING = "pub choosing"
    PUBLISHING = "publishing"
    SUB_NAMED = "sub named"
    SUB_CHOOSING = "sub choosing"
    LISTENING = "listening"
    DELIVERING = "delivering"
    OVER = "over"


class Kind(StrEnum):
    """What the states tell apart."""

    PUB_CONNECT = "pub connect"
    SUB_CONNECT = "sub connect"
    PUB_TOPIC = "pub topic"
    SUB_TOPIC = "sub topic"
    END = "end"
    ENTRY = "entry"
    SUCCESSFUL = "successful"
    TERMINATE = "terminate"
    #: Words that only a broker says.
    ANSWER = "answer"


class Step(NamedTuple):
    """The answers that a message may get, and the state behind the first of them."""

    answers: tuple[Word, ...]
    then: State


_JUDGED: Final = (Word.ACCEPT, Word.REJECT)
_STORED: Final = (Word.SUCCESSFUL, Word.RETRY, Word.REJECT)
_LAST: Final = {Kind.TERMINATE: Step((Word.TERMINATE,), State.OVER)}

#: As it is drawn above.
TABLE: Final[Mapping[State, Mapping[Kind, Step]]] = {
    State.NEW: {
        Kind.PUB_CONNECT: Step(_JUDGED, State.PUB_NAMED),
        Kind.SUB_CONNECT: Step(_JUDGED, State.SUB_NAMED),
        **_LAST,
    },
    State.PUB_NAMED: {Kind.END: Step(_JUDGED, State.PUB_CHOOSING), **_LAST},
    State.PUB_CHOOSING: {
        Kind.PUB_TOPIC: Step(_JUDGED, State.PUB_CHOOSING),
        Kind.END: Step(_JUDGED, State.PUBLISHING),
        **_LAST,
    },
    State.PUBLISHING: {Kind.ENTRY: Step(_STORED, State.PUBLISHING), **_LAST},
    State.SUB_NAMED: {Kind.END: Step(_JUDGED, State.SUB_CHOOSING), **_LAST},
    State.SUB_CHOOSING: {
        Kind.SUB_TOPIC: Step(_JUDGED, State.SUB_CHOOSING),
        Kind.END: Step(_JUDGED, State.LISTENING),
        **_LAST,
    },
    State.LISTENING: {**_LAST},
    State.DELIVERING: {Kind.SUCCESSFUL: Step((), State.LISTENING), **_LAST},
    State.OVER: {},
}


class Conversation:
    """With one peer. `receive` takes its bytes, `next_event` gives what they mean, one at a time;
    `answer` and `deliver` give the bytes to send. For one thread at a time."""

    __slots__ = (
        "_entry_bytes",
        "_lines",
        "_opening",
        "_owed",
        "_peer",
        "_refusals",
        "_state",
        "_topics",
    )

    def __init__(self, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> None:
        """`entry_bytes` is the document's QUACKSIZE."""
        self._entry_bytes = entry_bytes
        self._lines = Lines(entry_bytes)
        self._state = State.NEW
        self._peer: Connect | None = None
        #: In the order in which they were accepted.
        self._topics: dict[str, None] = {}
        #: The message that waits for its answer.
        self._owed: tuple[Message, Step] | None = None
        self._refusals = 0
        self._opening = b""

    @property
    def opening(self) -> bytes:
        """The first bytes that came, until the peer has connected."""
        return self._opening

    @property
    def state(self) -> State:
        return self._state

    @property
    def peer(self) -> Connect | None:
        """Who it is, once that was accepted."""
        return self._peer

    @property
    def topics(self) -> tuple[str, ...]:
        """Those accepted, in that order."""
        return tuple(self._topics)

    @property
    def owes_answer(self) -> bool:
        return self._owed is not None

    @property
    def is_amid(self) -> bool:
        """Whether something has come and is not yet told of: perhaps half a line."""
        return self._lines.is_amid

    @property
    def unread_bytes(self) -> int:
        """How much waits behind the message whose answer is owed."""
        return self._lines.unread_bytes

    def receive(self, data: bytes) -> None:
        """What comes after the end is dropped."""
        if self._state is State.OVER:
            return
        if self._state is State.NEW and len(self._opening) < serving_limits.OPENING_BYTES:
            self._opening = (self._opening + data)[: serving_limits.OPENING_BYTES]
        self._lines.receive(data)

    def receive_successful(self, data: bytes) -> bool:
        """`receive` and `next_event` in one step, for what comes most: all that came is the answer
        that is awaited. False, and nothing was received, where it is something else."""
        if (
            data != _SUCCESSFUL
            or self._state is not State.DELIVERING
            or self._owed is not None
            or self._lines.is_amid
        ):
            return False
        self._state = State.LISTENING
        self._refusals = 0
        return True

    def next_event(self) -> Event | None:
        """Return the next event; None until more has come, or the answer was given, and when all
        is over. ProtocolError, which ends the conversation, for a line without an end, for more
        refusals in a row than any slip explains, and for the first before the peer connected."""
        if self._owed is not None or self._state is State.OVER:
            return None
        try:
            line = self._lines.next_line()
            if line is None:
                self._check_half()
                return None
            event = self._event(line)
            if isinstance(event, Refused):
                self._check_refusal(event)
        except ProtocolError:
            is_stranger = self._state is State.NEW
            self._end()
            if is_stranger:
                raise ProtocolError(_STRANGER) from None
            raise
        return event

    def answer(self, word: Word) -> bytes:
        """Of the message that `next_event` gave; `terminate` also without one."""
        if word is Word.TERMINATE:
            assert self._state is not State.OVER, "that was said"
            self._end()
            return _LINES[word]
        assert self._owed is not None, "no message waits for an answer"
        message, step = self._owed
        assert word in step.answers, f"{word} is no answer to {message}"
        self._owed = None
        if word is step.answers[0]:
            self._state = step.then
            if isinstance(message, Connect):
                self._peer = message
            elif isinstance(message, Choose):
                self._topics[message.topic] = None
        return _LINES[word]

    def deliver(self, entry: Entry, line: bytes | None = None) -> bytes:
        """To a subscriber that listens; `successful` will be the next event. Who sends many the
        same may give its `line`, encoded once. RecordTooLarge, and then nothing has changed."""
        assert self._state is State.LISTENING and self._owed is None, f"it is {self._state}"
        assert entry.topic in self._topics, f"{entry.topic} was not asked for"
        check_size(len(entry.content), self._entry_bytes)
        self._state = State.DELIVERING
        return encode(entry) if line is None else line

    def _event(self, line: bytes | RecordTooLarge) -> Event:
        try:
            if isinstance(line, RecordTooLarge):
                raise line
            message = parse(line, self._entry_bytes)
            step = TABLE[self._state].get(kind_of(message))
            if step is None:
                raise ProtocolError(f"{_shown(line)} is out of order: the state is {self._state}")
            self._check(message)
        except InvalidRequest as error:
            self._refusals += 1
            return Refused(error)
        self._refusals = 0
        if step.answers:
            self._owed = message, step
        else:
            self._state = step.then
        return message

    def _check_half(self) -> None:
        """Raise ProtocolError if a stranger has sent a byte that no line holds at this point."""
        if self._state is State.NEW and _NO_TEXT.search(self._lines.half):
            raise ProtocolError(_STRANGER)

    def _check_refusal(self, refused: Refused) -> None:
        """Raise ProtocolError if the peer gets no other chance after this refusal."""
        if self._state is State.NEW:
            raise ProtocolError(_STRANGER)
        if self._refusals > limits.LINE_REFUSALS:
            raise ProtocolError(
                f"{self._refusals} bad messages in a row; the last: {refused.error}"
            )

    def _check(self, message: Message) -> None:
        """What the table does not tell: that ids and topics are those agreed on."""
        if isinstance(message, Entry):
            if message.topic not in self._topics:
                raise InvalidRequest(f"topic {message.topic} was not announced before the end")
        elif isinstance(message, Choose):
            assert self._peer is not None, "else the message is out of order"
            if message.id != self._peer.id:
                raise InvalidRequest(f"{message.id} is not connected here, but {self._peer.id}")
            if len(self._topics) >= limits.LINE_TOPICS and message.topic not in self._topics:
                raise InvalidRequest(f"there are {limits.LINE_TOPICS} topics; connect once more")

    def _end(self) -> None:
        self._state = State.OVER
        self._owed = None
        self._lines = Lines(self._entry_bytes)


def kind_of(message: Message) -> Kind:
    if isinstance(message, Word):
        return _KINDS.get(message, Kind.ANSWER)
    if isinstance(message, Entry):
        return Kind.ENTRY
    if isinstance(message, Connect):
        return Kind.PUB_CONNECT if message.role is Role.PUB else Kind.SUB_CONNECT
    return Kind.PUB_TOPIC if message.role is Role.PUB else Kind.SUB_TOPIC


# --- helpers --------------------------------------------------------------------------------

_WORDS: Final[Mapping[bytes, Word]] = {word.value.encode(): word for word in Word}
_LINES: Final[Mapping[Word, bytes]] = {word: f"{word}\n".encode() for word in Word}
_SUCCESSFUL: Final = _LINES[Word.SUCCESSFUL]
_KINDS: Final[Mapping[Word, Kind]] = {
    Word.END: Kind.END,
    Word.SUCCESSFUL: Kind.SUCCESSFUL,
    Word.TERMINATE: Kind.TERMINATE,
}

_ESCAPES: Final[Mapping[bytes, bytes]] = {
    b"\\": b"\\\\",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\0": b"\\0",
}
_ESCAPED: Final[Mapping[bytes, bytes]] = {two: one for one, two in _ESCAPES.items()}
#: The same whatever came, and however it was cut.
_STRANGER: Final = "its first message is none: begin with pub ID connect or sub ID connect"
#: Bytes that are in no id: controls, and those that UTF-8 does not use.
_NO_TEXT: Final = re.compile(rb"[\x00-\x0c\x0e-\x1f\x7f\xc0\xc1\xf5-\xff]")
_TO_ESCAPE: Final = re.compile(rb"[\\\n\r\0]")
_ESCAPE: Final = re.compile(rb"\\.?", re.DOTALL)
#: Of what a peer sent, in a message to it.
_SHOWN_CHARS: Final = 40


def _escaped(content: bytes) -> bytes:
    return _TO_ESCAPE.sub(lambda found: _ESCAPES[found.group()], content)


def _unescaped(written: bytes) -> bytes:
    if b"\\" not in written:
        return written
    try:
        return _ESCAPE.sub(lambda found: _ESCAPED[found.group()], written)
    except KeyError as error:
        raise ProtocolError(
            f"{_shown(error.args[0])} in an entry: a backslash stands before another, n, r or 0"
        ) from None


def _entry(line: bytes, entry_bytes: int) -> Entry:
    _, topic, *rest = line.split(b" ", 2)
    if not rest or not rest[0].startswith(b"[") or not rest[0].endswith(b"]"):
        raise ProtocolError(f"{_shown(line)} is no entry: write topic K [entry]")
    content = _unescaped(rest[0][1:-1])
    check_size(len(content), entry_bytes)
    return Entry(_topic(topic), content)


def _topic(word: bytes) -> str:
    return _name("topic", word, shared_limits.TOPIC_NAME_CHARS)


def _name(what: str, word: bytes, most_bytes: int) -> str:
    if not 1 <= len(word) <= most_bytes:
        raise InvalidRequest(f"the {what} takes 1 to {most_bytes} bytes, not {len(word)}")
    try:
        name = word.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"the {what} {_shown(word)} is not UTF-8") from None
    if not name.isprintable():
        raise InvalidRequest(f"the {what} {name!r} has control characters in it")
    return name


def _shown(line: bytes) -> str:
    text = line[: _SHOWN_CHARS * 4].decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
