"""What `test_architecture` reads from source: cycles, names in documents, asserts, drawn errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: Words that look like the id of a requirement.
NO_REQUIREMENTS = {"X11": "the window system, in the name of a browser"}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other by imports, each sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = graph.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach.get(other, ())))
        for module in graph
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]


def is_in_the_source(path: str, name: str) -> bool:
    """Whether a file or a directory exists, and has a function, a class or a constant."""
    places = [place for place in (ROOT / path, ROOT / "quackmq" / path) if place.exists()]
    if not places or not name:
        return bool(places)
    bodies = [ast.parse(places[0].read_text()).body]
    for part in name.split("."):
        found = [node for body in bodies for node in body if part in names_of(node)]
        bodies = [node.body for node in found if isinstance(node, ast.ClassDef)]
        if not found:
            return False
    return True


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def requirements_named(source: str) -> Iterator[str]:
    """The ids of requirements in the text of a program: `(R2)`, `test_x5_…`, `…_r2`."""
    for found in re.findall(r"(?<![\w.])[QDRXMS]\d{1,2}(?!\w)", source):
        if found not in NO_REQUIREMENTS:
            yield found
    for name in re.findall(r"def (test_\w+)", source):
        yield from (part.upper() for part in name.split("_") if re.fullmatch(r"[qdrxms]\d+", part))


def narrows_a_type(test: ast.expr) -> bool:
    """Whether an assert says only what the type checker cannot know: `is None`, `isinstance`."""
    match test:
        case ast.BoolOp(values=values):
            return all(map(narrows_a_type, values))
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def drawn_errors(docstring: str) -> Iterator[tuple[str, str]]:
    """(class, base) of each line of the drawing; depth is told by the column of the name."""
    stack: list[str] = []
    for line in docstring.splitlines():
        found = re.match(r"^    ((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)", line)
        if found is None:
            continue
        depth = len(found.group(1)) // 4
        del stack[depth:]
        yield found.group(2), stack[-1] if stack else "Exception"
        stack.append(found.group(2))


def limit_uses(node: ast.AST, inside_limits: bool) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id.endswith("limits"):
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and str(node.module).endswith(".limits"):
        yield from (alias.name for alias in node.names)
    elif inside_limits and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
