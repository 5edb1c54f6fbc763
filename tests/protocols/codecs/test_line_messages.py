"""The messages of the line protocol are lines, and lines take bounded memory."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quackmq.errors import InvalidRequest, RecordTooLarge
from quackmq.protocols.line import limits as line_limits
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
    parse,
)
from tests.kit.tables import each
from tests.protocols.codecs.line_messages import (
    CALM,
    NEWS,
    lines_of,
    messages,
)

#: Messages of the document, and what our framing makes of entries.
MESSAGES = [
    (b"pub 7 connect", Connect(Role.PUB, "7")),
    (b"sub daisy connect", Connect(Role.SUB, "daisy")),
    (b"end", Word.END),
    (b"pub 7 topic 1", Choose(Role.PUB, "7", "1")),
    (b"sub daisy topic ducks.news", Choose(Role.SUB, "daisy", "ducks.news")),
    (b"topic 1 [Ducks win]", NEWS),
    (b"topic 1 []", Entry("1", b"")),
    (b"topic 1 [ a  b ]", Entry("1", b" a  b ")),
    (b"topic 1 [[a] [b]]", Entry("1", b"[a] [b]")),
    (b"topic 1 []]", Entry("1", b"]")),
    (b"topic [ [ [a]", Entry("[", b" [a")),
    (rb"topic 1 [two\nlines\r\0\\n]", Entry("1", b"two\nlines\r\0\\n")),
    (b"topic 1 [\xff\xfe\x1b]", Entry("1", b"\xff\xfe\x1b")),
    (b"accept", Word.ACCEPT),
    (b"reject", Word.REJECT),
    (b"reject topic_full: topic 1 is full", Rejection("topic_full: topic 1 is full")),
    (b"successful", Word.SUCCESSFUL),
    (b"retry", Word.RETRY),
    (b"terminate", Word.TERMINATE),
]


@each(("text", "message"), MESSAGES)
def test_a_message_is_a_line_and_a_line_a_message(text: bytes, message: Message) -> None:
    assert encode(message) == text + b"\n"
    assert parse(text) == message


@CALM
@given(messages)
def test_any_message_comes_back_as_it_was_from_one_plain_line(message: Message) -> None:
    written = encode(message)
    assert written.endswith(b"\n") and not {*b"\n\r\0"} & {*written[:-1]}
    assert lines_of(written) == [written[:-1]]
    assert parse(written[:-1]) == message


def test_a_carriage_return_and_a_zero_are_taken_as_they_are_and_one_may_end_a_line() -> None:
    assert lines_of(b"topic 1 [a\rb\0]\r\nend\r\n\r\n") == [b"topic 1 [a\rb\0]", b"end", b""]
    assert parse(b"topic 1 [a\rb\0\r]") == Entry("1", b"a\rb\0\r")


@each(
    ("text", "said"),
    [
        (b"", "no message"),
        (b"quack", "no message"),
        (b"END", "no message"),
        (b"end ", "no message"),
        (b" end", "no message"),
        (b"pub  connect", "1 to 255 bytes"),
        (b"pub 1  connect", "no message"),
        (b"pub 1 connect now", "no message"),
        (b"pub 1 topic", "no message"),
        (b"pub 1 topic ", "1 to 249 bytes"),
        (b"pub 1 topic 1 2", "no message"),
        (b"pub " + b"d" * 256 + b" connect", "1 to 255 bytes, not 256"),
        (b"pub 1 topic " + b"d" * 250, "1 to 249 bytes, not 250"),
        (b"sub \xff connect", "not UTF-8"),
        (b"sub \x1b[2J connect", "control characters"),
        (b"topic 1", "write topic K"),
        (b"topic 1 quack", "write topic K"),
        (b"topic 1 [quack", "write topic K"),
        (b"topic 1 quack]", "write topic K"),
        (b"topic 1 2 [quack]", "write topic K"),
        (b"topic  [quack]", "1 to 249 bytes"),
        (b"topic [quack]", "write topic K"),
        (b"topic 1 [", "write topic K"),
        (rb"topic 1 [\x]", "a backslash must precede"),
        (b"topic 1 [\\]", "a backslash must precede"),
    ],
)
def test_what_is_no_message_is_said_to_be_none(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        parse(text)


def test_the_size_of_an_entry_counts_its_bytes_and_not_their_writing() -> None:
    assert parse(rb"topic 1 [\n\n\n]", entry_bytes=3) == Entry("1", b"\n\n\n")
    with pytest.raises(RecordTooLarge, match="4 bytes; the limit is 3"):
        parse(b"topic 1 [abcd]", entry_bytes=3)


@CALM
@given(st.binary(max_size=60) | st.sampled_from([text for text, _ in MESSAGES]))
@example(b"reject \0 a")
@example(b"reject " + b"a" * (line_limits.LINE_REASON_BYTES - 1) + b" b")
def test_any_line_is_a_message_or_an_error_of_ours(text: bytes) -> None:
    try:
        message = parse(text)
    except InvalidRequest:
        return
    assert parse(encode(message)[:-1]) == message


def test_a_line_too_long_is_not_kept() -> None:
    lines = Lines(entry_bytes=16)
    for _ in range(100):
        lines.receive(b"q" * 1_000)
        assert lines.next_line() is None
        assert (
            lines.unread_bytes == 0 and len(lines._partial_line) <= line_limits.LINE_HEAD_BYTES + 32
        )
    assert lines.has_pending_bytes
    lines.receive(b"\nend\n")
    assert isinstance(lines.next_line(), RecordTooLarge)
    assert lines.next_line() == b"end"
    assert not lines.has_pending_bytes


@pytest.mark.parametrize("cut", [0, 1, 1_000, 1_055, 1_056])
def test_a_line_is_taken_up_to_its_bound_wherever_it_is_cut(cut: int) -> None:
    most = line_limits.LINE_HEAD_BYTES + 32
    for size in (most, most + 1):
        reader = Lines(entry_bytes=16)
        reader.receive(b"q" * cut)
        assert reader.next_line() is None
        reader.receive(b"q" * (size - cut) + b"\nend\n")
        found = reader.next_line()
        assert found == b"q" * most if size == most else isinstance(found, RecordTooLarge)
        assert reader.next_line() == b"end", "nothing is left of it"
