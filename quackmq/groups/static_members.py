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
    """The instance ids of one group. `changes` grows with every change. `encoded_bytes` is about
    the size of the stored form.

    `next_cleanup_ms` is when to call `forget_remembered`. It is 0 at first if instances are
    remembered: the first call sets the time.
    """

    def __init__(self, group: str, remembered: Mapping[str, str]) -> None:
        self._group = group
        self.member_id_by_instance: dict[str, str] = dict(remembered)
        #: Instances from before the restart that are not members now.
        self._former_by_instance: dict[str, str] = dict(remembered)
        self.changes = 0
        self.encoded_bytes = sum(
            _encoded_bytes(*item) for item in self.member_id_by_instance.items()
        )
        self.next_cleanup_ms = 0 if remembered else None

    def restore(self, instance_id: str, member_id: str) -> None:
        """Make a remembered instance a member again, with its old id."""
        if self._former_by_instance.pop(instance_id, None) != member_id:
            raise InternalError(f"{member_id} is not the remembered static member {instance_id}")
        if not self._former_by_instance:
            self.next_cleanup_ms = None

    def check(self, member_id: str, instance_id: str | None) -> None:
        """Check that a request's member id and instance id belong together. Raises UnknownMember if
        nobody has that instance id, MemberFenced if another member has it."""
        if instance_id is None:
            return
        current_id = self.member_id_by_instance.get(instance_id)
        if current_id is None:
            raise self.unknown_error(member_id)
        if current_id != member_id:
            raise self.fenced_error(member_id, instance_id)

    def is_between_ids(self, member_id: str, instance_id: str | None) -> bool:
        """Return whether an instance sends no member id, or its id from before the last restart. It
        has to join again, or has joined and does not know its new id yet."""
        if instance_id is None:
            return False
        if not member_id:
            return instance_id in self.member_id_by_instance
        return self._former_by_instance.get(instance_id) == member_id

    def unknown_error(self, member_id: str) -> UnknownMember:
        """Return the error for a request of a member that the group does not have."""
        return UnknownMember(
            f"{member_id!r} is not a member of group {self._group}: it never joined, it left, or "
            "its session expired; join again"
        )

    def fenced_error(self, member_id: str, instance_id: str) -> MemberFenced:
        """Return the error for a request of a static member that was replaced."""
        return MemberFenced(
            f"{member_id!r} is no longer {instance_id} of group {self._group}: another instance "
            "has replaced it"
        )

    def set_member_id(self, instance_id: str, member_id: str) -> None:
        """Set the member id of an instance. Raises LimitReached if there are too many."""
        growth = _encoded_bytes(instance_id, member_id)
        if instance_id in self.member_id_by_instance:
            growth -= _encoded_bytes(instance_id, self.member_id_by_instance[instance_id])
        if growth > 0 and self.encoded_bytes + growth > limits.STATIC_MEMBER_BYTES:
            raise LimitReached(
                f"the ids of static members of group {self._group} exceed "
                f"{limits.STATIC_MEMBER_BYTES} bytes: remove some members"
            )
        self.member_id_by_instance[instance_id] = member_id
        self.encoded_bytes += growth
        self.changes += 1

    def remove_instance(self, instance_id: str) -> None:
        """Free an instance id."""
        self.encoded_bytes -= _encoded_bytes(
            instance_id, self.member_id_by_instance.pop(instance_id)
        )
        self.changes += 1

    def forget_remembered(self, now_ms: int, members: Container[str]) -> None:
        """Free the instance ids from before a restart whose members did not return in time."""
        if self.next_cleanup_ms is None:
            return
        if self.next_cleanup_ms == 0:
            self.next_cleanup_ms = now_ms + shared_limits.SESSION_MAX_MS
        if now_ms < self.next_cleanup_ms:
            return
        self.next_cleanup_ms = None
        self._former_by_instance.clear()
        for instance_id, member_id in list(self.member_id_by_instance.items()):
            if member_id not in members:
                self.remove_instance(instance_id)


def _encoded_bytes(instance_id: str, member_id: str) -> int:
    return len(ascii(instance_id)) + len(ascii(member_id)) + 8
