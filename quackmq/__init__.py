"""QuackMQ: a broker whose topics are logs, and which acknowledges a record when it is on disk.

The names in `__all__` are public and stable. Everything else may change: programs talk to a broker
over a protocol, so they rarely need more than a client and the errors. A client is imported on its
first use, because the command line, which imports this package too, needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quackmq.errors import QuackError, QuackTimeout

if TYPE_CHECKING:
    from quackmq.client import AsyncClient, Client, Message

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "Message", "QuackError", "QuackTimeout", "__version__"]

_CLIENTS = ("AsyncClient", "Client", "Message")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a public name when it is used first."""
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quackmq import client

    return getattr(client, name)
