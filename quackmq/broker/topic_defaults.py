"""The defaults of new topics, by name pattern: those of the settings, and those set at run time.

A topic gets them when it is created: by a request that names no policy, by its first message, or by
its first subscription. Settings that a request names override them. Topics that exist do not
change. `quackmq.model.topic_defaults` says what a pattern is, and which of several wins. Patterns
do not apply to the topic with receipts, which the broker itself writes.

A pattern that was set at run time replaces the same pattern of the settings until it is removed.
The store has one state for each pattern that was set at run time:

    "topic-default/PATTERN": {"needs_subscriber": "true", "keep_for_ms": "-1", ...}

Promised: a change is durable when its call returns.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from quackmq import limits
from quackmq.broker import limits as broker_limits
from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.errors import DamagedStore, InvalidRequest, LimitReached, UnknownTopicDefault
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.policy import POLICY_SETTINGS, Policy, format_setting, parse_setting
from quackmq.model.stored_json import decode_stored
from quackmq.model.topic_defaults import NamePolicies, PolicySettings, check_topic_default
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: The policy of a new topic with receipts: they are deleted by age, read or not.
RECEIPTS_POLICY: Final = Policy(keep_for_ms=broker_limits.RECEIPTS_KEEP_MS)
#: Prefix of the state keys. The pattern follows.
STATE_PREFIX: Final = "topic-default/"


class TopicDefault(NamedTuple):
    """The settings of a pattern. `source` is `settings` for a pattern of the broker's settings, and
    `stored` for one that was set at run time."""

    pattern: str
    settings: PolicySettings
    source: Literal["settings", "stored"]


class TopicDefaults:
    """The policies of new topics."""

    def __init__(self, store: Store, settings: BrokerSettings, lifecycle: Lifecycle) -> None:
        """Raise InvalidPattern or InvalidPolicy for invalid defaults in the settings."""
        for pattern, pattern_settings in settings.topic_defaults.items():
            check_topic_default(pattern, pattern_settings)
        self._store = store
        self._base = settings.default_policy
        self._configured = dict(settings.topic_defaults)
        self._stored: dict[str, PolicySettings] = {}
        #: The versions of the stored states.
        self._versions: dict[str, int] = {}
        self._policies = NamePolicies(self._base, self._configured)
        self._locks = NamedLocks()
        self._lifecycle = lifecycle

    async def load(self) -> None:
        """Load the defaults that were set at run time. Raise DamagedStore."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            pattern = key.removeprefix(STATE_PREFIX)
            if state.value is not None:
                self._stored[pattern] = _decode(pattern, state.value)
                self._versions[pattern] = state.version
        self._rebuild()

    def policy_for(self, name: str) -> Policy:
        """Return the policy of a new topic of this name, unless its creator names another."""
        return RECEIPTS_POLICY if name == RECEIPTS_TOPIC else self._policies.policy_for(name)

    def all(self) -> list[TopicDefault]:
        """Return all patterns that are in effect, in alphabetical order."""
        return [
            TopicDefault(pattern, settings, "stored" if pattern in self._stored else "settings")
            for pattern, settings in sorted((self._configured | self._stored).items())
        ]

    async def put(self, caller: Caller, pattern: str, settings: PolicySettings) -> TopicDefault:
        """Set the defaults of a pattern; they replace those that it had. Raise InvalidPattern,
        InvalidPolicy or LimitReached."""
        self._lifecycle.check_open()
        check_topic_default(pattern, settings)
        await self._lifecycle.run_shielded(self._put(pattern, dict(settings)))
        return TopicDefault(pattern, settings, "stored")

    async def remove(self, caller: Caller, pattern: str) -> None:
        """Remove the defaults of a pattern that was set at run time. The same pattern of the
        settings, if there is one, is in effect again. Raise UnknownTopicDefault, or InvalidRequest
        for a pattern that only the settings have."""
        self._lifecycle.check_open()
        await self._lifecycle.run_shielded(self._remove(pattern))

    # --- internal -----------------------------------------------------------------------------

    async def _put(self, pattern: str, settings: PolicySettings) -> None:
        """Store the defaults of a pattern, then apply them."""
        async with self._locks.hold(STATE_PREFIX):
            if pattern not in self._stored and len(self._stored) >= limits.TOPIC_DEFAULTS:
                raise LimitReached(
                    f"there are {limits.TOPIC_DEFAULTS} patterns with topic defaults: remove one"
                )
            await self._write(pattern, _encode(settings))
            self._stored[pattern] = settings
            self._rebuild()

    async def _remove(self, pattern: str) -> None:
        """Delete the stored defaults of a pattern, then apply the deletion. Raise as `remove`
        does."""
        async with self._locks.hold(STATE_PREFIX):
            if pattern not in self._stored:
                shown = repr(pattern[:100])
                if pattern in self._configured:
                    raise InvalidRequest(
                        f"the topic defaults of {shown} come from the broker's settings: change "
                        "them there, or set others for this pattern"
                    )
                raise UnknownTopicDefault(f"there are no topic defaults for the pattern {shown}")
            await self._write(pattern, None)
            del self._stored[pattern]
            self._rebuild()

    async def _write(self, pattern: str, value: bytes | None) -> None:
        """Store the defaults of a pattern, or delete them if `value` is None."""
        key = STATE_PREFIX + pattern
        state = await self._store.put_state(key, value, self._versions.get(pattern, 0))
        if value is None:
            self._versions.pop(pattern, None)
        else:
            self._versions[pattern] = state.version

    def _rebuild(self) -> None:
        self._policies = NamePolicies(self._base, self._configured | self._stored)


def _encode(settings: PolicySettings) -> bytes:
    return json.dumps({name: format_setting(value) for name, value in settings.items()}).encode()


def _decode(pattern: str, value: bytes) -> PolicySettings:
    """Decode the value of `_encode`. A setting that this version does not have is left out: a later
    version has stored it. Raise DamagedStore for any other value."""
    texts: Mapping[str, str] = decode_stored(value, dict[str, str], "topic defaults")
    for name in texts.keys() - POLICY_SETTINGS:
        log.warning("the topic defaults of %s have an unknown setting %s: ignored", pattern, name)
    try:
        return {name: parse_setting(name, texts[name]) for name in texts if name in POLICY_SETTINGS}
    except InvalidRequest as error:
        raise DamagedStore(f"cannot decode the topic defaults of {pattern}: {error}") from None
