"""A subscriber on pipes, started by `quackmq experiment --sub-command 'python pipe_subscriber.py'`.

It speaks the line protocol on its stdin and stdout; docs/line.md describes the messages.
"""

from __future__ import annotations

import os
import sys

me, topics = os.environ["PEER_ID"], os.environ["PEER_TOPICS"].split()
for line in (f"sub {me} connect", "end", *(f"sub {me} topic {each}" for each in topics), "end"):
    print(line, flush=True)
    if (answer := sys.stdin.readline()) != "accept\n":
        sys.exit(f"{line}: {answer}")
for line in sys.stdin:
    if line == "terminate\n":  # the experiment is over
        break
    _, topic, entry = line.rstrip("\n").split(" ", 2)  # topic K [entry]
    print(f"{me} got {entry[1:-1]!r} of topic {topic}", file=sys.stderr)
    print("successful", flush=True)
