"""Which member id each instance id of a group stands for. Pure bookkeeping.

A static member is known by its instance id, and every request with that instance id and another
member id is fenced. After a restart the members are taken up again (`restore`). Where they were too
many to be kept they are unknown, yet their ids are remembered here for as long as a session may
last, so that fenced members stay fenced.

An unknown static member that joins anew gets a new id. What its client sends meanwhile bears no
member id, and after a restart perhaps the old one (`is_between_ids`). It is told to try again:
librdkafka ends a fenced client with a fatal error, though no other instance is there. A client that
is told that it is unknown would join once more, and so fence the join that is under way. Nobody
whose place another one has taken is without an id, so fencing loses nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from quackmq import limits as shared_limits
from quackmq.errors import InternalError, LimitReached, MemberFenced, UnknownMember
from quackmq.groups import limits


class StaticMembers:
    """`changes` grows with every change. `held_bytes` is about what it takes to keep this.

    `look_again_ms` is when to call `forget_remembered`: at once (0) if there are remembered ones
    and no clock has been seen yet.
    """

    def __init__(self, group: str, remembered: Mapping[str, str]) -> None:
        self._group = group
        self.ids: dict[str, str] = dict(remembered)
        #: Those of before the restart that are no members now.
        self._former: dict[str, str] = dict(remembered)
        self.changes = 0
        self.held_bytes = sum(_cost(*item) for item in self.ids.items())
        self.look_again_ms = 0 if remembered else None

    def restore(self, instance_id: str, member_id: str) -> None:
        """A remembered instance is a member again, under the id that it had."""
        if self._former.pop(instance_id, None) != member_id:
            raise InternalError(f"{member_id} is not kept as the static member {instance_id}")
        if not self._former:
            self.look_again_ms = None

    def check(self, member_id: str, instance_id: str | None) -> None:
        """Whether a member that calls itself so may be one: UnknownMember if nobody has that
        instance's place, MemberFenced if another one has it."""
        current = member_id if instance_id is None else self.ids.get(instance_id)
        if current is None:
            raise self.unknown(member_id)
        if current != member_id:
            raise self.fenced(member_id, str(instance_id))

    def is_between_ids(self, member_id: str, instance_id: str | None) -> bool:
        """Whether an instance that has to join anew, or has done so and was not told its new id,
        may call itself so: by no id, or by the one that it had before the last restart."""
        if instance_id is None:
            return False
        if not member_id:
            return instance_id in self.ids
        return self._former.get(instance_id) == member_id

    def unknown(self, member_id: str) -> UnknownMember:
        return UnknownMember(
            f"{member_id!r} is no member of group {self._group}: it never was, it left, or it was "
            "silent for too long; join anew"
        )

    def fenced(self, member_id: str, instance_id: str) -> MemberFenced:
        return MemberFenced(
            f"{member_id!r} is no longer {instance_id} of group {self._group}: another instance "
            "has taken its place"
        )

    def name(self, instance_id: str, member_id: str) -> None:
        """From now on the instance is this member. LimitReached if there are too many."""
        growth = _cost(instance_id, member_id)
        if instance_id in self.ids:
            growth -= _cost(instance_id, self.ids[instance_id])
        if growth > 0 and self.held_bytes + growth > limits.STATIC_MEMBER_BYTES:
            raise LimitReached("the group has as many static members as can be kept")
        self.ids[instance_id] = member_id
        self.held_bytes += growth
        self.changes += 1

    def unname(self, instance_id: str) -> None:
        self.held_bytes -= _cost(instance_id, self.ids.pop(instance_id))
        self.changes += 1

    def forget_remembered(self, now_ms: int, members: Container[str]) -> None:
        """Those of before a restart that did not come back in time are free to be taken."""
        if self.look_again_ms is None:
            return
        if self.look_again_ms == 0:
            self.look_again_ms = now_ms + shared_limits.SESSION_MAX_MS
        if now_ms < self.look_again_ms:
            return
        self.look_again_ms = None
        self._former.clear()
        for instance_id, member_id in list(self.ids.items()):
            if member_id not in members:
                self.unname(instance_id)


def _cost(instance_id: str, member_id: str) -> int:
    return len(ascii(instance_id)) + len(ascii(member_id)) + 8
