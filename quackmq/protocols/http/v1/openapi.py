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
from quackmq.protocols.http.errors import status_for
from quackmq.protocols.http.types import PROBLEM
from quackmq.protocols.http.v1.operations import Body, Operation, Parameter, ResponseInfo

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
_DESCRIPTION: Final = (
    "Topics, messages, subscriptions and staging of a QuackMQ broker. A change is on disk when its "
    "response says success. Failures are problem details (RFC 9457) with a `code`, which is the "
    "same in every protocol of the broker."
)
TAGS: Final = {
    "topics": "Logs of messages, in partitions, under a policy.",
    "messages": "Publish, read by offset, follow.",
    "subscriptions": "Durable names that get each message exactly once.",
    "stages": "Many writers, one commit.",
    "archive": "The history as Parquet files, for programs that read or rewrite the files.",
    "health": "Whether the broker lives and accepts writes; its connections.",
    "document": "This document.",
}


class Problem(Struct, frozen=True):
    """Why a request failed (RFC 9457)."""

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    code: str


def make_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document that describes these operations."""
    operations = tuple(operations)
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe_operation(
            operation, schemas
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "QuackMQ",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": {"schemas": schemas.schemas},
    }


class _Schemas:
    """The schemas of all types that operations use."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._types = list(dict.fromkeys([Problem, *_types_used_by(operations)]))
        references, self.schemas = msgspec.json.schema_components(self._types, ref_template=_REF)
        self._references: dict[Any, dict[str, Any]] = dict(
            zip(self._types, references, strict=True)
        )
        # Add the rules that msgspec cannot derive from the fields of a type.
        for name, extra in _extra_schemas().items():
            if name in self.schemas:
                self.schemas[name].update(extra)

    def schema_for(self, type_: Any) -> Mapping[str, Any]:
        """Return the schema of a type, or of any type of a tuple."""
        if isinstance(type_, tuple):
            return {"anyOf": [self.schema_for(member) for member in type_]}
        if type_ is bytes:
            return {}  # any bytes
        return self._references[type_]


def _extra_schemas() -> dict[str, Mapping[str, Any]]:
    """Return the schema rules (`EXTRA_SCHEMA`) of this package's types, by type name."""
    extra_by_name: dict[str, Mapping[str, Any]] = {}
    classes: list[type] = [Struct]
    while classes:
        type_ = classes.pop()
        classes += type_.__subclasses__()
        extra = getattr(type_, "EXTRA_SCHEMA", None)
        if extra is not None and type_.__module__.startswith(__package__ or ""):
            extra_by_name[type_.__name__] = extra
    return extra_by_name


def _types_used_by(operations: Iterable[Operation]) -> Iterable[Any]:
    """Yield the types of the bodies of requests and responses."""
    for operation in operations:
        types = [response.type for response in operation.responses.values()]
        if operation.body is not None:
            types += operation.body.types_by_content_type.values()
        for type_ in types:
            members = type_ if isinstance(type_, tuple) else (type_,)
            yield from (member for member in members if member is not None and member is not bytes)


def _describe_operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    """Return the entry of an operation. Its summary is the first sentence of its description."""
    description: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.description.partition(". ")[0].rstrip("."),
        "description": operation.description,
    }
    if operation.parameters:
        description["parameters"] = [
            _describe_parameter(parameter) for parameter in operation.parameters
        ]
    if operation.body is not None:
        description["requestBody"] = _describe_body(operation.body, schemas)
    responses = {
        str(status): _describe_response(response, schemas)
        for status, response in operation.responses.items()
    }
    description["responses"] = responses | _describe_errors(operation, schemas)
    return description


def _describe_parameter(parameter: Parameter) -> dict[str, Any]:
    """Return the entry of a parameter."""
    return {
        "name": parameter.name,
        "in": parameter.location,
        "required": parameter.required,
        "description": parameter.description,
        "schema": dict(parameter.schema),
    }


def _describe_body(body: Body, schemas: _Schemas) -> dict[str, Any]:
    """Return the entry of a request body, with a schema for each content type."""
    content = {
        name: {"schema": schemas.schema_for(type_)}
        for name, type_ in body.types_by_content_type.items()
    }
    return {"description": body.description, "required": body.required, "content": content}


def _describe_response(response: ResponseInfo, schemas: _Schemas) -> dict[str, Any]:
    """Return the entry of a response. Without a type and a schema it has no content."""
    description: dict[str, Any] = {"description": response.description}
    schema = response.schema if response.type is None else schemas.schema_for(response.type)
    if schema is not None:
        description["content"] = {response.content_type: {"schema": schema}}
    return description


def _describe_errors(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    """Return the error responses by status, each with its error codes."""
    errors = (*operation.errors, *_COMMON)
    if operation.body is not None:
        errors += _COMMON_WITH_BODY
    codes_by_status: dict[int, list[str]] = {}
    for error in dict.fromkeys(errors):
        codes_by_status.setdefault(status_for(error), []).append(error.code)
    if operation.body is not None:
        codes_by_status.setdefault(415, []).append("unsupported_media_type")
    problem = {PROBLEM: {"schema": schemas.schema_for(Problem)}}
    return {
        str(status): {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(codes_by_status[status])}",
            "content": problem,
        }
        for status in sorted(codes_by_status)
    }
