"""The conversations that docs/line.md shows go as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from quackmq.protocols.line.codec.conversation import Conversation, Event, Refused, State
from quackmq.protocols.line.codec.escapes import describe_error
from quackmq.protocols.line.codec.messages import Entry, Rejection, Word, parse
from quackmq.protocols.line.codec.polling import EntryAnswer

ROOT = Path(__file__).resolve().parents[3]


def test_the_conversations_of_the_page_go_as_they_stand_there() -> None:
    page = (ROOT / "docs" / "line.md").read_text()
    blocks = re.findall(r"(?:^    [<>] .*\n)+", page, re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        conversation = Conversation()
        event: Event | None = None
        for row in block.splitlines():
            side, text = row[4], row[6:].encode()
            if side == ">":
                conversation.receive(text + b"\n")
                event = conversation.next_event()
                assert event is not None
                continue
            said = parse(text)
            if isinstance(event, Refused):
                assert said == Rejection(describe_error(event.error))
            elif isinstance(said, Entry):
                assert conversation.deliver(said) == text + b"\n"
            elif isinstance(said, EntryAnswer):
                assert conversation.answer_entry(said) == text + b"\n"
            else:
                assert isinstance(said, Word)
                assert conversation.answer(said) == text + b"\n"
        assert conversation.state is State.OVER
