"""A replay that is killed in the middle: as a driver of its own process, which kills itself.

    python -m tests.spark.pipelines.struck_replay PORTION …

is `quackmq …`, but when that portion is published, and nothing has been noted of it, it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from quackmq.cli.main import main
from quackmq.spark.pipelines import replay


def strike_at(portion: int) -> None:
    remember = replay._store_progress

    def struck(directory: Path | None, progress: replay._Progress) -> None:
        if progress.portions == portion:
            os.kill(os.getpid(), signal.SIGKILL)
        remember(directory, progress)

    replay._store_progress = struck


if __name__ == "__main__":
    strike_at(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
