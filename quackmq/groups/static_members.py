"""The member id of each instance id of a group. Pure.

A static member is identified by its instance id. A request with that instance id and another member
id is fenced. After a restart the members are restored (`restore`). If they were too many to be
stored, they are unknown, but their ids are remembered here for as long as a session may last, so
that fenced members stay fenced.

An unknown static member that joins again gets a new id. Requests that its client sends meanwhile
have no member id, or after a restart perhaps the old one (`is_between_ids`). The client is told to
try again. Fencing it would be wrong: librdkafka then stops with a fatal error, although there is no
other instance. Answering "unknown" would make it join once more, and so fence its own join. This
exception weakens no fencing: a replaced member always names its id.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from quackmq import limits as shared_limits
from quackmq.errors import InternalError, LimitReached, MemberFenced, UnknownMember
from quackmq.groups import limits


class StaticMembers:
    """`changes` grows with every change. `held_bytes` is about the size of the stored form.

    `look_again_ms` is when to call `forget_remembered`: at once (0) if instances are remembered and
    no time has been seen yet.
    """

    def __init__(self, group: str, remembered: Mapping[str, str]) -> None:
        self._group = group
        self.ids: dict[str, str] = dict(remembered)
        #: Instances from before the restart that are not members now.
        self._former: dict[str, str] = dict(remembered)
        self.changes = 0
        self.held_bytes = sum(_cost(*item) for item in self.ids.items())
        self.look_again_ms = 0 if remembered else None

    def restore(self, instance_id: str, member_id: str) -> None:
        """Make a remembered instance a member again, with its old id."""
        if self._former.pop(instance_id, None) != member_id:
            raise InternalError(f"{member_id} is not the remembered static member {instance_id}")
        if not self._former:
            self.look_again_ms = None

    def check(self, member_id: str, instance_id: str | None) -> None:
        """Check that a request's member id and instance id belong together. Raises UnknownMember if
        nobody has that instance id, MemberFenced if another member has it."""
        current = member_id if instance_id is None else self.ids.get(instance_id)
        if current is None:
            raise self.unknown(member_id)
        if current != member_id:
            raise self.fenced(member_id, str(instance_id))

    def is_between_ids(self, member_id: str, instance_id: str | None) -> bool:
        """Return whether an instance may send this member id because it has to join again, or has
        joined and does not know its new id yet: no id, or its id before the last restart."""
        if instance_id is None:
            return False
        if not member_id:
            return instance_id in self.ids
        return self._former.get(instance_id) == member_id

    def unknown(self, member_id: str) -> UnknownMember:
        return UnknownMember(
            f"{member_id!r} is not a member of group {self._group}: it never joined, it left, or "
            "its session expired; join again"
        )

    def fenced(self, member_id: str, instance_id: str) -> MemberFenced:
        return MemberFenced(
            f"{member_id!r} is no longer {instance_id} of group {self._group}: another instance "
            "has replaced it"
        )

    def name(self, instance_id: str, member_id: str) -> None:
        """Set the member id of an instance. Raises LimitReached if there are too many."""
        growth = _cost(instance_id, member_id)
        if instance_id in self.ids:
            growth -= _cost(instance_id, self.ids[instance_id])
        if growth > 0 and self.held_bytes + growth > limits.STATIC_MEMBER_BYTES:
            raise LimitReached("the group has the greatest number of static members")
        self.ids[instance_id] = member_id
        self.held_bytes += growth
        self.changes += 1

    def unname(self, instance_id: str) -> None:
        self.held_bytes -= _cost(instance_id, self.ids.pop(instance_id))
        self.changes += 1

    def forget_remembered(self, now_ms: int, members: Container[str]) -> None:
        """Free the instance ids from before a restart whose members did not return in time."""
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
