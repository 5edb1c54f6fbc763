r"""The messages of the line protocol, and their lines.

A message is a line. It ends with a newline, or with a carriage return and a newline. Its words are
separated by one space:

    pub ID connect   sub ID connect   end   pub ID topic K   sub ID topic K   topic K [entry]
    accept           reject REASON    successful             retry            terminate

**Entries.** The specification has entries of QUACKSIZE bytes. It does not say where a shorter entry
ends, nor whether its brackets are sent. Here they are sent, and the line ends the entry: the entry
is everything between the `[` after the topic and the `]` at the end of the line. So an entry may
contain brackets, be empty, and begin or end with spaces. Four bytes are escaped: `\\` stands for
the backslash, and `\n`, `\r` and `\0` for newline, carriage return and zero, because programs that
read lines or C strings stop at these bytes. A carriage return or zero is also accepted unescaped.
Every other byte stands for itself. So a person can type a message, an entry can hold any bytes, and
after an invalid message the next line is valid again. docs/decisions/line-protocol.md has the
rejected alternatives.

**Reasons.** Behind `reject` the broker writes the error's code and a sentence for people. A peer
must accept `reject` without a reason, too: the model has none.

An incomplete line takes bounded memory. A line that is too long is skipped and reported as
RecordTooLarge.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import ProtocolError, RecordTooLarge
from quackmq.protocols.line import limits
from quackmq.protocols.line.codec.escapes import encode_reason, escape, parse_reason, unescape
from quackmq.protocols.line.codec.polling import (
    EntryAnswer,
    GetEntry,
    encode_answer,
    encode_getentry,
    parse_answer,
    parse_getentry,
)
from quackmq.protocols.line.codec.words import abbreviate, parse_id, parse_topic


class Role(StrEnum):
    PUB = "pub"
    SUB = "sub"


class Connect(NamedTuple):
    role: Role
    id: str


class Choose(NamedTuple):
    """A publisher or subscriber chooses a topic."""

    role: Role
    id: str
    topic: str


class Entry(NamedTuple):
    topic: str
    content: bytes


class Word(StrEnum):
    """The messages that consist of one word."""

    END = "end"
    ACCEPT = "accept"
    REJECT = "reject"
    SUCCESSFUL = "successful"
    RETRY = "retry"
    TERMINATE = "terminate"


class Rejection(NamedTuple):
    """The answer `reject` with its reason."""

    reason: str


Message = Connect | Choose | Entry | GetEntry | EntryAnswer | Rejection | Word


_WORD_BY_LINE: Final[Mapping[bytes, Word]] = {word.value.encode(): word for word in Word}
LINE_BY_WORD: Final[Mapping[Word, bytes]] = {word: f"{word}\n".encode() for word in Word}


def encode(message: Message) -> bytes:
    """Encode a message as a line, with its newline."""
    if isinstance(message, Word):
        return LINE_BY_WORD[message]
    if isinstance(message, Entry):
        return b"topic %b [%b]\n" % (message.topic.encode(), escape(message.content))
    if isinstance(message, Connect):
        return f"{message.role} {message.id} connect\n".encode()
    if isinstance(message, Rejection):
        return b"reject %b\n" % encode_reason(message.reason)
    if isinstance(message, GetEntry):
        return encode_getentry(message)
    if isinstance(message, EntryAnswer):
        return encode_answer(message)
    return f"{message.role} {message.id} topic {message.topic}\n".encode()


def parse(line: bytes, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> Message:
    """Parse a line without its newline. Raise InvalidRequest, usually ProtocolError, if it is not a
    message, and RecordTooLarge for an entry of more than `entry_bytes`."""
    word = _WORD_BY_LINE.get(line)
    if word is not None:
        return word
    if line.startswith(b"topic "):
        return _parse_entry(line, entry_bytes)
    if line.startswith(b"reject "):
        return Rejection(parse_reason(line.removeprefix(b"reject ")))
    match line.split(b" "):
        case [(b"pub" | b"sub") as role, name, b"connect"]:
            return Connect(Role(role.decode()), parse_id(name))
        case [(b"pub" | b"sub") as role, name, b"topic", topic]:
            return Choose(Role(role.decode()), parse_id(name), parse_topic(topic))
        case [b"getentry", *_]:
            return parse_getentry(line)
        case [b"entry", *_]:
            return parse_answer(line)
    raise ProtocolError(f"{abbreviate(line)} is no message; words are separated by one space")


def check_size(size: int, entry_bytes: int) -> None:
    """Raise RecordTooLarge if an entry of `size` bytes exceeds `entry_bytes`."""
    if size > entry_bytes:
        raise RecordTooLarge(f"an entry of {size} bytes; the limit is {entry_bytes}")


def _parse_entry(line: bytes, entry_bytes: int) -> Entry:
    """Parse the line of an entry. Raise ProtocolError or RecordTooLarge."""
    _, topic, *entry_words = line.split(b" ", 2)
    if not entry_words or not entry_words[0].startswith(b"[") or not entry_words[0].endswith(b"]"):
        raise ProtocolError(
            f"{abbreviate(line)} is no entry: write topic K [entry], with one space between words"
        )
    content = unescape(entry_words[0][1:-1])
    check_size(len(content), entry_bytes)
    return Entry(parse_topic(topic), content)


class Lines:
    """Split one peer's bytes into lines. `receive` adds bytes; `next_line` returns one line."""

    __slots__ = ("_buffer", "_partial_line", "_line_bytes", "_position", "_partial_bytes")

    def __init__(self, entry_bytes: int = shared_limits.LINE_ENTRY_BYTES) -> None:
        #: Every byte of an entry may be escaped, which takes two bytes.
        self._line_bytes = limits.LINE_HEAD_BYTES + 2 * entry_bytes
        self._buffer = b""
        self._position = 0
        #: The beginning of the incomplete line, and the bytes of it that have arrived. The
        #: beginning is dropped when the line becomes too long.
        self._partial_line = bytearray()
        self._partial_bytes = 0

    @property
    def partial_line(self) -> bytes:
        """The beginning of the incomplete line."""
        return bytes(self._partial_line)

    @property
    def has_pending_bytes(self) -> bool:
        """Whether bytes have arrived that are not part of a returned line."""
        return self._partial_bytes > 0 or self._position < len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        """The received bytes that `next_line` has not examined."""
        return len(self._buffer) - self._position

    def receive(self, data: bytes) -> None:
        if self._position < len(self._buffer):
            data = self._buffer[self._position :] + data
        self._buffer = data
        self._position = 0

    def next_line(self) -> bytes | RecordTooLarge | None:
        """Return the next line, RecordTooLarge in place of a line that is too long, or None if
        bytes are missing. Raise ProtocolError for a line that does not end.
        """
        begin = self._position
        end = self._buffer.find(b"\n", begin)
        if end < 0:
            self._count_bytes(len(self._buffer) - begin)
            if self._partial_bytes <= self._line_bytes:
                self._partial_line += memoryview(self._buffer)[begin:]
            else:
                self._partial_line.clear()
            self._buffer = b""
            self._position = 0
            return None
        self._count_bytes(end - begin)
        self._position = end + 1
        size, self._partial_bytes = self._partial_bytes, 0
        if size > self._line_bytes:
            self._partial_line.clear()
            return RecordTooLarge(f"a line of {size} bytes; the limit is {self._line_bytes}")
        line = self._buffer[begin:end]
        if self._partial_line:
            line = bytes(self._partial_line) + line
            self._partial_line.clear()
        return line[:-1] if line.endswith(b"\r") else line

    def _count_bytes(self, size: int) -> None:
        """Count bytes of the incomplete line. Raise ProtocolError if they are far too many."""
        self._partial_bytes += size
        most_bytes = self._line_bytes + limits.LINE_LEFT_OUT_BYTES
        if self._partial_bytes > most_bytes:
            raise ProtocolError(
                f"a line of more than {most_bytes} bytes: messages end with a newline"
            )
