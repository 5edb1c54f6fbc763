"""The line protocol of publishers and subscribers, from the broker's side: bytes in, events out.

`messages` draws the lines.

**Conversation.** Each state allows some messages. Any other message is out of order: it is refused
and changes nothing. In the state *new* it also ends the conversation. The first of the listed
answers leads to the next state; any other answer leaves the state unchanged. A message without an
answer leads to the next state at once.

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
    listening       getentry       reject                      listening
    listening       terminate      terminate                   over
    delivering      successful     -                           listening
    delivering      getentry       reject                      delivering
    delivering      terminate      terminate                   over

In addition, an entry that the broker sends leads from *listening* to *delivering*. So a subscriber
has one unanswered entry at a time. The other answer to `getentry` is `entry` (`polling.py`). The
broker may send `terminate` at any time.

**Strangers.** A peer that has not connected may be a client of another protocol. A web page, for
example, can send any text to any port, behind the head of an HTTP request. So before `connect` is
accepted, the first refused line ends the conversation, and so does the first byte that no line may
contain. The bytes behind it are not read.

Promises:

- The same bytes and the same answers give the same events, however the bytes are split. Invalid
  bytes may raise ProtocolError; then the conversation is over.
- An incomplete line takes bounded memory. A line that is too long is skipped and reported as
  `Refused`.
- While a message is unanswered, the next one stays undecoded. `unread_bytes` says how many bytes
  wait, so that the connection can stop reading.

Timers and checks of ids and topics are elsewhere. A client needs only `messages`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest, ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.line import limits
from quackmq.protocols.line.codec.messages import (
    LINE_BY_WORD,
    Choose,
    Connect,
    Entry,
    Lines,
    Message,
    Rejection,
    Role,
    Word,
    check_size,
    encode,
    parse,
)
from quackmq.protocols.line.codec.polling import EntryAnswer, GetEntry
from quackmq.protocols.line.codec.words import abbreviate
from quackmq.serving import limits as serving_limits


class Refused(NamedTuple):
    """A line that is invalid, or out of order. The answer is `reject`."""

    error: QuackError


Event = Message | Refused


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
    """The kinds of messages that the state table distinguishes."""

    PUB_CONNECT = "pub connect"
    SUB_CONNECT = "sub connect"
    PUB_TOPIC = "pub topic"
    SUB_TOPIC = "sub topic"
    END = "end"
    ENTRY = "entry"
    SUCCESSFUL = "successful"
    GETENTRY = "getentry"
    TERMINATE = "terminate"
    #: Words that only a broker sends.
    ANSWER = "answer"


#: How a peer writes the messages of more than one word.
_FORMS: Final[Mapping[Kind, str]] = {
    Kind.PUB_CONNECT: "pub ID connect",
    Kind.SUB_CONNECT: "sub ID connect",
    Kind.PUB_TOPIC: "pub ID topic K",
    Kind.SUB_TOPIC: "sub ID topic K",
    Kind.ENTRY: "topic K [entry]",
    Kind.GETENTRY: "getentry K LAST",
}


class Step(NamedTuple):
    """The possible answers to a message, and the state after the first of them."""

    answers: tuple[Word, ...]
    next_state: State


_ACCEPT_OR_REJECT: Final = (Word.ACCEPT, Word.REJECT)
_ENTRY_ANSWERS: Final = (Word.SUCCESSFUL, Word.RETRY, Word.REJECT)
_TERMINATE_STEP: Final = {Kind.TERMINATE: Step((Word.TERMINATE,), State.OVER)}

#: The table that is drawn at the top of this module.
TABLE: Final[Mapping[State, Mapping[Kind, Step]]] = {
    State.NEW: {
        Kind.PUB_CONNECT: Step(_ACCEPT_OR_REJECT, State.PUB_NAMED),
        Kind.SUB_CONNECT: Step(_ACCEPT_OR_REJECT, State.SUB_NAMED),
        **_TERMINATE_STEP,
    },
    State.PUB_NAMED: {Kind.END: Step(_ACCEPT_OR_REJECT, State.PUB_CHOOSING), **_TERMINATE_STEP},
    State.PUB_CHOOSING: {
        Kind.PUB_TOPIC: Step(_ACCEPT_OR_REJECT, State.PUB_CHOOSING),
        Kind.END: Step(_ACCEPT_OR_REJECT, State.PUBLISHING),
        **_TERMINATE_STEP,
    },
    State.PUBLISHING: {Kind.ENTRY: Step(_ENTRY_ANSWERS, State.PUBLISHING), **_TERMINATE_STEP},
    State.SUB_NAMED: {Kind.END: Step(_ACCEPT_OR_REJECT, State.SUB_CHOOSING), **_TERMINATE_STEP},
    State.SUB_CHOOSING: {
        Kind.SUB_TOPIC: Step(_ACCEPT_OR_REJECT, State.SUB_CHOOSING),
        Kind.END: Step(_ACCEPT_OR_REJECT, State.LISTENING),
        **_TERMINATE_STEP,
    },
    State.LISTENING: {Kind.GETENTRY: Step((Word.REJECT,), State.LISTENING), **_TERMINATE_STEP},
    State.DELIVERING: {
        Kind.SUCCESSFUL: Step((), State.LISTENING),
        Kind.GETENTRY: Step((Word.REJECT,), State.DELIVERING),
        **_TERMINATE_STEP,
    },
    State.OVER: {},
}


class Conversation:
    """The conversation with one peer.

    `receive` adds the peer's bytes, and `next_event` returns one event at a time. `answer` and
    `deliver` return the bytes to send. Not thread-safe.
    """

    __slots__ = (
        "_entry_bytes",
        "_lines",
        "_opening",
        "_unanswered",
        "_peer",
        "_refusals",
        "_state",
        "_topics",
    )

    def __init__(self, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> None:
        """`entry_bytes` is the specification's QUACKSIZE."""
        self._entry_bytes = entry_bytes
        self._lines = Lines(entry_bytes)
        self._state = State.NEW
        self._peer: Connect | None = None
        #: The accepted topics, in the order of their acceptance.
        self._topics: dict[str, None] = {}
        #: The message that waits for the broker's answer.
        self._unanswered: tuple[Message, Step] | None = None
        self._refusals = 0
        self._opening = b""

    @property
    def opening(self) -> bytes:
        """The first bytes of the connection. More are added only until the peer has connected."""
        return self._opening

    @property
    def state(self) -> State:
        return self._state

    @property
    def peer(self) -> Connect | None:
        """The accepted `connect` message; None before that."""
        return self._peer

    @property
    def topics(self) -> tuple[str, ...]:
        """The accepted topics, in the order of their acceptance."""
        return tuple(self._topics)

    @property
    def owes_answer(self) -> bool:
        return self._unanswered is not None

    @property
    def has_pending_bytes(self) -> bool:
        """Whether bytes have arrived that belong to no event yet, perhaps an incomplete line."""
        return self._lines.has_pending_bytes

    @property
    def unread_bytes(self) -> int:
        """The bytes that wait behind the unanswered message."""
        return self._lines.unread_bytes

    def receive(self, data: bytes) -> None:
        """Add received bytes. Bytes after the end of the conversation are dropped."""
        if self._state is State.OVER:
            return
        if self._state is State.NEW and len(self._opening) < serving_limits.OPENING_BYTES:
            self._opening = (self._opening + data)[: serving_limits.OPENING_BYTES]
        self._lines.receive(data)

    def receive_successful(self, data: bytes) -> bool:
        """Handle the most frequent bytes in one step: exactly the expected `successful`. Return
        False, and change nothing, for any other bytes.
        """
        if (
            data != _SUCCESSFUL
            or self._state is not State.DELIVERING
            or self._unanswered is not None
            or self._lines.has_pending_bytes
        ):
            return False
        self._state = State.LISTENING
        self._refusals = 0
        return True

    def next_event(self) -> Event | None:
        """Return the next event. Return None if bytes are missing, the last message is unanswered,
        or the conversation is over.

        Raise ProtocolError, which ends the conversation: for an endless line, for too many refusals
        in a row, and for the first refusal before the peer has connected.
        """
        if self._unanswered is not None or self._state is State.OVER:
            return None
        try:
            line = self._lines.next_line()
            if line is None:
                self._check_partial_line()
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

    def answer(self, word: Word, reason: str = "") -> bytes:
        """Answer the message that `next_event` has returned; return the bytes to send. `reject` may
        have a reason. `terminate` needs no message.
        """
        if word is Word.TERMINATE:
            assert self._state is not State.OVER, "terminate is sent once"
            self._end()
            return LINE_BY_WORD[word]
        assert self._unanswered is not None, "no message waits for an answer"
        message, step = self._unanswered
        assert word in step.answers, f"{word} is no answer to {message}"
        self._unanswered = None
        if word is step.answers[0]:
            self._state = step.next_state
            if isinstance(message, Connect):
                self._peer = message
            elif isinstance(message, Choose):
                self._topics[message.topic] = None
        return encode(Rejection(reason)) if reason else LINE_BY_WORD[word]

    def answer_entry(self, answer: EntryAnswer) -> bytes:
        """Answer the `getentry` that `next_event` has returned; return the bytes to send."""
        assert self._unanswered is not None and isinstance(self._unanswered[0], GetEntry)
        self._unanswered = None
        return encode(answer)

    def deliver(self, entry: Entry, line: bytes | None = None) -> bytes:
        """Return the line of an entry for a listening subscriber, whose next message must be
        `successful`. `line` is the encoded entry, if the caller has it. Raise RecordTooLarge, and
        change nothing, if the entry is too long.
        """
        assert self._state is State.LISTENING and self._unanswered is None, f"it is {self._state}"
        assert entry.topic in self._topics, f"{entry.topic} was not chosen"
        check_size(len(entry.content), self._entry_bytes)
        self._state = State.DELIVERING
        return encode(entry) if line is None else line

    def _event(self, line: bytes | RecordTooLarge) -> Event:
        """Parse a line and check it against the state; return the message or a refusal."""
        try:
            if isinstance(line, RecordTooLarge):
                raise line
            message = parse(line, self._entry_bytes)
            step = TABLE[self._state].get(kind_of(message))
            if step is None:
                expected = " or ".join(_FORMS.get(kind, kind) for kind in TABLE[self._state])
                raise ProtocolError(f"{abbreviate(line)} is out of order: expected {expected}")
            self._check(message)
        except InvalidRequest as error:
            self._refusals += 1
            return Refused(error)
        self._refusals = 0
        if step.answers:
            self._unanswered = message, step
        else:
            self._state = step.next_state
        return message

    def _check_partial_line(self) -> None:
        """Raise ProtocolError if a peer that has not connected sent a byte that no line may
        contain.
        """
        if self._state is State.NEW and _NO_TEXT.search(self._lines.partial_line):
            raise ProtocolError(_STRANGER)

    def _check_refusal(self, refused: Refused) -> None:
        """Raise ProtocolError if this refusal ends the conversation."""
        if self._state is State.NEW:
            raise ProtocolError(_STRANGER)
        if self._refusals > limits.LINE_REFUSALS:
            raise ProtocolError(
                f"{self._refusals} bad messages in a row; the last: {refused.error}"
            )

    def _check(self, message: Message) -> None:
        """Raise InvalidRequest if a message has another id or topic than those accepted before. The
        state table cannot check that.
        """
        if isinstance(message, Entry):
            if message.topic not in self._topics:
                raise InvalidRequest(f"topic {message.topic} was not announced before the end")
        elif isinstance(message, Choose):
            assert self._peer is not None, "else the message is out of order"
            if message.id != self._peer.id:
                raise InvalidRequest(
                    f"this connection is that of {self._peer.id}, not of {message.id}"
                )
            if len(self._topics) >= limits.LINE_TOPICS and message.topic not in self._topics:
                raise InvalidRequest(f"there are {limits.LINE_TOPICS} topics; connect once more")

    def _end(self) -> None:
        self._state = State.OVER
        self._unanswered = None
        # Drop the received bytes.
        self._lines = Lines(self._entry_bytes)


def kind_of(message: Message) -> Kind:
    """Return the kind of a message, by which the state table is indexed."""
    if isinstance(message, Rejection | EntryAnswer):
        return Kind.ANSWER
    if isinstance(message, GetEntry):
        return Kind.GETENTRY
    if isinstance(message, Word):
        return _KIND_BY_WORD.get(message, Kind.ANSWER)
    if isinstance(message, Entry):
        return Kind.ENTRY
    if isinstance(message, Connect):
        return Kind.PUB_CONNECT if message.role is Role.PUB else Kind.SUB_CONNECT
    return Kind.PUB_TOPIC if message.role is Role.PUB else Kind.SUB_TOPIC


# --- helpers --------------------------------------------------------------------------------

_SUCCESSFUL: Final = LINE_BY_WORD[Word.SUCCESSFUL]
_KIND_BY_WORD: Final[Mapping[Word, Kind]] = {
    Word.END: Kind.END,
    Word.SUCCESSFUL: Kind.SUCCESSFUL,
    Word.TERMINATE: Kind.TERMINATE,
}

#: One text for all invalid first messages, so that it does not depend on how bytes are split.
_STRANGER: Final = "begin with pub ID connect or sub ID connect"
#: Bytes that no id contains: control characters, and bytes that UTF-8 does not use.
_NO_TEXT: Final = re.compile(rb"[\x00-\x0c\x0e-\x1f\x7f\xc0\xc1\xf5-\xff]")
