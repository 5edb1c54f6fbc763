"""The coordinator of consumer groups: it answers waiting members, runs deadlines and stores groups.

`quackmq.groups` has the rules: one `Group` or `ConsumerGroup` per active group, by the protocol of
its members. This module delivers a group's answers to the waiting calls, turns its deadlines into
timers of the event loop, and stores its durable facts (see `groups.state`).

All members of a group use one protocol. A group without members may become either kind: the next
member to join decides. Epochs then continue from the last generation, and the other way round.

Promised: a generation, its members and their assignments are durable before any member learns of
them. After a restart generations therefore continue to grow, and fenced members stay fenced. If
they cannot be stored, waiting members get the error and may join again. After a restart the members
of a classic group are still members, and each has a full session timeout to send a heartbeat. A
leave is durable when it is answered: otherwise a restart would bring the member back, and the
others would wait for it. Members of the newer protocol report their own state after a restart, and
the group waits for them (see `former_members`). Heartbeats write nothing.

Not promised: a classic group's members are not stored if they are too large
(limits.KEPT_MEMBERS_BYTES and KEPT_MEMBERS_TOTAL_BYTES). After a restart they are unknown, and must
join again.

A group without members, deadlines and unfinished writes is in memory only as its stored state.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.group_entry import NOTHING_KEPT, GroupEntry, Waiter
from quackmq.broker.groups.member_codec import members_bytes
from quackmq.broker.groups.state import (
    STATE_PREFIX,
    GroupSettings,
    StoredGroup,
    decode_kept,
    encode_kept,
    name_of,
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
    def __init__(
        self,
        store: Store,
        topics: Catalog,
        now_ms: Callable[[], int],
        initial_delay_ms: int,
        lifecycle: Lifecycle,
    ) -> None:
        self._store = store
        self._topics = topics
        self._patterns = TopicPatterns(topics)
        self._now_ms = now_ms
        self._initial_delay_ms = initial_delay_ms
        self._known: dict[str, GroupEntry] = {}
        self._waits = Waits()
        self._lifecycle = lifecycle
        self._held_bytes = 0
        #: The stored size of the members of all groups.
        self._kept_members_bytes = 0

    async def load(self) -> None:
        """Load groups from the store. Raise DamagedStore."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            if state.value is not None:
                known = self._known[name_of(key)] = GroupEntry(name_of(key))
                known.kept = decode_kept(state.value)
                known.version = state.version
                known.former = _former(known.kept)
                if known.kept.members is not None:
                    self._count_kept_members(known, members_bytes(known.kept.members))
                    self._follow(known, self._group(known), [])

    def stop(self) -> None:
        """Stop the timers and end every wait with BrokerClosing."""
        for known in self._known.values():
            known.stop_timer()
        self._waits.end(closing_error())

    def close(self) -> None:
        """Stop the thread that matches patterns."""
        self._patterns.close()

    # --- lookup -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._known)

    def kept(self, name: str) -> StoredGroup | None:
        known = self._known.get(name)
        return None if known is None else known.kept

    def group(self, name: str) -> Group | ConsumerGroup | None:
        """Return the active group of this name, which has members or is about to; None if there is
        none."""
        known = self._known.get(name)
        return None if known is None else known.group

    def is_known(self, name: str) -> bool:
        return name in self._known

    def is_live(self, name: str) -> bool:
        """Return whether a group has members."""
        known = self._known.get(name)
        return known is not None and known.has_members()

    def keeps_offsets(self, name: str) -> bool:
        """Return whether a group committed the offsets under this name. If not, they are left over
        from a subscription that has ended."""
        return self.kept(name) is not None

    def holder(self, name: str) -> str | None:
        """Describe the members of a group in words; None if it has none."""
        if not self.is_live(name):
            return None
        members = self.description(name).members
        one = f"{members[0].client_id or members[0].member_id} at {members[0].client_host}"
        return one if len(members) == 1 else f"{one} and {len(members) - 1} more"

    def empty_since_ms(self, name: str) -> int | None:
        """Return the wall time since which the group has been empty, as stored. Return None if it
        has members, or had members when the broker was last stopped."""
        kept = self.kept(name)
        return None if kept is None or self.is_live(name) else kept.empty_since_ms

    def description(self, name: str) -> GroupDescription | ConsumerGroupDescription:
        """Describe a group; a name without stored state or members is an empty classic group."""
        group, kept = self.group(name), self.kept(name) or NOTHING_KEPT
        if isinstance(group, ConsumerGroup):
            return group.description()
        if group is None and kept.kind is GroupKind.CONSUMER:
            epochs = (kept.generation, kept.generation)
            return ConsumerGroupDescription(name, GroupState.EMPTY, *epochs, DEFAULT_ASSIGNOR, ())
        if group is not None:
            return group.description()
        return GroupDescription(name, GroupState.EMPTY, kept.protocol_type, "", ())

    # --- members ----------------------------------------------------------------------------

    async def join(self, name: str, join: JoinRequest) -> JoinResponse:
        """Add a member and wait until the rebalance ends. If the caller is cancelled, the member
        stays until its session times out. Raise LimitReached, OtherGroupProtocol and the errors of
        `Group.join`."""
        self._check_room(sum(len(metadata) for _, metadata in join.protocols))
        known = self._ensure(name)
        self._become(known, GroupKind.CLASSIC)
        group = self._classic(known)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._act(known, lambda now_ms: group.join(now_ms, join, waiter))
        return await self._wait(known, waiter, JoinResponse)

    async def sync(self, name: str, sync: SyncRequest) -> SyncResponse:
        """Wait for the leader's assignment and return it. Raise LimitReached and the errors of
        `Group.sync`."""
        self._check_room(sum(map(len, sync.assignments.values())))
        known = self._find(name)
        group = self._classic(known)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._act(known, lambda now_ms: group.sync(now_ms, sync, waiter))
        return await self._wait(known, waiter, SyncResponse)

    def heartbeat(self, name: str, member: MemberRef) -> None:
        known = self._find(name)
        group = self._classic(known)
        self._act(known, lambda now_ms: group.heartbeat(now_ms, member))

    def touch(self, name: str, member_id: str) -> None:
        """Restart a member's session timeout: a request of it has arrived, but the broker is too
        busy to process it yet."""
        group = self.group(name)
        if group is not None:
            group.touch(_loop_ms(), member_id)

    async def consumer_heartbeat(self, name: str, beat: Heartbeat) -> HeartbeatResponse:
        """Process a heartbeat of the newer protocol: it joins, leaves or keeps a member alive.
        Raise LimitReached and the errors of `ConsumerGroup.heartbeat`. Raise UnknownGroup if the
        member does not join and the group does not exist or is classic."""
        check_heartbeat(beat)
        if beat.epoch == JOIN_EPOCH:
            self._check_bytes(1 + sum(map(len, beat.topics or ())))
        matches = await self._matches(name, beat)
        # The group may have changed while the patterns were matched.
        if beat.epoch == JOIN_EPOCH:
            known = self._ensure(name)
            self._become(known, GroupKind.CONSUMER)
        else:
            known = self._find_consumer(name)
        group = self._consumer(known)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._act(known, lambda now_ms: group.heartbeat(now_ms, beat, waiter, matches))
        return await self._wait(known, waiter, HeartbeatResponse)

    async def _matches(self, name: str, beat: Heartbeat) -> Mapping[str, PatternMatches]:
        """Match the regular expressions that the group needs before it processes this heartbeat."""
        group = self.group(name)
        patterns = [beat.pattern] if beat.pattern else []
        if isinstance(group, ConsumerGroup):
            patterns = group.patterns_to_match(_loop_ms(), beat.pattern)
        return await self._waits.wait(self._patterns.match(patterns)) if patterns else {}

    async def leave(self, name: str, leaving: LeaveRequest) -> None:
        """Remove a member; wait until that is durable, or until storing it has failed."""
        known = self._find(name)
        group = self._group(known)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        left = WaiterResponse(waiter, LeaveResponse())
        self._act(known, lambda now_ms: [*group.leave(now_ms, leaving), left])
        await self._wait(known, waiter, LeaveResponse)

    def check_commit(self, name: str, member: MemberRef, *, is_transactional: bool = False) -> None:
        """Check that a member may commit now. An unknown group counts as a group without
        members."""
        known = self._known.get(name)
        if known is None and member.generation >= 0:
            raise IllegalGeneration(f"the group {name} is not known here: join it again")
        known = known or GroupEntry(name)
        group = self._group(known)
        self._act(
            known,
            lambda now_ms: group.check_commit(now_ms, member, is_transactional=is_transactional),
        )

    def check_fetch(self, name: str, member: MemberRef) -> None:
        """Check that a caller with this member id may fetch offsets now."""
        known = self._known.get(name)
        if known is not None:
            group = self._group(known)
            self._act(known, lambda now_ms: group.check_fetch(now_ms, member))

    # --- stored state -----------------------------------------------------------------------

    async def keep(self, name: str, settings: GroupSettings | None = None) -> None:
        """Store a group, with new settings or with its present ones, whether or not it has
        members."""
        known = self._ensure(name)
        if settings is not None or known.kept is None:
            try:
                await self._put(known, lambda: self._facts(known, settings))
            finally:
                self._follow_settings(known)
                self._tidy(known)

    async def note_empty(self, name: str) -> None:
        """Store the time since which a group has been empty, unless it is stored already."""
        known = self._known.get(name)
        if known is not None and known.kept is not None and not known.has_members():
            await self._put(known, lambda: self._facts(known))

    async def forget(self, name: str) -> None:
        """Delete the stored state of a group, unless it has members by then."""
        known = self._known.get(name)
        if known is None:
            return
        await self._put(known, lambda: self._facts(known) if known.has_members() else None)
        if not known.has_members():
            self._drop_group(known)
        self._tidy(known)

    async def _put(self, known: GroupEntry, make: Callable[[], StoredGroup | None]) -> None:
        """Store the result of `make`, which is called when this change holds the entry's lock."""
        known.changes += 1
        try:
            async with known.lock:
                group = known.group
                durable_changes = 0 if group is None else group.durable_changes
                kept = make()
                if kept != known.kept:
                    await self._write(known, kept)
                if known.group is group:
                    known.durable_changes = durable_changes
        finally:
            known.changes -= 1

    async def _write(self, known: GroupEntry, kept: StoredGroup | None) -> None:
        before = known.kept_members_bytes
        # Count the new size now, since other groups are written meanwhile.
        self._count_kept_members(known, 0 if kept is None else members_bytes(kept.members))
        try:
            value = None if kept is None else encode_kept(kept)
            state = await self._store.put_state(state_key(known.name), value, known.version)
        except BaseException:
            self._count_kept_members(known, before)
            raise
        known.kept, known.version = kept, state.version

    def _facts(self, known: GroupEntry, settings: GroupSettings | None = None) -> StoredGroup:
        """Return the state to store for a group as it is now."""
        kept, group = known.kept or NOTHING_KEPT, known.group
        if settings is not None:
            kept = kept._replace(settings=settings)
        if group is not None:
            kept = kept._replace(
                kind=group.kind,
                generation=group.generation,
                protocol_type=group.protocol_type,
                static_members=group.static_members,
                member_ids=group.member_ids,
                members=self._keepable(known, group.stored_members),
            )
        if known.has_members():
            return kept._replace(empty_since_ms=None)
        if kept.empty_since_ms is None:
            return kept._replace(empty_since_ms=self._now_ms())
        return kept

    def _keepable(
        self, known: GroupEntry, members: StoredMembership | None
    ) -> StoredMembership | None:
        """Return the members if there is room to keep them, else None."""
        size = members_bytes(members)
        total = self._kept_members_bytes - known.kept_members_bytes + size
        if size > limits.KEPT_MEMBERS_BYTES or total > limits.KEPT_MEMBERS_TOTAL_BYTES:
            return None
        return members

    def _count_kept_members(self, known: GroupEntry, size: int) -> None:
        self._kept_members_bytes += size - known.kept_members_bytes
        known.kept_members_bytes = size

    # --- one group --------------------------------------------------------------------------

    def _find(self, name: str) -> GroupEntry:
        known = self._known.get(name)
        if known is None:
            raise UnknownMember(f"the group {name} has no members: join it again")
        return known

    def _find_consumer(self, name: str) -> GroupEntry:
        known = self._known.get(name)
        if known is None or known.kind is not GroupKind.CONSUMER:
            raise UnknownGroup(f"there is no group {name} of Kafka's consumer group protocol")
        return known

    def _ensure(self, name: str) -> GroupEntry:
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= limits.GROUPS:
                raise LimitReached(f"there are {limits.GROUPS} groups: delete some")
            if name.startswith(PUBLISHER_PREFIX):
                self._check_room_for_publisher()
            known = self._known[name] = GroupEntry(name)
        return known

    def _act(self, known: GroupEntry, act: Callable[[int], list[WaiterResponse] | None]) -> None:
        """Call a group that exists, then deliver its answers and set its timer."""
        group = self._group(known)
        answers = None
        try:
            answers = act(_loop_ms())
        finally:
            self._follow(known, group, answers or [])

    def _group(self, known: GroupEntry) -> Group | ConsumerGroup:
        if known.group is None:
            self._make_group(known, known.kept or NOTHING_KEPT)
        assert known.group is not None
        return known.group

    def _classic(self, known: GroupEntry) -> Group:
        """Return the group for a call of the classic protocol. Raise UnknownMember if it is not
        classic."""
        self._check_kind(known, GroupKind.CLASSIC)
        group = self._group(known)
        assert isinstance(group, Group)
        return group

    def _consumer(self, known: GroupEntry) -> ConsumerGroup:
        self._check_kind(known, GroupKind.CONSUMER)
        group = self._group(known)
        assert isinstance(group, ConsumerGroup)
        return group

    def _check_kind(self, known: GroupEntry, kind: GroupKind) -> None:
        if known.kind is not kind:
            raise UnknownMember(f"group {known.name} goes by Kafka's {known.kind} group protocol")

    def _become(self, known: GroupEntry, kind: GroupKind) -> None:
        """Prepare for a member that joins by this protocol. Raise OtherGroupProtocol if the group
        has members of the other protocol."""
        if known.kind is kind:
            return
        group, kept = known.group, known.kept or NOTHING_KEPT
        if group is not None:
            if not group.is_empty:
                raise OtherGroupProtocol(
                    f"the members of group {known.name} speak Kafka's {group.kind} group protocol, "
                    f"not the {kind} one: stop them all before others join"
                )
            # The last generation may not be durable yet, and the next one must be greater.
            kept = kept._replace(
                generation=group.generation,
                protocol_type=group.protocol_type,
                static_members=group.static_members,
                members=None,
            )
            self._drop_group(known)
        self._make_group(known, kept._replace(kind=kind))

    def _make_group(self, known: GroupEntry, kept: StoredGroup) -> None:
        if kept.kind is GroupKind.CONSUMER:
            known.group = ConsumerGroup(
                known.name,
                _new_member_id,
                self._topics,
                generation=kept.generation,
                static_members=kept.static_members,
                former=known.former,
                timing=kept.settings.timing,
            )
        else:
            known.group = Group(
                known.name,
                _new_member_id,
                generation=kept.generation,
                protocol_type=kept.protocol_type,
                static_members=kept.static_members,
                stored_members=kept.members,
                now_ms=_loop_ms(),
                initial_delay_ms=self._initial_delay_ms,
            )
        known.durable_changes = known.group.durable_changes

    def _follow_settings(self, known: GroupEntry) -> None:
        if isinstance(known.group, ConsumerGroup) and known.kept is not None:
            known.group.timing = known.kept.settings.timing

    def _follow(
        self, known: GroupEntry, group: Group | ConsumerGroup, answers: list[WaiterResponse]
    ) -> None:
        """Give answers in their order, after the state that they report is durable."""
        self._held_bytes += group.memory_bytes - known.memory_bytes
        known.memory_bytes = group.memory_bytes
        known.outbox.extend(answers)
        self._schedule(known, group)
        if known.is_flushing:
            return  # the running flush sees these answers before it ends
        if not known.is_durable():
            known.is_flushing = True
            self._lifecycle.start(self._flush(known))
            return
        known.give_answers(None)
        self._tidy(known)

    async def _flush(self, known: GroupEntry) -> None:
        failure: QuackError | None = None
        while known.outbox or (failure is None and not known.is_durable()):
            waiting = len(known.outbox)
            try:
                await self._put(known, lambda: self._facts(known))
                failure = None
            except QuackError as error:
                failure = error
            except Exception as error:
                log.exception("the group %s cannot be kept", known.name)
                failure = StorageError(f"the group {known.name} cannot be kept: {error}")
            for member_id in known.give_answers(failure, waiting):
                # The member could not send a heartbeat while it waited for the disk: restart its
                # session.
                self.touch(known.name, member_id)
        known.is_flushing = False
        if known.group is not None:
            self._schedule(known, known.group)
        self._tidy(known)

    async def _wait(self, known: GroupEntry, waiter: Waiter, answer: type[_Outcome]) -> _Outcome:
        try:
            outcome = await self._waits.wait(waiter)
        finally:
            if waiter.cancelled() and known.group is not None:
                known.group.forget_waiter(waiter)
        if isinstance(outcome, QuackError):
            raise outcome
        assert isinstance(outcome, answer), f"{outcome} is no answer to that call"
        return outcome

    def _schedule(self, known: GroupEntry, group: Group | ConsumerGroup) -> None:
        deadline_ms = group.next_deadline_ms
        if deadline_ms is None or self._lifecycle.is_closing:
            known.stop_timer()
        # A timer that fires too early is only set again: heartbeats move deadlines all the time.
        elif known.timer is None or deadline_ms < known.timer_ms:
            known.stop_timer()
            known.timer_ms = deadline_ms
            when = (deadline_ms + 1) / 1000
            known.timer = loop_clock().call_at(when, self._tick, known)

    def _tick(self, known: GroupEntry) -> None:
        known.timer = None
        group = known.group
        # Members that wait for a write do not time out; the flush sets a new timer.
        if group is not None and not self._lifecycle.is_closing and not known.is_flushing:
            self._act(known, group.tick)

    def _tidy(self, known: GroupEntry) -> None:
        """Drop what is no longer needed in memory: an idle group, an entry without stored state."""
        if known.is_at_rest():
            self._drop_group(known)
        if known.group is None and known.kept is None and not known.changes:
            if self._known.get(known.name) is known:
                del self._known[known.name]

    def _drop_group(self, known: GroupEntry) -> None:
        known.stop_timer()
        known.group = None
        self._held_bytes -= known.memory_bytes
        known.memory_bytes = 0

    def _check_room(self, said_bytes: int) -> None:
        """Check the limits for one more waiting member that sends `said_bytes`. Raise
        LimitReached."""
        self._check_bytes(said_bytes)
        if len(self._waits) >= limits.GROUP_WAITERS:
            raise LimitReached(f"{limits.GROUP_WAITERS} members are waiting: ask again later")

    def _check_room_for_publisher(self) -> None:
        if len(self._known) < limits.PUBLISHERS:
            return  # most brokers never have to count
        if sum(name.startswith(PUBLISHER_PREFIX) for name in self._known) >= limits.PUBLISHERS:
            raise LimitReached(
                f"{limits.PUBLISHERS} publishers number their puts: delete the groups "
                f"{PUBLISHER_PREFIX}NAME of some that are gone"
            )

    def _check_bytes(self, said_bytes: int) -> None:
        if said_bytes and self._held_bytes + said_bytes > limits.GROUPS_BYTES:
            raise LimitReached(
                f"{said_bytes} bytes, where {self._held_bytes} are held for the members of all "
                f"groups already; {limits.GROUPS_BYTES} is the most"
            )


def _loop_ms() -> int:
    """Return the clock of sessions, in which pauses of the event loop do not count."""
    return loop_clock().ms()


def _former(kept: StoredGroup) -> FormerMembers | None:
    if not kept.member_ids:
        return None
    until_ms = _loop_ms() + kept.settings.session_timeout_ms
    return FormerMembers(kept.member_ids, kept.generation, until_ms)


def _new_member_id(client: str) -> str:
    return f"{client[: shared_limits.NAME_BYTES]}-{uuid.uuid4()}"
