"""Parse options of `format("quackmq")` that the source and the sink share.

Spark passes texts, with names in any case. `RawOptions` finds an option by its name and parses its
text. An error quotes the option as the user must write it. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from quackmq.errors import IllegalTopicName, InvalidRequest
from quackmq.model.topic import check_topic_name
from quackmq.spark import limits

BOOTSTRAP_OPTION: Final = "kafka.bootstrap.servers"
HTTP_ADDRESS_OPTION: Final = "quackmq.http.address"
RETRY_OPTION: Final = "retryTimeoutMs"
#: Spark's Kafka source has the group among the settings for librdkafka.
GROUP_OPTION: Final = "kafka.group.id"
#: The prefix of settings for librdkafka.
KAFKA_PREFIX: Final = "kafka."

_LONGEST_RETRY_MS: Final = 24 * 3_600_000
#: Spark's units of time; the default is milliseconds.
_UNITS_MS: Final = {
    "": 1,
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_DURATION: Final = re.compile(r"([0-9]{1,9})\s*(ms|s|min|m|h|d|)")
#: How similar an unknown name is to an option that is suggested, and to one that it surely means.
_SIMILARITY: Final = 0.6
_SURE_SIMILARITY: Final = 0.8


class RawOptions:
    """Options as Spark passes them: texts, with names in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._texts = {name.lower(): value for name, value in options.items()}

    def check_names(self, names: Iterable[str], *, allow_unknown: bool = False) -> None:
        """Raise InvalidRequest for a name that is not one of `names`. With `allow_unknown`, raise
        it only for a name that resembles one of them, and so is surely misspelt."""
        by_lower_case = {name.lower(): name for name in names}
        cutoff = _SURE_SIMILARITY if allow_unknown else _SIMILARITY
        for name in self._texts:
            if name in by_lower_case or name.startswith(KAFKA_PREFIX):
                continue
            similar = difflib.get_close_matches(name, by_lower_case, n=1, cutoff=cutoff)
            if similar or not allow_unknown:
                hint = f"; is {by_lower_case[similar[0]]} meant?" if similar else ""
                raise InvalidRequest(f"there is no option {name!r}{hint}")

    def text(self, name: str) -> str | None:
        """Return the text of an option without surrounding spaces; None if it is not set."""
        text = self._texts.get(name.lower())
        return None if text is None else text.strip()

    def number(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number; None if the option is not set. Raise InvalidRequest if it is out
        of range."""
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
            raise invalid_option(name, text, f"it is a whole number from {least} to {most}")
        return int(text)

    def duration_ms(self, name: str, default_ms: int) -> int:
        """Parse a time with a unit of Spark, such as 30s. Raise InvalidRequest if it is none."""
        text = self.text(name)
        if text is None:
            return default_ms
        match = _DURATION.fullmatch(text.lower())
        if match is None:
            raise invalid_option(name, text, "it is a time like 500ms, 30s, 15m or 1h")
        return int(match[1]) * _UNITS_MS[match[2]]

    def flag(self, name: str, default: bool) -> bool:
        """Parse true or false, in any case. Raise InvalidRequest for another text."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise invalid_option(name, text, "it is true or false")
        return text.lower() == "true"

    # --- options of both source and sink ----------------------------------------------------

    def bootstrap(self) -> str:
        """Return the addresses of the broker. Raise InvalidRequest if the option is missing."""
        bootstrap = self.text(BOOTSTRAP_OPTION)
        if not bootstrap:
            raise InvalidRequest(
                f"the option {BOOTSTRAP_OPTION} is missing: HOST:PORT of the broker"
            )
        return bootstrap

    def http_address(self) -> str | None:
        """Return the address of the HTTP listener; None if the broker is to be asked."""
        return self.text(HTTP_ADDRESS_OPTION)

    def retry_ms(self) -> int:
        """Return how long a request to the broker is repeated."""
        return self.number(RETRY_OPTION, 1, _LONGEST_RETRY_MS) or limits.SPARK_RETRY_MS

    def librdkafka_settings(self, *, without: Collection[str] = ()) -> dict[str, str]:
        """Return the settings for librdkafka, unchanged. Omit those that this package handles
        itself: the address, the group and those in `without`."""
        omitted = {BOOTSTRAP_OPTION, GROUP_OPTION, *without}
        return {
            name.removeprefix(KAFKA_PREFIX): value
            for name, value in self._texts.items()
            if name.startswith(KAFKA_PREFIX) and name not in omitted
        }


def check_topic_option(option: str, topic: str) -> None:
    """Raise IllegalTopicName, which quotes the option."""
    try:
        check_topic_name(topic)
    except IllegalTopicName as error:
        raise IllegalTopicName(f"{option}: {error}") from None


def invalid_option(name: str, text: str, expected: str) -> InvalidRequest:
    """Return the error for an option whose text is not what is `expected`."""
    return InvalidRequest(f"{name} cannot be {text[:200]!r}: {expected}")
