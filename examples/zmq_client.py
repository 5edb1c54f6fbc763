"""The ZeroMQ protocol in one small program: put, get, subscribe, unsubscribe.

    quackmq serve --data DIR --zmq 127.0.0.1:5555
    python examples/zmq_client.py 127.0.0.1:5555

A subscriber called donald and a publisher called daisy, here in one process; usually they are two,
in any language that has a REQ socket: docs/zmq.md shows the frames. donald keeps the id of its last
message in the directory `ids`, so that started again it goes on where it was. daisy numbers what it
puts, and asks first how far it got: started again, it puts nothing twice.
"""

from __future__ import annotations

import sys

from quackmq.client.zmq import ZmqClient
from quackmq.errors import QuackTimeout

WORDS = ("quack", "quack quack", "quack quack quack")


def main(address: str, directory: str) -> None:
    with (
        ZmqClient(address, "donald", directory=directory) as donald,
        ZmqClient(address, "daisy") as daisy,
    ):
        donald.subscribe("ducks")

        held = daisy.last_sequence("ducks")
        for number, word in enumerate(WORDS):
            if held is None or number > held:
                daisy.put("ducks", word, sequence=number)

        for _ in WORDS:
            try:
                message = donald.get("ducks", timeout=1)
            except QuackTimeout:
                print("that was all")
                break
            print(message.text)

        if "--unsubscribe" in sys.argv:
            donald.unsubscribe("ducks")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:5555", "ids")
