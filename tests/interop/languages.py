"""How the programs of other languages are started, once `tools/clients.sh` has made them ready."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent

#: A test's life is short: no optimising compiler, no second thread for the garbage.
_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")


def javascript(script: str) -> tuple[str, ...]:
    """One of javascript/."""
    return ("node", str(HERE / "javascript" / script))


def java(name: str) -> tuple[str, ...]:
    """A class of java/ that has a main."""
    made = HERE / "java" / "target"
    return ("java", *_JVM, "-cp", f"{made / 'classes'}:{made / 'lib'}/*", f"quackmq.{name}")
