"""The tables in docs/kafka.md that say what the code says: APIs, topic configs.

`python -m tests.protocols.kafka.document` rewrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from kio.index import load_request_schema

from quackmq.model.policy import CONFIG_ALIASES, CONFIG_PREFIX, Policy
from quackmq.protocols.kafka.handlers.config_catalog import FIXED, topic_configs
from quackmq.protocols.kafka.registry import APIS

DOCUMENT: Final = Path(__file__).resolve().parents[3] / "docs" / "kafka.md"


def apis() -> str:
    rows = [
        (
            load_request_schema(api.key, api.last_version).__name__.removesuffix("Request"),
            str(api.key),
            f"{api.first_version}–{api.last_version}",
        )
        for api in sorted(APIS.values(), key=lambda api: api.key)
    ]
    return _table(("API", "key", "versions"), rows)


def policies() -> str:
    rows = [
        (
            f"`{config.name}`",
            f"`{CONFIG_PREFIX}{CONFIG_ALIASES[config.name]}`"
            if config.name in CONFIG_ALIASES
            else "",
            config.kind.name.lower(),
            f"`{config.value}`",
            config.documentation,
        )
        for config in topic_configs(Policy(), Policy())
        if not config.read_only
    ]
    return _table(("config", "also", "type", "default", "meaning"), sorted(rows))


def fixed() -> str:
    rows = [(f"`{name}`", f"`{each.value}`", each.documentation) for name, each in FIXED.items()]
    return _table(("config", "value", "why"), rows)


#: Each table by the name in its markers.
TABLES: Final[dict[str, Callable[[], str]]] = {
    "APIs": apis,
    "topic configs": policies,
    "configs that hold always": fixed,
}


def rewritten(document: str) -> str:
    """The document with its tables made anew."""
    for name, make in TABLES.items():
        begin = (
            f"<!-- the table of {name}: made by `python -m tests.protocols.kafka.document` -->\n"
        )
        end = f"<!-- end of the table of {name} -->"
        before, found, rest = document.partition(begin)
        assert found, f"{DOCUMENT.name} has no place for the table of {name}"
        document = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return document


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))
