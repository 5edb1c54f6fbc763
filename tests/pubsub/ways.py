"""Ways to put and get: one small interface over each listener, for programs that are killed.

Each way does what its listener offers for exactly once, and nothing beyond that: a put is numbered
or has a key of its own, a get names the last id. Whoever gets no answer is told `Unsure` and asks
again.
"""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from quackmq.errors import BrokerClosing, MemberFenced, ProducerFenced, QuackTimeout
from tests.pubsub.checker import END

if TYPE_CHECKING:
    from quackmq import Client

#: How long an answer may take. Short, since some are lost; but a broker may be busy.
ANSWER_S: Final = 1.5
#: How long a get waits in the broker.
WAIT_MS: Final = 500


class Unsure(Exception):
    """No answer, or one that says to ask again: it may be done or not."""


class CannotGoOn(Exception):
    """This client has to be made anew."""


class Got(NamedTuple):
    id: str
    value: str

    @property
    def is_end(self) -> bool:
        return self.value == END


class Way(ABC):
    """For one thread. `name` is the client's durable one, and `directory` is its own."""

    #: Whether a put may have several messages.
    puts_many: ClassVar[bool] = True
    #: Whether a producer can ask for the last number that is held.
    tells_last_number: ClassVar[bool] = True

    def __init__(self, address: str, name: str, directory: Path) -> None:
        self.address = address
        self.name = name
        self.directory = directory

    @abstractmethod
    def last_number(self, topic: str) -> int | None: ...

    @abstractmethod
    def put(self, topic: str, number: int, values: Sequence[str]) -> None: ...

    @abstractmethod
    def subscribe(self, topic: str) -> None: ...

    @abstractmethod
    def get(self, topic: str, last_id: str | None) -> Got | None:
        """None: there is nothing now."""

    @abstractmethod
    def close(self) -> None: ...


def key_of(producer: str, number: int, piece: int) -> str:
    """Each producer has four keys, so that its messages go to several partitions."""
    return f"{producer}-{(number + piece) % 4}"


# --- HTTP -----------------------------------------------------------------------------------------


class HttpWay(Way):
    """The API under /v1. Puts are numbered."""

    def __init__(self, address: str, name: str, directory: Path) -> None:
        super().__init__(address, name, directory)
        host, port = address.split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_S)

    def last_number(self, topic: str) -> int | None:
        found: int | None = self._ask("GET", f"/v1/topics/{topic}/publishers/{self.name}")[
            "last_sequence"
        ]
        return found

    def put(self, topic: str, number: int, values: Sequence[str]) -> None:
        messages = [
            {"key": key_of(self.name, number, piece), "value": value}
            for piece, value in enumerate(values)
        ]
        self._publish(topic, number, {"messages": messages})

    def _publish(self, topic: str, number: int, body: object) -> None:
        path = f"/v1/topics/{topic}/messages?publisher={self.name}&sequence={number}"
        self._ask("POST", path, body)

    def subscribe(self, topic: str) -> None:
        self._ask("PUT", self._subscription(topic), {"start": "beginning"})

    def get(self, topic: str, last_id: str | None) -> Got | None:
        asking = {"last_id": last_id, "wait_ms": WAIT_MS}
        answer = self._ask("POST", f"{self._subscription(topic)}/get", asking)
        return Got(answer["id"], answer["value"]) if answer else None

    def close(self) -> None:
        self._connection.close()

    def _subscription(self, topic: str) -> str:
        return f"/v1/subscriptions/{self.name}/topics/{topic}"

    def _ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            sent = {**headers, "Content-Type": "application/json"}
            self._connection.request(method, path, data, sent)
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unsure(f"{method} {path}: {error!r}") from error
        has_body = response.status != http.HTTPStatus.NO_CONTENT
        if has_body and response.getheader("Content-Length") is None:
            # http.client takes a head that is cut off for one that ends there.
            self._connection.close()
            raise Unsure(f"{method} {path}: the answer was torn")
        if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise Unsure(f"{method} {path}: {answer!r}")
        assert response.status < http.HTTPStatus.BAD_REQUEST, f"{method} {path}: {answer!r}"
        return json.loads(answer) if answer else {}


class HttpKeysWay(HttpWay):
    """The same, but each put has a key of its own."""

    tells_last_number = False

    def _publish(self, topic: str, number: int, body: object) -> None:
        key = {"Idempotency-Key": f"{self.name}-{number}"}
        self._ask("POST", f"/v1/topics/{topic}/messages", body, key)


# --- ZeroMQ ---------------------------------------------------------------------------------------


class ZmqWay(Way):
    """Frames as the documentation has them, from a bare REQ socket, which is made anew after each
    answer that did not come."""

    puts_many = False

    def __init__(self, address: str, name: str, directory: Path) -> None:
        super().__init__(address, name, directory)
        import zmq  # what a way does not need, it does not wait for

        self._zmq = zmq
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def last_number(self, topic: str) -> int | None:
        answer = self._ask(f"LAST {self.name} {topic}")
        number = int(answer.split(" ")[3])
        return None if number < 0 else number

    def put(self, topic: str, number: int, values: Sequence[str]) -> None:
        (value,) = values
        answer = self._ask(f"PUTN {self.name} {topic} {number} {value}")
        assert answer == f"PUTN {self.name} {topic} {number}", answer

    def subscribe(self, topic: str) -> None:
        answer = self._ask(f"SUB {self.name} {topic}")
        assert answer in (f"SUB {self.name} {topic}", f"RESUB {self.name} {topic}"), answer

    def get(self, topic: str, last_id: str | None) -> Got | None:
        answer = self._ask(f"GET {self.name} {topic} {last_id or '-1'}")
        if answer.startswith("ERR empty"):
            return None
        assert answer.startswith(f"GET {self.name} {topic} "), answer
        _, _, _, message_id, value = answer.split(" ", 4)
        return Got(message_id, value)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _ask(self, request: str) -> str:
        if self._socket is None:
            self._socket = self._context.socket(self._zmq.REQ)
            self._socket.linger = 0
            self._socket.connect(f"tcp://{self.address}")
        self._socket.send_string(request)
        if not self._socket.poll(round(ANSWER_S * 1000)):
            # It may still come, and must not be taken for the answer to something else.
            self._socket.close()
            self._socket = None
            raise Unsure(f"{request}: no answer")
        answer = self._socket.recv_string()
        if answer.startswith("ERR closing "):
            raise Unsure(f"{request}: {answer}")
        return answer


class ZmqClientWay(Way):
    """The client that comes with the broker. The id is kept by the program."""

    puts_many = False

    def __init__(self, address: str, name: str, directory: Path) -> None:
        super().__init__(address, name, directory)
        from quackmq.client.zmq import ZmqClient

        self._client = ZmqClient(address, name, timeout=ANSWER_S)

    def last_number(self, topic: str) -> int | None:
        with _asked_again():
            return self._client.last_sequence(topic)

    def put(self, topic: str, number: int, values: Sequence[str]) -> None:
        (value,) = values
        with _asked_again():
            self._client.put(topic, value, sequence=number)

    def subscribe(self, topic: str) -> None:
        with _asked_again():
            self._client.subscribe(topic)

    def get(self, topic: str, last_id: str | None) -> Got | None:
        with _asked_again():
            message = self._client.get(topic, after=last_id or "-1")
            return Got(message.id, message.text)

    def close(self) -> None:
        self._client.close()


# --- Python ---------------------------------------------------------------------------------------


class PythonWay(Way):
    """`quackmq.Client`, over Kafka's protocol. The id is kept by the program. The client numbers
    messages, not puts: each put has three numbers, and one of a single message takes the last.

    Each topic has a client of its own, under a name of its own: readers of one name are one group,
    in which one that is done would keep the others waiting."""

    NUMBERS: ClassVar[int] = 3

    def __init__(self, address: str, name: str, directory: Path) -> None:
        super().__init__(address, name, directory)
        self._clients: dict[str, Client] = {}

    def last_number(self, topic: str) -> int | None:
        with _asked_again():
            last = self._client(topic).last_sequence(topic)
            return None if last is None else last // self.NUMBERS

    def put(self, topic: str, number: int, values: Sequence[str]) -> None:
        key = key_of(self.name, number, 0)
        first = (number + 1) * self.NUMBERS - len(values)
        with _asked_again():
            if len(values) == 1:
                self._client(topic).put(topic, values[0], key, sequence=first)
            else:
                self._client(topic).put_many(topic, values, key=key, sequence=first)

    def subscribe(self, topic: str) -> None:
        with _asked_again():
            self._client(topic).subscribe(topic, "beginning")

    def get(self, topic: str, last_id: str | None) -> Got | None:
        with _asked_again():
            message = self._client(topic).get(topic, timeout=WAIT_MS / 1000, after=last_id)
            return Got(message.id, message.value)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _client(self, topic: str) -> Client:
        if topic not in self._clients:
            from quackmq import Client

            name = f"{self.name}-{topic}"
            self._clients[topic] = Client(
                self.address, name, serialiser="str", directory=self.directory / topic
            )
        return self._clients[topic]


@contextmanager
def _asked_again() -> Iterator[None]:
    """What clients raise when there is no answer, and when the broker is closing."""
    try:
        yield
    except (QuackTimeout, BrokerClosing) as error:
        raise Unsure(str(error)) from error
    except (MemberFenced, ProducerFenced) as error:
        # Whose join or whose beginning was heard twice is told so, and begins anew.
        raise CannotGoOn(str(error)) from error


WAYS: Final[Mapping[str, type[Way]]] = {
    "http": HttpWay,
    "http-keys": HttpKeysWay,
    "zmq": ZmqWay,
    "zmq-client": ZmqClientWay,
    "python": PythonWay,
}
