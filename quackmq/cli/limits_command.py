"""`quackmq limits`: every bound of this version, with its value and its reason.

Bounds are constants in the `limits` modules of the packages; the comment above a constant is its
reason. This command reads both, so that the list is never out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import quackmq
from quackmq.errors import InvalidRequest

_REASON: Final = "#:"
#: Units, which are not bounds.
_UNITS: Final = ("KIB", "MIB")


class Limit(NamedTuple):
    package: str
    name: str
    value: Any
    reason: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "limits",
        help="list every bound of this version, with its reason",
        description="List every bound of this version of QuackMQ, by package, with its value and "
        "its reason. Sizes are bytes unless the name says otherwise. A bound that is also a "
        "setting is listed with its default; see `quackmq serve --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("package", nargs="?", help="one package, for example broker")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the bounds of all packages or of one. Raises InvalidRequest for an unknown package."""
    selected = [each for each in all_limits() if args.package in (None, each.package)]
    if not selected:
        packages = ", ".join(sorted({each.package for each in all_limits()}))
        raise InvalidRequest(f"unknown package {args.package}: use one of {packages}")
    if args.json:
        print(json.dumps([each._asdict() for each in selected], indent=2))
        return 0
    package = None
    for each in selected:
        if each.package != package:
            if package is not None:
                print()
            package = each.package
            print(f"{package}\n")
        value = f"{each.value:,}" if isinstance(each.value, int) else each.value
        print(f"  {each.name} = {value}\n      {each.reason}")
    return 0


def all_limits() -> Iterator[Limit]:
    """Return every bound, package by package, in the order of its source."""
    for module in limits_modules():
        package = module.__name__.removeprefix("quackmq").removesuffix("limits").strip(".")
        for name, reason in parse_reasons(inspect.getsource(module)):
            if name not in _UNITS:
                yield Limit(package or "shared", name, getattr(module, name), reason)


@cache
def limits_modules() -> tuple[ModuleType, ...]:
    """Return the `limits` modules of all packages, the shared one first."""
    root = Path(quackmq.__path__[0])
    paths = sorted(root.rglob("limits.py"), key=lambda path: (len(path.parts), path))
    names = (path.relative_to(root.parent).with_suffix("").parts for path in paths)
    return tuple(import_module(".".join(parts)) for parts in names)


def parse_reasons(source: str) -> Iterator[tuple[str, str]]:
    """Return the constants of a source with their reasons: the `#:` comment above a constant, or
    above the constants right before it."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, _reason_above(lines, node.lineno - 1)


def _reason_above(lines: list[str], index: int) -> str:
    """Return the `#:` comment above line `index`, joined to one line. Constants that follow each
    other without a blank line or a comment share the comment above the first one."""
    index -= 1
    while index >= 0 and lines[index] and not lines[index].startswith("#"):
        index -= 1
    words: list[str] = []
    while index >= 0 and lines[index].startswith(_REASON):
        words.insert(0, lines[index].removeprefix(_REASON).strip())
        index -= 1
    return " ".join(words)
