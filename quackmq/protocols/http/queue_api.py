"""The endpoints of the distributed queue (D1), with every error rule that its document lists (D2).

Parameters come in the query string, or in the body as a JSON object or a form. An endpoint rejects
parameters that it does not have. The two that create topics also accept the settings of a topic's
policy (`needs_subscriber`, `keep_until_consumed`, ...), which override the defaults of its name. A
response is an object with `status`. With `success` it holds the result. With `failure` it holds a
`message` for people and a `code` for programs, and the HTTP status is in the 400s or 500s.

`consume` removes a message from the consumer's queue. The broker commits this durably before it
responds, so a lost response is a lost message. A consumer that must not lose messages sends
`last_id`: the id of the last message that it received, or an empty one before the first. Then the
same message is returned until the consumer names it. `size` also accepts `last_id`, and then counts
the messages behind it. With both, an id that names no message of the topic acknowledges nothing.
`produce` accepts a `sequence` that grows with each message of a producer; a repeated message is not
added again. A message also reports what its consumer has `lost` before it. If the topic's policy
keeps messages until they are consumed, as in the document, it also reports how many `subscribers`
have yet to consume it (D3).
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from quackmq.broker import Message
from quackmq.broker.lifecycle import NamedLocks
from quackmq.errors import InvalidMessageId, InvalidRequest
from quackmq.model.policy import POLICY_SETTINGS, format_setting, parse_setting
from quackmq.protocols.http import limits
from quackmq.protocols.http.errors import HttpFailure
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.types import (
    DeferredResponse,
    Request,
    Response,
    decode_json,
    json_response,
    parse_query,
)
from quackmq.records.batch import NO_TIMESTAMP, Record

#: The largest body of these endpoints: a message of the largest size, with every byte escaped.
_BODY_BYTES: Final = limits.HTTP_QUEUE_BODY_BYTES
#: Characters of an unknown parameter that an error quotes.
_SHOWN_CHARS: Final = 100
_FORM: Final = "application/x-www-form-urlencoded"


def routes() -> tuple[Route, ...]:
    """Return the routes for one server; requests of the same consumer run one after another."""
    queue = QueueHandlers()
    return (
        Route("GET", "/topics", queue.list_topics),
        Route("POST", "/topics", queue.create_topic),
        Route("POST", "/producer/register", queue.register_producer),
        Route("POST", "/consumer/register", queue.register_consumer),
        Route("POST", "/producer/produce", queue.produce, _BODY_BYTES),
        # It changes something, as the document demands, so HEAD must not run it.
        Route("GET", "/consumer/consume", queue.consume, answers_head=False, is_writing_get=True),
        # A last_id advances the consumer.
        Route("GET", "/size", queue.size, answers_head=False, is_writing_get=True),
    )


#: A parameter before it is validated.
_Scalar = str | int | float | bool | None
_Optional = _Scalar | UnsetType


class Parameters:
    """The parameters of an endpoint: their names, and a decoder for JSON bodies. The decoder stops
    at an unknown field: as Python objects, a body could need forty times its memory.
    """

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)
        fields: list[Any] = [(name, _Optional, UNSET) for name in names]
        body = msgspec.defstruct(
            "Parameters", fields, frozen=True, forbid_unknown_fields=True, module=__name__
        )
        self.decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)


_SETTINGS: Final = sorted(POLICY_SETTINGS)
_NONE: Final = Parameters()
_NEW_TOPIC: Final = Parameters("topic_name", *_SETTINGS)
_PRODUCER: Final = Parameters("topic", "producer_id", *_SETTINGS)
_CONSUMER: Final = Parameters("topic", "consumer_id")
_MESSAGE: Final = Parameters("topic", "producer_id", "message", "sequence")
_CONSUMED: Final = Parameters("topic", "consumer_id", "last_id")


class QueueHandlers:
    """The handlers. Call them only from the server's loop."""

    def __init__(self) -> None:
        # Reading a message and committing it are two broker calls. With this lock no other request
        # of the same consumer runs in between.
        self._consumer_locks = NamedLocks()

    async def list_topics(self, request: Request) -> Response:
        read_parameters(request, _NONE)
        return _success(topics=sorted(request.broker.topics()))

    async def create_topic(self, request: Request) -> Response:
        """Create a topic with the defaults of its name, and with the settings in the request."""
        parameters = read_parameters(request, _NEW_TOPIC)
        name = _required_text(parameters, "topic_name")
        default = request.broker.topic_defaults.policy_for(name)
        policy = dataclasses.replace(default, **_topic_settings(parameters))
        await request.broker.create_topic(request.caller, name, policy=policy)
        return _success(message=f"topic {name} is there")

    async def register_producer(self, request: Request) -> Response:
        """Register a producer with a topic; return its id. Without an id the producer is new. If
        the topic is created, it gets the settings in the request.
        """
        parameters = read_parameters(request, _PRODUCER)
        producer_id = await request.broker.registrations.register_producer(
            request.caller,
            _required_text(parameters, "topic"),
            _optional_text(parameters, "producer_id"),
            _topic_settings(parameters),
        )
        return _success(producer_id=producer_id)

    async def register_consumer(self, request: Request) -> Response:
        """Register a consumer with a topic; return its id. Without an id the consumer is new."""
        parameters = read_parameters(request, _CONSUMER)
        consumer_id = await request.broker.registrations.register_consumer(
            request.caller,
            _required_text(parameters, "topic"),
            _optional_text(parameters, "consumer_id"),
        )
        return _success(consumer_id=consumer_id)

    def produce(self, request: Request) -> DeferredResponse | Awaitable[Response]:
        """Publish a message of a registered producer. Without a sequence it takes the fast path,
        which needs no task. `_produce` handles all other messages.
        """
        parameters = read_parameters(request, _MESSAGE)
        topic = _required_text(parameters, "topic")
        producer_id = _required_text(parameters, "producer_id")
        value = _required_text(parameters, "message").encode()
        sequence = _optional_number(parameters, "sequence")
        request.broker.registrations.check_producer(topic, producer_id)
        if sequence is None:
            put = request.broker.messages.begin_put(request.caller, topic, value)
            if put is not None:
                return DeferredResponse(
                    put.appended, lambda appended: _success(message_id=put.id_at(appended))
                )
        return self._produce(request, topic, value, producer_id, sequence)

    async def _produce(
        self, request: Request, topic: str, value: bytes, producer_id: str, sequence: int | None
    ) -> Response:
        """Publish a message that has a sequence, or that cannot be published at once."""
        put = await request.broker.messages.put(
            request.caller,
            topic,
            [Record(0, NO_TIMESTAMP, None, value)],
            publisher=None if sequence is None else producer_id,
            sequence=sequence,
        )
        fields: dict[str, object] = {"repeated": put.repeated} if sequence is not None else {}
        # The broker may have forgotten the id of a repeated message.
        return _success(message_id=put.ids[0] if put.ids else None, **fields)

    async def consume(self, request: Request) -> Response:
        """Return the next message of a registered consumer. Without `last_id` the message is also
        removed from its queue. Raise HttpFailure with status 404 if there is none.
        """
        parameters = read_parameters(request, _CONSUMED)
        topic = _required_text(parameters, "topic")
        consumer_id = _required_text(parameters, "consumer_id")
        last_id = _optional_text(parameters, "last_id")
        broker, caller = request.broker, request.caller
        broker.registrations.check_consumer(topic, consumer_id)
        consumed = 0
        if last_id is not None:
            # An empty `last_id` means that the consumer has received no message yet.
            message = await broker.get(caller, consumer_id, topic, last_id or None)
        else:
            async with self._consumer_locks.hold((topic, consumer_id)):
                message = await broker.get(caller, consumer_id, topic, None)
                if message is not None:
                    await broker.commit(caller, consumer_id, topic, message.id)
                    consumed = 1
        if message is None:
            raise HttpFailure(404, "empty", f"topic {topic} has no message for {consumer_id}")
        return _success(
            message_id=message.id, **_render_value(message), **_render_losses(message, consumed)
        )

    async def size(self, request: Request) -> Response:
        """Return how many messages a consumer has not consumed. Acknowledge `last_id` first, if it
        is there.
        """
        parameters = read_parameters(request, _CONSUMED)
        topic = _required_text(parameters, "topic")
        consumer_id = _required_text(parameters, "consumer_id")
        last_id = _optional_text(parameters, "last_id")
        broker = request.broker
        broker.registrations.check_consumer(topic, consumer_id)
        if last_id:
            # An id that names no message acknowledges nothing, as in `consume`.
            with suppress(InvalidMessageId):
                await broker.commit(request.caller, consumer_id, topic, last_id)
        return _success(size=await broker.lag(request.caller, consumer_id, topic))


def read_parameters(request: Request, expected: Parameters) -> Mapping[str, Any]:
    """Return the parameters of the query and the body. Raise InvalidRequest for an unknown
    parameter, and for one that is in both.
    """
    query = request.query
    _check_names(query, expected)
    if not request.body:
        return query
    body = _read_body(request, expected)
    if not query:
        return body
    repeated = sorted(query.keys() & body.keys())
    if repeated:
        raise InvalidRequest(
            f"parameter {repeated[0][:100]!r} is both in the query and in the body"
        )
    return {**query, **body}


def _check_names(parameters: Mapping[str, Any], expected: Parameters) -> None:
    """Raise InvalidRequest for a parameter that the endpoint does not have."""
    unknown = parameters.keys() - expected.names
    if unknown:
        name = min(unknown)[:_SHOWN_CHARS]
        near = difflib.get_close_matches(name, expected.names, n=1)
        parameter_list = f"the parameters are {', '.join(sorted(expected.names)) or 'none'}"
        hint = f"did you mean {near[0]!r}?" if near else parameter_list
        raise InvalidRequest(f"unknown parameter {name!r}: {hint}")


def _read_body(request: Request, expected: Parameters) -> Mapping[str, Any]:
    """Decode a JSON object, whatever the content type says, or a form as browsers and curl send it.
    `curl -d` sends JSON with the content type of a form. So that type is trusted only if the body
    cannot be JSON.
    """
    if not request.body.startswith(b"{"):
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type == _FORM and not request.body.lstrip().startswith(b"{"):
            form = parse_query(request.body)
            _check_names(form, expected)
            return form
    parameters = msgspec.structs.asdict(decode_json(request.body, expected.decoder))
    return {name: value for name, value in parameters.items() if value is not UNSET}


def _required_text(parameters: Mapping[str, Any], name: str) -> str:
    value = _optional_text(parameters, name)
    if value is None:
        raise InvalidRequest(f"the parameter {name} is missing")
    return value


def _optional_text(parameters: Mapping[str, Any], name: str) -> str | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"the parameter {name} must be a string")
    return value


def _optional_number(parameters: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number, which is text in a query; None if it is missing."""
    value = parameters.get(name)
    # The greatest 64-bit number has 19 digits, and int() is slow for very long texts.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    # `isinstance` would accept true and false.
    if value is not None and type(value) is not int:
        raise InvalidRequest(f"the parameter {name} must be a whole number")
    return value


def _topic_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a topic's policy that a request names. In a query they are text; null
    and -1 mean no bound. Raise InvalidPolicy.
    """
    settings = {}
    for name in parameters.keys() & POLICY_SETTINGS:
        value = parameters[name]
        text = value if isinstance(value, str) else format_setting(value)
        settings[name] = parse_setting(name, text)
    return settings


def _render_value(message: Message) -> dict[str, object]:
    """Return the value of a message as JSON: text, or base64 if it is not UTF-8."""
    value = message.record.value
    if value is None:
        return {"message": None}
    try:
        return {"message": str(value, "utf-8")}
    except UnicodeDecodeError:
        return {"message": base64.b64encode(value).decode(), "encoding": "base64"}


def _render_losses(message: Message, consumed: int) -> dict[str, object]:
    """Return the fields that report messages lost before this one. If the topic keeps messages
    until they are consumed, also return how many consumers have yet to consume it. `consumed` is
    the number of consumers, 0 or 1, that have consumed it since it was read.
    """
    fields: dict[str, object] = {}
    if message.lost:
        fields["lost"] = message.lost
        fields["lost_ranges"] = [each._asdict() for each in message.lost_ranges]
    if message.consumers_left is not None:
        fields["subscribers"] = message.consumers_left - consumed
    return fields


def _success(**fields: object) -> Response:
    """Return a response with the status `success` and these fields."""
    return json_response(200, {"status": "success", **fields})
