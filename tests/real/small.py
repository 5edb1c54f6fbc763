"""`python -m tests.real.small …` is `quackmq …` with a small journal and small segments.

A minute's load then goes through many slots, segments and checkpoints, and a kill at any instant
has a fair chance to meet one of them.
"""

from __future__ import annotations

import sys

from quackmq import limits
from quackmq.stores import limits as stores_limits

SMALL = {
    "JOURNAL_SLOT_BYTES": 256 * limits.KIB,
    "JOURNAL_INLINE_BYTES": 16 * limits.KIB,
    "CHECKPOINT_BYTES": 4 * limits.MIB,
    "SEGMENT_BYTES": 2 * limits.MIB,
    "REGION_BYTES": 4 * limits.KIB,
    "OPEN_SEGMENT_FILES": 4,
    "CACHED_INDEXES": 2,
    "TAIL_BYTES": 1 * limits.MIB,
    "PACKED_BYTES": 16 * limits.KIB,
    "PACK_BYTES": 256 * limits.KIB,
    "PACK_WASTE_BYTES": 128 * limits.KIB,
    "REWRITTEN_BYTES": 64 * limits.KIB,
    "PATH_EXTENTS": 4,
    "MOVED_BYTES": 32 * limits.KIB,
}


def main() -> int:
    """Defaults are taken when modules are loaded, so the limits are moved before that."""
    for name, value in SMALL.items():
        home = stores_limits if hasattr(stores_limits, name) else limits
        assert hasattr(home, name)
        setattr(home, name, value)
    from quackmq.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
