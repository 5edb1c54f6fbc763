"""Handle the requests of the queue's REP socket: PUT, GET, SUB, UNSUB, PUTN and LAST.

`begin_request` parses a frame and calls the broker. Every failure becomes an `ERR` reply, so a REQ
socket always gets a reply.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol

from quackmq.broker import Broker, Caller
from quackmq.errors import BrokerClosing, QuackError, UnknownTopic
from quackmq.model.topic import AppendResult
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec.queue_language import (
    EMPTY,
    Get,
    LastSequence,
    Put,
    Request,
    Subscribe,
    Unsubscribe,
    encode_done_reply,
    encode_get_reply,
    encode_last_reply,
    encode_subscribe_reply,
    parse_request,
)
from quackmq.protocols.zmq.codec.words import encode_error
from quackmq.records.batch import NO_TIMESTAMP, Record

log = logging.getLogger(__name__)

#: The words and the content of a frame. They are separate so that the content is not copied.
Reply = tuple[bytes, bytes]
#: A reply that is not known yet. The future is that of a put: `put_reply` makes the reply of it.
PendingReply = asyncio.Future[AppendResult] | Coroutine[Any, Any, Reply]


class Requester(Protocol):
    """The peer that sent a request."""

    def caller(self, client: str) -> Caller:
        """Return the caller for the client that the request names."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait. It raises BrokerClosing when the peer disconnects or the
        server closes.
        """


def begin_request(broker: Broker, requester: Requester, frame: bytes) -> PendingReply | Reply:
    """Start to handle a request; return its reply, or a pending reply. Never raise.

    Most puts need no task: the broker returns a future, which is returned as it is.
    """
    try:
        request = parse_request(frame)
        caller = requester.caller(request.client)
        if isinstance(request, Put) and request.sequence is None:
            put = broker.messages.begin_put(caller, request.topic, request.content)
            if put is not None:
                return put.appended
        return _reply(broker, caller, requester, request, frame)
    except Exception as error:
        return error_reply(error)


def put_reply(frame: bytes, put: asyncio.Future[AppendResult]) -> Reply:
    """Return the reply to a PUT whose future is done: the request's own frame, or an error."""
    if put.cancelled():
        return error_reply(BrokerClosing("the broker is closing: ask again when it is back"))
    error = put.exception()
    return (b"", frame) if error is None else error_reply(error)


def error_reply(error: BaseException) -> Reply:
    """Return the `ERR` reply for an error; log an error that the broker did not expect."""
    if isinstance(error, QuackError):
        return encode_error(error.code, str(error)), b""
    log.error("a request failed", exc_info=error)
    return encode_error(QuackError.code, "the broker failed to do this; its log says why"), b""


async def _reply(
    broker: Broker, caller: Caller, requester: Requester, request: Request, frame: bytes
) -> Reply:
    """Handle a request; return its reply, which is `ERR` after any failure."""
    try:
        if isinstance(request, Put):
            return await _put_message(broker, caller, request, frame)
        if isinstance(request, Get):
            return await _get_message(broker, caller, request, requester)
        return await _handle_other(broker, caller, request), b""
    except Exception as error:
        return error_reply(error)


async def _put_message(broker: Broker, caller: Caller, request: Put, frame: bytes) -> Reply:
    """Publish a message, with the publisher's number if the request has one."""
    record = Record(0, NO_TIMESTAMP, None, request.content)
    if request.sequence is None:
        await broker.messages.put(caller, request.topic, (record,))
        return b"", frame  # the reply to PUT repeats the request
    await broker.messages.put(
        caller,
        request.topic,
        (record,),
        publisher=request.client,
        sequence=request.sequence,
    )
    return encode_done_reply(request), b""


async def _get_message(broker: Broker, caller: Caller, request: Get, requester: Requester) -> Reply:
    """Acknowledge the last message and return the next one; wait for it if there is none yet.

    A reply has no field for lost messages. So a loss is reported as an error, and the next GET
    continues after it.
    """
    client, topic = request.client, request.topic
    # The first call moves the cursor, so it is completed even if the peer disconnects. The second
    # one only waits, and may be cancelled.
    message = await broker.get(caller, client, topic, request.last_id, raise_on_loss=True)
    if message is None:
        with requester.waiting():
            wait_ms = limits.ZMQ_GET_WAIT_MS
            message = await broker.get(caller, client, topic, None, wait_ms, raise_on_loss=True)
    if message is None:
        waited_s = limits.ZMQ_GET_WAIT_MS / 1000
        text = f"no message in {request.topic} for {waited_s:g} s: ask again"
        return encode_error(EMPTY, text), b""
    return encode_get_reply(request, message.id, message.record.value)


async def _handle_other(broker: Broker, caller: Caller, request: Request) -> bytes:
    """Handle SUB, UNSUB and LAST; return the words of the reply."""
    if isinstance(request, Subscribe):
        is_new = await broker.subscribe(caller, request.client, request.topic)
        return encode_subscribe_reply(request, is_new)
    if isinstance(request, Unsubscribe):
        await broker.unsubscribe(caller, request.client, request.topic)
        return encode_done_reply(request)
    assert isinstance(request, LastSequence), "puts and gets are handled elsewhere"
    try:
        sequence = await broker.messages.last_sequence(caller, request.topic, request.client)
    except UnknownTopic:
        sequence = None  # a new publisher asks before its first put creates the topic
    return encode_last_reply(request, sequence)
