"""A reader of Server-Sent Events, as the standard has them, over `http.client`."""

from __future__ import annotations

import http.client
import json
from types import TracebackType
from typing import Any, NamedTuple

from tests.protocols.http.v1.serving import DEADLINE_S, Serving


class Event(NamedTuple):
    kind: str
    id: str
    data: Any

    @property
    def value(self) -> Any:
        return self.data["value"]


class Events:
    def __init__(self, served: Serving, path: str, last_event_id: str | None = None) -> None:
        self._connection = http.client.HTTPConnection(served.host, served.port, timeout=DEADLINE_S)
        headers = {} if last_event_id is None else {"last-event-id": last_event_id}
        self._connection.request("GET", path, headers=headers)
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        assert self.answer.getheader("content-type") == "text/event-stream"
        self.comments = 0
        #: The stream is there, and has begun where it should, when this has come.
        assert self.answer.readline().startswith(b"retry: ")

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.answer.close()
        self._connection.close()

    def next(self) -> Event | None:
        """The next event; None at the end of the stream."""
        fields = {"event": "message", "id": "", "data": ""}
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            if text.startswith(":"):
                self.comments += 1
            elif text:
                name, _, value = text.partition(":")
                fields[name] = value.removeprefix(" ")
            elif fields["data"]:
                return Event(fields["event"], fields["id"], json.loads(fields["data"]))
        return None

    def take(self, count: int) -> list[Event]:
        events = [self.next() for _ in range(count)]
        return [event for event in events if event is not None]

    def until_comment(self) -> None:
        while not self.comments:
            line = self.answer.readline()
            assert line, "the stream has ended"
            self.comments += line.startswith(b":")
