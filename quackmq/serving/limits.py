"""Bounds that all protocols share, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

#: So many first bytes of a connection tell which protocol it speaks: a greeting of ZMTP needs 10, a
#: method of HTTP and the space behind it mostly fewer.
OPENING_BYTES: Final = 32
#: One line in this time is logged about peers of one kind that came to the wrong door: libzmq
#: connects again ten times a second, for ever.
MISTAKEN_LOG_MS: Final = 60_000
#: What goes wrong again and again is logged once in this time, with how often it happened.
REPEATED_LOG_MS: Final = 10_000
