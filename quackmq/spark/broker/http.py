"""How Spark's driver and tasks speak with the broker: HTTP, whose address Kafka's protocol tells.

A user names `kafka.bootstrap.servers` and nothing else. The broker says in its configs where its
HTTP door listens (`quackmq.http.address`), and everything that moves data goes there: one request,
one answer, on one connection that is kept.

Promised: a request that finds the broker away, or told to come back, is made again until its time
is over, and fails then with QuackTimeout, which says what was wanted and of whom. Every request
made through here can be made again: none adds anything twice. What the broker refuses comes back as
the very error that it raised.

Who may call: one thread at a time for each `Http`. An `Access` is a value and travels with tasks.
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

#: The broker's config that says where its HTTP door listens.
HTTP_ADDRESS_CONFIG: Final = "quackmq.http.address"
#: Where reading can go on: behind what was answered, or behind what is damaged.
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
    """Where the broker is. `kafka` are settings of librdkafka's beside the address."""

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
    """Ask the broker where its HTTP door is, unless that is given. QuackTimeout where nobody
    answers; InvalidRequest where whoever does is no broker of ours, or has no such door."""
    extra = dict(kafka or {})
    if http_address is None:
        http_address = _ask_for_address(bootstrap, extra, Deadline(retry_ms / 1000))
    if http_address.rpartition(":")[2].isdigit() is False:
        raise InvalidRequest(
            f"{HTTP_ADDRESS_CONFIG} cannot be {http_address!r}: it is HOST:PORT of the HTTP door"
        )
    return Access(bootstrap, http_address, extra, retry_ms)


def path_of(*segments: str | int) -> str:
    """A path of these segments, below the API's root."""
    return "/v1/" + "/".join(quote(str(segment), safe="") for segment in segments)


class OtherFailure(QuackError):
    """The broker said no for a reason that is HTTP's own, or a later broker's; `reason` is its
    word for it."""

    code = "other_failure"

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer(NamedTuple):
    """What a request was answered with; names of headers are in lower case."""

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
    """One connection to the HTTP door, which is made when it is needed and again when it broke."""

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
        """`value` goes as JSON, `body` as it is. The broker's errors are raised as they are;
        QuackTimeout if it stays away, keeps telling us to come back, or has taken the request and
        does not answer: that is waited for, and asked again, so many times."""
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
            if deadline.passed():
                raise QuackTimeout(
                    f"waited {deadline.words()} for {method} {path} of the broker at "
                    f"{self.address}: {reason}"
                ) from (reason if isinstance(reason, Exception) else None)
            time.sleep(min(limits.SPARK_PAUSE_MS / 1000, deadline.left()))

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
        """A host that says nothing at all is away, like one that refuses."""
        connect_ms = min(self._retry_ms, limits.SPARK_ANSWER_MS)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=connect_ms / 1000)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {connect_ms} ms") from error
        connection.sock.settimeout(limits.SPARK_ANSWER_MS / 1000)
        self._connection = connection
        return connection


# --- what the broker says ------------------------------------------------------------------------


def _failure(answer: Answer) -> QuackError:
    """The error that the broker's answer tells of."""
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
        asked = admin.describe_configs([resource], request_timeout=max(deadline.left(), 0.1))
        configs = asked[resource].result(deadline.left() + 1)
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
    """The id of a broker that is there; asked again while nobody answers."""
    while True:
        try:
            told = admin.list_topics(timeout=max(min(deadline.left(), 2.0), 0.1))
        except KafkaException as exception:
            if deadline.passed():
                raise _unreachable(bootstrap, exception, deadline) from exception
            continue
        if told.brokers:
            return min(told.brokers)
        if deadline.passed():
            raise deadline.timeout(f"a broker to be told of by {bootstrap}")
        time.sleep(limits.SPARK_PAUSE_MS / 1000)


def _unreachable(bootstrap: str, exception: Exception, deadline: Deadline) -> QuackError:
    error = kafka_error(exception)
    if error is not None and error.code() == error._INVALID_ARG:
        return InvalidRequest(f"options beginning with `kafka.`: {error.str()}")
    reason = exception if error is None else error.str()
    return QuackTimeout(
        f"waited {deadline.words()} for a broker at kafka.bootstrap.servers={bootstrap}: {reason}"
    )
