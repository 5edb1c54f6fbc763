"""A program that uses the Python client and may be killed: told by lines what to do, it says by
lines what it did.

    python -m tests.client.program ADDRESS NAME OPTIONS    # of the client, as JSON
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from itertools import islice
from types import TracebackType
from typing import Any

from quackmq import Client, QuackError

DEADLINE_S = 40


class Program:
    """The program, as its test sees it. Killed on leaving the block."""

    def __init__(self, address: str, name: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.client.program", address, name]
        self.process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            self._reader.join()

    def call(self, what: str, *arguments: Any, **options: Any) -> Any:
        """What it answered: a value, or the name of an error."""
        self.begin(what, *arguments, **options)
        return self.answer()

    def begin(self, what: str, *arguments: Any, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments, options]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        line = self._lines.get(timeout=DEADLINE_S)
        assert line, "the program has ended"
        return json.loads(line)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def main(address: str, name: str, options: str) -> None:
    settings = {"serialiser": "str", "timeout": 20.0} | json.loads(options)
    client = Client(address, name, **settings)
    listening: dict[str, Any] = {}
    for line in sys.stdin:
        what, arguments, more = json.loads(line)
        try:
            if what == "get":
                answer: Any = client.get(*arguments, **more).value
            elif what == "get_with_id":
                message = client.get(*arguments, **more)
                answer = [message.value, message.id]
            elif what == "take":  # so many of a loop that is then left
                answer = [each.value for each in islice(client.listen(arguments[0]), arguments[1])]
            elif what == "next":  # so many of a loop over `listen` that never ends
                topic, count = arguments
                loop = listening.setdefault(topic, client.listen(topic))
                answer = [next(loop).value for _ in range(count)]
            else:
                answer = getattr(client, what)(*arguments, **more)
        except QuackError as error:
            answer = type(error).__name__
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
