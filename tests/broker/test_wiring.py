"""No part of the broker receives the broker itself."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BROKER = ROOT / "quackmq" / "broker"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(path: Path, modules: set[str]) -> set[str]:
    """All imports of a module, also those for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules


def test_only_the_topic_queue_receives_the_broker_itself() -> None:
    """It is made for one topic by the line protocol, over a broker that is complete."""
    receiving = [
        module_name(path)
        for path in BROKER.rglob("*.py")
        if "quackmq.broker.broker" in imported_by(path, {"quackmq.broker.broker"})
    ]
    assert sorted(receiving) == ["quackmq.broker", "quackmq.broker.topic_queue"]
