"""The reason behind `reject` stays on its line and in its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.codec.messages import Lines, Rejection, encode, parse


@given(st.text(max_size=2_000))
def test_any_reason_is_one_line_within_its_bound(reason: str) -> None:
    line = encode(Rejection(f"code: {reason}"))
    lines = Lines(entry_bytes=1)
    lines.receive(line)
    read = lines.next_line()
    assert isinstance(read, bytes) and read == line[:-1]
    message = parse(read)
    assert isinstance(message, Rejection)
    assert message.reason.startswith("code:") and message.reason.isprintable()
    assert len(message.reason.encode()) <= line_limits.LINE_REASON_BYTES


def test_a_long_reason_is_cut_between_two_characters() -> None:
    whole, cut = (
        "ä" * (line_limits.LINE_REASON_BYTES // 2),
        "x" + "ä" * line_limits.LINE_REASON_BYTES,
    )
    assert encode(Rejection(whole)) == b"reject %b\n" % whole.encode()
    assert encode(Rejection(cut)) == b"reject %b\n" % ("x" + whole[1:]).encode()
