"""A group on a stage: a clock to move, members by short names, answers by waiter.

Every answer is checked as it comes: its waiter was waiting, and had none before.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping
from itertools import count
from typing import Any

from quackmq.errors import MemberIdRequired, QuackError
from quackmq.groups import (
    Group,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberRef,
    SyncRequest,
    SyncResponse,
    WaiterResponse,
)

SESSION_MS = 10_000
REBALANCE_MS = 60_000
INITIAL_DELAY_MS = 3_000


def subscription(*topics: str, version: int = 1, user_data: bytes = b"") -> bytes:
    """What a consumer says when it joins."""
    names = b"".join(struct.pack(">h", len(name.encode())) + name.encode() for name in topics)
    tail = struct.pack(">i", len(user_data)) + user_data
    return struct.pack(">hi", version, len(topics)) + names + tail


RANGE = (("range", subscription("news")),)


def joining(member_id: str = "", **changes: Any) -> JoinRequest:
    join = JoinRequest(
        member_id=member_id,
        instance_id=None,
        client_id="client",
        client_host="127.0.0.1",
        protocol_type="consumer",
        protocols=RANGE,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=REBALANCE_MS,
        needs_id_first=False,
    )
    return join._replace(**changes)


class Stage:
    def __init__(self, **options: Any) -> None:
        self.now_ms = 1_000_000
        self.ids = count(1)
        self.waiters = count(1)
        self.waiting: set[Hashable] = set()
        self.told: dict[Hashable, JoinResponse | SyncResponse | QuackError] = {}
        options.setdefault("initial_delay_ms", INITIAL_DELAY_MS)
        self.group = Group("readers", self.new_id, **options)
        #: What the store has of the group.
        self.kept = self.lasting()
        self.kept_changes = self.group.durable_changes

    def new_id(self, name: str) -> str:
        return f"{name}-{next(self.ids)}"

    # --- requests ---

    def join(self, member_id: str = "", **changes: Any) -> int:
        """Its waiter."""
        waiter = next(self.waiters)
        self.waiting.add(waiter)
        self.hear(self.group.join(self.now_ms, joining(member_id, **changes), waiter))
        return waiter

    def sync(
        self,
        member_id: str,
        assignments: Mapping[str, bytes] | None = None,
        *,
        generation: int | None = None,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> int:
        waiter = next(self.waiters)
        self.waiting.add(waiter)
        ref = self.ref(member_id, generation, instance_id)
        sync = SyncRequest(ref, protocol_type, protocol, assignments or {})
        self.hear(self.group.sync(self.now_ms, sync, waiter))
        return waiter

    def heartbeat(
        self, member_id: str, generation: int | None = None, instance_id: str | None = None
    ) -> None:
        self.group.heartbeat(self.now_ms, self.ref(member_id, generation, instance_id))

    def commit(
        self, member_id: str, generation: int | None = None, instance_id: str | None = None
    ) -> None:
        self.group.check_commit(self.now_ms, self.ref(member_id, generation, instance_id))

    def leave(self, member_id: str, instance_id: str | None = None) -> None:
        self.hear(self.group.leave(self.now_ms, LeaveRequest(member_id, instance_id)))

    def forget(self, waiter: int) -> None:
        self.waiting.remove(waiter)
        self.group.forget_waiter(waiter)

    def ref(
        self, member_id: str, generation: int | None = None, instance_id: str | None = None
    ) -> MemberRef:
        present = self.group.generation if generation is None else generation
        return MemberRef(member_id, present, instance_id)

    # --- time ---

    def advance(self, by_ms: int) -> None:
        """Time passes, and the group is asked at each of its deadlines."""
        end_ms = self.now_ms + by_ms
        while (deadline_ms := self.group.next_deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            self.hear(self.group.tick(self.now_ms))
        self.now_ms = end_ms

    # --- what lasts ---

    def lasting(self) -> dict[str, Any]:
        group = self.group
        return {
            "generation": group.generation,
            "protocol_type": group.protocol_type,
            "static_members": group.static_members,
            "stored_members": group.stored_members,
        }

    def keep(self) -> None:
        """What a broker does before it gives answers."""
        if self.group.durable_changes != self.kept_changes:
            self.kept, self.kept_changes = self.lasting(), self.group.durable_changes

    def restart(self) -> None:
        """The group goes on from what was kept of it; nobody waits any more."""
        self.waiting.clear()
        self.group = Group(
            "readers",
            self.new_id,
            now_ms=self.now_ms,
            initial_delay_ms=INITIAL_DELAY_MS,
            **self.kept,
        )
        self.kept_changes = self.group.durable_changes

    # --- answers ---

    def hear(self, answers: list[WaiterResponse]) -> None:
        self.keep()
        for waiter, outcome in answers:
            assert waiter in self.waiting, f"{waiter} does not wait"
            self.waiting.remove(waiter)
            assert isinstance(outcome, JoinResponse | SyncResponse | QuackError), repr(outcome)
            self.told[waiter] = outcome

    def joined(self, waiter: int) -> JoinResponse:
        outcome = self.told[waiter]
        assert isinstance(outcome, JoinResponse), repr(outcome)
        return outcome

    def synced(self, waiter: int) -> SyncResponse:
        outcome = self.told[waiter]
        assert isinstance(outcome, SyncResponse), repr(outcome)
        return outcome

    def error(self, waiter: int) -> type[QuackError]:
        outcome = self.told[waiter]
        assert isinstance(outcome, QuackError), repr(outcome)
        return type(outcome)

    def reserved_id(self) -> str:
        """The id that a new member gets, which has to join again with it."""
        outcome = self.told[self.join(needs_id_first=True)]
        assert isinstance(outcome, MemberIdRequired)
        return outcome.member_id

    # --- scenes ---

    def gather(self, size: int, **changes: Any) -> list[str]:
        """So many join an empty group, until it has its generation; the leader first."""
        waiters = [self.join(**changes) for _ in range(size)]
        while any(waiter in self.waiting for waiter in waiters):
            self.advance(INITIAL_DELAY_MS)
        return [self.joined(waiter).member_id for waiter in waiters]

    def settle(self, *member_ids: str) -> None:
        """Everybody syncs, the leader (first) with an assignment: each is assigned its own name."""
        waiters = [
            self.sync(member_id, {each: each.encode() for each in member_ids})
            for member_id in reversed(member_ids)
        ]
        for waiter, member_id in zip(waiters, reversed(member_ids), strict=True):
            assert self.synced(waiter).assignment == member_id.encode()

    def stable(self, size: int, **changes: Any) -> list[str]:
        member_ids = self.gather(size, **changes)
        self.settle(*member_ids)
        return member_ids
