"""Build the OpenAPI 3.1 document of the API from the operations themselves.

msgspec turns types into schemas, parameters describe themselves, and errors are listed by their
HTTP status, each with its code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from quackmq import __version__
from quackmq.errors import (
    BrokerClosing,
    InvalidRequest,
    LimitReached,
    NotAllowed,
    QuackError,
    RecordTooLarge,
)
from quackmq.protocols.http.errors import STATUSES
from quackmq.protocols.http.types import PROBLEM
from quackmq.protocols.http.v1.operations import Answer, Body, Operation, Parameter

_REF: Final = "#/components/schemas/{name}"
#: Errors that any request may get, in addition to those of its operation.
_COMMON: Final[tuple[type[QuackError], ...]] = (
    InvalidRequest,
    NotAllowed,
    LimitReached,
    BrokerClosing,
    QuackError,
)
_COMMON_WITH_BODY: Final[tuple[type[QuackError], ...]] = (RecordTooLarge,)
_ABOUT: Final = (
    "Topics, messages, subscriptions and staging of a QuackMQ broker. What is answered with "
    "success is on disk. Failures are problem details (RFC 9457) with a `code`, the same word in "
    "every door of the broker."
)
TAGS: Final = {
    "topics": "Logs of messages, in partitions, under a policy.",
    "messages": "Publish, read by offset, follow.",
    "subscriptions": "Durable names that get each message exactly once.",
    "stages": "Many writers, one commit.",
    "archive": "All history as Parquet files, for who reads or rewrites it as such.",
    "health": "Whether the broker lives, and takes what is published; who is connected.",
    "document": "This document.",
}


class Problem(Struct, frozen=True):
    """Why a request failed (RFC 9457)."""

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    code: str


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    operations = tuple(operations)
    kinds = _Kinds(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(
            operation, kinds
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "QuackMQ",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": about} for name, about in TAGS.items()],
        "paths": paths,
        "components": {"schemas": kinds.schemas},
    }


class _Kinds:
    """The schemas of all types that operations use."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._kinds = list(dict.fromkeys([Problem, *_spoken_of(operations)]))
        references, self.schemas = msgspec.json.schema_components(self._kinds, ref_template=_REF)
        self._references: dict[Any, dict[str, Any]] = dict(
            zip(self._kinds, references, strict=True)
        )
        for name, rule in _rules().items():
            if name in self.schemas:
                self.schemas[name].update(rule)

    def schema(self, kind: Any) -> Mapping[str, Any]:
        if isinstance(kind, tuple):
            return {"anyOf": [self.schema(each) for each in kind]}
        if kind is bytes:
            return {}  # any bytes
        return self._references[kind]


def _rules() -> dict[str, Mapping[str, Any]]:
    """Return the rules (`MORE`) of this package's types that fields cannot express, by type
    name."""
    found: dict[str, Mapping[str, Any]] = {}
    waiting: list[type] = [Struct]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith(__package__ or "") and hasattr(kind, "MORE"):
            found[kind.__name__] = kind.MORE
    return found


def _spoken_of(operations: Iterable[Operation]) -> Iterable[Any]:
    for operation in operations:
        said = [answer.kind for answer in operation.answers.values()]
        if operation.body is not None:
            said += operation.body.kinds.values()
        for kind in said:
            each = kind if isinstance(kind, tuple) else (kind,)
            yield from (one for one in each if one is not None and one is not bytes)


def _operation(operation: Operation, kinds: _Kinds) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.about.partition(". ")[0].rstrip("."),
        "description": operation.about,
    }
    if operation.parameters:
        shown["parameters"] = [_parameter(each) for each in operation.parameters]
    if operation.body is not None:
        shown["requestBody"] = _body(operation.body, kinds)
    answers = {str(status): _answer(answer, kinds) for status, answer in operation.answers.items()}
    shown["responses"] = answers | _errors(operation, kinds)
    return shown


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.required,
        "description": parameter.about,
        "schema": dict(parameter.schema),
    }


def _body(body: Body, kinds: _Kinds) -> dict[str, Any]:
    content = {name: {"schema": kinds.schema(kind)} for name, kind in body.kinds.items()}
    return {"description": body.about, "required": body.required, "content": content}


def _answer(answer: Answer, kinds: _Kinds) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": answer.about}
    schema = answer.schema if answer.kind is None else kinds.schema(answer.kind)
    if schema is not None:
        shown["content"] = {answer.content_type: {"schema": schema}}
    return shown


def _errors(operation: Operation, kinds: _Kinds) -> dict[str, Any]:
    """Return the error responses by status, each with its error codes."""
    own = (*operation.errors, *_COMMON)
    if operation.body is not None:
        own += _COMMON_WITH_BODY
    codes: dict[int, list[str]] = {}
    for error in dict.fromkeys(own):
        codes.setdefault(STATUSES[error], []).append(error.code)
    if operation.body is not None:
        codes.setdefault(415, []).append("unsupported_media_type")
    problem = {PROBLEM: {"schema": kinds.schema(Problem)}}
    return {
        str(status): {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes[status])}",
            "content": problem,
        }
        for status in sorted(codes)
    }
