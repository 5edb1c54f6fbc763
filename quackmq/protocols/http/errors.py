"""Map every broker error to an HTTP status, and render failures in two formats.

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

STATUSES: Final[Mapping[type[errors.QuackError], int]] = {
    errors.QuackError: 500,
    errors.InvalidRequest: 400,
    errors.ClientClosed: 400,
    errors.IllegalTopicName: 400,
    errors.InvalidPolicy: 400,
    errors.InvalidMessageId: 400,
    errors.InvalidGroup: 400,
    errors.InvalidSessionTimeout: 400,
    errors.InvalidPattern: 400,
    errors.UnsupportedAssignor: 400,
    errors.InvalidTransactionTimeout: 400,
    errors.MetadataTooLarge: 400,
    errors.InvalidSetting: 400,
    errors.ProtocolError: 400,
    errors.CorruptBatch: 400,
    errors.UnsupportedBatch: 400,
    errors.RecordTooLarge: 413,
    errors.NotFound: 404,
    errors.UnknownTopic: 404,
    errors.UnknownPartition: 404,
    errors.UnknownSubscription: 404,
    errors.UnknownGroup: 404,
    errors.UnknownMember: 404,
    errors.UnknownTransactionalId: 404,
    errors.UnknownProducerId: 404,
    errors.UnknownConsumerId: 404,
    errors.UnknownStage: 404,
    errors.UnknownPlan: 404,
    errors.UnknownFile: 404,
    errors.Conflict: 409,
    errors.TopicExists: 409,
    # The client is known, but not allowed here: it needs another topic or another registration.
    errors.NotRegistered: 403,
    errors.AlreadyRegistered: 409,
    errors.AlreadySubscribed: 409,
    errors.StateChanged: 409,
    errors.NameInOtherMode: 409,
    errors.OutOfOrderSequence: 409,
    errors.RepeatForgotten: 409,
    errors.UnknownProducer: 409,
    errors.ProducerFenced: 409,
    errors.InvalidTransactionState: 409,
    errors.InvalidProducerIdMapping: 409,
    errors.ConcurrentTransactions: 409,
    errors.StageConflict: 409,
    errors.StageCommitted: 409,
    errors.TurnOutdated: 409,
    errors.OtherGroupProtocol: 409,
    errors.MemberIdRequired: 409,
    errors.MemberFenced: 409,
    errors.IllegalGeneration: 409,
    errors.FencedMemberEpoch: 409,
    errors.StaleMemberEpoch: 409,
    errors.InstanceInUse: 409,
    errors.RebalanceInProgress: 409,
    errors.GroupNotEmpty: 409,
    errors.GroupReadsTopic: 409,
    errors.FencedLeaderEpoch: 409,
    errors.UnknownLeaderEpoch: 409,
    errors.OffsetOutOfRange: 416,
    errors.EntriesLost: 410,
    # The topic's policy refuses the request until somebody changes the topic or its state.
    errors.Refused: 409,
    errors.TopicFull: 409,
    errors.NoSubscriber: 409,
    errors.LimitReached: 429,
    errors.GroupLoading: 503,
    errors.Unreachable: 409,
    errors.NotAllowed: 403,
    errors.QuackTimeout: 503,
    errors.NoBroker: 503,
    errors.BrokerClosing: 503,
    errors.InternalError: 500,
    errors.StorageError: 500,
    errors.StoreReadOnly: 503,
    errors.DamagedData: 500,
    errors.DamagedStore: 500,
    errors.StoreLocked: 500,
    errors.NewerFormat: 500,
    errors.UnusableDirectory: 500,
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


def status_for(error: errors.QuackError) -> int:
    """Return the HTTP status of an error: that of its class, or of the nearest base class."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def response_for_error(error: errors.QuackError | HttpFailure, path: str) -> Response:
    """Return the response to a request for `path` that failed with `error`."""
    if isinstance(error, HttpFailure):
        return failure_response(error.status, error.code, str(error), path, error.headers)
    return failure_response(status_for(error), error.code, str(error), path)


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
