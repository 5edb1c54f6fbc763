"""The settings of a broker: one schema, filled from options, the environment and a TOML file.

For each setting an option goes before an environment variable, that before the file, and that
before the default. All three spell a setting alike: `sync_interval_ms` is `--sync-interval-ms`,
QUACKMQ_SYNC_INTERVAL_MS and a key of that name at the top of the file.

Promised: a value that cannot be raises InvalidSetting, one sentence that names where the value came
from. A key of the file that is no setting is refused. An environment variable that is none is left
alone, since others set variables under our prefix too (an orchestrator does so for each service),
but one that looks misspelt is named in `Loaded.doubts`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.broker.address import (
    Address,
    UnixPath,
    parse_address,
    parse_address_or_path,
    parse_advertised_address,
    parse_host_names,
)
from quackmq.errors import InvalidSetting

ENVIRONMENT_PREFIX: Final = "QUACKMQ_"
CONFIG_VARIABLE: Final = ENVIRONMENT_PREFIX + "CONFIG"
MEMORY_STORE: Final = "memory:"
LOCAL_STORE: Final = "local"


_LIST_OF_SETTINGS: Final = ": quackmq serve --help lists them"
#: By the type of a value: how a message calls it.
_TOML_TYPES: Final[Mapping[type, str]] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list of strings",
}


class Kind(NamedTuple):
    """How a setting's value is written: as text anywhere, and as `native` in TOML.

    `parse` raises ValueError with a phrase that continues "the value …".
    """

    metavar: str
    parse: Callable[[str], object]
    native: type = str


def setting(default: object, kind: Kind, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


def choice(*values: str) -> Kind:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"is not one of {', '.join(values)}")
        return text

    return Kind("|".join(values), parse)


def whole_number(least: int, most: int) -> Kind:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ValueError(f"is not a whole number from {least} to {most}")
        return int(text)

    return Kind("N", parse, int)


def yes_or_no() -> Kind:
    def parse(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError("is neither true nor false")
        return text == "true"

    return Kind("true|false", parse, bool)


def _directory(text: str) -> Path:
    if not text:
        raise ValueError("is empty")
    return Path(text).expanduser()


ADDRESS: Final = Kind("HOST:PORT", parse_address)
ADVERTISED: Final = Kind("HOST:PORT", parse_advertised_address)
HOST_NAMES: Final = Kind("NAME,…", parse_host_names, list)
ADDRESS_OR_PATH: Final = Kind("HOST:PORT|unix:PATH", parse_address_or_path)
DIRECTORY: Final = Kind("DIR", _directory)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `quackmq serve` can be told. Help texts say what, `limits` why so much."""

    data: Path | None = setting(None, DIRECTORY, "directory that holds all data; made if missing")
    store: str = setting(
        LOCAL_STORE,
        choice(LOCAL_STORE, MEMORY_STORE),
        "where data is kept: local is the data directory, memory: forgets all at exit",
    )
    kafka: Address | None = setting(None, ADDRESS, "listen for Kafka clients")
    http: Address | None = setting(None, ADDRESS, "listen for HTTP")
    http_names: tuple[str, ...] = setting(
        (),
        HOST_NAMES,
        "further host names that HTTP requests may name: of a reverse proxy, say, or in a DNS; "
        "*.example.com is all names below example.com, and * any name, which lets web pages of "
        "other sites in by DNS rebinding",
    )
    zmq: Address | None = setting(None, ADDRESS, "listen for ZeroMQ")
    xsub: Address | None = setting(
        None, ADDRESS, "listen for ZeroMQ's PUB sockets; default: if zmq is open, its port + 1"
    )
    xpub: Address | None = setting(
        None, ADDRESS, "listen for ZeroMQ's SUB sockets; default: if zmq is open, its port + 2"
    )
    proxy: Address | None = setting(
        None,
        ADDRESS,
        "listen for clients of the reliable proxy; default: if zmq is open, its port + 3",
    )
    proxy_lease_ms: int = setting(
        shared_limits.LEASE_MS,
        whole_number(1, shared_limits.LONGEST_LEASE_MS),
        "what a client of the reliable proxy does not acknowledge for so long is sent to it again",
    )
    proxy_any_address: bool = setting(
        False,
        yes_or_no(),
        "clients of the reliable proxy may name an address that is not on their own host",
    )
    line: Address | UnixPath | None = setting(
        None, ADDRESS_OR_PATH, "listen for the line protocol, over TCP or a Unix socket"
    )
    line_entry_bytes: int = setting(
        shared_limits.LINE_ENTRY_BYTES,
        whole_number(1, shared_limits.LINE_LONGEST_ENTRY_BYTES),
        "QUACKSIZE: the most bytes of an entry of the line protocol",
    )
    line_answer_ms: int = setting(
        shared_limits.LINE_ANSWER_MS,
        whole_number(1, shared_limits.LINE_LONGEST_ANSWER_MS),
        "a subscriber of the line protocol that does not answer an entry for so long is dead",
    )
    line_reading: Literal["live", "every"] = setting(
        "live",
        choice("live", "every"),
        "what a subscriber of the line protocol is brought: every entry, or what is live; one that "
        "is behind then gets the newest hundred first, in their order",
    )
    advertise: Address | None = setting(
        None, ADVERTISED, "the address that Kafka clients are told to connect to"
    )
    sync: Literal["always", "interval", "os"] = setting(
        "always",
        choice("always", "interval", "os"),
        "when data reaches the disk: before each acknowledgement, every sync_interval_ms, or when "
        "the operating system likes; the last two can lose acknowledged data in a power cut",
    )
    sync_interval_ms: int = setting(
        shared_limits.SYNC_INTERVAL_MS,
        whole_number(1, limits.LONGEST_SYNC_INTERVAL_MS),
        "with sync = interval: how often",
    )
    auto_create_topics: bool = setting(True, yes_or_no(), "create a topic on its first use")
    default_partitions: int = setting(
        1,
        whole_number(1, shared_limits.PARTITIONS_PER_TOPIC),
        "partitions of a topic created without a number",
    )
    group_initial_delay_ms: int = setting(
        shared_limits.GROUP_INITIAL_DELAY_MS,
        whole_number(0, limits.LONGEST_GROUP_INITIAL_DELAY_MS),
        "how long the first member of a Kafka group waits for others that start with it",
    )
    merge_target_bytes: int = setting(
        shared_limits.MERGE_TARGET_BYTES,
        whole_number(shared_limits.MIB, shared_limits.ARCHIVE_OFFERED_BYTES),
        "small files of the archive are merged until they are about this large",
    )
    log_level: str = setting(
        "info", choice("debug", "info", "warning", "error"), "the least that is logged, on stderr"
    )
    log_format: str = setting("text", choice("text", "json"), "for people or for programs")


class Loaded(NamedTuple):
    settings: Settings
    #: Where each setting that is not a default came from, for messages: "the option --http".
    origins: Mapping[str, str]
    #: Sentences about what was left alone and may be a mistake.
    doubts: tuple[str, ...]


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def setting_fields() -> tuple[Field[Any], ...]:
    return fields(Settings)


def load(
    options: Mapping[str, str | None],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Loaded:
    """The settings that these sources give together. `options` are as typed, None if not given."""
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    from_file = _read_file(file) if file is not None else {}

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for schema in setting_fields():
        name, kind = schema.name, schema.metadata["kind"]
        text: str
        if (option := options.get(name)) is not None:
            text, origin = option, f"the option {option_name(name)}"
        elif (variable := environment.get(variable_name(name))) is not None:
            text, origin = variable, f"the environment variable {variable_name(name)}"
        elif name in from_file:
            origin = f"{name} in {file}"
            text = _toml_text(from_file[name], kind, origin)
        else:
            continue
        values[name] = _parse(text, kind, origin)
        origins[name] = origin
    return Loaded(Settings(**values), origins, tuple(_misspelt_variables(environment)))


def _parse(text: str, kind: Kind, origin: str) -> object:
    try:
        return kind.parse(text)
    except ValueError as error:
        raise InvalidSetting(f"{origin}: {text!r} {error}") from None


def _read_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise InvalidSetting(f"cannot read the settings in {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{file} is not TOML: {error}") from None

    known = [schema.name for schema in setting_fields()]
    for key, value in content.items():
        if key in known:
            continue
        hint = suggest(_setting_like(key, known), known)
        if not hint and isinstance(value, dict):
            hint = ": settings stand at the top of the file, not in tables"
        raise InvalidSetting(f"{key!r} in {file} is no setting{hint or _LIST_OF_SETTINGS}")
    return content


def _setting_like(key: str, known: Iterable[str]) -> str:
    """Return the setting that a key resembles most: it is spelt nearly alike, as `http-name` for
    http_names, or it has more or fewer of the same words, as `partitions` for default_partitions
    and `kafka-port` for kafka. Without one, return the key."""
    key = key.lower().replace("-", "_")
    words = {*key.split("_")}
    known = list(known)
    alike = [name for name in known if words <= {*name.split("_")} or words >= {*name.split("_")}]
    if near := nearest(key, known):
        alike.append(near)
    return max(alike, key=lambda name: _likeness(key, name), default=key)


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def _toml_text(value: object, kind: Kind, origin: str) -> str:
    """A TOML value as the text that an option would have; TOML's own types are insisted on."""
    if kind.native is list:
        items = value if isinstance(value, list) else [value]
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) == len(items):
            return ",".join(texts)
    elif type(value) is kind.native:
        return str(value).lower() if kind.native is bool else str(value)
    raise InvalidSetting(f"{origin}: {value!r} is not {_TOML_TYPES[kind.native]}")


def _misspelt_variables(environment: Mapping[str, str]) -> Iterable[str]:
    known = [schema.name.upper() for schema in setting_fields()]
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name not in known and (near := nearest(name, known)):
            meant = ENVIRONMENT_PREFIX + near
            yield f"the environment variable {variable} is no setting: did you mean {meant!r}?"


def suggest(word: str, known: Iterable[str]) -> str:
    """ ": did you mean …?" if some known word is near, else nothing."""
    near = nearest(word, known)
    return f": did you mean {near!r}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    # Two letters that changed places make a short word look too different.
    near = near or [each for each in known if sorted(each) == sorted(word)]
    return near[0] if near else None
