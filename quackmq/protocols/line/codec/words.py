"""The words of a line: ids, topics and numbers. Pure."""

from __future__ import annotations

from typing import Final

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest, ProtocolError

#: Characters of a line that an error message quotes.
_SHOWN_CHARS: Final = 40
#: The digits of the greatest 64-bit number. int() is slow for very long texts.
_DIGITS: Final = 19


def parse_topic(word: bytes) -> str:
    return parse_name("topic", word, shared_limits.TOPIC_NAME_CHARS)


def parse_id(word: bytes) -> str:
    return parse_name("id", word, shared_limits.NAME_BYTES)


def parse_name(kind: str, word: bytes, most_bytes: int) -> str:
    """Return an id or a topic name. `kind` names it in an error. Raise InvalidRequest if it is
    invalid."""
    if not 1 <= len(word) <= most_bytes:
        raise InvalidRequest(
            f"the {kind} takes 1 to {most_bytes} bytes, not {len(word)}; words are separated by "
            "one space"
        )
    try:
        name = word.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"the {kind} {abbreviate(word)} is not UTF-8") from None
    if not name.isprintable():
        raise InvalidRequest(f"the {kind} {name!r} has control characters in it")
    return name


def parse_number(kind: str, word: bytes) -> int:
    """Return a whole number, perhaps negative. Raise ProtocolError for any other word. Only the
    shortest form of a number is accepted.
    """
    digits = word.removeprefix(b"-")
    if digits.isdigit() and len(digits) <= _DIGITS and b"%d" % int(word) == word:
        return int(word)
    if not word:
        raise ProtocolError(f"the {kind} is empty; words are separated by one space")
    raise ProtocolError(f"the {kind} {abbreviate(word)} is not a whole number")


def abbreviate(line: bytes) -> str:
    # A character of UTF-8 has at most 4 bytes.
    text = line[: _SHOWN_CHARS * 4].decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
