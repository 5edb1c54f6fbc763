"""Addresses for brokers that are killed and come back: nobody else is given them meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved() -> Iterator[str]:
    """An address that nobody is given meanwhile, and whoever asks for it by number may listen at:
    this socket is bound and does not listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
