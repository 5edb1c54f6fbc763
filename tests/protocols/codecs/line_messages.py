"""Messages, lines and conversations of the line protocol, for its codec's tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import RecordTooLarge
from quackmq.protocols.line.codec.conversation import (
    TABLE,
    Conversation,
    State,
    kind_of,
)
from quackmq.protocols.line.codec.messages import (
    Choose,
    Connect,
    Entry,
    Lines,
    Message,
    Rejection,
    Role,
    Word,
    encode,
)

NEWS = Entry("1", b"Ducks win")

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
topics = st.text("abcXYZ019._-[]", min_size=1, max_size=20)
contents = st.binary(max_size=60) | st.text("[]\\nr0 \n\r\0", max_size=20).map(str.encode)
roles = st.sampled_from(Role)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Connect, roles, names),
    st.builds(Choose, roles, names, topics),
    st.builds(Entry, topics, contents),
    st.sampled_from(Word),
    st.builds(Rejection, names),
)

#: Machines can be busy.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

#: The messages of a peer from the first one to the end of its topics.
HELLO: dict[Role, list[Message]] = {
    role: [Connect(role, "7"), Word.END, Choose(role, "7", "1"), Word.END] for role in Role
}
#: The shortest way into each state.
WAYS: dict[State, list[Message]] = {
    State.NEW: [],
    State.PUB_NAMED: HELLO[Role.PUB][:1],
    State.PUB_CHOOSING: HELLO[Role.PUB][:3],
    State.PUBLISHING: HELLO[Role.PUB],
    State.SUB_NAMED: HELLO[Role.SUB][:1],
    State.SUB_CHOOSING: HELLO[Role.SUB][:3],
    State.LISTENING: HELLO[Role.SUB],
    State.DELIVERING: HELLO[Role.SUB],
    State.OVER: [Word.TERMINATE],
}


def lines_of(data: bytes) -> list[bytes | RecordTooLarge]:
    reader = Lines()
    reader.receive(data)
    found = []
    while (one := reader.next_line()) is not None:
        found.append(one)
    return found


def first_answer(state: State, message: Message) -> Word:
    return TABLE[state][kind_of(message)].answers[0]


def in_state(state: State, entry_bytes: int = limits.LINE_ENTRY_BYTES) -> Conversation:
    """A conversation that has come so far, each message having got its first answer."""
    conversation = Conversation(entry_bytes)
    for message in WAYS[state]:
        conversation.receive(encode(message))
        assert conversation.next_event() == message
        conversation.answer(first_answer(conversation.state, message))
    if state is State.DELIVERING:
        conversation.deliver(NEWS)
    assert conversation.state is state
    return conversation
