"""What the programs of Python have in common: how they hear that it is over, and how they tell.

See tests/interop/programs.py for what such a program is to do.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, Final

#: How often a producer of this pace pauses: some thousand records a second.
BURST: Final = 20
PAUSE_S: Final = 0.005
#: How many records a producer has under way: several batches, and a queue behind them.
UNDER_WAY: Final = 500
#: How many records a member takes between two commits, at most.
BEFORE_COMMIT: Final = 50
POLL_MS: Final = 100


def begin() -> tuple[dict[str, Any], threading.Event]:
    """The settings, and an event that is set when stdin is closed. Warnings go to stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return json.loads(sys.argv[1]), over


def tell(kind: str, *partitions: int, **more: Any) -> None:
    told = {"kind": kind, "at_ms": time.time() * 1000, "partitions": partitions, **more}
    print(json.dumps(told), flush=True)
