"""The operations of the API as values: an operation is a route with its complete description.

Handlers check parameters with the same values that the document at /v1/openapi.json shows, so the
two always agree: a `Number` knows its bounds, and a body is a type. An unknown parameter is
refused: a misspelt `ofset` must not read from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits as shared_limits
from quackmq.broker import Offset, Start, Time
from quackmq.errors import InvalidRequest, QuackError
from quackmq.protocols.http import limits
from quackmq.protocols.http.errors import HttpFailure
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.types import (
    DeferredResponse,
    Handler,
    Request,
    Response,
    Stream,
    decoded,
)

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
BYTES: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"

#: More digits than 64 bits need; int() is slow for many more.
_DIGITS: Final = 19

Schema = Mapping[str, Any]
T = TypeVar("T")


def one_of(*names: str) -> Schema:
    """Return the schema rule that exactly one of these fields is given. Fields cannot express such
    a rule, so a type has it as `MORE`, and the code that decodes the type checks it.
    """
    return {"oneOf": [{"required": [name]} for name in names]}


def at_most_one_of(*names: str) -> Schema:
    return {"not": {"required": list(names)}}


# --- parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A whole number in the path or the query."""

    name: str
    about: str
    least: int = 0
    most: int
    default: int | None = None
    where: Literal["path", "query"] = "query"
    required: bool = False

    def of(self, request: Request) -> int:
        """Return the value or the default; raise InvalidRequest if there is neither."""
        value = self.given(request)
        if value is None:
            value = self.default
        if value is None:
            raise InvalidRequest(f"{self.name} is missing: {self.about}")
        return value

    def given(self, request: Request) -> int | None:
        """Return the value, or None if it is not given; raise InvalidRequest if it is out of
        bounds.
        """
        text = (request.parts if self.where == "path" else request.query).get(self.name)
        if text is None:
            return None
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS:
            value = int(text)
            if self.least <= value <= self.most:
                return value
        raise InvalidRequest(
            f"{self.name} cannot be {text[:100]!r}: it is a whole number from {self.least} to "
            f"{self.most}"
        )

    @property
    def schema(self) -> Schema:
        schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        return schema if self.default is None else {**schema, "default": self.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text in the path, the query or a header. The broker checks whether a name in the path
    exists or is valid, and its length in bytes, which a schema cannot express.
    """

    name: str
    about: str
    where: Literal["path", "query", "header"] = "query"
    required: bool = False
    choices: tuple[str, ...] = ()
    default: str | None = None
    pattern: str = ""
    most: int | None = None

    def of(self, request: Request) -> str:
        value = self.given(request)
        if value is None:
            raise InvalidRequest(f"{self.name} is missing: {self.about}")
        return value

    def given(self, request: Request) -> str | None:
        if self.where == "path":
            return request.parts[self.name]
        given = request.headers if self.where == "header" else request.query
        text = given.get(self.name.lower() if self.where == "header" else self.name, self.default)
        if text is not None and not self._may_be(text):
            raise InvalidRequest(
                f"{self.name} cannot be {text[:100]!r}: it is {self._rule()}. {self.about}"
            )
        return text

    def _rule(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        most = "" if self.most is None else f" to {self.most}"
        pattern = f" of the pattern {self.pattern}" if self.pattern else ""
        return f"a text of 1{most} characters{pattern}"

    def _may_be(self, text: str) -> bool:
        if self.choices:
            return text in self.choices
        if not text or (self.most is not None and len(text) > self.most):
            return False
        return not self.pattern or re.fullmatch(self.pattern, text) is not None

    @property
    def schema(self) -> Schema:
        schema: dict[str, Any] = {"type": "string"}
        if self.choices:
            schema["enum"] = list(self.choices)
        else:
            schema["minLength"] = 1
        if self.pattern:
            schema["pattern"] = f"^{self.pattern}$"
        if self.most is not None:
            schema["maxLength"] = self.most
        if self.default is not None:
            schema["default"] = self.default
        return schema


Parameter = Number | Text


# --- operations -----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The meaning of a status. `kind` is the type of the JSON body, or None."""

    about: str
    kind: Any = None
    content_type: str = JSON
    schema: Schema | None = None


class Body(NamedTuple):
    """The accepted bodies of a request: a type for each content type (`bytes` if it is not
    JSON)."""

    about: str
    kinds: Mapping[str, Any]
    required: bool = True
    bytes: int = limits.HTTP_BODY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route and its description. `errors` are specific to it; any request may get others too."""

    name: str
    tag: str
    method: str
    path: str
    handler: Handler
    about: str
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    answers: Mapping[int, Answer]
    errors: tuple[type[QuackError], ...] = ()
    #: The same as in `Route`.
    safe: bool = True
    waits: bool = False


def routes_of(operations: tuple[Operation, ...]) -> tuple[Route, ...]:
    return tuple(_route(operation) for operation in operations)


def _route(operation: Operation) -> Route:
    known = frozenset(each.name for each in operation.parameters if each.where == "query")
    handler = operation.handler

    def handle(request: Request) -> Awaitable[Response | Stream] | DeferredResponse:
        unknown = request.query.keys() - known
        if unknown:
            raise InvalidRequest(
                f"there is no parameter {min(unknown)[:100]!r} here; there "
                + (f"are {', '.join(sorted(known))}" if known else "is none")
            )
        return handler(request)

    # An operation without a body ignores one: some clients always send one.
    body_bytes = limits.HTTP_UNRESERVED_BYTES if operation.body is None else operation.body.bytes
    return Route(
        operation.method, operation.path, handle, body_bytes, operation.safe, operation.waits
    )


# --- bodies and answers ---------------------------------------------------------------------------


def content_type_of(request: Request, body: Body) -> str:
    """Return the content type of a request's body, JSON by default. Raise HttpFailure with status
    415 if the operation does not accept it.
    """
    said = request.headers.get("content-type", JSON)
    kind = said.partition(";")[0].strip().lower()
    if kind not in body.kinds:
        raise HttpFailure(
            415,
            "unsupported_media_type",
            f"the body is {said[:100]!r}: send it as {' or '.join(body.kinds)}",
        )
    return kind


def json_body(request: Request, body: Body, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the JSON body of an operation; a missing optional body counts as `{}`."""
    if not request.body and not body.required:
        return decoder.decode(b"{}")
    content_type_of(request, body)
    return decoded(request.body, decoder)


_encode: Final = msgspec.json.Encoder().encode


def answered(status: int, value: object, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(status, _encode(value), JSON, headers)


def encoded(value: object) -> bytes:
    return _encode(value)


#: A response without content.
NOTHING: Final = Response(204, b"", "")


# --- parameters that several operations share -----------------------------------------------------


GREATEST: Final = 2**63 - 1

TOPIC: Final = Text(
    name="topic",
    where="path",
    required=True,
    about="A topic's name.",
    pattern=f"[A-Za-z0-9._-]{{1,{shared_limits.TOPIC_NAME_CHARS}}}",
)
PARTITION: Final = Number(
    name="partition",
    where="path",
    required=True,
    most=shared_limits.PARTITIONS_PER_TOPIC - 1,
    about="A partition of the topic, counted from 0.",
)
LIMIT: Final = Number(
    name="limit",
    least=1,
    most=shared_limits.HTTP_PAGE_ITEMS,
    default=100,
    about="How many to answer at the most.",
)
WAIT_MS: Final = Number(
    name="wait_ms",
    most=limits.HTTP_WAIT_MS,
    default=0,
    about="How long to wait for a message where there is none yet.",
)

OffsetField = Annotated[int, Meta(ge=0, le=GREATEST)]
WaitField = Annotated[int, Meta(ge=0, le=limits.HTTP_WAIT_MS)]


class Position(Struct, frozen=True, forbid_unknown_fields=True):
    """A place in every partition of a topic: an offset, or the first message with a timestamp that
    is this or a later one."""

    MORE: ClassVar[Schema] = one_of("offset", "timestamp_ms")

    offset: OffsetField | UnsetType = UNSET
    timestamp_ms: OffsetField | UnsetType = UNSET


#: The start position in JSON.
StartField = Annotated[
    Literal["beginning", "end"] | Position,
    Meta(description="Where to begin: at what is there, at what comes, or at a place."),
]


def start_of(start: Literal["beginning", "end"] | Position) -> Start:
    if not isinstance(start, Position):
        return start
    if isinstance(start.offset, int) == isinstance(start.timestamp_ms, int):
        raise InvalidRequest("a place is told by offset or by timestamp_ms: give one of them")
    if isinstance(start.offset, int):
        return Offset(start.offset)
    assert isinstance(start.timestamp_ms, int)
    return Time(start.timestamp_ms)


def start_shown(start: Start) -> Literal["beginning", "end"] | Position:
    if isinstance(start, Offset):
        return Position(offset=start.value)
    return Position(timestamp_ms=start.timestamp_ms) if isinstance(start, Time) else start
