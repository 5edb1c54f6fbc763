"""`getentry` and its answers as lines, and in a conversation (Q5)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import InvalidRequest
from quackmq.protocols.line.codec.conversation import State
from quackmq.protocols.line.codec.messages import Message, Word, encode, parse
from quackmq.protocols.line.codec.polling import GetEntry, NoEntry, NumberedEntry, publisher_word
from tests.kit.tables import each
from tests.protocols.codecs.line_messages import CALM, contents, in_state, lines_of, names, topics

ENTRY = NumberedEntry("1", 18, 1794811566129, "donald", b"Ducks win")
MESSAGES: list[tuple[bytes, Message]] = [
    (b"getentry 1 0", GetEntry("1", 0)),
    (b"getentry ducks.news 17 2", GetEntry("ducks.news", 17, 2)),
    (b"entry 1 18 1794811566129 donald [Ducks win]", ENTRY),
    (rb"entry 1 18 -1 - [ [a] \n ]", NumberedEntry("1", 18, -1, "-", b" [a] \n ")),
    (b"entry 1 18 0 donald []", NumberedEntry("1", 18, 0, "donald", b"")),
    (b"entry 1 18 0 donald 5000", NumberedEntry("1", 18, 0, "donald", 5_000)),
    (b"entry 1 -18", NoEntry("1", -18)),
    (b"entry 1 0", NoEntry("1", 0)),
]
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(GetEntry, topics, st.integers(0, 2**63 - 1), st.integers(0, 9)),
    st.builds(
        NumberedEntry,
        topics,
        st.integers(1, 2**63 - 1),
        st.integers(-1, 2**63 - 1),
        names,
        contents | st.integers(0, 2**24),
    ),
    st.builds(NoEntry, topics, st.integers(1 - 2**63, 0)),
)


@each(("text", "message"), MESSAGES)
def test_a_message_is_a_line_and_a_line_a_message(text: bytes, message: Message) -> None:
    assert encode(message) == text + b"\n"
    assert parse(text) == message


@CALM
@given(messages)
def test_any_message_comes_back_as_it_was_from_one_plain_line(message: Message) -> None:
    written = encode(message)
    assert lines_of(written) == [written[:-1]]
    assert parse(written[:-1]) == message


@each(
    ("text", "said"),
    [
        (b"getentry 1", "write getentry K LAST"),
        (b"getentry 1 2 3 4", "write getentry K LAST"),
        (b"getentry  2", "1 to 249 bytes"),
        (b"getentry 1 -1", "0 or more"),
        (b"getentry 1 0 -1", "0 or more"),
        (b"getentry 1  5", "the number is empty; words are separated by one space"),
        (b"getentry  1 5", "not 0; words are separated by one space"),
        (b"getentry 1 x", "not a whole number"),
        (b"getentry 1 007", "not a whole number"),
        (b"getentry 1 -0", "not a whole number"),
        (b"getentry 1 " + b"9" * 20, "not a whole number"),
        (b"entry 1", "no answer to getentry"),
        (b"entry 1 5", "no answer to getentry"),
        (b"entry 1 -5 0 donald [a]", "no answer to getentry"),
        (b"entry 1 5 0 donald [a", "not a whole number"),
        (b"entry 1 5 0 donald [", "not a whole number"),
        (rb"entry 1 5 0 donald [\x]", "a backslash must precede"),
    ],
)
def test_a_line_that_is_no_message_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        parse(text)


@each("state", [State.LISTENING, State.DELIVERING])
@each("answer", [ENTRY, NoEntry("1", -17)])
def test_an_answer_with_an_entry_changes_no_state(
    state: State, answer: NumberedEntry | NoEntry
) -> None:
    conversation = in_state(state)
    conversation.receive(b"getentry 1 17\nterminate\n")
    assert conversation.next_event() == GetEntry("1", 17)
    assert conversation.next_event() is None, "its answer comes first"
    assert conversation.answer_entry(answer) == encode(answer)
    assert conversation.state is state
    assert conversation.next_event() is Word.TERMINATE


def test_a_publisher_without_a_proper_id_is_a_dash() -> None:
    assert publisher_word("donald") == "donald"
    for improper in ("", "two words", "line\nfeed", "x" * 256, "\udc80\x00"):
        assert publisher_word(improper) == "-"
