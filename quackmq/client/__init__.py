"""Client libraries.

`Client` and `AsyncClient` use the Kafka protocol; `quackmq` exports them, too. The clients of the
other protocols are modules of their own: `queue` (HTTP), `zmq` and `proxy` (ZeroMQ). Modules are
imported on first use, because the Kafka client loads a C library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quackmq.client.kafka.aio import AsyncClient
    from quackmq.client.kafka.client import Client
    from quackmq.client.kafka.types import Message, Serialiser

__all__ = ["AsyncClient", "Client", "Message", "Serialiser"]

_HOMES = {
    "AsyncClient": "quackmq.client.kafka.aio",
    "Client": "quackmq.client.kafka.client",
    "Message": "quackmq.client.kafka.types",
    "Serialiser": "quackmq.client.kafka.types",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a public name when it is used first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
