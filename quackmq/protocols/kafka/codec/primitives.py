"""The primitive types of the Kafka protocol, decoded from untrusted bytes.

There are two encodings of lengths. Older versions of each API use signed integers of 16 bits
(strings) or 32 bits (bytes, arrays), with -1 for null. Later, "flexible" versions use an unsigned
varint of the length plus one, with 0 for null, and end each structure with tagged fields:

    legacy   string  | i16 length | utf-8 |         bytes, array  | i32 length | … |
    compact  string, bytes, array  | uvarint length + 1 | … |
             tagged fields  | uvarint count |  then each  | uvarint tag | uvarint size | … |

Every length is checked against the remaining bytes before memory is allocated, and all arrays share
one budget of elements. Reading past the end raises `struct.error` or IndexError; the caller of a
whole parse turns them into ProtocolError with `malformed`. All other errors raise ProtocolError
directly.
"""

from __future__ import annotations

import struct
import uuid
from typing import Final

from quackmq.errors import ProtocolError
from quackmq.protocols.kafka import limits

INT8: Final = struct.Struct(">b")
INT16: Final = struct.Struct(">h")
UINT16: Final = struct.Struct(">H")
INT32: Final = struct.Struct(">i")
UINT32: Final = struct.Struct(">I")
INT64: Final = struct.Struct(">q")
UINT64: Final = struct.Struct(">Q")
FLOAT64: Final = struct.Struct(">d")
_unpack_int32: Final = INT32.unpack_from
UUID_BYTES: Final = 16
#: 35 bits in groups of seven; only 32 of them may be used.
UVARINT_BYTES: Final = 5
UVARINT_MAX: Final = 2**32 - 1

#: The errors of reading past the end.
ENDS_EARLY: Final = (struct.error, IndexError)


def malformed(what: str) -> ProtocolError:
    """Return the error for data that ended early. `what` names that data."""
    return ProtocolError(f"the {what} ends before its last field")


class Cursor:
    """A position in one request, in the legacy encoding. Each method decodes one value."""

    __slots__ = ("data", "elements_left", "position")

    #: The minimum size of each type with a variable size.
    STRING_BYTES = 2
    BYTES_BYTES = 4
    ARRAY_BYTES = 4
    TAGS_BYTES = 0

    def __init__(
        self,
        data: memoryview,
        position: int = 0,
        elements_left: int = limits.KAFKA_REQUEST_ELEMENTS,
    ) -> None:
        self.data = data
        self.position = position
        self.elements_left = elements_left

    def number(self, form: struct.Struct) -> int:
        position = self.position
        self.position = position + form.size
        value: int = form.unpack_from(self.data, position)[0]
        return value

    def int8(self) -> int:
        return self.number(INT8)

    def int16(self) -> int:
        return self.number(INT16)

    def int32(self) -> int:
        # The most frequent method, so it avoids another call.
        position = self.position
        self.position = position + 4
        value: int = _unpack_int32(self.data, position)[0]
        return value

    def int64(self) -> int:
        return self.number(INT64)

    def float64(self) -> float:
        position = self.position
        self.position = position + FLOAT64.size
        value: float = FLOAT64.unpack_from(self.data, position)[0]
        return value

    def boolean(self) -> bool:
        return self.number(INT8) != 0

    def uuid(self) -> uuid.UUID | None:
        """Decode an id; return None for the id of zeros, which means no id."""
        data = bytes(self.take(UUID_BYTES))
        return uuid.UUID(bytes=data) if any(data) else None

    def string(self) -> str:
        """Decode a string. Raise ProtocolError if it is null."""
        value = self.nullable_string()
        if value is None:
            raise ProtocolError("a string that must not be null is null")
        return value

    def nullable_string(self) -> str | None:
        """Decode a string; return None for null. Raise ProtocolError if it is too long or not
        UTF-8."""
        size = self._string_length()
        if size < 0:
            return None
        if size > limits.KAFKA_STRING_BYTES:
            raise ProtocolError(f"a string of {size} bytes, over {limits.KAFKA_STRING_BYTES}")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a string that is not UTF-8: {error.reason}") from None

    def nullable_bytes(self) -> memoryview | None:
        """Return bytes of any size as a view of the request, without a copy."""
        size = self._bytes_length()
        return None if size < 0 else self.take(size)

    def array_length(self, element_bytes: int) -> int:
        """Return the number of elements, each of at least `element_bytes`; -1 for a null array."""
        length = self._array_length()
        if length <= 0:
            return length
        if length * element_bytes > len(self.data) - self.position:
            raise ProtocolError(f"an array of {length} elements exceeds the remaining request")
        self.elements_left -= length
        if self.elements_left < 0:
            raise ProtocolError(f"more than {limits.KAFKA_REQUEST_ELEMENTS} elements in a request")
        return length

    def present_array_length(self, element_bytes: int) -> int:
        """Return the length as `array_length` does. Raise ProtocolError if the array is null."""
        length = self.array_length(element_bytes)
        if length < 0:
            raise ProtocolError("an array that must not be null is null")
        return length

    def take(self, size: int) -> memoryview:
        """Return the next bytes as a view, without a copy. Raise ProtocolError if fewer remain."""
        position = self.position
        end = position + size
        if size < 0 or end > len(self.data):
            raise ProtocolError(
                f"a length of {size} bytes; {len(self.data) - position} bytes remain"
            )
        self.position = end
        return self.data[position:end]

    def uvarint(self) -> int:
        """Decode an unsigned varint. Raise ProtocolError if it has more than 32 bits."""
        value = self.data[self.position]
        self.position += 1
        # Fast path: most lengths are small, and every length of a flexible request is decoded here.
        if value < 0x80:
            return value
        value &= 0x7F
        for index in range(1, UVARINT_BYTES):
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80 and value <= UVARINT_MAX:
                return value
        raise ProtocolError("a variable-length integer of more than 32 bits")

    def skip_tags(self) -> None:
        """Skip the tagged fields at the end of a structure. The legacy encoding has none."""

    def _string_length(self) -> int:
        return self._check_length(self.number(INT16))

    def _bytes_length(self) -> int:
        return self._check_length(self.number(INT32))

    def _array_length(self) -> int:
        return self._check_length(self.number(INT32))

    @staticmethod
    def _check_length(length: int) -> int:
        """Return a length, or -1 for null. Raise ProtocolError for other negative numbers."""
        if length < -1:
            raise ProtocolError(f"a length of {length}")
        return length


class CompactCursor(Cursor):
    """A position in one request, in the compact encoding of flexible versions."""

    __slots__ = ()

    STRING_BYTES = 1
    BYTES_BYTES = 1
    ARRAY_BYTES = 1
    TAGS_BYTES = 1

    def skip_tags(self) -> None:
        """Skip the tagged fields of a flexible structure. Usually there are none."""
        if self.data[self.position] == 0:
            self.position += 1
            return
        for _ in range(self.tag_count()):
            self.uvarint()
            self.take(self.uvarint())

    def tag_count(self) -> int:
        """Decode the number of tagged fields. Raise ProtocolError if they cannot fit into the rest
        of the request, or exceed the budget of elements."""
        count = self.uvarint()
        if count:
            # A tag and its size take at least one byte each.
            if 2 * count > len(self.data) - self.position:
                raise ProtocolError(f"{count} tagged fields exceed the remaining request")
            self.elements_left -= count
            if self.elements_left < 0:
                raise ProtocolError(
                    f"more than {limits.KAFKA_REQUEST_ELEMENTS} elements in a request"
                )
        return count

    def _string_length(self) -> int:
        return self.uvarint() - 1

    def _bytes_length(self) -> int:
        return self.uvarint() - 1

    def _array_length(self) -> int:
        return self.uvarint() - 1
