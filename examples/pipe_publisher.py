"""A publisher on pipes, started by `quackmq experiment --pub-command 'python pipe_publisher.py'`.

It speaks the line protocol on its stdin and stdout; docs/line.md describes the messages.
"""

from __future__ import annotations

import os
import sys
import time


def ask(line: str) -> str:
    print(line, flush=True)
    return sys.stdin.readline().rstrip("\n")  # "" if the broker has closed the connection


me, topics = os.environ["PEER_ID"], os.environ["PEER_TOPICS"].split()
for line in (f"pub {me} connect", "end", *(f"pub {me} topic {each}" for each in topics), "end"):
    if (answer := ask(line)) != "accept":
        sys.exit(f"{line}: {answer}")
for number in range(10):
    while (answer := ask(f"topic {topics[number % len(topics)]} [quack {number}]")) == "retry":
        time.sleep(0.1)
    if answer != "successful":  # `terminate`: the time is over
        sys.exit()
ask("terminate")
