"""The local store: batches and everything else in one directory on the broker's machine.

Acknowledged data survives kill -9, a torn write and a full disk. Open `medium` first: it stores the
cycles of the core (`quackmq.stores.core`), and `store` opens it. `open` and `recovery` open a
directory, `segmented_log` and `reads` serve one partition (`aborted_reads` find aborted
transactions, `segment_sums` find sizes), `orphans` removes files after a crash, `commit/` makes
changes durable, `files/` has the formats on disk, and `inspect/` reads a directory without a
broker.
"""

from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.store import LocalStore

__all__ = ["LocalOptions", "LocalStore"]
