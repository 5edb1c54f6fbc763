"""Put and get, in both ways of remembering: the smallest programs that lose nothing.

    python examples/put_get.py ADDRESS put TOPIC TEXT...
    python examples/put_get.py ADDRESS get TOPIC NAME       # exactly once, by a store of its own
    python examples/put_get.py ADDRESS follow TOPIC NAME    # until nothing comes for five seconds

`get` keeps what it has seen and the id of the last message in one SQLite transaction, in NAME.db:
kill it at any moment and start it again, each text is in there once.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable

from quackmq import Client, QuackError, QuackTimeout


def put(address: str, topic: str, *texts: str) -> None:
    with Client(address, serialiser="str") as client:
        for text in texts:
            print(client.put(topic, text))


def get(address: str, topic: str, name: str) -> None:
    store = sqlite3.connect(f"{name}.db")
    store.execute("CREATE TABLE IF NOT EXISTS seen (number INTEGER PRIMARY KEY, text, id)")
    last = store.execute("SELECT id FROM seen ORDER BY number DESC LIMIT 1").fetchone()
    last_id = None if last is None else last[0]
    with Client(address, name, serialiser="str") as client:
        client.subscribe(topic, start="beginning")
        while True:
            try:
                message = client.get(topic, after=last_id)
            except QuackTimeout:
                break
            with store:
                store.execute(
                    "INSERT INTO seen (text, id) VALUES (?, ?)", (message.value, message.id)
                )
            last_id = message.id
    for (text,) in store.execute("SELECT text FROM seen ORDER BY number"):
        print(text)
    store.close()


def follow(address: str, topic: str, name: str) -> None:
    with Client(address, name, serialiser="str") as client:
        client.subscribe(topic, start="beginning")
        try:
            for message in client.listen(topic, timeout=5):
                print(message.value)
        except QuackTimeout as silence:
            print(silence, file=sys.stderr)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"put": put, "get": get, "follow": follow}
    if len(sys.argv) < 5 or sys.argv[2] not in commands:
        sys.exit(__doc__)
    address, what, *arguments = sys.argv[1:]
    try:
        commands[what](address, *arguments)
    except QuackError as error:
        sys.exit(f"{what}: {error}")
