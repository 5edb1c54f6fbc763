"""The settings of a broker: one schema, filled from options, the environment and a TOML file.

An option overrides an environment variable, a variable overrides the file, and the file overrides
the default. All three use the same name: `sync_interval_ms` is `--sync-interval-ms`,
QUACKMQ_SYNC_INTERVAL_MS and a top-level key of the file.

An invalid value raises InvalidSetting with a sentence that says where the value came from. An
unknown key of the file is an error. An unknown environment variable is ignored, because others also
set variables with our prefix (orchestrators do, for each service). If it looks misspelt,
`LoadedSettings.warnings` names it.
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
from quackmq.cli.broker.topic_defaults import (
    TopicDefaultPairs,
    format_toml_table,
    parse_topic_defaults,
)
from quackmq.errors import InvalidSetting

ENVIRONMENT_PREFIX: Final = "QUACKMQ_"
CONFIG_VARIABLE: Final = ENVIRONMENT_PREFIX + "CONFIG"
MEMORY_STORE: Final = "memory:"
LOCAL_STORE: Final = "local"
#: How the URL of a database begins.
POSTGRES_STORES: Final = ("postgresql://", "postgres://")


_LIST_OF_SETTINGS: Final = ": quackmq serve --help lists them"
#: The name of each TOML type in error messages.
_TOML_TYPES: Final[Mapping[type, str]] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list of strings",
    dict: "a table of patterns",
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
    """Return the kind of a setting that has one of these values."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"is not one of {', '.join(values)}")
        return text

    return Kind("|".join(values), parse)


def whole_number(least: int, most: int) -> Kind:
    """Return the kind of a setting that is a number from `least` to `most`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise ValueError(f"is not a whole number from {least} to {most}")
        return int(text)

    return Kind("N", parse, int)


def yes_or_no() -> Kind:
    """Return the kind of a setting that is true or false."""

    def parse(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError("is neither true nor false")
        return text == "true"

    return Kind("true|false", parse, bool)


def _store(text: str) -> str:
    """Return the name of a store, or the URL of a database."""
    if text not in (LOCAL_STORE, MEMORY_STORE) and not text.startswith(POSTGRES_STORES):
        raise ValueError(f"is not one of {STORE.metavar.replace('|', ', ')}")
    return text


def _directory(text: str) -> Path:
    if not text:
        raise ValueError("is empty")
    return Path(text).expanduser()


STORE: Final = Kind(f"{LOCAL_STORE}|{MEMORY_STORE}|postgresql://…", _store)
ADDRESS: Final = Kind("HOST:PORT", parse_address)
ADVERTISED: Final = Kind("HOST:PORT", parse_advertised_address)
HOST_NAMES: Final = Kind("NAME,…", parse_host_names, list)
ADDRESS_OR_PATH: Final = Kind("HOST:PORT|unix:PATH", parse_address_or_path)
DIRECTORY: Final = Kind("DIR", _directory)
TOPIC_DEFAULTS: Final = Kind("PATTERN:SETTING=VALUE,…;…", parse_topic_defaults, dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of `quackmq serve`. The help texts explain them, `limits` has the reasons for
    their bounds."""

    data: Path | None = setting(None, DIRECTORY, "the data directory; created if missing")
    store: str = setting(
        LOCAL_STORE,
        STORE,
        "where data is stored: local is the data directory, memory: loses everything at exit, and "
        "postgresql://USER@HOST/DATABASE is a PostgreSQL database",
    )
    kafka: Address | None = setting(None, ADDRESS, "listen for Kafka clients")
    http: Address | None = setting(None, ADDRESS, "listen for HTTP")
    http_names: tuple[str, ...] = setting(
        (),
        HOST_NAMES,
        "further host names that HTTP requests may use, for example of a reverse proxy; "
        "*.example.com allows all names below example.com, and * any name, which exposes the "
        "broker to web pages of other sites through DNS rebinding",
    )
    zmq: Address | None = setting(None, ADDRESS, "listen for ZeroMQ")
    xsub: Address | None = setting(
        None, ADDRESS, "listen for ZeroMQ's PUB sockets; default: the port of zmq + 1"
    )
    xpub: Address | None = setting(
        None, ADDRESS, "listen for ZeroMQ's SUB sockets; default: the port of zmq + 2"
    )
    proxy: Address | None = setting(
        None,
        ADDRESS,
        "listen for clients of the reliable proxy; default: the port of zmq + 3",
    )
    proxy_lease_ms: int = setting(
        shared_limits.LEASE_MS,
        whole_number(1, shared_limits.LONGEST_LEASE_MS),
        "the reliable proxy sends a message again if it is not acknowledged within this time",
    )
    proxy_any_address: bool = setting(
        False,
        yes_or_no(),
        "allow clients of the reliable proxy to name a callback address on another host",
    )
    line: Address | UnixPath | None = setting(
        None, ADDRESS_OR_PATH, "listen for the line protocol, over TCP or a Unix socket"
    )
    line_entry_bytes: int = setting(
        shared_limits.LINE_ENTRY_BYTES,
        whole_number(1, shared_limits.LINE_LONGEST_ENTRY_BYTES),
        "QUACKSIZE: the largest entry of the line protocol, in bytes",
    )
    line_answer_ms: int = setting(
        shared_limits.LINE_ANSWER_MS,
        whole_number(1, shared_limits.LINE_LONGEST_ANSWER_MS),
        "disconnect a line subscriber that has not answered an entry within this time",
    )
    line_reading: Literal["live", "every", "newest"] = setting(
        "live",
        choice("live", "every", "newest"),
        "deliver to line subscribers live entries in order, every entry in order, or live entries "
        "with the newest hundred first; live and newest skip entries older than live_for_ms",
    )
    line_durable_acks: bool = setting(
        False,
        yes_or_no(),
        "make each answer of a line subscriber durable before it gets its next entry, so that a "
        "crash of the broker repeats one entry at most; this makes delivery slower",
    )
    advertise: Address | None = setting(
        None, ADVERTISED, "the address that Kafka clients connect to, if it differs from --kafka"
    )
    sync: Literal["always", "interval", "os"] = setting(
        "always",
        choice("always", "interval", "os"),
        "when data is synced to disk: before each acknowledgement, every sync_interval_ms, or when "
        "the operating system decides; the last two can lose acknowledged data in a power failure",
    )
    sync_interval_ms: int = setting(
        shared_limits.SYNC_INTERVAL_MS,
        whole_number(1, limits.LONGEST_SYNC_INTERVAL_MS),
        "the interval between two syncs, with sync = interval",
    )
    auto_create_topics: bool = setting(True, yes_or_no(), "create a topic on its first use")
    default_partitions: int = setting(
        1,
        whole_number(1, shared_limits.PARTITIONS_PER_TOPIC),
        "partitions of a topic that is created without a number of partitions",
    )
    topic_defaults: TopicDefaultPairs = setting(
        (),
        TOPIC_DEFAULTS,
        "settings of new topics by name pattern, for example *:needs_subscriber=true; a table for "
        "each pattern in the file",
    )
    group_initial_delay_ms: int = setting(
        shared_limits.GROUP_INITIAL_DELAY_MS,
        whole_number(0, limits.LONGEST_GROUP_INITIAL_DELAY_MS),
        "how long a new Kafka group waits for more members before its first rebalance",
    )
    merge_target_bytes: int = setting(
        shared_limits.MERGE_TARGET_BYTES,
        whole_number(shared_limits.MIB, shared_limits.ARCHIVE_OFFERED_BYTES),
        "merge small archive files until they have about this size",
    )
    log_level: str = setting(
        "info",
        choice("debug", "info", "warning", "error"),
        "the lowest level that is logged to stderr",
    )
    log_format: str = setting("text", choice("text", "json"), "text for people, json for programs")


class LoadedSettings(NamedTuple):
    settings: Settings
    #: The source of each setting that is not a default, for messages: "the option --http".
    origins: Mapping[str, str]
    #: Warnings about ignored environment variables that look misspelt.
    warnings: tuple[str, ...]


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
) -> LoadedSettings:
    """Combine the sources into settings. `options` are the texts as typed; None means not given."""
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
            text = _format_toml_value(from_file[name], kind, origin)
        else:
            continue
        values[name] = _parse(text, kind, origin)
        origins[name] = origin
    return LoadedSettings(Settings(**values), origins, tuple(_misspelt_variables(environment)))


def _parse(text: str, kind: Kind, origin: str) -> object:
    try:
        return kind.parse(text)
    except ValueError as error:
        raise InvalidSetting(f"{origin}: {text!r} {error}") from None


def _read_file(file: Path) -> dict[str, object]:
    """Return the settings in a TOML file, not yet parsed. Raises InvalidSetting for a file that
    cannot be read, or for a key that is not a setting."""
    try:
        with file.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise InvalidSetting(f"cannot read the settings in {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{file} is not TOML: {error}") from None

    setting_names = [schema.name for schema in setting_fields()]
    for key, value in content.items():
        if key in setting_names:
            continue
        hint = suggest(_most_similar_setting(key, setting_names), setting_names)
        if not hint and isinstance(value, dict):
            hint = ": settings are top-level keys, not in tables"
        raise InvalidSetting(f"{key!r} in {file} is not a setting{hint or _LIST_OF_SETTINGS}")
    return content


def _most_similar_setting(key: str, setting_names: Iterable[str]) -> str:
    """Return the setting that a key resembles most, or the key if there is none. A setting
    resembles the key if it is spelt nearly the same, like `http-name` and http_names, or if one
    contains all words of the other, like `partitions` and default_partitions, or `kafka-port`
    and kafka."""
    key = key.lower().replace("-", "_")
    words = {*key.split("_")}
    setting_names = list(setting_names)
    alike = [
        name for name in setting_names if words <= {*name.split("_")} or words >= {*name.split("_")}
    ]
    if near := nearest(key, setting_names):
        alike.append(near)
    return max(alike, key=lambda name: _similarity(key, name), default=key)


def _similarity(word: str, known_name: str) -> float:
    return difflib.SequenceMatcher(None, word, known_name).ratio()


def _format_toml_value(value: object, kind: Kind, origin: str) -> str:
    """Return a TOML value as the text of an option. Raises InvalidSetting for a value of the
    wrong TOML type."""
    if kind.native is dict and isinstance(value, dict):
        try:
            return format_toml_table(value)
        except ValueError as error:
            raise InvalidSetting(f"{origin} {error}") from None
    if kind.native is dict and isinstance(value, str):
        return value
    if kind.native is list:
        items = value if isinstance(value, list) else [value]
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) == len(items):
            return ",".join(texts)
    elif type(value) is kind.native:
        return str(value).lower() if kind.native is bool else str(value)
    raise InvalidSetting(f"{origin}: {value!r} is not {_TOML_TYPES[kind.native]}")


def _misspelt_variables(environment: Mapping[str, str]) -> Iterable[str]:
    """Yield a warning for each variable with our prefix that resembles a setting. Other unknown
    variables are ignored."""
    setting_names = [schema.name.upper() for schema in setting_fields()]
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name not in setting_names and (near := nearest(name, setting_names)):
            meant = ENVIRONMENT_PREFIX + near
            yield f"the environment variable {variable} is not a setting: did you mean {meant!r}?"


def suggest(word: str, known_names: Iterable[str]) -> str:
    """Return ": did you mean …?" with the known word that was probably meant, or "" if there is
    none."""
    near = nearest(word, known_names)
    return f": did you mean {near!r}?" if near else ""


def nearest(word: str, known_names: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or None."""
    known_names = list(known_names)
    # The cutoff accepts one or two wrong letters in a word of usual length.
    near = difflib.get_close_matches(word, known_names, n=1, cutoff=0.75)
    # In a short word, two swapped letters make the ratio too low.
    near = near or [each for each in known_names if sorted(each) == sorted(word)]
    return near[0] if near else None
