"""A consumer group that comes and goes, is replaced while it commits, and spoken for by its dead.

One static member at a time has the right to commit. Its past ones, of this life and of those
before, try to commit as well, and must never succeed. The member itself outlives the broker: after
a crash it is a member as it was, with its assignment, until another process takes its place. What
it committed stands where every cursor of the model stands, so that after a crash the checker asks
for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from quackmq.broker import Commit, JoinRequest, LeaveRequest, MemberRef, SyncRequest
from quackmq.errors import (
    IllegalGeneration,
    MemberFenced,
    QuackError,
    RebalanceInProgress,
    UnknownMember,
    UnknownTopic,
)
from quackmq.model.topic import CursorKey, PartitionKey
from tests.simulation.life import CALLER, Life
from tests.simulation.model import UNKNOWN_OUTCOMES, Register, Violation, leader_epoch_of

#: What somebody hears whose place another has.
_FENCED: Final = (IllegalGeneration, MemberFenced, RebalanceInProgress, UnknownMember)
#: Longer than any life.
_SESSION_MS: Final = 30 * 60_000

_Committed = tuple[int | None, str]


class Consumer:
    def __init__(self, name: str) -> None:
        self.name = name
        self._life: Life | None = None
        self._member: MemberRef | None = None
        #: Whether the last member is known to have left, so that the next generation is a new one.
        self._has_left = True
        #: Everybody who had the right once.
        self._past: list[MemberRef] = []
        #: The greatest generation that anybody was told of.
        self._told = 0

    async def step(self, life: Life) -> None:
        if self._life is not life:
            self._life = life
            if life.model.lossy:  # an older member may be the present one again
                self._member, self._has_left = None, False
                self._past.clear()
            elif self._member is not None:
                await self._go_on(life, self._member)
            await self._look(life)
        fate = life.source.random()
        if self._member is None:
            await self._enter(life)
        elif fate < 0.45:
            await self._commit(life, self._member)
        elif fate < 0.6:
            await self._commit_wrongly(life)
        elif fate < 0.75:
            await self._commit_while_replaced(life, self._member)
        elif fate < 0.85:
            await self._leave(life, self._member)
        elif fate < 0.88:
            await self._leave(life, self._member)
            await self._delete(life)
        else:
            await self._look(life)

    # --- coming and going -------------------------------------------------------------------

    async def _go_on(self, life: Life, member: MemberRef) -> None:
        """The broker was away, and the member goes on without joining."""
        life.broker.groups.heartbeat(CALLER, self.name, member)
        # It may have been cut short before it had said what it assigns.
        await self._sync(life, member, {member.member_id: self.name.encode()})
        life.counts["members that went on after a crash"] += 1

    async def _enter(self, life: Life) -> None:
        """Join as a new process does. Its predecessor is replaced, if it is still there."""
        before, self._member = self._member, None  # a failure tells nothing of either
        least = self._told + 1 if self._has_left else self._told
        self._has_left = False
        join = JoinRequest(
            member_id="",
            instance_id=self.name,
            client_id=self.name,
            client_host="",
            protocol_type="consumer",
            protocols=(("range", b""),),
            session_timeout_ms=_SESSION_MS,
            rebalance_timeout_ms=_SESSION_MS,
            may_skip_assignment=life.source.random() < 0.5,
        )
        joined = await life.broker.groups.join(CALLER, self.name, join)
        if joined.generation < least and not life.model.lossy:
            raise Violation(f"{self.name} is told of {joined.generation} after {self._told}")
        self._told = joined.generation
        if before is not None:
            self._past.append(before)
        self._member = MemberRef(joined.member_id, joined.generation, self.name)
        leads = joined.leader == joined.member_id and not joined.skip_assignment
        shares = {joined.member_id: self.name.encode()} if leads else {}
        await self._sync(life, self._member, shares)
        life.broker.groups.heartbeat(CALLER, self.name, self._member)

    async def _sync(self, life: Life, member: MemberRef, shares: dict[str, bytes]) -> None:
        try:
            sync = SyncRequest(member, None, None, shares)
            synced = await life.broker.groups.sync(CALLER, self.name, sync)
        except QuackError:
            self._member = None  # it has to join again
            raise
        if synced.assignment != self.name.encode():
            raise Violation(f"{self.name} is assigned {synced.assignment!r}")

    async def _leave(self, life: Life, member: MemberRef) -> None:
        leaving = [LeaveRequest(member.member_id, self.name)]
        self._member = None  # after a crash it may be there, or not
        if await life.broker.groups.leave(CALLER, self.name, leaving) != [None]:
            raise Violation(f"{member} of {self.name} cannot leave")
        if not life.model.read_only:
            self._past.append(member)
            self._has_left = True

    async def _delete(self, life: Life) -> None:
        """The group goes with all that it committed; its generations begin anew."""
        self._told = 0
        registers = {
            key: register for key, register in self._registers(life).items() if not register.maybe
        }
        await self._change(life, dict.fromkeys(registers, (None, "")), self._delete_now(life))

    async def _delete_now(self, life: Life) -> list[QuackError | None]:
        await life.broker.groups.delete(CALLER, self.name)
        return []

    # --- committing -------------------------------------------------------------------------

    async def _commit(self, life: Life, member: MemberRef) -> dict[PartitionKey, _Committed]:
        """Somewhere, by somebody; what it was."""
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        values: dict[PartitionKey, _Committed] = {
            key: (
                life.source.randint(0, life.model.partition(key).next + 1),
                f"m{life.model.tick()}",
            )
            for key in keys
            if not self._register(life, key).maybe  # unsure since a failure in this life
        }
        commits = [
            Commit(key, offset or 0, noted, leader_epoch_of(noted))
            for key, (offset, noted) in values.items()
        ]
        committing = life.broker.groups.commit(CALLER, self.name, member, commits)
        await self._change(life, values, committing)
        life.counts["offsets committed by groups"] += len(values)
        return values

    async def _commit_wrongly(self, life: Life) -> None:
        """Past members, the last one most of all, and one who is none."""
        stranger = MemberRef("stranger", self._told, None)
        member = life.source.choice([stranger, *self._past, *self._past[-1:] * 3])
        key = life.some_partition()
        if key is None:
            return
        commit = Commit(key, 0, f"never{life.model.tick()}")
        try:
            outcomes = await life.broker.groups.commit(CALLER, self.name, member, [commit])
        except _FENCED:
            life.counts["commits of fenced members refused"] += 1
            return
        if outcomes == [None]:
            raise Violation(f"{member} of {self.name}, who has no right to, committed")

    async def _commit_while_replaced(self, life: Life, member: MemberRef) -> None:
        """A commit that is taken is seen by whoever comes after; one that is not, never."""
        committing = asyncio.create_task(self._commit(life, member))
        await asyncio.sleep(life.source.choice((0, 0, 0.002)))
        try:
            await self._enter(life)
            found = await self._committed(life)
        finally:
            outcome = (await asyncio.gather(committing, return_exceptions=True))[0]
        if isinstance(outcome, _FENCED):
            life.counts["commits of fenced members refused"] += 1
            return
        if isinstance(outcome, BaseException):
            raise outcome
        for key, value in outcome.items():
            known = self._register(life, key).known
            if value == known and found.get(key) != value and key.topic_id not in life.model.doomed:
                raise Violation(f"{self.name} sees {found.get(key)} at {key} after {value}")
        life.counts["members replaced while they committed"] += 1

    async def _change(
        self,
        life: Life,
        values: dict[PartitionKey, _Committed],
        change: Awaitable[list[QuackError | None]],
    ) -> None:
        """Around a call that sets these values, each for itself."""
        definite = life.model.read_only
        registers = {key: self._register(life, key) for key in values}
        for key, register in registers.items():
            register.maybe.append(values[key])
        try:
            outcomes = await change
        except QuackError as error:
            if definite or not isinstance(error, UNKNOWN_OUTCOMES):
                for key, register in registers.items():
                    register.maybe.remove(values[key])
            raise
        for (key, register), outcome in zip(
            registers.items(), outcomes or [None] * len(registers), strict=True
        ):
            if outcome is None:
                register.settle(values[key])
                continue
            register.maybe.remove(values[key])
            if not isinstance(outcome, UnknownTopic):
                raise Violation(f"{self.name} cannot commit at {key}: {outcome}") from outcome
            life.excuse(key, outcome)

    # --- looking ----------------------------------------------------------------------------

    async def _look(self, life: Life) -> None:
        found = await self._committed(life)
        for key, register in self._registers(life).items():
            allowed = [register.known, *register.maybe]
            value = found.pop(key, (None, ""))
            if key.topic_id not in life.model.doomed and value not in allowed:
                raise Violation(f"{register.name} is {value}, but should be one of {allowed}")
        if found:
            raise Violation(f"nobody committed {found} for {self.name}")

    async def _committed(self, life: Life) -> dict[PartitionKey, _Committed]:
        found = await life.broker.groups.committed(CALLER, self.name)
        return {key: (cursor.offset, cursor.metadata) for key, cursor in found.items()}

    def _register(self, life: Life, key: PartitionKey) -> Register[_Committed]:
        cursor_key = CursorKey(self.name, *key)
        return life.model.cursors.setdefault(
            cursor_key, Register(f"cursor {cursor_key}", (None, ""))
        )

    def _registers(self, life: Life) -> dict[PartitionKey, Register[_Committed]]:
        return {
            PartitionKey(key.topic_id, key.partition): register
            for key, register in life.model.cursors.items()
            if key.name == self.name
        }
