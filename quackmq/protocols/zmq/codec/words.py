"""Frames of words parted by one space, the last of them perhaps a content: what the languages of
the ZeroMQ door share.

    +------+---+------+---+-----+---------+
    | word |   | word |   |  …  | content |     a content is whatever bytes there are, spaces too
    +------+---+------+---+-----+---------+

An answer that tells of an error is `ERR code text`; the code is that of the error
(`quackmq.errors`).

Promised: what is wrong with a word raises an InvalidRequest, mostly as ProtocolError, and says so
in a sentence. Whether names make sense is the broker's to say, but no word is longer than they may
be.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from quackmq import errors, limits
from quackmq.errors import IllegalTopicName, InvalidRequest, ProtocolError, QuackError

#: A sequence or an id; real ones are shorter.
_WORD_BYTES: Final = 100
#: Of what a peer sent, in a message to it.
_SHOWN_CHARS: Final = 40
#: Names come again and again: those that were found good are not looked at again.
_REMEMBERED_WORDS: Final = 4_096


def split_words(frame: bytes, names: tuple[str, ...], *, has_content: bool = False) -> list[bytes]:
    """The words of a frame, of which there have to be as many as names. Without a content, the
    space before it may be left out: it is empty."""
    words = frame.split(b" ", len(names) - 1)
    if has_content and len(words) == len(names) - 1:
        words.append(b"")
    if len(words) < len(names):
        raise ProtocolError(f"there is no {names[len(words)]}: write {' '.join(names)}")
    if not has_content and b" " in words[-1]:
        raise ProtocolError(f"there is something after the {names[-1]}: write {' '.join(names)}")
    return words


@lru_cache(_REMEMBERED_WORDS)
def client_name(word: bytes) -> str:
    if not 1 <= len(word) <= limits.NAME_BYTES:
        raise InvalidRequest(
            f"a client's name takes 1 to {limits.NAME_BYTES} bytes, not {len(word)}; words are "
            "parted by one space"
        )
    name = utf8("client's name", word)
    if not name.isprintable():
        raise InvalidRequest(f"{name!r} is no client's name: there are control characters in it")
    return name


@lru_cache(_REMEMBERED_WORDS)
def topic_name(word: bytes) -> str:
    if not 1 <= len(word) <= limits.TOPIC_NAME_CHARS:
        raise IllegalTopicName(
            f"a topic's name takes 1 to {limits.TOPIC_NAME_CHARS} characters, not {len(word)}; "
            "words are parted by one space"
        )
    return utf8("topic's name", word)


def short_word(name: str, word: bytes, most: int = _WORD_BYTES) -> str:
    if not 1 <= len(word) <= most:
        raise ProtocolError(f"a {name} takes 1 to {most} bytes, not {len(word)}")
    return word.decode(errors="replace")


def whole_number(name: str, word: bytes) -> int:
    text = short_word(name, word)
    if not (text.isascii() and text.isdigit()):
        raise ProtocolError(f"{text!r} is no {name}: they are whole numbers from 0 on")
    return int(text)


def utf8(name: str, word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a {name} is UTF-8, which ends at byte {error.start}") from None


def shown(frame: bytes) -> str:
    """A frame in a message about it."""
    text = frame[: _SHOWN_CHARS * 4].decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


# --- errors ---------------------------------------------------------------------------------


def failed(code: str, text: str) -> bytes:
    # A lone surrogate of some bad name must not keep its peer from hearing of it.
    return f"ERR {code} {text}".encode(errors="backslashreplace")


def error_of(code: str, text: str) -> QuackError:
    """The error of a code; one that is not known is some error of the broker's."""
    kind = _KINDS.get(code)
    # Those that carry more than a text are not for these clients.
    if kind is None or "__init__" in kind.__dict__:
        return QuackError(f"{code}: {text}" if kind is None else text)
    return kind(text)


def _kinds(kind: type[QuackError]) -> dict[str, type[QuackError]]:
    found = {kind.code: kind}
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            found |= _kinds(below)
    return found


_KINDS: Final = _kinds(QuackError)
