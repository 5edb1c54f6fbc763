"""One schema of settings, filled from three places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.cli.broker.address import Address, UnixPath
from quackmq.cli.broker.settings import Settings, load, option_name, setting_fields, variable_name
from quackmq.cli.serve import LISTENERS
from quackmq.errors import InvalidSetting
from tests.kit.tables import each

#: A value other than the default for every setting, as text and as it is in the end.
EXAMPLES: dict[str, tuple[str, object]] = {
    "data": ("pond", Path("pond")),
    "store": ("memory:", "memory:"),
    "kafka": ("[::1]:1", Address("::1", 1)),
    "http": ("localhost:2", Address("localhost", 2)),
    "http_names": ("queue.example,*.Pond.example.", ("queue.example", "*.pond.example")),
    "zmq": ("localhost:3", Address("localhost", 3)),
    "xsub": ("localhost:4", Address("localhost", 4)),
    "xpub": ("localhost:5", Address("localhost", 5)),
    "proxy": ("localhost:6", Address("localhost", 6)),
    "proxy_lease_ms": ("500", 500),
    "proxy_any_address": ("true", True),
    "line": ("unix:quack", UnixPath("quack")),
    "line_entry_bytes": ("80", 80),
    "line_answer_ms": ("250", 250),
    "line_reading": ("newest", "newest"),
    "line_durable_acks": ("true", True),
    "advertise": ("broker.example:4", Address("broker.example", 4)),
    "sync": ("interval", "interval"),
    "sync_interval_ms": ("250", 250),
    "auto_create_topics": ("false", False),
    "default_partitions": ("12", 12),
    "topic_defaults": (
        "*:needs_subscriber=true,keep_bytes=-1; logs.*:when_full=refuse",
        (
            ("*", {"needs_subscriber": True, "keep_bytes": None}),
            ("logs.*", {"when_full": "refuse"}),
        ),
    ),
    "group_initial_delay_ms": ("0", 0),
    "merge_target_bytes": ("2000000", 2_000_000),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quackmq.toml"


def test_the_examples_cover_every_setting() -> None:
    assert list(EXAMPLES) == [schema.name for schema in setting_fields()]


def test_without_any_source_all_is_default() -> None:
    loaded = load({}, {})
    assert loaded.settings == Settings()
    assert loaded.origins == {}
    assert loaded.warnings == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_setting_can_come_from_every_source(name: str, file: Path) -> None:
    text, value = EXAMPLES[name]
    is_plain = isinstance(value, (bool, int))
    file.write_text(f"{name} = {text}" if is_plain else f'{name} = "{text}"')
    for loaded in (
        load({name: text}, {}),
        load({}, {variable_name(name): text}),
        load({}, {}, file),
    ):
        assert getattr(loaded.settings, name) == value
        assert list(loaded.origins) == [name]


def test_an_option_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("default_partitions = 1\nsync_interval_ms = 1\nsync = 'os'")
    environment = {"QUACKMQ_DEFAULT_PARTITIONS": "2", "QUACKMQ_SYNC_INTERVAL_MS": "2"}
    loaded = load({"default_partitions": "3"}, environment, file)
    assert loaded.settings == Settings(default_partitions=3, sync_interval_ms=2, sync="os")
    assert loaded.origins == {
        "default_partitions": "the option --default-partitions",
        "sync_interval_ms": "the environment variable QUACKMQ_SYNC_INTERVAL_MS",
        "sync": f"sync in {file}",
    }


def test_the_environment_can_name_the_file_and_an_option_goes_before_it(
    file: Path, tmp_path: Path
) -> None:
    file.write_text("default_partitions = 7")
    other = tmp_path / "other.toml"
    other.write_text("default_partitions = 8")
    environment = {"QUACKMQ_CONFIG": str(file)}
    assert load({}, environment).settings.default_partitions == 7
    assert load({}, environment, other).settings.default_partitions == 8


@each(
    ("name", "text", "complaint"),
    [
        ("data", "", "'' is empty"),
        ("store", "disk", "'disk' is not one of local, memory:, postgresql://…"),
        ("http_names", "a,http://b", "contains 'http://b', which is not a host name: write names"),
        ("http_names", "a.example:8002", "without http:// and without a port"),
        ("kafka", "nine", "'nine' is not HOST:PORT"),
        ("advertise", "broker:0", "'broker:0' has port 0"),
        ("sync", "never", "'never' is not one of always, interval, os"),
        ("sync_interval_ms", "0", "'0' is not a whole number from 1 to 60000"),
        ("sync_interval_ms", "1.5", "'1.5' is not a whole number"),
        ("default_partitions", "10001", "from 1 to 10000"),
        ("auto_create_topics", "yes", "'yes' is neither true nor false"),
        ("topic_defaults", "*", "has no colon in '*': write PATTERN:SETTING=VALUE"),
        ("topic_defaults", "*:", "is invalid: the defaults of * set nothing"),
        ("topic_defaults", "a/b:ephemeral=true", "is invalid: 'a/b' is not a pattern"),
        ("topic_defaults", "*:ephemerel=true", "did you mean 'ephemeral'?"),
        ("topic_defaults", "*:ephemeral=1", "ephemeral cannot be '1': use true or false"),
        ("topic_defaults", "*:keep_bytes", "'keep_bytes' has no value: write SETTING=VALUE"),
        ("topic_defaults", "*:keep_bytes=1;*:keep_bytes=2", "names the pattern '*' twice"),
        ("log_level", "loud", "'loud' is not one of debug"),
    ],
)
def test_a_bad_value_is_told_with_where_it_came_from(name: str, text: str, complaint: str) -> None:
    with pytest.raises(InvalidSetting) as by_option:
        load({name: text}, {})
    assert str(by_option.value).startswith(f"the option {option_name(name)}: ")
    assert complaint in str(by_option.value)

    with pytest.raises(InvalidSetting) as by_variable:
        load({}, {variable_name(name): text})
    assert str(by_variable.value).startswith(f"the environment variable {variable_name(name)}: ")


def test_a_list_in_the_file_is_a_list_or_its_text(file: Path) -> None:
    for content in ("['a.example', '*']", "'a.example, *'"):
        file.write_text(f"http_names = {content}")
        assert load({}, {}, file).settings.http_names == ("a.example", "*")
    file.write_text("http_names = []")
    assert load({}, {}, file).settings.http_names == ()
    assert load({"http_names": "Dücks.example"}, {}).settings.http_names == (
        "xn--dcks-0ra.example",
    )


def test_topic_defaults_in_the_file_are_tables(file: Path) -> None:
    file.write_text(
        '[topic_defaults."*"]\nneeds_subscriber = true\nkeep_bytes = -1\n'
        '[topic_defaults."logs.*"]\nkeep_for_ms = 86_400_000\nwhen_full = "refuse"\n'
    )
    assert load({}, {}, file).settings.topic_defaults == (
        ("*", {"needs_subscriber": True, "keep_bytes": None}),
        ("logs.*", {"keep_for_ms": 86_400_000, "when_full": "refuse"}),
    )


def test_the_patterns_of_the_settings_are_bounded() -> None:
    entries = [f"logs.{number}:ephemeral=true" for number in range(limits.TOPIC_DEFAULTS + 1)]
    loaded = load({"topic_defaults": ";".join(entries[1:])}, {})
    assert len(loaded.settings.topic_defaults) == limits.TOPIC_DEFAULTS
    with pytest.raises(InvalidSetting, match=f"use at most {limits.TOPIC_DEFAULTS}"):
        load({"topic_defaults": ";".join(entries)}, {})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("default_partitions = '3'", "default_partitions in {file}: '3' is not a whole number"),
        ("default_partitions = true", "default_partitions in {file}: True is not a whole number"),
        ("auto_create_topics = 1", "auto_create_topics in {file}: 1 is not true or false"),
        ("kafka = 9092", "kafka in {file}: 9092 is not a string"),
        ("http_names = 1", "http_names in {file}: 1 is not a list of strings"),
        ("http_names = ['a', 1]", "http_names in {file}: ['a', 1] is not a list of strings"),
        ("topic_defaults = 1", "topic_defaults in {file}: 1 is not a table of patterns"),
        (
            "topic_defaults.a = 1",
            "topic_defaults in {file} needs a table for each pattern of names, and 'a' is none",
        ),
        ("topic_defaults.a.keep_bytes = []", "in {file} has a value for keep_bytes that is no"),
        ("topic_defaults.a.keep = 1", "in {file}: 'a:keep=1' is invalid: a topic has no setting"),
        ("sync = 'never'", "sync in {file}: 'never' is not one of"),
        ("default_partition = 3", "'default_partition' in {file} is not a setting: did you mean"),
        ("zqm = 'a:1'", "'zqm' in {file} is not a setting: did you mean 'zmq'?"),
        ("Default-Partitions = 3", "is not a setting: did you mean 'default_partitions'?"),
        (
            "partitions = 3",
            "'partitions' in {file} is not a setting: did you mean 'default_partitions'",
        ),
        ("kafka_port = 9092", "'kafka_port' in {file} is not a setting: did you mean 'kafka'?"),
        ("http-name = 'a'", "'http-name' in {file} is not a setting: did you mean 'http_names'?"),
        ("data-dir = '.'", "'data-dir' in {file} is not a setting: did you mean 'data'?"),
        ("quack = 1", "'quack' in {file} is not a setting: quackmq serve --help lists them"),
        ("[quack]\nsync = 'os'", "'quack' in {file} is not a setting: settings are top-level keys"),
        ("sync = ", "{file} is not TOML"),
    ],
)
def test_a_bad_file_is_told_with_its_name(file: Path, content: str, complaint: str) -> None:
    file.write_text(content)
    with pytest.raises(InvalidSetting) as caught:
        load({}, {}, file)
    assert complaint.format(file=file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_told_so(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSetting, match="is not TOML"):
        load({}, {}, file)


def test_a_file_that_cannot_be_read_is_told_so(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        load({}, {}, file)
    with pytest.raises(InvalidSetting, match="Is a directory"):
        load({}, {}, tmp_path)


def test_a_misspelt_variable_is_doubted_and_a_foreign_one_left_alone() -> None:
    environment = {"QUACKMQ_SYNK": "os", "QUACKMQ_PORT_9092_TCP_ADDR": "10.0.0.1", "SYNC": "os"}
    loaded = load({}, environment)
    assert loaded.settings == Settings()
    assert loaded.warnings == (
        "the environment variable QUACKMQ_SYNK is not a setting: did you mean 'QUACKMQ_SYNC'?",
    )


def test_the_readmes_file_works_as_it_stands_and_names_what_is_no_default(tmp_path: Path) -> None:
    """It is copied as a whole, so nothing in it may be for somebody else's machine."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    sample = readme.partition("```toml\n# quackmq.toml\n")[2].partition("```")[0]
    file = tmp_path / "quackmq.toml"
    file.write_text(sample)
    settings = load({}, {}, file).settings
    assert settings.advertise is None and settings.http_names == ()
    assert {name: getattr(settings, name) for name in LISTENERS} == LISTENERS
    for schema in setting_fields():
        is_said = re.search(rf"^{schema.name} = .*# the default is ", sample, re.MULTILINE)
        is_other = getattr(settings, schema.name) != schema.default
        assert (is_said is not None) == (is_other and schema.name not in {*LISTENERS, "data"})
    file.write_text(
        sample.replace("# advertise", "advertise").replace("# http_names", "http_names")
    )
    assert load({}, {}, file).settings.advertise == Address("broker.example", 9092)
