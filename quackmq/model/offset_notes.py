"""Notes that the Python client puts beside committed offsets: conventions on top of plain Kafka.

The client speaks plain Kafka, so that the same program runs against any cluster. Four things for
which Kafka has no request are expressed in existing fields. A cluster that does not know these
conventions just stores them:

- **A subscription.** Committing an offset with the note SUBSCRIBED subscribes the group's name to
  that topic. From then on the broker has this subscription; every protocol shows it, and retention
  waits for it. UNSUBSCRIBED ends it. If another protocol ends it while the group has members, the
  broker sets that note beside their offsets; a member that continues to read commits over it.
  SUBSCRIBED_WITH_RECEIPTS creates a subscription that writes receipts. The start position follows
  either note (`subscription.subscribed_note`), so that it can be listed. On another cluster the
  note stays beside the offset, where the client finds it again.
- **A lease.** A note that ends in `:for=MILLISECONDS` limits how long the subscription lasts after
  this commit if no other commit follows; see `add_lease`.
- **A publisher's sequence numbers.** A publisher with a durable name has a group of its own. It
  commits its sequence number as this group's offset in partition 0 of the topic, in one transaction
  with the records. As everywhere, the offset is the next one to come: the number plus one.
- **A message id** consists of facts that every cluster provides: see `quackmq.model.subscription`.
"""

from __future__ import annotations

import re
from typing import Final

from quackmq.errors import InvalidRequest

SUBSCRIBED: Final = "quackmq:subscribed"
#: Begins with SUBSCRIBED, so that older brokers still subscribe.
SUBSCRIBED_WITH_RECEIPTS: Final = f"{SUBSCRIBED}:receipts"
UNSUBSCRIBED: Final = "quackmq:unsubscribed"

#: At most 15 digits, which fit into 64 bits. A zero byte may follow (see `find_note`).
_LEASE: Final = re.compile(r"quackmq:[a-z ]+:for=([0-9]{1,15})(?![0-9])")

#: The topic to which subscriptions write receipts: what each consumed, and when.
RECEIPTS_TOPIC: Final = "quackmq.receipts"

#: Prefix of the groups that hold publishers' sequence numbers.
PUBLISHER_PREFIX: Final = "publisher:"
#: The partition in which they are committed.
NUMBER_PARTITION: Final = 0
#: The committed offset is one more, and must fit into a signed 64-bit number.
GREATEST_NUMBER: Final = 2**63 - 2


def find_note(metadata: str) -> str | None:
    """Return SUBSCRIBED or UNSUBSCRIBED if an offset's metadata begins so, else None. The metadata
    may have a tail: confluent-kafka sends the zero byte that ends a C string, and may read beyond.
    """
    return next((each for each in (SUBSCRIBED, UNSUBSCRIBED) if metadata.startswith(each)), None)


def wants_receipts(metadata: str) -> bool:
    """Return whether an offset's metadata begins with SUBSCRIBED_WITH_RECEIPTS."""
    return metadata.startswith(SUBSCRIBED_WITH_RECEIPTS)


def add_lease(note: str, lease_ms: int) -> str:
    """Return the note with a lease: the subscription ends `lease_ms` after its last commit."""
    return f"{note}:for={lease_ms}"


def parse_lease_ms(metadata: str) -> int | None:
    """Return the lease in an offset's metadata, or None."""
    match = _LEASE.match(metadata)
    return None if match is None else int(match[1])


def publisher_group(publisher: str) -> str:
    """Return the name of the group that holds a publisher's sequence numbers."""
    return f"{PUBLISHER_PREFIX}{publisher}"


def offset_for_number(number: int) -> int:
    """Return the offset that a publisher commits for a sequence number. Raises InvalidRequest."""
    if not 0 <= number <= GREATEST_NUMBER:
        raise InvalidRequest(f"invalid sequence {number}: use 0 to {GREATEST_NUMBER}")
    return number + 1


def number_before_offset(offset: int) -> int | None:
    """Return the sequence number that a committed offset stands for; None before the first."""
    return offset - 1 if offset > 0 else None
