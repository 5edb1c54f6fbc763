"""The messages of a subscriber that polls: it asks for one entry by its number. Pure.

    getentry K LAST                            the first entry of topic K after number LAST
    getentry K LAST PARTITION                  the same in a partition other than 0
    entry K NUMBER TIME PUBLISHER [content]    the answer: an entry, its time in ms since 1970
    entry K NUMBER TIME PUBLISHER SIZE         the answer, if the content is too long for a line
    entry K -NUMBER                            the answer, if there is no newer entry

An entry from another protocol may have no publisher, or one that is not an id; then PUBLISHER is
`-`. TIME is -1 for an entry without a timestamp.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quackmq.errors import InvalidRequest, ProtocolError
from quackmq.protocols.line.codec.escapes import escape, unescape
from quackmq.protocols.line.codec.words import abbreviate, parse_id, parse_number, parse_topic

#: Stands for a publisher without an id.
NO_PUBLISHER: Final = "-"


class GetEntry(NamedTuple):
    """The request for the first entry of a partition after the number `last`."""

    topic: str
    last: int
    partition: int = 0


class NumberedEntry(NamedTuple):
    """The answer with an entry. `content` is its size if it is too long for a line."""

    topic: str
    number: int
    timestamp_ms: int
    publisher_id: str
    content: bytes | int


class NoEntry(NamedTuple):
    """The answer if there is no newer entry: minus the number of the last one, or 0."""

    topic: str
    number: int


EntryAnswer = NumberedEntry | NoEntry


def encode_getentry(request: GetEntry) -> bytes:
    partition = f" {request.partition}" if request.partition else ""
    return f"getentry {request.topic} {request.last}{partition}\n".encode()


def encode_answer(answer: EntryAnswer) -> bytes:
    if isinstance(answer, NoEntry):
        return f"entry {answer.topic} {answer.number}\n".encode()
    topic, number, timestamp_ms, publisher_id, content = answer
    written = b"%d" % content if isinstance(content, int) else b"[%b]" % escape(content)
    head = f"entry {topic} {number} {timestamp_ms} {publisher_id} "
    return b"%b%b\n" % (head.encode(), written)


def parse_getentry(line: bytes) -> GetEntry:
    """Parse the line of a request. Raise InvalidRequest, usually ProtocolError."""
    match line.split(b" "):
        case [_, topic, last]:
            request = GetEntry(parse_topic(topic), parse_number("number", last))
        case [_, topic, last, partition]:
            request = GetEntry(
                parse_topic(topic),
                parse_number("number", last),
                parse_number("partition", partition),
            )
        case _:
            raise ProtocolError(f"{abbreviate(line)} is no request: write getentry K LAST")
    if request.last < 0 or request.partition < 0:
        raise InvalidRequest("the number of the last entry and the partition are 0 or more")
    return request


def parse_answer(line: bytes) -> EntryAnswer:
    """Parse the line of an answer. Raise InvalidRequest, usually ProtocolError."""
    words = line.split(b" ", 5)
    if len(words) == 3:
        answer: EntryAnswer = NoEntry(parse_topic(words[1]), parse_number("number", words[2]))
        is_valid = answer.number <= 0
    elif len(words) == 6:
        _, topic, number, timestamp_ms, publisher_id, written = words
        is_long = not written.startswith(b"[") or not written.endswith(b"]") or len(written) < 2
        answer = NumberedEntry(
            parse_topic(topic),
            parse_number("number", number),
            parse_number("time", timestamp_ms),
            parse_id(publisher_id),
            parse_number("size", written) if is_long else unescape(written[1:-1]),
        )
        is_valid = answer.number > 0
    else:
        is_valid = False
    if not is_valid:
        raise ProtocolError(f"{abbreviate(line)} is no answer to getentry")
    return answer


def publisher_word(publisher_id: str) -> str:
    """Return the word for a publisher: its id, or `-` if it has none that is valid here."""
    word = publisher_id.encode(errors="replace")
    try:
        return NO_PUBLISHER if b" " in word else parse_id(word)
    except InvalidRequest:
        return NO_PUBLISHER
