"""What each request asks of the broker, and what is answered."""

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
    done,
    got,
    last_sequence,
    parse_request,
    subscribed,
)
from quackmq.protocols.zmq.codec.words import failed
from quackmq.records.batch import NO_TIMESTAMP, Record

log = logging.getLogger(__name__)

#: A frame in two pieces: a content is not copied just to stand behind its words.
Answer = tuple[bytes, bytes]
Begun = asyncio.Future[AppendResult] | Coroutine[Any, Any, Answer]


class Asker(Protocol):
    """What a request has to know of who sent it."""

    def caller(self, client: str) -> Caller: ...

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait that is ended, with BrokerClosing, when the peer or the door goes."""


def begin(broker: Broker, peer: Asker, frame: bytes) -> Begun | Answer:
    """Begin with what a frame asks for, whatever it is. Most puts need no task: what is to be
    answered to one is `put_answer` when its future is done. Others are to be awaited."""
    try:
        request = parse_request(frame)
        caller = peer.caller(request.client)
        if isinstance(request, Put) and request.sequence is None:
            put = broker.messages.put_at_once(caller, request.topic, request.content)
            if put is not None:
                return put
        return _answer(broker, caller, peer, request, frame)
    except Exception as error:
        return refusal(error)


def put_answer(frame: bytes, put: asyncio.Future[AppendResult]) -> Answer:
    if put.cancelled():
        return refusal(BrokerClosing("the broker is closing: ask again when it is back"))
    error = put.exception()
    return (b"", frame) if error is None else refusal(error)


def refusal(error: BaseException) -> Answer:
    if isinstance(error, QuackError):
        return failed(error.code, str(error)), b""
    log.error("a request failed", exc_info=error)
    return failed(QuackError.code, "the broker failed to do this; its log says why"), b""


async def _answer(
    broker: Broker, caller: Caller, peer: Asker, request: Request, frame: bytes
) -> Answer:
    try:
        if isinstance(request, Put):
            return await _put(broker, caller, request, frame)
        if isinstance(request, Get):
            return await _get(broker, caller, request, peer)
        return await _other(broker, caller, request), b""
    except Exception as error:
        return refusal(error)


async def _put(broker: Broker, caller: Caller, request: Put, frame: bytes) -> Answer:
    record = Record(0, NO_TIMESTAMP, None, request.content)
    if request.sequence is None:
        await broker.messages.put(caller, request.topic, (record,))
        return b"", frame  # the document's answer to PUT is the request
    await broker.messages.put(
        caller,
        request.topic,
        (record,),
        publisher=request.client,
        sequence=request.sequence,
    )
    return done(request), b""


async def _get(broker: Broker, caller: Caller, request: Get, peer: Asker) -> Answer:
    # This moves the cursor, so it is not cut short if the peer goes; what waits moves nothing.
    # A frame has no place for what is lost: it is told by an error, and the next GET goes on.
    client, topic = request.client, request.topic
    message = await broker.get(caller, client, topic, request.last_id, raise_on_loss=True)
    if message is None:
        with peer.waiting():
            wait_ms = limits.ZMQ_GET_WAIT_MS
            message = await broker.get(caller, client, topic, None, wait_ms, raise_on_loss=True)
    if message is None:
        waited_s = limits.ZMQ_GET_WAIT_MS / 1000
        return failed(EMPTY, f"no message in {request.topic} for {waited_s:g} s: ask again"), b""
    return got(request, message.id, message.record.value)


async def _other(broker: Broker, caller: Caller, request: Request) -> bytes:
    if isinstance(request, Subscribe):
        is_new = await broker.subscribe(caller, request.client, request.topic)
        return subscribed(request, is_new)
    if isinstance(request, Unsubscribe):
        await broker.unsubscribe(caller, request.client, request.topic)
        return done(request)
    assert isinstance(request, LastSequence), "puts and gets are answered elsewhere"
    try:
        held = await broker.messages.last_sequence(caller, request.topic, request.client)
    except UnknownTopic:
        held = None  # a publisher's first question, before the first put brings the topic to life
    return last_sequence(request, held)
