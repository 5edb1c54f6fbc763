"""Connect Spark's driver and tasks to the broker over HTTP; find its address over Kafka.

A user gives `kafka.bootstrap.servers` and nothing else. The broker config `quackmq.http.address`
says where the HTTP listener is. All data goes there: one request and one response at a time, on one
connection that is kept.

A request is repeated until its time is over if the broker is away or answers 503. Then it fails
with QuackTimeout, which names the request and the broker. Every request made here can be repeated:
none adds anything twice. An error of the broker is raised as the same QuackError class that the
broker raised.

An `Http` is not thread-safe: call each from one thread at a time. An `Access` is a value that Spark
can send to tasks.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, urlencode

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    ResourceType,
)

from quackmq import errors
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import Deadline, kafka_error
from quackmq.errors import DamagedData, InvalidRequest, QuackError, QuackTimeout
from quackmq.spark import limits

#: The broker config that holds the address of the HTTP listener.
HTTP_ADDRESS_CONFIG: Final = "quackmq.http.address"
#: The response header with the offset to read next: after the records sent, or after damaged data.
NEXT_OFFSET_HEADER: Final = "quackmq-next-offset"

_JSON: Final = "application/json"
_COME_BACK: Final = 503
_ERRORS: Final[Mapping[str, type[QuackError]]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, QuackError)
}


@dataclass(frozen=True, slots=True)
class Access:
    """Hold the addresses of a broker. `kafka` holds further settings for librdkafka."""

    bootstrap: str
    http: str
    kafka: Mapping[str, str] = field(default_factory=dict)
    retry_ms: int = limits.SPARK_RETRY_MS

    def connect(self) -> Http:
        return Http(self.http, self.retry_ms)


def find(
    bootstrap: str,
    kafka: Mapping[str, str] | None = None,
    http_address: str | None = None,
    retry_ms: int = limits.SPARK_RETRY_MS,
) -> Access:
    """Return the access to a broker; ask the broker for its HTTP address unless it is given.

    Raise QuackTimeout if no broker answers. Raise InvalidRequest if the address is not HOST:PORT,
    if the answering server is not a QuackMQ broker, or if the broker has no HTTP listener."""
    extra = dict(kafka or {})
    if http_address is None:
        http_address = _ask_for_address(bootstrap, extra, Deadline(retry_ms / 1000))
    if http_address.rpartition(":")[2].isdigit() is False:
        raise InvalidRequest(
            f"{HTTP_ADDRESS_CONFIG} cannot be {http_address!r}: it is HOST:PORT of the HTTP door"
        )
    return Access(bootstrap, http_address, extra, retry_ms)


def path_of(*segments: str | int) -> str:
    """Join segments to a path under the API's root; quote each segment."""
    return "/v1/" + "/".join(quote(str(segment), safe="") for segment in segments)


class OtherFailure(QuackError):
    """The broker refused a request with an error code that no QuackError class has: a code of HTTP
    itself, or of a newer broker. `reason` is that code."""

    code = "other_failure"

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer(NamedTuple):
    """Hold the response to a request. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def next_offset(self) -> int | None:
        text = self.headers.get(NEXT_OFFSET_HEADER)
        return None if text is None else int(text)


class Http:
    """Keep one connection to the HTTP listener: open it when needed, and again after a failure."""

    def __init__(self, address: str, retry_ms: int = limits.SPARK_RETRY_MS) -> None:
        self.address = address
        self._retry_ms = retry_ms
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(
        self,
        method: str,
        path: str,
        value: object = None,
        *,
        query: Mapping[str, str | int] | None = None,
        body: bytes | memoryview | None = None,
        content_type: str = _JSON,
        headers: Mapping[str, str] | None = None,
        waits: int = 1,
    ) -> Answer:
        """Send a request and return the response. `value` is sent as JSON, `body` as it is.

        Raise the broker's error if it refuses the request. Raise QuackTimeout if the broker stays
        away or keeps answering 503. A broker that has taken the request and does not respond in
        time is asked again, `waits` times in all; then QuackTimeout is raised."""
        if value is not None:
            body = json.dumps(value).encode()
        target = f"{path}?{urlencode(query)}" if query else path
        said = {**(headers or {}), **({} if body is None else {"content-type": content_type})}
        deadline = Deadline(self._retry_ms / 1000)
        while True:
            try:
                answer = self._ask_once(method, target, body, said)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                reason: object = error
                if isinstance(error, TimeoutError) and waits > 1:
                    waits -= 1
                    deadline = Deadline(self._retry_ms / 1000)
            else:
                if answer.status < 400:
                    return answer
                reason = _failure(answer)
                if answer.status != _COME_BACK:
                    raise reason
            if deadline.has_passed():
                raise QuackTimeout(
                    f"waited {deadline.duration_text()} for {method} {path} of the broker at "
                    f"{self.address}: {reason}"
                ) from (reason if isinstance(reason, Exception) else None)
            time.sleep(min(limits.SPARK_PAUSE_MS / 1000, deadline.remaining_s()))

    def get(self, path: str, **query: str | int) -> Answer:
        return self.ask("GET", path, query=query)

    def post(self, path: str, value: object = None) -> Answer:
        return self.ask("POST", path, value)

    def _ask_once(
        self,
        method: str,
        target: str,
        body: bytes | memoryview | None,
        headers: Mapping[str, str],
    ) -> Answer:
        connection = self._connection or self._connected()
        connection.request(method, target, body, dict(headers))
        answer = connection.getresponse()
        data = answer.read()
        said = {name.lower(): text for name, text in answer.getheaders()}
        if answer.will_close:
            self.close()
        return Answer(answer.status, said, data)

    def _connected(self) -> http.client.HTTPConnection:
        """Open the connection. A host that does not respond counts as away, like one that refuses:
        raise ConnectionError."""
        connect_ms = min(self._retry_ms, limits.SPARK_ANSWER_MS)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=connect_ms / 1000)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {connect_ms} ms") from error
        connection.sock.settimeout(limits.SPARK_ANSWER_MS / 1000)
        self._connection = connection
        return connection


# --- responses of the broker ---------------------------------------------------------------------


def _failure(answer: Answer) -> QuackError:
    """Return the error that a response describes."""
    try:
        problem = answer.json
        code, detail = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return QuackError(f"the broker answered {answer.status}: {answer.body[:200]!r}")
    kind = _ERRORS.get(code)
    if kind is None:
        return OtherFailure(detail, code)
    if kind is DamagedData:
        return DamagedData(detail, answer.next_offset)
    return kind(detail)


def _ask_for_address(bootstrap: str, extra: Mapping[str, str], deadline: Deadline) -> str:
    try:
        admin = AdminClient(KafkaConfig(bootstrap, "quackmq-spark", extra).shared())
        node = _node_of(admin, bootstrap, deadline)
        resource = ConfigResource(ResourceType.BROKER, str(node))
        asked = admin.describe_configs([resource], request_timeout=max(deadline.remaining_s(), 0.1))
        configs = asked[resource].result(deadline.remaining_s() + 1)
    except (KafkaException, TimeoutError) as exception:
        raise _unreachable(bootstrap, exception, deadline) from exception
    if HTTP_ADDRESS_CONFIG not in configs:
        raise InvalidRequest(
            f"kafka.bootstrap.servers: {bootstrap} does not say where its HTTP door is (broker "
            f"config {HTTP_ADDRESS_CONFIG}): is it a QuackMQ broker, served with --http? Else give "
            f"the option {HTTP_ADDRESS_CONFIG}"
        )
    return str(configs[HTTP_ADDRESS_CONFIG].value)


def _node_of(admin: AdminClient, bootstrap: str, deadline: Deadline) -> int:
    """Return the id of a broker in the cluster; ask again until the deadline while none answers."""
    while True:
        try:
            told = admin.list_topics(timeout=max(min(deadline.remaining_s(), 2.0), 0.1))
        except KafkaException as exception:
            if deadline.has_passed():
                raise _unreachable(bootstrap, exception, deadline) from exception
            continue
        if told.brokers:
            return min(told.brokers)
        if deadline.has_passed():
            raise deadline.timeout_error(f"a broker to be told of by {bootstrap}")
        time.sleep(limits.SPARK_PAUSE_MS / 1000)


def _unreachable(bootstrap: str, exception: Exception, deadline: Deadline) -> QuackError:
    error = kafka_error(exception)
    if error is not None and error.code() == error._INVALID_ARG:
        return InvalidRequest(f"options beginning with `kafka.`: {error.str()}")
    reason = exception if error is None else error.str()
    return QuackTimeout(
        f"waited {deadline.duration_text()} for a broker at kafka.bootstrap.servers={bootstrap}: "
        f"{reason}"
    )
