"""`python -m tests.pubsub.planted BUG …` is `quackmq …` with one check left out.

Exactly once rests on a few comparisons. Whoever claims to test it shows that the test fails without
them:

    last-id     a get moves the cursor behind what was sent last, whatever id it names
    sequence    a put is added also if its publisher's number is held already
    key         a put is added also if its idempotency key was used already
"""

from __future__ import annotations

import sys
from itertools import count

from quackmq.broker.publish import messages
from quackmq.broker.subscriptions import pull as delivery
from quackmq.broker.subscriptions.pull_subscription import PullSubscription
from quackmq.model import subscription
from quackmq.model.offset_notes import number_before_offset
from quackmq.model.producer_state import FIRST_KEY_ID
from tests.real import small


def without_last_id() -> None:
    async def acknowledge(
        self: delivery.PullService, held: PullSubscription, place: object
    ) -> None:
        outstanding = held.progress.outstanding
        if outstanding is not None:
            await self._move_cursor(held, outstanding, 0)
            held.progress = subscription.acknowledge(held.progress, outstanding)

    delivery.PullService._acknowledge = acknowledge  # type: ignore[assignment,method-assign]


def without_sequence() -> None:
    """The last number is still told rightly: what is left out is the comparison."""
    held = messages.Messages._last_number

    async def last_sequence(
        self: messages.Messages, caller: object, topic_name: str, publisher: str
    ) -> int | None:
        topic = self._topics.named(topic_name)
        return number_before_offset(held(self, topic, messages._group_of_publisher(publisher)))

    messages.Messages.last_sequence = last_sequence  # type: ignore[method-assign]
    messages.Messages._last_number = lambda self, topic, group: 0  # type: ignore[method-assign]


def without_key() -> None:
    others = count(FIRST_KEY_ID)
    messages._key_producer_id = lambda topic, key: next(others)


BUGS = {"last-id": without_last_id, "sequence": without_sequence, "key": without_key}


def main() -> int:
    BUGS[sys.argv.pop(1)]()
    return small.main()


if __name__ == "__main__":
    sys.exit(main())
