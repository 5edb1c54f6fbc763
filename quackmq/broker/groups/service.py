"""Consumer groups: their members, their committed offsets, and their settings.

`Coordinator` runs the members' protocols. A committed offset is a cursor. Groups and subscriptions
share one namespace of cursors: a subscription of the same name and topic moves with the group's
commits, and is listed as a group. A name has one mode at a time (see `NameModes`). The metadata of
an offset is stored unchanged. Two notes in it also create and end a subscription of the group's
name (see `quackmq.model.offset_notes`), but not in a transaction.

Promised: a commit is durable when its call returns, and is never undone. A member of an older
generation cannot commit. A fetch of offsets sees every commit that was accepted before it. A group
expires, with its offsets, if it has no members, no new commits and no subscription of its name.
Groups that hold publishers' sequence numbers expire after `limits.PUBLISHER_EXPIRY_MS`. A group
that holds retention never expires.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple
from uuid import UUID

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.groups.state import GroupSettings
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.cursors import Cursors, partition_key, removal_of
from quackmq.broker.subscriptions.group_cursors import GroupCursors
from quackmq.broker.subscriptions.name_modes import NameModes
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.subscriptions.service import SubscriptionService, check_subscriber
from quackmq.broker.topics import Topics
from quackmq.clock import Clock
from quackmq.errors import (
    GroupNotEmpty,
    GroupReadsTopic,
    InvalidGroup,
    InvalidRequest,
    MetadataTooLarge,
    NotFound,
    QuackError,
    UnknownGroup,
    UnknownSubscription,
)
from quackmq.groups import (
    ConsumerGroupDescription,
    GroupDescription,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberRef,
    SyncRequest,
    SyncResponse,
)
from quackmq.groups.classic.subscription_metadata import subscribed_topics
from quackmq.groups.states import CONSUMER_PROTOCOL_TYPE
from quackmq.model.offset_notes import PUBLISHER_PREFIX, SUBSCRIBED, find_note, wants_receipts
from quackmq.model.subscription import Start, parse_start
from quackmq.model.topic import NO_LEADER_EPOCH, Append, Cursor, CursorKey, PartitionKey

log = logging.getLogger(__name__)


class Commit(NamedTuple):
    """The next offset that a group wants from a partition, and the member's metadata.

    The offset None deletes the committed offset: the group is then new in that partition.
    `leader_epoch` is stored with the offset and returned with it.
    """

    key: PartitionKey
    offset: int | None
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH


class Groups:
    """What the protocols call for groups. Every call names its caller."""

    def __init__(
        self,
        coordinator: Coordinator,
        cursors: Cursors,
        pull: PullService,
        subscriptions: SubscriptionService,
        group_cursors: GroupCursors,
        names: NameModes,
        topics: Topics,
        clock: Clock,
        holds: Holds,
        retention: Retention,
        lifecycle: Lifecycle,
    ) -> None:
        """`holds` and `retention` are informed of each change of a group that holds retention."""
        self._coordinator = coordinator
        self._cursors = cursors
        self._pull = pull
        self._subscriptions = subscriptions
        self._group_cursors = group_cursors
        self._names = names
        self._topics = topics
        self._clock = clock
        self._now_ms = clock.now_ms
        self._holds = holds
        self._retention = retention
        self._lifecycle = lifecycle
        self._last_clean_ms: int | None = None
        self._has_reported = False

    def load(self) -> None:
        """Register the groups that hold retention. Call this after the coordinator has loaded."""
        for name in self._coordinator.names():
            if self._settings(name).holds_retention:
                self._holds.set_group(name, is_holding=True)

    # --- members ----------------------------------------------------------------------------

    async def join(self, caller: Caller, group: str, request: JoinRequest) -> JoinResponse:
        """Add a member and wait until the rebalance ends. If the caller is cancelled, the member
        stays. Raise InvalidGroup, NameInOtherMode, LimitReached and the errors of
        `quackmq.groups`."""
        self.check_name(group)
        if self._names.may_refuse_group(group):
            self._names.check_group(group, _topics_of_join(request))
        return await self._coordinator.join(group, request)

    async def sync(self, caller: Caller, group: str, request: SyncRequest) -> SyncResponse:
        """Wait for the leader's assignment and return it. Raise RebalanceInProgress,
        IllegalGeneration, UnknownMember, MemberFenced, OtherGroupProtocol or LimitReached."""
        self.check_name(group)
        return await self._coordinator.sync(group, request)

    def heartbeat(self, caller: Caller, group: str, member: MemberRef) -> None:
        """Restart a member's session timeout. Raise RebalanceInProgress, IllegalGeneration,
        UnknownMember or MemberFenced."""
        self.check_name(group)
        self._coordinator.heartbeat(group, member)

    def touch(self, group: str, member_id: str) -> None:
        """Restart a member's session timeout: its heartbeat has arrived, but waits behind other
        requests. The heartbeat itself is checked later, when it is processed."""
        self._coordinator.touch(group, member_id)

    async def consumer_heartbeat(
        self, caller: Caller, group: str, heartbeat: Heartbeat
    ) -> HeartbeatResponse:
        """Process a heartbeat of the newer protocol and return the response. Raise InvalidGroup,
        NameInOtherMode, OtherGroupProtocol, LimitReached and the errors of `quackmq.groups`."""
        self.check_name(group)
        # A heartbeat without topics changes none.
        if heartbeat.topics is not None or heartbeat.pattern:
            # Which topics a pattern matches is found out later; until then it may match any.
            self._names.check_group(group, None if heartbeat.pattern else heartbeat.topics)
        return await self._coordinator.consumer_heartbeat(group, heartbeat)

    async def leave(
        self, caller: Caller, group: str, requests: Sequence[LeaveRequest]
    ) -> list[QuackError | None]:
        """Remove members. Return for each UnknownMember or another error; None if it was
        removed."""
        self.check_name(group)
        outcomes: list[QuackError | None] = []
        for request in requests:
            try:
                await self._coordinator.leave(group, request)
                outcomes.append(None)
            except QuackError as error:
                outcomes.append(error)
        return outcomes

    # --- offsets ----------------------------------------------------------------------------

    async def commit(
        self, caller: Caller, group: str, member: MemberRef, commits: Sequence[Commit]
    ) -> list[QuackError | None]:
        """Commit offsets. Return for each UnknownTopic, UnknownPartition, InvalidRequest,
        MetadataTooLarge or GroupReadsTopic; None if it is durable. An offset whose metadata creates
        or ends a subscription may be durable and still have an error: LimitReached, or an error of
        the store. Raise errors that concern all offsets: InvalidGroup, NameInOtherMode,
        RebalanceInProgress, IllegalGeneration, StaleMemberEpoch, UnknownMember, MemberFenced, and
        errors of the store."""
        self.check_name(group, may_be_empty=True)
        return await self._lifecycle.run_shielded(self._commit(group, member, commits))

    def check_fetch(self, caller: Caller, group: str, member: MemberRef) -> None:
        """Check that a caller with this member id may fetch offsets. In a group of the newer
        protocol it must be a member. Raise UnknownMember, MemberFenced or StaleMemberEpoch."""
        self.check_name(group, may_be_empty=True)
        self._coordinator.check_fetch(group, member)

    async def committed(
        self, caller: Caller, group: str, keys: Sequence[PartitionKey] | None = None
    ) -> dict[PartitionKey, Cursor]:
        """Return the committed offsets of these partitions, or of all. A partition without a commit
        has no entry, except that one which a subscription of this name reads from the beginning is
        at 0."""
        self.check_name(group, may_be_empty=True)
        async with self._cursors.changing(group):  # wait for running commits
            pass
        cursors = {partition_key(cursor.key): cursor for cursor in self._cursors.of(group)}
        for key, offset in self._pull.next_offsets(group).items():
            cursors.setdefault(key, Cursor(CursorKey(group, *key), offset))
        if keys is None:
            return cursors
        return {key: cursors[key] for key in keys if key in cursors}

    async def delete_offsets(
        self, caller: Caller, group: str, keys: Sequence[PartitionKey]
    ) -> list[QuackError | None]:
        """Delete committed offsets. Return for each partition UnknownTopic, UnknownPartition or
        GroupReadsTopic; None if it has no committed offset any more. Raise UnknownGroup;
        GroupNotEmpty if the group has members whose topics are unknown."""
        self.check_name(group)
        return await self._lifecycle.run_shielded(self._delete_offsets(group, keys))

    # --- administration -----------------------------------------------------------------------

    def all(self, caller: Caller) -> list[GroupDescription | ConsumerGroupDescription]:
        """Describe all groups, including names that only have offsets or a subscription."""
        self._lifecycle.check_open()
        names = dict.fromkeys(self._coordinator.names())
        names |= dict.fromkeys(self._cursors.names())
        names |= dict.fromkeys(self._pull.names())
        return [self._coordinator.description(name) for name in names]

    def describe(self, caller: Caller, group: str) -> GroupDescription | ConsumerGroupDescription:
        """Describe one group. Raise UnknownGroup."""
        self.check_name(group, may_be_empty=True)
        self._check_exists(group)
        return self._coordinator.description(group)

    async def delete(self, caller: Caller, group: str) -> None:
        """Delete a group with its offsets. Raise UnknownGroup; GroupNotEmpty if it has members, or
        if a subscription has its name."""
        self.check_name(group, may_be_empty=True)
        await self._lifecycle.run_shielded(self._delete(group))

    def settings(self, caller: Caller, group: str) -> GroupSettings:
        """Return the settings of a group; the defaults for an unknown group."""
        self.check_name(group)
        return self._settings(group)

    async def alter(self, caller: Caller, group: str, settings: GroupSettings) -> None:
        """Change the settings of a group, which need not exist yet. Raise InvalidSetting."""
        self.check_name(group)
        settings.check()
        await self._lifecycle.run_shielded(self._alter(group, settings))

    # --- for transactions ---------------------------------------------------------------------

    async def prepare(
        self, group: str, member: MemberRef, commits: Sequence[Commit]
    ) -> list[QuackError | None]:
        """Check the commits of a transaction, which its end will make. Return and raise the same
        errors as `commit`. If any commit is valid, store the group, so that it exists before the
        transaction ends."""
        self.check_name(group)
        self._check_commit(group, member, commits, is_transactional=True)
        errors = [self._find_commit_error(group, each) for each in commits]
        if None in errors and not self._coordinator.is_stored(group):
            async with self._cursors.changing(group):
                await self._coordinator.store_group(group)
            # The group may have changed meanwhile.
            self._check_commit(group, member, commits, is_transactional=True)
        return errors

    @asynccontextmanager
    async def committing(self, cursors: Sequence[Cursor]) -> AsyncIterator[Sequence[Append]]:
        """Enclose a change of the store that sets cursors of groups together with other things.
        Lock the cursors' names meanwhile, and apply the cursors in memory after the change. Yield
        the receipts to append with it."""
        async with AsyncExitStack() as locks:
            # Lock in one order, so that no two callers wait for each other.
            for name in sorted({cursor.key.name for cursor in cursors}):
                await locks.enter_async_context(self._cursors.changing(name))
            yield await locks.enter_async_context(self._group_cursors.changing(cursors))
            self._cursors.apply(cursors)
        for cursor in cursors:
            if self._holds.is_holding_group(cursor.key.name):
                self._retention.cursor_moved(partition_key(cursor.key))

    # --- for the broker -----------------------------------------------------------------------

    async def clean(self) -> None:
        """Remove expired groups, at most once per interval. Store for groups that have lost their
        last member since when they have been empty."""
        now_ms, last_ms = self._now_ms(), self._last_clean_ms
        is_first = last_ms is None
        if last_ms is not None and 0 <= now_ms - last_ms < limits.GROUP_EXPIRY_INTERVAL_MS:
            return
        self._last_clean_ms = now_ms
        self._names.clean()
        names = dict.fromkeys(self._coordinator.names()) | dict.fromkeys(self._cursors.names())
        try:
            for number, name in enumerate(names):
                if number % limits.CLEANED_GROUPS == 0:
                    await asyncio.sleep(0)
                if self._is_expired(name):
                    await self._lifecycle.run_shielded(self._expire(name))
                elif not is_first and self._has_lost_members(name):
                    await self._lifecycle.run_shielded(self._coordinator.store_empty_since(name))
            self._has_reported = False
        except QuackError as error:
            if not self._has_reported:
                log.error("expired groups cannot be removed; trying again later: %s", error)
            self._has_reported = True

    # --- changing offsets ---------------------------------------------------------------------

    async def _commit(
        self, name: str, member: MemberRef, commits: Sequence[Commit]
    ) -> list[QuackError | None]:
        """Commit offsets, then create or end the subscriptions that notes in their metadata ask
        for."""
        outcomes = await self._commit_offsets(name, member, commits)
        indexes_by_note: dict[tuple[UUID, str, bool, Start], list[int]] = {}
        for index, commit in enumerate(commits):
            metadata = commit.metadata
            if metadata and commit.offset is not None and outcomes[index] is None:
                if (note := find_note(metadata)) is not None:
                    receipts, start = wants_receipts(metadata), parse_start(metadata)
                    note_key = (commit.key.topic_id, note, receipts, start)
                    indexes_by_note.setdefault(note_key, []).append(index)
        for note_key, indexes in indexes_by_note.items():
            error = await self._apply_note(name, *note_key)
            for index in indexes:
                outcomes[index] = error
        return outcomes

    async def _apply_note(
        self, name: str, topic_id: UUID, note: str, receipts: bool, start: Start
    ) -> QuackError | None:
        """Create or end a subscription, as the note in a committed offset's metadata asks. Return
        the error, or None."""
        try:
            if note == SUBSCRIBED:
                await self._subscriptions.subscribe_group(name, topic_id, start, receipts)
            else:
                topic_name = self._topics.with_id(topic_id).name
                await self._subscriptions.end(name, topic_name)
        except UnknownSubscription:
            return None  # it does not exist, or another caller ended it: the note asks for this
        except QuackError as error:
            return error
        return None

    async def _commit_offsets(
        self, name: str, member: MemberRef, commits: Sequence[Commit]
    ) -> list[QuackError | None]:
        """Check and commit offsets, with the group's cursors locked. Return the error of each, or
        None."""
        async with self._cursors.changing(name):
            self._check_commit(name, member, commits)
            outcomes = [self._find_commit_error(name, each) for each in commits]
            if all(outcomes):
                return outcomes
            if not self._coordinator.is_stored(name):
                await self._coordinator.store_group(name)
                # The group may have changed during the write.
                self._check_commit(name, member, commits)
            valid = [index for index, outcome in enumerate(outcomes) if outcome is None]
            now_ms = self._now_ms()
            cursors = [
                Cursor(CursorKey(name, *key), offset, metadata, now_ms, leader_epoch)
                if offset is not None
                else Cursor(CursorKey(name, *key), None)
                for key, offset, metadata, leader_epoch in (commits[index] for index in valid)
            ]
            for index, outcome in zip(valid, await self._set_cursors(name, cursors), strict=True):
                outcomes[index] = outcome
            return outcomes

    def _check_commit(
        self,
        name: str,
        member: MemberRef,
        commits: Sequence[Commit],
        *,
        is_transactional: bool = False,
    ) -> None:
        """Raise NameInOtherMode if the name is used in another mode in a topic of these commits,
        and the errors of `Coordinator.check_commit`."""
        if self._names.may_refuse_group(name):
            topics = (self._topics.by_id.get(each.key.topic_id) for each in commits)
            self._names.check_group(name, {each.name for each in topics if each is not None})
        self._coordinator.check_commit(name, member, is_transactional=is_transactional)

    def _find_commit_error(self, name: str, commit: Commit) -> QuackError | None:
        """Return the reason why an offset cannot be committed; None if it can."""
        try:
            topic = self._topics.of(commit.key)
            if commit.offset is None and self._pull.is_subscribed(topic, name):
                raise GroupReadsTopic(f"{name} is subscribed to topic {topic.name}: unsubscribe it")
            if commit.offset is not None and commit.offset < 0:
                raise InvalidRequest(f"invalid offset {commit.offset}: offsets start at 0")
            if commit.metadata and find_note(commit.metadata) == SUBSCRIBED:
                check_subscriber(name)
            size = len(commit.metadata.encode())
        except QuackError as error:
            return error
        except UnicodeEncodeError:
            return InvalidRequest("the metadata of an offset cannot be encoded as UTF-8")
        limit_bytes = shared_limits.CURSOR_METADATA_BYTES
        if size > limit_bytes:
            return MetadataTooLarge(
                f"the metadata of an offset has {size} bytes: use at most {limit_bytes}"
            )
        return None

    async def _set_cursors(self, name: str, cursors: Sequence[Cursor]) -> list[QuackError | None]:
        """Set cursors, in one append unless there are very many. Return the error of each, or
        None."""
        outcomes: list[QuackError | None] = []
        for part in _split_cursors(cursors):
            try:
                await self._group_cursors.set(part)
                outcomes.extend([None] * len(part))
            except NotFound:
                # The store already knows that a topic is being deleted: commit the other offsets.
                outcomes.extend([await self._set_single_cursor(name, each) for each in part])
        if self._holds.is_holding_group(name):
            for cursor in cursors:
                self._retention.cursor_moved(partition_key(cursor.key))
        return outcomes

    async def _set_single_cursor(self, name: str, cursor: Cursor) -> QuackError | None:
        """Set one cursor. Return the error if its topic was deleted, else None."""
        try:
            # The deleted topic may be the topic of receipts; that must not fail the commit.
            await self._topics.retry_on_topic_deletion(partial(self._group_cursors.set, [cursor]))
        except NotFound as error:
            return error
        return None

    async def _delete_offsets(
        self, name: str, keys: Sequence[PartitionKey]
    ) -> list[QuackError | None]:
        """Delete the committed offsets that may be deleted. Return the error of each, or None."""
        async with self._cursors.changing(name):
            self._check_exists(name)
            outcomes = [self._find_deletion_error(name, key) for key in keys]
            deletable = [index for index, outcome in enumerate(outcomes) if outcome is None]
            candidates = [(index, self._cursors.at(name, keys[index])) for index in deletable]
            stored_cursors = [(index, cursor) for index, cursor in candidates if cursor is not None]
            removed = await self._set_cursors(
                name, [removal_of(cursor) for _, cursor in stored_cursors]
            )
            for (index, _), outcome in zip(stored_cursors, removed, strict=True):
                outcomes[index] = outcome
            return outcomes

    def _find_deletion_error(self, name: str, key: PartitionKey) -> QuackError | None:
        """Return the reason why the offset of a partition must stay; None if it may be deleted."""
        try:
            topic = self._topics.of(key)
        except NotFound as error:
            return error
        if self._pull.is_subscribed(topic, name):
            return GroupReadsTopic(f"{name} is subscribed to topic {topic.name}: unsubscribe it")
        group = self._coordinator.group(name)
        if group is None or not group.size:
            return None
        reads_topic = group.reads_topic(topic.name)
        if reads_topic is None and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
            raise GroupNotEmpty(f"the group {name} has members: stop them first")
        if reads_topic is False:
            return None
        return GroupReadsTopic(f"the group {name} reads topic {topic.name}: stop its members first")

    # --- removing groups ----------------------------------------------------------------------

    async def _delete(self, name: str) -> None:
        """Delete a group that has no members and no subscription."""
        async with self._cursors.changing(name):
            self._check_exists(name)
            if self._coordinator.is_live(name):
                raise GroupNotEmpty(f"the group {name} has members: stop them first")
            if self._pull.has_name(name):
                raise GroupNotEmpty(f"{name} has a subscription: unsubscribe it first")
            await self._remove(name)

    async def _expire(self, name: str) -> None:
        async with self._cursors.changing(name):
            if self._is_expired(name):
                log.info("the group %s has expired", name)
                await self._remove(name)

    async def _remove(self, name: str) -> None:
        # Remove the cursors first: after a crash the remaining ones still belong to a stored group.
        await self._set_cursors(name, [removal_of(cursor) for cursor in self._cursors.of(name)])
        await self._coordinator.delete_stored(name)
        self._apply_settings(name)

    def _is_expired(self, name: str) -> bool:
        """Return whether a group has had no members and no commits for its expiry time, and nothing
        needs it."""
        # An active group without members: its first member has got an id and has not joined yet.
        if self._pull.has_name(name) or self._coordinator.group(name) is not None:
            return False
        if self._holds.is_holding_group(name):
            return False
        is_publisher = name.startswith(PUBLISHER_PREFIX)
        age_ms = limits.PUBLISHER_EXPIRY_MS if is_publisher else shared_limits.GROUP_EXPIRY_MS
        since_ms = self._clock.expired_before(age_ms)
        if self._coordinator.is_stored(name):
            empty_since_ms = self._coordinator.empty_since_ms(name)
            if empty_since_ms is None or empty_since_ms > since_ms:
                return False
        return not any(cursor.updated_ms > since_ms for cursor in self._cursors.of(name))

    def _has_lost_members(self, name: str) -> bool:
        """Return whether a restart left a group empty, with members in the stored state."""
        stored = self._coordinator.stored(name)
        is_empty = not self._coordinator.is_live(name)
        return stored is not None and stored.empty_since_ms is None and is_empty

    async def _alter(self, name: str, settings: GroupSettings) -> None:
        async with self._cursors.changing(name):
            if settings != self._settings(name):
                await self._coordinator.store_group(name, settings)
                self._apply_settings(name)

    def _apply_settings(self, name: str) -> None:
        self._holds.set_group(name, self._settings(name).holds_retention)
        for cursor in self._cursors.of(name):
            self._retention.cursor_moved(partition_key(cursor.key))

    # --- helpers ----------------------------------------------------------------------------

    def _settings(self, name: str) -> GroupSettings:
        stored = self._coordinator.stored(name)
        return GroupSettings() if stored is None else stored.settings

    def _check_exists(self, name: str) -> None:
        """Raise UnknownGroup if there is neither a group nor an offset nor a subscription of this
        name."""
        if not (
            self._coordinator.has_entry(name)
            or self._cursors.has_name(name)
            or self._pull.has_name(name)
        ):
            raise UnknownGroup(f"there is no group {name}")

    def check_name(self, name: str, *, may_be_empty: bool = False) -> None:
        """Raise InvalidGroup for an invalid name. The group with the empty name only has offsets:
        old clients without a group commit to it."""
        self._lifecycle.check_open()
        if not name and may_be_empty:
            return
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidGroup("a group's name cannot be encoded as UTF-8") from None
        if not 1 <= size <= shared_limits.NAME_BYTES:
            raise InvalidGroup(
                f"a group's name takes 1 to {shared_limits.NAME_BYTES} bytes as UTF-8, not {size}"
            )


def _split_cursors(cursors: Sequence[Cursor]) -> Iterator[list[Cursor]]:
    """Divide cursors into parts that fit into one journal frame each. Overestimate the size of a
    cursor: 256 bytes for its fields, and six bytes for each byte of its name and metadata,
    because JSON may escape a byte as six."""
    part: list[Cursor] = []
    size = 0
    for cursor in cursors:
        part.append(cursor)
        size += 256 + 6 * (len(cursor.key.name.encode()) + len(cursor.metadata.encode()))
        if size > limits.COMMIT_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _topics_of_join(request: JoinRequest) -> frozenset[str] | None:
    """Return the topics that a member subscribes to; None if they are unknown."""
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    return subscribed_topics(metadata for _, metadata in request.protocols)
