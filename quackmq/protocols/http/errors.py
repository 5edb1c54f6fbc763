"""Map broker errors to HTTP statuses by their base classes, and render failures in two formats.

A status in the 400s means that the client must change something; one in the 500s is the broker's
fault. 503 means that the same request may succeed later, and adds Retry-After. Below `/v1` a
failure is a problem document (RFC 9457). Elsewhere it has the format of the distributed queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import orjson

from quackmq import errors
from quackmq.protocols.http.types import JSON, PROBLEM, Response

#: Failures at and below this path are problem documents.
PROBLEM_PATH: Final = "/v1"
_RETRY_SOON: Final = (("retry-after", "1"),)

#: The status of an error class, unless a row for a subclass says otherwise.
STATUSES: Final[Mapping[type[errors.QuackError], int]] = {
    errors.QuackError: 500,
    errors.InvalidRequest: 400,
    errors.RecordTooLarge: 413,
    errors.NotFound: 404,
    errors.Conflict: 409,
    # The client is known, but not allowed here: it needs another topic or another registration.
    errors.NotRegistered: 403,
    errors.OffsetOutOfRange: 416,
    errors.EntriesLost: 410,
    # The topic's policy refuses the request until somebody changes the topic or its state.
    errors.Refused: 409,
    errors.LimitReached: 429,
    errors.GroupLoading: 503,
    errors.NotAllowed: 403,
    errors.QuackTimeout: 503,
    errors.BrokerClosing: 503,
    errors.InternalError: 500,
    errors.StorageError: 500,
    errors.WriteFailed: 503,
}


class HttpFailure(Exception):
    """A request that fails for a reason of HTTP itself, with its status. This is not a broker
    error: only the HTTP package raises and handles it.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


def status_for(error_type: type[errors.QuackError]) -> int:
    """Return the HTTP status of an error class: its own, or that of its nearest base class."""
    return next(STATUSES[base] for base in error_type.__mro__ if base in STATUSES)


def response_for_error(error: errors.QuackError | HttpFailure, path: str) -> Response:
    """Return the response to a request for `path` that failed with `error`."""
    if isinstance(error, HttpFailure):
        return failure_response(error.status, error.code, str(error), path, error.headers)
    return failure_response(status_for(type(error)), error.code, str(error), path)


def failure_response(
    status: int,
    code: str,
    message: str,
    path: str,
    headers: tuple[tuple[str, str], ...] = (),
) -> Response:
    """Return the response to a request for `path` that failed, in the format of that path."""
    if status == 503:
        headers += _RETRY_SOON
    if not uses_problem_documents(path):
        body: dict[str, object] = {"status": "failure", "message": message, "code": code}
        return Response(status, orjson.dumps(body), JSON, headers)
    problem: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
        "code": code,
    }
    return Response(status, orjson.dumps(problem), PROBLEM, headers)


def uses_problem_documents(path: str) -> bool:
    return path.startswith(PROBLEM_PATH) and path[len(PROBLEM_PATH) :][:1] in ("", "/")
