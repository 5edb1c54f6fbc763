"""The local store: batches and everything else in one directory on the broker's machine.

Acknowledged data survives kill -9, a torn write and a full disk. Open `store` first: it implements
`quackmq.stores.contract`. `open` and `recovery` open a directory, `partition_log`, `tail` and
`reads` serve one partition (`waiters` wake readers, `committed_reads` leave out aborted
transactions, `segment_sums` find sizes), `orphans` removes files after a crash, `commit/` makes
changes durable, `files/` has the formats on disk, and `inspect/` reads a directory without a
broker.
"""

from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.store import LocalStore

__all__ = ["LocalOptions", "LocalStore"]
