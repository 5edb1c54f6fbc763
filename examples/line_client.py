"""The line protocol with nothing but the standard library: a publisher, a subscriber, and a reader
that polls.

    quackmq serve --data DIR --line 127.0.0.1:5550
    python examples/line_client.py [ADDRESS]

donald publishes, and sends an entry again while the topic is full. The broker pushes each entry to
daisy, who acknowledges it. Her subscription lasts: if this program is killed, she gets the entries
that she has not acknowledged when it runs again. huey has no subscription. He asks for entries by
their numbers, and the broker answers minus the last number when there is no newer entry.
docs/line.md describes the messages.
"""

from __future__ import annotations

import socket
import sys
import time

TOPIC = "duck-news"
NEWS = ("Ducks win", "a path: C:\\pond", "two\nlines")
#: An entry may contain any bytes; these four are written as two characters.
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\0": "\\0"}
TIMEOUT_S = 10.0
RETRY_S = 0.1


class Peer:
    """A connection of a publisher or a subscriber: it says lines, and hears lines."""

    def __init__(self, address: str, role: str, name: str, *topics: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._lines = self._socket.makefile("rb")
        for line in (
            f"{role} {name} connect",
            "end",
            *(f"{role} {name} topic {topic}" for topic in topics),
            "end",
        ):
            answer = self.ask(line)
            if answer != "accept":  # `reject` and the reason
                raise SystemExit(f"{line}: {answer}")

    def say(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def hear(self) -> str:
        line = self._lines.readline()
        if not line:
            raise SystemExit("the broker has closed the connection")
        return line.decode().removesuffix("\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        self.say("terminate")
        while self.hear() != "terminate":
            pass  # an entry that was on its way; it comes again
        self._lines.close()
        self._socket.close()


def main(address: str) -> None:
    daisy = Peer(address, "sub", "daisy", TOPIC)
    donald = Peer(address, "pub", "donald", TOPIC)
    for text in NEWS:
        publish(donald, text)
    for _ in NEWS:
        _, _, entry = daisy.hear().split(" ", 2)  # topic K [entry]
        print(f"daisy got {unescape(entry[1:-1])!r}")
        daisy.say("successful")
    poll(address)
    donald.close()
    daisy.close()


def publish(publisher: Peer, text: str) -> None:
    """Publish an entry; return when it is on disk."""
    while (answer := publisher.ask(f"topic {TOPIC} [{escape(text)}]")) != "successful":
        if answer != "retry":  # `reject` and the reason
            raise SystemExit(f"{text!r}: {answer}")
        time.sleep(RETRY_S)


def poll(address: str) -> None:
    """Read the topic by entry numbers, from the oldest entry that is live."""
    huey = Peer(address, "sub", "huey")  # without a topic: nothing is pushed to him
    last = 0
    while True:
        # entry K NUMBER TIME PUBLISHER [entry], or entry K -NUMBER
        _, _, number, *rest = huey.ask(f"getentry {TOPIC} {last}").split(" ", 5)
        if int(number) <= 0:
            break
        last = int(number)
    print(f"huey has read up to entry {last}, and the broker says {number}")
    huey.close()


def escape(text: str) -> str:
    return "".join(ESCAPES.get(each, each) for each in text)


def unescape(written: str) -> str:
    originals = {escaped[1]: original for original, escaped in ESCAPES.items()}
    characters = iter(written)
    return "".join(originals[next(characters)] if each == "\\" else each for each in characters)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:5550")
