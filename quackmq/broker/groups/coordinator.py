"""The coordinator of consumer groups: it sends responses to members, runs deadlines, stores groups.

`quackmq.groups` has the rules: one `Group` or `ConsumerGroup` per active group, by the protocol of
its members. This module delivers a group's responses to the waiting calls, turns its deadlines into
timers of the event loop, and stores the group (see `groups.state`).

All members of a group use one protocol. A group without members may become either kind: the next
member to join decides. Epochs then continue from the last generation, and the other way round.

Promised: a generation, its members and their assignments are durable before any member learns of
them. After a restart generations therefore continue to grow, and fenced members stay fenced. If
they cannot be stored, waiting members get the error and may join again. After a restart the members
of a classic group are still members, and each has a full session timeout to send a heartbeat. A
leave is durable before its response: otherwise a restart would bring the member back, and the
others would wait for it. Members of the newer protocol report their own state after a restart, and
the group waits for them (see `former_members`). Heartbeats write nothing.

Not promised: the members of a classic group are not stored if they exceed
limits.STORED_MEMBERS_BYTES or STORED_MEMBERS_TOTAL_BYTES. After a restart they must join again.

A group without members, deadlines and unfinished writes is in memory only as its stored state.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from quackmq.broker import limits
from quackmq.broker.groups.group_entry import UNSTORED_GROUP, GroupEntry, Waiter
from quackmq.broker.groups.group_factory import GroupFactory
from quackmq.broker.groups.member_codec import members_bytes
from quackmq.broker.groups.state import (
    STATE_PREFIX,
    GroupSettings,
    StoredGroup,
    decode_group,
    encode_group,
    group_name_in,
    state_key,
)
from quackmq.broker.groups.topic_patterns import TopicPatterns
from quackmq.broker.lifecycle import Lifecycle, Waits, closing_error
from quackmq.errors import (
    IllegalGeneration,
    LimitReached,
    OtherGroupProtocol,
    QuackError,
    StorageError,
    UnknownGroup,
    UnknownMember,
)
from quackmq.groups import (
    ConsumerGroup,
    ConsumerGroupDescription,
    FormerMembers,
    Group,
    GroupDescription,
    GroupKind,
    GroupState,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    MemberRef,
    PatternMatches,
    StoredMembership,
    SyncRequest,
    SyncResponse,
    WaiterResponse,
)
from quackmq.groups.consumer.assignors import DEFAULT_ASSIGNOR
from quackmq.groups.consumer.messages import JOIN_EPOCH, Catalog, check_heartbeat
from quackmq.loop_clock import loop_clock
from quackmq.model.offset_notes import PUBLISHER_PREFIX
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

_Outcome = TypeVar("_Outcome", JoinResponse, SyncResponse, LeaveResponse, HeartbeatResponse)


class Coordinator:
    """All groups of the broker, by name."""

    def __init__(
        self,
        store: Store,
        topics: Catalog,
        now_ms: Callable[[], int],
        initial_delay_ms: int,
        lifecycle: Lifecycle,
    ) -> None:
        self._store = store
        self._factory = GroupFactory(topics, initial_delay_ms)
        self._patterns = TopicPatterns(topics)
        self._now_ms = now_ms
        self._entries: dict[str, GroupEntry] = {}
        self._waits = Waits()
        self._lifecycle = lifecycle
        self._memory_bytes = 0
        #: The stored size of the members of all groups.
        self._stored_members_bytes = 0

    async def load(self) -> None:
        """Load groups from the store. Raise DamagedStore."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            if state.value is not None:
                name = group_name_in(key)
                entry = self._entries[name] = GroupEntry(name)
                entry.stored = decode_group(state.value)
                entry.version = state.version
                entry.former_members = _former_members_of(entry.stored)
                if entry.stored.members is not None:
                    self._count_stored_members(entry, members_bytes(entry.stored.members))
                    self._deliver(entry, self._activate_group(entry), [])  # this sets the timer

    def stop(self) -> None:
        """Stop the timers and end every wait with BrokerClosing."""
        for entry in self._entries.values():
            entry.stop_timer()
        self._waits.end(closing_error())

    def close(self) -> None:
        """Stop the thread that matches patterns."""
        self._patterns.close()

    # --- lookup -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._entries)

    def stored(self, name: str) -> StoredGroup | None:
        """Return the stored state of a group; None if the store has none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.stored

    def group(self, name: str) -> Group | ConsumerGroup | None:
        """Return the active group of this name, which has members or is about to; None if there is
        none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.group

    def has_entry(self, name: str) -> bool:
        return name in self._entries

    def is_live(self, name: str) -> bool:
        """Return whether a group has members."""
        entry = self._entries.get(name)
        return entry is not None and entry.has_members()

    def is_stored(self, name: str) -> bool:
        """Return whether the store has state of this group. Offsets under a name without state do
        not belong to a group: a subscription that has ended left them."""
        return self.stored(name) is not None

    def describe_members(self, name: str) -> str | None:
        """Describe the members of a group in words, for error messages; None if it has none."""
        if not self.is_live(name):
            return None
        members = self.description(name).members
        first = f"{members[0].client_id or members[0].member_id} at {members[0].client_host}"
        return first if len(members) == 1 else f"{first} and {len(members) - 1} more"

    def empty_since_ms(self, name: str) -> int | None:
        """Return the wall time since which the group has been empty, as stored. Return None if it
        has members, or had members when the broker was last stopped."""
        stored = self.stored(name)
        return None if stored is None or self.is_live(name) else stored.empty_since_ms

    def description(self, name: str) -> GroupDescription | ConsumerGroupDescription:
        """Describe a group; a name without stored state or members is an empty classic group."""
        group, stored = self.group(name), self.stored(name) or UNSTORED_GROUP
        if isinstance(group, ConsumerGroup):
            return group.description()
        if group is None and stored.kind is GroupKind.CONSUMER:
            # The group epoch and the assignment epoch are the same: no member is being assigned.
            epochs = (stored.generation, stored.generation)
            return ConsumerGroupDescription(name, GroupState.EMPTY, *epochs, DEFAULT_ASSIGNOR, ())
        if group is not None:
            return group.description()
        return GroupDescription(name, GroupState.EMPTY, stored.protocol_type, "", ())

    # --- members ----------------------------------------------------------------------------

    async def join(self, name: str, request: JoinRequest) -> JoinResponse:
        """Add a member and wait until the rebalance ends. If the caller is cancelled, the member
        stays until its session times out. Raise LimitReached, OtherGroupProtocol and the errors of
        `Group.join`."""
        self._check_new_waiter(sum(len(metadata) for _, metadata in request.protocols))
        entry = self._find_or_add(name)
        self._switch_kind(entry, GroupKind.CLASSIC)
        group = self._activate_classic(entry)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._call_group(entry, lambda now_ms: group.join(now_ms, request, waiter))
        return await self._wait(entry, waiter, JoinResponse)

    async def sync(self, name: str, request: SyncRequest) -> SyncResponse:
        """Wait for the leader's assignment and return it. Raise LimitReached and the errors of
        `Group.sync`."""
        self._check_new_waiter(sum(map(len, request.assignments.values())))
        entry = self._find(name)
        group = self._activate_classic(entry)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._call_group(entry, lambda now_ms: group.sync(now_ms, request, waiter))
        return await self._wait(entry, waiter, SyncResponse)

    def heartbeat(self, name: str, member: MemberRef) -> None:
        """Restart the session of a classic member. Raise the errors of `Group.heartbeat`."""
        entry = self._find(name)
        group = self._activate_classic(entry)
        self._call_group(entry, lambda now_ms: group.heartbeat(now_ms, member))

    def touch(self, name: str, member_id: str) -> None:
        """Restart a member's session timeout: a request of it has arrived, but the broker is too
        busy to process it yet."""
        group = self.group(name)
        if group is not None:
            group.touch(_loop_ms(), member_id)

    async def consumer_heartbeat(self, name: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        """Process a heartbeat of the newer protocol: it joins, leaves or keeps a member alive.
        Raise LimitReached and the errors of `ConsumerGroup.heartbeat`. Raise UnknownGroup if the
        member does not join and the group does not exist or is classic."""
        check_heartbeat(heartbeat)
        if heartbeat.epoch == JOIN_EPOCH:
            self._check_bytes(1 + sum(map(len, heartbeat.topics or ())))
        matches = await self._match_patterns(name, heartbeat)
        # The group may have changed while the patterns were matched.
        if heartbeat.epoch == JOIN_EPOCH:
            entry = self._find_or_add(name)
            self._switch_kind(entry, GroupKind.CONSUMER)
        else:
            entry = self._find_consumer(name)
        group = self._consumer(entry)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._call_group(entry, lambda now_ms: group.heartbeat(now_ms, heartbeat, waiter, matches))
        return await self._wait(entry, waiter, HeartbeatResponse)

    async def _match_patterns(
        self, name: str, heartbeat: Heartbeat
    ) -> Mapping[str, PatternMatches]:
        """Match the regular expressions that the group needs before it processes this heartbeat."""
        group = self.group(name)
        if isinstance(group, ConsumerGroup):
            patterns = group.patterns_to_match(_loop_ms(), heartbeat.pattern)
        else:
            # No ConsumerGroup is active. If this heartbeat creates one, it has only this member.
            patterns = [heartbeat.pattern] if heartbeat.pattern else []
        return await self._waits.wait(self._patterns.match(patterns)) if patterns else {}

    async def leave(self, name: str, request: LeaveRequest) -> None:
        """Remove a member; wait until that is durable, or until storing it has failed."""
        entry = self._find(name)
        group = self._activate_group(entry)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        response = WaiterResponse(waiter, LeaveResponse())
        self._call_group(entry, lambda now_ms: [*group.leave(now_ms, request), response])
        await self._wait(entry, waiter, LeaveResponse)

    def check_commit(self, name: str, member: MemberRef, *, is_transactional: bool = False) -> None:
        """Check that a member may commit now. An unknown group counts as a group without
        members."""
        entry = self._entries.get(name)
        if entry is None and member.generation >= 0:
            raise IllegalGeneration(f"the group {name} does not exist: join it again")
        entry = entry or GroupEntry(name)
        group = self._activate_group(entry)
        self._call_group(
            entry,
            lambda now_ms: group.check_commit(now_ms, member, is_transactional=is_transactional),
        )

    def check_fetch(self, name: str, member: MemberRef) -> None:
        """Check that a caller with this member id may fetch offsets now."""
        entry = self._entries.get(name)
        if entry is not None:
            group = self._activate_group(entry)
            self._call_group(entry, lambda now_ms: group.check_fetch(now_ms, member))

    # --- stored state -----------------------------------------------------------------------

    async def store_group(self, name: str, settings: GroupSettings | None = None) -> None:
        """Store a group, with new settings or with its present ones, whether or not it has
        members."""
        entry = self._find_or_add(name)
        if settings is not None or entry.stored is None:
            try:
                await self._update_stored(entry, lambda: self._state_to_store(entry, settings))
            finally:
                self._apply_settings(entry)
                self._drop_if_unused(entry)

    async def store_empty_since(self, name: str) -> None:
        """Store the time since which a group has been empty, unless it is stored already."""
        entry = self._entries.get(name)
        if entry is not None and entry.stored is not None and not entry.has_members():
            await self._update_stored(entry, lambda: self._state_to_store(entry))

    async def delete_stored(self, name: str) -> None:
        """Delete the stored state of a group, unless it has members by then."""
        entry = self._entries.get(name)
        if entry is None:
            return
        await self._update_stored(
            entry, lambda: self._state_to_store(entry) if entry.has_members() else None
        )
        if not entry.has_members():
            self._drop_group(entry)
        self._drop_if_unused(entry)

    async def _update_stored(
        self, entry: GroupEntry, make_state: Callable[[], StoredGroup | None]
    ) -> None:
        """Store the result of `make_state`, which is called with the entry's lock held."""
        entry.running_updates += 1
        try:
            async with entry.lock:
                group = entry.group
                durable_changes = 0 if group is None else group.durable_changes
                stored = make_state()
                if stored != entry.stored:
                    await self._write_stored(entry, stored)
                if entry.group is group:
                    entry.stored_changes = durable_changes
        finally:
            entry.running_updates -= 1

    async def _write_stored(self, entry: GroupEntry, stored: StoredGroup | None) -> None:
        """Write the state of a group, or delete it. Count its members before, and restore the count
        if writing fails."""
        previous_bytes = entry.stored_members_bytes
        # Count the new size now, since other groups are written meanwhile.
        self._count_stored_members(entry, 0 if stored is None else members_bytes(stored.members))
        try:
            value = None if stored is None else encode_group(stored)
            state = await self._store.put_state(state_key(entry.name), value, entry.version)
        except BaseException:
            self._count_stored_members(entry, previous_bytes)
            raise
        entry.stored, entry.version = stored, state.version

    def _state_to_store(
        self, entry: GroupEntry, settings: GroupSettings | None = None
    ) -> StoredGroup:
        """Return the state that the store should have for a group now."""
        stored, group = entry.stored or UNSTORED_GROUP, entry.group
        if settings is not None:
            stored = stored._replace(settings=settings)
        if group is not None:
            stored = stored._replace(
                kind=group.kind,
                generation=group.generation,
                protocol_type=group.protocol_type,
                static_members=group.static_members,
                member_ids=group.member_ids,
                members=self._storable_members(entry, group.stored_members),
            )
        if entry.has_members():
            return stored._replace(empty_since_ms=None)
        if stored.empty_since_ms is None:
            return stored._replace(empty_since_ms=self._now_ms())
        return stored

    def _storable_members(
        self, entry: GroupEntry, members: StoredMembership | None
    ) -> StoredMembership | None:
        """Return the members if they are within the limits of stored members, else None."""
        size = members_bytes(members)
        total = self._stored_members_bytes - entry.stored_members_bytes + size
        if size > limits.STORED_MEMBERS_BYTES or total > limits.STORED_MEMBERS_TOTAL_BYTES:
            return None
        return members

    def _count_stored_members(self, entry: GroupEntry, size: int) -> None:
        self._stored_members_bytes += size - entry.stored_members_bytes
        entry.stored_members_bytes = size

    # --- one group --------------------------------------------------------------------------

    def _find(self, name: str) -> GroupEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownMember(f"the group {name} has no members: join it again")
        return entry

    def _find_consumer(self, name: str) -> GroupEntry:
        entry = self._entries.get(name)
        if entry is None or entry.kind is not GroupKind.CONSUMER:
            raise UnknownGroup(f"there is no group {name} of Kafka's consumer group protocol")
        return entry

    def _find_or_add(self, name: str) -> GroupEntry:
        """Return the entry of a group; add an empty one if there is none. Raise LimitReached."""
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) >= limits.GROUPS:
                raise LimitReached(f"there are {limits.GROUPS} groups: delete some")
            if name.startswith(PUBLISHER_PREFIX):
                self._check_room_for_publisher()
            entry = self._entries[name] = GroupEntry(name)
        return entry

    def _call_group(
        self, entry: GroupEntry, call: Callable[[int], list[WaiterResponse] | None]
    ) -> None:
        """Run `call`, which calls the entry's group, with the time. Then deliver the responses and
        set the timer, even if the call raises."""
        group = self._activate_group(entry)
        responses = None
        try:
            responses = call(_loop_ms())
        finally:
            self._deliver(entry, group, responses or [])

    def _activate_group(self, entry: GroupEntry) -> Group | ConsumerGroup:
        """Return the active group of an entry; make it from the stored state if there is none."""
        if entry.group is None:
            self._make_group(entry, entry.stored or UNSTORED_GROUP)
        assert entry.group is not None
        return entry.group

    def _activate_classic(self, entry: GroupEntry) -> Group:
        """Return the group for a call of the classic protocol. Raise UnknownMember if it is not
        classic."""
        self._check_kind(entry, GroupKind.CLASSIC)
        group = self._activate_group(entry)
        assert isinstance(group, Group)
        return group

    def _consumer(self, entry: GroupEntry) -> ConsumerGroup:
        self._check_kind(entry, GroupKind.CONSUMER)
        group = self._activate_group(entry)
        assert isinstance(group, ConsumerGroup)
        return group

    def _check_kind(self, entry: GroupEntry, kind: GroupKind) -> None:
        if entry.kind is not kind:
            raise UnknownMember(f"group {entry.name} uses Kafka's {entry.kind} group protocol")

    def _switch_kind(self, entry: GroupEntry, kind: GroupKind) -> None:
        """Prepare for a member that joins by this protocol. Raise OtherGroupProtocol if the group
        has members of the other protocol."""
        if entry.kind is kind:
            return
        group, stored = entry.group, entry.stored or UNSTORED_GROUP
        if group is not None:
            if not group.is_empty:
                raise OtherGroupProtocol(
                    f"the members of group {entry.name} use Kafka's {group.kind} group protocol, "
                    f"not the {kind} one: stop them all before others join"
                )
            # The last generation may not be durable yet, and the next one must be greater.
            stored = stored._replace(
                generation=group.generation,
                protocol_type=group.protocol_type,
                static_members=group.static_members,
                members=None,
            )
            self._drop_group(entry)
        self._make_group(entry, stored._replace(kind=kind))

    def _make_group(self, entry: GroupEntry, stored: StoredGroup) -> None:
        entry.group = self._factory.make(entry.name, stored, entry.former_members, _loop_ms())
        entry.stored_changes = entry.group.durable_changes

    def _apply_settings(self, entry: GroupEntry) -> None:
        if isinstance(entry.group, ConsumerGroup) and entry.stored is not None:
            entry.group.timing = entry.stored.settings.timing

    def _deliver(
        self, entry: GroupEntry, group: Group | ConsumerGroup, responses: list[WaiterResponse]
    ) -> None:
        """Send responses in their order, after the state that they report is durable. Set the
        group's timer."""
        self._memory_bytes += group.memory_bytes - entry.memory_bytes
        entry.memory_bytes = group.memory_bytes
        entry.pending_responses.extend(responses)
        self._schedule(entry, group)
        if entry.is_flushing:
            return  # the running flush sees these responses before it ends
        if not entry.is_durable():
            entry.is_flushing = True
            self._lifecycle.start(self._flush(entry))
            return
        entry.send_responses(None)
        self._drop_if_unused(entry)

    async def _flush(self, entry: GroupEntry) -> None:
        """Store the group until nothing is left to store; after each write, send the responses that
        waited for it."""
        failure: QuackError | None = None
        while entry.pending_responses or (failure is None and not entry.is_durable()):
            count = len(entry.pending_responses)
            try:
                await self._update_stored(entry, lambda: self._state_to_store(entry))
                failure = None
            except QuackError as error:
                failure = error
            except Exception as error:
                log.exception("the group %s cannot be stored", entry.name)
                failure = StorageError(f"the group {entry.name} cannot be stored: {error}")
            for member_id in entry.send_responses(failure, count):
                # The member could not send a heartbeat while it waited for the disk: restart its
                # session.
                self.touch(entry.name, member_id)
        entry.is_flushing = False
        if entry.group is not None:
            self._schedule(entry, entry.group)
        self._drop_if_unused(entry)

    async def _wait(self, entry: GroupEntry, waiter: Waiter, expected: type[_Outcome]) -> _Outcome:
        """Wait for the response to a call and return it; raise it if it is an error."""
        try:
            outcome = await self._waits.wait(waiter)
        finally:
            if waiter.cancelled() and entry.group is not None:
                entry.group.forget_waiter(waiter)
        if isinstance(outcome, QuackError):
            raise outcome
        assert isinstance(outcome, expected), f"{outcome} is no response to that call"
        return outcome

    def _schedule(self, entry: GroupEntry, group: Group | ConsumerGroup) -> None:
        """Set the timer to the group's next deadline. A later deadline leaves the timer alone,
        because every heartbeat moves the deadline; `_tick` sets a timer that fires early again."""
        deadline_ms = group.next_deadline_ms
        if deadline_ms is None or self._lifecycle.is_closing:
            entry.stop_timer()
        elif entry.timer is None or deadline_ms < entry.timer_ms:
            entry.stop_timer()
            entry.timer_ms = deadline_ms
            when = (deadline_ms + 1) / 1000  # just after it, so that it has certainly passed
            entry.timer = loop_clock().call_at(when, self._tick, entry)

    def _tick(self, entry: GroupEntry) -> None:
        """Let the group end the sessions and waits that have timed out."""
        entry.timer = None
        group = entry.group
        # Members that wait for a write do not time out; the flush sets a new timer.
        if group is not None and not self._lifecycle.is_closing and not entry.is_flushing:
            self._call_group(entry, group.tick)

    def _drop_if_unused(self, entry: GroupEntry) -> None:
        """Drop an idle group, and an entry without group and stored state, from memory."""
        if entry.is_idle():
            self._drop_group(entry)
        if entry.group is None and entry.stored is None and not entry.running_updates:
            if self._entries.get(entry.name) is entry:
                del self._entries[entry.name]

    def _drop_group(self, entry: GroupEntry) -> None:
        entry.stop_timer()
        entry.group = None
        self._memory_bytes -= entry.memory_bytes
        entry.memory_bytes = 0

    def _check_new_waiter(self, request_bytes: int) -> None:
        """Check the limits for one more waiting member that sends `request_bytes`. Raise
        LimitReached."""
        self._check_bytes(request_bytes)
        if len(self._waits) >= limits.GROUP_WAITERS:
            raise LimitReached(f"{limits.GROUP_WAITERS} members are waiting: ask again later")

    def _check_room_for_publisher(self) -> None:
        """Raise LimitReached if there are too many groups of publishers."""
        if len(self._entries) < limits.PUBLISHERS:
            return  # most brokers never have to count
        if sum(name.startswith(PUBLISHER_PREFIX) for name in self._entries) >= limits.PUBLISHERS:
            raise LimitReached(
                f"{limits.PUBLISHERS} publishers number their puts: delete the groups "
                f"{PUBLISHER_PREFIX}NAME of publishers that no longer exist"
            )

    def _check_bytes(self, request_bytes: int) -> None:
        """Raise LimitReached if the members of all groups would take too much memory."""
        if request_bytes and self._memory_bytes + request_bytes > limits.GROUPS_BYTES:
            raise LimitReached(
                f"the members of all groups take {self._memory_bytes} bytes; {request_bytes} more "
                f"would exceed the limit of {limits.GROUPS_BYTES}"
            )


def _loop_ms() -> int:
    """Return the clock of sessions, in which pauses of the event loop do not count."""
    return loop_clock().ms()


def _former_members_of(stored: StoredGroup) -> FormerMembers | None:
    if not stored.member_ids:
        return None
    until_ms = _loop_ms() + stored.settings.session_timeout_ms
    return FormerMembers(stored.member_ids, stored.generation, until_ms)
