"""The local store: batches and everything else in one directory of the broker's own machine.

Acknowledged data survives kill -9, a torn write and a full disk. Open `store` first: it implements
`quackmq.stores.contract`. `open` and `recovery` bring a directory back, `partition_log`, `tail` and
`reads` serve one partition, `commit/` makes changes durable, `files/` are the formats on disk, and
`inspect/` looks into a directory without a broker.
"""

from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.store import LocalStore

__all__ = ["LocalOptions", "LocalStore"]
