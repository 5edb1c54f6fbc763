"""Connect Spark's driver and tasks to the broker over HTTP; find its address over Kafka.

A user sets only `kafka.bootstrap.servers`. The broker config `quackmq.http.address` is the address
of the HTTP listener. All data goes there: one request and one response at a time, on one
persistent connection.

A request is repeated until its deadline if the broker is unreachable or responds with 503. Then it
fails with QuackTimeout, which names the request and the broker. Repeating is safe: no request made
here adds anything twice. An error of the broker is raised as the same QuackError class that the
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
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    ResourceType,
)

from quackmq import errors
from quackmq.client.closing import ClosedOnExit
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import kafka_error
from quackmq.errors import DamagedData, InvalidRequest, QuackError, QuackTimeout
from quackmq.spark import limits

#: The broker config that holds the address of the HTTP listener.
HTTP_ADDRESS_CONFIG: Final = "quackmq.http.address"
#: The response header with the offset to read next: after the records sent, or after damaged data.
NEXT_OFFSET_HEADER: Final = "quackmq-next-offset"

_JSON: Final = "application/json"
_UNAVAILABLE: Final = 503
_ERRORS: Final[Mapping[str, type[QuackError]]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, QuackError)
}


@dataclass(frozen=True, slots=True)
class Access:
    """The addresses of a broker. `kafka` has further settings for librdkafka."""

    bootstrap: str
    http: str
    kafka: Mapping[str, str] = field(default_factory=dict)
    retry_ms: int = limits.SPARK_RETRY_MS

    def connect(self) -> Http:
        """Return a new connection, which opens on first use. The caller closes it."""
        return Http(self.http, self.retry_ms)


def find_broker(
    bootstrap: str,
    kafka: Mapping[str, str] | None = None,
    http_address: str | None = None,
    retry_ms: int = limits.SPARK_RETRY_MS,
) -> Access:
    """Return the access to a broker. Without `http_address`, ask the broker for that address.

    Raise QuackTimeout if no broker responds. Raise InvalidRequest if the address is not HOST:PORT,
    if the responding server is not a QuackMQ broker, or if the broker has no HTTP listener."""
    kafka_settings = dict(kafka or {})
    if http_address is None:
        http_address = _fetch_http_address(bootstrap, kafka_settings, Deadline(retry_ms / 1000))
    _, _, port = http_address.rpartition(":")
    if not port.isdigit():
        raise InvalidRequest(
            f"{HTTP_ADDRESS_CONFIG} cannot be {http_address!r}: set it to HOST:PORT of the HTTP "
            f"listener"
        )
    return Access(bootstrap, http_address, kafka_settings, retry_ms)


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


class Response(NamedTuple):
    """The response to a request. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Parse the body. Raise ValueError if it is not JSON."""
        return json.loads(self.body)

    @property
    def next_offset(self) -> int | None:
        """The offset to read next; None if the response has no such header."""
        text = self.headers.get(NEXT_OFFSET_HEADER)
        return None if text is None else int(text)


class Http(ClosedOnExit):
    """One connection to the HTTP listener. It is opened on first use, and again after a failure."""

    def __init__(self, address: str, retry_ms: int = limits.SPARK_RETRY_MS) -> None:
        self.address = address
        self._retry_ms = retry_ms
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection. A later request opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(
        self,
        method: str,
        path: str,
        value: object = None,
        *,
        query: Mapping[str, str | int] | None = None,
        body: bytes | memoryview | None = None,
        content_type: str = _JSON,
        headers: Mapping[str, str] | None = None,
        max_timeouts: int = 1,
    ) -> Response:
        """Send a request and return the response. `value` is sent as JSON, `body` as raw bytes.

        Raise the broker's error if it refuses the request. Raise QuackTimeout if the broker stays
        unreachable or keeps responding with 503. If the broker does not respond in time, the
        request is sent again; after `max_timeouts` timeouts, QuackTimeout is raised."""
        if value is not None:
            body = json.dumps(value).encode()
        target = f"{path}?{urlencode(query)}" if query else path
        all_headers = {
            **(headers or {}),
            **({} if body is None else {"content-type": content_type}),
        }
        deadline = Deadline(self._retry_ms / 1000)
        while True:
            try:
                response = self._send(method, target, body, all_headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                reason: object = error
                if isinstance(error, TimeoutError) and max_timeouts > 1:
                    max_timeouts -= 1
                    deadline = Deadline(self._retry_ms / 1000)
            else:
                if response.status < 400:
                    return response
                reason = _error_in(response)
                if response.status != _UNAVAILABLE:
                    raise reason
            if deadline.has_passed():
                raise QuackTimeout(
                    f"waited {deadline.duration_text()} for {method} {path} of the broker at "
                    f"{self.address}: {reason}"
                ) from (reason if isinstance(reason, Exception) else None)
            time.sleep(min(limits.SPARK_PAUSE_MS / 1000, deadline.remaining_s()))

    def get(self, path: str, **query: str | int) -> Response:
        """Send a GET request without a body; see `request`."""
        return self.request("GET", path, query=query)

    def post(self, path: str, value: object = None) -> Response:
        """Send a POST request with `value` as JSON; see `request`."""
        return self.request("POST", path, value)

    def _send(
        self,
        method: str,
        target: str,
        request_body: bytes | memoryview | None,
        headers: Mapping[str, str],
    ) -> Response:
        """Send a request once and read its whole response, of any status. Raise OSError or
        HTTPException if the connection fails; the caller closes it then."""
        connection = self._connection or self._connect()
        connection.request(method, target, request_body, dict(headers))
        response = connection.getresponse()
        body = response.read()
        response_headers = {name.lower(): text for name, text in response.getheaders()}
        if response.will_close:
            self.close()
        return Response(response.status, response_headers, body)

    def _connect(self) -> http.client.HTTPConnection:
        """Open the connection. Raise ConnectionError if the host refuses it or does not respond."""
        connect_ms = min(self._retry_ms, limits.SPARK_RESPONSE_MS)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=connect_ms / 1000)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {connect_ms} ms") from error
        connection.sock.settimeout(limits.SPARK_RESPONSE_MS / 1000)
        self._connection = connection
        return connection


# --- responses of the broker ---------------------------------------------------------------------


def _error_in(response: Response) -> QuackError:
    """Return the error that a response describes."""
    try:
        error_document = response.json
        code, detail = str(error_document["code"]), str(error_document["detail"])
    except (ValueError, KeyError, TypeError):
        return QuackError(f"the broker answered {response.status}: {response.body[:200]!r}")
    error_class = _ERRORS.get(code)
    if error_class is None:
        return OtherFailure(detail, code)
    if error_class is DamagedData:
        return DamagedData(detail, response.next_offset)
    return error_class(detail)


def _fetch_http_address(
    bootstrap: str, kafka_settings: Mapping[str, str], deadline: Deadline
) -> str:
    """Return the address of the HTTP listener from the broker's configs. Raise QuackTimeout if no
    broker responds until the deadline, InvalidRequest if the broker has no such config or
    librdkafka refuses a setting."""
    try:
        admin = AdminClient(KafkaConfig(bootstrap, "quackmq-spark", kafka_settings).shared())
        broker_id = _find_broker_id(admin, bootstrap, deadline)
        resource = ConfigResource(ResourceType.BROKER, str(broker_id))
        config_futures = admin.describe_configs(
            [resource], request_timeout=max(deadline.remaining_s(), 0.1)
        )
        configs = config_futures[resource].result(deadline.remaining_s() + 1)
    except (KafkaException, TimeoutError) as error:
        raise _connection_error(bootstrap, error, deadline) from error
    if HTTP_ADDRESS_CONFIG not in configs:
        raise InvalidRequest(
            f"kafka.bootstrap.servers: {bootstrap} does not report the address of its HTTP "
            f"listener (broker config {HTTP_ADDRESS_CONFIG}): is it a QuackMQ broker, started with "
            f"--http? If so, set the option {HTTP_ADDRESS_CONFIG}"
        )
    return str(configs[HTTP_ADDRESS_CONFIG].value)


def _find_broker_id(admin: AdminClient, bootstrap: str, deadline: Deadline) -> int:
    """Return the id of a broker in the cluster. Retry until the deadline while none responds."""
    while True:
        try:
            cluster = admin.list_topics(timeout=max(min(deadline.remaining_s(), 2.0), 0.1))
        except KafkaException as error:
            if deadline.has_passed():
                raise _connection_error(bootstrap, error, deadline) from error
            continue
        if cluster.brokers:
            return min(cluster.brokers)
        if deadline.has_passed():
            raise deadline.timeout_error(f"{bootstrap} to name a broker of its cluster")
        time.sleep(limits.SPARK_PAUSE_MS / 1000)


def _connection_error(bootstrap: str, error: Exception, deadline: Deadline) -> QuackError:
    """Return the error to raise after librdkafka failed: InvalidRequest if it refused a setting of
    the user, else QuackTimeout."""
    kafka_failure = kafka_error(error)
    if kafka_failure is not None and kafka_failure.code() == kafka_failure._INVALID_ARG:
        return InvalidRequest(f"options beginning with `kafka.`: {kafka_failure.str()}")
    reason = error if kafka_failure is None else kafka_failure.str()
    return QuackTimeout(
        f"waited {deadline.duration_text()} for a broker at kafka.bootstrap.servers={bootstrap}: "
        f"start one with `quackmq serve`, or correct the address ({reason})"
    )
