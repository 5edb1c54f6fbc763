"""Plain ZeroMQ sockets through the broker: PUB and SUB, as with any XSUB/XPUB proxy.

    quackmq serve --data DIR --zmq 127.0.0.1:5555
    python examples/pubsub_client.py [XSUB XPUB]

It needs pyzmq, and nothing of ours. XSUB and XPUB are the addresses of the broker's two sockets for
PUB and SUB. These sockets deliver at most once. A program that must not miss a message uses
the reliable proxy (examples/proxy_client.py). The broker stores each message, and the other
protocols read it.
"""

from __future__ import annotations

import sys

import zmq

TOPIC = b"duck-calls"
CALLS = (b"quack", b"quack quack", b"quack quack quack")
TIMEOUT_MS = 10_000
REPEAT_MS = 50


def main(xsub: str, xpub: str) -> None:
    with zmq.Context() as context:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(f"tcp://{xpub}")
        subscriber.subscribe(TOPIC)
        publisher = context.socket(zmq.PUB)
        publisher.linger = 0
        publisher.connect(f"tcp://{xsub}")
        wait_for_connection(publisher, subscriber)
        for call in CALLS:
            publisher.send_multipart([TOPIC, call])
        heard: list[bytes] = []
        while len(heard) < len(CALLS):
            if not subscriber.poll(TIMEOUT_MS):
                raise SystemExit("some messages were lost, which these sockets allow")
            _, body = subscriber.recv_multipart()
            if body in CALLS:  # the rest are greetings
                heard.append(body)
                print(body.decode())
        publisher.close()
        subscriber.close()


def wait_for_connection(publisher: zmq.Socket[bytes], subscriber: zmq.Socket[bytes]) -> None:
    """Send greetings until one arrives: a PUB socket drops all messages before it is connected."""
    for _ in range(TIMEOUT_MS // REPEAT_MS):
        publisher.send_multipart([TOPIC, b"hello"])
        if subscriber.poll(REPEAT_MS):
            return
    raise SystemExit("no connection to the broker")


if __name__ == "__main__":
    main(*(sys.argv[1:3] if len(sys.argv) > 2 else ("127.0.0.1:5556", "127.0.0.1:5557")))
