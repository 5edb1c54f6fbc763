"""The line protocol before `connect` is accepted: the first bad message ends the conversation."""

from __future__ import annotations

import pytest

from quackmq.errors import ProtocolError
from quackmq.protocols.line.codec.conversation import Conversation, State
from quackmq.protocols.line.codec.messages import Connect, Role, encode
from quackmq.serving import limits as serving_limits
from tests.kit.tables import each

CONVERSATION = b"pub 7 connect\nend\npub 7 topic 1\nend\ntopic 1 [Ducks win]\n"


@each(
    "stranger",
    [
        b"POST / HTTP/1.1\r\n",
        b"hello\n",
        b"\n",
        b"pub " + b"7" * 256 + b" connect\n",
        b"q" * 20_000 + b"\n",
        b"\x00",
        b"\x16\x03\x01",
        b"\xff",
        b"pub 7\x00",
    ],
)
def test_nothing_behind_a_strangers_first_bad_message_is_looked_at(stranger: bytes) -> None:
    conversation = Conversation()
    conversation.receive(stranger)
    with pytest.raises(ProtocolError, match="begin with pub ID connect or sub ID connect"):
        conversation.next_event()
    assert conversation.state is State.OVER
    conversation.receive(CONVERSATION)
    assert conversation.next_event() is None and conversation.unread_bytes == 0
    assert conversation.opening == stranger[: serving_limits.OPENING_BYTES]


def test_a_stranger_may_type_slowly_and_have_any_name_of_text() -> None:
    hello = encode(Connect(Role.PUB, "Düsentrieb🦆"))
    conversation = Conversation()
    for piece in (bytes([byte]) for byte in hello):
        assert conversation.next_event() is None
        conversation.receive(piece)
    assert conversation.next_event() == Connect(Role.PUB, "Düsentrieb🦆")
