"""The rules that keep the code base one piece, checked on its source.

Layers: who may import whom, and no cycles. Style: docstrings, sizes of files and packages, no paths
of somebody's machine. Prose that could rot: the drawn tree of errors, the reasons of the limits,
the public names, the files and functions that ARCHITECTURE.md names, the ids of requirements.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import quackmq
from quackmq import errors
from quackmq.cli.limits_command import parse_reasons
from tests.kit.source import (
    cycles,
    drawn_errors,
    is_in_the_source,
    limit_uses,
    narrows_a_type,
    requirements_named,
)
from tests.kit.tables import each

ROOT = Path(__file__).resolve().parent.parent
#: Directories of what tools fetch and build, wherever they are.
MADE_BY_TOOLS = {"__pycache__", "node_modules", "target"}


def programs_in(*directories: str) -> list[Path]:
    """Every Python file that people wrote below these."""
    paths = (path for directory in directories for path in (ROOT / directory).rglob("*.py"))
    return sorted(path for path in paths if not MADE_BY_TOOLS & {*path.relative_to(ROOT).parts})


MODULES = programs_in("quackmq")
PROGRAMS = programs_in("benchmarks", "examples")
LIMITS = [path for path in MODULES if path.name == "limits.py"]

BASE = {"quackmq.errors", "quackmq.fast_tuples", "quackmq.limits"}
VALUES = (
    BASE
    | {"quackmq.records", "quackmq.disk.interface"}
    | {f"quackmq.model.{name}" for name in ("offset_notes", "partitioning", "policy", "topic")}
)
PURE = {"quackmq.model", "quackmq.groups"}
CODECS = {
    "quackmq.protocols.kafka.codec",
    "quackmq.protocols.line.codec",
    "quackmq.protocols.zmq.codec",
}

#: What codecs may import of the serving layer.
SHARED = {f"quackmq.serving.{name}" for name in ("budgets", "first_bytes", "limits")}

#: Package or module, and what of ours it may import beside itself. The longest name that fits a
#: module counts; a name covers what lies below it.
MAY_IMPORT: dict[str, set[str]] = {
    "quackmq.errors": set(),
    "quackmq.failure_log": set(),
    "quackmq.fast_tuples": set(),
    "quackmq.limits": set(),
    "quackmq.clock": {"quackmq.limits"},
    "quackmq.tasks": {"quackmq.errors"},
    "quackmq.loop_clock": {"quackmq.clock", "quackmq.limits"},
    "quackmq.watchdog": {"quackmq.loop_clock", "quackmq.limits"},
    "quackmq.no_pandas": set(),
    "quackmq.records": BASE,
    "quackmq.disk": BASE | {"quackmq.records.batch"},
    "quackmq.model": BASE | {"quackmq.records"},
    "quackmq.groups": VALUES,
    "quackmq.stores": VALUES
    | {"quackmq.clock", "quackmq.disk", "quackmq.tasks", "quackmq.model.producer_state"}
    | {"quackmq.model.log_transactions"},
    "quackmq.archive": VALUES
    | {
        "quackmq.clock",
        "quackmq.failure_log",
        "quackmq.model.agenda",
        "quackmq.model.producer_state",
        "quackmq.stores.contract",
        "quackmq.stores.delegating",
        "quackmq.tasks",
    },
    "quackmq.broker": VALUES
    | PURE
    | {"quackmq.clock", "quackmq.tasks", "quackmq.loop_clock", "quackmq.stores.contract"}
    | {"quackmq.archive", "quackmq.failure_log"},
    **{
        codec: BASE | SHARED | {"quackmq.records.batch", codec.rpartition(".")[0] + ".limits"}
        for codec in CODECS
    },
    "quackmq.serving": BASE | {"quackmq.broker", "quackmq.loop_clock"},
    "quackmq.protocols": VALUES
    | {"quackmq", "quackmq.broker", "quackmq.loop_clock", "quackmq.serving", "quackmq.tasks"},
    "quackmq.client": VALUES | CODECS | {"quackmq.model.subscription", "quackmq.disk.syncing"},
    "quackmq.spark": VALUES
    | CODECS
    | {"quackmq.client", "quackmq.archive", "quackmq.model.producer_state"}
    | {"quackmq.disk.syncing"},
    "quackmq.cli": VALUES
    | PURE
    | {"quackmq", "quackmq.broker", "quackmq.protocols", "quackmq.stores", "quackmq.archive"}
    | {"quackmq.client", "quackmq.clock", "quackmq.disk", "quackmq.no_pandas", "quackmq.spark"}
    | {"quackmq.watchdog"},
    "quackmq.__main__": {"quackmq.cli"},
    "quackmq": {"quackmq.errors", "quackmq.client"},
}

#: Each of these is alone: none sees another inside the same package.
APART = ("quackmq.protocols.",)

#: Clock, disk and network are passed in to what is pure; a codec has no sockets.
WORLD = {"asyncio", "http", "os", "random", "select", "selectors", "signal", "socket", "ssl"} | {
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uvloop",
}
WORLDLESS = VALUES | PURE | CODECS | SHARED

#: Files above 600 lines, each with the reason why it is not two.
LONG_FILES: dict[str, str] = {}
LONG_FILE_LINES = 600

#: Packages of more modules than a reader can keep in mind, each with the reason.
LARGE_PACKAGES: dict[str, str] = {}
PACKAGE_MODULES = 13

#: A package's docstring: what it is for, what it promises, which module to open first. Longer ones
#: hold an example, or a list of subpackages.
PACKAGE_DOCSTRING_LINES = range(3, 16)

#: Modules that import each other, if only for types or inside functions, each with the reason.
KNOWN_CYCLES: dict[tuple[str, ...], str] = {
    (
        "quackmq.cli.chaos.kafka",
        "quackmq.cli.chaos.line",
        "quackmq.cli.chaos.runner",
        "quackmq.cli.chaos.xpub",
        "quackmq.cli.chaos.zmq",
    ): "a fault client is loaded when it is chosen, so that one does not load all libraries",
    (
        "quackmq.cli.entry",
        "quackmq.cli.main",
        "quackmq.cli.serve",
    ): "a command is loaded when it is chosen, so that `quackmq --help` is fast",
}

#: Documents that name files as `path.py` and functions as `path.py::Class.function`. Paths begin at
#: the root of the repository or at `quackmq/`.
NAMING_CODE = [
    ROOT / "ARCHITECTURE.md",
    ROOT / "docs" / "glossary.md",
    ROOT / "docs" / "where.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]

#: Packages that are imported by another name than they are installed by.
IMPORTED_AS = {"google_re2": "re2", "pyzmq": "zmq"}

#: Where durable data is made or believed: `python -O` removes asserts, so none may stand here.
WITHOUT_ASSERTS = ("quackmq/stores/", "quackmq/disk/", "quackmq/records/batch.py")
#: Asserts elsewhere tell the type checker what the next line needs anyway. These say more: that a
#: caller of ours keeps the rules of a call. No peer and no file can break them.
ASSERTS_OF_OWN_RULES: dict[str, str] = {
    "quackmq/broker/push/channel.py": "a channel is not used after it was closed",
    "quackmq/protocols/http/router.py": "routes are a table in the source, checked at every start",
    "quackmq/protocols/kafka/connection.py": "a request is answered once",
    "quackmq/groups/classic/group.py": "states follow each other by a table in the source",
    "quackmq/protocols/line/codec/conversation.py": "a connection answers what it was given",
}

PUBLIC_NAMES = ["AsyncClient", "Client", "Message", "QuackError", "QuackTimeout", "__version__"]

#: Units, which need no reason.
UNITS = {"KIB", "MIB"}


def test_a_module_imports_only_from_the_layers_below_it() -> None:
    wrong = [
        f"{module} imports {imported}"
        for path in MODULES
        for module in [module_name(path)]
        for imported in our_imports(path)
        if not may_import(module, imported)
    ]
    assert wrong == []


@each(
    ("module", "imported", "allowed"),
    [
        ("quackmq.protocols.kafka.server", "quackmq.broker", True),
        ("quackmq.protocols.kafka.server", "quackmq.protocols.kafka.handlers.produce", True),
        ("quackmq.protocols.kafka.server", "quackmq.protocols.http", False),
        ("quackmq.protocols.kafka.server", "quackmq.serving.server", True),
        ("quackmq.serving.server", "quackmq.protocols.kafka", False),
        ("quackmq.protocols.kafka.server", "quackmq.stores.contract", False),
        ("quackmq.protocols.kafka.codec.framing", "quackmq.model.topic", False),
        ("quackmq.broker", "quackmq.stores.contract", True),
        ("quackmq.broker", "quackmq.stores.local", False),
        ("quackmq.stores.local.segmented_log", "quackmq.stores.contract", True),
        ("quackmq.stores.local.segmented_log", "quackmq.broker", False),
        ("quackmq.client.producer", "quackmq.broker", False),
        ("quackmq.errors", "quackmq.limits", False),
        ("quackmq.cli.serve", "quackmq.stores.local", True),
    ],
)
def test_the_layers_are_those_of_the_architecture(
    module: str, imported: str, allowed: bool
) -> None:
    assert may_import(module, imported) is allowed


def test_every_layer_that_is_named_has_a_rule_that_fits_it() -> None:
    unruled = [module_name(path) for path in MODULES if ruled_by(module_name(path)) == "quackmq"]
    assert unruled == ["quackmq"], "give a new module or package its line in MAY_IMPORT"


def test_values_pure_code_and_codecs_touch_no_clock_disk_or_network() -> None:
    wrong = [
        f"{module_name(path)} imports {imported}"
        for path in MODULES
        if any(covers(name, module_name(path)) for name in WORLDLESS)
        for imported in imports(path)
        if imported.split(".")[0] in WORLD
    ]
    assert wrong == []


def test_nobody_reaches_for_another_modules_private_names() -> None:
    wrong = [
        f"{module_name(path)} imports {node.module}.{alias.name}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quackmq")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.endswith("__")
    ]
    assert wrong == []


def test_every_package_from_outside_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"]]
    for extra in ("spark", "java", "plot", "postgres"):
        requirements += extras[extra]
    named = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}
    declared = {IMPORTED_AS.get(name, name) for name in named}
    wrong = [
        f"{module_name(path)} imports {top}"
        for path in MODULES
        for top in {imported.split(".")[0] for imported in imports(path)}
        if top not in declared | sys.stdlib_module_names | {"quackmq"}
    ]
    assert wrong == []


def test_a_module_opens_by_saying_why_it_exists() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in [*MODULES, *PROGRAMS]
        # An empty file marks a package and has nothing to explain.
        if not ast.get_docstring(tree(path)) and (path.name != "__init__.py" or tree(path).body)
    ]
    assert without == [], "files without a docstring"


def test_long_files_are_named_with_their_reason() -> None:
    long = {
        str(path.relative_to(ROOT))
        for path in [*MODULES, *PROGRAMS, *programs_in("tests")]
        if len(path.read_text().splitlines()) > LONG_FILE_LINES
    }
    assert long == set(LONG_FILES)


def test_a_package_has_no_more_modules_than_a_reader_can_keep_in_mind() -> None:
    sizes = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in MODULES if path.name != "__init__.py"
    )
    assert {name for name, size in sizes.items() if size > PACKAGE_MODULES} == set(LARGE_PACKAGES)


def test_a_package_says_in_a_few_lines_what_it_is_for() -> None:
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in MODULES
        if path.name == "__init__.py"
        for lines in [len((ast.get_docstring(tree(path)) or "").splitlines())]
        if lines not in PACKAGE_DOCSTRING_LINES
    }
    assert wrong == {}


def test_no_modules_import_each_other() -> None:
    graph = {
        module_name(path): {*our_imports(path)} - {module_name(path)}
        for path in MODULES
        # A package's own file gathers names for others to import.
        if path.name != "__init__.py"
    }
    found = {tuple(cycle) for cycle in cycles(graph)}
    assert found == set(KNOWN_CYCLES), "break a new cycle; take a broken one out of KNOWN_CYCLES"


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"d"}}
    assert cycles(graph) == [["a", "b", "c"]]


def test_the_files_and_functions_that_documents_name_exist() -> None:
    wrong = [
        f"{document.relative_to(ROOT)}: {path}" + (f"::{name}" if name else "")
        for document in NAMING_CODE
        for path, name in re.findall(
            r"`([\w/.-]+(?:\.py|/))(?:::([\w.]+))?(?:\(\))?`", document.read_text()
        )
        if not is_in_the_source(path, name)
    ]
    assert not wrong, f"name what took the place of {wrong}"


@each(
    ("path", "name", "exists"),
    [
        ("quackmq/errors.py", "", True),
        ("stores/local/", "", True),
        ("stores/contract.py", "Store.append", True),
        ("stores/contract.py", "Store", True),
        ("errors.py", "QuackError.code", True),
        ("limits.py", "MIB", True),
        ("stores/contract.py", "Store.no_such_method", False),
        ("stores/contract.py", "no_such_function", False),
        ("stores/no_such_file.py", "", False),
        ("stores/no_such_package/", "", False),
    ],
)
def test_a_name_of_a_document_is_looked_up_in_the_source(
    path: str, name: str, exists: bool
) -> None:
    assert is_in_the_source(path, name) is exists


#: The tests that use a protocol, a client, a command or Spark.
PROVING = ("cli", "client", "interop", "protocols", "pubsub", "spark")


def test_every_requirement_that_is_named_is_in_the_specification() -> None:
    specified = (ROOT / "docs" / "specification.md").read_text()
    defined = re.findall(r"^\| ([A-Z]\d+) \|", specified, re.MULTILINE)
    assert len(set(defined)) == len(defined), "an id is defined once"
    named = {
        found: path.relative_to(ROOT).as_posix()
        for path in [*MODULES, *programs_in("tests", "benchmarks", "examples")]
        if path != Path(__file__)
        for found in requirements_named(path.read_text())
    }
    assert {name: path for name, path in named.items() if name not in defined} == {}


def test_every_requirement_is_proved_by_a_test_through_an_interface() -> None:
    requirements, proofs = (ROOT / "docs" / "specification.md").read_text().split("\n## Proofs\n")
    defined = re.findall(r"^\| ([A-Z]\d+) \|", requirements, re.MULTILINE)
    # What stands before the first id is the introduction; then ids and texts take turns.
    parts = re.split(r"^- \*\*([A-Z]\d+)\*\*:", proofs, flags=re.MULTILINE)[1:]
    text_by_id = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(text_by_id) == defined
    assert {name for name, text in text_by_id.items() if "not built yet" in text} == {"M5", "M10"}
    for name, text in text_by_id.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
        is_measured = "make bench" in text
        assert tests or is_measured or "not built yet" in text, f"nothing proves {name}"
        for path, test in tests:
            assert path.split("/")[1] in PROVING, f"{path} does not go through an interface"
            assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


def test_requirements_are_named_in_prose_and_in_the_names_of_tests() -> None:
    source = '"""Exactly once (R2), D7."""\ndef test_x5_it_is_kept_q12() -> None: ...  # not S3_KEY'
    assert set(requirements_named(source)) == {"R2", "D7", "X5", "Q12"}


def test_the_glossary_defines_each_term_once_in_alphabetical_order() -> None:
    terms = bold_terms("docs/glossary.md")
    assert terms == sorted(set(terms))


def test_the_glossary_defines_every_data_structure_of_the_architecture() -> None:
    defined = bold_terms("docs/glossary.md")
    named = bold_terms("ARCHITECTURE.md")
    assert "batches" in named
    # A term may stand in the plural.
    assert [each for each in named if not {each, each[:-1], each[:-2]} & {*defined}] == []


def bold_terms(document: str) -> list[str]:
    text = (ROOT / document).read_text()
    return [term.lower() for term in re.findall(r"\*\*(.+?)\*\*", text)]


def test_links_between_documents_lead_somewhere() -> None:
    wrong = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[\w-]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert wrong == []


def test_every_decision_is_in_the_index() -> None:
    decisions = ROOT / "docs" / "decisions"
    index = re.findall(r"^- \[(.+)\]\((.+)\)$", (decisions / "README.md").read_text(), re.M)
    titles = {
        path.name: path.read_text().splitlines()[0].removeprefix("# ")
        for path in decisions.glob("*.md")
        if path.name != "README.md"
    }
    assert {name: title for title, name in index} == titles


def test_nothing_durable_and_no_input_hangs_on_an_assert() -> None:
    found = [
        f"{name}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert)
        and (name := path.relative_to(ROOT).as_posix())
        and (name.startswith(WITHOUT_ASSERTS) or not narrows_a_type(node.test))
        and name not in ASSERTS_OF_OWN_RULES
    ]
    assert found == [], "raise an error of quackmq.errors instead: python -O removes asserts"


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    machine_path = re.compile(r"(?<![\w.$}])/(?:home|root|Users|work|tmp|mnt|opt)/\w+")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {found.group()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for found in machine_path.finditer(line)
    ]
    assert wrong == []


def test_the_public_names_are_pinned() -> None:
    assert sorted(quackmq.__all__) == sorted(PUBLIC_NAMES)
    assert all(hasattr(quackmq, name) for name in PUBLIC_NAMES)


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    real = {
        (name, cls.__bases__[0].__name__)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    }
    assert set(drawn_errors(errors.__doc__ or "")) == real


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [
        cls.__dict__.get("code")
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    ]
    assert None not in codes
    assert len(set(codes)) == len(codes)


def test_every_limit_has_a_reason_and_stands_in_one_module() -> None:
    found = [
        (name, reason)
        for path in LIMITS
        for name, reason in parse_reasons(path.read_text())
        if name not in UNITS
    ]
    assert [name for name, reason in found if not reason] == []
    names = [name for name, _ in found]
    assert [name for name in names if names.count(name) > 1] == []


def test_every_limit_is_used_and_shared_ones_by_several_packages() -> None:
    users: dict[str, set[str]] = {}
    for path in MODULES:
        inside_limits = path in LIMITS
        if not inside_limits and "limits" not in path.read_text():
            continue  # to walk through a tree takes long
        for node in ast.walk(tree(path)):
            for name in limit_uses(node, inside_limits):
                users.setdefault(name, set()).add(package_of_limits(path))
    for path in LIMITS:
        for name, _ in parse_reasons(path.read_text()):
            assert users.get(name), f"{path}: {name} is not used"
            if path == ROOT / "quackmq" / "limits.py" and users[name] != {"quackmq"}:
                assert len(users[name]) > 1, f"{name} belongs to {users[name]}"


def package_of_limits(path: Path) -> str:
    """The package whose `limits` a module should use for what it alone needs."""
    parts = path.relative_to(ROOT).parts[:-1]
    return ".".join(parts[: 3 if parts[1:2] == ("protocols",) else 2])


# --- helpers ---------------------------------------------------------------------------------


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, wherever in it the import stands."""
    known = {module_name(module) for module in MODULES}
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole in known else str(node.module))
    return found


def our_imports(path: Path) -> Iterator[str]:
    return (name for name in imports(path) if covers("quackmq", name))


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def ruled_by(module: str) -> str:
    return max((name for name in MAY_IMPORT if covers(name, module)), key=len)


def may_import(module: str, imported: str) -> bool:
    rule = ruled_by(module)
    if rule != "quackmq" and covers(rule, imported):
        return together(module, imported)
    return any(
        imported == name or (name != "quackmq" and covers(name, imported))
        for name in MAY_IMPORT[rule]
    )


def together(module: str, imported: str) -> bool:
    """Whether two modules of one layer may see each other: not when they stand apart."""
    for prefix in APART:
        if module.startswith(prefix) and imported.startswith(prefix):
            return module.split(".")[2] == imported.split(".")[2]
    return True


def text_files() -> Iterator[Path]:
    """What people wrote: not what git, the environment and the tools keep beside it."""
    kept = [path for path in ROOT.iterdir() if path.name in {".ci", ".gitignore"}]
    kept += [path for path in ROOT.iterdir() if not path.name.startswith((".", "build", "dist"))]
    for top in sorted(kept):
        for path in [top, *sorted(top.rglob("*"))]:
            is_made = MADE_BY_TOOLS & {*path.relative_to(ROOT).parts}
            if path.is_file() and not is_made and path.suffix not in {".bin", ".xz"}:
                yield path
