"""Every long-running proof, one after the other: simulations, real kills, exactly-once tortures.

    python -m tests.soak --seconds 600                 everything, ten minutes each
    python -m tests.soak --seconds 600 --only flow     one of them, by a part of its name
    python -m tests.soak --seed 7                      replay a seed of the store's simulation

It stops at the first one that fails, and ends with its exit code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

#: Module, and its arguments. `{seconds}` and `{kills}` come from the command line.
PROGRAMS: Final = (
    ("tests.simulation.soak", "--seconds", "{seconds}"),
    ("tests.simulation.tiers", "--seconds", "{seconds}"),
    ("tests.simulation.flow", "--seconds", "{seconds}"),
    ("tests.simulation.pushes", "--seconds", "{seconds}"),
    ("tests.simulation.together", "--seconds", "{seconds}"),
    ("tests.simulation.quick", "--seconds", "{seconds}"),
    ("tests.simulation.protocols", "--seconds", "{seconds}"),
    ("tests.simulation.proxies", "--seconds", "{seconds}"),
    ("tests.real.soak", "--kills", "{kills}"),
    ("tests.interop.transforming", "--seconds", "{seconds}"),
    ("tests.interop.transforming", "--seconds", "{seconds}", "--client", "java"),
    ("tests.pubsub.torture", "--seconds", "{seconds}"),
    ("tests.pubsub.killing", "--seconds", "{seconds}"),
    ("tests.pubsub.chaos", "--seconds", "{seconds}"),
    ("tests.spark.torture", "--seconds", "{seconds}"),
    ("tests.spark.torture", "--seconds", "{seconds}", "--cluster"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every long-running proof in turn.")
    parser.add_argument("--seconds", type=int, default=600, help="for each; default %(default)s")
    parser.add_argument("--kills", type=int, default=1000, help="real kills; default %(default)s")
    parser.add_argument("--only", default="", help="those whose module contains this text")
    parser.add_argument("--seed", type=int, help="replay one seed of the store's simulation")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return _run("tests.simulation.soak", "--seed", str(chosen.seed))
    programs = [program for program in PROGRAMS if chosen.only in program[0]]
    if not programs:
        parser.error(f"no program contains {chosen.only!r}")
    for module, *rest in programs:
        values = {"seconds": chosen.seconds, "kills": chosen.kills}
        exit_code = _run(module, *(each.format(**values) for each in rest))
        if exit_code:
            return exit_code
    return 0


def _run(module: str, *arguments: str) -> int:
    print(f"--- python -m {module} {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
