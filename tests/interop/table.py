"""Which client can do what with this broker: the table in docs/kafka.md, made from the tests.

MISSING declares what a client does not have, with the reason. A proof of the suite runs with every
other client (suite.py), and is marked with the cells of the table that it proves. A test of one
client alone has the mark itself: `@pytest.mark.proves("kcat", "from a time")`. A capability that
has parts is proved part by part: `proves("kcat", "transactions", "commit and abort")`. So each cell
is proved by a test that runs with the others, or explained; `test_table.py` sees to it, and that
the document says what the marks say.

    python -m tests.interop.table          rewrite the table in docs/kafka.md
    python -m tests.interop.table --print  only show it

Marks are collected, not run, and also of tests whose programs are not here. The versions are those
of the machine where the table was last written; where a client is not to be found, the version that
the document has stays.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from quackmq.records.batch import COMPRESSIONS

HERE: Final = Path(__file__).resolve().parent
DOCUMENT: Final = HERE.parent.parent / "docs" / "kafka.md"
BEGIN: Final = "<!-- the table of clients: made by `python -m tests.interop.table` -->"
END: Final = "<!-- end of the table of clients -->"

YES: Final = "✓"
NO: Final = "–"

#: Each capability, in the order of the table, with its parts if it has some.
CAPABILITIES: Final[Mapping[str, tuple[str, ...]]] = {
    "create topics": (),
    "produce": (),
    "compression": tuple(COMPRESSIONS),
    "headers and keys": (),
    "partitions of keys as in Java": (),
    "consume from start": (),
    "from end": (),
    "from a time": (),
    "from an offset": ("in range", "out of range"),
    "groups": (),
    "cooperative rebalance": (),
    "static members": (),
    "commit and resume across a restart": (),
    "newer group protocol (KIP-848)": (),
    "idempotent produce across kill -9": (),
    "transactions": ("commit and abort", "offsets", "time-out", "fencing", "zombies"),
    "admin calls": ("configs", "partitions", "delete records", "groups"),
}


class Cell(NamedTuple):
    client: str
    capability: str
    part: str = ""


EAGER_ONLY: Final = "has assignors of the eager protocol only"
CRC32: Final = "uses CRC32 by default: see below"
CLASSIC_ONLY: Final = "knows the classic group protocol only"
ONE_TRANSACTION: Final = "writes all its input in one transaction, and ends with it"

#: What a client does not have, and why. Without a part, all of the capability.
MISSING: Final[Mapping[Cell, str]] = {
    Cell("aiokafka", "cooperative rebalance"): EAGER_ONLY,
    Cell("kafkajs", "cooperative rebalance"): EAGER_ONLY,
    Cell("confluent-kafka", "partitions of keys as in Java"): CRC32,
    Cell("kcat", "partitions of keys as in Java"): CRC32,
    Cell(
        "@platformatic/kafka", "partitions of keys as in Java"
    ): "takes the hash for an unsigned number by default: see below",
    Cell("kafkajs", "static members"): "has no setting for a member's own name",
    Cell(
        "kafkajs", "from an offset", "out of range"
    ): "goes on at the start or at the end, without an error",
    Cell("@platformatic/kafka", "cooperative rebalance"): EAGER_ONLY,
    **{
        Cell(client, "newer group protocol (KIP-848)"): CLASSIC_ONLY
        for client in ("aiokafka", "kafka-python", "kafkajs", "kcat")
    },
    Cell(
        "@platformatic/kafka", "newer group protocol (KIP-848)"
    ): "reads by it, but does not tell which partitions come and go",
    Cell("kcat", "create topics"): "creates a topic by using it, and has no other way",
    **{
        Cell("kcat", "transactions", part): ONE_TRANSACTION
        for part in CAPABILITIES["transactions"]
        if part != "commit and abort"
    },
    Cell("kcat", "admin calls"): "lists topics and asks for offsets; it does not administer",
}


def package_version(name: str) -> str | None:
    """Of a package of Python."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def kcat_version() -> str | None:
    try:
        told = subprocess.run(["kcat", "-V"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"Version (\S+) .*librdkafka (\S+)", told, re.DOTALL)
    return f"{found[1]} (librdkafka {found[2]})" if found else None


def npm_version(name: str) -> str | None:
    """The one that javascript/package.json asks for, which names one version exactly."""
    wanted = HERE / "javascript" / "package.json"
    if not wanted.exists():
        return None
    version: str | None = json.loads(wanted.read_text())["dependencies"].get(name)
    return version


def java_version() -> str | None:
    """The one of kafka-clients that java/pom.xml asks for."""
    wanted = HERE / "java" / "pom.xml"
    if not wanted.exists():
        return None
    found = re.search(
        r"<artifactId>kafka-clients</artifactId>\s*<version>([^<]+)<", wanted.read_text()
    )
    return found[1] if found else None


#: Each client, in the order of the table, and how to find out its version.
CLIENTS: Final[Mapping[str, Callable[[], str | None]]] = {
    "confluent-kafka": lambda: package_version("confluent-kafka"),
    "aiokafka": lambda: package_version("aiokafka"),
    "kafka-python": lambda: package_version("kafka-python"),
    "kafkajs": lambda: npm_version("kafkajs"),
    "@platformatic/kafka": lambda: npm_version("@platformatic/kafka"),
    "kafka-clients (Java)": java_version,
    "kcat": kcat_version,
}


def all_cells() -> list[Cell]:
    """Each that has to be proved or explained."""
    return [
        Cell(client, capability, part)
        for capability, parts in CAPABILITIES.items()
        for client in CLIENTS
        for part in parts or ("",)
    ]


# --- from marks to the document ----------------------------------------------------------------


class Collected:
    """A plugin of pytest that keeps what the marks say, before any test is left out."""

    def __init__(self) -> None:
        #: Each cell with the tests that prove it.
        self.proofs: dict[Cell, list[str]] = {}
        #: Marks that name no cell.
        self.wrong: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = set(all_cells())
        for item in items:
            for mark in item.iter_markers("proves"):
                client, capability, *parts = mark.args
                for part in parts or ("",):
                    cell = Cell(client, capability, part)
                    if cell not in known:
                        self.wrong.append(f"{item.nodeid} proves {named(cell)}, which is no cell")
                    self.proofs.setdefault(cell, []).append(item.nodeid)


def collect() -> Collected:
    """The marks of all tests in this directory. For a process of its own: it imports them anew."""
    collected = Collected()
    arguments = ["--collect-only", "--quiet", "-p", "no:cacheprovider", str(HERE)]
    with redirect_stdout(StringIO()) as said:
        code = pytest.main(arguments, plugins=[collected])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the tests could not be collected: {said.getvalue()}")
    return collected


def complaints(collected: Collected) -> list[str]:
    """What is neither proved nor explained, or both, or no cell at all."""
    found = list(collected.wrong)
    for cell in all_cells():
        proofs, reason = collected.proofs.get(cell), reason_for(cell)
        if proofs and reason:
            found.append(f"{named(cell)} is missing ({reason}), but {proofs[0]} proves it")
        if not proofs and not reason:
            found.append(f"{named(cell)} is proved by no test, nor explained in MISSING")
    found += [f"{named(cell)} in MISSING is no cell" for cell in MISSING if not exists(cell)]
    return found


def table(collected: Collected, versions: Mapping[str, str]) -> str:
    """Rows are capabilities, columns are clients; below it, why something is missing."""
    notes: dict[str, int] = {}
    rows = [
        ["", *CLIENTS],
        ["---", *[":-:"] * len(CLIENTS)],
        ["version", *[versions.get(client, "") for client in CLIENTS]],
    ]
    for capability in CAPABILITIES:
        rows.append(
            [capability, *[show(collected, client, capability, notes) for client in CLIENTS]]
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *[f"{number}. {reason}" for reason, number in notes.items()]])


def show(collected: Collected, client: str, capability: str, notes: dict[str, int]) -> str:
    """One cell; a reason that is new gets the next number."""
    cells = [Cell(client, capability, part) for part in CAPABILITIES[capability] or ("",)]
    proved = [cell.part for cell in cells if cell in collected.proofs]
    reasons = [reason for cell in cells if (reason := reason_for(cell))]
    numbers = sorted({notes.setdefault(reason, len(notes) + 1) for reason in reasons})
    references = f" ({', '.join(map(str, numbers))})" if numbers else ""
    if not proved:
        return NO + references
    if len(proved) == len(cells) and capability != "compression":
        return YES + references
    return ", ".join(proved) + references


def reason_for(cell: Cell) -> str | None:
    return MISSING.get(cell) or MISSING.get(Cell(cell.client, cell.capability))


def exists(wanted: Cell) -> bool:
    """Whether there is such a cell, or cells for its parts."""
    return any(wanted in (cell, cell._replace(part="")) for cell in all_cells())


def named(cell: Cell) -> str:
    return "/".join(filter(None, cell))


def split(document: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands behind it."""
    before, begin, rest = document.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has no place for the table:\n{BEGIN}\n{END}")
    return before + begin, inside.strip("\n"), end + after


def versions_in(shown: str) -> dict[str, str]:
    """The row of the versions in a table."""
    for line in shown.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name == "version":
            return dict(zip(CLIENTS, cells, strict=False))
    return {}


def main(arguments: list[str]) -> int:
    collected = collect()
    before, shown, after = split(DOCUMENT.read_text())
    old = versions_in(shown)
    if arguments == ["--check"]:
        versions = old
    else:
        versions = {client: find() or old.get(client, "") for client, find in CLIENTS.items()}
    made = table(collected, versions)
    wrong = complaints(collected)
    if arguments == ["--print"]:
        print(made)
    elif arguments == ["--check"]:
        if shown != made:
            wrong.append("docs/kafka.md is not what the marks say: python -m tests.interop.table")
    else:
        DOCUMENT.write_text(f"{before}\n\n{made}\n\n{after}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
