"""A compaction that is killed in the middle: as a driver of its own process, which kills itself.

    python -m tests.spark.pipelines.struck_compaction MASTER ADDRESS TOPIC TARGET_BYTES DIRECTORY

It is in the middle when something was put in its place, and another file, which was made and not
offered, or is being made, lies in the directory. Its plan is prolonged before: whoever looks at
what is left has the time for it, however slow the machine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from quackmq.spark.broker.http import find_broker
from quackmq.spark.pipelines.compact import compact
from tests.spark.session import session

#: For a machine that has other things to do as well.
DEADLINE_S = 120
PAUSE_S = 0.01


def main(master: str, address: str, topic: str, target_bytes: str, directory: str) -> None:
    def tell(text: str) -> None:
        if text.endswith(" 0 accepted"):
            return
        deadline = time.monotonic() + DEADLINE_S
        while not offered(Path(directory)):
            assert time.monotonic() < deadline, "nothing else is made"
            time.sleep(PAUSE_S)
        prolong_plans(address, 3_600_000)
        os.kill(os.getpid(), signal.SIGKILL)

    local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    with session(master, **local) as spark:
        compact(spark, topic, bootstrap_servers=address, target_bytes=int(target_bytes), tell=tell)


def prolong_plans(address: str, for_ms: int) -> None:
    """Or cut them short."""
    with find_broker(address).connect() as broker:
        for plan in broker.get("/v1/archive/plans").json["plans"]:
            broker.post(f"/v1/archive/plans/{plan['plan']}", {"for_ms": for_ms})


def offered(directory: Path) -> list[Path]:
    return sorted(directory.rglob("_offered-*.new"))


if __name__ == "__main__":
    main(*sys.argv[1:])
