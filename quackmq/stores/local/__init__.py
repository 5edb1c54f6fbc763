"""The local store: batches and everything else in one directory of the broker's own machine."""

from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.store import LocalStore

__all__ = ["LocalOptions", "LocalStore"]
