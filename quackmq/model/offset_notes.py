"""What the Python client and the broker agree on beyond the Kafka protocol, inside its own fields.

The client speaks plain Kafka, so that the same program runs against any cluster. Four things that
Kafka has no request for are said with what it has, and mean no more than a note to a cluster that
does not know them:

- **A subscription.** Who commits an offset with the note SUBSCRIBED subscribes the group's name to
  that topic: from then on the subscription is the broker's own, seen by every door, and holds what
  it has not read. UNSUBSCRIBED ends it. Where it is ended by another door while the group has
  members, their offsets get that note from the broker; a member that goes on reading commits over
  it. SUBSCRIBED_WITH_RECEIPTS makes one that leaves receipts, if it is new. Behind either stands
  where it begins (`subscriptions.subscribed_note`), to be listed. On another cluster the note just
  stays beside the offset, where the client finds it again.
- **A lease.** A note of ours that ends in `:for=MILLISECONDS` says for how long after this commit
  the subscription is to last if nothing more is committed; see `leased`.
- **A publisher's numbers.** A publisher with a durable name commits the number of what it publishes
  as the offset of a group of its own, in partition 0 of the topic, in one transaction with the
  records. The offset is the number plus one, as everywhere the next one wanted.
- **A message id** is made of what every cluster tells: see `quackmq.model.subscription`.
"""

from __future__ import annotations

import re
from typing import Final

from quackmq.errors import InvalidRequest

SUBSCRIBED: Final = "quackmq:subscribed"
#: Begins as the other, and is no more than that to whoever does not know it.
SUBSCRIBED_WITH_RECEIPTS: Final = f"{SUBSCRIBED}:receipts"
UNSUBSCRIBED: Final = "quackmq:unsubscribed"

#: No more digits than fit into 64 bits; what follows may be a byte 0.
_LEASE: Final = re.compile(r"quackmq:[a-z ]+:for=([0-9]{1,15})(?![0-9])")

#: Where subscriptions that leave receipts leave them: what each took, and when.
RECEIPTS_TOPIC: Final = "quackmq.receipts"

#: Begins the names of the groups that hold publishers' numbers.
PUBLISHER_PREFIX: Final = "publisher:"
#: Where in a topic they are held.
NUMBER_PARTITION: Final = 0
GREATEST_NUMBER: Final = 2**63 - 2


def note_of(metadata: str) -> str | None:
    """SUBSCRIBED or UNSUBSCRIBED, if that is what is noted beside an offset. confluent-kafka sends
    the byte 0 that ends a string in C along with it, and may read beyond the end of one."""
    return next((each for each in (SUBSCRIBED, UNSUBSCRIBED) if metadata.startswith(each)), None)


def wants_receipts(metadata: str) -> bool:
    """Whether what is noted beside an offset is SUBSCRIBED_WITH_RECEIPTS."""
    return metadata.startswith(SUBSCRIBED_WITH_RECEIPTS)


def leased(note: str, lease_ms: int) -> str:
    """Return the note with a lease: the subscription lasts for so long after its last commit."""
    return f"{note}:for={lease_ms}"


def lease_ms_of(metadata: str) -> int | None:
    """Return the lease that is noted beside an offset, if there is one."""
    found = _LEASE.match(metadata)
    return None if found is None else int(found[1])


def publisher_group(publisher: str) -> str:
    """The name under which a publisher's numbers are kept."""
    return f"{PUBLISHER_PREFIX}{publisher}"


def offset_of_number(number: int) -> int:
    if not 0 <= number <= GREATEST_NUMBER:
        raise InvalidRequest(f"{number} is no sequence: they go from 0 to {GREATEST_NUMBER}")
    return number + 1


def number_of_offset(offset: int) -> int | None:
    """None before the first."""
    return offset - 1 if offset > 0 else None
