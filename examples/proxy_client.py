"""The reliable proxy in one small program: a publisher and a subscriber that miss nothing.

    quackmq serve --data DIR --zmq 127.0.0.1:5555
    python examples/proxy_client.py 127.0.0.1:5558

donald keeps in the directory `done` which messages it is done with, so that it sees each of them
once, also if this program or the broker is killed in between. daisy numbers what it publishes.
docs/proxy.md shows the frames, for any other language.
"""

from __future__ import annotations

import sys

from quackmq.client.proxy import ReliablePublisher, ReliableSubscriber
from quackmq.errors import QuackTimeout

WORDS = ("quack", "quack quack", "quack quack quack")


def main(address: str, directory: str) -> None:
    with (
        ReliableSubscriber(address, "donald", directory=directory) as donald,
        ReliablePublisher(address, "daisy") as daisy,
    ):
        donald.subscribe("pond")

        held = daisy.last_number("pond")
        for number, word in enumerate(WORDS):
            if held is None or number > held:
                daisy.publish("pond", word, number=number)

        while True:
            try:
                message = donald.get(timeout=1, hold=True)
            except QuackTimeout:
                print("that was all")
                break
            print(message.text)
            donald.done(message)  # only now: what is printed is not printed again

        if "--unsubscribe" in sys.argv:
            donald.unsubscribe("pond")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:5558", "done")
