"""Parse and check the words of a frame: shared by the two ZeroMQ languages.

A frame is a list of words that are separated by one space. The last part may be a content:

    +------+---+------+---+-----+---------+
    | word |   | word |   |  …  | content |     the content may contain any bytes, also spaces
    +------+---+------+---+-----+---------+

An error reply is `ERR code text`. The code is that of the error (`quackmq.errors`).

Promises: an invalid word raises InvalidRequest, usually its subclass ProtocolError, with a sentence
about the mistake. The length of names is checked here; all other rules for names are the broker's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from quackmq import errors, limits
from quackmq.errors import IllegalTopicName, InvalidRequest, ProtocolError, QuackError

#: A sequence or an id; real ones are shorter.
_WORD_BYTES: Final = 100
#: Characters of a frame that an error message quotes.
_SHOWN_CHARS: Final = 40
#: Names repeat in most requests, so checked names are cached.
_REMEMBERED_WORDS: Final = 4_096


def split_words(frame: bytes, names: tuple[str, ...], *, has_content: bool = False) -> list[bytes]:
    """Split a frame into as many words as there are `names`. Raise ProtocolError otherwise.

    With `has_content` the last one is the content. An empty content and the space before it may be
    left out.
    """
    words = frame.split(b" ", len(names) - 1)
    if has_content and len(words) == len(names) - 1:
        words.append(b"")
    if len(words) < len(names):
        raise ProtocolError(f"there is no {names[len(words)]}: write {' '.join(names)}")
    if not has_content and b" " in words[-1]:
        raise ProtocolError(
            f"there is something after the {names[-1]}: write {' '.join(names)}, with one space "
            "between words"
        )
    return words


@lru_cache(_REMEMBERED_WORDS)
def parse_client_name(word: bytes) -> str:
    """Return a name. Raise InvalidRequest if its length is wrong or it is not printable UTF-8."""
    if not 1 <= len(word) <= limits.NAME_BYTES:
        raise InvalidRequest(
            f"a client's name takes 1 to {limits.NAME_BYTES} bytes, not {len(word)}; words are "
            "separated by one space"
        )
    name = decode_utf8("client's name", word)
    if not name.isprintable():
        raise InvalidRequest(f"the client's name {name!r} contains control characters")
    return name


@lru_cache(_REMEMBERED_WORDS)
def parse_topic_name(word: bytes) -> str:
    """Return a name. Raise IllegalTopicName if its length is wrong, ProtocolError if it is not
    UTF-8.
    """
    if not 1 <= len(word) <= limits.TOPIC_NAME_CHARS:
        raise IllegalTopicName(
            f"a topic's name takes 1 to {limits.TOPIC_NAME_CHARS} characters, not {len(word)}; "
            "words are separated by one space"
        )
    return decode_utf8("topic's name", word)


def check_word(name: str, word: bytes, most_bytes: int = _WORD_BYTES) -> str:
    """Return a word as text; bytes that are not UTF-8 are replaced. Raise ProtocolError if the word
    is empty or too long. `name` says what it is.
    """
    if not 1 <= len(word) <= most_bytes:
        raise ProtocolError(
            f"a {name} takes 1 to {most_bytes} bytes, not {len(word)}; words are separated by one "
            "space"
        )
    return word.decode(errors="replace")


def parse_whole_number(name: str, word: bytes) -> int:
    text = check_word(name, word)
    if not (text.isascii() and text.isdigit()):
        raise ProtocolError(f"invalid {name} {text!r}: it must be a whole number from 0 on")
    return int(text)


def decode_utf8(name: str, word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the {name} is not valid UTF-8 at byte {error.start}") from None


def abbreviate(frame: bytes) -> str:
    """Quote the beginning of a frame, for an error message."""
    # A character of UTF-8 has at most 4 bytes.
    text = frame[: _SHOWN_CHARS * 4].decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")


# --- errors ---------------------------------------------------------------------------------


def encode_error(code: str, text: str) -> bytes:
    # The text may quote a name with a lone surrogate, which UTF-8 cannot encode.
    return f"ERR {code} {text}".encode(errors="backslashreplace")


def error_for_code(code: str, text: str) -> QuackError:
    """Return the error that an `ERR` reply reports; a plain QuackError for an unknown code."""
    error_class = _ERROR_BY_CODE.get(code)
    if error_class is None:
        return QuackError(f"{code}: {text}")
    if "__init__" in error_class.__dict__:
        return QuackError(text)  # the class needs more than a text, and the reply has only that
    return error_class(text)


def _error_classes(base: type[QuackError]) -> dict[str, type[QuackError]]:
    """Return `base` and all its subclasses in `quackmq.errors`, by code."""
    classes = {base.code: base}
    for subclass in base.__subclasses__():
        if subclass.__module__ == errors.__name__:
            classes |= _error_classes(subclass)
    return classes


_ERROR_BY_CODE: Final = _error_classes(QuackError)
