"""Bounds that all protocols share, each with its reason. Sizes are in bytes unless the name says
otherwise.
"""

from __future__ import annotations

from typing import Final

#: First bytes of a connection that are examined to recognize its protocol. A ZMTP greeting needs 10
#: bytes; an HTTP method with its space usually needs fewer.
OPENING_BYTES: Final = 32
#: Interval between log lines about peers that use the wrong listener. libzmq reconnects ten times
#: per second without end.
MISTAKEN_LOG_MS: Final = 60_000
#: Interval between log lines about a repeated problem; each line has the number of occurrences.
REPEATED_LOG_MS: Final = 10_000
