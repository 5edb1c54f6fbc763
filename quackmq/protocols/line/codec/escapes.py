"""How entries and reasons are written so that they stay on one line. Pure.

Four bytes of an entry are escaped: backslash, newline, carriage return and zero. A reason is text
for people, so characters that break the line are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from quackmq.errors import ProtocolError, QuackError
from quackmq.protocols.line import limits

_ESCAPE_BY_BYTE: Final[Mapping[bytes, bytes]] = {
    b"\\": b"\\\\",
    b"\n": b"\\n",
    b"\r": b"\\r",
    b"\0": b"\\0",
}
_BYTE_BY_ESCAPE: Final[Mapping[bytes, bytes]] = {two: one for one, two in _ESCAPE_BY_BYTE.items()}
_TO_ESCAPE: Final = re.compile(rb"[\\\n\r\0]")
_ESCAPE: Final = re.compile(rb"\\.?", re.DOTALL)


def escape(content: bytes) -> bytes:
    return _TO_ESCAPE.sub(lambda match: _ESCAPE_BY_BYTE[match.group()], content)


def unescape(written: bytes) -> bytes:
    """Return the content of a written entry. Raise ProtocolError for an unknown escape."""
    if b"\\" not in written:
        return written
    try:
        return _ESCAPE.sub(lambda match: _BYTE_BY_ESCAPE[match.group()], written)
    except KeyError as error:
        unknown = repr(error.args[0].decode(errors="replace"))
        raise ProtocolError(
            f"{unknown} in an entry: a backslash must precede \\, n, r or 0"
        ) from None


def describe_error(error: QuackError) -> str:
    """Return the reason for a rejection: the error's code for programs, its message for people."""
    return f"{error.code}: {error}"


def encode_reason(reason: str) -> bytes:
    """Encode a reason within its bound. White space becomes one space, and other characters that
    cannot be printed become `?`.
    """
    words = " ".join(reason.split())
    text = "".join(each if each.isprintable() else "?" for each in words).encode()
    # The cut may divide a character; `ignore` drops its first bytes.
    return text[: limits.LINE_REASON_BYTES].decode(errors="ignore").rstrip().encode()


def parse_reason(written: bytes) -> str:
    """Return the reason that a line has, in the form in which `encode_reason` writes it."""
    return encode_reason(written.decode(errors="replace")).decode()
