"""The operations of the API as values: an operation is a route with its complete description.

Handlers check parameters with the same values that the document at /v1/openapi.json shows, so the
two always agree: a `Number` knows its bounds, and a body is a type. An unknown parameter is
refused: a misspelt `ofset` must not read from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar

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
    decode_json,
)

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
BYTES: Final = "application/octet-stream"
EVENTS: Final = "text/event-stream"

#: The digits of the greatest 64-bit number. int() is slow for very long texts.
_DIGITS: Final = 19

Schema = Mapping[str, Any]
T = TypeVar("T")


def one_of(*names: str) -> Schema:
    """Return the schema rule that exactly one of these fields is present. Fields cannot express
    such a rule, so a type has it as `EXTRA_SCHEMA`, and the code that decodes the type checks it.
    """
    return {"oneOf": [{"required": [name]} for name in names]}


def at_most_one_of(*names: str) -> Schema:
    """Return the schema rule that at most one of these two fields is present."""
    return {"not": {"required": list(names)}}


# --- parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A whole number in the path or the query."""

    name: str
    description: str
    minimum: int = 0
    maximum: int
    default: int | None = None
    location: Literal["path", "query"] = "query"
    required: bool = False

    def require(self, request: Request) -> int:
        """Return the value or the default; raise InvalidRequest if there is neither."""
        value = self.get(request)
        if value is None:
            value = self.default
        if value is None:
            raise InvalidRequest(f"{self.name} is missing: {self.description}")
        return value

    def get(self, request: Request) -> int | None:
        """Return the value, or None if the request has none. Raise InvalidRequest if it is out of
        bounds.
        """
        text = (request.path_parameters if self.location == "path" else request.query).get(
            self.name
        )
        if text is None:
            return None
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS:
            value = int(text)
            if self.minimum <= value <= self.maximum:
                return value
        raise InvalidRequest(
            f"invalid {self.name} {text[:100]!r}: it must be a whole number from {self.minimum} to "
            f"{self.maximum}"
        )

    @property
    def schema(self) -> Schema:
        schema = {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}
        return schema if self.default is None else {**schema, "default": self.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text in the path, the query or a header. The broker checks whether a name in the path
    exists or is valid, and its length in bytes, which a schema cannot express.
    """

    name: str
    description: str
    location: Literal["path", "query", "header"] = "query"
    required: bool = False
    choices: tuple[str, ...] = ()
    default: str | None = None
    pattern: str = ""
    max_chars: int | None = None

    def require(self, request: Request) -> str:
        value = self.get(request)
        if value is None:
            raise InvalidRequest(f"{self.name} is missing: {self.description}")
        return value

    def get(self, request: Request) -> str | None:
        """Return the value or the default; None if there is neither. Raise InvalidRequest if it is
        invalid. A value in the path is not checked here: the broker checks names.
        """
        if self.location == "path":
            return request.path_parameters[self.name]
        values = request.headers if self.location == "header" else request.query
        text = values.get(
            self.name.lower() if self.location == "header" else self.name, self.default
        )
        if text is not None and not self._is_valid(text):
            raise InvalidRequest(
                f"invalid {self.name} {text[:100]!r}: it must be {self._describe_rule()}. "
                f"{self.description}"
            )
        return text

    def _describe_rule(self) -> str:
        """Return the rule for valid values, for an error message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        max_chars = "" if self.max_chars is None else f" to {self.max_chars}"
        pattern = f" of the pattern {self.pattern}" if self.pattern else ""
        return f"a text of 1{max_chars} characters{pattern}"

    def _is_valid(self, text: str) -> bool:
        """Return whether a text is one of the choices; without choices, whether its length is
        allowed and it matches the pattern.
        """
        if self.choices:
            return text in self.choices
        if not text or (self.max_chars is not None and len(text) > self.max_chars):
            return False
        return not self.pattern or re.fullmatch(self.pattern, text) is not None

    @property
    def schema(self) -> Schema:
        """The JSON schema of the parameter."""
        schema: dict[str, Any] = {"type": "string"}
        if self.choices:
            schema["enum"] = list(self.choices)
        else:
            schema["minLength"] = 1
        if self.pattern:
            # `_is_valid` matches the whole text, but a pattern in a schema matches any part of it.
            schema["pattern"] = f"^{self.pattern}$"
        if self.max_chars is not None:
            schema["maxLength"] = self.max_chars
        if self.default is not None:
            schema["default"] = self.default
        return schema


Parameter = Number | Text


# --- operations -----------------------------------------------------------------------------------


class ResponseInfo(NamedTuple):
    """The description of a response with one status. `type` is that of the JSON body, or None."""

    description: str
    type: Any = None
    content_type: str = JSON
    schema: Schema | None = None


class Body:
    """The accepted bodies of a request: a type for each content type, `bytes` if it is not JSON."""

    def __init__(
        self,
        description: str,
        types_by_content_type: Mapping[str, Any],
        required: bool = True,
        max_bytes: int = limits.HTTP_BODY_BYTES,
    ) -> None:
        self.description = description
        self.types_by_content_type = types_by_content_type
        self.required = required
        self.max_bytes = max_bytes


class JsonBody(Body, Generic[T]):
    """A body that is JSON of one type."""

    def __init__(self, body_type: type[T], description: str, required: bool = True) -> None:
        super().__init__(description, {JSON: body_type}, required)
        self._decoder = msgspec.json.Decoder(body_type)

    def decode(self, request: Request) -> T:
        """Decode the body of a request; a missing optional body counts as `{}`."""
        if not request.body and not self.required:
            return self._decoder.decode(b"{}")
        check_content_type(request, self)
        return decode_json(request.body, self._decoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route and its description. `errors` are specific to it; any request may get others too."""

    name: str
    tag: str
    method: str
    path: str
    handler: Handler
    description: str
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    responses: Mapping[int, ResponseInfo]
    errors: tuple[type[QuackError], ...] = ()
    #: The same as in `Route`.
    answers_head: bool = True
    may_wait: bool = False


def make_routes(operations: tuple[Operation, ...]) -> tuple[Route, ...]:
    return tuple(_make_route(operation) for operation in operations)


def _make_route(operation: Operation) -> Route:
    """Return the route of an operation. It refuses query parameters that are not described."""
    parameter_names = frozenset(
        each.name for each in operation.parameters if each.location == "query"
    )
    handler = operation.handler

    def handle(request: Request) -> Awaitable[Response | Stream] | DeferredResponse:
        """Call the handler. Raise InvalidRequest for a query parameter that is not described."""
        unknown = request.query.keys() - parameter_names
        if unknown:
            raise InvalidRequest(
                f"unknown parameter {min(unknown)[:100]!r}; allowed parameters: "
                + (", ".join(sorted(parameter_names)) or "none")
            )
        return handler(request)

    # An operation that expects no body ignores one: some clients always send one.
    body_bytes = (
        limits.HTTP_UNRESERVED_BYTES if operation.body is None else operation.body.max_bytes
    )
    return Route(
        operation.method,
        operation.path,
        handle,
        body_bytes,
        operation.answers_head,
        operation.may_wait,
    )


# --- bodies and responses -------------------------------------------------------------------------


def check_content_type(request: Request, body: Body) -> str:
    """Return the content type of a request's body, JSON by default. Raise HttpFailure with status
    415 if the operation does not accept it.
    """
    declared = request.headers.get("content-type", JSON)
    content_type = declared.partition(";")[0].strip().lower()
    if content_type not in body.types_by_content_type:
        raise HttpFailure(
            415,
            "unsupported_media_type",
            f"unsupported content type {declared[:100]!r}: send the body as "
            f"{' or '.join(body.types_by_content_type)}",
        )
    return content_type


def cut_page(items: Sequence[T], limit: int) -> tuple[Sequence[T], T | None]:
    """Return the first `limit` elements, and the last of them if more follow: the next page
    begins after it."""
    page = items[:limit]
    return page, page[-1] if len(items) > limit else None


_encode: Final = msgspec.json.Encoder().encode


def json_response(
    status: int, value: object, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    return Response(status, _encode(value), JSON, headers)


def encode_json(value: object) -> bytes:
    return _encode(value)


#: A response without content.
NO_CONTENT: Final = Response(204, b"", "")


# --- parameters that several operations share -----------------------------------------------------


INT64_MAX: Final = 2**63 - 1

TOPIC: Final = Text(
    name="topic",
    location="path",
    required=True,
    description="A topic's name.",
    pattern=f"[A-Za-z0-9._-]{{1,{shared_limits.TOPIC_NAME_CHARS}}}",
)
PARTITION: Final = Number(
    name="partition",
    location="path",
    required=True,
    maximum=shared_limits.PARTITIONS_PER_TOPIC - 1,
    description="A partition of the topic, counted from 0.",
)
LIMIT: Final = Number(
    name="limit",
    minimum=1,
    maximum=shared_limits.HTTP_PAGE_ITEMS,
    default=100,
    description="The greatest number of items to return.",
)
WAIT_MS: Final = Number(
    name="wait_ms",
    maximum=limits.HTTP_WAIT_MS,
    default=0,
    description="How long to wait if there is no message yet.",
)

OffsetField = Annotated[int, Meta(ge=0, le=INT64_MAX)]
WaitField = Annotated[int, Meta(ge=0, le=limits.HTTP_WAIT_MS)]


class Position(Struct, frozen=True, forbid_unknown_fields=True):
    """A position in every partition of a topic: an offset, or the first message whose timestamp is
    not earlier than `timestamp_ms`."""

    EXTRA_SCHEMA: ClassVar[Schema] = one_of("offset", "timestamp_ms")

    offset: OffsetField | UnsetType = UNSET
    timestamp_ms: OffsetField | UnsetType = UNSET


#: The start position in JSON.
StartField = Annotated[
    Literal["beginning", "end"] | Position,
    Meta(
        description="Where to start: with the first stored message, with the next new message, or "
        "at a position."
    ),
]


def parse_start(start: Literal["beginning", "end"] | Position) -> Start:
    """Return the start position that a body names. Raise InvalidRequest if a position has both
    fields or neither.
    """
    if not isinstance(start, Position):
        return start
    # They are equal if both fields are present, or neither.
    if isinstance(start.offset, int) == isinstance(start.timestamp_ms, int):
        raise InvalidRequest("a position has either offset or timestamp_ms: send exactly one")
    if isinstance(start.offset, int):
        return Offset(start.offset)
    assert isinstance(start.timestamp_ms, int)
    return Time(start.timestamp_ms)


def render_start(start: Start) -> Literal["beginning", "end"] | Position:
    if isinstance(start, Offset):
        return Position(offset=start.value)
    return Position(timestamp_ms=start.timestamp_ms) if isinstance(start, Time) else start
