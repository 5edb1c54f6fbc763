"""Exactly once over HTTP with nothing but the standard library: a till, and its bookkeeper.

The till numbers its sales, and repeats one that it did not hear of: the broker drops what it has.
The bookkeeper keeps the id of the last sale in the same transaction as its own books, and names it
when it asks for the next: whatever crashes, and whenever, each sale is booked once.

    python examples/http_client.py [ADDRESS [BOOKS]]

ADDRESS is that of a broker's HTTP listener, default 127.0.0.1:8002. BOOKS is a file for SQLite.
Run it again, or kill it anywhere and run it again: it goes on where it was.
"""

from __future__ import annotations

import http.client
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

TOPIC = "sales"
TILL = "till-1"
BOOKKEEPER = "bookkeeper"
PRICES = (250, 120, 430)
#: How often and how patiently a broker that is away is asked again.
TRIES, PAUSE_S = 50, 0.2


class Api:
    """A broker's API. A call is repeated until it is answered, so it must be safe to repeat."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=40)

    def ask(self, method: str, path: str, value: object = None) -> Any:
        """What an answer says; None where it has nothing to say."""
        status, body = self._repeat(lambda: self._ask_once(method, path, value))
        if status >= 400:
            problem = json.loads(body)
            raise RuntimeError(f"{problem['code']}: {problem['detail']}")
        return json.loads(body) if body else None

    def close(self) -> None:
        self._connection.close()

    def _ask_once(self, method: str, path: str, value: object) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        body = None if value is None else json.dumps(value)
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def _repeat(self, ask: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes]:
        for _ in range(TRIES):
            try:
                status, body = ask()
                if status != 503:  # the broker is closing, or starts
                    return status, body
            except (OSError, http.client.HTTPException):
                self._connection.close()
            time.sleep(PAUSE_S)
        raise TimeoutError("the broker has not answered")


def sell(api: Api) -> None:
    """Publish a day's sales, from the one on that the broker has not got."""
    known = api.ask("GET", f"/v1/topics/{TOPIC}/publishers/{TILL}")["last_sequence"]
    first = 0 if known is None else known + 1
    for number in range(first, first + len(PRICES)):
        sale = {"till": TILL, "number": number, "cents": PRICES[number % len(PRICES)]}
        path = f"/v1/topics/{TOPIC}/messages?publisher={TILL}&sequence={number}"
        api.ask("POST", path, {"value": sale, "key": TILL})


def book(api: Api, books: sqlite3.Connection) -> None:
    """Book every sale that there is."""
    while True:
        last = books.execute("SELECT id FROM last").fetchone()
        asking = {"last_id": last[0] if last else None, "wait_ms": 100}
        message = api.ask("POST", f"/v1/subscriptions/{BOOKKEEPER}/topics/{TOPIC}/get", asking)
        if message is None:
            return
        sale = json.loads(message["value"])
        with books:  # one transaction: the sale is booked and its id is kept, or neither
            books.execute("INSERT INTO sales VALUES (?, ?)", (sale["number"], sale["cents"]))
            books.execute("DELETE FROM last")
            books.execute("INSERT INTO last VALUES (?)", (message["id"],))


def main(address: str = "127.0.0.1:8002", path: str = ":memory:") -> None:
    api, books = Api(address), sqlite3.connect(path)
    try:
        books.execute("CREATE TABLE IF NOT EXISTS sales (number INTEGER, cents INTEGER)")
        books.execute("CREATE TABLE IF NOT EXISTS last (id TEXT)")
        subscription = f"/v1/subscriptions/{BOOKKEEPER}/topics/{TOPIC}"
        api.ask("PUT", subscription, {"start": "beginning"})
        sell(api)
        book(api, books)
        count, cents = books.execute("SELECT count(*), sum(cents) FROM sales").fetchone()
        lag = api.ask("GET", f"{subscription}/lag")["lag"]
        print(f"{count} sales of {cents} cents are booked, {lag} are to come")
    finally:
        books.close()
        api.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
