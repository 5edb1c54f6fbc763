"""Publish one message through each listener of a broker, and read all of them with the client.

    python listeners.py KAFKA HTTP ZMQ LINE

Needs only QuackMQ and what it installs, so that any Python can run it: `tests.dist.commands` does.
"""

from __future__ import annotations

import socket
import sys

import zmq

import quackmq
from quackmq.client.queue import Producer

TOPIC = "listeners"
#: Long, since machines can be busy.
DEADLINE_S = 60


def main(kafka: str, http: str, zmq_address: str, line: str) -> None:
    with quackmq.Client(kafka, "reader", serialiser="str", timeout=DEADLINE_S) as client:
        client.subscribe(TOPIC)
        client.put(TOPIC, "kafka")
        producer = Producer(http)
        producer.enqueue(producer.register_producer(TOPIC), TOPIC, "http")
        put_over_zmq(zmq_address, "zmq")
        put_over_lines(line, "line")
        values = [client.get(TOPIC).value for _ in range(4)]
    assert sorted(values) == ["http", "kafka", "line", "zmq"], values
    print(*values)


def put_over_zmq(address: str, value: str) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.setsockopt(zmq.LINGER, 0)
        request.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        request.connect(f"tcp://{address}")
        request.send_string(f"PUT writer {TOPIC} {value}")
        print(request.recv_string())


def put_over_lines(address: str, value: str) -> None:
    host, _, port = address.rpartition(":")
    lines = ["pub writer connect", "end", f"pub writer topic {TOPIC}", "end"]
    lines += [f"topic {TOPIC} [{value}]", "terminate"]
    with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
        connection.sendall("".join(f"{each}\n" for each in lines).encode())
        with connection.makefile() as answers:
            said = answers.read().split()
    assert "successful" in said, said


if __name__ == "__main__":
    main(*sys.argv[1:])
